"""Executes a decode plan in plain torch, on any device.

This is the oracle of the kernels, and the backend on machines without a GPU. Everything comes from
the plan: shared ranges through its slot buffer, private ranges live, partials and merges. The
oracle of this oracle is `dense_attention`, which knows no plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat._scheduler import DIRECT_STORE, OPEN_END, SHARED_KV, PackScheduler
from sglang_pat.batch import Step
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.plan import DecodePlan, copy_plan

_Int64Array = npt.NDArray[np.int64]

# KV elements that one batched product gathers at most, so that memory stays bounded for long
# contexts.
_MAX_GATHERED_ELEMENTS = 1 << 25


def gather_slots(
    plan: DecodePlan, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor
) -> torch.Tensor:
    """The plan's slot buffer: int64 `[num_shared_slots]`, the slots of all shared ranges.

    Gathered when the plan is made, not when it runs (GatherSpan in plan_format.h).
    """
    slots = torch.empty(plan.header.num_shared_slots, dtype=torch.int64, device=req_to_token.device)
    for request, kv_begin, num_tokens, slot_begin in plan.gather_spans.tolist():
        row = req_to_token[req_pool_indices[request]]
        slots[slot_begin : slot_begin + num_tokens] = row[kv_begin : kv_begin + num_tokens]
    return slots


@dataclass(frozen=True, slots=True)
class _ItemGroup:
    """Work items of similar size, executed as one batched product. Padding repeats valid ones."""

    slots: torch.Tensor  # int64 [items, tokens]
    token_mask: torch.Tensor  # bool [items, tokens]: False in the padding
    requests: torch.Tensor  # int64 [items, requests]
    direct: torch.Tensor  # int64 [n, 2]: (item, request column) stored to the output
    partial: torch.Tensor  # int64 [n, 2]: (item, request column) stored to a partial
    partial_slot: torch.Tensor  # int64 [n]


class PlanExecution:
    """One step's execution of a plan: the index work, done once and shared by all layers.

    Holds references to `req_to_token`'s slots as they are now, so it serves one step only.
    """

    def __init__(
        self,
        plan: DecodePlan,
        shared_slots: torch.Tensor,
        step: Step,
    ) -> None:
        self._plan = plan
        device = step.req_to_token.device
        merges = torch.from_numpy(plan.merges.astype(np.int64)).to(device)
        self._merged_requests = merges[:, 0]
        self._partial_owner = torch.repeat_interleave(
            torch.arange(len(merges), device=device), merges[:, 2]
        )
        items = plan.work_items.astype(np.int64)
        kv_begin, kv_end = items[:, 4], items[:, 5]
        is_open = kv_end == OPEN_END
        kv_end[is_open] = step.host_seq_lens[items[is_open, 3]]
        num_tokens = np.maximum(kv_end - kv_begin, 0)
        # Similar sizes go together: the same tile, and lengths within a factor of two.
        length_class = np.ceil(np.log2(np.maximum(num_tokens, 16))).astype(np.int64)
        group_key = items[:, 0] * 64 + length_class
        self._groups = [
            self._group(
                items[(group_key == key) & (num_tokens > 0)],
                num_tokens[(group_key == key) & (num_tokens > 0)],
                shared_slots,
                step,
            )
            for key in np.unique(group_key[num_tokens > 0])
        ]

    def _group(
        self,
        work_items: _Int64Array,
        num_tokens: _Int64Array,
        shared_slots: torch.Tensor,
        step: Step,
    ) -> _ItemGroup:
        device = step.req_to_token.device

        def to_device(array: _Int64Array) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        lengths = to_device(num_tokens)[:, None]
        offsets = torch.arange(int(num_tokens.max()), device=device)[None, :]
        positions = to_device(work_items[:, 4])[:, None] + torch.minimum(offsets, lengths - 1)
        kv_request = to_device(work_items[:, 3])
        is_shared = kv_request == SHARED_KV
        slots = torch.empty_like(positions)
        slots[is_shared] = shared_slots[positions[is_shared]]
        rows = step.req_pool_indices[kv_request[~is_shared]].long()
        slots[~is_shared] = step.req_to_token[rows[:, None], positions[~is_shared]].long()

        num_requests = work_items[:, 1]
        columns = np.arange(num_requests.max())[None, :]
        entries = work_items[:, 2:3] + np.minimum(columns, num_requests[:, None] - 1)
        requests, partial_slots = np.moveaxis(
            self._plan.item_requests[entries].astype(np.int64), 2, 0
        )
        valid = columns < num_requests[:, None]
        is_direct = partial_slots == DIRECT_STORE
        return _ItemGroup(
            slots=slots,
            token_mask=offsets < lengths,
            requests=to_device(np.ascontiguousarray(requests)),
            direct=to_device(np.argwhere(valid & is_direct)),
            partial=to_device(np.argwhere(valid & ~is_direct)),
            partial_slot=to_device(partial_slots[valid & ~is_direct]),
        )

    def run(self, layer: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer: output `[num_requests, num_qo_heads, v_head_dim]` and natural-log
        LSE `[num_requests, num_qo_heads]`, both in the compute dtype (float32, or float64 for
        float64 inputs). Does not write the layer's `out` and `lse`.
        """
        q, k_cache, v_cache, _, _, sm_scale, logit_cap, sinks, k_scale, v_scale = layer
        dtype = torch.promote_types(q.dtype, torch.float32)
        num_requests, num_qo_heads, head_dim = q.shape
        v_head_dim = v_cache.shape[2]
        out = q.new_zeros((num_requests, num_qo_heads, v_head_dim), dtype=dtype)
        lse = q.new_full((num_requests, num_qo_heads), -math.inf, dtype=dtype)
        num_partials = self._plan.header.num_partials
        partial_out = q.new_zeros((num_partials, num_qo_heads, v_head_dim), dtype=dtype)
        partial_lse = q.new_full((num_partials, num_qo_heads), -math.inf, dtype=dtype)
        for group in self._groups:
            per_item = group.slots.shape[1] * k_cache.shape[1] * max(head_dim, v_head_dim)
            step = max(1, _MAX_GATHERED_ELEMENTS // per_item)
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
            item_out = torch.cat([r[0] for r in results]) * v_scale
            item_lse = torch.cat([r[1] for r in results])
            item, column = group.direct.unbind(1)
            out[group.requests[item, column]] = item_out[item, column]
            lse[group.requests[item, column]] = item_lse[item, column]
            item, column = group.partial.unbind(1)
            partial_out[group.partial_slot] = item_out[item, column]
            partial_lse[group.partial_slot] = item_lse[item, column]
        if num_partials:
            merged_out, merged_lse = merge_partials(
                partial_out, partial_lse, self._partial_owner, len(self._merged_requests)
            )
            out[self._merged_requests] = merged_out
            lse[self._merged_requests] = merged_lse
        return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


class ReferenceExecutor:
    """PackAttention's executor in plain torch. Nothing can be captured."""

    name = "reference"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._plan: DecodePlan | None = None
        self._shared_slots = torch.empty(0, dtype=torch.int64, device=device)
        self._step: Step | None = None
        self._execution: PlanExecution | None = None  # of this step, made by its first run()

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        """Take over the scheduler's last plan and gather its shared slots. The following run()s
        read the tensors of the step.
        """
        self._plan = copy_plan(scheduler)
        self._shared_slots = gather_slots(self._plan, step.req_to_token, step.req_pool_indices)
        self.reuse_plan(step)
        return self._plan

    def sibling(self) -> ReferenceExecutor:
        """One for other plans. They share nothing."""
        return ReferenceExecutor(self._device)

    def reuse_plan(self, step: Step) -> None:
        """The last plan serves this step too: its tensors are read from now on."""
        self._step = step
        self._execution = None

    def run(self, layer: LayerInputs) -> None:
        """One layer; writes its `out`, and `lse` if given."""
        assert self._plan is not None
        assert self._step is not None
        if self._execution is None:
            self._execution = PlanExecution(self._plan, self._shared_slots, self._step)
        out, lse = self._execution.run(layer)
        layer.out.copy_(out)
        if layer.lse is not None:
            layer.lse.copy_(lse)


def _attend(
    q: torch.Tensor,  # [items, requests, num_qo_heads, head_dim]
    k: torch.Tensor,  # [items, tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [items, tokens, num_kv_heads, v_head_dim]
    token_mask: torch.Tensor,  # [items, tokens]
    sm_scale: float,
    logit_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    items, requests, num_qo_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    # Query rows: (request, head within the group), per KV head, as in the kernels.
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
    """LSE-weighted sum of partials (online softmax; flash-decoding's reduction).

    partial_out `[num_partials, heads, v_head_dim]`, partial_lse `[num_partials, heads]`; owner
    int64 `[num_partials]`: which of the `num_merges` results a partial belongs to. A result without
    partials, or with only empty ones, is 0 with LSE -inf.
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
    """Attention with sinks `[heads]`, from complete results `[requests, heads, v_head_dim]` and
    `[requests, heads]` without. A row without KV stays 0; its LSE is the sink.
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
    """Decode attention request by request, with no plan. Shapes as in PackAttention.run; computes
    and returns in `dtype`.
    """
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    out = q.new_zeros((*q.shape[:2], v_cache.shape[2]), dtype=dtype)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=dtype)
    group_size = q.shape[1] // k_cache.shape[1]
    for request, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            if sinks is not None:
                lse[request] = sinks.to(dtype)
            continue
        slots = req_to_token[req_pool_indices[request], :seq_len].long()
        k = k_cache[slots].to(dtype).repeat_interleave(group_size, dim=1)
        v = v_cache[slots].to(dtype).repeat_interleave(group_size, dim=1)
        logits = torch.einsum("hd,nhd->hn", q[request].to(dtype), k) * scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if sinks is not None:  # one more key, whose value is 0
            logits = torch.cat((logits, sinks.to(dtype)[:, None]), dim=-1)
        lse[request] = torch.logsumexp(logits, dim=-1)
        weights = torch.softmax(logits, dim=-1)[:, :seq_len]
        out[request] = torch.einsum("hn,nhd->hd", weights, v)
    return out, lse
