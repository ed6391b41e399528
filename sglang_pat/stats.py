"""PlanStats: counters and planning times of decode steps.

`PackAttention` counts the steps that it plans. SGLang's log line, metrics and stats file
(`sglang/report/reports.py`) read the counters through `read_counters()`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

from sglang_pat.plan import KvTokens
from sglang_pat.reasons import StepReason

PlanningKind = Literal["unchanged", "changed", "cold"]


class PlanningTime(NamedTuple):
    """The host time of one step."""

    kind: PlanningKind
    nanoseconds: int


def bound_of(nanoseconds: int) -> int:
    """Return the smallest histogram bound of `PlanningTimes` that is above a time."""
    shift = max(nanoseconds.bit_length() - 5, 0)
    return ((nanoseconds >> shift) + 1) << shift


class PlanningTimes(dict[str, Counter[int]]):
    """Histograms of planning times, by kind of step.

    A histogram maps each bound, in ns, to how many planning times lie between the next smaller
    bound and this bound. There are 16 bounds per octave, so a percentile is at most 1/16 too high.
    Histograms can be added with `+` and serialised to JSON.

    "unchanged": the plan was reused. "changed": a plan was built, and the forest had kept at least
    one path. "cold": a plan was built, and all paths were new or came as arrays.
    """

    def record(self, kind: PlanningKind, nanoseconds: int) -> None:
        bound = bound_of(nanoseconds)
        histogram = self.get(kind)
        if histogram is None:
            histogram = self[kind] = Counter()
        histogram[bound] += 1

    def since(self, before: PlanningTimes) -> PlanningTimes:
        """Return the times recorded since `before`, an earlier copy of these histograms."""
        return PlanningTimes(
            {kind: each - before.get(kind, Counter()) for kind, each in self.items()}
        )

    def __add__(self, other: PlanningTimes) -> PlanningTimes:
        total = PlanningTimes()
        for times in (self, other):
            # Iterates over copies, because another thread may be recording.
            for kind, histogram in dict(times).items():
                total.setdefault(kind, Counter()).update(dict(histogram))
        return total

    def percentile_us(self, kind: PlanningKind, percent: float) -> float:
        """Return the bound, in us, below which `percent` % of the times lie; nan if there are none.

        Raises ValueError if percent is not above 0 and at most 100.
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent must be above 0 and at most 100, got {percent}")
        histogram = self.get(kind, Counter())
        missing = math.ceil(histogram.total() * percent / 100)
        for bound in sorted(histogram):
            missing -= histogram[bound]
            if missing <= 0:
                return bound / 1000
        return math.nan


@dataclass(slots=True)
class PlanStats:
    """Counters of decode steps.

    `causes` splits plans_built by cause. "first": there was no plan. "batch_changed": the step had
    another key or number of rows. "tail_growth": a request outgrew its planned length, or became
    shorter. The kv_tokens_* fields are sums of `KvTokens` over the steps, at each step's lengths.
    planning_ns has one time per step: from `DecodeBatch.begun_ns`, or from the call of plan(),
    until plan() returns, or until the step is known to repeat the last step.
    """

    plans_built: int = 0
    plans_reused: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    kv_tokens_query_centric: int = 0
    kv_tokens_planned: int = 0
    kv_tokens_lower_bound: int = 0
    planning_ns: PlanningTimes = field(default_factory=PlanningTimes)

    def count_step(
        self, tokens: KvTokens, time: PlanningTime, cause: StepReason | None = None
    ) -> None:
        """Count a step. cause: why it built a plan, or None if it reused the last one.

        Every step is counted here once: by `PackAttention.plan` or `plan_together`, or, if it
        repeats the last step, by `RepeatedSteps` (`sglang/step/repeated_steps.py`).
        """
        if cause is None:
            self.plans_reused += 1
        else:
            self.plans_built += 1
            self.causes[cause] += 1
        self.kv_tokens_query_centric += tokens.query_centric
        self.kv_tokens_planned += tokens.planned
        self.kv_tokens_lower_bound += tokens.lower_bound
        self.planning_ns.record(*time)


# Values are numbers, or dicts: {"plans_built": 3, "causes": {"first": 1, "tail_growth": 2}, ...}
Counters = dict[str, Any]


def read_counters(stats: Sequence[PlanStats], **more: Sequence[Mapping[str, int]]) -> Counters:
    """Sum each field over all `stats`, and sum the mappings of each keyword in `more`.

    The result is a copy. Any thread may call this function while another thread counts.
    """
    counters: Counters = {}
    for name in (each.name for each in fields(PlanStats)):
        values = [getattr(each, name) for each in stats]
        if isinstance(values[0], PlanningTimes):
            counters[name] = reduce(add, values, PlanningTimes())
        else:
            counters[name] = _sum(values) if isinstance(values[0], Mapping) else sum(values)
    return counters | {name: _sum(values) for name, values in more.items()}


def _sum(mappings: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for numbers in mappings:
        total.update(dict(numbers))  # a copy, because `numbers` may grow during iteration
    return dict(total)
