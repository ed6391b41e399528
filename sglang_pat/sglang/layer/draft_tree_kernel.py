"""The attention of trees of drafts on a GPU: one kernel per layer, where torch launches a dozen.

In Triton, which SGLang needs there, too.
"""

# mypy: disable-error-code="no-untyped-def,misc,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_pat.executors.layer import Scale

# A step for each draft token waits for its loads: those of so many steps are under way together.
_STEPS_AT_ONCE = 4
# Numbers of the queries that a warp has, so that most programs are one warp, without barriers.
_NUMBERS_PER_WARP = 1024
_FIRST_WITH_E4M3 = (8, 9)  # compute capability from which Triton converts it


def reads(dtype: torch.dtype, device: torch.device) -> bool:
    """True if the kernel reads caches of this type."""
    if dtype is torch.float8_e4m3fn:
        return torch.cuda.get_device_capability(device) >= _FIRST_WITH_E4M3
    return True


@triton.jit
def _merge_drafts(
    q, k_cache, v_cache, slots, biases, out, lse, scale, logit_cap, k_scale, v_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    HAS_CAP: tl.constexpr, STEPS_AT_ONCE: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr, V_SCALE_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """A program has a row and a KV head: it computes that head's group of query heads."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    first = row // NUM_ROWS * NUM_KEYS  # key of the row's group
    member = tl.arange(0, GROUP_PADDED)
    dim, v_dim = tl.arange(0, DIM_PADDED), tl.arange(0, V_PADDED)
    in_group, in_key, in_value = member < GROUP, dim < DIM, v_dim < V_DIM
    head = kv_head * GROUP + member
    query = tl.load(
        q + row * q_row + head[:, None] * q_head + dim[None, :],
        mask=in_group[:, None] & in_key[None, :],
        other=0.0,
    ).to(tl.float32)
    if K_SCALE_ON_DEVICE:
        scale *= tl.load(k_scale)
    else:
        scale *= k_scale
    v_factor = tl.load(v_scale) if V_SCALE_ON_DEVICE else v_scale
    # The KV before the step is one more key: its logit is the LSE, its value the output.
    most = tl.load(lse + row * num_heads + head, mask=in_group, other=0.0)
    total = tl.full((GROUP_PADDED,), 1.0, tl.float32)
    places = out + (row * num_heads + head[:, None]) * V_DIM + v_dim[None, :]
    in_out = in_group[:, None] & in_value[None, :]
    result = tl.load(places, mask=in_out, other=0.0).to(tl.float32)
    for j in tl.range(NUM_KEYS, loop_unroll_factor=STEPS_AT_ONCE):
        bias = tl.load(biases + row * NUM_KEYS + j)
        slot = tl.load(slots + first + j).to(tl.int64)
        key = tl.load(k_cache + slot * k_slot + kv_head * k_head + dim, mask=in_key, other=0.0)
        value = tl.load(
            v_cache + slot * v_slot + kv_head * v_head + v_dim, mask=in_value, other=0.0
        )
        logit = tl.sum(query * key.to(tl.float32)[None, :], 1) * scale
        if HAS_CAP:  # tanh
            logit = logit_cap * (1.0 - 2.0 / (tl.exp(2.0 * (logit / logit_cap)) + 1.0))
        logit += bias
        larger = tl.maximum(most, logit)
        # Both may be -inf: a row that had nothing before, and a draft token that it does not read.
        kept = tl.where(most == float("-inf"), 0.0, tl.exp(most - larger))
        weight = tl.where(logit == float("-inf"), 0.0, tl.exp(logit - larger))
        v = value.to(tl.float32) * v_factor
        result = result * kept[:, None] + weight[:, None] * v[None, :]
        total = total * kept + weight
        most = larger
    total = tl.where(total == 0.0, 1.0, total)  # of padding, which reads nothing
    tl.store(places, (result / total[:, None]).to(out.dtype.element_ty), mask=in_out)


def merge_drafts(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    biases: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    logit_cap: float = 0.0,
    scales: tuple[Scale, Scale] = (1.0, 1.0),
) -> torch.Tensor:
    """Attend as `draft_trees.merge_drafts` says.

    Parameters
    ----------
    caches : tuple of torch.Tensor
        Of a type that `reads()` allows.
    before : tuple of torch.Tensor
        Contiguous. The output is overwritten.
    scaling, logit_cap : float
        Of the layer. A soft-cap of 0 is none.
    q, slots, biases, scales
        See there.

    Returns
    -------
    torch.Tensor
        The output of `before`.
    """
    (k_cache, v_cache), (out, lse) = caches, before
    num_rows, num_heads, dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    groups, rows, keys = biases.shape
    if num_rows != groups * rows:
        raise ValueError(f"q must have {rows} rows for each of {groups} groups, got {num_rows}")
    if len(slots) != groups * keys:
        raise ValueError(f"slots must be {keys} for each of {groups} groups, got {len(slots)}")
    group = num_heads // num_kv_heads
    group_padded, dim_padded = triton.next_power_of_2(group), triton.next_power_of_2(dim)
    _merge_drafts[(num_rows, num_kv_heads)](
        q, k_cache, v_cache, slots, biases, out, lse,
        scaling, logit_cap, *scales,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
        v_cache.stride(0), v_cache.stride(1),
        NUM_ROWS=rows, NUM_KEYS=keys, GROUP=group, GROUP_PADDED=group_padded,
        DIM=dim, DIM_PADDED=dim_padded, V_DIM=v_dim, V_PADDED=triton.next_power_of_2(v_dim),
        HAS_CAP=logit_cap > 0, STEPS_AT_ONCE=_STEPS_AT_ONCE,
        K_SCALE_ON_DEVICE=isinstance(scales[0], torch.Tensor),
        V_SCALE_ON_DEVICE=isinstance(scales[1], torch.Tensor),
        num_warps=min(max(1, group_padded * dim_padded // _NUMBERS_PER_WARP), 8),
    )  # fmt: skip
    return out
