"""Rows of a step that are not requests: draft tokens, and the rows of beam searches.

Such rows belong to a request. They share its path in the tree, and below it one more node, up to a
position that the group of rows knows:

- Draft tokens: what the request had committed when its path was read. What has been committed
  since, and the draft tokens before its own, each row reads live. There is always a token that it
  reads live, so that a plan serves requests that grow.
- Beams (0.5.23): the end of the prompt. A search is one request, the leader, and rows without a
  Req that decode behind the batch's requests. SGLang copies the leader's slots of the prompt into
  these rows when it makes them. From the prompt's end on each row has slots of its own, which
  SGLang deals out again after each step. So plans keep: slots of the prompt never change, and those
  behind it are read in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sglang_pat.batch import IntArray, PrefixPaths
from sglang_pat.sglang.compat import RequestFields
from sglang_pat.sglang.tree.radix_paths import (
    Path,
    RadixSource,
    Request,
    extended_path,
    new_node_id,
    prefix_paths,
)

_GROUP = "_sglang_pat_rows"  # attribute of a BeamGroup

# Committed tokens that the rows of a request may read one by one. Then all paths are read again,
# and the step is planned: a fraction of a millisecond, every ten verify steps or so.
MAX_READ_APART = 32


@dataclass(frozen=True, slots=True)
class RowShape:
    """The rows of each request of a step, and what they read.

    Row `i` of a request reads its KV and `first + i * step` tokens more. SGLang's lengths of a
    decode step count the new token: its rows read nothing more.

    Attributes
    ----------
    per_request, first, step
        See above.
    are_drafts
        Whether the rows are draft tokens, one `RowGroup` per request.
    speculates
        Whether a request grows by any number of tokens from one step to the next.
    """

    per_request: int = 1
    first: int = 0
    step: int = 0
    are_drafts: bool = False
    speculates: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculates", self.are_drafts or self.first > 0)

    @classmethod
    def of_drafts(cls, count: int, *, are_chains: bool) -> RowShape:
        """Return the rows of `count` draft tokens per request.

        In a chain each reads all before it, and itself. In a tree each row reads the root, which is
        the first draft token; the attention to its branch is added
        (`speculative/tree_attention.py`).
        """
        return cls(count, 1, int(are_chains), True)

    @property
    def is_tree(self) -> bool:
        """True if the rows are drafts that may branch."""
        return self.are_drafts and self.step == 0

    def lengths(self, lengths: IntArray) -> IntArray:
        """Return what each row reads, for requests of these lengths; 0, of padding, stays 0."""
        rows = np.repeat(lengths, self.per_request)
        if self.step:
            rows += np.tile(self._offsets(), len(lengths))
        elif self.first:
            rows += np.int32(self.first)
        rows[np.repeat(lengths == 0, self.per_request)] = 0
        return rows

    def _offsets(self) -> IntArray:
        rows = np.arange(self.per_request, dtype=np.int32)
        return rows * np.int32(self.step) + np.int32(self.first)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """Return how many tokens more each row of a request reads: int64 `[per_request]`."""
        return torch.from_numpy(self._offsets().astype(np.int64)).to(device)


DECODE_ROWS = RowShape()


class RowTensors:
    """`req_pool_indices` and `seq_lens` of rows on the device, written in each step.

    SGLang has the same of requests.

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
        """Return those of the rows of these requests, whose lengths are without draft tokens."""
        count = len(seq_lens) * self._count
        buffer = self._reserved
        if buffer is None:
            buffer = torch.empty((2, count), dtype=torch.int64, device=seq_lens.device)
        rows, lens = (each[:count].view(-1, self._count) for each in buffer)
        rows.copy_(req_pool_indices[:, None])
        torch.add(seq_lens[:, None], self._offsets, out=lens)
        return rows.view(-1), lens.view(-1)


class Row:
    """A row of a request, in place of a Req. What it has not itself, the request has."""

    __slots__ = ("group", "kv", "rid")

    kv: Any
    rid: str

    def __init__(self, group: RowGroup) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group.req, name)


class _BeamKv:
    """In place of `Req.kv`: a beam has a row of its own in the table of slots."""

    __slots__ = ("leader", "req_pool_idx")

    def __init__(self, leader: Request, row: int) -> None:
        self.leader = leader
        self.req_pool_idx = row

    @property
    def cache_protected_len(self) -> int:
        length: int = self.leader.kv.cache_protected_len
        return length


class RowGroup:
    """The rows of a request, and the node below its path in the tree.

    Attributes
    ----------
    req
        The request.
    rows
        Its rows. The leader of beams is not among them, but shares the node.
    ids
        `id()` of each.
    end
        Where the node ends; -1: not known yet.
    """

    __slots__ = ("_node_id", "_span", "end", "ids", "req", "rows")

    def __init__(self, req: Request, count: int, end: int = -1) -> None:
        self.req = req
        self.rows = [Row(self) for _ in range(count)]
        self.ids = tuple(map(id, self.rows))
        self.end = end
        self._node_id = -1
        self._span = (-1, -1)

    @classmethod
    def of_beams(cls, leader: Request, rows: Sequence[int]) -> RowGroup:
        """Return the rows of a beam search. rows: where their slots are in SGLang's table."""
        group = cls(leader, len(rows), leader.beam_group.prompt_len)
        for number, (beam, row) in enumerate(zip(group.rows, rows, strict=True), start=2):
            beam.kv = _BeamKv(leader, row)
            beam.rid = f"{leader.rid}, beam {number}"
        return group

    def extended(self, path: Path) -> Path:
        """Return the path, which is the tree's, and one more node up to the end."""
        begin = path[-1][3] if path else 0
        if begin >= self.end:
            return path
        if self._span != (begin, self.end):
            self._node_id, self._span = new_node_id(), (begin, self.end)
        return extended_path(path, self._node_id, self.end)


def _with_group(req: Request | Row) -> tuple[Request, RowGroup | None]:
    """Return the request of a row, or the request, and the group; leaders of beams have one."""
    if isinstance(req, Row):
        return req.group.req, req.group
    return req, getattr(getattr(req, "beam_group", None), _GROUP, None)


class GroupSource:
    """A RadixSource of rows, and of requests among them."""

    def __init__(self, source: RadixSource, req_to_token_pool: Any) -> None:
        """Make the reader of rows.

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
        owners = [_with_group(req) for req in reqs]
        once = {id(owner): (owner, group) for owner, group in owners}  # its rows have one path
        found = self._source.read([owner for owner, _ in once.values()])
        paths = {
            key: path if group is None else group.extended(path)
            for (key, (_, group)), path in zip(once.items(), found, strict=True)
        }
        return [paths[id(owner)] for owner, _ in owners]

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        return prefix_paths(self.read(reqs), num_rows)

    def shared_slots(self, req: Request) -> torch.Tensor:
        owner, group = _with_group(req)
        in_tree = self._source.shared_slots(owner)
        if group is None:
            return in_tree
        row = self._pool.req_to_token[RequestFields.of(owner).row(owner)]
        rest = row[len(in_tree) : max(group.end, len(in_tree))]
        return torch.cat([in_tree, rest.to(in_tree)])


class DraftGroups:
    """The rows of the draft tokens of the last step. The same requests give the same list."""

    def __init__(self) -> None:
        self.reqs: list[Request] = []
        self.rows: list[Row] = []
        self._groups: list[RowGroup] = []
        nothing: IntArray = np.zeros(0, dtype=np.int32)
        self._ends = nothing  # of the groups' nodes

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
            `id()` of the rows whose paths are to be read again.
        """
        if reqs is not self.reqs or len(self.rows) != len(reqs) * count:
            # Requests that stay keep their rows.
            kept = {id(each.req): each for each in self._groups if len(each.rows) == count}
            self.reqs = reqs
            self._groups = [kept.get(id(req)) or RowGroup(req, count) for req in reqs]
            self.rows = [row for each in self._groups for row in each.rows]
            self._ends = np.array([each.end for each in self._groups], dtype=np.int32)
        apart = committed - self._ends
        is_read = self._ends >= 0
        is_outgrown = bool((is_read & ((apart < 0) | (apart > MAX_READ_APART))).any())
        # All together, so that they are not outgrown one after the other, each with a plan.
        again = (apart != 0) if is_outgrown else ~is_read
        if moved:
            again |= np.fromiter((id(req) in moved for req in reqs), dtype=bool, count=len(reqs))
        to_read: set[int] = set()
        self._ends[again] = committed[again]
        for i, end in zip(np.flatnonzero(again).tolist(), committed[again].tolist(), strict=True):
            group = self._groups[i]
            group.end = end
            to_read.update(group.ids)
        return to_read

    @property
    def longest(self) -> IntArray:
        """Tokens that requests may have committed until their paths are read again."""
        return self._ends + MAX_READ_APART


def batch_with_beams(
    reqs: Sequence[Request], beam_tail: Any, note_moved: Callable[[Iterable[Request]], object]
) -> list[Request]:
    """Return the requests of a batch in row order, rows of beams included.

    Parameters
    ----------
    reqs : sequence of Req
        The requests of the batch.
    beam_tail : BeamTail
        Tells which rows follow them.
    note_moved : callable
        Called with each leader whose rows are new: its path now goes on to the end of its prompt.
    """
    result = list(reqs)
    for entry in beam_tail.entries:
        beams: RowGroup | None = getattr(entry.group, _GROUP, None)
        if beams is None:
            leader = reqs[entry.leader_idx]
            beams = RowGroup.of_beams(leader, entry.group.member_rows_cpu.tolist())
            setattr(entry.group, _GROUP, beams)
            note_moved([leader])
        result += beams.rows
    return result
