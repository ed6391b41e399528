"""Verify steps of speculative decoding, as decode steps of more rows.

A verify step checks the draft tokens of each request, a chain behind the KV that it has. Each draft
token is a row that reads the request's KV up to and including itself. The rows of a request share
its path in the tree, and below it one more node: what the request had committed when its path was
read. What has been committed since, and the draft tokens before its own, each row reads live. There
is always a token that it reads live, so that a plan serves requests that grow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_pat.batch import IntArray, PrefixPaths
from sglang_pat.sglang.radix import (
    Path,
    RadixSource,
    Request,
    RequestFields,
    extended_path,
    new_node_id,
    prefix_paths,
)
from sglang_pat.sglang.view import RowShape

_ROWS = "_sglang_pat_draft_rows"  # attribute of a Req

# Committed tokens that the rows of a request may read one by one. Then all paths are read anew, and
# the step is planned: a fraction of a millisecond, every ten verify steps or so.
MAX_READ_APART = 32


class DraftRow:
    """One of the rows of a request, in place of the Req."""

    __slots__ = ("of", "req")

    def __init__(self, req: Request, of: _DraftRows) -> None:
        self.req = req
        self.of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self.req, name)


class _DraftRows:
    """The rows of a request, and the node below its path in the tree."""

    __slots__ = ("_node_id", "_span", "ids", "length", "req", "rows")

    def __init__(self, req: Request, count: int) -> None:
        self.req = req
        self.rows = [DraftRow(req, self) for _ in range(count)]
        self.ids = tuple(map(id, self.rows))
        self.length = -1  # that the request had committed when its path was read; -1: not yet
        self._node_id = -1
        self._span = (-1, -1)

    def extended(self, path: Path) -> Path:
        """The path, which is the tree's, and one more node up to `length`."""
        begin = path[-1][3] if path else 0
        if begin >= self.length:
            return path
        if self._span != (begin, self.length):
            self._node_id, self._span = new_node_id(), (begin, self.length)
        return extended_path(path, self._node_id, self.length)


class DraftBatch:
    """The rows of the last verify step. The same requests give the same list."""

    def __init__(self) -> None:
        self.reqs: list[Request] = []
        self._of: list[_DraftRows] = []
        self.rows: list[DraftRow] = []
        nothing: IntArray = np.zeros(0, dtype=np.int32)
        self._ends = nothing  # of the nodes

    def take(
        self, reqs: list[Request], count: int, committed: IntArray, moved: set[int]
    ) -> set[int]:
        """Go to the next step.

        Parameters
        ----------
        reqs : list of Req
            Its requests.
        count : int
            Rows of each.
        committed : int32 array
            How far the node of each request may reach: tokens that it has committed, and that each
            row goes beyond.
        moved : set of int
            `id()` of requests whose paths may no longer be those last read.

        Returns
        -------
        set of int
            `id()` of the rows whose paths are to be read anew.
        """
        if reqs is not self.reqs or len(self.rows) != len(reqs) * count:
            self.reqs = reqs
            self._of = [_rows_of(req, count) for req in reqs]
            self.rows = [row for each in self._of for row in each.rows]
            self._ends = np.array([each.length for each in self._of], dtype=np.int32)
        apart = committed - self._ends
        is_read = self._ends >= 0
        is_outgrown = bool((is_read & ((apart < 0) | (apart > MAX_READ_APART))).any())
        # All together, so that they are not outgrown one after the other, each with a plan.
        again = (apart != 0) if is_outgrown else ~is_read
        if moved:
            again |= np.fromiter((id(req) in moved for req in reqs), dtype=bool, count=len(reqs))
        anew: set[int] = set()
        self._ends[again] = committed[again]
        for i, end in zip(np.flatnonzero(again).tolist(), committed[again].tolist(), strict=True):
            rows = self._of[i]
            rows.length = end
            anew.update(rows.ids)
        return anew

    @property
    def longest(self) -> IntArray:
        """How much requests may have committed until their paths are read anew."""
        return self._ends + MAX_READ_APART


def _rows_of(req: Request, count: int) -> _DraftRows:
    rows: _DraftRows | None = getattr(req, _ROWS, None)
    if rows is None or len(rows.rows) != count:
        rows = _DraftRows(req, count)
        setattr(req, _ROWS, rows)
    return rows


class DraftSource:
    """A RadixSource of draft rows."""

    def __init__(self, source: RadixSource, req_to_token_pool: Any) -> None:
        """
        Parameters
        ----------
        source : RadixSource
            Reads the tree, for requests.
        req_to_token_pool : ReqToTokenPool
            SGLang's, with the slots of each request.
        """
        self._source = source
        self._pool = req_to_token_pool

    def key(self, reqs: Sequence[Request]) -> Hashable:
        return self._source.key(reqs)

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        of = [row.of for row in reqs]
        apart = list(dict.fromkeys(of))
        found = self._source.read([rows.req for rows in apart])
        paths = {rows: rows.extended(path) for rows, path in zip(apart, found, strict=True)}
        return [paths[rows] for rows in of]

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        return prefix_paths(self.read(reqs), num_rows)

    def shared_slots(self, req: Request) -> torch.Tensor:
        in_tree = self._source.shared_slots(req.req)
        row = self._pool.req_to_token[RequestFields.of(req).row(req)]
        rest = row[len(in_tree) : max(req.of.length, len(in_tree))]
        return torch.cat([in_tree, rest.to(in_tree)])


class RowTensors:
    """`req_pool_indices` and `seq_lens` of rows on the device: written in each step, as SGLang has
    them of requests.

    A captured graph needs memory that does not move: `reserved` rows. Without, each step has its
    own.
    """

    def __init__(self, shape: RowShape, device: torch.device, reserved: int | None = None) -> None:
        self._count = shape.per_request
        self._offsets = shape.offsets(device)
        self._reserved = None
        if reserved is not None:
            self._reserved = torch.zeros((2, reserved), dtype=torch.int64, device=device)

    def of(
        self, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the rows of these requests, whose lengths are without draft tokens."""
        count = len(seq_lens) * self._count
        buffer = self._reserved
        if buffer is None:
            buffer = torch.empty((2, count), dtype=torch.int64, device=seq_lens.device)
        rows, lens = (each[:count].view(-1, self._count) for each in buffer)
        rows.copy_(req_pool_indices[:, None])
        torch.add(seq_lens[:, None], self._offsets, out=lens)
        return rows.view(-1), lens.view(-1)
