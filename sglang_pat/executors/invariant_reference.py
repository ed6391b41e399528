"""Executes a batch-invariant plan in plain torch: a request's result is the same in every batch.

`reference.PlanExecution` computes many work items at once, so the order of the sums in a matrix
product depends on the other requests. Here each chunk of each request is computed separately, by
operations whose shapes depend on that request alone. So a request's result is bit-identical.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_pat._scheduler import DIRECT_STORE, OPEN_END, SHARED_KV
from sglang_pat.batch import Step
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.reference import add_sinks, check_slots
from sglang_pat.plan import DecodePlan, segment_interval


class _Chunk(NamedTuple):
    """The part of a work item that belongs to one request."""

    request: int
    partial_slot: int
    slots: torch.Tensor  # int64 [tokens]


class InvariantExecution:
    """Executes a batch-invariant plan for one step. Used like `reference.PlanExecution`."""

    def __init__(self, plan: DecodePlan, shared_slots: torch.Tensor, step: Step) -> None:
        self._num_partials = plan.header.num_partials
        self._merges = plan.merges.tolist()
        segments, item_requests = plan.kv_segments.tolist(), plan.item_requests.tolist()
        self._chunks: list[_Chunk] = []
        for _, count, first, segment_begin, num_segments, *_ in plan.work_items.tolist():
            slots: list[list[torch.Tensor]] = [[] for _ in range(count)]
            for segment in segments[segment_begin : segment_begin + num_segments]:
                segment_slots = _slots_of(segment, shared_slots, step)
                for request in range(*segment_interval(segment[3])):
                    slots[request].append(segment_slots)
            for (request, partial_slot), parts in zip(
                item_requests[first : first + count], slots, strict=True
            ):
                self._chunks.append(_Chunk(request, partial_slot, torch.cat(parts)))

    def run(self, layer: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention of one layer, as `reference.PlanExecution.run` does."""
        q, v_cache = layer.whole_q(), layer.v_cache
        dtype = torch.promote_types(q.dtype, torch.float32)
        num_requests, num_qo_heads, _ = q.shape
        shape = (num_qo_heads, v_cache.shape[2])
        out = q.new_zeros((num_requests, *shape), dtype=dtype)
        lse = q.new_full((num_requests, num_qo_heads), -math.inf, dtype=dtype)
        partial_out = q.new_zeros((self._num_partials, *shape), dtype=dtype)
        partial_lse = q.new_full((self._num_partials, num_qo_heads), -math.inf, dtype=dtype)
        for request, partial_slot, slots in self._chunks:
            if len(slots) == 0:
                continue
            check_slots(slots, layer)
            result = _attend(layer, q[request].to(dtype), slots)
            if partial_slot == DIRECT_STORE:
                out[request], lse[request] = result
            else:
                partial_out[partial_slot], partial_lse[partial_slot] = result
        for request, begin, count, _ in self._merges:
            if count:
                parts = slice(begin, begin + count)
                out[request], lse[request] = _merge(partial_out[parts], partial_lse[parts])
        if layer.sinks is not None:
            for request in range(num_requests):
                row = slice(request, request + 1)
                out[row], lse[row] = add_sinks(out[row].clone(), lse[row].clone(), layer.sinks)
        return out, lse


def _slots_of(segment: list[int], shared_slots: torch.Tensor, step: Step) -> torch.Tensor:
    kv_request, kv_begin, kv_end, _ = segment
    if kv_request == SHARED_KV:
        return shared_slots[kv_begin:kv_end]
    end = int(step.seq_lens[kv_request])
    if kv_end != OPEN_END:
        end = min(end, kv_end)
    return step.req_to_token[step.req_pool_indices[kv_request], kv_begin:end].long()


def _attend(
    layer: LayerInputs, q: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of one request's queries `q`, `[heads, head_dim]`, over `slots`."""
    keys, values = (
        cache[slots].to(q.dtype).transpose(0, 1).contiguous()
        for cache in (layer.k_cache, layer.v_cache)
    )
    # Cloned, because the order of the sums in a matrix product may depend on operands' addresses.
    rows = q.clone(memory_format=torch.contiguous_format).view(keys.shape[0], -1, q.shape[-1])
    logits = rows @ keys.transpose(1, 2) * (layer.sm_scale * layer.k_scale)
    if layer.logit_cap > 0:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    out = torch.exp(logits - lse) @ values
    return out.flatten(0, 1) * layer.v_scale, lse.flatten()


def _merge(
    partial_out: torch.Tensor, partial_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge a request's partials by adding them up in their order. Return output and LSE."""
    partial_lse = partial_lse.clone()
    highest = partial_lse.amax(0)
    weights = torch.exp(partial_lse - highest)
    total = torch.zeros_like(highest)
    out = torch.zeros_like(partial_out[0])
    for weight, part in zip(weights, partial_out, strict=True):
        total += weight
        out += weight[:, None] * part
    return out / total[:, None], highest + torch.log(total)
