"""What a backend has counted so far, as plain numbers: the one source of the stats file, of the log
line and of the metrics.

Beside the pipeline, at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import reduce
from operator import add
from typing import Any

from sglang_pat.plan_stats import PlanStats
from sglang_pat.planning_times import PlanningTimes

# A number, or numbers by name: {"plans_built": 3, "causes": {"first": 1, "tail_growth": 2}, ...}
Counters = dict[str, Any]


def read_counters(stats: Sequence[PlanStats], **more: Mapping[str, int]) -> Counters:
    """The sum of `stats`, field by field, and what is given by name.

    A copy. May be called by another thread than the one that counts.
    """
    counters: Counters = {
        field.name: _sum([getattr(each, field.name) for each in stats])
        for field in fields(PlanStats)
    }
    return counters | {name: dict(numbers) for name, numbers in more.items()}


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], PlanningTimes):
        return reduce(add, values, PlanningTimes())
    if not isinstance(values[0], Mapping):
        return sum(values)
    total: Counter[str] = Counter()
    for numbers in values:
        total.update(dict(numbers))  # copied at once: it may grow while it is being iterated over
    return dict(total)
