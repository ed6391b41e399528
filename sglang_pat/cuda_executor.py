"""PackAttention's executor on NVIDIA GPUs: plan buffers in device memory, and the compiled kernels.

A plan is written into pinned memory and copied to the device on the current stream, so that it
takes effect in order with the kernels of the last plan and the host never waits for them.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch

from sglang_pat._scheduler import PackScheduler
from sglang_pat.buffer_sizes import CAPACITY_FIELDS, BufferSizes
from sglang_pat.decode_batch import Step
from sglang_pat.decode_kernels import DecodeKernels, DeviceBuffers, StagingBuffer
from sglang_pat.decode_plan import DecodePlan, write_plan

# Plans that may be under way to the device at once. Two would do for SGLang, which plans step N + 1
# while step N runs; one more absorbs jitter.
_RING = 3


class PlanOverflowError(ValueError):
    """A plan needs more than the buffers that were reserved. Nothing was launched."""


class CudaExecutor:
    """Executes plans with the kernels of one (dtype, head_dim) on one device.

    Without a reservation, buffers grow as needed. With one, their addresses never change, run() can
    be captured in a CUDA graph, and a plan that does not fit raises PlanOverflowError.
    """

    name = "cuda"

    def __init__(
        self,
        kernels: DecodeKernels,
        num_qo_heads: int,
        device: torch.device,
        reservation: BufferSizes | None,
    ) -> None:
        self.kernels = kernels
        self._num_qo_heads = num_qo_heads
        self._device = device
        self._reserved = reservation is not None
        self.step: Step | None = None
        self._allocate(reservation or BufferSizes())

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        """Send the scheduler's last plan to the device and gather its shared slots there. The
        following run()s, and replays of graphs that captured them, read the tensors of the step.
        """
        staging, plan = self._write(scheduler)
        if plan is None:
            self._make_room(scheduler)
            staging, plan = self._write(scheduler)
        assert plan is not None
        self.kernels.load_plan(staging, self.buffers, step)
        self.step = step
        return plan

    def reuse_plan(self, step: Step) -> None:
        """The plan in force serves this step too: its tensors are read from now on."""
        self.step = step

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
        assert self.step is not None
        self.kernels.decode(
            self.buffers, self.step, q, k_cache, v_cache, out, lse, sm_scale, logit_cap
        )

    def _write(self, scheduler: PackScheduler) -> tuple[StagingBuffer, DecodePlan | None]:
        staging = next(self._ring)
        staging.wait()
        return staging, write_plan(scheduler, self._sizes, staging.array)

    def _make_room(self, scheduler: PackScheduler) -> None:
        needed = BufferSizes.needed_by(scheduler)
        if self._reserved:
            raise PlanOverflowError(f"the plan needs {needed}; reserved are {self._sizes}")
        self._allocate(self._sizes.grown(needed))

    def _allocate(self, sizes: BufferSizes) -> None:
        plan_size = sizes.plan.layout()["size"]
        rows = (sizes.num_partials, self._num_qo_heads)
        head_dim = self.kernels.config.head_dim
        integers = partial(torch.zeros, dtype=torch.int32, device=self._device)
        floats = partial(torch.empty, dtype=torch.float32, device=self._device)
        self.buffers = DeviceBuffers(
            plan=integers(plan_size),
            capacity=[getattr(sizes.plan, name) for name in CAPACITY_FIELDS],
            shared_slots=integers(sizes.num_shared_slots),
            partial_out=floats((*rows, head_dim)),
            partial_lse=floats(rows),
            num_draws=integers(1),
        )
        # Earlier ones may be dropped while they are being copied: load_plan() keeps their memory.
        self._ring = cycle([StagingBuffer(plan_size, self._device) for _ in range(_RING)])
        self._sizes = sizes
