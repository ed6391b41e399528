"""Executes a decode plan in plain torch, on any device.

Tests compare the kernels with this code, and machines without a GPU run it. It follows the plan as
the kernels do: it reads shared ranges through the slot buffer and private ranges through
`req_to_token`, and merges partials. Tests also compare it with `dense_attention`, which uses no
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat._scheduler import DIRECT_STORE, OPEN_END, SHARED_KV, PackScheduler
from sglang_pat.batch import IntArray, Step
from sglang_pat.executors.layer import LayerInputs, Scale
from sglang_pat.executors.window_rows import Window, WindowRows, check_within
from sglang_pat.plan import (
    BufferSizes,
    DecodePlan,
    PlanOverflowError,
    copy_plan,
    segment_interval,
)

# A batched product gathers at most this many KV elements, to bound the memory for long contexts.
_MAX_GATHERED_ELEMENTS = 1 << 25


def gather_slots(
    plan: DecodePlan, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor
) -> torch.Tensor:
    """Return the plan's slot buffer: the slots of all shared ranges, int64 `[num_shared_slots]`.

    To be called when the plan is made, not when it runs (GatherSpan in plan_format.h).
    """
    slots = torch.empty(plan.header.num_shared_slots, dtype=torch.int64, device=req_to_token.device)
    for request, kv_begin, num_tokens, slot_begin in plan.gather_spans.tolist():
        row = req_to_token[req_pool_indices[request]]
        slots[slot_begin : slot_begin + num_tokens] = row[kv_begin : kv_begin + num_tokens]
    return slots


class _SegmentRanges(NamedTuple):
    """Arrays with one number per KV segment.

    A segment's requests are `num_requests` entries of the plan's item_requests, from `entry_begin`
    on.
    """

    tile: npt.NDArray[np.int64]
    kv_request: npt.NDArray[np.int64]
    kv_begin: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]
    entry_begin: npt.NDArray[np.int64]
    num_requests: npt.NDArray[np.int64]

    def where(self, mask: npt.NDArray[np.bool_]) -> _SegmentRanges:
        return _SegmentRanges(*(field[mask] for field in self))


@dataclass(frozen=True, slots=True)
class _SegmentGroup:
    """Segments of similar size, executed as one batched product.

    Padding repeats a segment's last slot and its last request. An entry is a pair of a segment and
    one of its requests.
    """

    slots: torch.Tensor  # int64 [segments, tokens]
    token_mask: torch.Tensor  # bool [segments, tokens]: False in the padding
    requests: torch.Tensor  # int64 [segments, requests]
    entries: torch.Tensor  # int64 [n, 2]: (segment, request column) of every entry
    item_request: torch.Tensor  # int64 [n]: index in the plan's item_requests


class PlanExecution:
    """The execution of a plan for one step. Indices are computed once and shared by all layers.

    It copies slots from `req_to_token` when it is made, so it is valid for one step only.
    """

    def __init__(self, plan: DecodePlan, shared_slots: torch.Tensor, step: Step) -> None:
        self._plan = plan
        device = step.req_to_token.device
        merges = torch.from_numpy(plan.merges.astype(np.int64)).to(device)
        self._merged_requests = merges[:, 0]
        self._partial_owner = torch.repeat_interleave(
            torch.arange(len(merges), device=device), merges[:, 2]
        )
        item_requests = torch.from_numpy(plan.item_requests.astype(np.int64)).to(device)
        self._request, self._partial_slot = item_requests.unbind(1)
        self._is_direct = self._partial_slot == DIRECT_STORE

        items, segments = plan.work_items.astype(np.int64), plan.kv_segments.astype(np.int64)
        item_of = np.repeat(np.arange(len(items)), items[:, 4])
        ends = segments[:, 2].copy()
        is_open = ends == OPEN_END
        # Uses the lengths on the device, as the kernels do. Those on the host may be older.
        ends[is_open] = step.seq_lens.cpu().numpy()[segments[is_open, 0]]
        first, end = segment_interval(segments[:, 3])
        ranges = _SegmentRanges(
            tile=items[item_of, 0],
            kv_request=segments[:, 0],
            kv_begin=segments[:, 1],
            num_tokens=np.maximum(ends - segments[:, 1], 0),
            entry_begin=items[item_of, 2] + first,
            num_requests=end - first,
        )
        ranges = ranges.where(ranges.num_tokens > 0)
        # Segments with the same tile, and with lengths within a factor of two, go into one group.
        length_class = np.ceil(np.log2(np.maximum(ranges.num_tokens, 16))).astype(np.int64)
        group_key = ranges.tile * 64 + length_class
        self._groups = [
            self._group(ranges.where(group_key == key), shared_slots, step)
            for key in np.unique(group_key)
        ]
        self._entry_owner = torch.cat(
            [group.item_request for group in self._groups]
            or [torch.empty(0, dtype=torch.int64, device=device)]
        )

    def _group(
        self, ranges: _SegmentRanges, shared_slots: torch.Tensor, step: Step
    ) -> _SegmentGroup:
        device = step.req_to_token.device

        def to_device(array: npt.NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        lengths = to_device(ranges.num_tokens)[:, None]
        offsets = torch.arange(int(ranges.num_tokens.max()), device=device)[None, :]
        positions = to_device(ranges.kv_begin)[:, None] + torch.minimum(offsets, lengths - 1)
        kv_request = to_device(ranges.kv_request)
        is_shared = kv_request == SHARED_KV
        slots = torch.empty_like(positions)
        slots[is_shared] = shared_slots[positions[is_shared]]
        rows = step.req_pool_indices[kv_request[~is_shared]].long()
        slots[~is_shared] = step.req_to_token[rows[:, None], positions[~is_shared]].long()

        num_requests = ranges.num_requests[:, None]
        columns = np.arange(num_requests.max())[None, :]
        item_request = ranges.entry_begin[:, None] + np.minimum(columns, num_requests - 1)
        valid = columns < num_requests
        return _SegmentGroup(
            slots=slots,
            token_mask=offsets < lengths,
            requests=self._request[to_device(item_request)],
            entries=to_device(np.argwhere(valid)),
            item_request=to_device(item_request[valid]),
        )

    def run(self, layer: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of one layer.

        Returns the output `[num_requests, num_qo_heads, v_head_dim]` and the natural-log LSE
        `[num_requests, num_qo_heads]`, both in the compute dtype (float32, or float64 for float64
        inputs). Does not write the layer's `out` and `lse`.
        """
        _, k_cache, v_cache, _, _, sm_scale, logit_cap, sinks, k_scale, v_scale, _ = layer
        q = layer.whole_q()
        dtype = torch.promote_types(q.dtype, torch.float32)
        num_requests, num_qo_heads, head_dim = q.shape
        v_head_dim = v_cache.shape[2]
        out = q.new_zeros((num_requests, num_qo_heads, v_head_dim), dtype=dtype)
        lse = q.new_full((num_requests, num_qo_heads), -math.inf, dtype=dtype)
        num_partials = self._plan.header.num_partials
        partial_out = q.new_zeros((num_partials, num_qo_heads, v_head_dim), dtype=dtype)
        partial_lse = q.new_full((num_partials, num_qo_heads), -math.inf, dtype=dtype)
        entry_out = q.new_empty((len(self._entry_owner), num_qo_heads, v_head_dim), dtype=dtype)
        entry_lse = q.new_empty((len(self._entry_owner), num_qo_heads), dtype=dtype)
        begin = 0
        for group in self._groups:
            check_slots(group.slots, layer)
            per_segment = group.slots.shape[1] * k_cache.shape[1] * max(head_dim, v_head_dim)
            step = max(1, _MAX_GATHERED_ELEMENTS // per_segment)
            results = [
                _attend(
                    q[group.requests[i : i + step]].to(dtype),
                    k_cache[group.slots[i : i + step]].to(dtype),
                    v_cache[group.slots[i : i + step]].to(dtype),
                    group.token_mask[i : i + step],
                    sm_scale * k_scale,
                    logit_cap,
                )
                for i in range(0, len(group.slots), step)
            ]
            segment, column = group.entries.unbind(1)
            end = begin + len(segment)
            entry_out[begin:end] = torch.cat([r[0] for r in results])[segment, column]
            entry_lse[begin:end] = torch.cat([r[1] for r in results])[segment, column]
            begin = end
        # Merges each row's results over the segments of the row's work item.
        row_out, row_lse = merge_partials(
            entry_out, entry_lse, self._entry_owner, len(self._is_direct)
        )
        row_out *= v_scale
        direct, partial = self._is_direct, ~self._is_direct
        out[self._request[direct]] = row_out[direct]
        lse[self._request[direct]] = row_lse[direct]
        partial_out[self._partial_slot[partial]] = row_out[partial]
        partial_lse[self._partial_slot[partial]] = row_lse[partial]
        if num_partials:
            merged_out, merged_lse = merge_partials(
                partial_out, partial_lse, self._partial_owner, len(self._merged_requests)
            )
            out[self._merged_requests] = merged_out
            lse[self._merged_requests] = merged_lse
        return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


class Execution(Protocol):
    """The execution of a plan for one step."""

    def run(self, layer: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]: ...


class ReferenceExecutor:
    """PackAttention's executor in plain torch. It cannot be captured in CUDA graphs."""

    name = "reference"

    def __init__(
        self,
        device: torch.device,
        execution: Callable[..., Execution] = PlanExecution,
        window: Window | None = None,
        reservation: BufferSizes | None = None,
    ) -> None:
        """Make an executor.

        execution: makes the execution of a step from the plan, the shared slots and the step.
        reservation: plans that exceed it are refused, as in buffers of these sizes.
        """
        self._device = device
        self._reservation = reservation
        self._new_execution = execution
        self._window = window
        self.window_rows: WindowRows | None = None
        self._cuts = torch.empty(0, dtype=torch.int32, device=device)
        self._scheduler: PackScheduler | None = None
        self._plan: DecodePlan | None = None
        self._shared_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._step: Step | None = None
        self._row_step: Step | None = None  # `_step`; with a window, window_rows.step(_step)
        self._execution: Execution | None = None  # made by the first run() of a step

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        """Load the scheduler's last plan and gather its shared slots.

        Later calls of run() read the tensors of the step.
        """
        needed, sizes = BufferSizes.needed_by(scheduler), self._reservation
        if sizes is not None and not sizes.hold(needed):
            raise PlanOverflowError(f"the plan needs {needed}; reserved are {sizes}")
        self._scheduler, self._plan = scheduler, copy_plan(scheduler)
        if self._window is not None:
            self._cuts = torch.from_numpy(self._plan.cuts(scheduler.num_cuts)).to(self._device)
            self.window_rows = WindowRows(scheduler.num_cuts, self._window, self._device)
        self.reuse_plan(step, gather=True)
        return self._plan

    def sharing_buffers(self) -> ReferenceExecutor:
        """Return another executor. It shares nothing with this one: torch needs no buffers."""
        return ReferenceExecutor(self._device, self._new_execution, self._window, self._reservation)

    def reuse_plan(self, step: Step, *, gather: bool = False) -> None:
        """Use the last plan for this step too. From now on, run() reads the tensors of this step.

        gather: also read the slots of shared ranges again.
        """
        assert self._plan is not None
        _check_rows(step)
        self._step = self._row_step = step
        if self.window_rows is not None:
            self._row_step = self.window_rows.step(step)
            self.refill()
        if gather:
            table, rows, *_ = self._row_step
            self._shared_slots = gather_slots(self._plan, table, rows)
        self._execution = None

    def refill(self) -> None:
        """Write the window rows of the current step."""
        assert self.window_rows is not None
        assert self._step is not None
        self.window_rows.fill(self._step, self._cuts)
        self._execution = None

    def run(self, layer: LayerInputs) -> None:
        """Compute attention of one layer. Write the layer's `out`, and its `lse` if given."""
        assert self._plan is not None
        assert self._row_step is not None
        if self._execution is None:
            live = self._plan.live_requests()
            if self.window_rows is not None:  # a row does not show its request's length
                assert self._step is not None
                _check_lengths(self._step, slice(None), shorter=0)
                self._check_windows(self._step)
            _check_lengths(self._row_step, live)
            self._execution = self._new_execution(self._plan, self._shared_slots, self._row_step)
        # As in the kernels, there are no gradients, and autocast has no effect.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            out, lse = self._execution.run(layer)
            layer.out.copy_(out)
            if layer.lse is not None:
                layer.lse.copy_(lse)

    def _check_windows(self, step: Step) -> None:
        """Raise ValueError if the windows have moved on further than the plan serves."""
        assert self._window is not None
        assert self._scheduler is not None
        host, width = step.host_seq_lens, step.req_to_token.shape[1]
        most = self._scheduler.steps_left(host, width) + self._window.ahead
        grown = int((step.seq_lens.cpu().numpy() - host)[host > 0].max(initial=0))
        if grown > most:
            raise ValueError(
                f"requests must be at most {most} tokens longer than batch.seq_lens, got {grown}; "
                "call plan()"
            )


def _check_rows(step: Step) -> None:
    """Raise ValueError for a row index outside of `req_to_token`."""
    rows = step.req_pool_indices[torch.from_numpy(step.host_seq_lens > 0)]
    check_within("req_pool_indices must be rows of req_to_token", rows, len(step.req_to_token))


def _check_lengths(step: Step, live: IntArray | slice, shorter: int = 1) -> None:
    """Raise ValueError for a device length that the plan or `req_to_token` does not cover.

    Called when the step runs, because captured graphs fill the lengths after the step begins.

    On the device, a request with a private tail (`live`) may be one token shorter than on the host,
    because its new token may be missing, or longer. A request without a tail must end where its
    path ends. Padding may have any length in the table.
    """
    lens, width = step.seq_lens.cpu().numpy(), step.req_to_token.shape[1]
    least, most = step.host_seq_lens.copy(), step.host_seq_lens.copy()
    least[live] -= shorter
    most[live] = most[least == 0] = width
    wrong = np.flatnonzero((lens < least) | (lens > most))
    if len(wrong):
        index = wrong[0]
        raise ValueError(
            f"seq_lens must be batch.seq_lens or, with KV after the path, a few tokens more, at "
            f"most {width}: request {index} has {lens[index]}, and {step.host_seq_lens[index]} on "
            "the host"
        )


def check_slots(slots: torch.Tensor, layer: LayerInputs) -> None:
    """Raise ValueError for a slot outside of the caches."""
    check_within("req_to_token must hold slots of the caches", slots, len(layer.k_cache))


def _attend(
    q: torch.Tensor,  # [items, requests, num_qo_heads, head_dim]
    k: torch.Tensor,  # [items, tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [items, tokens, num_kv_heads, v_head_dim]
    token_mask: torch.Tensor,  # [items, tokens]
    sm_scale: Scale,
    logit_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    items, requests, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    # As in the kernels, a query row is a (request, head within the group) pair of a KV head.
    rows = q.view(items, requests, num_kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    logits = rows @ k.permute(0, 2, 3, 1) * sm_scale
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits = logits.masked_fill(~token_mask[:, None, None, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    out = torch.exp(logits - lse) @ v.transpose(1, 2)

    def unpack(x: torch.Tensor) -> torch.Tensor:
        x = x.view(items, num_kv_heads, requests, -1, x.shape[-1]).transpose(1, 2)
        return x.reshape(items, requests, num_qo_heads, -1)

    return unpack(out), unpack(lse).squeeze(-1)


def merge_partials(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, owner: torch.Tensor, num_merges: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partials as in flash-decoding. Return the outputs and LSEs of `num_merges` results.

    partial_out: `[num_partials, heads, v_head_dim]`. partial_lse: `[num_partials, heads]`. owner:
    int64 `[num_partials]`, the index of the result to which a partial belongs. If a result has no
    partials, or only empty ones, its output is 0 and its LSE is -inf.
    """
    heads = partial_lse.shape[1]
    index = owner[:, None].expand(-1, heads)
    highest = partial_lse.new_full((num_merges, heads), -math.inf)
    highest = highest.scatter_reduce(0, index, partial_lse, "amax")
    shift = torch.where(highest == -math.inf, 0.0, highest)
    weights = torch.exp(partial_lse - shift[owner])
    total = partial_lse.new_zeros((num_merges, heads)).index_add_(0, owner, weights)
    out = partial_out.new_zeros((num_merges, *partial_out.shape[1:]))
    out.index_add_(0, owner, weights[..., None] * partial_out)
    out /= torch.where(total == 0, 1.0, total)[..., None]
    return out, shift + torch.log(total)


def add_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `sinks`, `[heads]`, to the final results of attention. Return the new output and LSE.

    out: `[requests, heads, v_head_dim]`. lse: `[requests, heads]`. The output of a row without KV
    stays 0, and its LSE becomes the sink.
    """
    sinks = sinks.to(lse.dtype)
    weights = torch.where(lse == -math.inf, 0.0, torch.sigmoid(lse - sinks))
    return out * weights[..., None], torch.logaddexp(lse, sinks.expand_as(lse))


def dense_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute decode attention request by request, without a plan.

    Shapes are as in PackAttention.run. Output and LSE are computed and returned in `dtype`.
    """
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out = q.new_zeros((*q.shape[:2], v_cache.shape[2]), dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype)
    # Query heads are grouped by KV head, so that K and V, which may be long, need not be repeated.
    num_kv_heads = k_cache.shape[1]
    grouped = q.to(dtype).view(len(q), num_kv_heads, -1, q.shape[2])
    for request, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            if sinks is not None:
                lse[request] = sinks.to(dtype)
            continue
        slots = req_to_token[req_pool_indices[request], :seq_len].long()
        k, v = k_cache[slots].to(dtype), v_cache[slots].to(dtype)
        logits = torch.einsum("kgd,nkd->kgn", grouped[request], k).flatten(0, 1) * scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if sinks is not None:  # one more key, whose value is 0
            logits = torch.cat((logits, sinks.to(dtype)[:, None]), dim=-1)
        lse[request] = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1)[:, :seq_len].reshape(num_kv_heads, -1, seq_len)
        out[request] = torch.einsum("kgn,nkd->kgd", weights, v).flatten(0, 1)
    return out, lse
