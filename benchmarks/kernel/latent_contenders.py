"""The contenders of the benchmark of latent attention (MLA), called as SGLang calls them.

Each gets the tensors of a step, does its planning, and returns a function that computes the output
of one layer from its KV. The function can be captured in a CUDA graph. A library is imported when
its contender is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernel.contenders import WORKSPACE_BYTES, slots_of_requests, triton_layer
from kernel.latent_workloads import COLUMNS, LatentWorkload
from kernel.pages import PagedCopies, Unsupported
from kernel.planned_step import PlannedStep
from kernel.workloads import WorkloadTensors
from sglang_pat.executors.calibration import costs_of
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.plan import largest_tile

LatentLayer = Callable[[torch.Tensor], torch.Tensor]  # KV [slots, 1, 576] -> output
Contender = Callable[[LatentWorkload, WorkloadTensors], LatentLayer]

SM_SCALE = (128 + 64) ** -0.5  # the models' heads have 128 + 64 columns
_TRITON_SPLITS = 16  # SGLang's default is 8, and up to 16 for long contexts


def pat(
    workload: LatentWorkload, tensors: WorkloadTensors, max_block_q: int | None = None
) -> LatentLayer:
    """pat. max_block_q: query rows of the largest tile, by default pat's choice."""
    device = tensors.q.device
    config = KernelConfig.for_device(
        workload.dtype, workload.head_dim, device, COLUMNS, workload.cache_dtype
    )
    cost = costs_of(device, latent=True, one_byte=workload.cache_dtype.itemsize == 1)
    step = PlannedStep(
        config,
        workload.num_qo_heads,
        1,
        cost=cost,
        max_block_q=max_block_q,
        max_shared_slots=max(1 << 17, workload.forest.num_tokens),
    )
    step.write(workload.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    nope, rope = _parts(tensors.q)
    out = torch.empty_like(nope)

    def run(kv: torch.Tensor) -> torch.Tensor:
        step.decode(nope, kv, kv[..., :COLUMNS], out, sm_scale=SM_SCALE, q_rope=rope)
        return out

    return run


def pat_64(workload: LatentWorkload, tensors: WorkloadTensors) -> LatentLayer:
    """pat with fp8 KV and the tile of 64 rows, instead of two tiles of 32."""
    own = largest_tile(workload.num_qo_heads, latent=True, one_byte=workload.kv_dtype is not None)
    if own == 64:
        raise Unsupported("the package's own choice")
    return pat(workload, tensors, 64)


def fa3(workload: LatentWorkload, tensors: WorkloadTensors) -> LatentLayer:
    """FA3 of sglang-kernel, SGLang's default on Hopper, with pages of one token."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    nope, rope = _parts(tensors.q)
    lengths = _lengths(workload, tensors)
    ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=nope.device) * workload.drafts

    def run(kv: torch.Tensor) -> torch.Tensor:
        pages = kv.unsqueeze(1)
        result: torch.Tensor = flash_attn_with_kvcache(
            q=rope,
            k_cache=pages[..., COLUMNS:],
            v_cache=pages[..., :COLUMNS],
            qv=nope,
            page_table=tensors.req_to_token,
            cache_seqlens=lengths,
            cu_seqlens_q=ends,
            max_seqlen_q=workload.drafts,
            softmax_scale=SM_SCALE,
            causal=True,
        )
        return result

    return run


def flashinfer(workload: LatentWorkload, tensors: WorkloadTensors) -> LatentLayer:
    """FlashInfer's MLA kernels, with pages of one token."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    _refuse_drafts(workload)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(), backend="fa3")
    indptr, indices = slots_of_requests(tensors)
    wrapper.plan(
        torch.arange(len(tensors.q) + 1, dtype=torch.int32, device="cuda"),
        indptr,
        indices,
        tensors.seq_lens.int(),
        workload.num_qo_heads,
        COLUMNS,
        workload.head_dim - COLUMNS,
        1,
        False,
        SM_SCALE,
        workload.dtype,
        workload.dtype,
    )
    nope, rope = _parts(tensors.q)

    def run(kv: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wrapper.run(nope, rope, kv[..., :COLUMNS], kv[..., COLUMNS:])
        return result

    return run


def flashmla(workload: LatentWorkload, tensors: WorkloadTensors) -> LatentLayer:
    """FlashMLA, with a copy of the KV in pages of 64 tokens, in which whole pages are shared.

    With an fp8 cache, each layer converts its queries to fp8.
    """
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    lengths = _lengths(workload, tensors)
    over_fp8 = workload.kv_dtype is not None
    rows = workload.num_qo_heads * workload.drafts
    metadata, splits = get_mla_metadata(lengths, rows, 1, is_fp8_kvcache=over_fp8)
    copies = PagedCopies(tensors.req_to_token, workload.token_bytes)
    queries = tensors.q.unflatten(0, (-1, workload.drafts))
    scales = {}
    if over_fp8:
        one = torch.ones(1, dtype=torch.float32, device="cuda")
        scales = {"descale_q": one, "descale_k": one}

    def run(kv: torch.Tensor) -> torch.Tensor:
        result, _ = flash_mla_with_kvcache(
            queries.to(workload.cache_dtype),
            copies.of(kv),
            copies.table,
            lengths,
            COLUMNS,
            metadata,
            splits,
            softmax_scale=SM_SCALE,
            causal=True,
            **scales,
        )
        return result.flatten(0, 1)

    return run


def triton(workload: LatentWorkload, tensors: WorkloadTensors) -> LatentLayer:
    """SGLang's Triton kernel, its default before Hopper."""
    _refuse_drafts(workload)
    batch, heads = tensors.q.shape[:2]
    splits = torch.full((batch,), _TRITON_SPLITS, dtype=torch.int32, device="cuda")
    out = torch.empty(batch, heads, COLUMNS, dtype=workload.dtype, device="cuda")
    layer = triton_layer(tensors, out, splits, _TRITON_SPLITS, SM_SCALE)
    return lambda kv: layer(kv, kv[..., :COLUMNS])


def _parts(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the value columns and the rope columns as separate tensors, as in a model."""
    return q[..., :COLUMNS].contiguous(), q[..., COLUMNS:].contiguous()


def _lengths(workload: LatentWorkload, tensors: WorkloadTensors) -> torch.Tensor:
    """Return the KV tokens of each request, all of which its last row reads."""
    return tensors.seq_lens[workload.drafts - 1 :: workload.drafts].int()


def _refuse_drafts(workload: LatentWorkload) -> None:
    if workload.drafts > 1:
        raise Unsupported("not called with draft tokens here")


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _converted(contender: Contender) -> Contender:
    """Return a contender that first converts the whole pool, as SGLang does in each layer."""

    def converting(workload: LatentWorkload, tensors: WorkloadTensors) -> LatentLayer:
        layer = contender(workload, tensors)
        if workload.cache_dtype == workload.dtype:
            return layer
        return lambda kv: layer(kv.to(workload.dtype))

    return converting


CONTENDERS: dict[str, Contender] = {
    "pat": pat,
    "pat-64": pat_64,
    "fa3": _converted(fa3),
    "flashinfer": _converted(flashinfer),
    "flashmla": flashmla,
    "triton": triton,
}
DEFAULT = "fa3"  # SGLang's on Hopper
