"""RepeatedSteps: counts the steps that repeat the last one (`reuse.py`).

Nearly all steps of a server with CUDA graphs do. In a decode step each request is one token longer,
and the host does not even read the lengths: a repeated step costs some comparisons and one list
entry. In a verify step of speculative decoding requests are as much longer as was accepted. The
statistics of repeated steps are computed when they are read.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

from sglang_pat.plan import KvTokens
from sglang_pat.stats import PlanningTime, PlanStats


class RepeatedSteps:
    """Counts the steps that repeat the one given to `begin()`.

    The thread that decodes calls begin(), end() and add(). Any thread may call stats().
    """

    def __init__(
        self, on_count: Callable[[PlanningTime], None], on_step: Callable[[], None] | None = None
    ) -> None:
        """Count the steps that repeat the last one.

        Parameters
        ----------
        on_count : callable
            Called with the time of each step, by the thread that calls stats() or end().
        on_step : callable, optional
            Called in each step, by the thread that decodes.
        """
        self._on_count = on_count
        self._on_step = on_step
        # Appended to by add() alone; the rest is changed under the lock.
        self._growths: list[int] = []  # of verify steps
        self._times: list[int] = []
        self._lock = threading.Lock()
        self._num_counted = 0  # of `times`
        self._tokens = KvTokens(0, 0, 0)  # of the step given to begin()
        self._num_growing = 0
        self._stats = PlanStats()

    def begin(self, tokens: KvTokens, num_growing: int) -> None:
        """Steps follow that repeat the one which has just been planned.

        Parameters
        ----------
        tokens : KvTokens
            KV tokens of this step.
        num_growing : int
            Requests that get one token per step, where add() is not given the growth.
        """
        self.end()
        with self._lock:
            self._tokens, self._num_growing = tokens, num_growing

    def end(self) -> int:
        """Count what is left to count. Returns how many steps there were since begin()."""
        num_repeated = len(self._times)
        if num_repeated:
            with self._lock:
                self._count()
                self._times, self._growths, self._num_counted = [], [], 0
        return num_repeated

    def add(self, begun_ns: int, growth: int | None = None) -> None:
        """Count a step that repeats the last one.

        Parameters
        ----------
        begun_ns : int
            `time.perf_counter_ns()` when work on the step began.
        growth : int, optional
            KV tokens that it has more than the step given to begin(). Of all steps since begin(),
            or of none.
        """
        if growth is not None:  # before the time, with which the step is there to be counted
            self._growths.append(growth)
        self._times.append(time.perf_counter_ns() - begun_ns)
        if self._on_step is not None:
            self._on_step()

    def stats(self) -> PlanStats:
        """The statistics of all repeated steps so far. A copy."""
        with self._lock:
            self._count()
            return copy.deepcopy(self._stats)

    def _count(self) -> None:
        for nanoseconds in self._times[self._num_counted :]:
            if self._growths:
                growth = self._growths[self._num_counted]
            else:
                growth = self._num_growing * (self._num_counted + 1)
            self._stats.plans_reused += 1
            self._stats.add_tokens(KvTokens(*(n + growth for n in self._tokens)))
            self._stats.planning_ns.record("unchanged", nanoseconds)
            self._on_count(PlanningTime("unchanged", nanoseconds))
            self._num_counted += 1
