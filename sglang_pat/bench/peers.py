"""Other decode attention kernels, called as SGLang calls them: what ours are measured against.

Each gets the tensors of one step, does its planning, and returns a function that runs the attention
of one layer, K and V cache in, output out, and can be captured in a CUDA graph. Libraries are
imported when their contender is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WORKSPACE_BYTES = 512 << 20


class DecodeTensors(NamedTuple):
    """One decode step on a CUDA device. Row i of `req_to_token` is request i."""

    q: torch.Tensor  # [num_requests, num_qo_heads, head_dim]
    num_kv_heads: int
    req_to_token: torch.Tensor  # int32 [num_requests, at least the longest length]
    seq_lens: torch.Tensor  # int64 [num_requests]
    sinks: torch.Tensor | None = None  # [num_qo_heads]
    kv_dtype: torch.dtype | None = None  # None: that of the queries


def flashinfer(step: DecodeTensors, workspace: torch.Tensor | None = None) -> Layer:
    """FlashInfer's paged decode, page size 1, with tensor cores where there is a group.

    workspace: uint8 on the device, `WORKSPACE_BYTES`; None allocates it.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    if step.sinks is not None:
        raise ValueError("FlashInfer's decode has no attention sinks")
    num_qo_heads, head_dim = step.q.shape[1:]
    if workspace is None:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=step.q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_tensor_cores=num_qo_heads > step.num_kv_heads or step.kv_dtype is not None,
    )
    lens = step.seq_lens.cpu()
    columns = torch.arange(step.req_to_token.shape[1], device=step.q.device)
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    indptr[1:] = lens.cumsum(0)
    wrapper.plan(
        indptr,
        step.req_to_token[columns < step.seq_lens.unsqueeze(1)],
        torch.ones(len(lens), dtype=torch.int32),
        num_qo_heads,
        step.num_kv_heads,
        head_dim,
        1,
        q_data_type=step.q.dtype,
        kv_data_type=step.kv_dtype or step.q.dtype,
    )
    out = torch.empty_like(step.q)

    def run(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wrapper.run(
            step.q, (k_cache.unsqueeze(1), v_cache.unsqueeze(1)), out=out
        )
        return result

    return run


def fa3(step: DecodeTensors) -> Layer:
    """FA3 as SGLang calls it on Hopper: sglang-kernel, page table in tokens.

    Over a KV cache of another type the queries are converted to that type, in every layer.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    queries = step.q.unsqueeze(1)
    lengths = step.seq_lens.int()
    sinks = {} if step.sinks is None else {"sinks": step.sinks}

    def run(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        q = queries if step.kv_dtype is None else queries.to(step.kv_dtype)
        result: torch.Tensor = flash_attn_with_kvcache(
            q,
            k_cache.unsqueeze(1),
            v_cache.unsqueeze(1),
            cache_seqlens=lengths,
            page_table=step.req_to_token,
            softmax_scale=q.shape[-1] ** -0.5,
            causal=True,
            **sinks,
        )
        return result.squeeze(1)

    return run
