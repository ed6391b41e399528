"""RepeatRule decides whether a captured step repeats the last one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_pat._scheduler import growth_of
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.step.repeated_steps import RepeatRule
from sglang_pat.sglang.tree.request_tracker import RequestTracker

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
def rule(tracker: RequestTracker) -> RepeatRule:
    """Return the state after a decode step of two requests, which two more steps may repeat."""
    rule = RepeatRule(tracker)
    rule.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    rule.plan_after(2, StepReason.DUE)
    return rule


def asked(rule: RepeatRule) -> StepReason | None:
    return rule.reason(DECODE, REQS, GRAPHS, ROWS)


def test_a_step_repeats_the_last_one_as_often_as_allowed(rule: RepeatRule) -> None:
    for _ in range(2):
        assert asked(rule) is None
        assert asked(rule) is None, "asking changes nothing"
        rule.count()
    assert asked(rule) is StepReason.DUE


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        # A copy of the list is another batch.
        ((DECODE, list(REQS), GRAPHS, ROWS), StepReason.REQUESTS),
        ((DECODE, None, GRAPHS, ROWS), StepReason.REQUESTS),
        ((VERIFY, REQS, GRAPHS, ROWS), StepReason.KIND),
        ((DECODE, REQS, EAGER, ROWS), StepReason.PLACE),
        ((DECODE, REQS, GRAPHS, ROWS + 1), StepReason.ROWS),
    ],
)
def test_another_step_is_planned(rule: RepeatRule, step: Any, reason: StepReason) -> None:
    assert rule.reason(*step) is reason


@pytest.mark.parametrize(
    "move",
    [
        lambda tracker: tracker.invalidate([SimpleNamespace()]),  # a prompt has run
        lambda tracker: tracker.invalidate_all(),
    ],
)
def test_requests_that_moved_are_planned(
    rule: RepeatRule, tracker: RequestTracker, move: Callable[[RequestTracker], None]
) -> None:
    move(tracker)
    rule.plan_after(0, StepReason.CHECKED)
    assert asked(rule) is StepReason.MOVED, "which says more than what came later"
    rule.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    move(tracker)
    rule.plan_after(2, StepReason.DUE)
    assert asked(rule) is StepReason.MOVED, "while the step was planned, too"
    rule.begin_plan(DECODE, REQS, GRAPHS, ROWS, StepReason.PRIVATE)
    rule.plan_after(2, StepReason.DUE)
    assert asked(rule) is None


def test_a_mixed_batch_in_which_all_decode_moves_nothing(
    rule: RepeatRule, tracker: RequestTracker
) -> None:
    tracker.invalidate([])
    assert asked(rule) is None


def test_growth_of_lengths_that_lie_apart_or_are_huge() -> None:
    least, room = np.array([7, 5], dtype=np.int32), np.array([3, 9], dtype=np.int32)
    assert growth_of(np.array([8, 0, 7, 0], dtype=np.int64)[::2], least, room) == 3
    assert growth_of(np.array([8, 7, 1], dtype=np.int32), least, room) == 3  # padding last
    assert growth_of(np.array([1 << 40, 5]), least, room) is None
    assert growth_of(np.array([-(1 << 40), 5]), least, room) is None
    with pytest.raises(ValueError, match="least and room must have the same size, got 2 and 1"):
        growth_of(np.array([7, 5]), least, room[:1])


def test_a_decoder_that_is_gone_is_not_told(tracker: RequestTracker) -> None:
    rule = RepeatRule(tracker)
    assert len(tracker._listeners) == 1
    del rule
    gc.collect()
    assert len(tracker._listeners) == 0
