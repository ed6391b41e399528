"""The contenders of the benchmark of latent attention (MLA), called as SGLang calls them.

Each gets the tensors of one step, does its planning, and returns a function that runs the attention
of one layer: the KV of its slots in, output out. It can be captured in a CUDA graph. Libraries are
imported when their contender is asked for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module

import torch

from kernel.contenders import WORKSPACE_BYTES
from kernel.pages import PagedCopies
from kernel.planned_step import PlannedStep
from kernel.workloads import Workload, WorkloadTensors
from sglang_pat.executors.calibration import costs_of
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.support import LATENT_HEAD_DIMS

LatentLayer = Callable[[torch.Tensor], torch.Tensor]  # KV [slots, 1, 576] -> output
Contender = Callable[[Workload, WorkloadTensors], LatentLayer]

COLUMNS = LATENT_HEAD_DIMS[1]  # of values; those of rope are behind them
SM_SCALE = (128 + 64) ** -0.5  # of the models: their heads have 128 columns and 64 of rope
_TRITON_SPLITS = 16  # SGLang's default is 8; on long contexts it takes up to 16


def pat(workload: Workload, tensors: WorkloadTensors) -> LatentLayer:
    """The package itself."""
    device = tensors.q.device
    config = KernelConfig.for_device(
        workload.dtype, workload.head_dim, device, COLUMNS, workload.cache_dtype
    )
    cost = costs_of(device, latent=True, one_byte=workload.cache_dtype.itemsize == 1)
    step = PlannedStep(config, workload.num_qo_heads, 1, cost=cost)
    step.write(
        workload.forest.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    )
    nope, rope = _parts(tensors.q)
    out = torch.empty_like(nope)

    def run(kv: torch.Tensor) -> torch.Tensor:
        step.decode(nope, kv, kv[..., :COLUMNS], out, sm_scale=SM_SCALE, q_rope=rope)
        return out

    return run


def fa3(workload: Workload, tensors: WorkloadTensors) -> LatentLayer:
    """FA3, SGLang's default on Hopper: sglang-kernel, page table in tokens."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    nope, rope = _parts(tensors.q)
    lengths = tensors.seq_lens.int()
    ends = torch.arange(len(nope) + 1, dtype=torch.int32, device=nope.device)

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
            max_seqlen_q=1,
            softmax_scale=SM_SCALE,
            causal=True,
        )
        return result

    return run


def flashinfer(workload: Workload, tensors: WorkloadTensors) -> LatentLayer:
    """FlashInfer's MLA, page size 1."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(_workspace(), backend="fa3")
    indptr, indices = _indices(tensors)
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


def flashmla(workload: Workload, tensors: WorkloadTensors) -> LatentLayer:
    """FlashMLA, over a copy of the KV in its pages of 64 tokens, shared where whole pages are.

    Over an fp8 cache the queries are converted to fp8, in every layer.
    """
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    lengths = tensors.seq_lens.int()
    over_fp8 = workload.kv_dtype is not None
    metadata, splits = get_mla_metadata(lengths, workload.num_qo_heads, 1, is_fp8_kvcache=over_fp8)
    copies = PagedCopies(tensors.req_to_token, workload.token_bytes)
    queries = tensors.q.unsqueeze(1)
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
        return result.squeeze(1)

    return run


def triton(workload: Workload, tensors: WorkloadTensors) -> LatentLayer:
    """SGLang's Triton kernel, its default before Hopper."""
    decode = _triton_decode()
    indptr, indices = _indices(tensors)
    batch, heads = tensors.q.shape[:2]
    empty = functools.partial(torch.empty, dtype=torch.float32, device="cuda")
    logits, lse = empty(batch, heads, _TRITON_SPLITS, COLUMNS), empty(batch, heads, _TRITON_SPLITS)
    splits = torch.full((batch,), _TRITON_SPLITS, dtype=torch.int32, device="cuda")
    out = torch.empty(batch, heads, COLUMNS, dtype=workload.dtype, device="cuda")
    scales = (1.0, 1.0) if "k_scale" in inspect.signature(decode).parameters else ()

    def run(kv: torch.Tensor) -> torch.Tensor:
        decode(
            tensors.q,
            kv,
            kv[..., :COLUMNS],
            out,
            indptr,
            indices,
            logits,
            lse,
            splits,
            _TRITON_SPLITS,
            SM_SCALE,
            *scales,
        )
        return out

    return run


def _triton_decode() -> Callable[..., None]:
    """The kernel's place differs between SGLang's versions."""
    try:
        module = import_module("sglang.kernels.ops.attention.decode_attention")
    except ImportError:
        module = import_module("sglang.srt.layers.attention.triton_ops.decode_attention")
    found: Callable[..., None] = module.decode_attention_fwd
    return found


def _parts(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns that values have, and those of rope: tensors of their own, as in a model."""
    return q[..., :COLUMNS].contiguous(), q[..., COLUMNS:].contiguous()


def _indices(tensors: WorkloadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of all requests one behind the other, and where each begins."""
    columns = torch.arange(tensors.req_to_token.shape[1], device="cuda")
    indptr = torch.zeros(len(tensors.seq_lens) + 1, dtype=torch.int32, device="cuda")
    indptr[1:] = tensors.seq_lens.cumsum(0)
    return indptr, tensors.req_to_token[columns < tensors.seq_lens.unsqueeze(1)]


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _converted(contender: Contender) -> Contender:
    """Convert the whole pool first, where it is of another type: so SGLang does in each layer."""

    def converting(workload: Workload, tensors: WorkloadTensors) -> LatentLayer:
        layer = contender(workload, tensors)
        if workload.cache_dtype == workload.dtype:
            return layer
        return lambda kv: layer(kv.to(workload.dtype))

    return converting


CONTENDERS: dict[str, Contender] = {
    "pat": pat,
    "fa3": _converted(fa3),
    "flashinfer": _converted(flashinfer),
    "flashmla": flashmla,
    "triton": triton,
}
DEFAULT = "fa3"  # SGLang's on Hopper
