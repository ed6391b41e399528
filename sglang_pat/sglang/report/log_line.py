"""StepLog: what decode steps have counted, as lines in SGLang's log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import get_args

from sglang_pat.stats import Counters, PlanningTimes, StepKind

logger = logging.getLogger(__name__)


class StepLog:
    """Logs what has changed in `read_counters()` every `interval` steps.

    The first step only says where counting begins: before it, SGLang has warmed up and captured its
    CUDA graphs.
    """

    def __init__(self, interval: int, read_counters: Callable[[], Counters]) -> None:
        self._interval = interval
        self._read_counters = read_counters
        self._before: Counters | None = None
        self._steps = 0  # since the last line

    @property
    def steps_left(self) -> int:
        """Number of steps that may be added together with the next one before a line is due."""
        return max(self._interval - self._steps - 1, 0)  # SGLang takes -1 for every step

    def add_steps(self, count: int = 1) -> None:
        """After that many decode steps that were planned, or whose plan was reused."""
        if self._before is None:
            self._before = self._read_counters()
            return
        self._steps += count
        if self._steps < self._interval:
            return
        counters = self._read_counters()
        logger.info(log_line(self._before, counters))
        self._before = counters
        self._steps = 0


# Counters, and the names of their steps and tokens.
_SPECULATION = (
    ("verify", "verify", "verified"),
    ("draft", "draft", "draft"),
    ("draft_extend", "draft extend", "read draft"),
)


def log_line(before: Counters, counters: Counters) -> str:
    """In SGLang's wording: what was counted between two readings, and planning time per step."""

    def since(name: str) -> int:
        count: int = counters[name] - before[name]
        return count

    query_centric = since("kv_tokens_query_centric")
    # Without any KV, of idle ranks under data parallelism, nothing was saved.
    ratio = since("kv_tokens_planned") / query_centric if query_centric else 1.0
    private = sum(counters["private_steps"].values()) - sum(before["private_steps"].values())
    speculation = ""
    for name, step, token in _SPECULATION:  # if there are any
        now, then = counters.get(name), before.get(name, {})
        if now is not None:
            steps, rows = (now[each] - then.get(each, 0) for each in ("steps", "rows"))
            speculation += f"#{step} step: {steps}, #{token} token: {rows}, "
    return (
        f"Pat decode, #plan: {since('plans_built')}, #reuse: {since('plans_reused')}, {speculation}"
        f"#step without sharing: {private}, kv read ratio: {ratio:.2f}, "
        f"{_reasons(before, counters)}"
        f"plan time p50/p99 (us): {_times(counters['planning_ns'].since(before['planning_ns']))}"
    )


def _reasons(before: Counters, counters: Counters) -> str:
    """Say why steps were planned (`reuse.py`), the most frequent reason first."""
    counted: Counter[str] = Counter(counters["steps_planned"])
    counted -= Counter(before["steps_planned"])
    if not counted:
        return ""
    return f"steps planned: {', '.join(f'{name} {n}' for name, n in counted.most_common())}, "


def _times(planning_ns: PlanningTimes) -> str:
    """Planning times by kind of step, the cheapest kind first; only kinds that occurred."""
    kinds = [kind for kind in get_args(StepKind) if planning_ns.get(kind)]
    percentiles = [[planning_ns.percentile_us(kind, p) for p in (50, 99)] for kind in kinds]
    return ", ".join(
        f"{kind} {p50:.1f}/{p99:.1f}" for kind, (p50, p99) in zip(kinds, percentiles, strict=True)
    )
