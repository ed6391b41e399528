"""The planners of a target model that verifies drafts, and of its draft model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_pat.reasons import StepReason
from sglang_pat.sglang.speculative.rows import DraftBatchBuilder
from sglang_pat.sglang.speculative.steps import DraftExtendStep, SpeculativeStep, TargetVerifyStep
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.sglang.step.microbatches import Microbatch
from sglang_pat.sglang.step.planner import StepPlanner, TargetPlanner
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.step.step_type import ExecutionMode, StepType
from sglang_pat.sglang.tree.request_tracker import StepRequests

if TYPE_CHECKING:
    from sglang_pat.sglang.start.environment import Environment


class SpeculativePlanner(StepPlanner):
    """Plans steps of speculative decoding. Reserves the buffers of their graphs."""

    new_builder = DraftBatchBuilder

    def __init__(
        self,
        model_runner: Any,
        environment: Environment,
        layer_support: LayerSupport,
        step_types: Sequence[SpeculativeStep],
    ) -> None:
        self.step_types = tuple(step_types)
        super().__init__(model_runner, environment, layer_support)

    def _plan(
        self,
        step_type: StepType,
        microbatch: Microbatch,
        requests: StepRequests | None,
        forward_batch: Any,
        execution: ExecutionMode,
        why: StepReason,
    ) -> StepPlans:
        if isinstance(step_type, DraftExtendStep) and requests is not None:
            plans = self._repeat_rule.in_place(step_type.follows, requests.reqs)
            if plans is not None and (
                execution is ExecutionMode.EAGER
                or (
                    plans is microbatch.captured
                    and plans.num_rows == forward_batch.batch_size * step_type.shape.per_request
                )
            ):  # uses the plans of the verify step in place
                step_type.follow(forward_batch)
                return plans
        return super()._plan(step_type, microbatch, requests, forward_batch, execution, why)

    def reserve(self, max_requests: int, step_types: Collection[StepType] | None = None) -> None:
        """Allocate the memory that graphs of up to `max_requests` requests read.

        step_types: those whose graphs SGLang captures next. None: all. With adaptive drafts, SGLang
        calls this for each number of drafts, and all graphs read the same buffers.
        Raises RuntimeError if SGLang has already captured other types of steps for fewer requests.
        """
        if max_requests > self._max_requests:
            chosen = self.step_types if step_types is None else step_types
            if any(each.graphs_are_complete for each in self.step_types if each not in chosen):
                raise RuntimeError(
                    f"pat reserved for graphs of {self._max_requests} requests, with which others "
                    f"were captured; SGLang then asked for graphs of {max_requests}: give "
                    "--cuda-graph-bs-decode sizes that fit any number of drafts"
                )
            self._max_requests, step_types = max_requests, None
        for step_type in self.step_types:
            if step_types is None or step_type in step_types:
                step_type.reserve(self._max_requests)
        most_rows = max(step_type.shape.per_request for step_type in self.step_types)
        self._reserve_rows(self._max_requests * most_rows)


class VerifyPlanner(SpeculativePlanner, TargetPlanner):
    """The planner of a target model that verifies drafts. Also reports the draft model's counters.

    `verifies` maps the number of draft tokens per request to the type of verify step.
    """

    def __init__(
        self,
        model_runner: Any,
        environment: Environment,
        layer_support: LayerSupport,
        verifies: Mapping[int, TargetVerifyStep],
    ) -> None:
        self.verifies = dict(verifies)
        self._reported: list[SpeculativeStep] = [*self.verifies.values()]
        self._drafting: list[SpeculativePlanner] = []
        super().__init__(model_runner, environment, layer_support, [*self.verifies.values()])

    def new_extend(self, layer_support: LayerSupport, count: int) -> DraftExtendStep:
        """Return the draft extend step that follows verify steps of `count` draft tokens.

        From now on, also plans for the draft model's kinds of layers.
        """
        more = layer_support.kinds() - self._microbatches.current.eager.of_kind.keys()
        if more:
            self._microbatches.add(partial(self._new_plans, more))
        extend = DraftExtendStep(self.verifies[count])
        self._reported.append(extend)
        return extend

    def report(self, drafting: SpeculativePlanner) -> None:
        """Also report the counters of a draft model's planner."""
        self._drafting.append(drafting)
        self._reported += drafting.step_types

    def _more_counters(self) -> dict[str, list[Counter[str]]]:
        more = super()._more_counters()
        for step_type in list(self._reported):
            for name, counts in step_type.counters().items():
                more.setdefault(name, []).append(counts)
        for drafting in list(self._drafting):
            more.setdefault("draft", []).append(drafting.plan_counts())
            for name, counts in drafting.counts_of_ranks().items():
                more[name].append(counts)
        return more
