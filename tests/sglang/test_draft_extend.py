"""Steps in which a draft model reads what was accepted, shown to their backend as by SGLang.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_draft_models import ROWS, SLOTS, DraftScene, kv_pool, told_default_layers
from sglang_fakes import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    DefaultBackend,
    KVPool,
    decode_batch,
    drafts_to_verify,
    layers,
    mlp_padded,
    num_rows,
    pat_backend,
    replay_view,
    runner,
)

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.sglang.report import layer_report
from sglang_pat.sglang.speculative import attach as speculative_attach
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER
from sglang_pat.support import Unsupported

DRAFTS = 3


class Extending(DraftScene):
    """With the backend of that step."""

    def __init__(
        self,
        *,
        arguments: dict[str, Any] | None = None,
        default: Any = None,
        graphs_first: bool = True,
        **change: Any,
    ) -> None:
        super().__init__(num_drafts=DRAFTS, arguments=arguments)
        self.target = self.new_runner(token_to_kv_pool=kv_pool(1), is_draft_worker=False)
        self.served = pat_backend(self.target)
        inside.check_steps(self.served)
        if graphs_first:
            self.reserve()
        fields = {"token_to_kv_pool": kv_pool(2), "is_draft_worker": True}
        self.runner = self.new_runner(**(fields | change))
        self.backend: Any = DefaultBackend() if default is None else default
        factory = SimpleNamespace(draft_model_runner=self.runner)
        assert (
            speculative_attach._after_create_extend_backend(self.backend, factory) is self.backend
        )
        if not graphs_first:
            self.reserve()

    def reserve(self) -> None:
        self.served.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTS)

    def slots(self, lens: list[int]) -> list[int]:
        return [
            int(self.table[row, length + i])
            for row, length in zip(ROWS, lens, strict=True)
            for i in range(DRAFTS)
        ]

    def verify(self, lens: list[int], size: int, more_rows: int = 0) -> None:
        """Let the model verify drafts, in the graph of `size` requests; 0: without a graph.

        more_rows: rows of padding.
        """
        more = {"spec_info": drafts_to_verify(DRAFTS)}
        if size:
            view = replay_view(list(ROWS), lens, self.slots(lens), size, **more)
        else:
            view = decode_batch(list(ROWS), lens, self.slots(lens), **more)
        view.forward_mode = ForwardMode.TARGET_VERIFY
        request_tracker._after_init_new(view, object, self.scheduled, self.target)
        with REQUEST_TRACKER.running(view):
            if more_rows:
                view = mlp_padded(view, self.served, len(lens) * DRAFTS + more_rows, DRAFTS)
            if size:
                self.served.init_forward_metadata_out_graph(view)
                self.served.init_forward_metadata_in_graph(view)
            else:
                self.served.init_forward_metadata(view)
            q = torch.randn(num_rows(view, DRAFTS), QO_HEADS, HEAD_DIM)
            self.served.forward_extend(q, None, None, self.target.model[0], view)

    def view(self, lens: list[int], size: int = 0) -> Any:
        """SGLang's view of the step behind: requests are longer by all draft tokens."""
        ends = [length + DRAFTS for length in lens]
        more = {
            "spec_info": drafts_to_verify(DRAFTS),
            "input_ids": torch.zeros(len(lens) * DRAFTS),
        }
        made = decode_batch(list(ROWS), ends, self.slots(lens), **more)
        made.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        request_tracker._after_init_new(made, object, self.scheduled, self.runner)
        if not size:
            return made
        # Another object, whose tensors are as large as the largest graph.
        shown = replay_view(list(ROWS), ends, self.slots(lens), 4, **more)
        shown.forward_mode, shown.batch_size = ForwardMode.DRAFT_EXTEND_V2, size
        shown.spec_info = made.spec_info
        return shown

    def prepare(self, view: Any, size: int = 0) -> None:
        if size:
            self.backend.init_forward_metadata_out_graph(view)
            self.backend.init_forward_metadata_in_graph(view)
        else:
            self.backend.init_forward_metadata(view)

    def capture(self, size: int) -> None:
        """Capture the graph of `size` requests, as far as that is seen without one."""
        more = {"spec_info": SimpleNamespace(), "input_ids": torch.zeros(size * DRAFTS)}
        view = decode_batch([0] * size, [1] * size, [0] * (size * DRAFTS), **more)
        view.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        self.backend.init_forward_metadata_in_graph(view)
        self.attend(view, size * DRAFTS)

    def attend(
        self, view: Any, num_rows: int = 2 * DRAFTS, layer: int = 0, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and what a layer answers."""
        model = self.runner.model
        q = torch.randn(num_rows, model[layer].tp_q_head_num, HEAD_DIM)
        out = self.backend.forward_extend(q, None, None, model[layer], view, **arguments)
        return q, out.view(q.shape)

    def assert_exact(self, view: Any, lens: list[int], num_rows: int = 2 * DRAFTS) -> None:
        for layer in range(len(self.runner.model)):
            q, out = self.attend(view, num_rows, layer)
            assert not out[len(lens) * DRAFTS :].any()  # padding
            for i in range(len(lens)):
                self.assert_request(q, out, i, lens[i], layer)

    def assert_request(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        request: int,
        length: int,
        layer: int = 0,
        table: torch.Tensor | None = None,
    ) -> None:
        """Each token reads its request up to itself, in the draft model's KV."""
        for j in range(DRAFTS):
            row = request * DRAFTS + j
            self.assert_reads(q[row], out[row], request, length + j + 1, layer, table)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, server_context: Any) -> None:
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    inside.forget_requests()
    monkeypatch.setattr(speculative_attach._TargetModel, "planner", None)


# Sizes of the graphs that verify and that read; 0: without one.
PLACES = [(0, 0), (2, 0), (4, 0), (2, 2), (4, 4), (0, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize(("verified_in", "read_in"), PLACES)
def test_each_token_reads_those_before_it(verified_in: int, read_in: int) -> None:
    extending = Extending()
    extending.capture(4)
    extending.capture(2)
    lens = [25, 31]
    for accepted in ([0, 0], [1, 3], [2, 1]):
        lens = [length + more for length, more in zip(lens, accepted, strict=True)]
        extending.verify(lens, verified_in)
        view = extending.view(lens, read_in)
        extending.prepare(view, read_in)
        if read_in:  # where the graph finds them
            plans = inside.plans(extending.backend)
            assert plans is inside.microbatch(extending.served).captured
            assert plans.num_rows == read_in * DRAFTS
        # A graph has padding.
        extending.assert_exact(view, lens, (read_in or 2) * DRAFTS)


@pytest.mark.parametrize("place", [(0, 0), (4, 0), (2, 2)])
def test_the_plan_of_the_verify_step_is_used(place: tuple[int, int]) -> None:
    extending = Extending()
    for lens in ([25, 31], [26, 33]):
        extending.verify(lens, place[0])
        before = extending.counters
        extending.prepare(extending.view(lens, place[1]), place[1])
        after = extending.counters
        for name in ("plans_built", "plans_reused", "kv_tokens_planned"):
            assert after[name] == before[name]
    assert extending.counters["draft_extend"] == {"steps": 2, "rows": 2 * 2 * DRAFTS}
    assert extending.counters["verify"] == {"steps": 2, "rows": 2 * 2 * DRAFTS}


def test_a_step_that_is_planned_once_more_is_no_verify_step() -> None:
    extending = Extending()
    extending.verify([25, 31], 0)
    extending.prepare(extending.view([25, 31], 2), 2)
    assert extending.counters["verify"] == {"steps": 1, "rows": 2 * DRAFTS}
    # The graph of the model has other rows now: its next step is planned.
    extending.verify([26, 32], 4)
    view = extending.view([26, 32])
    extending.prepare(view)
    extending.assert_exact(view, [26, 32])


def test_tokens_are_stored_before_they_are_read() -> None:
    extending = Extending()
    lens = [25, 31]
    extending.verify(lens, 0)
    view = extending.view(lens)
    extending.prepare(view)
    k, v = (torch.randn(2 * DRAFTS, KV_HEADS, HEAD_DIM) for _ in range(2))
    q = torch.randn(2 * DRAFTS, QO_HEADS, HEAD_DIM)
    before = extending.target.token_to_kv_pool.keys[1].clone()
    out = extending.backend.forward_extend(q, k, v, extending.runner.model[1], view)
    assert torch.equal(extending.runner.token_to_kv_pool.keys[1][extending.slots(lens)], k)
    assert torch.equal(extending.target.token_to_kv_pool.keys[1], before)
    for i in range(2):
        extending.assert_request(q, out.view(q.shape), i, lens[i], layer=1)


@pytest.mark.parametrize("graphs_first", [True, False])
@pytest.mark.parametrize("size", [0, 2])
def test_a_draft_model_has_a_geometry_of_its_own(graphs_first: bool, size: int) -> None:
    heads = 2 * QO_HEADS
    layer = RadixAttention(heads, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
    extending = Extending(graphs_first=graphs_first, model=torch.nn.ModuleList([layer]))
    for lens in ([25, 31], [27, 32]):
        extending.verify(lens, size)
        view = extending.view(lens, size)
        extending.prepare(view, size)
        extending.assert_exact(view, lens)
    assert extending.counters["plans_built"] == 1  # they count as one


@pytest.mark.parametrize("size", [0, 2])
def test_a_request_that_stopped_takes_no_one_with_it(size: int) -> None:
    extending = Extending()
    lens = [25, 31]
    extending.verify(lens, size)
    view = extending.view(lens, size)
    extending.prepare(view, size)
    before = extending.table.clone()
    (plan,) = (each._plan for each in inside.attentions(inside.plans(extending.served)))
    stopped = next(span[0] for span in plan.gather_spans.tolist() if span[1] == 0) // DRAFTS
    extending.table[ROWS[stopped]] = SLOTS - 1  # its row is the next prompt's
    q, out = extending.attend(view)
    assert out.isfinite().all()
    extending.assert_request(q, out, 1 - stopped, lens[1 - stopped], table=before)


@pytest.mark.parametrize(("verified_in", "read_in"), [*PLACES, ("padded", 0), ("padded", 2)])
def test_rows_that_mlp_synchronisation_adds_are_nothing(
    verified_in: int | str, read_in: int
) -> None:
    """SGLang prepares these steps before it pads their tokens."""
    extending = Extending()
    for size in (4, 2):
        extending.capture(size)
    for more_rows in range(1, 8):
        lens = [25 + more_rows, 31 + 2 * more_rows]
        if verified_in == "padded":
            extending.verify(lens, 0, more_rows)
        else:
            extending.verify(lens, int(verified_in))
        view = extending.view(lens, read_in)
        extending.prepare(view, read_in)
        count = (read_in or 2) * DRAFTS + more_rows
        padded = mlp_padded(extending.view(lens), extending.served, count, DRAFTS)
        extending.assert_exact(padded, lens, count)


@pytest.mark.parametrize("what", ["nobody", "others"])
def test_requests_that_were_not_verified_are_planned_alone(what: str) -> None:
    extending = Extending()
    extending.verify([25, 31], 0)
    if what == "others":
        extending.scheduled.reqs = extending.reqs[::-1]
    else:
        extending.scheduled.reqs = []
    view = extending.view([40, 22])
    extending.prepare(view)
    extending.assert_exact(view, [40, 22])


def test_an_idle_rank_plans_nothing() -> None:
    extending = Extending()
    view = decode_batch([], [], [], spec_info=None)
    view.forward_mode = ForwardMode.DRAFT_EXTEND_V2
    extending.prepare(view)
    assert extending.counters["draft_extend"] == {"steps": 0, "rows": 0}


# --- graphs that SGLang does not capture ---


class Captured:
    """In place of SGLang's runner, which captures when it is made."""

    warm_up: Any = None

    def __init__(self, worker: Any) -> None:
        if Captured.warm_up is not None:
            Captured.warm_up()

    def execute(self, forward_batch: Any, select_index: Any = None) -> Any:
        return SimpleNamespace(next_token_logits=1, hidden_states=2)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's, of a draft model of pat's, over a default backend without graphs for it."""
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module

    extending = Extending()  # with hooks on the class
    monkeypatch.setattr(module, "EAGLEDraftExtendCudaGraphRunner", Captured)
    monkeypatch.setattr(Captured, "warm_up", None)
    monkeypatch.setattr(speculative_attach, "_captures_extends", lambda: True)
    return SimpleNamespace(
        device="cuda",
        extending=extending,
        draft_extend_attn_backend=extending.backend,
        cuda_graph_runner_for_draft_extend=None,
        speculative_algorithm=SpeculativeAlgorithm.EAGLE,
    )


@pytest.mark.parametrize("is_captured", [False, True], ids=["by pat", "by SGLang"])
@pytest.mark.parametrize(("algorithm", "hidden_states"), [("EAGLE", 2), ("STANDALONE", None)])
def test_captured_steps_return_hidden_states_where_prompts_do(
    worker: Any, algorithm: str, hidden_states: int | None, is_captured: bool
) -> None:
    """SGLang merges them over requests: a part of them would be indexed as if it were all."""
    if is_captured:  # 0.5.23 does over FA3, 0.5.17 does not
        worker.cuda_graph_runner_for_draft_extend = Captured(worker)
    worker.speculative_algorithm = SpeculativeAlgorithm[algorithm]
    speculative_attach._after_capture(None, worker)
    out = worker.cuda_graph_runner_for_draft_extend.execute(None, None)
    assert (out.next_token_logits, out.hidden_states) == (1, hidden_states)


def test_what_is_read_is_captured_where_sglang_does_not(worker: Any) -> None:
    speculative_attach._after_capture(None, worker)
    assert isinstance(worker.cuda_graph_runner_for_draft_extend, Captured)


@pytest.mark.parametrize(
    "why", ["captured", "cpu", "off", "default", "layers", "warm-up", "others"]
)
def test_what_is_read_is_not_captured(
    worker: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_support, before = inside.layer_support(worker.extending.backend), None
    leave = lambda: layer_support.fall_back(1, Unsupported("attention", "a test"))  # noqa: E731
    if why == "captured":
        before = worker.cuda_graph_runner_for_draft_extend = object()
    elif why == "cpu":
        worker.device = "cpu"
    elif why == "off":
        monkeypatch.setattr(speculative_attach, "_captures_extends", lambda: False)
    elif why == "default":
        worker.draft_extend_attn_backend = DefaultBackend()
    elif why == "layers":
        leave()
    elif why == "warm-up":  # shows a layer that the default backend has to do
        monkeypatch.setattr(Captured, "warm_up", leave)
    elif why == "others":  # of another kind, which have no such steps
        worker = SimpleNamespace(cuda_graph_runner_for_draft_extend=None)
    speculative_attach._after_capture(None, worker)
    assert worker.cuda_graph_runner_for_draft_extend is before


@pytest.mark.skipif(
    not hasattr(AttentionBackend, "shared_read_ends"), reason="this SGLang does not ask"
)
def test_the_scheduler_may_write_before_a_replay_where_pat_alone_reads() -> None:
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    mode = ForwardMode.DRAFT_EXTEND_V2
    assert Extending().backend.shared_read_ends(mode) is SharedReadEnds.PRE_REPLAY
    mixed = Extending(model=layers(sliding_window_size=128)).backend
    assert mixed.shared_read_ends(mode) is SharedReadEnds.UNKNOWN  # as of SGLang's base class


# --- the default backend ---


def test_prompts_are_the_default_backends() -> None:
    extending = Extending()
    view = decode_batch([1], [5], [7])
    view.forward_mode = ForwardMode.EXTEND
    extending.backend.init_forward_metadata(view)
    q = torch.randn(1, QO_HEADS, HEAD_DIM)
    assert extending.backend.forward_extend(q, None, None, extending.runner.model[0], view) is q
    assert extending.backend.calls == ["out_graph", "in_graph", "extend"]


def test_layers_that_pat_does_not_do_are_the_default_backends() -> None:
    extending = Extending(model=layers(sliding_window_size=8))
    extending.verify([25, 31], 0)
    view = extending.view([25, 31])
    extending.prepare(view)
    assert extending.backend.calls == ["out_graph", "in_graph"]
    q, out = extending.attend(view, layer=0)
    extending.assert_request(q, out, 0, 25)
    extending.attend(view, layer=1)
    assert extending.backend.calls[2:] == ["extend"]
    told = layer_report._after_get_init_info({})["pat"]["draft_extend"]
    assert (told["pat_layers"], told["default_layers"]) == (1, {"sliding window 8": 1})


@pytest.mark.parametrize("topk", [1, 2])
def test_a_layer_that_is_passed_more_is_left_to_the_default_backend(topk: int) -> None:
    extending = Extending(arguments={"speculative_eagle_topk": topk})
    if topk == 1:
        extending.verify([25, 31], 2)
    view = extending.view([25, 31], 2)
    extending.prepare(view, 2)
    extending.attend(view, layer=0, rope=1)
    assert extending.backend.calls[-3:] == ["out_graph in capture", "in_graph", "extend"]
    told = layer_report._after_get_init_info({})["pat"]
    assert told["draft_extend"]["default_layers"] == {"the argument rope": 1}
    assert told["default_layers"] == {}
    if topk == 1:
        q, out = extending.attend(view, layer=1)
        extending.assert_request(q, out, 0, 25, layer=1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "npu"}, "device npu"),
        ({"draft_attention_backend": "fa3"}, "--speculative-draft-attention-backend fa3"),
        (
            {
                "arguments": {"enable_multi_layer_eagle": True},
                "req_to_token_pool": HybridReqToTokenPool.__new__(HybridReqToTokenPool),
            },
            "--enable-multi-layer-eagle with states",
        ),
        ({"default": SimpleNamespace()}, "default backend SimpleNamespace, which is closed"),
        (
            {"dtype": torch.bfloat16, "kv_cache_dtype": torch.bfloat16, "token_to_kv_pool": None},
            "dtype of queries and KV cache torch.bfloat16 and torch.bfloat16",
        ),
    ],
    ids=["device", "named", "several layers", "closed", "other numbers"],
)
def test_draft_models_that_are_left_to_the_default_backend(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    if "token_to_kv_pool" in change:
        change = change | {"token_to_kv_pool": KVPool(torch.bfloat16)}
    before = type(change.get("default", DefaultBackend()))
    extending = Extending(**change)
    assert type(extending.backend) is before
    assert "draft_extend" not in extending.counters
    assert told_default_layers("draft_extend") == reason.removeprefix("default backend ")
    assert "reading what was accepted: pat decodes nothing" in caplog.text


def test_without_speculation_or_with_branches_no_draft_model_is_awaited() -> None:
    pat_backend(runner())
    extending = Extending()
    pat_backend(runner())  # another one, built later in the process
    backend = DefaultBackend()
    factory = SimpleNamespace(draft_model_runner=extending.runner)
    assert speculative_attach._after_create_extend_backend(backend, factory) is backend
    assert type(backend) is DefaultBackend
    assert speculative_attach._after_create_extend_backend(None, factory) is None


class RefreshedInGraphs(DefaultBackend):
    """Backend like FA3: its graphs refresh their inputs themselves."""

    supports_draft_extend_metadata_staging = True

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True


class SeveralLayers(Extending):
    """A draft model of several layers (`--enable-multi-layer-eagle`).

    SGLang has a runner, a pool, a backend and graphs for each, over buffers that they share.
    """

    def __init__(self, count: int = 3) -> None:
        super().__init__(arguments={"enable_multi_layer_eagle": True}, default=RefreshedInGraphs())
        self.of_layers = [(self.runner, self.backend)]
        for seed in range(1, count):
            runner = self.new_runner(token_to_kv_pool=kv_pool(2 + seed), is_draft_worker=True)
            made = RefreshedInGraphs()
            speculative_attach._after_create_extend_backend(
                made, SimpleNamespace(draft_model_runner=runner)
            )
            self.of_layers.append((runner, made))

    def each(self) -> Iterator[None]:
        """One layer after the other."""
        for pair in self.of_layers:
            self.runner, self.backend = pair
            yield

    def replayed(self, lens: list[int], size: int) -> Any:
        """SGLang's view before it replays the graph of each layer.

        It has drafts of its own in place of the batch's, and buffers of the largest graph.
        """
        shown = self.view(lens, size)
        graphs = SimpleNamespace(_replay_spec_info=drafts_to_verify(DRAFTS))
        speculative_attach._after_prepare(None, graphs, shown, staged=False)
        shown.spec_info = graphs._replay_spec_info
        shown.input_ids = torch.zeros(size * DRAFTS)
        shown.out_cache_loc = torch.tensor(self.slots(lens) + [0] * (size - 2) * DRAFTS)
        return shown


@pytest.mark.parametrize("size", [0, 2, 4])
def test_several_draft_layers_read_under_the_plan_of_the_verify_step(size: int) -> None:
    scene = SeveralLayers()
    for _ in scene.each():
        if size:
            scene.capture(size)
    built = scene.counters["plans_built"]
    for step, lens in enumerate(([25, 31], [26, 33], [29, 34])):
        scene.verify(lens, size)
        view = scene.replayed(lens, size) if size else scene.view(lens)
        if not size:
            scene.of_layers[0][1].init_forward_metadata(view)  # with the batch, before its turn
        for _ in scene.each():
            scene.prepare(view, size)
            scene.assert_exact(view, lens, max(size, 2) * DRAFTS)
        assert scene.counters["draft_extend"]["steps"] == 3 * (step + 1)
    assert scene.counters["plans_built"] == built + 1, "the verify steps' plan serves all layers"


def test_graphs_of_several_draft_layers_are_prepared_before_each_replay() -> None:
    """Otherwise the plan that they read would be that of another step."""
    scene = SeveralLayers()
    assert not scene.backend.draft_extend_metadata_captured_in_graph()
    assert not scene.backend.supports_draft_extend_metadata_staging
    left = Extending(draft_attention_backend="fa3", default=RefreshedInGraphs()).backend
    assert left.draft_extend_metadata_captured_in_graph()
    assert left.supports_draft_extend_metadata_staging


def test_no_lengths_are_asked_for_on_the_host() -> None:
    extending = Extending()
    assert not extending.backend.needs_cpu_seq_lens
    assert not extending.served.needs_cpu_seq_lens
