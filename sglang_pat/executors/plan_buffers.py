"""The memory of plans: pinned memory on the host, buffers on the device, kernels' arguments."""

from __future__ import annotations

from functools import partial

import torch

from sglang_pat._launch_params import DecodeArgument, FillArgument, GatherArgument
from sglang_pat.batch import IntArray, Step
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.window_rows import Window, WindowRows
from sglang_pat.plan import BufferSizes, PlanHeader

# Length of PlanBuffers.counters. The first two entries are reserved, and each graph gets one of the
# others. Graphs that share a counter must not run at the same time, but a server captures only
# about 50 graphs.
COUNTERS = 256
NO_PLAN = PlanHeader(*[-1] * len(PlanHeader._fields))
_MAX_INT32 = 2**31 - 1


class StagingBuffer:
    """Pinned memory from which a plan is copied to the device.

    tensor: int32 `[size]`. array: the same memory as a numpy array.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.cuda.device(device):  # else another device's context would pin the memory
            self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.array: IntArray = self.tensor.numpy()

    def wait(self) -> None:
        """Block until the last copy has read the memory. Normally it has already done so."""
        # query() comes first, because synchronize() releases the GIL even if the copy has ended.
        if not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()

    def copy_to(self, plan: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Start to copy the memory to the device. Does not wait."""
        # copy_() keeps torch from reusing the pinned memory before the copy has read it.
        plan.copy_(self.tensor, non_blocking=True)
        self._copied.record(stream)

    @property
    def header(self) -> PlanHeader:
        """Return the header of the plan that is in the memory."""
        return PlanHeader(*self.array[: len(PlanHeader._fields)].tolist())


class PlanBuffers:
    """Device memory for a plan and for partials, and the arguments of the kernels.

    Executors that share buffers share this object.

    Graphs capture the addresses of these tensors and of a step's tensors. All graphs write to the
    same partials, so if two graphs run at the same time, they stop with an error.

    Attributes
    ----------
    sizes : BufferSizes
    plan : torch.Tensor
        int32, the plan in the layout for `sizes.plan` (plan_format.h). If layers have a window, the
        cuts follow the plan.
    window_rows : WindowRows or None
        The rows that layers with a window read in place of `req_to_token`.
    shared_slots : torch.Tensor
        int32, the KV slots of all shared ranges.
    partial_out : torch.Tensor
        `[num_partials, num_qo_heads, v_head_dim]`, in the dtype of the kernels.
    partial_lse : torch.Tensor
        float32 `[num_partials, num_qo_heads]`.
    counters : torch.Tensor
        int32 `[COUNTERS, 2]`. Row 0 identifies the launch that wrote the partials last. The
        other rows count the tickets that CTAs have drawn: row 1 outside of graphs, and one of the
        following rows in each graph. These counts are 0 between steps.
    staging : StagingBuffer or None
        The memory that was last copied to `plan`. It identifies the executor whose plan is there.
    loaded : PlanHeader
        The header of the plan in `plan`. All fields are -1 if there is no plan.
    stream : torch.cuda.Stream or None
        The last stream that used the tensors; at first the stream that fills them with zeros.
    """

    def __init__(
        self,
        sizes: BufferSizes,
        num_qo_heads: int,
        config: KernelConfig,
        device: torch.device,
        window: Window | None = None,
    ) -> None:
        integers = partial(torch.zeros, dtype=torch.int32, device=device)
        empty = partial(torch.empty, device=device)
        rows = (sizes.num_partials, num_qo_heads)
        self.sizes = sizes
        self.plan = integers(sizes.buffer_size)
        self.shared_slots = integers(sizes.num_shared_slots)
        self.partial_out = empty((*rows, config.v_head_dim), dtype=config.partial_dtype)
        self.partial_lse = empty(rows, dtype=torch.float32)
        self.counters = integers((COUNTERS, 2))
        self.staging: StagingBuffer | None = None
        self.loaded = NO_PLAN
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.entries = [*sizes.plan.entries().values()]
        self.window_rows = None if window is None else WindowRows(sizes.num_cuts, window, device)
        self.fill, self.gather, self.decode = FillArgument(), GatherArgument(), DecodeArgument()
        self.decode.set_buffers(
            self.plan.data_ptr(),
            self.entries,
            self.shared_slots.data_ptr(),
            self.partial_out.data_ptr(),
            self.partial_lse.data_ptr(),
        )
        self._step: Step | None = None  # the step for which the arguments are set

    def bind(self, step: Step) -> None:
        """Set the kernels' arguments for a step. ValueError if kernels cannot read its tensors."""
        if step is self._step:
            return
        table, rows, lens = step.req_to_token, step.req_pool_indices, step.seq_lens
        if table.stride(1) != 1:
            raise ValueError(f"req_to_token must have dense rows, got strides {table.stride()}")
        check_contiguous(rows, "req_pool_indices")
        check_contiguous(lens, "seq_lens")
        if self.window_rows is not None:
            self._bind_fill(self.window_rows, step)
            table, rows, lens, _ = self.window_rows.step(step)
        self.gather.set(
            self.plan.data_ptr(),
            self.entries,
            self.shared_slots.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            rows.data_ptr(),
            rows.dtype == torch.int64,
        )
        self.decode.set_step(*_arguments(table, rows, lens))
        self._step = step

    def _bind_fill(self, rows: WindowRows, step: Step) -> None:
        slot_map = rows.window.slot_map
        self.fill.set(
            self.plan[len(self.plan) - self.sizes.num_cuts :].data_ptr(),
            *_arguments(step.req_to_token, step.req_pool_indices, step.seq_lens),
            0 if slot_map is None else slot_map.data_ptr(),
            slot_map is not None and slot_map.dtype == torch.int64,
            len(step.seq_lens),
            rows.window.tokens,
            rows.window.chunked,
            rows.slots.data_ptr(),
            rows.seq_lens.data_ptr(),
        )

    def take_over(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the work on the buffers in the stream that used them last."""
        if self.stream == stream:
            return
        if self.stream is not None:
            stream.wait_stream(self.stream)
            # If these tensors are freed, torch must reuse their memory only after this stream's
            # work.
            tensors = [self.plan, self.shared_slots, self.partial_out, self.partial_lse]
            tensors.append(self.counters)
            if (rows := self.window_rows) is not None:
                tensors += [rows.slots, rows.seq_lens, rows.indices]
            for tensor in tensors:
                tensor.record_stream(stream)
        self.stream = stream


def _arguments(
    table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor
) -> tuple[int, int, int, int, bool, int, bool]:
    """Return what the kernels need to know of a step's three tensors, in their order."""
    return (
        table.data_ptr(),
        table.stride(0),
        min(table.shape[1], _MAX_INT32),
        rows.data_ptr(),
        rows.dtype == torch.int64,
        lens.data_ptr(),
        lens.dtype == torch.int64,
    )


def check_contiguous(tensor: torch.Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {[*tensor.shape]} and strides {tensor.stride()}"
        )
