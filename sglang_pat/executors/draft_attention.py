"""Attention to draft tokens on a GPU, by one Triton kernel per layer.

The rows of a group attend to the keys of the same group. In a small group, each row reads the keys
one by one. In a large group, tiles of rows are multiplied with tiles of keys (`is_tiled`).
"""

# mypy: disable-error-code="no-untyped-def,misc,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_pat.executors.layer import Scale

_STEPS_AT_ONCE = 4  # keys that are loaded at the same time
# Query elements per warp. With this many, most programs have one warp, which needs no barriers.
_NUMBERS_PER_WARP = 1024
# A group with at least this many weights (rows times keys) is multiplied in tiles of the sizes
# below.
_FIRST_TILED = 64
_TILE_ROWS, _TILE_KEYS, _LEAST = 64, 64, 16
_FIRST_WITH_E4M3 = (8, 9)  # first compute capability on which Triton converts e4m3


def reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the kernels can read caches of this dtype on this device."""
    if dtype is torch.float8_e4m3fn:
        return torch.cuda.get_device_capability(device) >= _FIRST_WITH_E4M3
    return True


def is_tiled(rows: int, keys: int) -> bool:
    """Return True if a group with this many rows and keys is multiplied in tiles."""
    return rows * keys >= _FIRST_TILED


@triton.jit
def _merge_drafts(
    q, k_cache, v_cache, slots, biases, out, lse, scale, logit_cap, k_scale, v_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    HAS_CAP: tl.constexpr, STEPS_AT_ONCE: tl.constexpr,
    K_SCALE_ON_DEVICE: tl.constexpr, V_SCALE_ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Attend by reading key after key. A program computes, for one row, a KV head's query heads."""
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    first = row // NUM_ROWS * NUM_KEYS  # first key of the row's group
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
    # The result of the plan counts as one more key, with its LSE as logit and its output as value.
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
        # `most` is -inf if the row has attended to nothing yet. `logit` is -inf if the row does not
        # attend to this draft token. If both are -inf, exp() would give NaN.
        kept = tl.where(most == float("-inf"), 0.0, tl.exp(most - larger))
        weight = tl.where(logit == float("-inf"), 0.0, tl.exp(logit - larger))
        v = value.to(tl.float32) * v_factor
        result = result * kept[:, None] + weight[:, None] * v[None, :]
        total = total * kept + weight
        most = larger
    total = tl.where(total == 0.0, 1.0, total)  # padding attends to nothing
    tl.store(places, (result / total[:, None]).to(out.dtype.element_ty), mask=in_out)


@triton.jit
def _merge_tiles(
    q, k_cache, v_cache, slots, biases, out, lse, scale, logit_cap, k_scale, v_scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head,
    NUM_ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, V_DIM: tl.constexpr, V_PADDED: tl.constexpr,
    HAS_CAP: tl.constexpr, K_SCALE_ON_DEVICE: tl.constexpr, V_SCALE_ON_DEVICE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Attend in tiles. A program computes some rows of a group for one KV head."""
    of_group, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP
    line = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # (row, query head) pairs
    in_rows = line < NUM_ROWS * GROUP
    row = of_group * NUM_ROWS + line // GROUP
    head = kv_head * GROUP + line % GROUP
    dim, v_dim = tl.arange(0, DIM_PADDED), tl.arange(0, V_PADDED)
    in_key, in_value = dim < DIM, v_dim < V_DIM
    query = tl.load(
        q + row[:, None] * q_row + head[:, None] * q_head + dim[None, :],
        mask=in_rows[:, None] & in_key[None, :],
        other=0.0,
    )
    if K_SCALE_ON_DEVICE:
        scale *= tl.load(k_scale)
    else:
        scale *= k_scale
    v_factor = tl.load(v_scale) if V_SCALE_ON_DEVICE else v_scale
    # As in `_merge_drafts`, the result of the plan counts as the first key.
    most = tl.load(lse + row * num_heads + head, mask=in_rows, other=0.0)
    total = tl.full((TILE_ROWS,), 1.0, tl.float32)
    places = out + (row * num_heads + head)[:, None] * V_DIM + v_dim[None, :]
    in_out = in_rows[:, None] & in_value[None, :]
    result = tl.load(places, mask=in_out, other=0.0).to(tl.float32)
    for first in range(0, NUM_KEYS, TILE_KEYS):
        j = first + tl.arange(0, TILE_KEYS)
        in_keys = j < NUM_KEYS
        slot = tl.load(slots + of_group * NUM_KEYS + j, mask=in_keys, other=0).to(tl.int64)
        keys = tl.load(
            k_cache + slot[:, None] * k_slot + kv_head * k_head + dim[None, :],
            mask=in_keys[:, None] & in_key[None, :],
            other=0.0,
        ).to(query.dtype)
        values = tl.load(
            v_cache + slot[:, None] * v_slot + kv_head * v_head + v_dim[None, :],
            mask=in_keys[:, None] & in_value[None, :],
            other=0.0,
        ).to(query.dtype)
        bias = tl.load(
            biases + row[:, None] * NUM_KEYS + j[None, :],
            mask=in_rows[:, None] & in_keys[None, :],
            other=float("-inf"),
        )
        logit = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if HAS_CAP:  # tanh
            logit = logit_cap * (1.0 - 2.0 / (tl.exp(2.0 * (logit / logit_cap)) + 1.0))
        logit += bias
        larger = tl.maximum(most, tl.max(logit, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        kept = tl.exp(most - finite)
        weight = tl.exp(logit - finite[:, None])
        part = tl.dot(weight.to(query.dtype), values, input_precision="ieee") * v_factor
        result = result * kept[:, None] + part
        total = total * kept + tl.sum(weight, 1)
        most = larger
    total = tl.where(total == 0.0, 1.0, total)  # padding attends to nothing
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
    *,
    tiled: bool | None = None,
) -> torch.Tensor:
    """Attend to draft tokens as the adapter's `merge_drafts` does (`tree_attention.py`).

    before: the output and the LSE of the plan, both contiguous. The result overwrites this output
    and is returned. caches: `reads()` must be True for them. logit_cap: 0 turns the soft-cap off.
    tiled: whether to multiply in tiles; None: `is_tiled` decides.
    """
    (k_cache, v_cache), (out, lse) = caches, before
    num_rows, num_heads, dim = q.shape
    num_kv_heads, v_dim = v_cache.shape[1:]
    groups, rows, keys = biases.shape
    if num_rows != groups * rows:
        raise ValueError(f"q must have {rows} rows for each of {groups} groups, got {num_rows}")
    if len(slots) != groups * keys:
        raise ValueError(f"slots must be {keys} for each of {groups} groups, got {len(slots)}")
    for name, each in {"slots": slots, "biases": biases, "out": out, "lse": lse}.items():
        if not each.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {each.stride()}")
    for name, each in {"q": q, "k_cache": k_cache, "v_cache": v_cache}.items():
        if each.stride(2) != 1:
            raise ValueError(f"{name} must have dense columns, got strides {each.stride()}")
    group = num_heads // num_kv_heads
    dim_padded, v_padded = (max(_LEAST, triton.next_power_of_2(each)) for each in (dim, v_dim))
    given = (
        q, k_cache, v_cache, slots, biases, out, lse, scaling, logit_cap, *scales,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
        v_cache.stride(0), v_cache.stride(1),
    )  # fmt: skip
    sizes = {
        "NUM_ROWS": rows,
        "NUM_KEYS": keys,
        "GROUP": group,
        "DIM": dim,
        "DIM_PADDED": dim_padded,
        "V_DIM": v_dim,
        "V_PADDED": v_padded,
        "HAS_CAP": logit_cap > 0,
        "K_SCALE_ON_DEVICE": isinstance(scales[0], torch.Tensor),
        "V_SCALE_ON_DEVICE": isinstance(scales[1], torch.Tensor),
    }
    if is_tiled(rows, keys) if tiled is None else tiled:
        lines = rows * group
        # Registers limit the rows of a tile.
        tile = min(
            max(_LEAST, triton.next_power_of_2(lines)), _TILE_ROWS * 128 // max(v_padded, 128)
        )
        _merge_tiles[(groups, num_kv_heads, triton.cdiv(lines, tile))](
            *given,
            **sizes,
            TILE_ROWS=tile,
            # Shared memory limits the keys of a tile.
            TILE_KEYS=min(
                max(_LEAST, triton.next_power_of_2(keys)), _TILE_KEYS * 256 // max(v_padded, 256)
            ),
            num_warps=4,
            num_stages=2,
        )
        return out
    group_padded = triton.next_power_of_2(group)
    _merge_drafts[(num_rows, num_kv_heads)](
        *given,
        **sizes,
        GROUP_PADDED=group_padded,
        STEPS_AT_ONCE=_STEPS_AT_ONCE,
        num_warps=min(max(1, group_padded * dim_padded // _NUMBERS_PER_WARP), 8),
    )
    return out
