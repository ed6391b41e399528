"""Decoder: plans the steps of one model, before its layers attend.

`plan_eager` or `plan_captured` is called once per step. The walk is: does the step repeat the last
one (`step/plan_reuse.py`)? If not, what does it show (`tree/batch_builder.py`), which paths have
its requests (`tree/batch_builder.py`), and what is the plan (`step/microbatches.py`,
`attention.py`)? What differs between decode steps and those of speculative decoding is a row of the
table in `speculative/steps.py`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from sglang_pat.attention import PackAttention
from sglang_pat.executors.cuda import PlanOverflowError
from sglang_pat.plan import Shape
from sglang_pat.sglang.layer.step_plans import StepPlans
from sglang_pat.sglang.report.reports import StepReports
from sglang_pat.sglang.speculative.steps import DraftExtend, Verify
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.hooks import install_hooks
from sglang_pat.sglang.start.layer_support import Routes
from sglang_pat.sglang.start.server_options import batch_invariant, drafts_of
from sglang_pat.sglang.step.debug_checks import DebugChecks, check_host_lengths
from sglang_pat.sglang.step.microbatches import Microbatch, Microbatches
from sglang_pat.sglang.step.plan_reuse import Reason, RepeatedSteps, Reuse
from sglang_pat.sglang.step.step_type import Decode, Place, StepKind
from sglang_pat.sglang.tree.batch_builder import OVERFLOW, BatchReader, host_lengths
from sglang_pat.sglang.tree.request_tracker import CHANNEL_HOOKS, VERIFY_HOOKS, StepRequests
from sglang_pat.sglang.tree.row_groups import RowShape
from sglang_pat.sglang.tree.self_test import check_version
from sglang_pat.stats import Counters, PlanStats, read_counters

# A step that is planned for one of these repeats the last one all the same.
_WOULD_REPEAT = (Reason.CHECKED, Reason.DUE, Reason.EAGER)


class Decoder:
    """Plans the steps of one model, each for all layers that pat decodes.

    Eager steps and CUDA graphs have plans of their own: a graph needs buffers that never move.

    Attributes
    ----------
    routes
        The layers. Plans are made for their shapes.
    dtypes
        Of queries and of the KV cache.
    kinds
        The kinds of steps whose graphs reserve buffers here.
    """

    def __init__(
        self,
        model_runner: Any,
        environment: Environment,
        routes: Routes,
        kinds: Sequence[StepKind],
    ) -> None:
        """Make the decoder of a model.

        Parameters
        ----------
        model_runner
            SGLang's, of this model.
        environment
            The variables.
        routes
            The model's.
        kinds
            See the attribute.
        """
        self.routes = routes
        self.dtypes = (model_runner.dtype, model_runner.kv_cache_dtype)
        self.kinds = tuple(kinds)
        self._req_to_token_pool = model_runner.req_to_token_pool
        self._token_to_kv_pool = model_runner.token_to_kv_pool
        self._layer_id = min(routes.shapes)
        self._new_plans = partial(_new_plans, model_runner=model_runner, environment=environment)
        self._microbatches = Microbatches(
            _num_microbatches(model_runner.server_args),
            partial(self._new_plans, {*routes.shapes.values()}),
            strict=environment.debug,
        )
        self._checks = DebugChecks.of_sglang() if environment.debug else None
        self._max_requests = 0  # of the largest graph
        self._reuse = Reuse()
        self._reasons: Counter[str] = Counter()  # why steps were planned
        self._reports: StepReports | None = None
        self._repeats = RepeatedSteps(lambda planning: None)

    @property
    def verifies_trees(self) -> bool:
        """True if steps verify drafts that may branch."""
        return any(kind.has_masks for kind in self.kinds)

    # --- once per step ---

    def plan_eager(self, kind: StepKind, forward_batch: Any) -> StepPlans | None:
        """Plan a step that runs without a graph. None: it has no rows (an idle rank)."""
        if forward_batch.batch_size == 0:
            return None
        requests = kind.requests(forward_batch)
        microbatch = self._microbatches.of(requests)
        plans = self._followed(kind, microbatch, requests, forward_batch, Place.EAGER)
        if plans is not None:
            return plans
        return self._plan(kind, microbatch, requests, forward_batch, Place.EAGER, Reason.EAGER)

    def plan_captured(
        self, kind: StepKind, forward_batch: Any, in_capture: bool = False
    ) -> StepPlans | None:
        """Write the plan that a CUDA graph reads, before the graph is captured or replayed.

        If the step repeats the last one, what the graph reads is in place. None: as `plan_eager`.
        """
        begun_ns = time.perf_counter_ns()
        requests = kind.requests(forward_batch)
        microbatch = self._microbatches.of(requests)
        plans = microbatch.captured
        why: Reason | None = Reason.FIRST
        if requests is not None and not in_capture:
            reuse, growth = self._reuse, None  # None: each request has one token more
            why = reuse.reason(kind, requests.reqs, plans, forward_batch.batch_size)
            if why is None and kind.shape.speculates:
                are_bounds = kind.lengths_are_bounds
                lens = host_lengths(forward_batch, requests.reqs, are_bounds=are_bounds)
                growth = reuse.grown(lens)
                if growth is None:
                    why = Reason.LENGTHS
                else:
                    growth = kind.repeat(forward_batch, requests, growth)
            if why is None:
                reuse.count()
                self._repeats.add(begun_ns, growth)
                return plans
        if forward_batch.batch_size == 0:
            return None
        place = Place.CAPTURE if in_capture else Place.REPLAY
        plans = self._followed(kind, microbatch, requests, forward_batch, place)
        if plans is not None:
            return plans
        return self._plan(kind, microbatch, requests, forward_batch, place, why)

    def _followed(
        self,
        kind: StepKind,
        microbatch: Microbatch,
        requests: StepRequests | None,
        forward_batch: Any,
        place: Place,
    ) -> StepPlans | None:
        """Return the plans of the step before, if they serve this one and lie where it reads."""
        if kind.follows is None or requests is None:
            return None
        plans = self._reuse.in_place(kind.follows, requests.reqs)
        if plans is None:
            return None
        if place is not Place.EAGER:
            num_rows = forward_batch.batch_size * kind.shape.per_request
            if plans is not microbatch.captured or plans.num_rows != num_rows:
                return None
        kind.follow(forward_batch)
        return plans

    def _plan(
        self,
        kind: StepKind,
        microbatch: Microbatch,
        requests: StepRequests | None,
        forward_batch: Any,
        place: Place,
        why: Reason | None,
    ) -> StepPlans:
        """Read a step's paths, and plan it."""
        plans = microbatch.eager if place is Place.EAGER else microbatch.captured
        assert plans is not None
        reader, num_repeated = microbatch.reader, self._repeats.end()
        reqs = None if requests is None else requests.reqs
        num_requests: int = forward_batch.batch_size
        would_repeat = False
        if self._checks is not None and not kind.shape.speculates:
            last = self._reuse.reason(kind, reqs, plans, num_requests)
            would_repeat = last in _WOULD_REPEAT
        first = Reason.EAGER if place is Place.EAGER else Reason.PRIVATE
        self._reuse.hold(kind, reqs, plans, num_requests, first)
        view = kind.view(forward_batch, requests)
        req_pool_indices, seq_lens = kind.rows(view, place)
        kind.take_apart(forward_batch, view.num_known, place)
        batch = reader.read(view)
        table = self._req_to_token_pool.req_to_token
        tensors = {
            "req_to_token": table,
            "req_pool_indices": req_pool_indices,
            "seq_lens": seq_lens,
        }
        try:
            made = plans.plan(batch, **tensors)
        except PlanOverflowError:
            made = plans.plan(reader.without_sharing(batch, OVERFLOW), **tensors)
        if self._checks is not None:
            self._checks.check_growth(made[0][0], reader, would_repeat=would_repeat)
            for attention, plan in made:
                self._checks.check(attention, plan, reader, table, req_pool_indices)
            if reader.last_shared is not None:
                check_host_lengths(reader.lens, view.seq_lens)
        if requests is not None:
            kind.count_planned(forward_batch, batch, plans)
            self._reasons[why or Reason.FIRST] += 1
        if place is not Place.CAPTURE and self._reports is not None:
            self._reports.add_step(plans.step_time, num_repeated)
        if place is Place.REPLAY:
            self._allow_repeats(kind, reader, plans)
        return plans

    def _allow_repeats(self, kind: StepKind, reader: BatchReader, plans: StepPlans) -> None:
        """Let the next steps repeat this one, unless each is to be checked or counted."""
        shared = reader.last_shared
        if shared is None:
            return
        if self._checks is not None:
            self._reuse.stop(Reason.CHECKED)
        elif not kind.graphs_are_complete:
            self._reuse.stop(Reason.GRAPH)
        else:
            steps = sys.maxsize if self._reports is None else self._reports.steps_left
            left, tokens = plans.steps_left(), plans.step_tokens
            if kind.shape.speculates:
                self._reuse.allow(steps, reader.lens, reader.room(left))
                self._repeats.begin(tokens, 0)
            else:
                self._reuse.allow(min(left, steps))
                self._repeats.begin(tokens, len(shared.reqs))

    # --- CUDA graphs ---

    def reserve(self, max_requests: int, kinds: Collection[StepKind] | None = None) -> None:
        """Allocate what graphs of up to so many requests capture.

        Called before the first capture, and each time that all graphs are captured again (after an
        update of the weights). Graphs of fewer requests, which SGLang captures for other numbers of
        drafts, lie in the same buffers. kinds: whose graphs are captured next; None: all.

        Raises
        ------
        RuntimeError
            If graphs of other kinds have been captured for fewer requests.
        """
        if max_requests > self._max_requests:
            others = [] if kinds is None else [each for each in self.kinds if each not in kinds]
            if any(each.shape.speculates and each.graphs_are_complete for each in others):
                raise RuntimeError(
                    f"pat reserved for graphs of {self._max_requests} requests, with which others "
                    f"were captured; SGLang then asked for graphs of {max_requests}: give "
                    "--cuda-graph-bs-decode sizes that fit any number of drafts"
                )
            self._max_requests, kinds = max_requests, self.kinds
        for kind in self.kinds if kinds is None else kinds:
            kind.reserve(self._max_requests)
        num_slots = len(self._token_to_kv_pool.get_key_buffer(self._layer_id))
        self._microbatches.reserve(
            max_requests=self._max_requests * max(kind.shape.per_request for kind in self.kinds),
            # A slot may be in several shared ranges, where packs read their parents' ranges too.
            max_shared_slots=2 * num_slots,
            # No request is longer than the pool: a model's context may be.
            max_seq_len=min(self._req_to_token_pool.req_to_token.shape[1], num_slots),
        )

    # --- statistics ---

    def plan_counts(self) -> Counter[str]:
        """Count the steps that were planned, and those in which the last plan was reused."""
        stats = self._plan_stats()
        return Counter(
            plans_built=sum(each.plans_built for each in stats),
            plans_reused=sum(each.plans_reused for each in stats),
        )

    def _plan_stats(self) -> list[PlanStats]:
        stats = [plans.stats for each in self._microbatches for plans in each.plans()]
        return [*stats, self._repeats.stats()]


class ServedDecoder(Decoder):
    """The decoder of the model that a server serves: it reports what is counted.

    Attributes
    ----------
    decode
        Its kind of decode steps.
    verifies
        Its kinds of verify steps, by the draft tokens of a request. Empty without speculative
        decoding.
    """

    def __init__(self, model_runner: Any, environment: Environment, routes: Routes) -> None:
        install_hooks(CHANNEL_HOOKS)
        self.decode = Decode()
        self.verifies: dict[int, Verify] = {}
        drafts = drafts_of(model_runner.server_args)
        if drafts is not None:
            install_hooks(VERIFY_HOOKS)
            device = model_runner.req_to_token_pool.req_to_token.device
            for count in drafts.counts:
                shape = RowShape.of_drafts(count, are_chains=drafts.are_chains)
                are_bounds = drafts.lengths_are_bounds
                self.verifies[count] = Verify(shape, device, lengths_are_bounds=are_bounds)
        kinds: list[StepKind] = [self.decode, *self.verifies.values()]
        super().__init__(model_runner, environment, routes, kinds)
        check_version()
        self._reported = list(kinds)
        self._drafting: list[Decoder] = []
        self._reports = StepReports(environment, model_runner, self.counters)
        self._repeats = RepeatedSteps(self._reports.add_repeated, self._reports.on_step)
        self._reports.start()

    def new_extend(self, routes: Routes, count: int) -> DraftExtend:
        """Return draft extend for a draft model with these layers and `count` tokens per request.

        Plans are made for the shapes of its layers, too.
        """
        more = {*routes.shapes.values()} - self._microbatches.current.eager.of_shape.keys()
        if more:
            self._microbatches.add(partial(self._new_plans, more))
        extend = DraftExtend(self.verifies[count])
        self._reported.append(extend)
        return extend

    def report(self, drafting: Decoder) -> None:
        """Report what is counted by the decoder of a draft model, too."""
        self._drafting.append(drafting)
        self._reported += drafting.kinds

    def counters(self) -> Counters:
        """Return the numbers of all steps so far. May be called by any thread."""
        microbatches = list(self._microbatches)
        readers = [each.reader for each in microbatches]
        more: defaultdict[str, list[Counter[str]]] = defaultdict(list)
        for kind in list(self._reported):
            for name, counts in kind.counters().items():
                more[name].append(counts)
        for drafting in list(self._drafting):
            more["draft"].append(drafting.plan_counts())
        if self._checks is not None:
            more |= {name: [counts] for name, counts in self._checks.counters().items()}
        # One tree, whose events all readers see. None until a step has shown it.
        events = [each.events.counts for each in readers if each.events is not None][:1]
        return read_counters(
            self._plan_stats(),
            private_steps=[each.private_steps for each in readers],
            steps_planned=[self._reasons],
            tree_events=events,
            batch_changes=[each.changes for each in readers],
            **more,
        )


def _new_plans(
    shapes: Iterable[Shape], model_runner: Any, environment: Environment, **reservation: Any
) -> StepPlans:
    """Make a PackAttention for each shape of layers."""
    attentions = {
        shape: PackAttention(
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            v_head_dim=shape.v_head_dim,
            dtype=model_runner.dtype,
            kv_dtype=model_runner.kv_cache_dtype,
            device=model_runner.req_to_token_pool.req_to_token.device,
            policy=environment.policy,
            growth_tokens=environment.growth_tokens,
            batch_invariant=batch_invariant(model_runner.server_args, environment),
            **reservation,
        )
        for shape in sorted(set(shapes))
    }
    return StepPlans(attentions)


def _num_microbatches(server_args: Any) -> int:
    """Count the batches that take turns: pipeline parallelism runs several at once."""
    return int(server_args.pp_size) + int(server_args.pp_async_batch_depth)
