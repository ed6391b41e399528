"""Rows of a step that are not requests: rows of beam searches, and draft tokens.

Such rows belong to a request. They share the request's path in the tree and one more node below it.

In a beam search, the request is the leader, and the node ends where the prompt ends. The other rows
have no Req and follow the batch's requests. SGLang copies the prompt's slots from the leader to the
other rows, and in each step reassigns the slots after the prompt. Plans stay valid, because the
prompt's slots never change, and because each step reads the slots after the prompt again.

For draft tokens, see `speculative/rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch

from sglang_pat.sglang.compat import RequestFields
from sglang_pat.sglang.tree.radix_paths import Path, PathReader, Request

_GROUP = "_sglang_pat_rows"  # attribute of a BeamGroup
_NODE_IDS = count(1 << 62)  # for nodes outside of trees; trees count from 0


class VirtualRequest:
    """Stands in for a Req: one row of `group.req`. Attributes not set here are the request's."""

    __slots__ = ("group", "kv", "rid")

    kv: Any
    rid: str

    def __init__(self, group: RequestRows) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group.req, name)


class _BeamKv:
    """Stands in for `Req.kv`, because a beam has its own row in `req_to_token`."""

    __slots__ = ("leader", "req_pool_idx")

    def __init__(self, leader: Request, row: int) -> None:
        self.leader = leader
        self.req_pool_idx = row

    @property
    def cache_protected_len(self) -> int:
        length: int = self.leader.kv.cache_protected_len
        return length


class RequestRows:
    """The rows of a request, and the node that they share below the request's path."""

    __slots__ = ("_node_id", "_span", "end", "ids", "req", "rows")

    def __init__(self, req: Request, count: int, end: int = -1) -> None:
        self.req = req
        # In a beam search `req` is the leader: it is none of these rows, but reads their node.
        self.rows = [VirtualRequest(self) for _ in range(count)]
        self.ids = tuple(map(id, self.rows))
        self.end = end  # position where the node ends; -1: not known yet
        self._node_id = -1
        self._span = (-1, -1)

    @classmethod
    def of_beams(cls, leader: Request, rows: Sequence[int]) -> RequestRows:
        """Return the rows of a beam search. rows: their indices in SGLang's `req_to_token`."""
        group = cls(leader, len(rows), leader.beam_group.prompt_len)
        for number, (beam, row) in enumerate(zip(group.rows, rows, strict=True), start=2):
            beam.kv = _BeamKv(leader, row)
            beam.rid = f"{leader.rid}, beam {number}"
        return group

    def extended(self, path: Path) -> Path:
        """Return the request's path in the tree plus the node below it."""
        last_id, begin = (path[-1][0], path[-1][3]) if path else (-1, 0)
        if begin >= self.end:
            return path
        if self._span != (begin, self.end):
            self._node_id, self._span = next(_NODE_IDS), (begin, self.end)
        node = (self._node_id, last_id, begin, self.end, self.end - begin, 0)
        if not path:
            return [node]
        # The tree does not know the new node, so it does not count it as a child of the last one.
        return [*path[:-1], (*path[-1][:-1], path[-1][-1] + 1), node]


def _with_group(req: Request | VirtualRequest) -> tuple[Request, RequestRows | None]:
    """Return the request to which a row or request belongs, and the request's rows if any."""
    if isinstance(req, VirtualRequest):
        return req.group.req, req.group
    return req, getattr(getattr(req, "beam_group", None), _GROUP, None)


class RowPaths(PathReader):
    """Reads the paths of rows, and of plain requests among them."""

    def __init__(self, tree_reader: PathReader, req_to_token_pool: Any) -> None:
        """Make a reader. req_to_token_pool: SGLang's table of slots."""
        self._tree_reader = tree_reader
        self._pool = req_to_token_pool

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        owners = [_with_group(req) for req in reqs]
        once = {id(owner): (owner, group) for owner, group in owners}  # each request once
        found = self._tree_reader.read([owner for owner, _ in once.values()])
        paths = {
            key: path if group is None else group.extended(path)
            for (key, (_, group)), path in zip(once.items(), found, strict=True)
        }
        return [paths[id(owner)] for owner, _ in owners]

    def shared_slots(self, req: Request) -> torch.Tensor:
        owner, group = _with_group(req)
        in_tree = self._tree_reader.shared_slots(owner)
        if group is None:
            return in_tree
        row = self._pool.req_to_token[RequestFields.on(owner).req_pool_idx(owner)]
        rest = row[len(in_tree) : max(group.end, len(in_tree))]
        return torch.cat([in_tree, rest.to(in_tree)])


def batch_with_beams(
    reqs: Sequence[Request], beam_tail: Any, invalidate: Callable[[Iterable[Request]], object]
) -> list[Request]:
    """Return the requests of a batch in row order, then the rows of their beams.

    beam_tail: SGLang's description of the beams' rows. invalidate: called with a leader that gets
    rows, because the leader's path then ends where its prompt ends.
    """
    result = list(reqs)
    for entry in beam_tail.entries:
        beams: RequestRows | None = getattr(entry.group, _GROUP, None)
        if beams is None:
            leader = reqs[entry.leader_idx]
            beams = RequestRows.of_beams(leader, entry.group.member_rows_cpu.tolist())
            setattr(entry.group, _GROUP, beams)
            invalidate([leader])
        result += beams.rows
    return result
