"""Named workloads of the kernel benchmark, and the least time a GPU needs for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_pat.replay.pat_trees import PAT_TREES, PrefixTree

PAT_HEADS = ((32, 8), (64, 8), (16, 8), (32, 32))
HEAD_DIM = 128
# What dense attention kernels reach on an H100 at best: the compute side of the floor.
REFERENCE_FLOPS = 600e12


@dataclass(frozen=True, slots=True)
class Workload:
    """One decode step of a tree."""

    tree_name: str
    num_qo_heads: int
    num_kv_heads: int
    dtype: torch.dtype = torch.float16
    head_dim: int = HEAD_DIM
    with_sinks: bool = False

    @property
    def name(self) -> str:
        name = f"{self.tree_name} {self.num_qo_heads}/{self.num_kv_heads}"
        if self.head_dim != HEAD_DIM:
            name += f" d{self.head_dim}"
        return name + " sinks" * self.with_sinks

    @property
    def tree(self) -> PrefixTree:
        return PrefixTree.parse(self.tree_name)

    @property
    def unique_kv_bytes(self) -> int:
        return self.tree.num_tokens * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def flops(self) -> int:
        tree = self.tree
        return 4 * tree.num_requests * tree.seq_len * self.num_qo_heads * self.head_dim

    def floor_us(self, copy_bandwidth: float) -> float:
        """Every KV token, query and output moved once at copy bandwidth, or the arithmetic at the
        reference rate, whichever takes longer."""
        query_bytes = 2 * self.tree.num_requests * self.num_qo_heads * self.head_dim * 2
        memory = (self.unique_kv_bytes + query_bytes) / copy_bandwidth
        return 1e6 * max(memory, self.flops / REFERENCE_FLOPS)


@dataclass(frozen=True, slots=True)
class WorkloadTensors:
    """The workload on the GPU, in SGLang's layout: what every contender is given."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None = None

    @classmethod
    def make(cls, workload: Workload, *, seed: int | None = None) -> WorkloadTensors:
        """seed: scatter the slots over the pool; None: nodes are contiguous, as after a prefill."""
        generator = torch.Generator("cuda").manual_seed(0)
        tree = workload.tree

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=workload.dtype)

        pool = (tree.pool_size(), workload.num_kv_heads, workload.head_dim)
        table = torch.from_numpy(tree.token_table(seed=seed))
        return cls(
            random(tree.num_requests, workload.num_qo_heads, workload.head_dim),
            random(*pool),
            random(*pool),
            table.cuda(),
            torch.arange(tree.num_requests, device="cuda"),
            torch.full((tree.num_requests,), tree.seq_len, dtype=torch.int64, device="cuda"),
            random(workload.num_qo_heads) if workload.with_sinks else None,
        )


def pat_suite() -> list[Workload]:
    return [Workload(tree, *heads) for heads in PAT_HEADS for tree in PAT_TREES]


# One per regime: launch-bound, many sharers, long tails, deep trees, nothing shared.
QUICK_TREES = (
    "1,10_4096,416",
    "1,1024_2048,32",
    "1,8,512_32,512,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "4,16,256,512_512,32,128,32",
    "256_1024",
)


def quick_suite() -> list[Workload]:
    return [Workload(tree, *heads) for heads in PAT_HEADS for tree in QUICK_TREES]


# Full-attention layers of hybrid models: gpt-oss-20b, Gemma-3-12b, Qwen3-Next.
HYBRID_LAYERS = ((64, 8, 64, True), (16, 8, 256, False), (16, 2, 256, False))
HYBRID_TREES = (
    "1,128_8192,256",
    "1,10_4096,416",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "256_1024",
)


def hybrid_suite() -> list[Workload]:
    """In bfloat16, like those models."""
    return [
        Workload(tree, heads, kv_heads, torch.bfloat16, head_dim, with_sinks)
        for heads, kv_heads, head_dim, with_sinks in HYBRID_LAYERS
        for tree in HYBRID_TREES
    ]
