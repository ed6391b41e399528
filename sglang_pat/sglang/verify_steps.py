"""VerifySteps: what the steps that verify drafts keep between them, beside what decode steps do.

A step of speculative decoding has rows of its own on the device (`draft_rows.py`) and, where drafts
branch, masks (`draft_trees.py`): once for eager steps, and once where a captured graph finds them.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.sglang.draft_rows import Drafts, RowTensors
from sglang_pat.sglang.draft_trees import DraftTrees


class VerifySteps:
    """What verify steps have beside decode steps, and how many there were."""

    def __init__(self, drafts: Drafts, device: torch.device) -> None:
        self.drafts = drafts
        self.counts = Counter({"steps": 0, "rows": 0})
        self._device = device
        self._eager = self._place(None)
        self._captured, self._reserved_for = self._eager, 0
        self._trees: DraftTrees | None = None  # of the last step, if it verifies trees
        self.rows_are_in_graphs = False  # whether a captured graph writes its rows itself

    def _place(self, max_requests: int | None) -> tuple[RowTensors, DraftTrees]:
        drafts, device = self.drafts, self._device
        max_rows = None if max_requests is None else max_requests * drafts.per_request
        return (
            RowTensors(drafts, device, max_rows),
            DraftTrees(drafts.per_request, device, max_requests),
        )

    def reserve(self, max_requests: int) -> None:
        """For CUDA graphs. What is reserved stays, as in `Microbatches`."""
        if max_requests != self._reserved_for:
            self._captured = self._place(max_requests)
            self._reserved_for = max_requests
        self.rows_are_in_graphs = False

    def record_in_graph(self, forward_batch: Any) -> None:
        """Let the graph that is being captured write its rows, of the lengths that SGLang has put
        in place for its replay."""
        rows, _ = self._captured
        rows.of(forward_batch.req_pool_indices, forward_batch.seq_lens)
        self.rows_are_in_graphs = True

    def take(
        self, forward_batch: Any, num_known: int, *, is_captured: bool, in_capture: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go to the next verify step, of so many requests and padding. Returns `req_pool_indices`
        and `seq_lens` of its rows."""
        place = rows, _ = self._captured if is_captured else self._eager
        self._take_trees(place, forward_batch, num_known, in_capture=in_capture)
        return rows.of(forward_batch.req_pool_indices, forward_batch.seq_lens)

    def before_extend(self, forward_batch: Any) -> Any:
        """A step in which a draft model reads what a verify step has accepted, as that step has
        seen it. Requests are longer by all draft tokens now, accepted or not."""
        size, count = forward_batch.batch_size, self.drafts.per_request
        on_host = forward_batch.seq_lens_cpu
        return SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            req_pool_indices=forward_batch.req_pool_indices[:size],
            # Padding is shorter.
            seq_lens=(forward_batch.seq_lens[:size] - count).clamp_(min=1),
            seq_lens_cpu=None if on_host is None else (on_host[:size] - count).clamp_(min=1),
        )

    def repeat(self, forward_batch: Any, num_known: int) -> None:
        """Go to the next verify step, of a graph that writes its rows itself."""
        self._take_trees(self._captured, forward_batch, num_known, in_capture=False)

    def _take_trees(
        self,
        place: tuple[RowTensors, DraftTrees],
        forward_batch: Any,
        num_known: int,
        *,
        in_capture: bool,
    ) -> None:
        self._trees = None
        if not self.drafts.are_chains:
            self._trees = place[1]
            self._trees.take(forward_batch, num_known, in_capture=in_capture)

    def leave(self) -> None:
        """The next step decodes."""
        self._trees = None

    def trees(self) -> DraftTrees | None:
        """Of the step that is being run."""
        return self._trees

    def count(self, num_rows: int) -> None:
        """A verify step."""
        self.counts["steps"] += 1
        self.counts["rows"] += num_rows
