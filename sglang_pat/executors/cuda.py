"""CudaExecutor: executes plans with the CUDA kernels.

A plan is written into pinned memory and copied to the device on the current stream. It takes effect
in order with the kernels of the last plan, and the host never waits for them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from sglang_pat._scheduler import PackScheduler
from sglang_pat.batch import Step
from sglang_pat.executors.kernels import DecodeKernels, DeviceBuffers, LoadedPlan, StagingBuffer
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.plan import BufferSizes, DecodePlan, write_plan

# Two more than the graphs that have a counter of their own; a server captures some 50. Of more,
# those that share one must not run at the same time.
_COUNTERS = 256

# Plans that may be under way to the device at once. Two would do for SGLang, which plans step N + 1
# while step N runs; one more absorbs jitter.
_RING = 3


class PlanOverflowError(ValueError):
    """A plan needs more than the buffers that were reserved. Nothing was launched."""


@dataclass(slots=True)
class _InBuffers:
    """Whose plan lies in the buffers. Siblings share it."""

    executor: CudaExecutor | None = None


class CudaExecutor:
    """Executes plans with the kernels of one (dtype, head_dim, v_head_dim) on one device.

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
        self._loaded: StagingBuffer | None = None  # where the last plan lies on the host
        self._allocate(reservation or BufferSizes())
        if device.type == "cuda":
            kernels.num_ctas(device)  # loads them: the first launch may be in a capture

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        """Send the scheduler's last plan to the device and gather its shared slots there. The
        following run()s, and replays of graphs that captured them, read the tensors of the step.
        """
        staging, plan = self._write(scheduler)
        if plan is None:
            self._make_room(scheduler)
            staging, plan = self._write(scheduler)
        assert plan is not None
        self._send(staging, step)
        return plan

    def reuse_plan(self, step: Step, *, gather: bool = False) -> None:
        """The last plan serves this step too: its tensors are read from now on. gather: read the
        slots of shared ranges again, too.
        """
        assert self._loaded is not None
        gather = gather and self._loaded.header.num_gather_spans > 0
        if self._in_buffers.executor is self and not gather:
            self.step = step
        else:
            self._send(self._loaded, step)

    def sibling(self) -> CudaExecutor:
        """One for other plans, executed in the same buffers. ValueError without a reservation."""
        if not self._reserved:
            raise ValueError("only buffers that never move can be shared: pass max_requests")
        sibling = copy.copy(self)
        sibling.step = sibling._loaded = None
        sibling._ring = self._new_ring(self._sizes)
        return sibling

    def _send(self, staging: StagingBuffer, step: Step) -> None:
        self.kernels.load_plan(staging, self.buffers, step)
        self._loaded = staging
        self._in_buffers.executor = self
        self.step = step

    def run(self, layer: LayerInputs) -> None:
        """One layer; writes its `out`, and `lse` if given."""
        assert self.step is not None
        self.kernels.decode(self.buffers, self.step, layer)

    def _write(self, scheduler: PackScheduler) -> tuple[StagingBuffer, DecodePlan | None]:
        staging = next(self._ring)
        staging.wait()
        return staging, write_plan(scheduler, self._sizes, staging.array)

    def _make_room(self, scheduler: PackScheduler) -> None:
        needed = BufferSizes.needed_by(scheduler)
        if self._reserved:
            raise PlanOverflowError(f"the plan needs {needed}; reserved are {self._sizes}")
        self._release()
        self._allocate(self._sizes.grown(needed))

    def _release(self) -> None:
        """Let the allocator reuse the buffers only behind the kernels under way."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        for buffer in self.buffers:
            if isinstance(buffer, torch.Tensor) and buffer.is_cuda:
                buffer.record_stream(stream)

    def _allocate(self, sizes: BufferSizes) -> None:
        plan_size = sizes.plan.layout()["size"]
        rows = (sizes.num_partials, self._num_qo_heads)
        v_head_dim = self.kernels.config.v_head_dim
        integers = partial(torch.zeros, dtype=torch.int32, device=self._device)
        empty = partial(torch.empty, device=self._device)
        self.buffers = DeviceBuffers(
            plan=integers(plan_size),
            capacity=sizes.plan,
            shared_slots=integers(sizes.num_shared_slots),
            partial_out=empty((*rows, v_head_dim), dtype=self.kernels.config.partial_dtype),
            partial_lse=empty(rows, dtype=torch.float32),
            counters=integers((_COUNTERS, 2)),
            loaded=LoadedPlan(self._stream()),
        )
        # Earlier ones may be dropped while they are being copied: load_plan() keeps their memory.
        self._ring = self._new_ring(sizes)
        self._sizes = sizes
        self._in_buffers = _InBuffers()

    def _stream(self) -> torch.cuda.Stream | None:
        """The stream that fills new buffers with zeros: the first plan is ordered behind it."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _new_ring(self, sizes: BufferSizes) -> Iterator[StagingBuffer]:
        plan_size = sizes.plan.layout()["size"]
        return cycle([StagingBuffer(plan_size, self._device) for _ in range(_RING)])
