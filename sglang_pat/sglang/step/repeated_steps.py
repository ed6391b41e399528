"""Decides whether a captured step repeats the last one, and counts the steps that do.

A CUDA graph reads its plan from buffers with fixed addresses. If the next step has the same
requests and replays the same graph, it can use the plan in the buffers. The host then only compares
a few fields and appends to a list. In plain decode steps it does not even read the lengths, because
each request is exactly one token longer. With CUDA graphs, nearly all steps repeat the last one.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sglang_pat.plan import KvTokens
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.step.step_type import StepType
from sglang_pat.sglang.tree.radix_paths import Request
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, RequestTracker
from sglang_pat.stats import PlanningTime, PlanStats


@dataclass(slots=True)
class LastPlan:
    """The last planned step, and the conditions under which a replay may reuse its plan."""

    step_type: StepType
    reqs: list[Request]
    plans: StepPlans
    num_rows: int
    why: StepReason  # why the next step is planned once `steps_left` is 0
    steps_left: int = 0


class RepeatRule:
    """Decides whether a captured step repeats the last one.

    A target model and its draft model have separate buffers, and so separate RepeatRule objects.
    """

    def __init__(self, tracker: RequestTracker = REQUEST_TRACKER) -> None:
        self._last: LastPlan | None = None
        tracker.subscribe(self)

    def reason(
        self,
        step_type: StepType,
        reqs: list[Request] | None,
        plans: StepPlans | None,
        num_rows: int,
    ) -> StepReason | None:
        """Return why a step must be planned: the first reason in `StepReason` that applies.

        The arguments are the step's type, its requests (None in a warm-up), the plans that it
        reads, and the size of its graph. Types, requests and plans are compared by identity.
        Returns None if the step may repeat the last one. If the step's type has a function
        `repeat`, that function then decides.
        """
        last = self._last
        if last is None:
            return StepReason.FIRST
        if reqs is not last.reqs or reqs is None:
            return StepReason.REQUESTS
        if step_type is not last.step_type:
            return StepReason.KIND
        if plans is not last.plans:
            return StepReason.PLACE
        if num_rows != last.num_rows:
            return StepReason.ROWS
        return None if last.steps_left > 0 else last.why

    def count(self) -> None:
        """Count a step that repeats the last one."""
        assert self._last is not None
        self._last.steps_left -= 1

    def in_place(self, step_type: StepType, reqs: list[Request]) -> StepPlans | None:
        """Return the plans of the last step if it had this type and these requests."""
        last = self._last
        if last is None or last.step_type is not step_type or last.reqs is not reqs:
            return None
        return last.plans

    # --- around planning ---

    def begin_plan(
        self,
        step_type: StepType,
        reqs: list[Request] | None,
        plans: StepPlans,
        num_rows: int,
        why: StepReason,
    ) -> None:
        """Record this step as the last one planned.

        why: the reason for which no step may repeat it before plan_after().
        """
        self._last = None if reqs is None else LastPlan(step_type, reqs, plans, num_rows, why)

    def plan_after(self, steps: int, why: StepReason) -> None:
        """Allow `steps` more steps to repeat the planned one. Then plan, for the reason `why`."""
        last = self._last
        if last is not None and last.why is not StepReason.MOVED:
            last.steps_left, last.why = steps, why

    # --- PathListener ---

    def invalidate(self, ids: Collection[int]) -> None:
        """Force a new plan in the next step, unless `ids` is empty: then no path has changed."""
        if ids:
            self.plan_after(0, StepReason.MOVED)

    def invalidate_all(self) -> None:
        """Force a new plan in the next step."""
        self.plan_after(0, StepReason.MOVED)


class RepeatedSteps:
    """Counts the steps that repeat a planned step. `begin()` sets the planned step.

    The thread that decodes calls begin(), end() and add(). Any thread may call stats().
    """

    def __init__(
        self, on_count: Callable[[PlanningTime], None], on_step: Callable[[], None] | None = None
    ) -> None:
        """Make a counter.

        on_count: called with the time of each repeated step, by the thread that calls stats() or
        end(). on_step: called in each repeated step, by the thread that decodes.
        """
        self._on_count = on_count
        self._on_step = on_step
        # add() appends to these two lists without the lock. All other changes are under the lock.
        self._growths: list[int] = []  # gained KV tokens, only in speculative decoding
        self._times: list[int] = []
        self._lock = threading.Lock()
        self._num_counted = 0  # entries of `_times` that were counted
        self._tokens = KvTokens(0, 0, 0)  # of the planned step
        self._num_growing = 0
        self._stats = PlanStats()

    def begin(self, tokens: KvTokens, num_growing: int) -> None:
        """Begin to count steps that repeat a planned step with these KV tokens.

        num_growing: how many requests grow by one token per step. add() uses it if `growth` is
        None.
        """
        self.end()
        with self._lock:
            self._tokens, self._num_growing = tokens, num_growing

    def end(self) -> list[int]:
        """Count the remaining steps. Return the host times in ns of all steps since begin()."""
        times = self._times
        if times:
            with self._lock:
                self._count()
                self._times, self._growths, self._num_counted = [], [], 0
        return times

    def add(self, begun_ns: int, growth: int | None = None) -> None:
        """Count a step that repeats the last one.

        begun_ns: `time.perf_counter_ns()` when work on the step began. growth: how many KV tokens
        more than the planned step this step reads. None: one per growing request and per step since
        the planned one. Between two calls of begin(), either all steps or none have a growth.
        """
        if growth is not None:  # appended first, because stats() looks only for new times
            self._growths.append(growth)
        self._times.append(time.perf_counter_ns() - begun_ns)
        if self._on_step is not None:
            self._on_step()

    def stats(self) -> PlanStats:
        """Return a copy of the statistics of all repeated steps so far."""
        with self._lock:
            self._count()
            return copy.deepcopy(self._stats)

    def _count(self) -> None:
        for nanoseconds in self._times[self._num_counted :]:
            if self._growths:
                growth = self._growths[self._num_counted]
            else:
                growth = self._num_growing * (self._num_counted + 1)
            planning = PlanningTime("unchanged", nanoseconds)
            self._stats.count_step(KvTokens(*(n + growth for n in self._tokens)), planning)
            self._on_count(planning)
            self._num_counted += 1
