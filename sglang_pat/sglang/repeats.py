"""RepeatedSteps: steps that repeat the last one with its requests some tokens longer.

Nearly all steps of a server with CUDA graphs are repeated. The graph reads lengths and slots from
buffers that SGLang has filled, and the plan in force serves them. In a decode step each request is
one token longer, and the host does not even read the lengths: a repeated step costs one comparison
and one list entry. In a verify step of speculative decoding they are as much longer as was
accepted. The statistics of repeated steps are computed when they are read.
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
        """
        Parameters
        ----------
        on_count : callable
            Called with the time of each step, by the thread that calls stats() or end().
        on_step : callable, optional
            Called in each step, by the thread that decodes.
        """
        self._on_count = on_count
        self._on_step = on_step
        self._num_rows = 0
        self._steps_left = 0
        # Appended to by add() alone; the rest is changed under the lock.
        self._growths: list[int] = []  # of verify steps
        self._times: list[int] = []
        self._lock = threading.Lock()
        self._num_counted = 0  # of `times`
        self._tokens = KvTokens(0, 0, 0)  # of the step given to begin()
        self._num_growing = 0
        self._stats = PlanStats()

    def begin(self, num_rows: int, steps_left: int, tokens: KvTokens, num_growing: int) -> None:
        """Allow repetitions of the step that has just been planned.

        Parameters
        ----------
        num_rows : int
            Rows of its graph.
        steps_left : int
            How many steps may repeat it.
        tokens : KvTokens
            KV tokens of this step.
        num_growing : int
            Requests that get one token per step, where add() is not told the growth.
        """
        self.end()
        with self._lock:
            self._tokens, self._num_growing = tokens, num_growing
            self._num_rows, self._steps_left = num_rows, steps_left

    def end(self) -> int:
        """Allow no more repetitions. Returns how many there were since begin()."""
        self._steps_left = 0
        num_repeated = len(self._times)
        if num_repeated:
            with self._lock:
                self._count()
                self._times, self._growths, self._num_counted = [], [], 0
        return num_repeated

    def add(self, num_rows: int, begun_ns: int, growth: int | None = None) -> bool:
        """Count a step with the requests of the last one, if it repeats it.

        Parameters
        ----------
        num_rows : int
            Rows of the step's graph.
        begun_ns : int
            `time.perf_counter_ns()` when work on the step began.
        growth : int, optional
            KV tokens that it has more than the step given to begin(). Of all steps since begin(),
            or of none.

        Returns
        -------
        bool
            Whether the step is a repetition. If not, it must be planned.
        """
        if self._steps_left <= 0 or num_rows != self._num_rows:
            return False
        self._steps_left -= 1
        if growth is not None:  # before the time, with which the step is there to be counted
            self._growths.append(growth)
        self._times.append(time.perf_counter_ns() - begun_ns)
        if self._on_step is not None:
            self._on_step()
        return True

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
