"""CudaExecutor: executes plans with the CUDA kernels, on torch's current stream.

A plan is written into pinned memory and copied to the device on the current stream. By stream
order, the copy runs after all kernels that use the last plan, so the host never waits for those
kernels.

The caller (`PackAttention`) checks types, shapes and devices. This module checks what only the
kernels require: strides, alignment, and that the plan on the device fits the layer's queries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import cycle

import torch

from sglang_pat._launch_params import SinkType
from sglang_pat._scheduler import PackScheduler
from sglang_pat.batch import Step
from sglang_pat.executors.layer import LayerInputs, Scale
from sglang_pat.executors.loaded_kernels import LoadedKernels, capture_id, kv_map
from sglang_pat.executors.plan_buffers import (
    COUNTERS,
    NO_PLAN,
    PlanBuffers,
    StagingBuffer,
    check_contiguous,
)
from sglang_pat.executors.window_rows import Window, WindowRows
from sglang_pat.plan import BufferSizes, DecodePlan, PlanOverflowError, write_plan

# How many plans may be on their way to the device at the same time. SGLang plans step N + 1 while
# step N runs, so two would be enough. The third absorbs jitter.
_RING = 3

_ALIGNMENT = 16  # bytes of an asynchronous copy
_GATHER_CHUNKS = 8  # CTAs that copy one span together
_FILL_COLUMNS = 512  # columns of a window row that one CTA writes
_SINK_TYPES = {
    torch.float32: SinkType.FLOAT32,
    torch.bfloat16: SinkType.BFLOAT16,
    torch.float16: SinkType.FLOAT16,
}
_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1


class CudaExecutor:
    """Executes plans with the kernels of one KernelConfig on one device.

    Without a reservation, buffers grow as needed. With one, their addresses never change, run() can
    be captured in a CUDA graph, and a plan that does not fit raises PlanOverflowError.

    Outside of graphs, a launch waits for the stream that used the buffers last. If a graph is
    replayed on another stream than the one on which plans are loaded, the caller must order the
    two.
    """

    name = "cuda"

    def __init__(
        self,
        kernels: LoadedKernels,
        num_qo_heads: int,
        device: torch.device,
        reservation: BufferSizes | None,
        window: Window | None = None,
    ) -> None:
        self.kernels = kernels
        self._window = window
        self._num_qo_heads = num_qo_heads
        self._device = device
        self._reserved = reservation is not None
        self.step: Step | None = None
        self._sent: StagingBuffer | None = None  # host memory of the last plan
        self._allocate(reservation or BufferSizes())

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        """Send the scheduler's last plan to the device and gather its shared slots there.

        Later calls of run(), and replays of graphs that captured them, read the tensors of the
        step.
        """
        staging, plan = self._write(scheduler)
        if plan is None:
            self._make_room(scheduler)
            staging, plan = self._write(scheduler)
        assert plan is not None
        self._send(staging, step)
        return plan

    def reuse_plan(self, step: Step, *, gather: bool = False) -> None:
        """Use the last plan for this step too. From now on, run() reads the tensors of this step.

        gather: also read the slots of shared ranges again.
        """
        assert self._sent is not None
        gather = gather and self._sent.header.num_gather_spans > 0
        if self.buffers.staging is not self._sent or gather:
            self._send(self._sent, step)
            return
        if self.window_rows is not None:
            self.buffers.bind(step)
            with torch.cuda.device(self._device):
                stream = torch.cuda.current_stream()
                self.buffers.take_over(stream)
                self._fill(step, stream)
        self.step = step

    @property
    def window_rows(self) -> WindowRows | None:
        """The rows that layers with a window read in place of `req_to_token`."""
        return self.buffers.window_rows

    def refill(self) -> None:
        """Write the window rows of the current step. In a graph, each replay writes them again."""
        assert self.step is not None
        self.buffers.bind(self.step)
        with torch.cuda.device(self._device):
            self._fill(self.step, torch.cuda.current_stream())

    def _fill(self, step: Step, stream: torch.cuda.Stream) -> None:
        assert self.window_rows is not None
        grid = len(step.seq_lens), -(-self.window_rows.window.tokens // _FILL_COLUMNS)
        if grid[0] > 0:
            self.kernels.fill_rows(self.buffers.fill.address, stream.cuda_stream, grid)

    def sharing_buffers(self) -> CudaExecutor:
        """Return an executor whose plans use the same buffers, which must be reserved."""
        sibling = copy.copy(self)
        sibling.step = sibling._sent = None
        sibling._ring = self._new_ring()
        return sibling

    def run(self, layer: LayerInputs) -> None:
        """Compute attention of one layer: pack_decode, then merge_partials.

        Writes the layer's `out`, and its `lse` if given. Outside of graphs, skips merge_partials if
        the plan has no merges, and sends the plan again if another executor's plan is in the
        buffers.

        Raises
        ------
        ValueError
            The kernels cannot read the layout of a tensor, or the plan in the buffers belongs to
            another batch. Nothing is launched.
        """
        buffers, kernels = self.buffers, self.kernels
        assert self.step is not None
        assert self._sent is not None
        with torch.cuda.device(self._device):
            capturing = torch.cuda.is_current_stream_capturing()
            there = buffers.staging  # None if sending a plan has failed
            if not capturing and there is not None and there is not self._sent:
                self._send(self._sent, self.step)
            buffers.bind(self.step)
            self._set_layer(layer)
            if kernels.config.has_tensor_maps:
                buffers.decode.set_maps(_map_of(layer.k_cache), _map_of(layer.v_cache))
            stream = torch.cuda.current_stream()
            if capturing:
                # Each graph has its own counter, because graphs may run at the same time.
                counter = 2 + capture_id(stream.cuda_stream) % (COUNTERS - 2)
                # A replay may use another plan, but one with the same number of requests.
                max_merges = min(buffers.sizes.plan.entries()["num_merges"], len(layer.q))
            else:
                # Only outside of captures: during a capture, the stream of later replays is
                # unknown.
                buffers.take_over(stream)
                counter, max_merges = 1, buffers.loaded.num_merges
            argument = buffers.decode
            argument.set_launch(buffers.counters.data_ptr(), counter, max_merges)
            pack_decode = kernels.pack_decode[layer.logit_cap > 0]
            pack_decode(argument.address, stream.cuda_stream, (kernels.num_ctas, 1))
            if max_merges > 0:
                most = kernels.facts.merge_ctas_per_sm * kernels.num_sms
                merge_rows = max_merges * layer.q.shape[1] * kernels.facts.merge_slices
                grid = min(merge_rows, most), 1
                merge_partials = kernels.merge_partials[layer.sinks is not None]
                merge_partials(argument.address, stream.cuda_stream, grid)

    def _set_layer(self, layer: LayerInputs) -> None:
        q, k_cache, v_cache, out, lse = layer.q, layer.k_cache, layer.v_cache, layer.out, layer.lse
        k_scale, v_scale, sinks = layer.k_scale, layer.v_scale, layer.sinks
        num_requests, num_q_heads, num_kv_heads = q.shape[0], q.shape[1], k_cache.shape[1]
        loaded, group_size = self.buffers.loaded, num_q_heads // num_kv_heads
        if (loaded.num_requests, loaded.group_size) != (num_requests, group_size):
            raise ValueError(
                "q must have the requests and the group size of the plan, "
                f"{loaded.num_requests} and {loaded.group_size}, got {num_requests} and "
                f"{group_size}"
            )
        self._set_queries(layer)
        k_slot_bytes, v_slot_bytes = _row_bytes(k_cache, "k_cache"), _row_bytes(v_cache, "v_cache")
        check_contiguous(out, "out")
        _row_bytes(out, "out")
        if sinks is not None:
            check_contiguous(sinks, "sinks")
        self.buffers.decode.set_layer(
            num_requests,
            num_q_heads,
            num_kv_heads,
            k_cache.data_ptr(),
            k_slot_bytes,
            v_cache.data_ptr(),
            v_slot_bytes,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            layer.sm_scale,
            layer.logit_cap,
            _number(k_scale),
            _number(v_scale),
            _address(k_scale),
            _address(v_scale),
            0 if sinks is None else sinks.data_ptr(),
            SinkType.FLOAT32 if sinks is None else _SINK_TYPES[sinks.dtype],
        )

    def _set_queries(self, layer: LayerInputs) -> None:
        config, q, rope = self.kernels.config, layer.q, layer.q_rope
        if not config.is_latent:
            _row_bytes(q, "q")
            self.buffers.decode.set_queries(q.data_ptr(), *_query_chunks(q, "q"), 0, 0, 0)
            return
        strides = _query_chunks(q, "q")
        if rope is None:
            address = q.data_ptr() + config.v_head_dim * q.element_size()
            self.buffers.decode.set_queries(q.data_ptr(), *strides, address, *strides)
        else:
            rope_strides = _query_chunks(rope, "q_rope")
            self.buffers.decode.set_queries(q.data_ptr(), *strides, rope.data_ptr(), *rope_strides)

    def _send(self, staging: StagingBuffer, step: Step) -> None:
        """Copy a plan to the device, and gather its shared slots from the step's `req_to_token`."""
        buffers, kernels = self.buffers, self.kernels
        buffers.bind(step)
        header = staging.header
        buffers.staging, buffers.loaded = None, NO_PLAN  # set again when all is launched
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            buffers.take_over(stream)
            staging.copy_to(buffers.plan, stream)
            if self.window_rows is not None:
                self._fill(step, stream)
            if header.num_gather_spans > 0:
                grid = kernels.num_sms, _GATHER_CHUNKS
                kernels.gather_slots(buffers.gather.address, stream.cuda_stream, grid)
        buffers.staging, buffers.loaded = staging, header
        self._sent, self.step = staging, step

    def _write(self, scheduler: PackScheduler) -> tuple[StagingBuffer, DecodePlan | None]:
        staging = next(self._ring)
        staging.wait()
        return staging, write_plan(scheduler, self.buffers.sizes, staging.array)

    def _make_room(self, scheduler: PackScheduler) -> None:
        needed, sizes = BufferSizes.needed_by(scheduler), self.buffers.sizes
        if self._reserved:
            raise PlanOverflowError(f"the plan needs {needed}; reserved are {sizes}")
        self._allocate(sizes.grown(needed))

    def _allocate(self, sizes: BufferSizes) -> None:
        self.buffers = PlanBuffers(
            sizes, self._num_qo_heads, self.kernels.config, self._device, self._window
        )
        # Old staging buffers may be dropped while they are being copied: copy_to() keeps their
        # memory.
        self._ring = self._new_ring()

    def _new_ring(self) -> Iterator[StagingBuffer]:
        plan_size = len(self.buffers.plan)
        return cycle([StagingBuffer(plan_size, self._device) for _ in range(_RING)])


def _number(scale: Scale) -> float:
    """Return the scale if it is a number, else 1."""
    return 1.0 if isinstance(scale, torch.Tensor) else scale


def _address(scale: Scale) -> int:
    """Return the device address of the scale if it is a tensor, else 0."""
    return scale.data_ptr() if isinstance(scale, torch.Tensor) else 0


def _map_of(cache: torch.Tensor) -> int:
    size = cache.element_size()
    return kv_map(cache.data_ptr(), cache.shape, size, cache.stride(0) * size)


def _query_chunks(q: torch.Tensor, name: str) -> tuple[int, int]:
    """Return the row and head strides of `q`, `[rows, heads, columns]`, in 16-byte chunks.

    Raises ValueError unless columns are dense, rows are aligned, and int32 can count all chunks.
    """
    size = q.element_size()
    row_bytes, head_bytes = q.stride(0) * size, q.stride(1) * size
    if q.stride(2) != 1 or any(n % _ALIGNMENT for n in (q.data_ptr(), row_bytes, head_bytes)):
        raise ValueError(
            f"{name} must have dense columns and rows aligned to {_ALIGNMENT} bytes, got address "
            f"{q.data_ptr()} and strides {q.stride()}"
        )
    if q.shape[0] * row_bytes + q.shape[1] * head_bytes > _MAX_INT32 * _ALIGNMENT:
        raise ValueError(
            f"{name} must span at most {_MAX_INT32} times {_ALIGNMENT} bytes, got shape "
            f"{[*q.shape]} and strides {q.stride()}"
        )
    return row_bytes // _ALIGNMENT, head_bytes // _ALIGNMENT


def _row_bytes(tensor: torch.Tensor, name: str) -> int:
    """Return the row stride of `tensor`, `[rows, heads, columns]`, in bytes.

    Raises ValueError unless the heads of a row are dense and rows are aligned. Gaps between rows
    are allowed.
    """
    _, num_heads, num_columns = tensor.shape
    row_stride, head_stride, column_stride = tensor.stride()
    if column_stride != 1 or (num_heads > 1 and head_stride != num_columns):
        raise ValueError(f"{name} must have dense heads, got strides {tensor.stride()}")
    row_bytes = row_stride * tensor.element_size()
    if tensor.data_ptr() % _ALIGNMENT or row_bytes % _ALIGNMENT:
        raise ValueError(
            f"{name} must be aligned to {_ALIGNMENT} bytes, got address {tensor.data_ptr()} and "
            f"row stride {row_bytes} bytes"
        )
    if not 0 < row_bytes <= _MAX_UINT32:
        raise ValueError(
            f"{name} must have a row stride of 1 to {_MAX_UINT32} bytes, got {row_bytes}"
        )
    # kv_stages.cuh counts 16-byte chunks in 32 bits.
    if tensor.shape[0] * row_bytes > _MAX_UINT32 * _ALIGNMENT:
        raise ValueError(
            f"{name} must span at most {_MAX_UINT32} times {_ALIGNMENT} bytes, got shape "
            f"{[*tensor.shape]} and strides {tensor.stride()}"
        )
    return row_bytes
