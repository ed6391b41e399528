"""The types of steps of speculative decoding.

`device_rows` has the tensors of a step's rows on the device. `extra_kv` has the draft tokens that
rows read in addition to the KV in the plan, or is None.

| type | rows per request | each row reads | requests grow by | counted as |
|---|---|---|---|---|
| TargetVerifyStep | draft tokens | the KV, and the drafts before it | what was accepted | verify |
| DraftExtendStep | those of the verify step | the same, in the draft model | - | draft_extend |
| DraftChainSteps | 1 | the KV, and one token more in each step | what was accepted | draft |
| DraftTreeSteps | 1 per branch | the KV, and its branch | what was accepted | draft |
| BlockDraftStep | draft tokens | the KV, and the block | what was accepted | draft |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat._scheduler import growth_of
from sglang_pat.batch import DecodeBatch, IntArray
from sglang_pat.plan import KvTokens
from sglang_pat.sglang.speculative.draft_requests import DRAFT_REQUESTS, step_of_extend
from sglang_pat.sglang.speculative.rows import (
    DeviceRows,
    DraftBatchBuilder,
    RoundRows,
    RowShape,
    RowTensors,
    SpeculativeInputs,
    committed_lengths,
)
from sglang_pat.sglang.speculative.tree_attention import BlockKv, BranchKv, DraftKv, TreeKv
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.step.step_type import ExecutionMode, StepType
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.request_tracker import StepRequests, requests_of


class SpeculativeStep(StepType):
    """A step in which requests grow by accepted drafts and may have several rows.

    Attributes
    ----------
    shape
        The rows of each request.
    device_rows
        The tensors of the rows on the device.
    extra_kv
        The draft tokens that rows read in addition to the plan. None: the plan has all KV.
    counts
        Numbers of steps and rows, for log, metrics and stats file.
    lengths_are_bounds
        Whether SGLang's lengths on the host are only upper bounds of the requests' lengths.
    """

    counted_as: str
    lengths_are_bounds = False
    # Lengths of the requests in the last planned step, and by how much each request may grow.
    _lens: IntArray
    _room: IntArray

    def __init__(self, shape: RowShape, rows: DeviceRows, extra_kv: DraftKv | None = None) -> None:
        self.shape = shape
        self.device_rows = rows
        self.extra_kv = extra_kv
        self.counts = Counter({"steps": 0, "rows": 0})

    @property
    def graphs_are_complete(self) -> bool:
        return self.device_rows.graphs_are_complete

    def read_inputs(self, forward_batch: Any, requests: StepRequests | None) -> SpeculativeInputs:
        inputs = SpeculativeInputs.read(forward_batch, requests, shape=self.shape)
        if self.lengths_are_bounds:
            inputs.seq_lens_cpu = None
        return inputs

    def prepare_rows(
        self, inputs: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.extra_kv is not None:
            self.extra_kv.update(forward_batch, inputs.num_known, execution)
        return self.device_rows.write(inputs, execution)

    def extra_kv_of(self, layer: RadixAttention) -> DraftKv | None:
        """Return the draft tokens that rows of a layer read in addition to the plan."""
        return self.extra_kv

    def record_in_graph(self, forward_batch: Any) -> None:
        """Capture the computation of the rows' tensors."""
        self.device_rows.record_in_graph(forward_batch)

    def reserve(self, max_requests: int) -> None:
        """Allocate what graphs of up to `max_requests` requests read."""
        self.device_rows.reserve(max_requests)
        if self.extra_kv is not None:
            self.extra_kv.reserve(max_requests)

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
        """Prepare and count a step that repeats the last one.

        growth: by how many tokens all requests together have grown since the planned step. Returns
        by how many tokens all rows together have grown.
        """
        return growth

    def _count(self, num_rows: int) -> None:
        self.counts["steps"] += 1
        self.counts["rows"] += num_rows

    def counters(self) -> dict[str, Counter[str]]:
        """Return the counters for log, metrics and stats file, by name."""
        return {self.counted_as: self.counts}


class TargetVerifyStep(SpeculativeStep):
    """A step in which the target model verifies draft tokens."""

    mode = ForwardMode.TARGET_VERIFY
    counted_as = "verify"

    def __init__(
        self, shape: RowShape, device: torch.device, *, lengths_are_bounds: bool = False
    ) -> None:
        count = shape.per_request
        trees = TreeKv(count, device) if shape.is_tree else None
        super().__init__(shape, RowTensors(shape, device), trees)
        self.lengths_are_bounds = lengths_are_bounds
        self.chains = BlockKv(count, device)  # KV of accepted paths, for draft extend
        self._counted: Any = None  # `spec_info` of the last step, if it verified a block

    def reserve(self, max_requests: int) -> None:
        super().reserve(max_requests)
        self.chains.reserve(max_requests)

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        # If an eager step verifies blocks, SGLang 0.5.23 prepares the step twice: before the step
        # runs, and when it runs.
        if self._counted is None or self._counted is not forward_batch.spec_info:
            self._count(int(np.count_nonzero(batch.seq_lens)))
        self._counted = forward_batch.spec_info if self.lengths_are_bounds else None

    def repeated(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        num_requests, count = len(requests.reqs), self.shape.per_request
        if self.extra_kv is not None:
            self.extra_kv.update(forward_batch, num_requests, ExecutionMode.REPLAY)
        self._count(num_requests * count)
        return growth * count


class BlockDraftStep(TargetVerifyStep):
    """A step in which a draft model drafts a block of tokens at once (DFLASH, DSPARK).

    In the plan, all rows end with the block's first token, which is already accepted. In addition,
    each row reads the block. In decoder layers, a row reads the block only up to its own token.
    """

    requests = DRAFT_REQUESTS.of_blocks
    counted_as = "draft"

    def __init__(self, count: int, device: torch.device) -> None:
        """Make the step for blocks of `count` tokens."""
        shape = RowShape.of_drafts(count, are_chains=False)
        super().__init__(shape, device, lengths_are_bounds=True)
        self.extra_kv = BlockKv(count, device, are_chains=False)

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        self._count(int(np.count_nonzero(batch.seq_lens)))

    def extra_kv_of(self, layer: RadixAttention) -> DraftKv | None:
        return self.chains if layer.attn_type == AttentionType.DECODER else self.extra_kv


class DraftExtendStep(SpeculativeStep):
    """A step in which a draft model reads the tokens of the last verify step, in the same rows.

    Each row reads the same positions as in the verify step, and the draft model's KV has the same
    slots. So this step uses the plan of the verify step.
    """

    mode = ForwardMode.DRAFT_EXTEND_V2
    requests: Callable[[Any], StepRequests | None] = staticmethod(step_of_extend)
    counted_as = "draft_extend"
    graphs_are_complete = False  # so no step is a repeat

    def __init__(self, verify: TargetVerifyStep) -> None:
        chains = verify.chains if verify.shape.is_tree else None
        super().__init__(verify.shape, verify.device_rows, chains)
        self.follows = verify
        self._counted: Any = None  # `spec_info` of the last counted step

    def read_inputs(self, forward_batch: Any, requests: StepRequests | None) -> SpeculativeInputs:
        """Return the inputs of the verify step before this step.

        In draft extend, SGLang's lengths include all draft tokens, even rejected ones. SGLang's
        tensors may be buffers of the largest graph, and SGLang does not report padding.
        """
        size, count = forward_batch.batch_size, self.shape.per_request
        inputs = super().read_inputs(forward_batch, requests)
        on_host = inputs.seq_lens_cpu
        return replace(
            inputs,
            num_known=size if requests is None else min(len(requests.reqs), size),
            req_pool_indices=inputs.req_pool_indices[:size],
            # The lengths of padding may be below `count`.
            seq_lens=(inputs.seq_lens[:size] - count).clamp_(min=1),
            seq_lens_cpu=None if on_host is None else (on_host[:size] - count).clamp_(min=1),
        )

    def record_in_graph(self, forward_batch: Any) -> None:
        """Capture nothing, because the graph of the verify step writes the rows' tensors."""

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        self.follow(forward_batch)

    def follow(self, forward_batch: Any) -> None:
        """Count a step once. SGLang prepares the first of several draft layers twice per step."""
        if forward_batch.spec_info is not self._counted:
            self._counted = forward_batch.spec_info
            self._count(len(forward_batch.input_ids))


class DraftSteps(SpeculativeStep):
    """The decode steps of a draft model's round, which SGLang prepares together.

    SGLang captures them in one graph. They share one plan, which is made for the first step.
    """

    mode = ForwardMode.DECODE
    requests: Callable[[Any], StepRequests | None] = staticmethod(requests_of)
    counted_as = "draft"

    def __init__(
        self, num_steps: int, shape: RowShape, rows: DeviceRows, extra_kv: DraftKv | None = None
    ) -> None:
        super().__init__(shape, rows, extra_kv)
        self._num_steps = num_steps
        self._tokens = KvTokens(0, 0, 0)  # of the first step of the last planned round
        self._num_rows = 0  # rows of known requests in that round
        self._kv_tokens = Counter(dict.fromkeys(KvTokens._fields, 0))

    def go_to(self, step: int, plans: StepPlans) -> None:
        """Switch to step `step` of the round, counted from 0, before its layers run."""
        raise NotImplementedError

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        self._num_rows, self._tokens = int(np.count_nonzero(batch.seq_lens)), plans.main.step_tokens
        self._count_round(0)

    def repeated(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        growth *= self.shape.per_request
        self._count_round(growth)
        return growth

    def _count_round(self, growth: int) -> None:
        """Count a round.

        growth: how many KV tokens more each step reads than in the last planned round.
        """
        steps, num_rows = self._num_steps, self._num_rows
        self.counts["steps"] += steps
        self.counts["rows"] += steps * num_rows
        more = steps * growth
        if self.extra_kv is None:  # in each step, each row reads one more token than before
            more += num_rows * steps * (steps - 1) // 2
        for name, tokens in self._tokens._asdict().items():
            self._kv_tokens[name] += steps * tokens + more

    def counters(self) -> dict[str, Counter[str]]:
        return super().counters() | {"draft_kv_tokens": self._kv_tokens}


class DraftChainSteps(DraftSteps):
    """Draft steps that each decode one token per request (`--speculative-eagle-topk 1`).

    Each step has its own lengths.
    """

    device_rows: RoundRows

    def __init__(self, num_steps: int, device: torch.device) -> None:
        super().__init__(num_steps, RowShape(first=1), RoundRows(num_steps, device))
        self._at = 0  # step of the round whose lengths the layers read

    def prepare_rows(
        self, inputs: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._at = 0
        return super().prepare_rows(inputs, forward_batch, execution)

    def go_to(self, step: int, plans: StepPlans) -> None:
        if step != self._at:
            plans.advance(self.device_rows.lens[step], step)
            self._at = step


class DraftTreeSteps(DraftSteps):
    """Steps of a draft model that branches: `topk` rows per request.

    In the plan, all rows end where the round's drafts begin, so the plan is the same for all steps.
    In addition, each row reads its own branch.
    """

    extra_kv: BranchKv

    def __init__(self, num_steps: int, topk: int, device: torch.device) -> None:
        # On the host, each row is one token longer than on the device, so that it has a tail in the
        # plan.
        shape, on_device = (RowShape(topk, first=n, are_drafts=True) for n in (1, 0))
        branches = BranchKv(num_steps, topk, device)
        super().__init__(num_steps, shape, RowTensors(on_device, device), branches)

    def go_to(self, step: int, plans: StepPlans) -> None:
        self.extra_kv.go_to(step)
