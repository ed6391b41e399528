"""The contenders of the kernel benchmark: one function each, all with the same signature.

A contender gets the workload's tensors, does its planning, and returns a function that runs the
attention of one layer: K and V cache in, output out. It can be captured in a CUDA graph. Libraries
are imported when their contender is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from planned_step import PlannedStep
from workloads import Workload, WorkloadTensors

from sglang_pat.bench import peers
from sglang_pat.bench.peers import Layer
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kernels import DecodeKernels

Contender = Callable[[Workload, WorkloadTensors], Layer]


def pat(
    policy: str = "memory", max_block_q: int | None = None, *, batch_invariant: bool = False
) -> Contender:
    """This package: one of its packing policies, its tile bodies up to max_block_q only, or its
    batch-invariant mode."""

    def prepare(workload: Workload, tensors: WorkloadTensors) -> Layer:
        config = KernelConfig.for_device(workload.dtype, workload.head_dim, tensors.q.device)
        options = {} if max_block_q is None else {"max_block_q": max_block_q}
        step = PlannedStep(
            DecodeKernels.load(config),
            workload.num_qo_heads,
            workload.num_kv_heads,
            policy=policy,
            batch_invariant=batch_invariant,
            **options,
        )
        step.write(
            workload.tree.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
        )
        out = torch.empty_like(tensors.q)

        def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            step.decode(tensors.q, k, v, out, sinks=tensors.sinks)
            return out

        return run

    return prepare


def flashinfer(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FlashInfer's paged decode."""
    return peers.flashinfer(_step(workload, tensors))


def cascade(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FlashInfer's multi-level cascade, one level per level of the tree."""
    from flashinfer import MultiLevelCascadeAttentionWrapper

    if tensors.sinks is not None:
        raise ValueError("FlashInfer's cascade has no attention sinks")
    tree = workload.tree
    levels = len(tree.nodes)
    wrapper = MultiLevelCascadeAttentionWrapper(
        levels, torch.empty(512 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    qo_indptr, kv_indptr, kv_indices, last_page = [], [], [], []
    column = 0
    for count, tokens in zip(tree.nodes, tree.tokens, strict=True):
        first = -(-torch.arange(count + 1) * tree.num_requests // count)
        qo_indptr.append(first.int().cuda())
        kv_indptr.append((torch.arange(count + 1, dtype=torch.int32) * tokens).cuda())
        owners = first[:-1].cuda()
        kv_indices.append(tensors.req_to_token[owners, column : column + tokens].flatten())
        last_page.append(torch.ones(count, dtype=torch.int32, device="cuda"))
        column += tokens
    wrapper.plan(
        qo_indptr,
        kv_indptr,
        kv_indices,
        last_page,
        workload.num_qo_heads,
        workload.num_kv_heads,
        workload.head_dim,
        1,
        q_data_type=workload.dtype,
    )
    return lambda k, v: wrapper.run(tensors.q, (k.unsqueeze(1), v.unsqueeze(1)))


def fa3(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FA3 as SGLang calls it on Hopper."""
    return peers.fa3(_step(workload, tensors))


def _step(workload: Workload, tensors: WorkloadTensors) -> peers.DecodeTensors:
    return peers.DecodeTensors(
        tensors.q, workload.num_kv_heads, tensors.req_to_token, tensors.seq_lens, tensors.sinks
    )


CONTENDERS: dict[str, Contender] = {
    "pat": pat(),
    "flashinfer": flashinfer,
    "fa3": fa3,
    "cascade": cascade,
}
ABLATIONS: dict[str, Contender] = {
    "pat-paper": pat("paper"),
    "pat-per-node": pat("per-node"),
    "pat-query-centric": pat("query-centric"),
    "pat-16-rows-only": pat(max_block_q=16),
    "pat-batch-invariant": pat(batch_invariant=True),
}
