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
from typing import Any, NamedTuple

import torch

from sglang_pat._scheduler import PackScheduler
from sglang_pat.batch import Step
from sglang_pat.executors.jit import KernelConfig, load_operators
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.plan import BufferSizes, DecodePlan, write_plan


class DeviceBuffers(NamedTuple):
    """The device memory of a plan, and of what the kernels write besides their output.

    Graphs capture the addresses of these tensors, and of those of a step. Graphs share the
    partials: two of them that run at the same time stop with an error.

    Attributes
    ----------
    plan : torch.Tensor
        int32, laid out for `capacity` (plan_format.h).
    capacity : list of int
        Entries of each section, in the order of PlanCapacity's fields.
    shared_slots : torch.Tensor
        int32, the KV slots of all shared ranges.
    partial_out, partial_lse : torch.Tensor
        float32 `[num_partials, num_qo_heads, v_head_dim]` and `[num_partials, num_qo_heads]`.
    counters : torch.Tensor
        int32 `[num_counters, 2]`. The first entry says whose partials are in the buffer. The others
        count the tickets that CTAs have drawn, one counter per graph; they are 0 between steps.
    loaded : torch.Tensor
        int64 `[4]` on the host: the last stream of the plan, and its sizes.
    """

    plan: torch.Tensor
    capacity: list[int]
    shared_slots: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    counters: torch.Tensor
    loaded: torch.Tensor


class StagingBuffer:
    """Pinned memory in which a plan waits until it has been copied to the device.

    tensor: int32 `[size]`. array: the same memory. copied: handle of the event that load_plan()
    records behind the copy.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.cuda.device(device):  # else it would be pinned in a context on another device
            self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))  # before that it has no handle
        self.array = self.tensor.numpy()
        self.copied: int = self._copied.cuda_event

    def wait(self) -> None:
        """Block until the memory is reusable (normally at once)."""
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
        self._num_ctas = operators.num_ctas.default

    @classmethod
    def load(cls, config: KernelConfig) -> DecodeKernels:
        """The operators of `config`, compiled if need be (`jit.py`)."""
        return cls(load_operators(config), config)

    def num_ctas(self, device: torch.device) -> int:
        """How many CTAs of pack_decode the device runs at the same time: as many are launched."""
        count: int = self._num_ctas(device)
        return count

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
            buffers.loaded,
        )

    def decode(self, buffers: DeviceBuffers, step: Step, layer: LayerInputs) -> None:
        """Attention of one layer under the loaded plan: pack_decode, then merge_partials.

        Outside of a graph, a plan without merges needs no merge_partials, and a launch on another
        stream than the plan's waits for that one. A graph must be replayed on the stream on which
        plans are loaded, or the caller orders the two.
        """
        q, k_cache, v_cache, out, out_lse, sm_scale, logit_cap, sinks = layer
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
            buffers.counters,
            buffers.loaded,
            sm_scale,
            logit_cap,
            sinks,
        )


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

    def reuse_plan(self, step: Step) -> None:
        """The last plan serves this step too: its tensors are read from now on."""
        if self._in_buffers.executor is self:
            self.step = step
        else:
            assert self._loaded is not None
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
        floats = partial(torch.empty, dtype=torch.float32, device=self._device)
        self.buffers = DeviceBuffers(
            plan=integers(plan_size),
            capacity=[*sizes.plan.entries().values()],
            shared_slots=integers(sizes.num_shared_slots),
            partial_out=floats((*rows, v_head_dim)),
            partial_lse=floats(rows),
            counters=integers((_COUNTERS, 2)),
            loaded=torch.tensor([self._stream(), -1, -1, -1], dtype=torch.int64),  # no plan
        )
        # Earlier ones may be dropped while they are being copied: load_plan() keeps their memory.
        self._ring = self._new_ring(sizes)
        self._sizes = sizes
        self._in_buffers = _InBuffers()

    def _stream(self) -> int:
        """The stream that fills new buffers with zeros: the first plan is ordered behind it."""
        if self._device.type != "cuda":
            return -1
        handle: int = torch.cuda.current_stream(self._device).cuda_stream
        return handle

    def _new_ring(self, sizes: BufferSizes) -> Iterator[StagingBuffer]:
        plan_size = sizes.plan.layout()["size"]
        return cycle([StagingBuffer(plan_size, self._device) for _ in range(_RING)])
