"""A planned decode step on the device without PackAttention, for tests and benchmarks.

Unlike in PackAttention, the packer's constants can be chosen, and memory that no kernel has written
is NaN or out of bounds.
"""

from __future__ import annotations

import torch

from sglang_pat._scheduler import CostModel, PackScheduler, PlanCapacity
from sglang_pat.attention import GROWTH_TOKENS, default_workers
from sglang_pat.batch import DecodeBatch, Step
from sglang_pat.executors.cuda import CudaExecutor
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.loaded_kernels import load_kernels
from sglang_pat.plan import MIN_ITEM_TOKENS, BufferSizes, DecodePlan, largest_tile


class PlannedStep:
    """A scheduler and an executor whose buffers have fixed addresses, for graphs."""

    def __init__(
        self,
        config: KernelConfig,
        num_qo_heads: int,
        num_kv_heads: int,
        *,
        num_workers: int | None = None,
        policy: str = "memory",
        max_block_q: int | None = None,
        min_item_tokens: int = MIN_ITEM_TOKENS,
        cost: CostModel | None = None,
        max_requests: int = 4096,
        max_shared_slots: int = 1 << 17,
        max_partials: int = 1 << 15,
        batch_invariant: bool = False,
        by_time: bool = True,
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        kernels = load_kernels(config, torch.cuda.current_device())
        if num_workers is None:
            num_workers = default_workers(kernels, num_kv_heads)
        group_size = num_qo_heads // num_kv_heads
        self.scheduler = PackScheduler(
            group_size=group_size,
            num_workers=num_workers,
            max_block_q=max_block_q
            or largest_tile(
                group_size, latent=config.is_latent, one_byte=config.cache_dtype.itemsize == 1
            ),
            policy=policy,
            min_item_tokens=min_item_tokens,
            growth_tokens=GROWTH_TOKENS,
            cost=cost or CostModel(),
            batch_invariant=batch_invariant,
            one_tile=batch_invariant and not config.tiles_agree,
            by_time=by_time,
            latent=config.is_latent,
        )
        capacity = PlanCapacity(
            num_tickets=8 * max_requests + num_workers,
            num_work_items=8 * max_requests + num_workers,
            num_kv_segments=8 * max_requests + num_workers,
            num_item_requests=16 * max_requests + 64 * num_workers,
            num_gather_spans=4 * max_requests,
            num_merges=max_requests,
        )
        sizes = BufferSizes(capacity, max_partials, max_shared_slots)
        self.executor = CudaExecutor(kernels, num_qo_heads, device, sizes)
        self.executor.buffers.partial_out.fill_(float("nan"))
        self.executor.buffers.partial_lse.fill_(float("nan"))
        self.executor.buffers.shared_slots.fill_(2147480000)

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
        step = Step(req_to_token, req_pool_indices, seq_lens, batch.seq_lens)
        return self.executor.load_plan(self.scheduler, step)

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
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        q_rope: torch.Tensor | None = None,
    ) -> None:
        """Run the last plan that was written."""
        scale = k_cache.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        self.executor.run(
            LayerInputs(
                q,
                k_cache,
                v_cache,
                out,
                out_lse,
                scale,
                logit_cap,
                sinks,
                k_scale,
                v_scale,
                q_rope=q_rope,
            )
        )
