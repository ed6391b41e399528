"""The types of steps of speculative decoding.

| type | rows per request | each row reads | requests grow by | counted as |
|---|---|---|---|---|
| TargetVerifyStep | draft tokens | the KV, and the drafts before it | what was accepted | verify |
| DraftExtendStep | as verify, in its plan | as verify, of the draft model | - | draft_extend |
| DraftChainSteps | 1, in each of its steps | one token more in each | what was accepted | draft |
| DraftTreeSteps | 1 per branch | the KV, and its branch | what was accepted | draft |
| BlockDraftStep | draft tokens | the KV, and the block | what was accepted | draft |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat._scheduler import growth_of
from sglang_pat.batch import DecodeBatch, IntArray
from sglang_pat.plan import KvTokens
from sglang_pat.sglang.layer.attention import ExtraKv
from sglang_pat.sglang.layer.step_plans import StepPlans
from sglang_pat.sglang.speculative.draft_requests import DRAFT_REQUESTS, step_of_extend
from sglang_pat.sglang.speculative.rows import (
    DraftBatchBuilder,
    RowShape,
    RowTensors,
    SpeculativeInputs,
    committed_lengths,
)
from sglang_pat.sglang.speculative.tree_attention import BlockKv, BranchKv, TreeKv
from sglang_pat.sglang.step.step_type import ExecutionMode, StepType
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.request_tracker import StepRequests, requests_of


class SpeculativeStep(StepType):
    """A step in which requests grow by what is accepted, and may have several rows.

    Attributes
    ----------
    shape
        The rows of each request.
    extra_kv
        What the rows of the last step read besides their plan: drafts that branch.
    lengths_are_bounds
        Whether the lengths that SGLang gives on the host may be longer than the requests are.
    has_masks
        Whether SGLang makes masks that say what the rows read of each other.
    masks
        Where it may write them, over the drafts alone, for as many requests as graphs have.
    """

    shape: RowShape
    extra_kv: ExtraKv | None = None
    lengths_are_bounds = False
    has_masks = False
    masks: torch.Tensor | None = None
    graphs_are_complete = False  # until one has been captured
    # The lengths of the requests of the last step that was planned, and by how much each may grow.
    _lens: IntArray
    _room: IntArray

    def view(self, forward_batch: Any, requests: StepRequests | None) -> SpeculativeInputs:
        view = SpeculativeInputs.read(forward_batch, requests, shape=self.shape)
        if self.lengths_are_bounds:
            view.seq_lens_cpu = None
        return view

    def extra_kv_of(self, layer: RadixAttention) -> ExtraKv | None:
        """Return what the rows of the last step read besides their plan in a layer."""
        return self.extra_kv

    def record_in_graph(self, forward_batch: Any) -> None:
        """Let a graph that is being captured write what its rows read.

        It writes them from the lengths that SGLang puts in place before each replay.
        """

    def reserve(self, max_requests: int) -> None:
        """Allocate what graphs of up to so many requests capture."""

    def steps_to_repeat(self, builder: DecodeBatchBuilder, growth: int) -> int:
        assert isinstance(builder, DraftBatchBuilder)
        self._lens, self._room = builder.lens, builder.room(growth)
        return sys.maxsize

    def repeat(self, forward_batch: Any, requests: StepRequests) -> int | None:
        on_host = None if self.lengths_are_bounds else forward_batch.seq_lens_cpu
        lens = committed_lengths(requests.reqs) if on_host is None else on_host.numpy()
        growth: int | None = growth_of(lens, self._lens, self._room)
        return None if growth is None else self.repeated(forward_batch, requests, growth)

    def repeated(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        """Go to a step that repeats the last one, and count it.

        growth: tokens by which the requests have grown. Returns by how many the rows read more.
        """
        return growth

    def counters(self) -> dict[str, Counter[str]]:
        """Return the numbers for log, metrics and stats file, by name."""
        return {}


class TargetVerifyStep(SpeculativeStep):
    """A step of speculative decoding in which the served model verifies draft tokens."""

    mode = ForwardMode.TARGET_VERIFY

    def __init__(
        self, shape: RowShape, device: torch.device, *, lengths_are_bounds: bool = False
    ) -> None:
        self.shape = shape
        self.has_masks = shape.is_tree
        self.lengths_are_bounds = lengths_are_bounds
        self._counts = Counter({"steps": 0, "rows": 0})
        self._counted: Any = None  # SGLang's drafts of the last step
        self._device = device
        self._eager = self._new_place(None)
        self._captured, self._reserved_for = self._eager, 0
        self.paths = BlockKv(shape.per_request, device)

    def _new_place(self, max_requests: int | None) -> tuple[RowTensors, TreeKv]:
        count, device = self.shape.per_request, self._device
        max_rows = None if max_requests is None else max_requests * count
        return (
            RowTensors(self.shape, device, max_rows),
            TreeKv(count, device, max_requests),
        )

    def reserve(self, max_requests: int) -> None:
        if max_requests != self._reserved_for:  # what is reserved stays, as in `Microbatches`
            self._captured = self._new_place(max_requests)
            self._reserved_for = max_requests
            self.paths.reserve(max_requests)
            if self.has_masks:
                size = max_requests * self.shape.per_request**2
                self.masks = torch.zeros(size, dtype=torch.bool, device=self._device)
        self.graphs_are_complete = False

    def record_in_graph(self, forward_batch: Any) -> None:
        self._captured[0].write(forward_batch.req_pool_indices, forward_batch.seq_lens)
        self.graphs_are_complete = True

    def rows(
        self, view: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._read_drafts(forward_batch, view.num_known, execution)
        return self.request_rows(view, execution)

    def request_rows(
        self, view: StepInputs, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `req_pool_indices` and `seq_lens` of the rows of these requests."""
        rows, _ = self._eager if execution is ExecutionMode.EAGER else self._captured
        return rows.write(view.req_pool_indices, view.seq_lens)

    def _read_drafts(self, forward_batch: Any, num_known: int, execution: ExecutionMode) -> None:
        """Let `extra_kv` be that of a step with so many known requests."""
        if self.shape.is_tree:
            _, trees = self._eager if execution is ExecutionMode.EAGER else self._captured
            trees.update(
                forward_batch, num_known, self.masks, in_capture=execution is ExecutionMode.CAPTURE
            )
            self.extra_kv = trees

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        # SGLang 0.5.23 has an eager step of a block planned when it is made, and when it runs.
        if self._counted is None or self._counted is not forward_batch.spec_info:
            self._count(int(np.count_nonzero(batch.seq_lens)))
        self._counted = forward_batch.spec_info if self.lengths_are_bounds else None

    def repeated(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        num_requests, count = len(requests.reqs), self.shape.per_request
        self._read_drafts(forward_batch, num_requests, ExecutionMode.REPLAY)
        self._count(num_requests * count)
        return growth * count

    def _count(self, num_rows: int) -> None:
        self._counts["steps"] += 1
        self._counts["rows"] += num_rows

    def counters(self) -> dict[str, Counter[str]]:
        return {"verify": self._counts}


class BlockDraftStep(TargetVerifyStep):
    """A step in which a draft model gives a block of drafts at once (DFLASH, DSPARK).

    All rows end where the block begins, with its first token, which was accepted. Each reads the
    block apart: in some layers all of it, in others what is before its own token.
    """

    requests = DRAFT_REQUESTS.of_blocks

    def __init__(self, count: int, device: torch.device) -> None:
        """count: tokens of a block."""
        shape = RowShape.of_drafts(count, are_chains=False)
        super().__init__(shape, device, lengths_are_bounds=True)
        self.has_masks = False
        self._whole = BlockKv(count, device, are_chains=False)

    def reserve(self, max_requests: int) -> None:
        if max_requests != self._reserved_for:
            self._whole.reserve(max_requests)
        super().reserve(max_requests)

    def _read_drafts(self, forward_batch: Any, num_known: int, execution: ExecutionMode) -> None:
        """Do nothing: all blocks are alike."""

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        self._count(int(np.count_nonzero(batch.seq_lens)))

    def extra_kv_of(self, layer: RadixAttention) -> ExtraKv | None:
        return self.paths if layer.attn_type == AttentionType.DECODER else self._whole

    def counters(self) -> dict[str, Counter[str]]:
        return {"draft": self._counts}


class DraftExtendStep(SpeculativeStep):
    """A step in which a draft model reads the tokens of the last verify step, in the same rows.

    Each row reads as much as in that step, of the draft model's KV, which lies in the same slots.
    So the plan of the verify step serves it.
    """

    mode = ForwardMode.DRAFT_EXTEND_V2
    requests: Callable[[Any], StepRequests | None] = staticmethod(step_of_extend)

    def __init__(self, verify: TargetVerifyStep) -> None:
        self.shape = verify.shape
        self.follows = verify
        self.extra_kv = verify.paths if verify.shape.is_tree else None
        self._verify = verify
        self._counts = Counter({"steps": 0, "rows": 0})
        self._counted: Any = None  # SGLang's drafts of the last step

    def view(self, forward_batch: Any, requests: StepRequests | None) -> SpeculativeInputs:
        """Read the step as the verify step before it.

        Requests are longer by all draft tokens now, accepted or not. SGLang may show buffers of the
        largest graph, and announces no padding.
        """
        size, count = forward_batch.batch_size, self.shape.per_request
        view = super().view(forward_batch, requests)
        on_host = view.seq_lens_cpu
        return replace(
            view,
            num_known=size if requests is None else min(len(requests.reqs), size),
            req_pool_indices=view.req_pool_indices[:size],
            # Padding is shorter.
            seq_lens=(view.seq_lens[:size] - count).clamp_(min=1),
            seq_lens_cpu=None if on_host is None else (on_host[:size] - count).clamp_(min=1),
        )

    def rows(
        self, view: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._verify.request_rows(view, execution)

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        self.follow(forward_batch)

    def follow(self, forward_batch: Any) -> None:
        # The first of several draft layers is prepared with the batch, and in its turn.
        if forward_batch.spec_info is not self._counted:
            self._counted = forward_batch.spec_info
            self._counts["steps"] += 1
            self._counts["rows"] += len(forward_batch.input_ids)

    def counters(self) -> dict[str, Counter[str]]:
        return {"draft_extend": self._counts}


class DraftChainSteps(SpeculativeStep):
    """The steps in which a draft model decodes, one token of each request after the other.

    SGLang prepares all steps of a round at once, and captures them in one graph
    (`--speculative-eagle-topk 1`). So one plan serves the round, that of its first step, and each
    step has lengths of its own.
    """

    mode = ForwardMode.DECODE
    shape = RowShape(first=1)
    requests: Callable[[Any], StepRequests | None] = staticmethod(requests_of)

    def __init__(self, num_steps: int, device: torch.device) -> None:
        """num_steps: decode steps per round."""
        self._num_steps = num_steps
        self._offsets = torch.arange(1, num_steps + 1, dtype=torch.int64, device=device)[:, None]
        self._reserved = self._offsets[:, :0]  # lengths that captured graphs read: [steps, rows]
        self._round_lens = self._reserved  # of the round
        self._at = 0  # the step whose lengths the layers read
        self._tokens = KvTokens(0, 0, 0)  # of the first step of the last round that was planned
        self._num_rows = 0  # of its known requests
        self._counts: Counter[str] = Counter({"steps": 0, "rows": 0})
        self._kv_tokens = Counter(dict.fromkeys(KvTokens._fields, 0))

    def reserve(self, max_requests: int) -> None:
        self._reserved = self._offsets.expand(-1, max_requests).clone()
        self.graphs_are_complete = False

    def record_in_graph(self, forward_batch: Any) -> None:
        self._write_lengths(forward_batch)
        self.graphs_are_complete = True

    def _write_lengths(self, batch: Any) -> torch.Tensor:
        lens = self._reserved[:, : len(batch.seq_lens)]
        return torch.add(batch.seq_lens, self._offsets, out=lens)

    def rows(
        self, view: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if execution is ExecutionMode.EAGER:
            self._round_lens = view.seq_lens + self._offsets
        elif execution is ExecutionMode.CAPTURE or not self.graphs_are_complete:
            self._round_lens = self._write_lengths(view)
        else:
            self._round_lens = self._reserved[:, : view.size]
        self._at = 0
        return view.req_pool_indices, self._round_lens[0]

    def go_to(self, step: int, plans: StepPlans) -> None:
        """Let the plans serve a step of the round, counted from 0, whose layers come next."""
        if step != self._at:
            plans.advance(self._round_lens[step], step)
            self._at = step

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        self._num_rows, self._tokens = int(np.count_nonzero(batch.seq_lens)), plans.step_tokens
        self._count(0)

    def repeated(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        self._count(growth)
        return growth

    def _count(self, growth: int) -> None:
        """Count a round, with so many KV tokens more than the last one that was planned."""
        steps, num_rows = self._num_steps, self._num_rows
        self._counts["steps"] += steps
        self._counts["rows"] += steps * num_rows
        more = steps * growth
        if self.extra_kv is None:  # each step reads one token more
            more += num_rows * steps * (steps - 1) // 2
        for name, tokens in self._tokens._asdict().items():
            self._kv_tokens[name] += steps * tokens + more

    def counters(self) -> dict[str, Counter[str]]:
        return {"draft": self._counts, "draft_kv_tokens": self._kv_tokens}


class DraftTreeSteps(DraftChainSteps):
    """The steps of a draft model that branches: `topk` rows per request.

    All rows end where the round's drafts begin, so one plan serves all steps as it is. Each row
    reads its own branch apart.
    """

    def __init__(self, num_steps: int, topk: int, device: torch.device) -> None:
        super().__init__(num_steps, device)
        # On the host rows are a token longer than on the device: so each has an open tail.
        self.shape = RowShape(topk, first=1, are_drafts=True)
        self._rows = partial(RowTensors, RowShape(topk, are_drafts=True), device)
        self._branches = partial(BranchKv, num_steps, device)
        self._eager = self._captured = self._rows(), self._branches()
        self.extra_kv: BranchKv = self._eager[1]

    def reserve(self, max_requests: int) -> None:
        self.graphs_are_complete = False
        num_rows = max_requests * self.shape.per_request
        self._captured = self._rows(num_rows), self._branches(num_rows)

    def record_in_graph(self, forward_batch: Any) -> None:
        self._captured[0].write(forward_batch.req_pool_indices, forward_batch.seq_lens)
        self.graphs_are_complete = True

    def rows(
        self, view: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self.extra_kv = self._eager if execution is ExecutionMode.EAGER else self._captured
        if execution is not ExecutionMode.REPLAY:  # a graph reads SGLang's own buffer
            num_rows = forward_batch.batch_size * self.shape.per_request
            self.extra_kv.update(forward_batch.out_cache_loc, num_rows)
        return rows.write(view.req_pool_indices, view.seq_lens)

    def go_to(self, step: int, plans: StepPlans) -> None:
        self.extra_kv.go_to(step)

    def repeated(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        return super().repeated(forward_batch, requests, growth * self.shape.per_request)
