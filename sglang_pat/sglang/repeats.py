"""RepeatedSteps: decode steps that are like the last one, but that each request is a token longer.

In front of the pipeline, where CUDA graphs are replayed: nearly all steps of a server are such. The
graph reads lengths and slots from buffers that SGLang has filled, the plan in force serves
them, and the host need not even look at the lengths: a step costs it a comparison and an entry in a
list. What a planned step adds to the statistics is added when somebody asks for them.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

from sglang_pat.plan import KvTokens
from sglang_pat.stats import PlanningTime, PlanStats


class RepeatedSteps:
    """Counts the steps that repeat the one it was told of by `begin()`.

    One thread decodes, and calls begin(), end() and add(). Any thread may call stats().
    """

    def __init__(
        self, on_count: Callable[[PlanningTime], None], on_step: Callable[[], None] | None = None
    ) -> None:
        """on_count: called with the time of each step, by the thread that calls stats() or end().
        on_step: called in each step, by the thread that decodes.
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
        """A step has been planned that may be repeated, this many times.

        num_rows: of its graph. tokens: its KV. num_growing: requests that get a token per step.
        """
        self.end()
        with self._lock:
            self._tokens, self._num_growing = tokens, num_growing
            self._num_rows, self._steps_left = num_rows, steps_left

    def end(self) -> int:
        """The next step repeats none. Returns how many did since begin()."""
        self._steps_left = 0
        num_repeated = len(self._times)
        if num_repeated:
            with self._lock:
                self._count()
                self._times, self._num_counted = [], 0
        return num_repeated

    def add(self, num_rows: int, begun_ns: int) -> bool:
        """Whether a step with the requests of the last one repeats it; if so, it is counted.

        num_rows: of its graph. begun_ns: `time.perf_counter_ns()` when work on it began.
        """
        if self._steps_left == 0 or num_rows != self._num_rows:
            return False
        self._steps_left -= 1
        self._times.append(time.perf_counter_ns() - begun_ns)
        if self._on_step is not None:
            self._on_step()
        return True

    def stats(self) -> PlanStats:
        """Of all steps up to now. A copy."""
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
