"""Draft-extend steps, in which a draft model reads the accepted tokens (see `scene`)."""

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
    DefaultBackend,
    decode_batch,
    drafts_to_verify,
    layers,
    mlp_padded,
    pat_backend,
    runner,
)
from scene import BRANCHES, Scene, grown, kv_pool
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_pat.sglang.speculative import attach
from sglang_pat.support import Unsupported

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

DRAFTS = 3


class Extending(Scene):
    """A scene with a draft model that has draft-extend steps."""

    def __init__(
        self,
        *,
        arguments: dict[str, Any] | None = None,
        default: Any = None,
        graphs_first: bool = True,
        **change: Any,
    ) -> None:
        super().__init__(drafts=DRAFTS, has_graphs=graphs_first, **(arguments or {}))
        self.extend = self.extends(default, **change)
        if not graphs_first:
            self.served.reserve()

    def verify(self, lens: list[int], graph: int, mask: torch.Tensor | None = None) -> None:
        """Run a verify step of the served model."""
        self.served.attend(self.served.step(lens, graph, mask=mask))


# Graph sizes of the verify step and of the draft-extend step; 0: eager.
PLACES = [(0, 0), (2, 0), (4, 0), (2, 2), (4, 4), (0, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize(("verified_in", "read_in"), PLACES)
def test_each_token_reads_those_before_it(verified_in: int, read_in: int, topk: int) -> None:
    """SGLang moves the accepted path of a tree to the front."""
    scene = Extending(arguments={"speculative_eagle_topk": topk})
    for graph in (4, 2):
        scene.extend.capture(graph)
    lens, reads = [25, 31], None if topk == 1 else BRANCHES
    mask = None if reads is None else reads.flatten().repeat(2)
    for accepted in ([0, 0], [1, 3], [2, 1]):
        lens = grown(lens, accepted)
        view = scene.served.step(lens, verified_in, mask=mask)
        scene.served.assert_exact(view, lens, reads)
        view = scene.extend.step(lens, read_in)
        if read_in:  # copy them into the graph's buffer
            plans = scene.extend.plans
            assert plans is inside.microbatch(scene.served.backend).captured
            assert plans.num_rows == read_in * DRAFTS
        scene.extend.assert_exact(view, lens)
        if topk == 1:
            scene.extend.assert_padding_is_zero(view, 2 * DRAFTS)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("place", [(0, 0), (4, 0), (2, 2)])
def test_the_plan_of_the_verify_step_is_used(place: tuple[int, int], topk: int) -> None:
    scene = Extending(arguments={"speculative_eagle_topk": topk})
    for lens in ([25, 31], [26, 33]):
        scene.verify(lens, place[0], BRANCHES.flatten().repeat(2))
        before = scene.counters
        scene.extend.step(lens, place[1])
        for name in ("plans_built", "plans_reused", "kv_tokens_planned"):
            assert scene.counters[name] == before[name]
    for name in ("draft_extend", "verify"):
        assert scene.counters[name] == {"steps": 2, "rows": 2 * 2 * DRAFTS}


def test_a_step_that_is_planned_once_more_is_no_verify_step() -> None:
    scene = Extending()
    scene.verify([25, 31], 0)
    scene.extend.step([25, 31], 2)
    assert scene.counters["verify"] == {"steps": 1, "rows": 2 * DRAFTS}
    # The rows of the verify graph differ now, so its next step is planned.
    scene.verify([26, 32], 4)
    scene.extend.assert_exact(scene.extend.step([26, 32]), [26, 32])


def test_tokens_are_stored_before_they_are_read() -> None:
    scene, lens = Extending(), [25, 31]
    scene.verify(lens, 0)
    view = scene.extend.step(lens)
    k, v = (torch.randn(2 * DRAFTS, KV_HEADS, HEAD_DIM) for _ in range(2))
    before = scene.target.token_to_kv_pool.keys[1].clone()
    scene.extend.assert_exact(view, lens, layers=[1], kv=(k, v))
    pool = scene.extend.runner.token_to_kv_pool
    assert torch.equal(pool.keys[1][scene.extend.slots_of(lens)], k)
    assert torch.equal(scene.target.token_to_kv_pool.keys[1], before)


@pytest.mark.parametrize("graphs_first", [True, False])
@pytest.mark.parametrize("graph", [0, 2])
def test_a_draft_model_has_a_geometry_of_its_own(graphs_first: bool, graph: int) -> None:
    layer = RadixAttention(2 * QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
    scene = Extending(graphs_first=graphs_first, model=torch.nn.ModuleList([layer]))
    for lens in ([25, 31], [27, 32]):
        scene.verify(lens, graph)
        scene.extend.assert_exact(scene.extend.step(lens, graph), lens)
    assert scene.counters["plans_built"] == 1  # both steps count as one


@pytest.mark.parametrize(("verified_in", "read_in"), [*PLACES, ("padded", 0), ("padded", 2)])
def test_rows_that_mlp_synchronisation_adds_are_nothing(
    verified_in: int | str, read_in: int
) -> None:
    """SGLang prepares these steps before it pads their tokens."""
    scene = Extending()
    for graph in (4, 2):
        scene.extend.capture(graph)
    for more_rows in range(1, 8):
        lens = [25 + more_rows, 31 + 2 * more_rows]
        if verified_in == "padded":
            padded = scene.served.padded(lens, more_rows)
            scene.served.prepare(padded)
            scene.served.attend(padded)
        else:
            scene.verify(lens, int(verified_in))
        scene.extend.step(lens, read_in)
        rows = (read_in or 2) * DRAFTS + more_rows
        padded = mlp_padded(scene.extend.view(lens), scene.served.backend, rows, DRAFTS)
        scene.extend.assert_exact(padded, lens)
        scene.extend.assert_padding_is_zero(padded, 2 * DRAFTS)


@pytest.mark.parametrize("what", ["nobody", "others"])
def test_requests_that_were_not_verified_are_planned_alone(what: str) -> None:
    scene = Extending()
    scene.verify([25, 31], 0)
    scene.scheduled.reqs = scene.reqs[::-1] if what == "others" else []
    scene.extend.assert_exact(scene.extend.step([40, 22]), [40, 22])


def test_an_idle_rank_plans_nothing() -> None:
    scene = Extending()
    view = decode_batch([], [], [], spec_info=None)
    view.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    scene.extend.backend.init_forward_metadata(view)
    assert scene.counters["draft_extend"] == {"steps": 0, "rows": 0}


# --- graphs that SGLang does not capture ---


class Captured:
    """Stands in for SGLang's runner, whose constructor captures."""

    warm_up: Any = None

    def __init__(self, worker: Any) -> None:
        if Captured.warm_up is not None:
            Captured.warm_up()

    def execute(self, forward_batch: Any, select_index: Any = None) -> Any:
        return SimpleNamespace(next_token_logits=1, hidden_states=2)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return SGLang's worker with a draft model on pat; the default backend has no graphs."""
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module

    backend = Extending().extend.backend  # hooks the class
    monkeypatch.setattr(module, "EAGLEDraftExtendCudaGraphRunner", Captured)
    monkeypatch.setattr(Captured, "warm_up", None)
    monkeypatch.setattr(attach, "_captures_extends", lambda: True)
    return SimpleNamespace(
        device="cuda",
        draft_extend_attn_backend=backend,
        cuda_graph_runner_for_draft_extend=None,
        speculative_algorithm=SpeculativeAlgorithm.EAGLE,
    )


@pytest.mark.parametrize("is_captured", [False, True], ids=["by pat", "by SGLang"])
@pytest.mark.parametrize(("algorithm", "hidden_states"), [("EAGLE", 2), ("STANDALONE", None)])
def test_captured_steps_return_hidden_states_where_prompts_do(
    worker: Any, algorithm: str, hidden_states: int | None, is_captured: bool
) -> None:
    """SGLang merges hidden states of all requests, so all steps must return them, or none."""
    if is_captured:  # 0.5.23 captures over FA3, 0.5.17 does not
        worker.cuda_graph_runner_for_draft_extend = Captured(worker)
    worker.speculative_algorithm = SpeculativeAlgorithm[algorithm]
    attach._after_graphs(None, worker)
    assert isinstance(worker.cuda_graph_runner_for_draft_extend, Captured)
    out = worker.cuda_graph_runner_for_draft_extend.execute(None, None)
    assert (out.next_token_logits, out.hidden_states) == (1, hidden_states)


@pytest.mark.parametrize(
    "why", ["captured", "cpu", "off", "default", "layers", "warm-up", "others"]
)
def test_what_is_read_is_not_captured(
    worker: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_support, before = inside.layer_support(worker.draft_extend_attn_backend), None
    leave = lambda: layer_support.fall_back(1, Unsupported("attention", "a test"))  # noqa: E731
    if why == "captured":
        before = worker.cuda_graph_runner_for_draft_extend = object()
    elif why == "cpu":
        worker.device = "cpu"
    elif why == "off":
        monkeypatch.setattr(attach, "_captures_extends", lambda: False)
    elif why == "default":
        worker.draft_extend_attn_backend = DefaultBackend()
    elif why == "layers":
        leave()
    elif why == "warm-up":  # a layer falls back in the warm-up
        monkeypatch.setattr(Captured, "warm_up", leave)
    elif why == "others":  # other drafters have no such steps
        worker = SimpleNamespace(cuda_graph_runner_for_draft_extend=None)
    attach._after_graphs(None, worker)
    assert worker.cuda_graph_runner_for_draft_extend is before


@pytest.mark.skipif(
    not hasattr(AttentionBackend, "shared_read_ends"), reason="this SGLang does not ask"
)
def test_the_scheduler_may_write_before_a_replay_where_pat_alone_reads() -> None:
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    mode = ForwardMode.DRAFT_EXTEND_V2
    assert Extending().extend.backend.shared_read_ends(mode) is SharedReadEnds.PRE_REPLAY
    mixed = Extending(model=layers(sliding_window_size=128)).extend.backend
    assert mixed.shared_read_ends(mode) is SharedReadEnds.UNKNOWN  # as in SGLang's base class


# --- the default backend ---


def test_prompts_are_the_default_backends() -> None:
    scene = Extending()
    backend, view = scene.extend.backend, decode_batch([1], [5], [7])
    view.forward_mode = ForwardMode.EXTEND
    backend.init_forward_metadata(view)
    q = torch.randn(1, QO_HEADS, HEAD_DIM)
    assert backend.forward_extend(q, None, None, scene.extend.runner.model[0], view) is q
    assert backend.calls == ["out_graph", "in_graph", "extend"]


def test_layers_that_pat_does_not_do_are_the_default_backends() -> None:
    scene = Extending(model=layers(sliding_window_size=8))
    scene.verify([25, 31], 0)
    view, calls = scene.extend.step([25, 31]), scene.extend.backend.calls
    assert calls == ["out_graph", "in_graph"]
    scene.extend.assert_exact(view, [25, 31], layers=[0])
    scene.extend.attend(view, layer=1)
    assert calls[2:] == ["extend"]
    told = inside.server_info()["draft_extend"]
    assert (told["pat_layers"], told["default_layers"]) == (
        1,
        {"sliding window 8 of a draft model": 1},
    )


@pytest.mark.parametrize("topk", [1, 2])
def test_a_layer_that_is_passed_more_is_left_to_the_default_backend(topk: int) -> None:
    scene = Extending(arguments={"speculative_eagle_topk": topk})
    scene.verify([25, 31], 2, BRANCHES.flatten().repeat(2))
    view = scene.extend.step([25, 31], 2)
    scene.extend.attend(view, rope=1)
    assert scene.extend.backend.calls[-3:] == ["out_graph in capture", "in_graph", "extend"]
    told = inside.server_info()
    assert told["draft_extend"]["default_layers"] == {"the argument rope": 1}
    assert told["default_layers"] == {}
    scene.extend.assert_exact(view, [25, 31], layers=[1])


def test_without_speculation_no_draft_model_is_awaited() -> None:
    scene = Extending()
    pat_backend(runner())  # another backend, built later in the process
    assert type(scene.extends().backend) is DefaultBackend
    factory = SimpleNamespace(draft_model_runner=scene.extend.runner)
    assert attach._after_create_extend_backend(None, factory) is None


class RefreshedInGraphs(DefaultBackend):
    """A default backend like FA3, whose graphs refresh their inputs themselves."""

    supports_draft_extend_metadata_staging = True

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True


def several_layers() -> Extending:
    """Return a scene with several draft layers (`--enable-multi-layer-eagle`)."""
    arguments = {"enable_multi_layer_eagle": True}
    return Extending(arguments=arguments, default=RefreshedInGraphs())


@pytest.mark.parametrize("graph", [0, 2, 4])
def test_several_draft_layers_read_under_the_plan_of_the_verify_step(graph: int) -> None:
    """SGLang has a runner, pool, backend and graphs for each layer, over common buffers.

    Before their replays SGLang passes draft data that are not the batch's.
    """
    scene = several_layers()
    each = [scene.extend] + [
        scene.extends(RefreshedInGraphs(), token_to_kv_pool=kv_pool(seed)) for seed in (3, 4)
    ]
    for layer in each if graph else ():
        layer.capture(graph)
    built = scene.counters["plans_built"]
    for step, lens in enumerate(([25, 31], [26, 33], [29, 34])):
        scene.verify(lens, graph)
        view = scene.extend.view(lens, graph)
        if graph:
            graphs = SimpleNamespace(_replay_spec_info=drafts_to_verify(DRAFTS))
            attach._after_prepare(None, graphs, view, staged=False)
            view.spec_info, view.input_ids = graphs._replay_spec_info, torch.zeros(graph * DRAFTS)
        else:
            scene.extend.prepare(view)  # prepared with the batch, before the replay
        for layer in each:
            layer.prepare(view)
            layer.assert_exact(view, lens)
        assert scene.counters["draft_extend"]["steps"] == 3 * (step + 1)
    assert scene.counters["plans_built"] == built + 1, "the verify steps' plan serves all layers"


def test_graphs_of_several_draft_layers_are_prepared_before_each_replay() -> None:
    """Without this, their kernels would read the plan of another step."""
    scene = several_layers()
    backend = scene.extend.backend
    assert not backend.draft_extend_metadata_captured_in_graph()
    assert not backend.supports_draft_extend_metadata_staging
    scene.extend.capture(2)
    inside.layer_support(backend).fall_back_all(Unsupported("attention", "of a later step"))
    assert not backend.supports_draft_extend_metadata_staging  # these graphs are still replayed
    default = RefreshedInGraphs()
    left = Extending(draft_attention_backend="fa3", default=default).extend.backend
    assert left.draft_extend_metadata_captured_in_graph()
    assert left.supports_draft_extend_metadata_staging


def test_no_lengths_are_asked_for_on_the_host() -> None:
    scene = Extending()
    assert not scene.extend.backend.needs_cpu_seq_lens
    assert not scene.served.backend.needs_cpu_seq_lens
