"""Decode steps of draft models, in chains and branches (see `scene`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from fakes.backends import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    decode_batch,
    layers,
    mlp_padded,
    pat_backend,
    runner,
    server_arguments,
)
from scene import ROWS, DefaultSteps, Scene, grown
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_trees import TREE_KINDS

from sglang_pat.sglang.speculative import attach
from sglang_pat.sglang.start import hooks
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

STEPS = 3
TOPK = {"chains": 1, "branches": 2}
chains_and_branches = pytest.mark.parametrize("topk", TOPK.values(), ids=TOPK)
every_tree = pytest.mark.parametrize("kind", TREE_KINDS)


class Drafting(Scene):
    """A scene with a draft model that decodes."""

    def __init__(
        self,
        kind: str = TREE_KINDS[0],
        *,
        topk: int = 1,
        is_checked: bool = True,
        graphs: tuple[int, ...] = (),
        **change: Any,
    ) -> None:
        """graphs: sizes of the captured graphs."""
        options = {"drafts": STEPS + 2, "is_checked": is_checked, "speculative_eagle_topk": topk}
        super().__init__(kind, **options)
        self.round = self.rounds(STEPS, **change)
        if graphs:
            self.round.reserve()
        for each in graphs:
            self.round.capture(each)

    @property
    def calls(self) -> list[str]:
        """The calls of the default backend."""
        calls: list[str] = self.round.backend.calls
        return calls


@chains_and_branches
@every_tree
def test_each_step_of_a_round_reads_one_token_more(kind: str, topk: int) -> None:
    """Each step adds a token of the request, or of the branch."""
    scene = Drafting(kind, topk=topk, graphs=(4, 2))
    lens = [25, 31]
    # Different numbers of accepted tokens, in padded and full graphs and in eager rounds.
    for accepted, graph in (([0, 0], 2), ([1, 3], 4), ([2, 1], 0), ([41, 41], 2), ([1, 1], 0)):
        lens = grown(lens, accepted)
        view = scene.round.step(lens, graph)
        scene.round.assert_exact(view, lens)
        if topk == 1:
            scene.round.assert_padding_is_zero(view, 2)


def test_a_graph_writes_the_lengths_of_all_steps() -> None:
    scene = Drafting(graphs=(4,))
    captured = inside.round_lengths(scene.round.backend)
    view = scene.round.view([25, 31], 4)
    scene.round.backend.init_forward_metadata_out_graph(view)
    assert captured.tolist() == [[2] * 4, [3] * 4, [4] * 4]  # lengths at the capture
    scene.round.backend.init_forward_metadata_in_graph(view)
    assert inside.round_lengths(scene.round.backend) is captured
    # The plan leaves padding out.
    assert captured.tolist() == [[26, 32, 2, 2], [27, 33, 3, 3], [28, 34, 4, 4]]


def test_a_graph_that_does_not_is_told_the_lengths_and_never_repeated() -> None:
    # Some runners capture without first asking the backend.
    scene = Drafting(is_checked=False)
    scene.round.reserve(2)
    for lens in ([25, 31], [26, 33]):
        view = scene.round.view(lens, 2)
        scene.round.prepare(view, writes=False)
        round_lens = inside.round_lengths(scene.round.backend)
        assert round_lens[2].tolist() == [n + 3 for n in lens]
        scene.round.assert_exact(view, lens)
    assert scene.round.num_repeated == 0


def test_one_plan_serves_all_steps_of_rounds_in_which_requests_grow() -> None:
    scene = Drafting()
    scene.round.reserve(2)
    before, lens = scene.counters, [25, 31]
    for accepted in ([0, 0], [1, 3], [3, 1], [2, 2]):
        lens = grown(lens, accepted)
        scene.round.step(lens, 2)
    assert before["draft"] == {"steps": 0, "rows": 0, "plans_built": 0, "plans_reused": 0}
    after = scene.counters
    steps = 4 * STEPS
    assert after["draft"] == {
        "steps": steps,
        "rows": steps * 2,
        "plans_built": 1,
        "plans_reused": 3,
    }
    # Private reads of each step, plus one read of the prefix for both requests.
    alone = sum(
        each + 2 * step for each in (25 + 31, 26 + 34, 29 + 35, 31 + 37) for step in (1, 2, 3)
    )
    shared = alone - steps * 20
    assert after["draft_kv_tokens"] == {
        "query_centric": alone,
        "planned": shared,
        "lower_bound": shared,
    }
    assert after["plans_built"] == before["plans_built"] == 0  # of the served model


def test_other_requests_are_planned_anew() -> None:
    scene = Drafting()
    scene.round.step([25, 31])
    scene.scheduled.reqs, scene.rows = scene.reqs[1:], ROWS[1:]
    scene.round.assert_exact(scene.round.step([33]), [33], requests=[0])
    assert scene.counters["draft"]["plans_built"] == 2


def test_tokens_of_a_step_are_stored_before_it_attends() -> None:
    scene, lens = Drafting(), [25, 31]
    view = scene.round.step(lens)
    for step in range(STEPS):
        slots = [int(scene.table[row, n + step]) for row, n in zip(ROWS, lens, strict=True)]
        view.out_cache_loc = torch.tensor(slots)
        k, v = (torch.randn(2, KV_HEADS, HEAD_DIM) for _ in range(2))
        scene.round.assert_exact(view, lens, layers=[1], steps=[step], kv=(k, v))
        assert torch.equal(scene.round.runner.token_to_kv_pool.keys[1][slots], k)


@pytest.mark.parametrize("graph", [0, 2, 4])
def test_rows_that_mlp_synchronisation_adds_are_nothing(graph: int) -> None:
    """SGLang prepares a round before it pads its steps' tokens."""
    scene = Drafting(is_checked=False, graphs=(graph,) if graph else ())
    for more_rows in range(1, 8):
        lens = [25 + more_rows, 31 + 2 * more_rows]
        view = scene.round.step(lens, graph)
        padded = mlp_padded(view, scene.served.backend, view.batch_size + more_rows)
        scene.round.assert_exact(padded, lens)
        scene.round.assert_padding_is_zero(padded, 2)
    assert scene.round.num_repeated == (6 if graph else 0)


def test_an_idle_rank_plans_nothing() -> None:
    scene = Drafting()
    scene.round.backend.init_forward_metadata(decode_batch([], [], []))
    assert scene.counters["draft"]["steps"] == 0


# --- branches ---


def test_a_larger_round_without_a_graph_leaves_graphs_what_they_read() -> None:
    scene = Drafting(topk=2)
    scene.round.reserve(1)
    held = []
    for _ in range(2):
        scene.round.capture(1)
        held.append(scene.round.step_type.extra_kv.keys(None, 2)[1].data_ptr())
        scene.round.assert_exact(scene.round.step([25, 31]), [25, 31])
    assert held[0] == held[1]


def test_graphs_of_all_sizes_read_biases_that_stay() -> None:
    scene = Drafting(topk=2)
    scene.round.reserve()
    places = []
    for graph in (1, 2, 4):  # graphs of 1 and 4 use the same buffer in any order of capture
        scene.round.capture(graph)
        places.append(scene.round.step_type.extra_kv.keys(None, graph * 2)[1].data_ptr())
    assert len({*places}) == 1


# --- the default backend ---


def test_the_default_backend_is_prepared_until_all_layers_have_run() -> None:
    scene = Drafting()
    for length, layer in ((25, 0), (26, 1), (27, 0)):
        scene.round.attend(scene.round.step([length, 31]), layer)
    assert scene.calls == ["eager", "eager"]


def test_graphs_do_without_the_default_backend() -> None:
    scene = Drafting(graphs=(4,))
    # The first warm-up shows that the default backend decodes nothing.
    assert scene.calls == ["graphs of 4 rows", "capture", "in graph"]
    scene.round.capture(2)
    scene.round.step([25, 31], 2)
    assert len(scene.calls) == 3


def test_layers_that_pat_does_not_do_are_the_default_backends() -> None:
    scene = Drafting(model=layers(sliding_window_size=8), graphs=(4,))
    (_, second, _) = scene.round.backend.attn_backends
    for calls in (scene.calls, second.calls):
        calls.clear()
    view = scene.round.step([25, 31], 4)
    assert scene.calls == ["replay", "in graph"]
    scene.round.assert_exact(view, [25, 31], layers=[0])
    assert scene.round.attend(view, 1, 1)[1].isinf().all()
    assert second.calls == ["decode layer 1"]
    assert inside.server_info()["draft_model"]["default_layers"] == {
        "sliding window 8 of a draft model": 1
    }


def test_a_draft_model_has_a_geometry_of_its_own() -> None:
    layer = RadixAttention(2 * QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
    scene = Drafting(model=torch.nn.ModuleList([layer]))
    scene.round.assert_exact(scene.round.step([25, 31]), [25, 31])


def test_without_speculation_no_draft_model_is_awaited() -> None:
    pat_backend(runner())
    assert inside.awaits_draft_model() is None
    scene = Drafting()
    assert inside.awaits_draft_model() is scene.served.planner
    pat_backend(runner())  # another one, built later in the process
    assert type(scene.rounds().backend) is DefaultSteps


def test_a_model_that_pat_does_not_decode_has_drafts_of_the_default_backend() -> None:
    arguments = server_arguments(
        speculative_algorithm="STANDALONE", speculative_num_draft_tokens=4, enable_mis=True
    )
    pat_backend(runner(server_args=arguments))
    assert inside.awaits_draft_model() is None


def test_the_hook_is_on_the_factory_of_sglang() -> None:
    """A round of one step needs no backend."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    scene = Drafting()
    hooks.check_hooks(attach._HOOKS)
    factory = SimpleNamespace(draft_model_runner=scene.round.runner, speculative_num_steps=1)
    assert DraftBackendFactory.create_decode_backend(factory) is None
    assert attach._after_create_decode_backend(None, factory) is None


@pytest.mark.parametrize("given", [{"sinks": None}, {"rope": None}])
def test_arguments_without_a_value_are_nothing(given: dict[str, Any]) -> None:
    scene = Drafting()
    scene.round.assert_exact(scene.round.step([25, 31]), [25, 31], **given)


def test_a_layer_that_is_passed_more_is_left_to_the_default_backend() -> None:
    scene = Drafting()
    view = scene.round.step([25, 31])
    assert scene.round.attend(view, rope=1)[1].isinf().all()
    assert inside.server_info()["draft_model"]["default_layers"] == {"the argument rope": 1}
    scene.round.assert_exact(view, [25, 31], layers=[1])
    scene.round.step([25, 31])
    assert scene.calls == ["eager", "eager"]
    scene.round.attend(view, 1, rope=1)  # then pat decodes no layer
    scene.round.step([25, 31])
    assert scene.calls == ["eager"] * 3


def test_graphs_with_a_layer_of_pat_are_planned_after_all_layers_fell_back() -> None:
    """Kernels of such graphs read the plan in each replay, even if eager rounds fell back."""
    scene = Drafting(model=layers(sliding_window_size=8), graphs=(4,))
    assert scene.round.attend(scene.round.step([21, 30]), rope=1)[1].isinf().all()
    assert not inside.layer_support(scene.round.backend).shapes
    scene.round.step([25, 31], 4)
    assert inside.plans(scene.round.backend).main.seq_lens.tolist() == [26, 32, 0, 0]


def test_a_layer_that_was_not_found_is_left_to_the_default_backend() -> None:
    """The layer falls back in the round that shows it, and in all later rounds."""
    scene = Drafting()
    inside.layer_support(scene.round.backend).shapes.pop(1)
    view = scene.round.step([25, 31])
    scene.round.assert_exact(view, [25, 31], layers=[0])
    assert scene.round.attend(view, 1)[1].isinf().all()
    told = inside.server_info()["draft_model"]["default_layers"]
    assert told == {"a layer that was not found in the model": 1}
    scene.round.step([25, 31])
    assert scene.calls == ["eager", "eager"]


def test_an_argument_that_comes_too_late_is_an_error() -> None:
    scene = Drafting()
    view = scene.round.step([25, 31])
    for layer in range(2):
        scene.round.attend(view, layer)
    scene.round.prepare(view)
    assert scene.calls == ["eager"]
    with pytest.raises(
        RuntimeError, match="layer 0 of the draft model came too late: the argument rope"
    ):
        scene.round.attend(view, 0, 1, rope=1)


def test_a_model_stores_no_kv_by_itself_where_pat_attends() -> None:
    scene = Drafting(model=layers(sliding_window_size=8))
    (backend, *_) = scene.round.backend.attn_backends
    assert backend.get_fused_kv_write_buffers(scene.round.runner.model[0], None) is None


# --- whose steps they are ---


def test_a_draft_models_batches_are_noted_apart() -> None:
    scene = Drafting()
    first, second = (
        request_tracker.requests_of(scene.round.view(lens)) for lens in ([25, 31], [26, 32])
    )
    assert first is not None
    assert second is not None
    assert second.reqs is first.reqs
    assert first.reqs == scene.reqs
    # Draft steps do not change the request tracker.
    assert not REQUEST_TRACKER.is_within_step
    extend = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    inside.batch_made(extend, scene.scheduled, scene.round.runner)
    assert request_tracker.requests_of(extend) is None
