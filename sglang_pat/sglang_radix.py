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
        found = iter(self._collect([id_ for id_ in ids if id_ is not None]))
        paths = [() if id_ is None else next(found) for id_ in ids]
        node_ids, lengths = [], []
        for node_id, begin, end in chain.from_iterable(paths):
            node_ids.append(node_id)
            lengths.append(end - begin)
        private = [id_ is None for id_ in ids]
        return _checked_paths(reqs, num_rows, list(map(len, paths)), node_ids, lengths, private)

    def shared_slots(self, req: Request) -> torch.Tensor:
        if not hasattr(self._core, "collect_path_info"):
            node = self._tree.resolve_node_handle(req.last_node)
            path = _path_of(node, self._tree.root_node)
            return _joined(node.component_data[_FULL_COMPONENT].value for node in path)
        (path_info,) = self._collect([req.last_node])
        return _joined(
            self._core.get_component_device_value(node_id, _FULL_COMPONENT)
            for node_id, _, _ in path_info
        )

    def _collect(self, ids: list[int]) -> Iterator[Sequence[tuple[int, int, int]]]:
        """(node id, begin, end) of every node on the path to each id."""
        binding = getattr(self._core, "_binding", None)
        if binding is None:
            for path in self._core.collect_path_info(ids):
                yield [(node.node_id, node.path_start, node.path_end) for node in path]
        else:
            # The Rust core answers with tuples. Its adapter makes an object of each, which takes
            # longer than all the rest of reading; so the core is asked itself.
            for path in binding.collect_path_info(ids):
                yield [(node_id, begin, end) for node_id, _, begin, end, *_ in path]


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
    counts, node_ids, lengths = [], [], []
    for node in last_nodes:
        path = _path_of(node, root)
        counts.append(len(path))
        for step in path:
            node_ids.append(step.id)
            lengths.append(len(step.key))
    private = [node is None for node in last_nodes]
    return _checked_paths(reqs, num_rows, counts, node_ids, lengths, private)


def _checked_paths(
    reqs: Sequence[Request],
    num_rows: int,
    counts: list[int],
    node_ids: list[int],
    lengths: list[int],
    private: list[bool],
) -> PrefixPaths:
    """Lay the nodes end to end, and check that each path ends where the request's shared KV
    ends."""
    path_begin = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=path_begin[1 : len(counts) + 1])
    path_begin[len(counts) + 1 :] = path_begin[len(counts)]
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)  # running sum over all paths
    np.cumsum(lengths, out=ends[1:])
    before = ends[path_begin[: len(counts)]]
    path_lengths = ends[path_begin[1 : len(counts) + 1]] - before
    protected = np.fromiter(map(RequestFields.of(reqs[0]).protected_len, reqs), np.int64, len(reqs))
    wrong = (path_lengths != protected) & ~np.array(private)
    if wrong.any():
        first = int(wrong.argmax())
        raise RuntimeError(
            f"request {reqs[first].rid}: its path in the radix tree holds {path_lengths[first]} "
            f"tokens, but its cache_protected_len is {protected[first]}; they must be equal"
        )
    offset = np.repeat(before, counts)
    return PrefixPaths(
        path_begin=path_begin,
        node_id=np.array(node_ids, dtype=np.int64),
        kv_begin=(ends[:-1] - offset).astype(np.int32),
        kv_end=(ends[1:] - offset).astype(np.int32),
    )


def _joined(slots: Iterator[torch.Tensor]) -> torch.Tensor:
    parts = list(slots)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
