"""One kernel in place of the dozen of torch that `DraftTrees.merge` launches in each layer.

In Triton, which SGLang brings along. Imported where there is a GPU alone.
"""

# mypy: disable-error-code="no-untyped-def,misc,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _merge(
    q, k_cache, v_cache, slots, biases, out, lse, scaling, logit_cap,
    q_row, q_head, k_slot, k_head, v_slot, v_head,
    NUM_DRAFTS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    HAS_CAP: tl.constexpr,
):  # fmt: skip
    """A program is a draft token and a KV head: the query heads of that, one softmax each."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    first = row // NUM_DRAFTS * NUM_DRAFTS  # of the request's rows
    heads = tl.arange(0, GROUP_PADDED)
    is_head = heads < GROUP
    dims, v_dims = tl.arange(0, DIM_PADDED), tl.arange(0, V_PADDED)
    is_dim, is_v_dim = dims < DIM, v_dims < V_DIM
    query_heads = kv_head * GROUP + heads
    query = tl.load(
        q + row * q_row + query_heads[:, None] * q_head + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    ).to(tl.float32)
    places = row * num_kv_heads * GROUP + query_heads
    largest = tl.load(lse + places, mask=is_head, other=0.0)  # what was before is one key
    total = tl.full((GROUP_PADDED,), 1.0, tl.float32)
    out_places = out + places[:, None] * V_DIM + v_dims[None, :]
    is_out = is_head[:, None] & is_v_dim[None, :]
    result = tl.load(out_places, mask=is_out, other=0.0).to(tl.float32)
    for j in range(NUM_DRAFTS):
        bias = tl.load(biases + row * NUM_DRAFTS + j)
        slot = tl.load(slots + first + j).to(tl.int64)
        key = tl.load(k_cache + slot * k_slot + kv_head * k_head + dims, mask=is_dim, other=0.0)
        logit = tl.sum(query * key.to(tl.float32)[None, :], 1) * scaling
        if HAS_CAP:
            cap = logit / logit_cap
            logit = logit_cap * (1.0 - 2.0 / (tl.exp(2.0 * cap) + 1.0))
        logit += bias
        now = tl.maximum(largest, logit)
        before = tl.where(largest == float("-inf"), 0.0, tl.exp(largest - now))
        weight = tl.where(logit == float("-inf"), 0.0, tl.exp(logit - now))
        value = tl.load(
            v_cache + slot * v_slot + kv_head * v_head + v_dims, mask=is_v_dim, other=0.0
        )
        result = result * before[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
        total = total * before + weight
        largest = now
    tl.store(out_places, (result / total[:, None]).to(out.dtype.element_ty), mask=is_out)


def merge_drafts(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    biases: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    logit_cap: float,
) -> torch.Tensor:
    """As `DraftTrees.merge`, of drafts that lie in the caches, in numbers that are not scaled.

    Parameters
    ----------
    q : torch.Tensor
        `[rows, heads, head_dim]`.
    caches : tuple of torch.Tensor
        Keys and values: `[slots, KV heads, ...]`.
    slots : torch.Tensor
        Where the draft token of each row is.
    biases : torch.Tensor
        float32 `[requests, draft tokens, draft tokens]`, contiguous: 0 for what is read, else -inf.
    before : tuple of torch.Tensor
        Output and LSE over what the requests had before. The output is written to.
    scaling, logit_cap : float
        Of the layer.
    """
    (k_cache, v_cache), (out, lse) = caches, before
    num_rows, num_heads, dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    group = num_heads // num_kv_heads
    _merge[(num_rows, num_kv_heads)](
        q, k_cache, v_cache, slots, biases, out, lse, scaling, logit_cap or 1.0,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
        v_cache.stride(0), v_cache.stride(1),
        NUM_DRAFTS=biases.shape[-1], GROUP=group, GROUP_PADDED=triton.next_power_of_2(group),
        DIM=dim, DIM_PADDED=triton.next_power_of_2(dim),
        V_DIM=v_dim, V_PADDED=triton.next_power_of_2(v_dim), HAS_CAP=logit_cap > 0,
    )  # fmt: skip
    return out
