"""SGLang changes the number of drafts at run time (`--speculative-adaptive`; see `scene`).

SGLang has backends and graphs for each number. Those built first are captured for the most
requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import inspect_backend as inside
import pytest
from scene import Extends, Scene, Steps
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_trees import late_lengths

from sglang_pat.reasons import StepReason
from sglang_pat.sglang.speculative import attach, backends
from sglang_pat.sglang.start.server_options import drafts_now, drafts_of, server_reason

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")

STEPS = (3, 0, 1)  # steps of a round, in the order in which SGLang builds their backends
VERIFY = ForwardMode.TARGET_VERIFY


@contextmanager
def building(drafts: int) -> Iterator[None]:
    """Let SGLang build the backends for a number of drafts."""

    def now(arguments: Any) -> int:
        """Return `drafts_now`. SGLang's `get_spec` is replaced only for the call."""
        with pytest.MonkeyPatch.context() as patch:
            spec = SimpleNamespace(speculative_num_draft_tokens=drafts)
            patch.setattr(runtime_context, "get_spec", lambda: spec)
            return drafts_now(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "drafts_now", now)
        yield


class State(NamedTuple):
    """The backends for a number of drafts."""

    served: Steps
    extend: Extends

    @property
    def step_type(self) -> Any:
        return inside.step_types(self.served.backend)[VERIFY]


class Adaptive(Scene):
    """Three numbers of drafts. After startup, SGLang builds the draft model's backends first."""

    def __init__(self, folder: Path) -> None:
        config = folder / "adaptive.json"
        numbers = {"1": {"candidate_steps": [0, 1]}, "2": {"candidate_steps": [3]}}
        config.write_text(json.dumps(numbers))
        with building(STEPS[0] + 1):
            super().__init__(
                drafts=STEPS[0] + 1,
                is_checked=False,
                speculative_algorithm="EAGLE",
                speculative_adaptive=True,
                speculative_adaptive_config=str(config),
            )
        model_runner = self.draft_runner()
        self.states = {}
        for steps in STEPS:
            with building(steps + 1):
                if steps > 1:
                    self.rounds(steps - 1, model_runner=model_runner).reserve()
                extend = self.extends(model_runner=model_runner, drafts=steps + 1)
                extend.reserve()
                served = self.served
                if self.states:
                    served = self.new_served(steps + 1)
                    served.reserve(2)  # SGLang captures fewer graphs
            self.states[steps] = State(served, extend)

    def verify(self, steps: int, lens: list[int], graph: int) -> None:
        served = self.states[steps].served
        served.assert_exact(served.step(lens, graph, seq_lens_cpu=None), lens)


@pytest.fixture
def adaptive(tmp_path: Path) -> Adaptive:
    return Adaptive(tmp_path)


def test_one_planner_plans_for_all_numbers_of_drafts(adaptive: Adaptive) -> None:
    assert server_reason(adaptive.arguments) is None
    drafts = drafts_of(adaptive.arguments)
    assert drafts is not None
    assert drafts.counts == (1, 2, 4)
    built = [each.backend for state in adaptive.states.values() for each in state]
    assert {type(each).__mro__[1] for each in built} == {backends.PatSpeculativeMixin}
    assert {id(inside.planner(each)) for each in built} == {id(adaptive.served.planner)}
    for steps, state in adaptive.states.items():
        assert state.step_type.shape.per_request == steps + 1
        extend = inside.step_types(state.extend.backend)[ForwardMode.DRAFT_EXTEND_V2]
        assert extend.follows is state.step_type


@pytest.mark.parametrize("graph", [0, 2])
def test_drafts_are_verified_in_any_number(graph: int, adaptive: Adaptive) -> None:
    for state in adaptive.states.values() if graph else ():
        state.served.capture(graph)
    verified = 0
    for steps in (3, 1, 1, 0, 3, 0, 1, 3):
        extend = adaptive.states[steps].extend
        for lens in late_lengths(adaptive.reqs):
            adaptive.verify(steps, lens, graph)
            if not graph and steps:
                extend.assert_exact(extend.step(lens), lens)
            verified += 2 * (steps + 1)
    assert adaptive.counters["verify"] == {"steps": 8 * 4, "rows": verified}
    assert sum(adaptive.counters["steps_without_sharing"].values()) == (len(STEPS) if graph else 0)


def test_graphs_of_all_numbers_lie_in_memory_that_stays(adaptive: Adaptive) -> None:
    """SGLang later reserves for fewer requests, but captured graphs read the first reservation."""
    planner, state = adaptive.served.planner, adaptive.states[3]
    captured = inside.microbatch(planner).captured
    rows = {count: each.device_rows for count, each in planner.verifies.items()}
    lies = {count: each._reserved.data_ptr() for count, each in rows.items()}
    state.served.capture(4)
    assert state.step_type.graphs_are_complete
    for other in (0, 1):
        adaptive.states[other].served.reserve(1)
    assert state.step_type.graphs_are_complete
    assert inside.microbatch(planner).captured is captured
    assert {count: each._reserved.data_ptr() for count, each in rows.items()} == lies
    assert rows[4]._reserved.shape == (2, 4 * 4)  # for the most requests


def test_graphs_of_more_requests_come_first(adaptive: Adaptive) -> None:
    """Memory for more requests would move, and graphs would read the old addresses."""
    first, later = adaptive.states[3].served, adaptive.states[1].served
    later.reserve(6)  # nothing has been captured
    first.capture(4)
    with pytest.raises(RuntimeError, match=r"of 6 requests, .* of 8"):
        later.reserve(8)
    first.reserve(8)  # all graphs are captured again


def test_a_step_with_another_number_of_drafts_is_planned(adaptive: Adaptive) -> None:
    for state in adaptive.states.values():
        state.served.capture(2)
    before, lens = adaptive.served.num_repeated, [25, 31]
    adaptive.commit(lens)
    for steps in (3, 3, 1, 1, 1, 3):
        adaptive.verify(steps, lens, 2)
    assert adaptive.served.num_repeated - before == 3
    assert adaptive.counters["steps_planned"] == {StepReason.FIRST: 1, StepReason.KIND: 2}


def test_rounds_of_each_number_are_counted_together(adaptive: Adaptive) -> None:
    assert adaptive.counters["draft"]["steps"] == 0
    drafting = adaptive.served.planner._drafting
    assert len(drafting) == 1  # rounds of one step have no backend
    assert [step_type._num_steps for each in drafting for step_type in each.step_types] == [2]


def test_the_server_info_names_the_draft_model(adaptive: Adaptive) -> None:
    """SGLang builds the backends of the served model last."""
    told = inside.server_info()
    assert told["draft_model"]["pat_layers"] == told["draft_extend"]["pat_layers"] == 2
