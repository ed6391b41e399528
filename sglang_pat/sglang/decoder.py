"""PatDecoder: the decode attention of one model through PackAttention.

Above it the backend that SGLang calls: plan_eager() or plan_captured() once per step, attend() once
per layer that pat decodes. A step of speculative decoding, in which the model verifies drafts, is a
decode step with a row for each draft token (`draft_rows.py`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.sglang.draft_decoder import DraftDecoder
from sglang_pat.sglang.draft_extend import DraftExtend
from sglang_pat.sglang.draft_rows import Drafts
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.hooks import (
    CHANNEL,
    VERIFY_HOOKS,
    StepRequests,
    install_hooks,
    step_of_extend,
)
from sglang_pat.sglang.microbatches import StepPlans
from sglang_pat.sglang.options import drafts_of
from sglang_pat.sglang.planned_attention import PlannedAttention
from sglang_pat.sglang.radix import Request
from sglang_pat.sglang.reader import BatchReader, num_known
from sglang_pat.sglang.repeats import RepeatedSteps
from sglang_pat.sglang.reports import StepReports
from sglang_pat.sglang.route_reports import report_routes
from sglang_pat.sglang.routes import Routes
from sglang_pat.sglang.self_test import check_version
from sglang_pat.sglang.verify_steps import VerifySteps
from sglang_pat.stats import Counters, read_counters

logger = logging.getLogger(__name__)

_VERIFY = ForwardMode.TARGET_VERIFY
_DECODES = (ForwardMode.DECODE,)
_VERIFIES = (ForwardMode.DECODE, _VERIFY)


class PatDecoder(PlannedAttention):
    """Plans a decode step, and computes the attention of its layers.

    Eager steps and CUDA graphs have plans of their own: a graph needs buffers that never move. A
    graph that is replayed for the requests of the last step is not planned at all.
    """

    def __init__(self, model_runner: Any, environment: Environment, routes: Routes) -> None:
        super().__init__(model_runner, environment, routes)
        install_hooks()
        self._verify: VerifySteps | None = None
        self._verified: list[Request] | None = None  # of the last step, if it was a verify step
        self._drafting: DraftDecoder | None = None
        self._extend: DraftExtend | None = None
        drafts = drafts_of(model_runner.server_args)
        if drafts is not None:
            install_hooks(VERIFY_HOOKS)
            device = self.req_to_token_pool.req_to_token.device
            self._verify = VerifySteps(Drafts(*drafts), device)
        check_version()
        self._reports = StepReports(environment, model_runner, self._counters)
        self._repeats = RepeatedSteps(self._reports.add_repeated, self._reports.on_step)
        self._reports.start()

    @property
    def verifies(self) -> bool:
        """Whether there are steps that verify drafts."""
        return self._verify is not None

    @property
    def verifies_trees(self) -> bool:
        """Whether those drafts may branch."""
        return self._verify is not None and not self._verify.drafts.are_chains

    @property
    def needs_lengths(self) -> bool:
        """Whether plans are made from lengths that SGLang copies to the host in each step: a step
        then waits for the verify step before. Chains do with those that the host knows anyway."""
        return self._verify is None or self.verifies_trees

    @property
    def modes(self) -> tuple[ForwardMode, ...]:
        """Of the steps that are planned here: those that decode, and those that verify drafts."""
        return _DECODES if self._verify is None else _VERIFIES

    @property
    def default_has_tables(self) -> bool:
        """Whether SGLang writes into the default backend's tables, whoever attends."""
        return self.verifies

    def report_routes(self) -> None:
        """They have changed."""
        report_routes(self.routes)

    def report_drafting(self, drafting: DraftDecoder) -> None:
        """Report what is counted by the decoder of the draft model, too."""
        self._drafting = drafting

    def report_extend(self, extend: DraftExtend) -> None:
        """As report_drafting(), of its steps that read what was accepted. Plans are made for the
        shapes of its layers, too."""
        self._extend = extend
        more = {*extend.routes.shapes.values()} - self._plans.of_shape.keys()
        if more:
            self._microbatches.add(partial(self._new_plans, more))

    # --- once per step ---

    def plan_eager(self, forward_batch: Any) -> None:
        """Plan an eager step. The requests are taken from the step that is being run."""
        if forward_batch.batch_size == 0:  # an idle rank under data parallelism
            return
        num_repeated = self._repeats.end()
        step = self._acknowledge(forward_batch)
        microbatch = self._microbatches.of(step)
        self._plan(microbatch.reader, microbatch.eager, step, forward_batch)
        self._reports.add_step(microbatch.eager.step_time, num_repeated)

    def plan_captured(self, forward_batch: Any, in_capture: bool) -> None:
        """Before a CUDA graph is captured or replayed: write the plan that the graph reads."""
        begun_ns = time.perf_counter_ns()
        step = self._acknowledge(forward_batch)
        microbatch = self._microbatches.of(step)
        if not in_capture and self._repeats_last(microbatch.reader, step, forward_batch, begun_ns):
            return  # what the graph reads is in place
        if forward_batch.batch_size == 0:
            return
        num_repeated = self._repeats.end()
        plans = microbatch.captured
        assert plans is not None
        verifies = self._plan(
            microbatch.reader, plans, step, forward_batch, is_captured=True, in_capture=in_capture
        )
        if not in_capture:
            self._reports.add_step(plans.step_time, num_repeated)
            self._expect_repeats(microbatch.reader, plans, forward_batch, verifies=verifies)

    def _acknowledge(self, forward_batch: Any) -> StepRequests | None:
        step = CHANNEL.acknowledge()
        is_verified = step is not None and forward_batch.forward_mode is _VERIFY
        self._verified = step.reqs if step is not None and is_verified else None
        return step

    def plan_extend(
        self, forward_batch: Any, *, is_captured: bool = False, in_capture: bool = False
    ) -> StepPlans:
        """The plans for a step with the rows of a verify step, as a draft model reads them.

        Parameters
        ----------
        forward_batch
            SGLang's, of that step.
        is_captured
            Whether a CUDA graph runs it.
        in_capture
            Whether that is being captured.

        Returns
        -------
        StepPlans
            Those of the verify step before, if they lie where the step reads them. Otherwise it is
            planned.
        """
        verify = self._verify
        assert verify is not None
        step = step_of_extend(forward_batch)
        microbatch = self._microbatches.of(step)
        is_verified = step is not None and step.reqs is self._verified
        num_rows = forward_batch.batch_size * verify.drafts.per_request
        is_in_place = self._plans is microbatch.captured and self._plans.num_rows == num_rows
        if is_verified and (is_in_place or not is_captured):
            return self._plans
        num_repeated = self._repeats.end()
        plans = microbatch.captured if is_captured else microbatch.eager
        assert plans is not None
        self._plan(
            microbatch.reader,
            plans,
            step,
            verify.before_extend(forward_batch),
            is_captured=is_captured,
            in_capture=in_capture,
            is_counted=False,
        )
        if not in_capture:
            self._reports.add_step(plans.step_time, num_repeated)
        return plans

    def record_in_graph(self, forward_batch: Any) -> None:
        """While a CUDA graph is captured: what it does by itself before its layers."""
        if self._verify is not None:
            self._verify.record_in_graph(forward_batch)

    def _plan(
        self,
        reader: BatchReader,
        plans: StepPlans,
        step: StepRequests | None,
        forward_batch: Any,
        *,
        is_captured: bool = False,
        in_capture: bool = False,
        is_counted: bool = True,
    ) -> bool:
        """Read the step's paths, and plan it. Returns whether it verifies drafts."""
        req_pool_indices, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        drafts, verify = None, self._verify
        if verify is not None and forward_batch.forward_mode.is_target_verify():
            drafts = verify.drafts
            known = num_known(step, forward_batch)
            req_pool_indices, seq_lens = verify.take(
                forward_batch, known, is_captured=is_captured, in_capture=in_capture
            )
        elif verify is not None:
            verify.leave()
        batch = reader.read(step, forward_batch, drafts)
        if verify is not None and drafts is not None and step is not None and is_counted:
            verify.count(int(np.count_nonzero(batch.seq_lens)))
        self._plan_batch(reader, plans, batch, req_pool_indices, seq_lens)
        return drafts is not None

    def _expect_repeats(
        self, reader: BatchReader, plans: StepPlans, forward_batch: Any, *, verifies: bool
    ) -> None:
        """Let the next steps do without a plan(), unless every step is to be checked or counted."""
        shared = reader.last_shared
        if self._checks is not None or shared is None:
            return
        num_growing, steps = len(shared.reqs), min(plans.steps_left(), self._reports.steps_left)
        if verifies:  # requests grow by what is accepted
            reader.expect_growth(plans.steps_left())
            num_growing, steps = 0, self._reports.steps_left
        self._repeats.begin(forward_batch.batch_size, steps, plans.step_tokens, num_growing)

    def _repeats_last(
        self, reader: BatchReader, step: StepRequests | None, forward_batch: Any, begun_ns: int
    ) -> bool:
        """Return True if the last plan serves a step. It must be of the last step's kind."""
        if forward_batch.forward_mode is _VERIFY:
            return self._repeats_verify(reader, step, forward_batch, begun_ns)
        return reader.is_unchanged(step) and self._repeats.add(forward_batch.batch_size, begun_ns)

    def _repeats_verify(
        self, reader: BatchReader, step: StepRequests | None, forward_batch: Any, begun_ns: int
    ) -> bool:
        """Whether a verify step needs no plan(): the last plan serves it, with what was accepted
        since."""
        verify = self._verify
        if step is None or verify is None or not verify.rows_are_in_graphs:
            return False
        growth = reader.growth(step, forward_batch, verify.drafts)
        if growth is None:
            return False
        count = verify.drafts.per_request
        verify.repeat(forward_batch, len(step.reqs))
        if not self._repeats.add(forward_batch.batch_size, begun_ns, count * growth):
            return False
        verify.count(len(step.reqs) * count)
        return True

    # --- CUDA graphs ---

    def reserve(self, max_requests: int) -> None:
        """Before the first capture, and each time that all graphs are captured anew (after an
        update of the weights). max_requests: of the largest graph."""
        if self._verify is not None:
            self._verify.reserve(max_requests)
            max_requests *= self._verify.drafts.per_request
        self._reserve(max_requests)

    # --- once per layer ---

    def _run(
        self,
        run: Callable[..., Any],
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        layer: RadixAttention,
        forward_batch: Any,
    ) -> torch.Tensor:
        trees = None if self._verify is None else self._verify.trees()
        if trees is None:
            return super()._run(run, q, caches, layer, forward_batch)
        # Of the caches: what the pool has, which may be rounded to a smaller type.
        before, scales = run(q, return_lse=True), self._scales(layer)
        slots = forward_batch.out_cache_loc[: len(q)]
        return trees.merge(q, caches, slots, layer, before, scales)

    # --- statistics ---

    def _counters(self) -> Counters:
        microbatches = list(self._microbatches)
        stats = [plans.stats for each in microbatches for plans in each.plans()]
        stats.append(self._repeats.stats())
        readers = [each.reader for each in microbatches]
        more: dict[str, list[Counter[str]]] = {}
        if self._checks is not None:
            more["ranks_alike"] = [self._checks.ranks_alike]
        if self._verify is not None:
            more["verify"] = [self._verify.counts]
        if self._drafting is not None:
            more["draft"] = [self._drafting.counts, self._drafting.plan_counts()]
            more["draft_kv_tokens"] = [self._drafting.kv_tokens]
        if self._extend is not None:
            more["draft_extend"] = [self._extend.counts]
        # One tree, whose events all readers see. None until a step has shown it.
        events = [each.events.counts for each in readers if each.events is not None][:1]
        return read_counters(
            stats,
            private_steps=[each.private_steps for each in readers],
            tree_events=events,
            batch_changes=[each.changes for each in readers],
            **more,
        )
