"""StepLog: one line about decode in SGLang's log, as often as SGLang writes its own.

Beside the pipeline, at its end. SGLang's `--decode-log-interval` says how often.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from sglang_pat.step_counters import Counters

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
        self._seconds: list[float] = []

    def add_step(self, seconds: float) -> None:
        """After a decode step that was planned, or whose plan was reused, in `seconds`."""
        if self._before is None:
            self._before = self._read_counters()
            return
        self._seconds.append(seconds)
        if len(self._seconds) < self._interval:
            return
        counters = self._read_counters()
        logger.info(log_line(self._before, counters, self._seconds))
        self._before = counters
        self._seconds.clear()


def log_line(before: Counters, counters: Counters, seconds: Sequence[float]) -> str:
    """In SGLang's wording: what was counted between two readings, and planning time per step."""

    def since(name: str) -> int:
        count: int = counters[name] - before[name]
        return count

    query_centric = since("kv_tokens_query_centric")
    # Without any KV, of idle ranks under data parallelism, nothing was saved.
    ratio = since("kv_tokens_planned") / query_centric if query_centric else 1.0
    private = sum(counters["private_steps"].values()) - sum(before["private_steps"].values())
    return (
        f"Pat decode, #plan: {since('plans_built')}, #reuse: {since('plans_reused')}, "
        f"#step without sharing: {private}, kv read ratio: {ratio:.2f}, "
        f"plan time p50 (us): {1e6 * percentile(seconds, 50):.1f}, "
        f"plan time p99 (us): {1e6 * percentile(seconds, 99):.1f}"
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank: one of the values, of which `percent` percent are no larger."""
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(rank, 1) - 1]
