"""PlanReuse: decides whether a captured step repeats the last one.

A CUDA graph reads its plan from buffers that stay in place. Where the next step has the same
requests and replays the same graph, the plan in the buffers serves it, and the host does nothing
else. `PlanReuse.reason` is the one place that decides this. The reasons are asked in the order of
`StepReason`; counters, log and tests use the same names.

SkippedPlanning: counts the steps that repeat the last one (`step/plan_reuse.py`).

Nearly all steps of a server with CUDA graphs do. In a decode step each request is one token longer,
and the host does not even read the lengths: a repeated step costs some comparisons and one list
entry. In a verify step of speculative decoding requests are as much longer as was accepted. The
statistics of repeated steps are computed when they are read.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from sglang_pat.plan import KvTokens
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.layer.step_plans import StepPlans
from sglang_pat.sglang.tree.radix_paths import Request
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, RequestTracker
from sglang_pat.stats import PlanningTime, PlanStats


class LastPlan:
    """The last step that was planned: who it was, and what may repeat it."""

    __slots__ = ("kind", "num_rows", "plans", "reqs", "steps_left", "why")

    def __init__(self, kind: Any, reqs: list[Request], plans: StepPlans, num_rows: int) -> None:
        self.kind = kind
        self.reqs = reqs
        self.plans = plans
        self.num_rows = num_rows
        self.steps_left = 0
        self.why = StepReason.PRIVATE  # the reason once no steps are left


class PlanReuse:
    """Answers whether a captured step repeats the last one, and if not, why.

    The steps of one set of captured buffers: a served model has one, a draft model another one.
    """

    def __init__(self, tracker: RequestTracker = REQUEST_TRACKER) -> None:
        """tracker: tells which requests have moved."""
        self._last: LastPlan | None = None
        tracker.subscribe(self)

    def reason(
        self, kind: Any, reqs: list[Request] | None, plans: StepPlans | None, num_rows: int
    ) -> StepReason | None:
        """Return why a step must be planned.

        Parameters
        ----------
        kind : StepType
            Kind of the step, by identity.
        reqs : list of Req or None
            Requests of the step, by identity of the list (`StepRequests`). None: a warm-up.
        plans : StepPlans or None
            Plans that the step reads, by identity.
        num_rows : int
            Size of the graph.

        Returns
        -------
        StepReason or None
            None: the step repeats the last one, if `StepType.repeat` agrees.
        """
        last = self._last
        if last is None:
            return StepReason.FIRST
        if reqs is not last.reqs or reqs is None:
            return StepReason.REQUESTS
        if kind is not last.kind:
            return StepReason.KIND
        if plans is not last.plans:
            return StepReason.PLACE
        if num_rows != last.num_rows:
            return StepReason.ROWS
        return None if last.steps_left > 0 else last.why

    def count(self) -> None:
        """Count a step that repeats the last one."""
        last = self._last
        assert last is not None
        last.steps_left -= 1

    def in_place(self, kind: Any, reqs: list[Request]) -> StepPlans | None:
        """Return the plans of the last step, if it was of this kind and of these requests."""
        last = self._last
        if last is None or last.kind is not kind or last.reqs is not reqs:
            return None
        return last.plans

    # --- around planning ---

    def begin_plan(
        self,
        kind: Any,
        reqs: list[Request] | None,
        plans: StepPlans,
        num_rows: int,
        why: StepReason,
    ) -> None:
        """Forget the last step: this one is planned now. Nothing repeats it until `permit_skips`.

        why: the reason until then. See `reason` for the others.
        """
        if reqs is None:
            self._last = None
            return
        self._last = LastPlan(kind, reqs, plans, num_rows)
        self._last.why = why

    def permit_skips(self, steps: int) -> None:
        """Let steps repeat the one that was planned: at most so many."""
        last = self._last
        if last is None or last.why is StepReason.MOVED:
            return
        last.steps_left, last.why = steps, StepReason.DUE

    def block_skips(self, why: StepReason) -> None:
        """Let nothing repeat the last step, which stays in place."""
        last = self._last
        if last is not None and last.why is not StepReason.MOVED:
            last.steps_left, last.why = 0, why

    # --- PathCache ---

    def invalidate(self, ids: Collection[int]) -> None:
        """Requests have moved, if any are given: in a mixed batch all may decode."""
        if ids:
            self.block_skips(StepReason.MOVED)

    def invalidate_all(self) -> None:
        """All paths may have changed."""
        self.block_skips(StepReason.MOVED)


class SkippedPlanning:
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
