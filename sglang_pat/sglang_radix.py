"""RadixSource: the root-to-leaf paths of running requests, read from SGLang's prefix cache.

One adapter per kind of tree, chosen by type and capability. Reads only: no tree is changed, nor the
recency of its nodes. `sglang_batch.py` makes a DecodeBatch of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_pat.decode_batch import PrefixPaths

Request = Any  # sglang.srt.managers.schedule_batch.Req

# Matched exactly: a subclass from elsewhere may keep other nodes, or other rules for them.
_PYTHON_NODE_TREES = (
    "sglang.srt.mem_cache.radix_cache.RadixCache",
    "sglang.srt.mem_cache.hiradix_cache.HiRadixCache",
)
_ID_TREES = ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",)
_SESSION_WRAPPERS = ("sglang.srt.session.streaming_session.StreamingSession",)
_FULL_COMPONENT = 0  # ComponentType.FULL of id trees

# node_id, kv_begin and kv_end of nodes.
_Columns = tuple[Sequence[int], Sequence[int], Sequence[int]]


class RadixSource(Protocol):
    """Reads one tree, for requests that are running."""

    def key(self, reqs: Sequence[Request]) -> Hashable:
        """Equal keys promise the same shared KV slots at the same positions of every request.

        A split of a node is the one change that leaves the key as it is: the paths last read then
        stay correct, only coarser than the tree.
        """

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        """The path of each request, then empty paths up to `num_rows`.

        A request whose last node is not one of the tree's (streaming sessions) gets an empty path.
        RuntimeError if a path does not end where the request's shared KV ends.
        """

    def shared_slots(self, req: Request) -> torch.Tensor:
        """The KV slots along the path of a request, as the tree holds them. For checks."""


def radix_source(tree: Any) -> RadixSource | None:
    """The adapter for a prefix cache; None if it holds no paths that we can read."""
    if _qualified_name(tree) in _SESSION_WRAPPERS:
        tree = tree.inner
    name = _qualified_name(tree)
    if name in _PYTHON_NODE_TREES and not tree.disable:
        return PythonNodeSource(tree)
    if name in _ID_TREES and not tree.disable:
        # Trees of hybrid models keep nodes of window or state caches too, which come and go by
        # other rules.
        full_attention_only = [component.name for component in tree.tree_components] == ["FULL"]
        return IdSource(tree) if full_attention_only else None
    return None


class RequestFields(NamedTuple):
    """Where a Req keeps what we read: on itself up to 0.5.17, later in `req.kv`."""

    row: attrgetter[int]
    protected_len: attrgetter[int]
    key_by_node_id: attrgetter[Any]
    key_by_node: attrgetter[Any]

    @classmethod
    def of(cls, req: Request) -> RequestFields:
        return _request_fields("kv." if hasattr(getattr(req, "kv", None), "req_pool_idx") else "")


@cache
def _request_fields(prefix: str) -> RequestFields:
    row, protected_len = prefix + "req_pool_idx", prefix + "cache_protected_len"
    return RequestFields(
        row=attrgetter(row),
        protected_len=attrgetter(protected_len),
        key_by_node_id=attrgetter("rid", row, "last_node.id", protected_len),
        key_by_node=attrgetter("rid", row, "last_node", protected_len),
    )


class PythonNodeSource:
    """RadixCache and HiRadixCache: nodes are objects with `id`, `parent`, `key` and `value`."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def key(self, reqs: Sequence[Request]) -> Hashable:
        fields = RequestFields.of(reqs[0])
        try:
            return tuple(map(fields.key_by_node_id, reqs))
        except AttributeError:  # the last node of a streaming session has no id
            return tuple(map(fields.key_by_node, reqs))

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        nodes = [node if hasattr(node, "parent") else None for node in map(_LAST_NODE, reqs)]
        return _walked_paths(reqs, num_rows, nodes, self._tree.root_node)

    def shared_slots(self, req: Request) -> torch.Tensor:
        return _joined(node.value for node in _path_of(req.last_node, self._tree.root_node))


class IdSource:
    """UnifiedRadixCache: nodes are integer ids. Its core, in Rust or Python, collects whole paths.

    In 0.5.17 it does not; there the ids resolve to Python nodes, which are walked.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._core = tree.tree_core

    def key(self, reqs: Sequence[Request]) -> Hashable:
        return tuple(map(RequestFields.of(reqs[0]).key_by_node, reqs))

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        ids = [node if type(node) is int else None for node in map(_LAST_NODE, reqs)]
        if not hasattr(self._core, "collect_path_info"):
            nodes = [None if id_ is None else self._tree.resolve_node_handle(id_) for id_ in ids]
            return _walked_paths(reqs, num_rows, nodes, self._tree.root_node)
        known = [id_ for id_ in ids if id_ is not None]
        counts, columns = self._collect(known)
        if len(known) < len(ids):
            found = iter(counts)
            counts = [0 if id_ is None else next(found) for id_ in ids]
        return _checked_paths(reqs, num_rows, counts, columns, [id_ is None for id_ in ids])

    def shared_slots(self, req: Request) -> torch.Tensor:
        if not hasattr(self._core, "collect_path_info"):
            node = self._tree.resolve_node_handle(req.last_node)
            path = _path_of(node, self._tree.root_node)
            return _joined(node.component_data[_FULL_COMPONENT].value for node in path)
        _, (node_ids, _, _) = self._collect([req.last_node])
        return _joined(
            self._core.get_component_device_value(node_id, _FULL_COMPONENT) for node_id in node_ids
        )

    def _collect(self, ids: list[int]) -> tuple[list[int], _Columns]:
        """How many nodes are on the path to each id, and the nodes of all paths."""
        binding = getattr(self._core, "_binding", None)
        if binding is None:
            paths = self._core.collect_path_info(ids)
            nodes = map(attrgetter("node_id", "path_start", "path_end"), chain.from_iterable(paths))
            node_ids, begins, ends = zip(*nodes, strict=True) if any(paths) else ((), (), ())
        else:
            # The Rust core answers with tuples. Its adapter makes an object of each, which takes
            # longer than all the rest of reading; so the core is asked itself.
            paths = binding.collect_path_info(ids)
            flat = chain.from_iterable(paths)
            node_ids, _, begins, ends, *_ = zip(*flat, strict=True) if any(paths) else [()] * 4
        return list(map(len, paths)), (node_ids, begins, ends)


_LAST_NODE = attrgetter("last_node")


def _qualified_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _path_of(node: Any, root: Any) -> list[Any]:
    """The nodes below the root down to `node`; none for a node that is None."""
    path = []
    while node is not None and node is not root:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _walked_paths(
    reqs: Sequence[Request], num_rows: int, last_nodes: list[Any], root: Any
) -> PrefixPaths:
    """Paths of trees with Python nodes; a request whose last node is None has none."""
    counts, node_ids, begins, ends = [], [], [], []
    for last_node in last_nodes:
        path = _path_of(last_node, root)
        counts.append(len(path))
        position = 0
        for node in path:
            node_ids.append(node.id)
            begins.append(position)
            position += len(node.key)
            ends.append(position)
    private = [node is None for node in last_nodes]
    return _checked_paths(reqs, num_rows, counts, (node_ids, begins, ends), private)


def _checked_paths(
    reqs: Sequence[Request],
    num_rows: int,
    counts: list[int],
    columns: _Columns,
    private: list[bool],
) -> PrefixPaths:
    """PrefixPaths, if each path ends where the request's shared KV ends.

    counts: nodes on the path of each request. private: requests whose path is not known.
    """
    num_requests = len(reqs)
    path_begin = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=path_begin[1 : num_requests + 1])
    path_begin[num_requests + 1 :] = path_begin[num_requests]
    node_ids, begins, ends = columns
    kv_end = np.array(ends, dtype=np.int32)
    # A path without nodes is 0 long: its last node would be the one before, or the 0 put in front.
    last = np.concatenate(([0], kv_end))[path_begin[1 : num_requests + 1]]
    lengths = np.where(np.array(counts) > 0, last, 0)
    protected = np.fromiter(map(RequestFields.of(reqs[0]).protected_len, reqs), int, num_requests)
    wrong = (lengths != protected) & ~np.array(private)
    if wrong.any():
        first = int(wrong.argmax())
        raise RuntimeError(
            f"request {reqs[first].rid}: its path in the radix tree holds {lengths[first]} tokens, "
            f"but its cache_protected_len is {protected[first]}; they must be equal"
        )
    return PrefixPaths(
        path_begin=path_begin,
        node_id=np.array(node_ids, dtype=np.int64),
        kv_begin=np.array(begins, dtype=np.int32),
        kv_end=kv_end,
    )


def _joined(slots: Iterator[torch.Tensor]) -> torch.Tensor:
    parts = list(slots)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
