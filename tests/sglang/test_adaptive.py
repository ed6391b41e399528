"""Numbers of drafts between which SGLang changes (`--speculative-adaptive`).

SGLang has backends and graphs for each number. The first are built and captured for most requests.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_draft_models import ROWS, DraftScene, kv_pool
from sglang_fakes import (
    HEAD_DIM,
    QO_HEADS,
    DefaultBackend,
    decode_batch,
    dense,
    drafts_to_verify,
    pat_backend,
    replay_view,
)
from sglang_trees import late_lengths, place

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.report import layer_report
from sglang_pat.sglang.speculative import attach as speculative_attach
from sglang_pat.sglang.speculative import backends
from sglang_pat.sglang.start.server_options import drafts_now, drafts_of, server_reason
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

STEPS = (3, 0, 1)  # of a round; in the order in which SGLang builds backends for them


def drafts_of_state(count: int, arguments: Any) -> int:
    """`drafts_now`, where SGLang says so many. Briefly: other modules import `get_spec`, too."""
    with pytest.MonkeyPatch.context() as patch:
        spec = SimpleNamespace(speculative_num_draft_tokens=count)
        patch.setattr(runtime_context, "get_spec", lambda: spec)
        return drafts_now(arguments)


class State:
    """Backends for a number of drafts."""

    def __init__(self, steps: int, served: Any, drafting: Any, extend: Any) -> None:
        self.count = steps + 1
        self.served, self.drafting, self.extend = served, drafting, extend


class Adaptive(DraftScene):
    """A served model and a draft model, over the backends of three numbers of drafts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = folder / "adaptive.json"
        config.write_text(
            json.dumps({"1": {"candidate_steps": [0, 1]}, "2": {"candidate_steps": [3]}})
        )
        arguments = {
            "speculative_algorithm": "EAGLE",
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(config),
        }
        super().__init__(num_drafts=STEPS[0] + 1, arguments=arguments)
        self.target = self.new_runner(token_to_kv_pool=kv_pool(2), is_draft_worker=False)
        self.runner = self.new_runner(token_to_kv_pool=kv_pool(1), is_draft_worker=True)
        self.states = {}
        for steps in STEPS:
            monkeypatch.setattr(
                speculative_attach, "drafts_now", partial(drafts_of_state, steps + 1)
            )
            monkeypatch.setattr(
                speculative_attach, "drafts_now", partial(drafts_of_state, steps + 1)
            )
            self.states[steps] = self.build(steps)
        self.served = self.states[STEPS[0]].served

    def build(self, steps: int) -> State:
        """SGLang builds those of the draft model first, but when it starts."""
        is_first = not self.states
        served = pat_backend(self.target) if is_first else None
        if is_first:
            served.init_cuda_graph_state(4, 4 * (steps + 1))
        factory = SimpleNamespace(draft_model_runner=self.runner)
        drafting: Any = None
        extend = DefaultBackend()
        if steps > 1:
            drafting = Steps([DefaultBackend() for _ in range(steps - 1)])
            speculative_attach._after_create_decode_backend(drafting, factory)
            drafting.init_cuda_graph_state(4, 4)
        speculative_attach._after_create_extend_backend(extend, factory)
        extend.init_cuda_graph_state(4, 4 * (steps + 1))
        if served is None:
            served = pat_backend(self.target)
            served.init_cuda_graph_state(2, 2 * (steps + 1))  # SGLang captures fewer graphs
        return State(steps, served, drafting, extend)

    def view(self, count: int, lens: list[int], size: int) -> Any:
        slots = [
            int(self.table[row, n + i])
            for row, n in zip(ROWS, lens, strict=True)
            for i in range(count)
        ]
        more: dict[str, Any] = {"spec_info": drafts_to_verify(count)}
        if size:
            view = replay_view(list(ROWS), lens, slots, size, **more)
        else:
            view = decode_batch(list(ROWS), lens, slots, **more)
        view.forward_mode, view.seq_lens_cpu = ForwardMode.TARGET_VERIFY, None
        return view

    def capture(self, state: State, size: int) -> None:
        view = decode_batch([0] * size, [1] * size, [0] * size * state.count)
        view.forward_mode, view.spec_info = ForwardMode.TARGET_VERIFY, drafts_to_verify(state.count)
        state.served.init_forward_metadata_out_graph(view, in_capture=True)
        state.served.init_forward_metadata_in_graph(view)

    def verify(self, state: State, lens: list[int], size: int) -> None:
        view = self.view(state.count, lens, size)
        request_tracker._after_init_new(view, object, self.scheduled, self.target)
        with REQUEST_TRACKER.running(view):
            if size:
                state.served.init_forward_metadata_out_graph(view)
                state.served.init_forward_metadata_in_graph(view)
                for attention in inside.attentions(
                    inside.plans(state.served)
                ):  # kernels read it in each replay
                    attention._executor.reuse_plan(attention._executor._step)
            else:
                state.served.init_forward_metadata(view)
            self.assert_chain(state.served, self.target, view, lens, state.count)

    def read(self, state: State, lens: list[int]) -> None:
        """The draft model reads what was verified."""
        ends = [length + state.count for length in lens]
        view = self.view(state.count, lens, 0)
        read = decode_batch(list(ROWS), ends, view.out_cache_loc.tolist())
        read.forward_mode, read.spec_info = ForwardMode.DRAFT_EXTEND_V2, view.spec_info
        read.input_ids = torch.zeros(len(view.out_cache_loc))
        request_tracker._after_init_new(read, object, self.scheduled, self.runner)
        state.extend.init_forward_metadata(read)
        self.assert_chain(state.extend, self.runner, read, lens, state.count)

    def assert_chain(
        self, attending: Any, runner: Any, view: Any, lens: list[int], count: int
    ) -> None:
        """Each draft token reads its request, and those before it."""
        q = torch.randn(view.batch_size * count, QO_HEADS, HEAD_DIM)
        out = attending.forward_extend(q, None, None, runner.model[0], view).view(q.shape)
        for row in range(len(lens) * count):
            request, token = divmod(row, count)
            slots = self.table[ROWS[request], : lens[request] + token + 1].long()
            exact = dense(q[row], runner.token_to_kv_pool, 0, slots)
            torch.testing.assert_close(out[row].double(), exact, atol=2e-6, rtol=2e-6)
        assert out.isfinite().all()


class Steps:
    """In place of a default backend's container of the steps of a round."""

    def __init__(self, attn_backends: list[Any]) -> None:
        self.attn_backends = attn_backends

    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...


@pytest.fixture
def adaptive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace
) -> Adaptive:
    """Torch passes for something that can be captured; nothing is left of other tests."""
    server_context.observability.decode_log_interval = 1000
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    inside.forget_requests()
    monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
    monkeypatch.setattr(speculative_attach._TargetModel, "planner", None)
    return Adaptive(tmp_path, monkeypatch)


def test_one_decoder_plans_for_all_numbers_of_drafts(adaptive: Adaptive) -> None:
    assert server_reason(adaptive.arguments) is None
    drafts = drafts_of(adaptive.arguments)
    assert drafts is not None
    assert drafts.counts == (1, 2, 4)
    built = [each for state in adaptive.states.values() for each in (state.served, state.extend)]
    assert {type(each).__mro__[1] for each in built} == {backends.PatSpeculativeMixin}
    assert {id(inside.planner(each)) for each in built} == {id(inside.planner(adaptive.served))}
    for steps, state in adaptive.states.items():
        assert inside.kinds(state.served)[ForwardMode.TARGET_VERIFY].shape.per_request == steps + 1
        extend = inside.kinds(state.extend)[ForwardMode.DRAFT_EXTEND_V2]
        assert extend.follows is inside.kinds(state.served)[ForwardMode.TARGET_VERIFY]


@pytest.mark.parametrize("size", [0, 2])
def test_drafts_are_verified_in_any_number(size: int, adaptive: Adaptive) -> None:
    for steps in STEPS:
        if size:
            adaptive.capture(adaptive.states[steps], size)
    verified = 0
    for steps in (3, 1, 1, 0, 3, 0, 1, 3):
        state = adaptive.states[steps]
        for lens in late_lengths(adaptive.reqs):
            adaptive.verify(state, lens, size)
            if not size and steps:
                adaptive.read(state, lens)
            verified += 2 * state.count
    assert adaptive.counters["verify"] == {"steps": 8 * 4, "rows": verified}
    assert sum(adaptive.counters["steps_without_sharing"].values()) == (len(STEPS) if size else 0)


def test_graphs_of_all_numbers_lie_in_memory_that_stays(adaptive: Adaptive) -> None:
    """SGLang reserves for fewer requests later; what it has captured reads what was reserved."""
    planner = inside.planner(adaptive.served)
    captured = inside.microbatch(planner).captured
    rows = {count: each.device_rows for count, each in planner.verifies.items()}
    lies = {count: each._reserved.data_ptr() for count, each in rows.items()}
    state = adaptive.states[3]
    adaptive.capture(state, 4)
    assert inside.kinds(state.served)[ForwardMode.TARGET_VERIFY].graphs_are_complete
    for other in (adaptive.states[0], adaptive.states[1]):
        other.served.init_cuda_graph_state(1, other.count)
    assert inside.kinds(state.served)[ForwardMode.TARGET_VERIFY].graphs_are_complete
    assert inside.microbatch(planner).captured is captured
    assert {count: each._reserved.data_ptr() for count, each in rows.items()} == lies
    assert rows[4]._reserved.shape == (2, 4 * 4)  # of most requests


def test_graphs_of_more_requests_come_first(adaptive: Adaptive) -> None:
    """Memory for more would be elsewhere, and graphs would read what is no longer written."""
    first, later = adaptive.states[3], adaptive.states[1]
    later.served.init_cuda_graph_state(6, 6 * later.count)  # nothing has been captured
    adaptive.capture(first, 4)
    with pytest.raises(RuntimeError, match=r"of 6 requests, .* of 8"):
        later.served.init_cuda_graph_state(8, 8 * later.count)
    first.served.init_cuda_graph_state(8, 8 * first.count)  # all graphs are captured again


def test_a_step_with_another_number_of_drafts_is_planned(adaptive: Adaptive) -> None:
    for steps in STEPS:
        adaptive.capture(adaptive.states[steps], 2)
    before = inside.num_repeated(adaptive.served)
    lens = [25, 31]
    for req, length in zip(adaptive.reqs, lens, strict=True):
        place(req).kv_committed_len = length
    for steps in (3, 3, 1, 1, 1, 3):
        adaptive.verify(adaptive.states[steps], lens, 2)
    assert inside.num_repeated(adaptive.served) - before == 3
    assert adaptive.counters["steps_planned"] == {StepReason.FIRST: 1, StepReason.KIND: 2}


def test_rounds_of_each_number_are_counted_together(adaptive: Adaptive) -> None:
    assert adaptive.counters["draft"]["steps"] == 0
    planner = inside.planner(adaptive.served)
    assert len(planner._drafting) == 1  # rounds of one step have no backend of their own
    assert [kind._num_steps for each in planner._drafting for kind in each.kinds] == [2]


def test_the_server_info_names_the_draft_model(adaptive: Adaptive) -> None:
    """SGLang builds the backends of the served model last."""
    told = layer_report._after_get_init_info({})["pat"]
    layers = len(adaptive.runner.model)
    assert told["draft_model"]["pat_layers"] == told["draft_extend"]["pat_layers"] == layers
