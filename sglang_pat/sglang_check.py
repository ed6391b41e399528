"""SGLANG_PAT_DEBUG=1: check every decode step against SGLang's tree and request table.

Beside the pipeline: proves in the running engine what kept paths and plan reuse rely on. It
synchronises the device, so it is for tests and for hunting a suspected error.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from sglang_pat._scheduler import PrefixForest
from sglang_pat.decode_batch import IntArray, PrefixPaths
from sglang_pat.sglang_radix import RadixSource, Request, RequestFields

# The nodes of a path, as (node id, end). The lower part of a node that is split keeps both.
_Ends = list[tuple[int, int]]


class _Planned(NamedTuple):
    """What the last plan was built from: the signature of the requests, and the slots of each."""

    signature: Hashable
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
        forest: PrefixForest,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        *,
        plan_is_new: bool,
    ) -> None:
        """Call it after plan(), with the requests of the step in row order and their forest."""
        fields = RequestFields.of(reqs[0])
        rows = [fields.row(req) for req in reqs]
        if req_pool_indices[: len(rows)].tolist() != rows:
            raise RuntimeError(
                f"the batch has rows {req_pool_indices.tolist()}, its requests {rows}"
            )
        in_tree = _ends(source.paths(reqs, len(reqs)))
        _check_kept(reqs, forest, in_tree)
        slots = [
            # A copy on the CPU too: the table is rewritten in place.
            req_to_token[row, : ends[-1][1] if ends else 0].to("cpu", torch.int64, copy=True)
            for row, ends in zip(rows, in_tree, strict=True)
        ]
        for req, row_slots in zip(reqs, slots, strict=True):
            if len(row_slots) and not torch.equal(row_slots, source.shared_slots(req).cpu()):
                raise RuntimeError(
                    f"request {req.rid}: its row and the radix tree hold other KV slots"
                )
        now = _Planned(source.key(reqs), slots)
        if not plan_is_new and self._planned is not None:
            _check_reuse(reqs, self._planned, now)
        self._planned = now


def check_growth(before: IntArray, now: IntArray) -> None:
    """Raises RuntimeError unless each length, 0 of padding aside, is one more than before: what
    repeated steps rely on (`repeated_steps.py`). int32 `[num_rows]`, of one batch in two steps.
    """
    if not np.array_equal(now, np.where(before > 0, before + 1, 0)):
        raise RuntimeError(
            f"the same requests had lengths {before.tolist()} in the last step and have "
            f"{now.tolist()} in this one"
        )


def _check_kept(reqs: Sequence[Request], forest: PrefixForest, in_tree: list[_Ends]) -> None:
    """The forest's paths must be those of the tree, but for splits."""
    kept = [[(node_id, end) for node_id, _, end in path] for path in forest.paths()]
    if len(kept) != len(reqs):
        raise RuntimeError(f"the paths of {len(kept)} requests were kept for {len(reqs)}")
    for req, ours, theirs in zip(reqs, kept, in_tree, strict=True):
        if not set(ours) <= set(theirs) or ours[-1:] != theirs[-1:]:
            raise RuntimeError(
                f"request {req.rid}: its path was kept though it changed, from nodes and ends "
                f"{ours} to {theirs}"
            )


def _check_reuse(reqs: Sequence[Request], planned: _Planned, now: _Planned) -> None:
    if len(planned.slots) != len(reqs):
        raise RuntimeError(f"a plan for {len(planned.slots)} requests was reused for {len(reqs)}")
    for req, before, after in zip(reqs, planned.slots, now.slots, strict=True):
        if not torch.equal(before, after):
            raise RuntimeError(
                f"request {req.rid}: a plan was reused though its shared KV has moved"
            )
    if planned.signature != now.signature:
        raise RuntimeError(
            "a plan was reused though its requests, their rows, last nodes or protected lengths "
            f"changed from {planned.signature} to {now.signature}"
        )


def _ends(paths: PrefixPaths) -> list[_Ends]:
    nodes = list(zip(paths.node_id.tolist(), paths.kv_end.tolist(), strict=True))
    return [nodes[begin:end] for begin, end in pairwise(paths.path_begin.tolist())]
