"""Beams: the rows of SGLang's beam search, as requests that share their prompt (0.5.23).

A beam search is one request, the leader, and rows without a `Req` that decode behind the batch's
requests. SGLang copies the leader's slots of the prompt into these rows when it makes them. From
the prompt's end on each row has slots of its own, which SGLang deals out anew among the rows after
each step. So plans keep: slots of the prompt never change, and those behind it are read in each
step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from sglang_pat.batch import PrefixPaths
from sglang_pat.sglang.radix import (
    Path,
    RadixSource,
    Request,
    extended_path,
    new_node_id,
    prefix_paths,
)

_BEAMS = "_sglang_pat_beams"  # attribute of a BeamGroup


class _Place:
    """In place of `Req.kv`."""

    __slots__ = ("leader", "req_pool_idx")

    def __init__(self, leader: Request, row: int) -> None:
        self.leader = leader
        self.req_pool_idx = row

    @property
    def cache_protected_len(self) -> int:
        length: int = self.leader.kv.cache_protected_len
        return length


class BeamRow:
    """A row of a beam search, in place of a Req: its path in the tree is the leader's."""

    __slots__ = ("beam_group", "kv", "leader", "rid")

    def __init__(self, leader: Request, row: int, number: int) -> None:
        self.leader = leader
        self.beam_group = leader.beam_group
        self.rid = f"{leader.rid}, beam {number}"
        self.kv = _Place(leader, row)

    @property
    def last_node(self) -> Any:
        return self.leader.last_node


class _Beams:
    """The rows of a beam search, and the part of its prompt that the tree does not hold."""

    def __init__(self, leader: Request, rows: Iterable[int]) -> None:
        self.leader = leader
        self.rows = [BeamRow(leader, row, i) for i, row in enumerate(rows, start=2)]
        self.prompt_end: int = leader.beam_group.prompt_len
        self._node_id = -1
        self._begin = -1

    def extended(self, path: Path) -> Path:
        """The path, which is the tree's, and one more node up to the end of the prompt."""
        begin = path[-1][3] if path else 0
        if begin >= self.prompt_end:
            return path
        if begin != self._begin:  # another node, should the tree's part ever change
            self._node_id, self._begin = new_node_id(), begin
        return extended_path(path, self._node_id, self.prompt_end)


def batch_with_beams(
    reqs: Sequence[Request], beam_tail: Any, note_moved: Callable[[list[Request]], object]
) -> list[Request]:
    """The requests of a batch in row order, rows of beams included.

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
        beams: _Beams | None = getattr(entry.group, _BEAMS, None)
        if beams is None:
            leader = reqs[entry.leader_idx]
            beams = _Beams(leader, entry.group.member_rows_cpu.tolist())
            setattr(entry.group, _BEAMS, beams)
            note_moved([leader])
        result += beams.rows
    return result


class BeamSource:
    """A RadixSource that knows beams: their paths, and their leaders', end with the prompt."""

    def __init__(self, source: RadixSource, req_to_token: torch.Tensor) -> None:
        """
        Parameters
        ----------
        source : RadixSource
            Reads the tree.
        req_to_token : torch.Tensor
            SGLang's table of slots: `[rows, positions]`.
        """
        self._source = source
        self._req_to_token = req_to_token

    def key(self, reqs: Sequence[Request]) -> Hashable:
        return self._source.key(reqs)

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        paths = self._source.read(reqs)
        for i, req in enumerate(reqs):
            if (beams := _beams_of(req)) is not None:
                paths[i] = beams.extended(paths[i])
        return paths

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        return prefix_paths(self.read(reqs), num_rows)

    def shared_slots(self, req: Request) -> torch.Tensor:
        in_tree = self._source.shared_slots(req)
        if (beams := _beams_of(req)) is None:
            return in_tree
        row = beams.leader.kv.req_pool_idx
        rest = self._req_to_token[row, len(in_tree) : beams.prompt_end]
        return torch.cat([in_tree, rest.to(in_tree)])


def _beams_of(req: Request) -> _Beams | None:
    beams: _Beams | None = getattr(getattr(req, "beam_group", None), _BEAMS, None)
    return beams
