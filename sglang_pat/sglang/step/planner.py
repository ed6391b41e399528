"""Plans the steps of one model, before its layers attend.

SGLang's backend calls `plan_eager` or `plan_captured` once per step. A step that repeats the last
one is only counted (`repeated_steps.py`). For any other step, the planner reads the step's inputs
and paths (`tree/batch_builder.py`) and makes plans (`step_plans.py`). `StepType` says how a type of
step differs from a plain decode step.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_pat.attention import PackAttention
from sglang_pat.plan import LayerKind, PlanOverflowError
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.report.reports import StepReports
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.sglang.step.debug_checks import DebugChecks, RankChecker
from sglang_pat.sglang.step.microbatches import Microbatch, Microbatches
from sglang_pat.sglang.step.repeated_steps import RepeatedSteps, RepeatRule
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.step.step_type import ExecutionMode, StepType
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder
from sglang_pat.sglang.tree.request_tracker import StepRequests
from sglang_pat.stats import Counters, PlanStats, read_counters
from sglang_pat.window import AHEAD, WindowAttention

if TYPE_CHECKING:
    from sglang_pat.sglang.start.environment import Environment

# Reasons for which a step is planned although the last plan would still be usable.
_WOULD_REPEAT = (StepReason.CHECKED, StepReason.DUE, StepReason.EAGER)


class StepPlanner:
    """Plans the steps of one model, for all layers that pat decodes.

    Eager steps and CUDA graphs have separate plans, because graphs need buffers with fixed
    addresses. A step has one plan for each kind of layers in `layer_support`.
    """

    new_builder: Callable[..., DecodeBatchBuilder] = DecodeBatchBuilder

    def __init__(
        self, model_runner: Any, environment: Environment, layer_support: LayerSupport
    ) -> None:
        self.layer_support = layer_support
        self.dtypes = (model_runner.dtype, model_runner.kv_cache_dtype)  # of queries and of KV
        self._req_to_token_pool = model_runner.req_to_token_pool
        self._token_to_kv_pool = model_runner.token_to_kv_pool
        self._layer_ids = tuple(layer_support.shapes)
        self._new_plans = partial(
            _new_plans,
            layer_support,
            dtype=model_runner.dtype,
            kv_dtype=model_runner.kv_cache_dtype,
            device=self._req_to_token_pool.req_to_token.device,
            policy=environment.policy,
            growth_tokens=environment.growth_tokens,
            batch_invariant=layer_support.batch_invariant,
        )
        self._microbatches = Microbatches(
            _num_microbatches(model_runner.server_args),
            partial(self._new_plans, layer_support.kinds()),
            partial(self.new_builder, strict=environment.debug == "1"),
        )
        self._checks = DebugChecks() if environment.debug == "1" else None
        self._ranks = RankChecker.of_sglang() if environment.debug != "0" else None
        self._max_requests = 0  # requests of the largest graph
        self._repeat_rule = RepeatRule()
        self._reasons: Counter[str] = Counter()  # why steps were planned
        self._windows: Counter[str] = Counter()  # plans and KV tokens, for layers with windows
        self._windows_repeated: Counter[str] = Counter()  # what a repeated step adds
        self._reports: StepReports | None = None
        self._repeated = RepeatedSteps(lambda planning: None)

    # --- once per step ---

    def plan_eager(self, step_type: StepType, forward_batch: Any) -> StepPlans | None:
        """Plan a step that runs without a graph. Return None if it has no rows (an idle rank)."""
        if forward_batch.batch_size == 0:
            return None
        requests = step_type.requests(forward_batch)
        microbatch = self._microbatches.find(requests)
        return self._plan(
            step_type, microbatch, requests, forward_batch, ExecutionMode.EAGER, StepReason.EAGER
        )

    def plan_captured(
        self, step_type: StepType, forward_batch: Any, in_capture: bool = False
    ) -> StepPlans | None:
        """Plan the next capture or replay of a CUDA graph, in the graphs' buffers.

        If the step repeats the last one, its plan is already there. Returns None if the step has no
        rows.
        """
        begun_ns = time.perf_counter_ns()
        requests = step_type.requests(forward_batch)
        microbatch = self._microbatches.find(requests)
        plans = microbatch.captured
        why = StepReason.FIRST
        if requests is not None and not in_capture:
            rule, growth = self._repeat_rule, None  # growth None: one token per request
            reason = rule.reason(step_type, requests.reqs, plans, forward_batch.batch_size)
            if reason is None and step_type.repeat is not None:
                growth = step_type.repeat(forward_batch, requests)
                reason = StepReason.LENGTHS if growth is None else None
            if reason is None:
                rule.count()
                self._repeated.add(begun_ns, growth)
                return plans
            why = reason
        if forward_batch.batch_size == 0:
            return None
        execution = ExecutionMode.CAPTURE if in_capture else ExecutionMode.REPLAY
        return self._plan(step_type, microbatch, requests, forward_batch, execution, why)

    def _plan(
        self,
        step_type: StepType,
        microbatch: Microbatch,
        requests: StepRequests | None,
        forward_batch: Any,
        execution: ExecutionMode,
        why: StepReason,
    ) -> StepPlans:
        """Read a step's paths and plan the step."""
        plans = microbatch.eager if execution is ExecutionMode.EAGER else microbatch.captured
        assert plans is not None
        begun_ns = time.perf_counter_ns()
        builder, repeated_ns = microbatch.builder, self._repeated.end()
        reqs = None if requests is None else requests.reqs
        step = step_type, reqs, plans, forward_batch.batch_size
        # Whether a plain decode step would repeat the last one if checks were off.
        would_repeat = (
            self._checks is not None
            and step_type.repeat is None
            and self._repeat_rule.reason(*step) in _WOULD_REPEAT
        )
        # Why the next step is planned, unless _allow_repeats() lets it repeat this one.
        why_next = StepReason.EAGER if execution is ExecutionMode.EAGER else StepReason.PRIVATE
        self._repeat_rule.begin_plan(*step, why_next)
        inputs = step_type.read_inputs(forward_batch, requests)
        req_pool_indices, seq_lens = step_type.prepare_rows(inputs, forward_batch, execution)
        batch = builder.read(inputs)
        tensors = {
            "req_to_token": self._req_to_token_pool.req_to_token,
            "req_pool_indices": req_pool_indices,
            "seq_lens": seq_lens,
        }
        try:
            made = plans.plan(batch, **tensors)
        except PlanOverflowError:
            made = plans.plan(builder.without_sharing(batch, StepReason.OVERFLOW), **tensors)
        if self._ranks is not None:
            took_ns = time.perf_counter_ns() - begun_ns
            is_step = requests is not None and execution is not ExecutionMode.CAPTURE
            self._ranks.check([plan for _, plan in made], repeated_ns, took_ns if is_step else None)
        if self._checks is not None:
            self._checks.check_growth(made[-1][0], builder, would_repeat=would_repeat)
            self._checks.check(made, builder, inputs.seq_lens, tensors)
        if requests is not None:
            step_type.count_planned(forward_batch, batch, plans)
            self._reasons[why] += 1
        if execution is not ExecutionMode.CAPTURE:
            self._count_windows([attention for attention, _ in made], len(repeated_ns))
            if self._reports is not None:
                self._reports.add_step(plans.main.step_time, len(repeated_ns))
        if execution is ExecutionMode.REPLAY:
            self._allow_repeats(step_type, builder, plans)
        return plans

    def _allow_repeats(
        self, step_type: StepType, builder: DecodeBatchBuilder, plans: StepPlans
    ) -> None:
        """Allow the next steps to repeat this one, unless it shares nothing or reuse is off."""
        shared = builder.last_shared
        if shared is None:
            return
        if self._checks is not None:
            self._repeat_rule.plan_after(0, StepReason.CHECKED)
        elif not step_type.graphs_are_complete:
            self._repeat_rule.plan_after(0, StepReason.GRAPH)
        else:
            steps = sys.maxsize
            # Only one rank logs, and it plans a step whenever a line is due. If ranks are compared,
            # all ranks must plan the same steps, so the line waits for the next planned step.
            if self._reports is not None and self._ranks is None:
                steps = self._reports.steps_left
            steps = min(step_type.steps_to_repeat(builder, plans.steps_left()), steps)
            self._repeat_rule.plan_after(steps, StepReason.DUE)
            self._repeated.begin(plans.main.step_tokens, len(shared.reqs))

    # --- CUDA graphs ---

    def reserve(self, max_requests: int) -> None:
        """Allocate what graphs of up to `max_requests` requests read.

        SGLang calls this before the first capture, and before it captures all graphs again after an
        update of the weights.
        """
        self._max_requests = max(max_requests, self._max_requests)
        self._reserve_rows(self._max_requests)

    def _reserve_rows(self, max_rows: int) -> None:
        pool = self._token_to_kv_pool  # a hybrid pool has fewer slots for layers with windows
        num_slots = max(len(pool.get_key_buffer(layer_id)) for layer_id in self._layer_ids)
        # Packs may read their parents' ranges too, so a slot may be in several shared ranges.
        sizes = {"max_requests": max_rows, "max_shared_slots": 2 * num_slots}
        if self.layer_support.batch_invariant:
            # A model's context may be longer than the pool, but no request is.
            sizes["max_seq_len"] = min(self._req_to_token_pool.req_to_token.shape[1], num_slots)
        self._microbatches.reserve(**sizes)

    # --- statistics ---

    def plan_counts(self) -> Counter[str]:
        """Return how many plans were built, and how many steps reused the last plan."""
        stats = self._plan_stats()
        return Counter(
            plans_built=sum(each.plans_built for each in stats),
            plans_reused=sum(each.plans_reused for each in stats),
        )

    def counts_of_ranks(self) -> dict[str, Counter[str]]:
        """Return the counters of the comparisons with other ranks, by name."""
        return {} if self._ranks is None else self._ranks.counters()

    def _count_windows(self, attentions: list[PackAttention], num_repeated: int) -> None:
        """Count the window plans of a planned step and of the repeated steps just before it."""
        for name, count in self._windows_repeated.items():
            self._windows[name] += num_repeated * count
        self._windows_repeated.clear()
        for attention in attentions:
            if not isinstance(attention, WindowAttention):
                continue
            is_new = attention.step_kind != "unchanged"
            tokens = {
                "kv_tokens_query_centric": attention.step_tokens.query_centric,
                "kv_tokens_read": attention.step_tokens.planned,
            }
            self._windows.update({"plans_built" if is_new else "plans_reused": 1, **tokens})
            self._windows_repeated.update(plans_reused=1, **tokens)

    def _plan_stats(self) -> list[PlanStats]:
        stats = [plans.main.stats for each in self._microbatches for plans in each.plans()]
        return [*stats, self._repeated.stats()]


class TargetPlanner(StepPlanner):
    """The planner of the target model. It also reports the counters."""

    def __init__(
        self, model_runner: Any, environment: Environment, layer_support: LayerSupport
    ) -> None:
        super().__init__(model_runner, environment, layer_support)
        self._reports = StepReports(environment, model_runner, self.counters)
        self._repeated = RepeatedSteps(self._reports.add_repeated, self._reports.on_step)
        self._reports.start()

    def counters(self) -> Counters:
        """Return the counters of all steps so far. Any thread may call this."""
        microbatches = list(self._microbatches)
        builders = [each.builder for each in microbatches]
        # One monitor is enough, because all builders watch the same tree.
        events = [each.events.counts for each in builders if each.events is not None][:1]
        return read_counters(
            self._plan_stats(),
            steps_without_sharing=[each.steps_without_sharing for each in builders],
            steps_planned=[self._reasons],
            tree_events=events,
            batch_changes=[each.changes for each in builders],
            **self._more_counters(),
        )

    def _more_counters(self) -> dict[str, list[Counter[str]]]:
        """Return the counters that not all servers have."""
        more = self.counts_of_ranks()
        if self._windows:
            more["windows"] = self._windows
        return {name: [counts] for name, counts in more.items()}


def _new_plans(support: LayerSupport, kinds: Iterable[LayerKind], **options: Any) -> StepPlans:
    """Make a PackAttention for each kind of layer. options: arguments of PackAttention."""

    def attention(kind: LayerKind) -> PackAttention:
        windows: dict[str, Any] = {}
        if kind.window:
            windows = {"window": kind.window, "slot_map": support.window_slots}
            if kind.chunked:
                windows["chunked"] = True
            else:
                windows["ahead"] = AHEAD + support.drafts_ahead
        heads = kind.heads
        return (WindowAttention if windows else PackAttention)(
            heads.num_qo_heads,
            heads.num_kv_heads,
            heads.head_dim,
            v_head_dim=heads.v_head_dim,
            **windows,
            **options,
        )

    # Kinds without a window come last, because the last kind counts the step's statistics.
    in_order = sorted(kinds, key=lambda kind: (-kind.window, kind.heads))
    return StepPlans({kind: attention(kind) for kind in in_order})


def _num_microbatches(server_args: Any) -> int:
    """Return how many batches alternate on a rank: above 1 with pipeline parallelism."""
    return int(server_args.pp_size) + int(server_args.pp_async_batch_depth)
