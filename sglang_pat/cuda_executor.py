"""PackAttention's executor on NVIDIA GPUs: plan buffers in device memory, and the compiled kernels.

A plan is written into pinned memory and copied to the device on the current stream, so that it
takes effect in order with the kernels of the last plan and the host never waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_pat._scheduler import TILE_TABLE, PackScheduler, PlanCapacity
from sglang_pat.decode_batch import Step
from sglang_pat.decode_kernels import DeviceStep
from sglang_pat.decode_plan import CAPACITY_FIELDS, DecodePlan, fits, grown, write_plan
from sglang_pat.kernel_config import KernelConfig
from sglang_pat.kernel_loader import load_kernels

# Plans that may be under way to the device at once. Two would do for SGLang, which plans step N + 1
# while step N runs; one more absorbs jitter.
_RING = 3


class PlanOverflowError(ValueError):
    """A plan needs more than the buffers that were reserved. Nothing was launched."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Buffer sizes that are allocated once and never move, as CUDA graphs need them.

    plan: entries of the plan's sections. num_partials: partial slots, of 4 * num_qo_heads *
    (head_dim + 1) bytes each. num_shared_slots: KV tokens of all shared ranges, 4 bytes each.
    """

    plan: PlanCapacity
    num_partials: int
    num_shared_slots: int

    @classmethod
    def for_requests(
        cls, max_requests: int, num_shared_slots: int, num_workers: int, group_size: int
    ) -> Reservation:
        """Enough for paths of about five shared ranges per request. Cuts add at most a largest
        tile's requests for each worker (scheduler/kv_split.h).
        """
        cut_requests = num_workers * (TILE_TABLE[-1][0] // group_size)
        entries = 6 * max_requests + cut_requests
        return cls(
            plan=PlanCapacity(
                num_tickets=4 * max_requests + cut_requests,
                num_work_items=4 * max_requests + cut_requests,
                num_item_requests=entries,
                num_gather_spans=2 * max_requests,
                num_merges=max_requests,
            ),
            num_partials=entries,
            num_shared_slots=num_shared_slots,
        )


class CudaExecutor:
    """Executes plans with the kernels of one (dtype, head_dim) on one device.

    Without a reservation, buffers grow as needed. With one, their addresses never change, run() can
    be captured in a CUDA graph, and a plan that does not fit raises PlanOverflowError.
    """

    name = "cuda"

    def __init__(
        self,
        num_qo_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        reservation: Reservation | None,
    ) -> None:
        self._kernels = load_kernels(KernelConfig.for_device(dtype, head_dim, device))
        self._num_qo_heads = num_qo_heads
        self._head_dim = head_dim
        self._device = device
        self._reserved = reservation is not None
        self._ring = 0
        self._copied = [torch.cuda.Event() for _ in range(_RING)]  # type: ignore[no-untyped-call]
        self._step: DeviceStep | None = None
        self._plan: DecodePlan | None = None
        self._num_draws = torch.zeros(1, dtype=torch.int32, device=device)
        reservation = reservation or Reservation(PlanCapacity(), 0, 0)
        self._allocate_plan(reservation.plan)
        self._allocate_partials(reservation.num_partials)
        self._allocate_slots(reservation.num_shared_slots)

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        """Send the scheduler's last plan to the device and gather its shared slots there."""
        self._make_room(scheduler)
        self._ring = (self._ring + 1) % _RING
        self._copied[self._ring].synchronize()  # long done, unless the device is _RING plans behind
        host = self._hosts[self._ring]
        plan = write_plan(scheduler, self._capacity, host.numpy())
        self._plan_buffer.copy_(host, non_blocking=True)
        self._copied[self._ring].record(torch.cuda.current_stream(self._device))
        if plan.header.num_gather_spans:
            self._kernels.gather_slots(self._device_step(step))
        self._plan = plan
        return plan

    def begin_step(self, step: Step) -> None:
        """The following run()s, and replays of graphs that captured them, read these tensors."""
        assert self._plan is not None
        self._step = self._device_step(step)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sm_scale: float,
        logit_cap: float,
    ) -> None:
        """One layer; writes `out`, and `lse` if given."""
        assert self._step is not None
        self._kernels.decode(self._step, q, k_cache, v_cache, out, lse, sm_scale, logit_cap)

    def _device_step(self, step: Step) -> DeviceStep:
        return DeviceStep(
            plan=self._plan_buffer,
            capacity=self._capacity,
            shared_slots=self._shared_slots,
            req_to_token=step.req_to_token,
            req_pool_indices=step.req_pool_indices,
            seq_lens=step.seq_lens,
            partial_out=self._partial_out,
            partial_lse=self._partial_lse,
            num_draws=self._num_draws,
        )

    def _make_room(self, scheduler: PackScheduler) -> None:
        needed = scheduler.required_capacity()
        for what, need, have in (
            ("partials", scheduler.num_partials, len(self._partial_lse)),
            ("shared slots", scheduler.num_shared_slots, len(self._shared_slots)),
        ):
            if self._reserved and need > have:
                raise PlanOverflowError(f"the plan needs {need} {what}, {have} are reserved")
        if not fits(needed, self._capacity):
            if self._reserved:
                raise PlanOverflowError(
                    f"the plan needs {_sizes(needed)}, reserved are {_sizes(self._capacity)}"
                )
            self._allocate_plan(grown(needed))
        if scheduler.num_partials > len(self._partial_lse):
            self._allocate_partials(2 * scheduler.num_partials)
        if scheduler.num_shared_slots > len(self._shared_slots):
            self._allocate_slots(2 * scheduler.num_shared_slots)

    def _allocate_plan(self, capacity: PlanCapacity) -> None:
        self._capacity = capacity
        size = capacity.layout()["size"]
        self._plan_buffer = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]

    def _allocate_partials(self, num_partials: int) -> None:
        self._partial_lse = torch.empty(
            (num_partials, self._num_qo_heads), dtype=torch.float32, device=self._device
        )
        self._partial_out = torch.empty(
            (num_partials, self._num_qo_heads, self._head_dim),
            dtype=torch.float32,
            device=self._device,
        )

    def _allocate_slots(self, num_shared_slots: int) -> None:
        self._shared_slots = torch.zeros(num_shared_slots, dtype=torch.int32, device=self._device)


def _sizes(capacity: PlanCapacity) -> str:
    return ", ".join(f"{getattr(capacity, name)} {name[4:]}" for name in CAPACITY_FIELDS)
