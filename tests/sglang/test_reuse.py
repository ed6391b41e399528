"""PlanReuse: one object decides whether a captured step repeats the last one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_pat._scheduler import growth_of
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.speculative.rows import DeviceRows, RowShape
from sglang_pat.sglang.speculative.steps import SpeculativeStep
from sglang_pat.sglang.step.plan_reuse import PlanReuse
from sglang_pat.sglang.tree.request_tracker import RequestTracker, StepRequests

DECODE: Any = SimpleNamespace(name="decode")
VERIFY: Any = SimpleNamespace(name="verify")
GRAPHS: Any = SimpleNamespace(name="plans of the graphs")
EAGER: Any = SimpleNamespace(name="plans of eager steps")
REQS: list[Any] = [SimpleNamespace(), SimpleNamespace()]
ROWS = 4


@pytest.fixture
def tracker() -> RequestTracker:
    return RequestTracker()


@pytest.fixture
def reuse(tracker: RequestTracker) -> PlanReuse:
    """After a decode step of two requests, which two more steps may repeat."""
    reuse = PlanReuse(tracker)
    reuse.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    reuse.permit_skips(2)
    return reuse


def asked(reuse: PlanReuse) -> StepReason | None:
    return reuse.reason(DECODE, REQS, GRAPHS, ROWS)


def test_a_step_repeats_the_last_one_as_often_as_allowed(reuse: PlanReuse) -> None:
    for _ in range(2):
        assert asked(reuse) is None
        assert asked(reuse) is None, "asking changes nothing"
        reuse.count()
    assert asked(reuse) is StepReason.DUE


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (
            (DECODE, list(REQS), GRAPHS, ROWS),
            StepReason.REQUESTS,
        ),  # an equal list is another batch
        ((DECODE, None, GRAPHS, ROWS), StepReason.REQUESTS),
        ((VERIFY, REQS, GRAPHS, ROWS), StepReason.KIND),
        ((DECODE, REQS, EAGER, ROWS), StepReason.PLACE),
        ((DECODE, REQS, None, ROWS), StepReason.PLACE),
        ((DECODE, REQS, GRAPHS, ROWS + 1), StepReason.ROWS),
    ],
)
def test_another_step_is_planned(reuse: PlanReuse, step: Any, reason: StepReason) -> None:
    assert reuse.reason(*step) is reason


def test_the_first_step_is_planned(tracker: RequestTracker) -> None:
    assert asked(PlanReuse(tracker)) is StepReason.FIRST


def test_a_warm_up_is_forgotten(reuse: PlanReuse) -> None:
    reuse.begin_plan(DECODE, None, GRAPHS, ROWS, StepReason.PRIVATE)
    reuse.permit_skips(2)
    assert asked(reuse) is StepReason.FIRST
    assert reuse.reason(DECODE, None, GRAPHS, ROWS) is StepReason.FIRST


@pytest.mark.parametrize("why", [StepReason.PRIVATE, StepReason.EAGER])
def test_nothing_repeats_a_step_before_it_is_allowed(reuse: PlanReuse, why: StepReason) -> None:
    reuse.begin_plan(DECODE, REQS, GRAPHS, ROWS, why)
    assert asked(reuse) is why


@pytest.mark.parametrize("why", [StepReason.CHECKED, StepReason.GRAPH])
def test_nothing_repeats_a_step_that_was_stopped(reuse: PlanReuse, why: StepReason) -> None:
    reuse.block_skips(why)
    assert asked(reuse) is why
    assert reuse.in_place(DECODE, REQS) is GRAPHS, "its plan stays"


@pytest.mark.parametrize(
    "move",
    [
        lambda tracker: tracker.invalidate([SimpleNamespace()]),  # any request: a prompt has run
        lambda tracker: tracker.invalidate_all(),
    ],
)
def test_requests_that_moved_are_planned(
    reuse: PlanReuse, tracker: RequestTracker, move: Callable[[RequestTracker], None]
) -> None:
    move(tracker)
    reuse.block_skips(StepReason.CHECKED)
    assert asked(reuse) is StepReason.MOVED, "which says more than what came later"
    reuse.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    move(tracker)
    reuse.permit_skips(2)
    assert asked(reuse) is StepReason.MOVED, "while the step was planned, too"
    reuse.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    reuse.permit_skips(2)
    assert asked(reuse) is None


def test_a_mixed_batch_in_which_all_decode_moves_nothing(
    reuse: PlanReuse, tracker: RequestTracker
) -> None:
    tracker.invalidate([])
    assert asked(reuse) is None


def test_reasons_are_asked_in_the_order_of_the_table(tracker: RequestTracker) -> None:
    """With everything wrong at once, each reason hides those behind it."""
    reuse = PlanReuse(tracker)
    step = [VERIFY, list(REQS), EAGER, ROWS + 1]
    right = [DECODE, REQS, GRAPHS, ROWS]
    found = [reuse.reason(*step)]
    reuse.begin_plan(*right, StepReason.PRIVATE)  # type: ignore[arg-type]
    tracker.invalidate_all()
    order = [1, 0, 2, 3]
    for i in order:
        found.append(reuse.reason(*step))
        step[i] = right[i]
    found.append(reuse.reason(*step))
    assert found == list(StepReason)[:6]


def test_the_plan_of_a_verify_step_serves_what_follows_it(reuse: PlanReuse) -> None:
    reuse.begin_plan(VERIFY, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    assert reuse.in_place(VERIFY, REQS) is GRAPHS
    assert reuse.in_place(VERIFY, list(REQS)) is None
    assert reuse.in_place(DECODE, REQS) is None
    reuse.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    assert reuse.in_place(VERIFY, REQS) is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_requests_that_speculate_repeat_until_one_has_outgrown_the_plan(dtype: type) -> None:
    step = SpeculativeStep(RowShape(first=1), DeviceRows())
    requests = StepRequests([], None, has_beams=False)
    step._lens, step._room = np.array([7, 5], np.int32), np.array([3, 9], np.int32)
    for lengths, growth in (
        ([7, 5], 0),
        ([10, 14], 12),
        ([10, 14, 1, 1], 12),  # padding of a graph
        ([11, 5], None),
        ([7, 15], None),
        ([6, 5], None),
        ([7], None),
    ):
        batch = SimpleNamespace(seq_lens_cpu=torch.from_numpy(np.array(lengths, dtype=dtype)))
        assert step.repeat(batch, requests) == growth


def test_growth_of_lengths_that_lie_apart_or_are_huge() -> None:
    least, room = np.array([7, 5], dtype=np.int32), np.array([3, 9], dtype=np.int32)
    assert growth_of(np.array([8, 0, 7, 0], dtype=np.int64)[::2], least, room) == 3
    assert growth_of(np.array([1 << 40, 5]), least, room) is None
    assert growth_of(np.array([-(1 << 40), 5]), least, room) is None
    with pytest.raises(ValueError, match="least and room must have the same size, got 2 and 1"):
        growth_of(np.array([7, 5]), least, room[:1])


def test_a_decoder_that_is_gone_is_not_told(tracker: RequestTracker) -> None:
    reuse = PlanReuse(tracker)
    assert len(tracker._caches) == 1
    del reuse
    gc.collect()
    assert len(tracker._caches) == 0
