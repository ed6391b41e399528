"""A plug-in of SGLang for tests that plants errors which pat could have.

The file that `PLANTED_ERROR_FILE` names contains the name of the active error, or nothing. Every
layer of every step reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

FILE = "PLANTED_ERROR_FILE"


def planted() -> str:
    """Return the name of the active error."""
    name = os.environ.get(FILE)
    return Path(name).read_text() if name else ""


def _scaled_logits(run: Any, layer: Any) -> Any:
    """Make the softmax scale 1% too large."""
    return run(layer._replace(sm_scale=layer.sm_scale * 1.01))


def _scaled_values(run: Any, layer: Any) -> Any:
    """Make V 1% too large, like a wrong scale of an fp8 pool."""
    out, lse = run(layer)
    return out * 1.01, lse


def _swapped_heads(run: Any, layer: Any) -> Any:
    """Swap two query heads of a group."""
    out, lse = run(layer)
    return out[:, [1, 0, *range(2, out.shape[1])]], lse


def _swapped_rows(run: Any, layer: Any) -> Any:
    """Swap the outputs of the last two requests of a batch."""
    out, lse = run(layer)
    if len(out) > 1:
        out = out[[*range(len(out) - 2), len(out) - 1, len(out) - 2]]
    return out, lse


def _rounded_outputs(run: Any, layer: Any) -> Any:
    """Round outputs to bfloat16."""
    out, lse = run(layer)
    return out.bfloat16().to(out.dtype), lse


OF_LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "scaled logits": _scaled_logits,
    "scaled values": _scaled_values,
    "swapped heads": _swapped_heads,
    "swapped rows": _swapped_rows,
    "rounded outputs": _rounded_outputs,
}


def _wrong_slot(slots: Any, plan: Any) -> None:
    """Replace one slot of a shared range by its neighbour."""
    if len(slots) > 40:
        slots[37] = slots[36]


OF_SLOTS: dict[str, Callable[[Any, Any], None]] = {"one wrong slot": _wrong_slot}

STALE = "stale path"  # slots of the previous plan
SHORT = "newest token missing"  # missing in each private range
LONG = "range one token too long"  # a shared range
MERGE = "unweighted merge"  # partials are merged without weights

KINDS = (*OF_LAYERS, *OF_SLOTS, STALE, SHORT, LONG, MERGE)


def register() -> None:
    """Install the errors. SGLang calls this in each process of the engine."""
    from sglang_pat.sglang.cpu import cuda_driver_is_present

    if cuda_driver_is_present():
        _plant_around_kernels()
    else:
        _plant_in_reference()


def _plant_in_reference() -> None:
    from sglang_pat.executors import reference

    run, gather_slots = reference.PlanExecution.run, reference.gather_slots
    group, merge = reference.PlanExecution._group, reference.merge_partials
    before: list[Any] = []

    def run_wrongly(self: Any, layer: Any) -> Any:
        wrong = OF_LAYERS.get(planted())
        return run(self, layer) if wrong is None else wrong(lambda it: run(self, it), layer)

    def gather_wrongly(plan: Any, *rest: Any) -> Any:
        slots = gather_slots(plan, *rest)
        wrong = OF_SLOTS.get(planted())
        if wrong is not None:
            wrong(slots, plan)
        if planted() == STALE and before and len(slots):
            count = min(len(slots), len(before[0]), 64)
            right, slots = slots, slots.clone()
            slots[:count] = before[0][:count]
            before[:] = [right]
        else:
            before[:] = [slots]
        return slots

    def group_wrongly(self: Any, ranges: Any, slots: Any, step: Any) -> Any:
        if planted() == SHORT:
            is_private = ranges.kv_request != reference.SHARED_KV
            fewer = ranges.num_tokens - (is_private & (ranges.num_tokens > 1))
            ranges = ranges._replace(num_tokens=fewer)
        if planted() == LONG:
            is_followed = (ranges.kv_request == reference.SHARED_KV) & (
                ranges.kv_begin + ranges.num_tokens < len(slots)
            )
            ranges = ranges._replace(num_tokens=ranges.num_tokens + is_followed)
        return group(self, ranges, slots, step)

    def merge_wrongly(out: Any, lse: Any, owner: Any, count: int) -> Any:
        return merge(out, lse.sign() if planted() == MERGE else lse, owner, count)

    reference.PlanExecution.run = run_wrongly  # type: ignore[method-assign]
    reference.gather_slots = gather_wrongly
    reference.PlanExecution._group = group_wrongly  # type: ignore[method-assign]
    reference.merge_partials = merge_wrongly


def _plant_around_kernels() -> None:
    """Install the errors on a GPU, around the kernels of eager steps."""
    import torch

    from sglang_pat.executors.cuda import CudaExecutor
    from sglang_pat.plan import SHARED_KV

    run, send, write = CudaExecutor.run, CudaExecutor._send, CudaExecutor._write
    before: list[Any] = []

    def write_wrongly(self: Any, scheduler: Any) -> Any:
        staging, plan = write(self, scheduler)
        if plan is not None and planted() == LONG:
            segments = plan.kv_segments
            is_followed = segments[:, 2] < plan.header.num_shared_slots
            segments[(segments[:, 0] == SHARED_KV) & is_followed, 2] += 1
        return staging, plan

    def send_wrongly(self: Any, staging: Any, step: Any) -> None:
        send(self, staging, step)
        slots = self.buffers.shared_slots[: self.buffers.loaded.num_shared_slots]
        wrong, right = OF_SLOTS.get(planted()), slots.clone()
        if wrong is not None:
            wrong(slots, None)
        if planted() == STALE and before:
            count = min(len(slots), len(before[0]), 64)
            slots[:count] = before[0][:count]
        before[:] = [right]

    def run_wrongly(self: Any, layer: Any) -> None:
        name, step, kernels = planted(), self.step, self.kernels

        def run_here(given: Any) -> Any:
            run(self, given)
            return given.out, given.lse

        def merge_unweighted(launch: Any) -> Any:
            def merge(*argument: Any) -> None:
                lse = self.buffers.partial_lse
                lse.copy_(torch.where(lse.isinf(), lse, 0.0))
                launch(*argument)

            return merge

        try:
            if name == SHORT:
                self.step = step._replace(seq_lens=(step.seq_lens - 1).clamp_(min=1))
            if name == MERGE:
                self.kernels = copy(kernels)
                self.kernels.merge_partials = [*map(merge_unweighted, kernels.merge_partials)]
            out, _ = OF_LAYERS.get(name, lambda run, layer: run(layer))(run_here, layer)
        finally:
            self.step, self.kernels = step, kernels
        if out is not layer.out:
            layer.out.copy_(out)

    CudaExecutor.run = run_wrongly  # type: ignore[method-assign]
    CudaExecutor._send = send_wrongly  # type: ignore[method-assign]
    CudaExecutor._write = write_wrongly  # type: ignore[method-assign]
