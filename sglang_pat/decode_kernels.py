"""DecodeKernels: the compiled operators with names and types, and the buffers they work on.

Made by `kernel_loader.py`, called by `cuda_executor.py`. All work goes to torch's current stream;
no call synchronises or allocates, so each can be captured in a CUDA graph, load_plan() excepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_pat.decode_batch import Step
from sglang_pat.kernel_config import KernelConfig


class DeviceBuffers(NamedTuple):
    """Where a plan lies on the device, and what the kernels write besides their output. Graphs
    capture the addresses of these tensors, and of those of a step.

    plan: int32, laid out for `capacity` (plan_format.h), whose entries are in the order of
    PlanCapacity's fields. shared_slots: int32. partial_out: float32 `[num_partials, num_qo_heads,
    head_dim]`; partial_lse: float32 `[num_partials, num_qo_heads]`. num_draws: int32 `[1]`, 0
    between steps; not for two streams at once.
    """

    plan: torch.Tensor
    capacity: list[int]
    shared_slots: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_draws: torch.Tensor


class StagingBuffer:
    """Pinned memory in which a plan waits until it has been copied to the device.

    tensor: int32 `[size]`. array: the same memory. copied: handle of the event that load_plan()
    records behind the copy.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.array = self.tensor.numpy()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(device))  # before that it has no handle
        self.copied: int = self._copied.cuda_event

    def wait(self) -> None:
        """Until the memory may be written again. It is, unless the device is far behind."""
        # Not synchronize() at once: that lets go of the GIL.
        if not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()


class DecodeKernels:
    """The operators of one KernelConfig. ValueError on tensors that do not fit, before any launch.

    The contents of the plan are not checked: whoever writes it checks that it fits the buffers.
    """

    def __init__(self, operators: Any, config: KernelConfig) -> None:
        self.config = config
        # Overloads: torch would look for the one that fits the arguments in each call.
        self._load_plan = operators.load_plan.default
        self._decode = operators.decode.default

    def load_plan(self, staging: StagingBuffer, buffers: DeviceBuffers, step: Step) -> None:
        """Copy a plan to the device, and gather its shared slots out of the step's rows."""
        self._load_plan(
            staging.tensor,
            staging.copied,
            buffers.plan,
            buffers.capacity,
            step.req_to_token,
            step.req_pool_indices,
            buffers.shared_slots,
        )

    def decode(
        self,
        buffers: DeviceBuffers,
        step: Step,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        out_lse: torch.Tensor | None,
        sm_scale: float,
        logit_cap: float,
    ) -> None:
        """Attention of one layer under the loaded plan: pack_decode, then merge_partials. Writes
        `out`, and `out_lse` if given.

        q, out: `[num_requests, num_qo_heads, head_dim]`; k_cache, v_cache: `[num_slots,
        num_kv_heads, head_dim]`; out_lse: float32 `[num_requests, num_qo_heads]`, natural log.
        """
        self._decode(
            q,
            k_cache,
            v_cache,
            buffers.plan,
            buffers.capacity,
            buffers.shared_slots,
            step.req_to_token,
            step.req_pool_indices,
            step.seq_lens,
            out,
            out_lse,
            buffers.partial_out,
            buffers.partial_lse,
            buffers.num_draws,
            sm_scale,
            logit_cap,
        )
