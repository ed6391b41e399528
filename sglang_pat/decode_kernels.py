"""DecodeKernels: the compiled operators with names and types.

Made by `kernel_loader.py`, called by PackAttention. All work goes to torch's current stream; no
call synchronises or allocates, so each can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_pat._scheduler import PlanCapacity
from sglang_pat.decode_plan import CAPACITY_FIELDS
from sglang_pat.kernel_config import KernelConfig


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What a decode step reads besides queries and KV. The contents of these device tensors may
    change from one replay of a graph to the next, but not their addresses.

    plan: int32, laid out for `capacity` (plan_format.h). shared_slots: int32, filled by
    gather_slots when the plan changes. req_to_token: int32
    `[num_rows, max_context_len]`. req_pool_indices, seq_lens: int32 or int64 `[num_requests]` or
    longer. partial_out: float32 `[num_partials, num_qo_heads, head_dim]`; partial_lse: float32
    `[num_partials, num_qo_heads]`; both at least as long as the plan's num_partials.
    num_draws: int32 `[1]`, 0 between steps; not for two streams at once.
    """

    plan: torch.Tensor
    capacity: PlanCapacity
    shared_slots: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_draws: torch.Tensor

    @property
    def capacity_list(self) -> list[int]:
        """In the order of PlanCapacity's fields."""
        return [getattr(self.capacity, name) for name in CAPACITY_FIELDS]


class DecodeKernels:
    """The operators of one KernelConfig. ValueError on tensors that do not fit, before any launch.

    The contents of the plan are not checked: whoever writes it checks that it fits the buffers.
    """

    def __init__(self, operators: Any, config: KernelConfig) -> None:
        self.config = config
        self._operators = operators

    def gather_slots(self, step: DeviceStep) -> None:
        """Fill `step.shared_slots` from req_to_token. Once per plan, before its first decode()."""
        self._operators.gather_slots(
            step.plan,
            step.capacity_list,
            step.req_to_token,
            step.req_pool_indices,
            step.shared_slots,
        )

    def decode(
        self,
        step: DeviceStep,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        out_lse: torch.Tensor | None,
        sm_scale: float,
        logit_cap: float,
    ) -> None:
        """Attention of one layer: pack_decode, then merge_partials. Writes `out`, and `out_lse` if
        given.

        q, out: `[num_requests, num_qo_heads, head_dim]`; k_cache, v_cache: `[num_slots,
        num_kv_heads, head_dim]`; out_lse: float32 `[num_requests, num_qo_heads]`, natural log.
        """
        self._operators.decode(
            q,
            k_cache,
            v_cache,
            step.plan,
            step.capacity_list,
            step.shared_slots,
            step.req_to_token,
            step.req_pool_indices,
            step.seq_lens,
            out,
            out_lse,
            step.partial_out,
            step.partial_lse,
            step.num_draws,
            sm_scale,
            logit_cap,
        )
