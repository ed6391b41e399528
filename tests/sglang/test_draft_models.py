"""Decode steps of draft models, shown to their backends as SGLang's workers and runners show them.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_draft_models import ROWS, SLOTS, DraftScene, kv_pool, told_default_layers
from sglang_fakes import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    DefaultBackend,
    decode_batch,
    dense,
    layers,
    mlp_padded,
    num_rows,
    pat_backend,
    replay_view,
    runner,
    server_arguments,
)
from sglang_trees import TREE_KINDS, late_lengths

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.sglang.report import layer_report
from sglang_pat.sglang.speculative import attach as speculative_attach
from sglang_pat.sglang.speculative import backends
from sglang_pat.sglang.start import hooks
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

STEPS = 3


class DefaultSteps:
    """In place of a default backend's container of the steps of a round."""

    def __init__(self, num_steps: int = STEPS) -> None:
        self.attn_backends = [DefaultBackend() for _ in range(num_steps)]
        self.calls: list[str] = []
        self.needs_cpu_seq_lens = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append("eager")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "replay")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append("in graph")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(f"graphs of {max_bs} rows")


class Drafting(DraftScene):
    """With the backends of the steps of a round."""

    def __init__(
        self,
        tree_kind: str = TREE_KINDS[0],
        *,
        steps: Any = None,
        arguments: dict[str, Any] | None = None,
        **change: Any,
    ) -> None:
        super().__init__(tree_kind, num_drafts=STEPS + 2, arguments=arguments)
        self.served = pat_backend(self.new_runner())
        fields = {"token_to_kv_pool": kv_pool(1), "is_draft_worker": True}
        self.runner = self.new_runner(**(fields | change))
        self.steps: Any = DefaultSteps() if steps is None else steps
        factory = SimpleNamespace(draft_model_runner=self.runner)
        assert speculative_attach._after_create_decode_backend(self.steps, factory) is self.steps
        if isinstance(self.steps, backends.PatDraftSteps):
            inside.check_steps(self.planner)

    @property
    def planner(self) -> Any:
        return inside.planner(self.steps)

    @property
    def num_repeated(self) -> int:
        """Rounds without a plan()."""
        repeated: int = inside.num_repeated(self.planner)
        return repeated

    def view(self, lens: list[int], size: int = 0) -> Any:
        """SGLang's view of a round: eager, or before it replays the graph of `size` rows."""
        slots = [int(self.table[row, n]) for row, n in zip(ROWS, lens, strict=True)]
        if size:
            view = replay_view(list(ROWS), lens, slots, size)
        else:
            view = decode_batch(list(ROWS), lens, slots)
        request_tracker._after_init_new(view, object, self.scheduled, self.runner)
        return view

    def capture(self, size: int) -> None:
        """Capture the graph of `size` rows, as far as that is seen without one."""
        view = decode_batch([0] * size, [1] * size, [0] * size)
        self.steps.init_forward_metadata_out_graph(view, in_capture=True)
        for _ in range(3):  # warm-ups, and the capture
            self.steps.init_forward_metadata_in_graph(view)
            for step in range(STEPS):
                for layer in range(2):
                    self.attend(view, step, layer)

    def replay(self, view: Any) -> None:
        """Steps before the layers: the backend's, then the graph's."""
        self.steps.init_forward_metadata_out_graph(view)
        self.steps.init_forward_metadata_in_graph(view)

    def attend(
        self, view: Any, step: int, layer: int = 0, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and what a layer answers in a step of the round."""
        q = torch.randn(num_rows(view), QO_HEADS, HEAD_DIM)
        out = self.steps.attn_backends[step].forward_decode(
            q, None, None, self.runner.model[layer], view, **arguments
        )
        return q, out.view(q.shape)

    def assert_round(self, view: Any, lens: list[int], layers: int = 2) -> None:
        """In each step each request reads one token more, and padding nothing."""
        for step in range(STEPS):
            for layer in range(layers):
                q, out = self.attend(view, step, layer)
                assert not out[len(lens) :].any()
                for i in range(len(lens)):
                    self.assert_row(q, out, i, lens[i] + step + 1, layer)

    def assert_row(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        request: int,
        length: int,
        layer: int = 0,
        table: torch.Tensor | None = None,
    ) -> None:
        self.assert_reads(q[request], out[request], request, length, layer, table)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, server_context: Any) -> None:
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    inside.forget_requests()
    monkeypatch.setattr(speculative_attach._TargetModel, "planner", None)


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_each_step_of_a_round_reads_one_token_more(kind: str) -> None:
    drafting = Drafting(kind)
    drafting.steps.init_cuda_graph_state(4, 4)
    for size in (4, 2):
        drafting.capture(size)
    lens = [25, 31]
    # Different numbers of accepted tokens; graphs with and without padding, and eager rounds.
    for accepted, size in (([0, 0], 2), ([1, 3], 4), ([2, 1], 0), ([3, 3], 2), ([1, 1], 0)):
        lens = [length + more for length, more in zip(lens, accepted, strict=True)]
        view = drafting.view(lens, size)
        if size:
            drafting.replay(view)
        else:
            drafting.steps.init_forward_metadata(view)
        drafting.assert_round(view, lens)


def test_a_graph_writes_the_lengths_of_all_steps() -> None:
    drafting = Drafting()
    drafting.steps.init_cuda_graph_state(4, 4)
    drafting.capture(4)
    captured = inside.draft_round(drafting.steps).device_rows._reserved
    view = drafting.view([25, 31], 4)
    drafting.steps.init_forward_metadata_out_graph(view)
    assert captured.tolist() == [[2] * 4, [3] * 4, [4] * 4]  # of the capture
    drafting.steps.init_forward_metadata_in_graph(view)
    assert inside.draft_round(drafting.steps).device_rows._reserved is captured
    # The plan leaves padding out.
    assert captured.tolist() == [[26, 32, 2, 2], [27, 33, 3, 3], [28, 34, 4, 4]]


def test_a_graph_that_does_not_is_told_the_lengths() -> None:
    # A runner that does not ask the backend what to capture has it so.
    drafting = Drafting()
    drafting.steps.init_cuda_graph_state(2, 2)
    for lens in ([25, 31], [26, 33]):
        view = drafting.view(lens, 2)
        drafting.steps.init_forward_metadata_out_graph(view)
        assert inside.draft_round(drafting.steps).device_rows._reserved[2].tolist() == [
            n + 3 for n in lens
        ]
        drafting.assert_round(view, lens)


def test_one_plan_serves_all_steps_of_rounds_in_which_requests_grow() -> None:
    drafting = Drafting()
    drafting.steps.init_cuda_graph_state(2, 2)
    before = drafting.counters
    lens = [25, 31]
    for accepted in ([0, 0], [1, 3], [3, 1], [2, 2]):
        lens = [length + more for length, more in zip(lens, accepted, strict=True)]
        drafting.replay(drafting.view(lens, 2))
    assert before["draft"] == {"steps": 0, "rows": 0, "plans_built": 0, "plans_reused": 0}
    after = drafting.counters
    assert after["draft"] == {
        "steps": 4 * STEPS,
        "rows": 4 * STEPS * 2,
        "plans_built": 1,
        "plans_reused": 3,
    }
    # The reads of each step, and once for both requests the prefix.
    lengths = [25 + 31, 26 + 34, 29 + 35, 31 + 37]
    alone = sum(each + 2 * step for each in lengths for step in (1, 2, 3))
    assert after["draft_kv_tokens"] == {
        "query_centric": alone,
        "planned": alone - 4 * STEPS * 20,
        "lower_bound": alone - 4 * STEPS * 20,
    }
    assert after["plans_built"] == before["plans_built"] == 0  # of the model that is served


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_rounds_are_repeated_without_a_plan(kind: str) -> None:
    """They answer and count as those that are planned. The fourth finds a request outgrown."""
    counts = []
    for is_checked in (True, False):
        drafting = repeating(kind)
        if is_checked:
            inside.check_steps(drafting.planner)
        lens = [25, 31]
        for accepted in ([0, 0], [1, 3], [3, 1], [1, 255], [2, 3]):
            lens = [length + more for length, more in zip(lens, accepted, strict=True)]
            view = drafting.view(lens, 2)
            drafting.replay(view)
            drafting.assert_round(view, lens)
        assert drafting.num_repeated == (0 if is_checked else 3)
        counts.append({name: drafting.counters[name] for name in ("draft", "draft_kv_tokens")})
    assert counts[0] == counts[1]
    draft = counts[0]["draft"]
    assert (draft["rows"], draft["plans_reused"]) == (5 * STEPS * 2, 3)


@pytest.mark.parametrize("what", ["moved", "graph", "eager", "shorter", "outgrown", "others"])
def test_rounds_that_are_no_repetition_are_planned(what: str) -> None:
    drafting, lens, size = repeating(), [25, 31], 2
    for _ in range(2):
        drafting.replay(drafting.view(lens, 2))
    assert drafting.num_repeated == 1
    if what == "moved":
        drafting.table[1, 20:60] = torch.arange(700, 740)
        REQUEST_TRACKER.invalidate([drafting.reqs[0]])
    elif what == "graph":
        size = 4
    elif what == "eager":
        drafting.steps.init_forward_metadata(drafting.view(lens))
    elif what == "shorter":  # as no request is that stays where it is
        lens = [24, 31]
    elif what == "outgrown":
        lens = [25, 288]
    elif what == "others":
        drafting.scheduled.reqs = [*drafting.reqs[:1], copy.copy(drafting.reqs[1])]
    view = drafting.view(lens, size)
    drafting.replay(view)
    assert drafting.num_repeated == 1
    drafting.assert_round(view, lens)


def test_graphs_that_do_not_write_lengths_are_never_repeated() -> None:
    drafting = repeating(captured=())
    for lens in ([25, 31], [26, 33]):
        view = drafting.view(lens, 2)
        drafting.steps.init_forward_metadata_out_graph(view)
        drafting.assert_round(view, lens)
    assert drafting.num_repeated == 0


def repeating(kind: str = TREE_KINDS[0], captured: tuple[int, ...] = (4, 2)) -> Drafting:
    """Without checks, for which each round would be planned."""
    drafting = Drafting(kind)
    inside.do_not_check_steps(drafting.planner)
    drafting.steps.init_cuda_graph_state(4, 4)
    for size in captured:
        drafting.capture(size)
    return drafting


def test_a_request_that_outgrows_its_plan_is_planned_anew() -> None:
    drafting = Drafting()
    drafting.steps.init_cuda_graph_state(2, 2)
    for lens, built in (([10, 31], 1), ([10, 287], 1), ([10, 288], 2), ([9, 288], 3)):
        view = drafting.view([20 + lens[0], lens[1]], 2)
        drafting.replay(view)
        drafting.assert_round(view, [20 + lens[0], lens[1]])
        assert drafting.counters["draft"]["plans_built"] == built


def test_a_row_that_moved_is_read_anew() -> None:
    drafting = Drafting()
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    # Retracted and back again: the same request, with other slots.
    drafting.table[1, 20:60] = torch.arange(700, 740)
    REQUEST_TRACKER.invalidate([drafting.reqs[0]])
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    drafting.assert_round(view, [25, 31])


def test_other_requests_are_planned_anew() -> None:
    drafting = Drafting()
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    drafting.scheduled.reqs = drafting.reqs[1:]
    view = decode_batch([2], [33], [int(drafting.table[2, 33])])
    request_tracker._after_init_new(view, object, drafting.scheduled, drafting.runner)
    drafting.steps.init_forward_metadata(view)
    q, out = drafting.attend(view, 1)
    slots = drafting.table[2, :35].long()
    exact = dense(q[0], drafting.runner.token_to_kv_pool, 0, slots)
    torch.testing.assert_close(out[0].double(), exact, atol=2e-6, rtol=2e-6)
    assert drafting.counters["draft"]["plans_built"] == 2


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_request_that_stopped_takes_no_one_with_it(is_repeated: bool) -> None:
    # Its row is given to the next prompt while a round in which it is still may run; here, before
    # the layers run.
    drafting, lens = repeating(), [25, 31]
    drafting.replay(drafting.view(lens, 2))
    view = drafting.view(lens, 2)
    if is_repeated:
        lens = [28, 33]
        view = drafting.view(lens, 2)
        drafting.replay(view)
        assert drafting.num_repeated == 1
    before = drafting.table.clone()
    (plan,) = (each._plan for each in inside.attentions(inside.plans(drafting.steps)))
    stopped = next(span[0] for span in plan.gather_spans.tolist() if span[1] == 0)
    drafting.table[ROWS[stopped]] = SLOTS - 1
    for step in reversed(range(STEPS)):  # so that each one's rows are looked up
        q, out = drafting.attend(view, step)
        assert out.isfinite().all()  # of both
        length = lens[1 - stopped] + step + 1
        drafting.assert_row(q, out, 1 - stopped, length, table=before)


def test_tokens_of_a_step_are_stored_before_it_attends() -> None:
    drafting = Drafting()
    lens = [25, 31]
    view = drafting.view(lens)
    drafting.steps.init_forward_metadata(view)
    for step in range(STEPS):
        slots = [int(drafting.table[row, n + step]) for row, n in zip(ROWS, lens, strict=True)]
        view.out_cache_loc = torch.tensor(slots)
        k, v = (torch.randn(2, KV_HEADS, HEAD_DIM) for _ in range(2))
        q = torch.randn(2, QO_HEADS, HEAD_DIM)
        backend = drafting.steps.attn_backends[step]
        out = backend.forward_decode(q, k, v, drafting.runner.model[1], view).view(q.shape)
        assert torch.equal(drafting.runner.token_to_kv_pool.keys[1][slots], k)
        for i in range(2):
            drafting.assert_row(q, out, i, lens[i] + step + 1, layer=1)


@pytest.mark.parametrize("size", [0, 2, 4])
def test_rows_that_mlp_synchronisation_adds_are_nothing(size: int) -> None:
    """SGLang prepares a round before it pads the tokens of its steps."""
    drafting = repeating(captured=(size,) if size else ())
    for more_rows in range(1, 8):
        lens = [25 + more_rows, 31 + 2 * more_rows]
        view = drafting.view(lens, size)
        if size:
            drafting.replay(view)
        else:
            drafting.steps.init_forward_metadata(view)
        num_tokens = view.batch_size + more_rows
        drafting.assert_round(mlp_padded(view, drafting.served, num_tokens), lens)
    assert drafting.num_repeated == (6 if size else 0)


def test_an_idle_rank_plans_nothing() -> None:
    drafting = Drafting()
    view = decode_batch([], [], [])
    drafting.steps.init_forward_metadata(view)
    assert drafting.counters["draft"]["steps"] == 0


# --- the default backend ---


def test_the_default_backend_is_prepared_until_all_layers_have_run() -> None:
    drafting = Drafting()
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    drafting.attend(view, 0, layer=0)
    drafting.steps.init_forward_metadata(drafting.view([26, 32]))
    drafting.attend(view, 0, layer=1)
    drafting.steps.init_forward_metadata(drafting.view([27, 33]))
    assert drafting.steps.calls == ["eager", "eager"]


def test_graphs_do_without_the_default_backend() -> None:
    drafting = Drafting()
    drafting.steps.init_cuda_graph_state(4, 4)
    drafting.capture(4)
    # The first warm-up shows that there is nothing for it to do.
    assert drafting.steps.calls == ["graphs of 4 rows", "capture", "in graph"]
    drafting.capture(2)
    drafting.replay(drafting.view([25, 31], 2))
    assert len(drafting.steps.calls) == 3


def test_layers_that_pat_does_not_do_are_the_default_backends() -> None:
    drafting = Drafting(model=layers(sliding_window_size=8))
    drafting.steps.init_cuda_graph_state(4, 4)
    drafting.capture(4)
    for calls in (drafting.steps.calls, drafting.steps.attn_backends[1].calls):
        calls.clear()
    view = drafting.view([25, 31], 4)
    drafting.replay(view)
    assert drafting.steps.calls == ["replay", "in graph"]
    drafting.assert_round(view, [25, 31], layers=1)
    _, out = drafting.attend(view, 1, layer=1)
    assert out.isinf().all()
    assert drafting.steps.attn_backends[1].calls == ["decode layer 1"]
    told = layer_report._after_get_init_info({})["pat"]["draft_model"]
    assert told["default_layers"] == {"sliding window 8": 1}


def test_a_draft_model_has_a_geometry_of_its_own() -> None:
    heads = 2 * QO_HEADS
    model = torch.nn.ModuleList(
        [RadixAttention(heads, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)]
    )
    drafting = Drafting(model=model)
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    q = torch.randn(2, heads, HEAD_DIM)
    out = drafting.steps.attn_backends[1].forward_decode(q, None, None, model[0], view)
    for i, length in enumerate([27, 33]):
        drafting.assert_row(q, out.view(q.shape), i, length)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "npu"}, "device npu"),
        (
            {"arguments": {"speculative_draft_attention_backend": "triton"}},
            "--speculative-draft-attention-backend triton",
        ),
        ({"draft_attention_backend": "fa3"}, "--speculative-draft-attention-backend fa3"),
        (
            {"steps": SimpleNamespace(calls=[], attn_backends=[])},
            "default backend SimpleNamespace, which is closed",
        ),
        (
            {"steps": SimpleNamespace(calls=[], attn_backends=[object()])},
            "default backend object, which is closed",
        ),
    ],
    ids=["device", "named", "named for the runner", "without steps", "closed"],
)
def test_whole_draft_models_that_are_left_to_the_default_backend(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    before = type(change.get("steps", DefaultSteps()))
    drafting = Drafting(**change)
    assert type(drafting.steps) is before
    assert "draft" not in drafting.counters
    found = told_default_layers("draft_model")
    assert found == reason.removeprefix("default backend ")
    assert "draft model: pat decodes nothing" in caplog.text
    assert f"decodes all 2 layers: {found}" in caplog.text


def test_without_speculation_no_draft_model_is_awaited() -> None:
    pat_backend(runner())
    assert speculative_attach._TargetModel.planner is None
    drafting = Drafting()
    assert speculative_attach._TargetModel.planner is inside.planner(drafting.served)
    pat_backend(runner())  # another one, built later in the process
    steps = DefaultSteps()
    factory = SimpleNamespace(draft_model_runner=drafting.runner)
    speculative_attach._after_create_decode_backend(steps, factory)
    assert type(steps) is DefaultSteps


def test_a_model_that_pat_does_not_decode_has_drafts_of_the_default_backend() -> None:
    arguments = server_arguments(
        speculative_algorithm="STANDALONE", speculative_num_draft_tokens=4, enable_mis=True
    )
    pat_backend(runner(server_args=arguments))
    assert speculative_attach._TargetModel.planner is None


def test_one_step_needs_no_backend() -> None:
    drafting = Drafting()
    factory = SimpleNamespace(draft_model_runner=drafting.runner)
    assert speculative_attach._after_create_decode_backend(None, factory) is None


def test_the_hook_is_on_the_factory_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    drafting = Drafting()
    hooks.check_hooks(speculative_attach._HOOKS)
    factory = copy.copy(SimpleNamespace(draft_model_runner=drafting.runner))
    factory.speculative_num_steps = 1
    assert DraftBackendFactory.create_decode_backend(factory) is None


@pytest.mark.parametrize("given", [{"sinks": None}, {"rope": None}])
def test_arguments_without_a_value_are_nothing(given: dict[str, Any]) -> None:
    drafting = Drafting()
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    q, out = drafting.attend(view, 0, **given)
    drafting.assert_row(q, out, 0, 26)


def test_a_layer_that_is_passed_more_is_left_to_the_default_backend() -> None:
    drafting = Drafting()
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    _, out = drafting.attend(view, 0, layer=0, rope=1)
    assert out.isinf().all()
    told = layer_report._after_get_init_info({})["pat"]["draft_model"]
    assert told["default_layers"] == {"the argument rope": 1}
    q, out = drafting.attend(view, 0, layer=1)
    drafting.assert_row(q, out, 0, 26, layer=1)
    drafting.steps.init_forward_metadata(drafting.view([25, 31]))
    assert drafting.steps.calls == ["eager", "eager"]
    drafting.attend(view, 0, layer=1, rope=1)  # then there is none left
    drafting.steps.init_forward_metadata(drafting.view([25, 31]))
    assert drafting.steps.calls == ["eager"] * 3


def test_a_layer_that_was_not_found_is_left_to_the_default_backend() -> None:
    """In the round that shows it, which all others have run in, and in those that follow."""
    drafting = Drafting()
    inside.layer_support(drafting.steps).shapes.pop(1)
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    q, out = drafting.attend(view, 0, layer=0)
    drafting.assert_row(q, out, 0, 26, layer=0)
    _, out = drafting.attend(view, 0, layer=1)
    assert out.isinf().all()
    told = layer_report._after_get_init_info({})["pat"]["draft_model"]
    assert told["default_layers"] == {"a layer that was not found in the model": 1}
    drafting.steps.init_forward_metadata(drafting.view([25, 31]))
    assert drafting.steps.calls == ["eager", "eager"]


def test_an_argument_that_comes_too_late_is_an_error() -> None:
    drafting = Drafting()
    view = drafting.view([25, 31])
    drafting.steps.init_forward_metadata(view)
    for layer in range(2):
        drafting.attend(view, 0, layer)
    drafting.steps.init_forward_metadata(view)
    assert drafting.steps.calls == ["eager"]
    with pytest.raises(
        RuntimeError, match="layer 0 of the draft model came too late: the argument rope"
    ):
        drafting.attend(view, 1, layer=0, rope=1)


def test_a_model_stores_no_kv_by_itself_where_pat_attends() -> None:
    drafting = Drafting(model=layers(sliding_window_size=8))
    (backend, *_) = drafting.steps.attn_backends
    assert backend.get_fused_kv_write_buffers(drafting.runner.model[0], None) is None


@pytest.mark.parametrize("size", [0, 2])
def test_a_round_does_with_lengths_that_the_host_learns_late(size: int) -> None:
    drafting = Drafting()
    assert not drafting.steps.needs_cpu_seq_lens
    drafting.steps.init_cuda_graph_state(2, 2)
    for lens in late_lengths(drafting.reqs):
        view = drafting.view(lens, size)
        view.seq_lens_cpu = None
        if size:
            drafting.replay(view)
        else:
            drafting.steps.init_forward_metadata(view)
        drafting.assert_round(view, lens)
    assert drafting.counters["draft"]["plans_built"] == 1


# --- whose steps they are ---


def test_a_draft_models_batches_are_noted_apart() -> None:
    drafting = Drafting()
    first, second = drafting.view([25, 31]), drafting.view([26, 32])
    step = request_tracker.requests_of(first)
    assert step is not None
    assert step.reqs == drafting.reqs
    again = request_tracker.requests_of(second)
    assert again is not None
    assert again.reqs is step.reqs
    # Nobody is told that anybody has moved, or which step is being run.
    assert not REQUEST_TRACKER.is_within_step
    extend = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    request_tracker._after_init_new(extend, object, drafting.scheduled, drafting.runner)
    assert request_tracker.requests_of(extend) is None
