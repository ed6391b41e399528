"""DecodeKernels: the compiled kernels of one variant, launched on torch's current stream.

Above the CUDA driver, below CudaExecutor. Every tensor is checked before anything is launched. The
host never waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_pat._launch_params import DecodeArgument, GatherArgument, SinkType
from sglang_pat._scheduler import PlanCapacity
from sglang_pat.batch import IntArray, Step
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.layer import LayerInputs, Scale
from sglang_pat.executors.loaded_kernels import LoadedKernels, capture_id, kv_map, load_kernels
from sglang_pat.plan import PlanHeader
from sglang_pat.support import MAX_GROUP_SIZE

_ALIGNMENT = 16  # bytes of an asynchronous copy
_GATHER_CHUNKS = 8  # CTAs that share a span
_SINK_TYPES = {
    torch.float32: SinkType.FLOAT32,
    torch.bfloat16: SinkType.BFLOAT16,
    torch.float16: SinkType.FLOAT16,
}
_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1


@dataclass(slots=True)
class LoadedPlan:
    """What the host knows of the plan on the device.

    Attributes
    ----------
    stream : torch.cuda.Stream or None
        The last one that used the buffers.
    num_requests, group_size, num_merges : int
        Of the plan. -1: there is none.
    """

    stream: torch.cuda.Stream | None
    num_requests: int = -1
    group_size: int = -1
    num_merges: int = -1


class DeviceBuffers(NamedTuple):
    """The device memory of a plan, and of what the kernels write besides their output.

    Graphs capture the addresses of these tensors, and of those of a step. Graphs share the
    partials: two of them that run at the same time stop with an error.

    Attributes
    ----------
    plan : torch.Tensor
        int32, laid out for `capacity` (plan_format.h).
    capacity : PlanCapacity
        Entries of each section.
    shared_slots : torch.Tensor
        int32, the KV slots of all shared ranges.
    partial_out : torch.Tensor
        `[num_partials, num_qo_heads, v_head_dim]`, in the dtype of the kernels.
    partial_lse : torch.Tensor
        float32 `[num_partials, num_qo_heads]`.
    counters : torch.Tensor
        int32 `[num_counters, 2]`. The first entry says whose partials are in the buffer. The others
        count the tickets that CTAs have drawn, one counter per graph; they are 0 between steps.
    loaded : LoadedPlan
        What lies in `plan`.
    """

    plan: torch.Tensor
    capacity: PlanCapacity
    shared_slots: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    counters: torch.Tensor
    loaded: LoadedPlan


class StagingBuffer:
    """Pinned memory in which a plan waits until it has been copied to the device.

    tensor: int32 `[size]`. array: the same memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.cuda.device(device):  # else it would be pinned in a context on another device
            self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.array: IntArray = self.tensor.numpy()

    def wait(self) -> None:
        """Block until the memory is reusable (normally at once)."""
        # Not synchronize() at once: that lets go of the GIL.
        if not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()

    def copy_to(self, plan: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Send the memory to the device, without waiting."""
        # copy_() keeps the pinned memory from being handed out again before it has been read.
        plan.copy_(self.tensor, non_blocking=True)
        self._copied.record(stream)

    @property
    def header(self) -> PlanHeader:
        """Of the plan in the memory."""
        return PlanHeader(*self.array[: len(PlanHeader._fields)].tolist())


class DecodeKernels:
    """The kernels of one KernelConfig. ValueError on tensors that do not fit, before any launch.

    The contents of the plan are not checked: whoever writes it checks that it fits the buffers.
    """

    def __init__(self, config: KernelConfig) -> None:
        self.config = config
        self._gather = GatherArgument()
        self._decode = DecodeArgument()
        # What the argument of pack_decode was last set to: checked once, not in each plan or layer.
        self._buffers: DeviceBuffers | None = None
        self._step: Step | None = None

    def num_ctas(self, device: torch.device) -> int:
        """How many CTAs of pack_decode the device runs at the same time: as many are launched.

        Loads the kernels, compiled if need be (`jit.py`), if that has not been done.
        """
        with torch.cuda.device(device):
            return self._kernels().num_ctas

    def load_plan(self, staging: StagingBuffer, buffers: DeviceBuffers, step: Step) -> None:
        """Copy a plan to the device, and gather its shared slots out of the step's rows."""
        plan, loaded = buffers.plan, buffers.loaded
        self._bind(buffers, step)
        if staging.tensor.shape != plan.shape:
            raise ValueError(
                f"the plan on the host must be as long as that on the device, {len(plan)} entries, "
                f"got {len(staging.tensor)}"
            )
        header = staging.header
        with torch.cuda.device(plan.device):
            stream = torch.cuda.current_stream()
            _take_over(loaded, stream, (plan, buffers.shared_slots))
            loaded.num_requests = -1  # none, until all is launched
            staging.copy_to(plan, stream)
            if header.num_gather_spans > 0:
                self._gather.set(
                    plan.data_ptr(),
                    _entries(buffers.capacity),
                    buffers.shared_slots.data_ptr(),
                    step.req_to_token.data_ptr(),
                    step.req_to_token.stride(0),
                    step.req_pool_indices.data_ptr(),
                    step.req_pool_indices.dtype == torch.int64,
                )
                kernels = self._kernels()
                grid = kernels.num_sms, _GATHER_CHUNKS
                kernels.gather_slots(self._gather.address, stream.cuda_stream, grid)
        loaded.num_requests = header.num_requests
        loaded.group_size = header.group_size
        loaded.num_merges = header.num_merges

    def decode(self, buffers: DeviceBuffers, step: Step, layer: LayerInputs) -> None:
        """Attention of one layer under the loaded plan: pack_decode, then merge_partials.

        Outside of a graph, a plan without merges needs no merge_partials, and a launch on another
        stream than the plan's waits for that one. A graph must be replayed on the stream on which
        plans are loaded, or the caller orders the two.
        """
        argument, loaded = self._decode, buffers.loaded
        self._bind(buffers, step)
        self._set_layer(buffers, layer)
        with torch.cuda.device(buffers.plan.device):
            self._set_maps(layer)
            stream = torch.cuda.current_stream()
            kernels = self._kernels()
            num_counters = len(buffers.counters)
            if torch.cuda.is_current_stream_capturing():
                # A graph has a counter of its own: it may be replayed while another one runs.
                counter = 2 + capture_id(stream.cuda_stream) % (num_counters - 2)
                # It is replayed with other plans, of as many requests.
                max_merges = min(buffers.capacity.entries()["num_merges"], len(layer.q))
            else:
                # Not in a graph, which is replayed on streams unknown here.
                _take_over(loaded, stream, _device_tensors(buffers))
                counter, max_merges = 1, loaded.num_merges
            argument.set_launch(buffers.counters.data_ptr(), counter, max_merges)
            pack_decode = kernels.pack_decode[layer.logit_cap > 0]
            pack_decode(argument.address, stream.cuda_stream, (kernels.num_ctas, 1))
            if max_merges > 0:
                most = kernels.facts.merge_ctas_per_sm * kernels.num_sms
                grid = min(max_merges * layer.q.shape[1], most), 1
                merge_partials = kernels.merge_partials[layer.sinks is not None]
                merge_partials(argument.address, stream.cuda_stream, grid)

    # --- checks ---

    def _bind(self, buffers: DeviceBuffers, step: Step) -> None:
        """Check buffers and step, and set the argument of pack_decode to them, where they are not
        the last ones."""
        if buffers is not self._buffers:
            self._set_buffers(buffers)
        if step is not self._step:
            self._set_step(step, buffers.plan)

    def _set_buffers(self, buffers: DeviceBuffers) -> None:
        self._buffers = None
        self._check_buffers(buffers)
        self._decode.set_buffers(
            buffers.plan.data_ptr(),
            _entries(buffers.capacity),
            buffers.shared_slots.data_ptr(),
            buffers.partial_out.data_ptr(),
            buffers.partial_lse.data_ptr(),
        )
        self._buffers = buffers

    def _set_step(self, step: Step, plan: torch.Tensor) -> None:
        self._step = None
        _check_step(step, plan)
        self._decode.set_step(
            step.req_to_token.data_ptr(),
            step.req_to_token.stride(0),
            min(step.req_to_token.shape[1], _MAX_INT32),
            step.req_pool_indices.data_ptr(),
            step.req_pool_indices.dtype == torch.int64,
            step.seq_lens.data_ptr(),
            step.seq_lens.dtype == torch.int64,
        )
        self._step = step

    def _set_layer(self, buffers: DeviceBuffers, layer: LayerInputs) -> None:
        q, k_cache, v_cache, out, lse, sm_scale, logit_cap, sinks, k_scale, v_scale = layer
        plan, loaded, dtype = buffers.plan, buffers.loaded, self.config.dtype
        kv_dtype = self.config.cache_dtype
        head_dim, v_head_dim = self.config.head_dim, self.config.v_head_dim
        _check_type(q, "q", dtype, 3)
        _check_type(k_cache, "k_cache", kv_dtype, 3)
        num_requests, num_q_heads, num_kv_heads = q.shape[0], q.shape[1], k_cache.shape[1]
        group_size = num_q_heads // num_kv_heads if num_kv_heads else 0
        if num_q_heads != group_size * num_kv_heads or not 1 <= group_size <= MAX_GROUP_SIZE:
            raise ValueError(
                f"query heads must be 1 to {MAX_GROUP_SIZE} times the KV heads, got {num_q_heads} "
                f"and {num_kv_heads}"
            )
        chunks = _check_rows(q, "q", dtype, num_q_heads, head_dim, plan) // _ALIGNMENT
        k_slot_bytes = _check_rows(k_cache, "k_cache", kv_dtype, num_kv_heads, head_dim, plan)
        v_slot_bytes = _check_rows(v_cache, "v_cache", kv_dtype, num_kv_heads, v_head_dim, plan)
        _check_rows(out, "out", dtype, num_q_heads, v_head_dim, plan)
        _check_shape(out, "out", (num_requests, num_q_heads, v_head_dim))
        _check_contiguous(out, "out", plan)
        if lse is not None:
            _check_type(lse, "lse", torch.float32, 2)
            _check_shape(lse, "lse", (num_requests, num_q_heads))
            _check_contiguous(lse, "lse", plan)
        if (loaded.num_requests, loaded.group_size) != (num_requests, group_size):
            raise ValueError(
                "q must have the requests and the group size of the plan, "
                f"{loaded.num_requests} and {loaded.group_size}, got {num_requests} and "
                f"{group_size}"
            )
        if buffers.partial_out.shape[1] != num_q_heads:
            raise ValueError(
                f"q must have the {buffers.partial_out.shape[1]} heads of the partials, "
                f"got {num_q_heads}"
            )
        assert self._step is not None
        num_rows = min(len(self._step.req_pool_indices), len(self._step.seq_lens))
        if num_rows < num_requests:
            raise ValueError(
                "req_pool_indices and seq_lens must have an entry for each of the "
                f"{num_requests} requests, got {len(self._step.req_pool_indices)} and "
                f"{len(self._step.seq_lens)}"
            )
        if num_requests * chunks > _MAX_INT32:
            raise ValueError(
                f"q must span at most {_MAX_INT32} times {_ALIGNMENT} bytes, got shape "
                f"{[*q.shape]} and strides {q.stride()}"
            )
        if sinks is not None:
            _check_device(sinks, "sinks", plan)
            _check_shape(sinks, "sinks", (num_q_heads,))
            _check_contiguous(sinks, "sinks", plan)
            if sinks.dtype not in _SINK_TYPES:
                allowed = " or ".join(map(_name, _SINK_TYPES))
                raise ValueError(f"sinks must be {allowed}, got {_name(sinks.dtype)}")
        if not 0 < sm_scale < math.inf:
            raise ValueError(f"sm_scale must be positive, got {sm_scale}")
        if not 0 <= logit_cap < math.inf:
            raise ValueError(f"logit_cap must be 0 (none) or positive, got {logit_cap}")
        self._decode.set_layer(
            q.data_ptr(),
            chunks,
            num_requests,
            num_q_heads,
            num_kv_heads,
            k_cache.data_ptr(),
            k_slot_bytes,
            v_cache.data_ptr(),
            v_slot_bytes,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            sm_scale,
            logit_cap,
            _number(k_scale),
            _number(v_scale),
            _address(k_scale),
            _address(v_scale),
            0 if sinks is None else sinks.data_ptr(),
            SinkType.FLOAT32 if sinks is None else _SINK_TYPES[sinks.dtype],
        )

    def _set_maps(self, layer: LayerInputs) -> None:
        """On the device of the caches, which have been checked."""
        if self.config.has_tensor_maps:
            self._decode.set_maps(_map_of(layer.k_cache), _map_of(layer.v_cache))

    def _check_buffers(self, buffers: DeviceBuffers) -> None:
        plan, counters = buffers.plan, buffers.counters
        if plan.device.type != "cuda":
            raise ValueError(f"plan must be on a CUDA device, got {plan.device}")
        _check_type(plan, "plan", torch.int32, 1)
        _check_contiguous(plan, "plan", plan)
        size = buffers.capacity.layout()["size"]
        if len(plan) < size:
            raise ValueError(f"plan must hold {size} entries for its capacity, got {len(plan)}")
        if plan.data_ptr() % _ALIGNMENT:
            raise ValueError(f"plan must be aligned to {_ALIGNMENT} bytes, got {plan.data_ptr()}")
        _check_type(buffers.shared_slots, "shared_slots", torch.int32, 1)
        _check_contiguous(buffers.shared_slots, "shared_slots", plan)
        _check_type(buffers.partial_out, "partial_out", self.config.partial_dtype, 3)
        _check_contiguous(buffers.partial_out, "partial_out", plan)
        rows = buffers.partial_out.shape[:2]
        _check_shape(buffers.partial_out, "partial_out", (*rows, self.config.v_head_dim))
        _check_type(buffers.partial_lse, "partial_lse", torch.float32, 2)
        _check_shape(buffers.partial_lse, "partial_lse", rows)
        _check_contiguous(buffers.partial_lse, "partial_lse", plan)
        _check_type(counters, "counters", torch.int32, 2)
        if len(counters) < 3 or counters.shape[1] != 2:
            raise ValueError(
                f"counters must have shape [n, 2] with n at least 3, got {[*counters.shape]}"
            )
        _check_contiguous(counters, "counters", plan)

    def _kernels(self) -> LoadedKernels:
        """The kernels on the current device."""
        return load_kernels(self.config, torch.cuda.current_device())


# --- tensors ---


def _entries(capacity: PlanCapacity) -> list[int]:
    return [*capacity.entries().values()]


def _device_tensors(buffers: DeviceBuffers) -> tuple[torch.Tensor, ...]:
    return (
        buffers.plan,
        buffers.shared_slots,
        buffers.partial_out,
        buffers.partial_lse,
        buffers.counters,
    )


def _take_over(
    loaded: LoadedPlan, stream: torch.cuda.Stream, tensors: tuple[torch.Tensor, ...]
) -> None:
    """Let `stream` wait for what the last stream has done with the buffers so far."""
    if loaded.stream == stream:
        return
    if loaded.stream is not None:
        stream.wait_stream(loaded.stream)
        # So that their memory, should they be freed, is not handed out again before this stream is
        # done with it.
        for tensor in tensors:
            tensor.record_stream(stream)
    loaded.stream = stream


def _check_step(step: Step, plan: torch.Tensor) -> None:
    table = step.req_to_token
    _check_type(table, "req_to_token", torch.int32, 2)
    _check_device(table, "req_to_token", plan)
    if table.stride(1) != 1:
        raise ValueError(f"req_to_token must have dense rows, got strides {table.stride()}")
    for name in ("req_pool_indices", "seq_lens"):
        tensor = getattr(step, name)
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
            raise ValueError(
                f"{name} must be 1-D int32 or int64, got {tensor.dim()}-D {_name(tensor.dtype)}"
            )
        _check_contiguous(tensor, name, plan)


def _number(scale: Scale) -> float:
    """A scale, if the host has it; else 1."""
    return 1.0 if isinstance(scale, torch.Tensor) else scale


def _address(scale: Scale) -> int:
    """Address of a scale on the device; 0 if the host has it."""
    return scale.data_ptr() if isinstance(scale, torch.Tensor) else 0


def _map_of(cache: torch.Tensor) -> int:
    size = cache.element_size()
    return kv_map(cache.data_ptr(), cache.shape, size, cache.stride(0) * size)


def _check_rows(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    plan: torch.Tensor,
) -> int:
    """Check `[rows, heads, head_dim]` whose rows may lie apart, but whose heads and columns are
    dense. Returns the bytes from row to row."""
    _check_type(tensor, name, dtype, 3)
    _check_device(tensor, name, plan)
    _, num_heads, num_columns = tensor.shape
    if num_heads != heads or num_columns != head_dim:
        raise ValueError(f"{name} must have shape [n, {heads}, {head_dim}], got {[*tensor.shape]}")
    row_stride, head_stride, column_stride = tensor.stride()
    if column_stride != 1 or head_stride != head_dim:
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
    return row_bytes


def _check_type(tensor: torch.Tensor, name: str, dtype: torch.dtype, dims: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != dims:
        raise ValueError(
            f"{name} must be {dims}-D {_name(dtype)}, got {tensor.dim()}-D {_name(tensor.dtype)}"
        )


def _check_shape(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {[*shape]}, got {[*tensor.shape]}")


def _check_contiguous(tensor: torch.Tensor, name: str, plan: torch.Tensor) -> None:
    _check_device(tensor, name, plan)
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {[*tensor.shape]} and strides {tensor.stride()}"
        )


def _check_device(tensor: torch.Tensor, name: str, plan: torch.Tensor) -> None:
    if tensor.device != plan.device:
        raise ValueError(f"{name} must be on {plan.device} like the plan, got {tensor.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
