"""Decides whether a captured step repeats the last one, and counts the steps that do.

A CUDA graph reads its plan from buffers that stay in place. If the next step has the same requests
and replays the same graph, the plan in the buffers serves it: the host compares a few fields and
appends to a list. In a decode step each request is one token longer, so the host does not even read
the lengths. Nearly all steps of a server with CUDA graphs repeat the last one.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from sglang_pat.plan import KvTokens
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.layer.step_plans import StepPlans
from sglang_pat.sglang.tree.radix_paths import Request
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, RequestTracker
from sglang_pat.stats import PlanningTime, PlanStats


@dataclass(slots=True)
class LastPlan:
    """The last planned step, and the conditions under which a replay may skip planning."""

    kind: Any
    reqs: list[Request]
    plans: StepPlans
    num_rows: int
    why: StepReason  # why the next step is planned once no steps are left
    steps_left: int = 0


class PlanReuse:
    """Answers whether a captured step repeats the last one, and if not, why.

    A served model has one set of captured buffers, and its draft model another one. Each has its
    own PlanReuse.
    """

    def __init__(self, tracker: RequestTracker = REQUEST_TRACKER) -> None:
        self._last: LastPlan | None = None
        tracker.subscribe(self)

    def reason(
        self, kind: Any, reqs: list[Request] | None, plans: StepPlans | None, num_rows: int
    ) -> StepReason | None:
        """Return why a step must be planned: the first reason that applies, as in `StepReason`.

        The step is given by its type, its requests (`StepRequests`; None in a warm-up), the plans
        that it reads, and the size of its graph. None: the step repeats the last one, if
        `StepType.repeat` agrees. Types, requests and plans are compared by identity.
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
        assert self._last is not None
        self._last.steps_left -= 1

    def in_place(self, kind: Any, reqs: list[Request]) -> StepPlans | None:
        """Return the plans of the last step, if it was of this type and had these requests."""
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
        """Make this step the last one. Until `permit_skips`, `why` prevents repeats."""
        self._last = None if reqs is None else LastPlan(kind, reqs, plans, num_rows, why)

    def permit_skips(self, steps: int) -> None:
        """Let at most `steps` steps repeat the one that was planned."""
        last = self._last
        if last is not None and last.why is not StepReason.MOVED:
            last.steps_left, last.why = steps, StepReason.DUE

    def block_skips(self, why: StepReason) -> None:
        """Let no step repeat the last one. Its plan stays in the buffers."""
        last = self._last
        if last is not None and last.why is not StepReason.MOVED:
            last.steps_left, last.why = 0, why

    # --- PathCache ---

    def invalidate(self, ids: Collection[int]) -> None:
        """Have the next step planned, unless `ids` is empty (a mixed batch without prefills)."""
        if ids:
            self.block_skips(StepReason.MOVED)

    def invalidate_all(self) -> None:
        """Have the next step planned."""
        self.block_skips(StepReason.MOVED)


class SkippedPlanning:
    """Counts the steps that repeat the one given to `begin()`.

    The thread that decodes calls begin(), end() and add(). Any thread may call stats(), which
    computes the statistics of these steps.
    """

    def __init__(
        self, on_count: Callable[[PlanningTime], None], on_step: Callable[[], None] | None = None
    ) -> None:
        """Make a counter.

        on_count gets the time of each step, in the thread that calls stats() or end(). on_step is
        called in each step, in the thread that decodes.
        """
        self._on_count = on_count
        self._on_step = on_step
        # Only add() appends to these two lists. All else is changed under the lock.
        self._growths: list[int] = []  # KV tokens gained, in speculative decoding only
        self._times: list[int] = []
        self._lock = threading.Lock()
        self._num_counted = 0  # entries of `_times`
        self._tokens = KvTokens(0, 0, 0)  # of the step given to begin()
        self._num_growing = 0
        self._stats = PlanStats()

    def begin(self, tokens: KvTokens, num_growing: int) -> None:
        """Begin to count steps that repeat the one with these KV tokens.

        num_growing: requests that get one token per step, if add() is not given the growth.
        """
        self.end()
        with self._lock:
            self._tokens, self._num_growing = tokens, num_growing

    def end(self) -> int:
        """Count what is left, and return how many steps there were since begin()."""
        num_repeated = len(self._times)
        if num_repeated:
            with self._lock:
                self._count()
                self._times, self._growths, self._num_counted = [], [], 0
        return num_repeated

    def add(self, begun_ns: int, growth: int | None = None) -> None:
        """Count a step that repeats the last one.

        begun_ns: `time.perf_counter_ns()` when work on the step began. growth: the KV
        tokens that it has more than the step given to begin(). None: one per growing request and
        step. It is given for all steps since begin(), or for none.
        """
        if growth is not None:  # before the time: a thread that sees the time reads the growth
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
            self._stats.plans_reused += 1
            self._stats.add_tokens(KvTokens(*(n + growth for n in self._tokens)))
            self._stats.planning_ns.record("unchanged", nanoseconds)
            self._on_count(PlanningTime("unchanged", nanoseconds))
            self._num_counted += 1
