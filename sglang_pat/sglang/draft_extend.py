"""DraftExtend: the attention of a draft model while it reads what was accepted.

After each verify step a draft model reads the tokens that the step has read, in the same rows: each
token its request's KV up to and including itself (SGLang's draft extend, `DRAFT_EXTEND_V2`). So the
plan of the verify step serves it as it is, over the draft model's KV, which lies in the same slots.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.sglang.layer_attention import LayerAttention
from sglang_pat.sglang.microbatches import StepPlans
from sglang_pat.sglang.route_reports import report_extend_routes
from sglang_pat.sglang.routes import Routes


class VerifyPlanner(Protocol):
    """Plans the verify steps of the model that is served."""

    def plan_extend(
        self, forward_batch: Any, *, is_captured: bool = False, in_capture: bool = False
    ) -> StepPlans: ...


class DraftExtend(LayerAttention):
    """What a backend with `PatMixin` asks of a decoder, of these steps alone.

    counts: steps, and rows in them.
    """

    modes = (ForwardMode.DRAFT_EXTEND_V2,)
    verifies_trees = False
    needs_lengths = False
    default_has_tables = True  # SGLang's runner may ask for them

    def __init__(self, model_runner: Any, routes: Routes, planner: VerifyPlanner) -> None:
        """
        Parameters
        ----------
        model_runner
            SGLang's, of the draft model.
        routes
            Of the draft model.
        planner
            Of the model that is served.
        """
        super().__init__(model_runner, routes)
        self._planner = planner
        self.counts: Counter[str] = Counter({"steps": 0, "rows": 0})

    def report_routes(self) -> None:
        """They have changed."""
        report_extend_routes(self.routes)

    def plan_eager(self, forward_batch: Any) -> None:
        """Before a step without a graph."""
        if forward_batch.batch_size:
            self._plans = self._planner.plan_extend(forward_batch)
            self._count(len(forward_batch.input_ids))

    def plan_captured(self, forward_batch: Any, in_capture: bool) -> None:
        """Before a CUDA graph is captured or replayed."""
        if not forward_batch.batch_size:
            return
        self._plans = self._planner.plan_extend(
            forward_batch, is_captured=True, in_capture=in_capture
        )
        if not in_capture:
            self._count(len(forward_batch.input_ids))

    def _count(self, num_rows: int) -> None:
        self.counts["steps"] += 1
        self.counts["rows"] += num_rows

    def record_in_graph(self, forward_batch: Any) -> None:
        """Nothing: the verify step has put all in place."""

    def reserve(self, max_requests: int) -> None:
        """Nothing: these steps are as large as the verify steps."""
