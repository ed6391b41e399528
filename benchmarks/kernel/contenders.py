"""The contenders of the kernel benchmark: one function each, all with the same signature.

A contender gets the workload's tensors, does its planning, and returns a function that computes the
output of one layer from its K and V cache. The function can be captured in a CUDA graph, and calls
the library as SGLang does. A library is imported when its contender is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from kernel.pages import PagedCopies, Unsupported
from kernel.planned_step import PlannedStep
from kernel.request_forests import Forest
from kernel.workloads import PAGE_SIZE, Workload, WorkloadTensors
from sglang_pat.executors.calibration import costs_of
from sglang_pat.executors.jit import KernelConfig

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Contender = Callable[[Workload, WorkloadTensors], Layer]

WORKSPACE_BYTES = 512 << 20
TRITON_SPLITS = 8  # splits of a request, as in SGLang's server arguments
_LEVEL_WORKSPACE_BYTES = 512 << 20  # per cascade level; groups of 16 take 300 MB
_MERGED_NUMBERS = 8192  # per request: 8 per thread, 1,024 threads


def pat(
    policy: str = "memory", max_block_q: int | None = None, *, batch_invariant: bool = False
) -> Contender:
    """Return the package as a contender.

    policy: packing policy. max_block_q: uses only tiles up to this size.
    """

    def prepare(workload: Workload, tensors: WorkloadTensors) -> Layer:
        device, kv_dtype = tensors.q.device, workload.kv_dtype
        config = KernelConfig.for_device(workload.dtype, workload.head_dim, device, 0, kv_dtype)
        options = {} if max_block_q is None else {"max_block_q": max_block_q}
        step = PlannedStep(
            config,
            workload.num_qo_heads,
            workload.num_kv_heads,
            policy=policy,
            batch_invariant=batch_invariant,
            cost=None if kv_dtype is None else costs_of(device),
            **options,
        )
        step.write(
            workload.forest.batch(),
            tensors.req_to_token,
            tensors.req_pool_indices,
            tensors.seq_lens,
        )
        out = torch.empty_like(tensors.q)

        def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            step.decode(tensors.q, k, v, out, sinks=tensors.sinks)
            return out

        return run

    return prepare


def flashinfer(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FlashInfer's paged decode, with tensor cores if the group size is above 1."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    if tensors.sinks is not None:
        raise Unsupported("FlashInfer's decode has no attention sinks")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), "NHD", use_tensor_cores=_on_tensor_cores(workload)
    )
    level = level_of(_whole_requests(workload.forest), tensors.page_table, workload)
    wrapper.plan(
        level.kv_indptr,
        level.kv_indices,
        level.last_page_len,
        workload.num_qo_heads,
        workload.num_kv_heads,
        workload.head_dim,
        workload.page_size,
        q_data_type=workload.dtype,
        kv_data_type=workload.cache_dtype,
    )
    out = torch.empty_like(tensors.q)

    def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = wrapper.run(tensors.q, _paged(workload, k, v), out=out)
        return result

    return run


def _on_tensor_cores(workload: Workload) -> bool:
    return workload.num_qo_heads > workload.num_kv_heads or workload.kv_dtype is not None


def cascade(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FlashInfer's multi-level cascade, one level per depth of the forest.

    The levels run FlashInfer's fa2 kernels, which put the query heads of a group into one tile. The
    default on Hopper would be FA3, which reads KV again for each of these heads.
    """
    from flashinfer import (
        BatchPrefillWithPagedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
    )

    if tensors.sinks is not None:
        raise Unsupported("FlashInfer's cascade has no attention sinks")
    groups = cascade_groups(workload.forest)
    numbers = workload.num_qo_heads * workload.head_dim
    if len(groups) > 1 and numbers > _MERGED_NUMBERS:
        raise Unsupported(
            f"FlashInfer merges rows of up to {_MERGED_NUMBERS:,} numbers; the query heads of a "
            f"request have {numbers:,}"
        )
    wrapper = MultiLevelCascadeAttentionWrapper(len(groups), _workspace(), "NHD")
    wrapper._batch_prefill_wrappers = [
        BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(_LEVEL_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
            "NHD",
            backend="fa2",
        )
        for _ in groups
    ]
    levels = [level_of(each, tensors.page_table, workload) for each in groups]
    wrapper.plan(
        *map(list, zip(*levels, strict=True)),
        workload.num_qo_heads,
        workload.num_kv_heads,
        workload.head_dim,
        workload.page_size,
        q_data_type=workload.dtype,
        kv_data_type=workload.cache_dtype,
    )
    return lambda k, v: wrapper.run(tensors.q, _paged(workload, k, v))


class Group(NamedTuple):
    """Requests from `first` up to the next group, and the KV that all of them read on a level."""

    first: int
    kv_begin: int
    kv_end: int


class Level(NamedTuple):
    """The groups of a level in FlashInfer's format: int32 tensors.

    Group i has the requests `qo_indptr[i]` to `qo_indptr[i + 1]` and the pages
    `kv_indices[kv_indptr[i] : kv_indptr[i + 1]]`. It reads `last_page_len[i]` tokens of the last
    page.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


def cascade_groups(forest: Forest) -> list[list[Group]]:
    """Return the groups of each level: the nodes by depth, then the private KV.

    On levels below its path, a request is a group without KV.
    """
    levels = []
    for depth in range(max(map(len, forest.paths))):
        nodes = [path[depth] if depth < len(path) else None for path in forest.paths]
        levels.append(
            [
                Group(request, node.kv_begin, node.kv_end) if node else Group(request, 0, 0)
                for request, node in enumerate(nodes)
                if request == 0 or node != nodes[request - 1]
            ]
        )
    alone = [
        Group(request, path[-1].kv_end if path else 0, int(length))
        for request, (path, length) in enumerate(zip(forest.paths, forest.seq_lens, strict=True))
    ]
    return [*levels, alone]


def _whole_requests(forest: Forest) -> list[Group]:
    return [Group(request, 0, int(length)) for request, length in enumerate(forest.seq_lens)]


def level_of(groups: Iterable[Group], page_table: torch.Tensor, workload: Workload) -> Level:
    """Return a level in FlashInfer's format. Each group must begin at a page."""
    page = workload.page_size
    groups = list(groups)
    pages = [
        page_table[group.first, group.kv_begin // page : -(-group.kv_end // page)]
        for group in groups
    ]
    lengths = torch.tensor([group.kv_end - group.kv_begin for group in groups])
    ends = torch.tensor([0, *map(len, pages)]).cumsum(0)
    first = [group.first for group in groups]
    return Level(
        *(
            each.to(page_table.device, torch.int32)
            for each in (
                torch.tensor([*first, workload.forest.num_requests]),
                ends,
                torch.cat(pages),
                torch.where(lengths > 0, (lengths - 1) % page + 1, 0),
            )
        )
    )


def _paged(workload: Workload, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View caches of slots as pages: `[pages, page_size, num_kv_heads, head_dim]`."""
    return tuple(cache.unflatten(0, (-1, workload.page_size)) for cache in caches)


def fa3(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FA3 of sglang-kernel. Its schedule is computed once for all layers.

    If the KV cache has another dtype, each layer converts its queries to that dtype.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    lengths = tensors.seq_lens.int()
    ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    schedule = get_scheduler_metadata(
        len(lengths),
        1,
        int(lengths.max()),
        workload.num_qo_heads,
        workload.num_kv_heads,
        workload.head_dim,
        lengths,
        qkv_dtype=workload.cache_dtype,
        cu_seqlens_q=ends,
        page_size=workload.page_size,
        causal=True,
    )
    sinks = {} if tensors.sinks is None else {"sinks": tensors.sinks}

    def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = flash_attn_with_kvcache(
            tensors.q.to(workload.cache_dtype),
            *_paged(workload, k, v),
            cache_seqlens=lengths,
            page_table=tensors.page_table,
            cu_seqlens_q=ends,
            max_seqlen_q=1,
            softmax_scale=workload.head_dim**-0.5,
            causal=True,
            scheduler_metadata=schedule,
            **sinks,
        )
        return result

    return run


def xqa(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FlashInfer's XQA, which SGLang runs as `trtllm_mha` on Hopper, with pages of 64 tokens.

    If the pool has no pages, it reads a copy in pages.
    """
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    lengths = tensors.seq_lens.int()
    longest = int(lengths.max())
    copies = None
    if workload.page_size != PAGE_SIZE:
        copies = PagedCopies(tensors.req_to_token, workload.token_bytes)
    table = tensors.page_table if copies is None else copies.table
    sinks = None if tensors.sinks is None else tensors.sinks.float()
    workspace, out = _zeroed_workspace(), torch.empty_like(tensors.q)

    def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = trtllm_batch_decode_with_kv_cache(
            tensors.q,
            _paged(workload, k, v) if copies is None else (copies.of(k), copies.of(v)),
            workspace,
            table,
            lengths,
            longest,
            bmm1_scale=workload.head_dim**-0.5,
            bmm2_scale=1.0,
            out=out,
            sinks=sinks,
            kv_layout="NHD",
            backend="xqa",
        )
        return result

    return run


def triton(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """SGLang's Triton kernels, its default for head_dims that FA3 does not support."""
    if workload.head_dim <= 256:
        raise Unsupported("SGLang's default is another one")
    batch, heads, _ = tensors.q.shape
    splits = torch.empty(batch, dtype=torch.int32, device="cuda")
    _triton_splits()[(1,)](
        splits,
        tensors.seq_lens,
        batch,
        1,
        heads,
        workload.num_kv_heads,
        TRITON_SPLITS,
        torch.cuda.get_device_properties(0).multi_processor_count,
        MAX_NUM_SEQ=max(256, 1 << (batch - 1).bit_length()),
    )
    out = torch.empty_like(tensors.q)
    scale = workload.head_dim**-0.5
    return triton_layer(tensors, out, splits, TRITON_SPLITS, scale, sinks=tensors.sinks)


def triton_layer(
    tensors: WorkloadTensors,
    out: torch.Tensor,
    splits: torch.Tensor,
    most_splits: int,
    sm_scale: float,
    **options: Any,
) -> Layer:
    """SGLang's Triton kernels, which write `out`. splits: per request, up to `most_splits`."""
    decode = triton_decode()
    indptr, indices = slots_of_requests(tensors)
    batch, heads, columns = out.shape
    empty = functools.partial(torch.empty, dtype=torch.float32, device=out.device)
    logits, lse = empty(batch, heads, most_splits, columns), empty(batch, heads, most_splits)
    scales = (1.0, 1.0) if "k_scale" in inspect.signature(decode).parameters else ()

    def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        decode(
            tensors.q,
            k,
            v,
            out,
            indptr,
            indices,
            logits,
            lse,
            splits,
            most_splits,
            sm_scale,
            *scales,
            **options,
        )
        return out

    return run


def triton_decode() -> Callable[..., None]:
    """Return SGLang's Triton decode kernel, whose module depends on the version."""
    try:
        module = import_module("sglang.kernels.ops.attention.decode_attention")
    except ImportError:
        module = import_module("sglang.srt.layers.attention.triton_ops.decode_attention")
    found: Callable[..., None] = module.decode_attention_fwd
    return found


def _triton_splits() -> Any:
    """Return the kernel by which SGLang chooses the splits of each request."""
    try:
        module = import_module("sglang.kernels.ops.attention.metadata")
    except ImportError:
        module = import_module("sglang.srt.layers.attention.triton_backend")
    return module.get_num_kv_splits_triton


def slots_of_requests(tensors: WorkloadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the concatenated slots of all requests, and where each request begins."""
    columns = torch.arange(tensors.req_to_token.shape[1], device="cuda")
    indptr = torch.zeros(len(tensors.seq_lens) + 1, dtype=torch.int32, device="cuda")
    indptr[1:] = tensors.seq_lens.cumsum(0)
    return indptr, tensors.req_to_token[columns < tensors.seq_lens.unsqueeze(1)]


@functools.cache
def _workspace() -> torch.Tensor:
    """Return a workspace that FlashInfer's wrappers share, because they run one at a time."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@functools.cache
def _zeroed_workspace() -> torch.Tensor:
    """Return the workspace of XQA, whose semaphores must be zero before each call."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


CONTENDERS: dict[str, Contender] = {
    "pat": pat(),
    "flashinfer": flashinfer,
    "fa3": fa3,
    "cascade": cascade,
    "xqa": xqa,
    "triton": triton,
}
ABLATIONS: dict[str, Contender] = {
    "pat-paper": pat("paper"),
    "pat-per-node": pat("per-node"),
    "pat-query-centric": pat("query-centric"),
    "pat-16-rows-only": pat(max_block_q=16),
    "pat-batch-invariant": pat(batch_invariant=True),
}


def compile_ahead(workloads: Iterable[Workload], names: Iterable[str]) -> None:
    """Compile all kernels of FlashInfer that the cases need, in parallel.

    Otherwise each would be compiled at its first call, for half a minute. FlashInfer raises
    RuntimeError with the compiler's output.
    """
    from flashinfer.jit import build_jit_specs
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.xqa import gen_xqa_module

    names = set(names)
    specs = {}
    for case in workloads:
        types = case.dtype, case.cache_dtype, case.dtype, torch.int32
        dims = case.head_dim, case.head_dim
        found = []
        if "cascade" in names or ("flashinfer" in names and _on_tensor_cores(case)):
            found.append(gen_batch_prefill_module("fa2", *types, *dims, 0, False, False, False))
        if "flashinfer" in names and not _on_tensor_cores(case):
            found.append(gen_batch_decode_module(*types, *dims, 0, False, False))
        if "cascade" in names:
            found.append(gen_cascade_module())
        if "xqa" in names:
            group = case.num_qo_heads // case.num_kv_heads
            xqa_types = case.dtype, case.cache_dtype, PAGE_SIZE, case.head_dim, group
            found.append(gen_xqa_module(*xqa_types, False, case.dtype))
        specs |= {spec.name: spec for spec in found}
    build_jit_specs([*specs.values()])
