"""PlanningTimes: how long the host took to plan, as histograms by kind of step.

Beside the pipeline: `PackAttention` records one time per decode step, in `PlanStats`; statistics
and metrics read it. A time costs a fraction of a microsecond to record and no memory of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, NamedTuple

StepKind = Literal["unchanged", "changed", "cold"]


class PlanningTime(NamedTuple):
    """The host time of one step."""

    kind: StepKind
    nanoseconds: int


class PlanningTimes(dict[str, Counter[int]]):
    """By kind of step, a histogram: how many times lay below a bound in ns, and not below the next
    smaller one.

    "unchanged": the plan was reused. "changed": a plan was built, and at least one path had been
    kept, or all when a request outgrew its plan. "cold": a plan was built from paths that were all
    new. 16 bounds per octave, so a percentile is at most a 16th too high. Histograms add up with
    `+`, and are JSON as they are.
    last: what was recorded last, as it was.
    """

    last: PlanningTime | None = None

    def record(self, kind: StepKind, nanoseconds: int) -> None:
        shift = max(nanoseconds.bit_length() - 5, 0)
        bound = ((nanoseconds >> shift) + 1) << shift
        histogram = self.get(kind)
        if histogram is None:
            histogram = self[kind] = Counter()
        histogram[bound] += 1
        self.last = PlanningTime(kind, nanoseconds)

    def since(self, before: PlanningTimes) -> PlanningTimes:
        """The times that these histograms have beyond those of an earlier reading."""
        return PlanningTimes(
            {kind: each - before.get(kind, Counter()) for kind, each in self.items()}
        )

    def __add__(self, other: PlanningTimes) -> PlanningTimes:
        total = PlanningTimes()
        for times in (self, other):
            # Copies, each made at once: another thread may be recording.
            for kind, histogram in dict(times).items():
                total.setdefault(kind, Counter()).update(dict(histogram))
        return total

    def percentile_us(self, kind: StepKind, percent: float) -> float:
        """The bound, in microseconds, below which `percent` % of the times lie; nan without times.

        ValueError if percent is not above 0 and at most 100.
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
