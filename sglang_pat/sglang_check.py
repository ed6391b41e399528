"""SGLANG_PAT_DEBUG=1: check every decode step against SGLang's tree and request table.

Beside the pipeline: proves in the running engine what plan reuse relies on. It synchronises the
device, so it is for tests and for hunting a suspected error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sglang_pat.decode_batch import PrefixPaths
from sglang_pat.sglang_radix import RadixSource, Request, RequestFields


class _Planned(NamedTuple):
    """What the last plan was built from: per request, the KV positions where nodes end, and the
    slots."""

    boundaries: list[set[int]]
    slots: list[torch.Tensor]


class StepChecker:
    """Raises RuntimeError, naming the request, if a step does not find the KV that its plan
    reads."""

    def __init__(self) -> None:
        self._planned: _Planned | None = None

    def check(
        self,
        source: RadixSource,
        reqs: Sequence[Request],
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        *,
        plan_is_new: bool,
    ) -> None:
        """Call it after plan(), with the requests of the step in row order."""
        fields = RequestFields.of(reqs[0])
        rows = [fields.row(req) for req in reqs]
        if req_pool_indices[: len(rows)].tolist() != rows:
            raise RuntimeError(
                f"the batch has rows {req_pool_indices.tolist()}, its requests {rows}"
            )
        boundaries = _boundaries(source.paths(reqs, len(reqs)), len(reqs))
        slots = [
            # A copy on the CPU too: the table is rewritten in place.
            req_to_token[row, : max(ends, default=0)].to("cpu", torch.int64, copy=True)
            for row, ends in zip(rows, boundaries, strict=True)
        ]
        for req, row_slots in zip(reqs, slots, strict=True):
            if len(row_slots) and not torch.equal(row_slots, source.shared_slots(req).cpu()):
                raise RuntimeError(
                    f"request {req.rid}: its row and the radix tree hold other KV slots"
                )
        if plan_is_new:
            self._planned = _Planned(boundaries, slots)
        elif self._planned is not None:
            _check_reuse(reqs, self._planned, boundaries, slots)


def _check_reuse(
    reqs: Sequence[Request],
    planned: _Planned,
    boundaries: list[set[int]],
    slots: list[torch.Tensor],
) -> None:
    if len(planned.slots) != len(reqs):
        raise RuntimeError(f"a plan for {len(planned.slots)} requests was reused for {len(reqs)}")
    for index, req in enumerate(reqs):
        if not torch.equal(planned.slots[index], slots[index]):
            raise RuntimeError(
                f"request {req.rid}: a plan was reused though its shared KV has moved"
            )
        # A node that is split gains a boundary, which a reused plan may ignore; it never loses one.
        if not planned.boundaries[index] <= boundaries[index]:
            raise RuntimeError(
                f"request {req.rid}: a plan was reused though its path changed, from nodes that "
                f"end at {sorted(planned.boundaries[index])} to {sorted(boundaries[index])}"
            )


def _boundaries(paths: PrefixPaths, num_requests: int) -> list[set[int]]:
    begins: Any = paths.path_begin
    return [set(paths.kv_end[begins[i] : begins[i + 1]].tolist()) for i in range(num_requests)]
