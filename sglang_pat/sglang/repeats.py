"""RepeatedSteps: decode steps that repeat the last one with each request one token longer.

Nearly all steps of a server with CUDA graphs are repeated. The graph reads lengths and slots from
buffers that SGLang has filled, and the plan in force serves them. The host does not even read the
lengths: a repeated step costs one comparison and one list entry. The statistics of repeated steps
are computed when they are read.
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
        self._times: list[int] = []
        self._lock = threading.Lock()
        self._num_counted = 0  # of `times`
        self._tokens = KvTokens(0, 0, 0)  # of the step before times[num_counted]
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
            Requests that get one token per step.
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
                self._times, self._num_counted = [], 0
        return num_repeated

    def add(self, num_rows: int, begun_ns: int) -> bool:
        """Count a step with the requests of the last one, if it repeats it.

        Parameters
        ----------
        num_rows : int
            Rows of the step's graph.
        begun_ns : int
            `time.perf_counter_ns()` when work on the step began.

        Returns
        -------
        bool
            Whether the step is a repetition. If not, it must be planned.
        """
        if self._steps_left == 0 or num_rows != self._num_rows:
            return False
        self._steps_left -= 1
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
            self._tokens = KvTokens(*(n + self._num_growing for n in self._tokens))
            self._stats.plans_reused += 1
            self._stats.add_tokens(self._tokens)
            self._stats.planning_ns.record("unchanged", nanoseconds)
            self._on_count(PlanningTime("unchanged", nanoseconds))
            self._num_counted += 1
