"""The contenders of the kernel benchmark: one function each, all with the same signature.

A contender gets the workload's tensors, does its planning, and returns a function that runs the
attention of one layer: K and V cache in, output out. It can be captured in a CUDA graph. Libraries
are imported when their contender is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from kernel.planned_step import PlannedStep
from kernel.request_forests import Forest
from kernel.workloads import Workload, WorkloadTensors
from sglang_pat.bench import peers
from sglang_pat.bench.peers import Layer
from sglang_pat.executors.calibration import costs_of
from sglang_pat.executors.jit import KernelConfig

Contender = Callable[[Workload, WorkloadTensors], Layer]


def pat(
    policy: str = "memory", max_block_q: int | None = None, *, batch_invariant: bool = False
) -> Contender:
    """Return the package as a contender.

    It runs one of its packing policies, only its tile bodies up to max_block_q, or its
    batch-invariant mode.
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
    """FlashInfer's paged decode."""
    return peers.flashinfer(_step(workload, tensors), _workspace())


def cascade(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FlashInfer's multi-level cascade, one level per depth of the forest."""
    from flashinfer import MultiLevelCascadeAttentionWrapper

    if tensors.sinks is not None:
        raise ValueError("FlashInfer's cascade has no attention sinks")
    if workload.kv_dtype is not None:
        raise ValueError("FlashInfer's cascade is compared over 16-bit KV only")
    levels = [*_shared_levels(workload.forest), _private_level(workload.forest)]
    wrapper = MultiLevelCascadeAttentionWrapper(len(levels), _workspace(), "NHD")
    qo_indptr, kv_indptr, kv_indices, last_page = [], [], [], []
    for groups in levels:
        requests = [group.first for group in groups] + [workload.forest.num_requests]
        ends = np.cumsum([0] + [group.kv_end - group.kv_begin for group in groups])
        qo_indptr.append(torch.tensor(requests, dtype=torch.int32, device="cuda"))
        kv_indptr.append(torch.tensor(ends, dtype=torch.int32, device="cuda"))
        kv_indices.append(
            torch.cat([tensors.req_to_token[g.first, g.kv_begin : g.kv_end] for g in groups])
        )
        last_page.append(torch.ones(len(groups), dtype=torch.int32, device="cuda"))
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


class _Group(NamedTuple):
    """Requests from `first` to the next group's, and the KV that all of them read on a level."""

    first: int
    kv_begin: int
    kv_end: int


def _shared_levels(forest: Forest) -> list[list[_Group]]:
    """By depth, the nodes there; requests whose path is shorter are groups without KV."""
    levels = []
    for depth in range(max(map(len, forest.paths))):
        nodes = [path[depth] if depth < len(path) else None for path in forest.paths]
        levels.append(
            [
                _Group(request, node.kv_begin, node.kv_end) if node else _Group(request, 0, 0)
                for request, node in enumerate(nodes)
                if request == 0 or node != nodes[request - 1]
            ]
        )
    return levels


def _private_level(forest: Forest) -> list[_Group]:
    return [
        _Group(request, path[-1].kv_end if path else 0, int(length))
        for request, (path, length) in enumerate(zip(forest.paths, forest.seq_lens, strict=True))
    ]


def fa3(workload: Workload, tensors: WorkloadTensors) -> Layer:
    """FA3 as SGLang calls it on Hopper: over fp8 KV its queries are fp8 too."""
    return peers.fa3(_step(workload, tensors))


def _step(workload: Workload, tensors: WorkloadTensors) -> peers.DecodeTensors:
    return peers.DecodeTensors(
        tensors.q,
        workload.num_kv_heads,
        tensors.req_to_token,
        tensors.seq_lens,
        tensors.sinks,
        workload.kv_dtype,
    )


@functools.cache
def _workspace() -> torch.Tensor:
    """Shared by the wrappers of FlashInfer, none of which runs while another does."""
    return torch.empty(peers.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


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
