"""Rows of draft tokens: their shape, their tensors on the device, and their paths.

The rows of a request share the request's path in the tree and one more node below that path. The
node has the tokens that the request had committed when its path was read. The tokens that a row
reads after the node are the row's tail. Kernels read from device memory where the tail ends, and a
tail is never empty, so a plan stays usable when requests grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat.batch import IntArray
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.compat import RequestFields, unwrapped
from sglang_pat.sglang.step.step_type import ExecutionMode
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.radix_paths import PathReader, Request
from sglang_pat.sglang.tree.request_tracker import StepRequests
from sglang_pat.sglang.tree.row_groups import RequestRows, RowPaths, VirtualRequest

# The most committed tokens that a row's tail may have. If a tail would have more, the builder reads
# all paths again, which costs a fraction of a millisecond about every ten verify steps.
MAX_COMMITTED_TAIL = 32


@dataclass(frozen=True, slots=True)
class RowShape:
    """Counts the rows of each request of a step, and the tokens that each row reads.

    Row `i` of a request reads the request's KV and `first + i * step` more tokens. In a decode
    step, `first` and `step` are 0, because SGLang's lengths include the new token.
    """

    per_request: int = 1
    first: int = 0
    step: int = 0
    are_drafts: bool = False  # whether rows are draft tokens

    @property
    def speculates(self) -> bool:
        """True if requests may grow by any number of tokens from step to step."""
        return self.are_drafts or self.first > 0

    @classmethod
    def of_drafts(cls, count: int, *, are_chains: bool) -> RowShape:
        """Return the rows of `count` draft tokens per request.

        In a chain, each draft token reads itself and the drafts before it. For a tree, the plan
        covers only the root, which is the first draft token. `tree_attention.py` adds what each row
        reads of its branch.
        """
        return cls(count, 1, int(are_chains), True)

    @property
    def is_tree(self) -> bool:
        """True if the rows are drafts that may branch."""
        return self.are_drafts and self.step == 0

    def lengths(self, lengths: IntArray) -> IntArray:
        """Return the lengths of rows, given `lengths` of requests. The 0 of padding stays 0."""
        rows = np.repeat(lengths, self.per_request)
        if self.step:
            rows += np.tile(self._offsets(), len(lengths))
        elif self.first:
            rows += np.int32(self.first)
        rows[np.repeat(lengths == 0, self.per_request)] = 0
        return rows

    def _offsets(self) -> IntArray:
        rows = np.arange(self.per_request, dtype=np.int32)
        return rows * np.int32(self.step) + np.int32(self.first)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """Return how many tokens rows read beyond their request's KV: int64 `[per_request]`."""
        return torch.from_numpy(self._offsets().astype(np.int64)).to(device)


class DeviceRows:
    """The `req_pool_indices` and `seq_lens` of a step's rows, on the device.

    Graphs read them from memory with a fixed address. If a capture calls `record_in_graph`, the
    graph itself writes this memory, from the lengths that SGLang sets before each replay.
    """

    def __init__(self) -> None:
        self.graphs_are_complete = False

    def reserve(self, max_requests: int) -> None:
        """Allocate what graphs of up to `max_requests` requests read."""
        self.graphs_are_complete = False

    def record_in_graph(self, forward_batch: Any) -> None:
        """Capture the computation of the tensors, so that the graph's replays write them."""
        self.write(forward_batch, ExecutionMode.CAPTURE)
        self.graphs_are_complete = True

    def write(self, batch: Any, execution: ExecutionMode) -> tuple[torch.Tensor, torch.Tensor]:
        """Write and return the rows and their lengths.

        batch: SGLang's batch, with one row per request, and lengths without draft tokens.
        """
        raise NotImplementedError


class RowTensors(DeviceRows):
    """The tensors if all requests have the same number of rows. Eager steps allocate new memory."""

    def __init__(self, shape: RowShape, device: torch.device) -> None:
        super().__init__()
        self._count = shape.per_request
        self._offsets = shape.offsets(device)
        self._reserved: torch.Tensor | None = None

    def reserve(self, max_requests: int) -> None:
        super().reserve(max_requests)
        size = (2, max_requests * self._count)
        # Memory of the right size is kept, because graphs may hold its address.
        if self._reserved is None or self._reserved.shape != size:
            self._reserved = self._offsets.new_zeros(size)

    def write(self, batch: Any, execution: ExecutionMode) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(batch.seq_lens) * self._count
        buffer = None if execution is ExecutionMode.EAGER else self._reserved
        if buffer is None:
            buffer = self._offsets.new_empty((2, count))
        rows, lens = (each[:count].view(-1, self._count) for each in buffer)
        rows.copy_(batch.req_pool_indices[:, None])
        torch.add(batch.seq_lens[:, None], self._offsets, out=lens)
        return rows.view(-1), lens.view(-1)


class RoundRows(DeviceRows):
    """Tensors of a draft model's round. A request has one row, which grows by a token per step."""

    def __init__(self, num_steps: int, device: torch.device) -> None:
        super().__init__()
        self._offsets = torch.arange(1, num_steps + 1, dtype=torch.int64, device=device)[:, None]
        self._reserved = self._offsets[:, :0]
        self.lens = self._reserved  # lengths in the round: int64 [steps, rows]

    def reserve(self, max_requests: int) -> None:
        super().reserve(max_requests)
        self._reserved = self._offsets.expand(-1, max_requests).clone()

    def write(self, batch: Any, execution: ExecutionMode) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._reserved[:, : len(batch.seq_lens)]
        if execution is ExecutionMode.EAGER:
            self.lens = batch.seq_lens + self._offsets
        elif execution is ExecutionMode.CAPTURE or not self.graphs_are_complete:
            self.lens = torch.add(batch.seq_lens, self._offsets, out=out)
        else:  # the graph writes `lens`
            self.lens = out
        return batch.req_pool_indices, self.lens[0]


class DraftRowCache:
    """The rows of the last step's draft tokens.

    They are kept so that a step with the same requests gets the same list of rows.
    """

    def __init__(self) -> None:
        self.reqs: list[Request] = []
        self.rows: list[VirtualRequest] = []
        self._groups: list[RequestRows] = []
        self._ends: IntArray = np.zeros(0, dtype=np.int32)  # ends of the groups' nodes

    def update(
        self, reqs: list[Request], count: int, committed: IntArray, moved: set[int]
    ) -> set[int]:
        """Set the next step's requests. Return the id() of the rows whose paths to read again.

        count: rows per request. committed: int32 `[requests]`, the position at which each request's
        node may end. Every row of the request is longer. moved: the id() of requests whose paths
        may have changed.
        """
        if reqs is not self.reqs or len(self.rows) != len(reqs) * count:
            # Requests that were in the last step keep their rows.
            kept = {id(each.req): each for each in self._groups if len(each.rows) == count}
            self.reqs = reqs
            self._groups = [kept.get(id(req)) or RequestRows(req, count) for req in reqs]
            self.rows = [row for each in self._groups for row in each.rows]
            self._ends = np.array([each.end for each in self._groups], dtype=np.int32)
        tails = committed - self._ends
        is_read = self._ends >= 0
        is_outgrown = bool((is_read & ((tails < 0) | (tails > MAX_COMMITTED_TAIL))).any())
        # If one request has outgrown its path, all paths are read again, because the new plan is
        # made for all requests anyway.
        again = (tails != 0) if is_outgrown else ~is_read
        if moved:
            again |= np.fromiter((id(req) in moved for req in reqs), dtype=bool, count=len(reqs))
        to_read: set[int] = set()
        self._ends[again] = committed[again]
        for i, end in zip(np.flatnonzero(again).tolist(), committed[again].tolist(), strict=True):
            group = self._groups[i]
            group.end = end
            to_read.update(group.ids)
        return to_read

    @property
    def longest(self) -> IntArray:
        """The committed length up to which each request's path stays valid."""
        return self._ends + MAX_COMMITTED_TAIL


@dataclass(slots=True)
class SpeculativeInputs(StepInputs):
    """The fields of a step of speculative decoding that pat reads."""

    shape: RowShape  # shape of the step's rows


class DraftBatchBuilder(DecodeBatchBuilder):
    """Builds the batches of speculative steps, and of plain decode steps between them."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._drafts: DraftRowCache | None = None  # set if the last step's rows were draft tokens
        self._committed = self.lens  # per request: where the node below its path may end

    def knows(self, step: StepRequests) -> bool:
        if self._drafts is None:
            return super().knows(step)
        reqs = self._drafts.reqs
        return step.reqs is reqs or any(req is step.reqs[0] for req in reqs)

    def room(self, tokens: int) -> IntArray:
        """Return by how many tokens each request may grow, if the plan allows `tokens` more."""
        room = np.full(len(self.lens), tokens, dtype=np.int32)
        if self._drafts is not None:
            room = np.minimum(room, self._drafts.longest - self._committed)
        return np.maximum(room, 0)

    def _request_lengths(self, inputs: StepInputs, reason: str | None) -> IntArray:
        step = inputs.requests
        if step is None or reason == StepReason.CUT or inputs.seq_lens_cpu is not None:
            return super()._request_lengths(inputs, reason)
        if not isinstance(inputs, SpeculativeInputs) or not inputs.shape.speculates:
            return super()._request_lengths(inputs, reason)
        return inputs.lengths(committed_lengths(step.reqs))

    def _row_lengths(self, inputs: StepInputs, lens: IntArray) -> IntArray:
        return inputs.shape.lengths(lens) if isinstance(inputs, SpeculativeInputs) else lens

    def _rows(self, inputs: StepInputs, reqs: list[Request]) -> list[Request]:
        if not isinstance(inputs, SpeculativeInputs) or not inputs.shape.are_drafts:
            self._drafts = None
            return reqs
        shape = inputs.shape
        # The tokens that all rows of a request share. Each row reads at least one more token, so
        # its tail is never empty.
        self._committed = self.lens + np.int32(shape.first - 1)
        drafts = self._drafts = self._drafts or DraftRowCache()
        self._moved = drafts.update(reqs, shape.per_request, self._committed, self._moved)
        return drafts.rows

    def _row_reader(self) -> PathReader:
        reader = super()._row_reader()
        if self._drafts is None:
            return reader
        return RowPaths(reader, unwrapped(self._tree).req_to_token_pool)


def committed_lengths(reqs: list[Request]) -> npt.NDArray[np.int64]:
    """Return the lengths of requests as of the last results that SGLang has processed.

    On the device, a request may already be longer, by tokens that were accepted since then.
    """
    lengths = map(RequestFields.on(reqs[0]).kv_committed_len, reqs)
    return np.fromiter(lengths, dtype=np.int64, count=len(reqs))
