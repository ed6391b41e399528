"""A planned decode step on the device, without PackAttention: how tests and benchmarks run one.

Buffers are allocated once for given capacities, so that a graph can be replayed with new plans.
"""

from __future__ import annotations

import torch

from sglang_pat._scheduler import TILE_TABLE, CostModel, PackScheduler, PlanCapacity
from sglang_pat.decode_batch import DecodeBatch
from sglang_pat.decode_kernels import DecodeKernels, DeviceStep
from sglang_pat.decode_plan import DecodePlan, KvTokens
from sglang_pat.pack_attention import GROWTH_TOKENS, MIN_PIECE_TOKENS, default_workers


class PlannedStep:
    """One scheduler with its device buffers."""

    def __init__(
        self,
        kernels: DecodeKernels,
        num_qo_heads: int,
        num_kv_heads: int,
        *,
        num_workers: int | None = None,
        policy: str = "memory",
        max_block_q: int = TILE_TABLE[-1][0],
        min_piece_tokens: int = MIN_PIECE_TOKENS,
        cost: CostModel | None = None,
        max_requests: int = 4096,
        max_shared_slots: int = 1 << 17,
        max_partials: int = 1 << 15,
    ) -> None:
        if num_workers is None:
            num_workers = default_workers(torch.device("cuda"), num_kv_heads)
        self.kernels = kernels
        self.scheduler = PackScheduler(
            group_size=num_qo_heads // num_kv_heads,
            num_workers=num_workers,
            max_block_q=max_block_q,
            policy=policy,
            min_piece_tokens=min_piece_tokens,
            growth_tokens=GROWTH_TOKENS,
            cost=cost or CostModel(),
        )
        self.capacity = PlanCapacity(
            num_tickets=8 * max_requests + num_workers,
            num_work_items=8 * max_requests + num_workers,
            num_item_requests=16 * max_requests + 64 * num_workers,
            num_gather_spans=4 * max_requests,
            num_merges=max_requests,
        )
        size = self.capacity.layout()["size"]
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.partial_out = torch.full(
            (max_partials, num_qo_heads, kernels.config.head_dim), float("nan"), device="cuda"
        )
        self.partial_lse = torch.full((max_partials, num_qo_heads), float("nan"), device="cuda")
        self.device_plan = torch.zeros(size, dtype=torch.int32, device="cuda")
        self.shared_slots = torch.full(
            (max_shared_slots,), 2147480000, dtype=torch.int32, device="cuda"
        )
        self.num_draws = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.step: DeviceStep | None = None
        self.plan: DecodePlan | None = None

    def write(
        self,
        batch: DecodeBatch,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> DecodePlan:
        """Plan `batch`, copy the plan to the device and gather its slots."""
        paths = batch.read_paths()
        self.scheduler.plan(
            paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, batch.seq_lens
        )
        assert self.scheduler.num_partials <= len(self.partial_out), self.scheduler.num_partials
        assert self.scheduler.num_shared_slots <= len(self.shared_slots)
        self.scheduler.write(self.capacity, self.host.numpy())
        self.device_plan.copy_(self.host)
        self.step = DeviceStep(
            plan=self.device_plan,
            capacity=self.capacity,
            shared_slots=self.shared_slots,
            req_to_token=req_to_token,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            partial_out=self.partial_out,
            partial_lse=self.partial_lse,
            num_draws=self.num_draws,
        )
        self.kernels.gather_slots(self.step)
        tokens = KvTokens(*self.scheduler.kv_tokens)
        self.plan = DecodePlan.parse(self.host.numpy(), self.capacity, tokens)
        return self.plan

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        out_lse: torch.Tensor | None = None,
        *,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
    ) -> None:
        """Run the last plan written."""
        assert self.step is not None, "write() a plan first"
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        self.kernels.decode(self.step, q, k_cache, v_cache, out, out_lse, scale, logit_cap)
