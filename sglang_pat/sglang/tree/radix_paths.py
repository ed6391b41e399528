"""Reads SGLang's prefix cache: the paths of running requests, and the events that change them.

A `PathReader` reads the path of each request from the root to the request's last node. It changes
nothing in the tree, not even the recency of nodes. `CacheEventMonitor` reports when paths may have
changed; until then, `tree/batch_builder.py` keeps them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any

import torch

from sglang_pat import support
from sglang_pat.sglang.compat import (
    FULL_COMPONENTS,
    RequestFields,
    node_splitter,
    path_access,
    qualified_name,
    rust_binding,
    unwrapped,
)

Request = Any  # sglang.srt.managers.schedule_batch.Req

# Class names, matched exactly: a third-party subclass may have other nodes or rules for nodes.
_NODE_OBJECT_TREES = (
    "sglang.srt.mem_cache.radix_cache.RadixCache",
    "sglang.srt.mem_cache.hiradix_cache.HiRadixCache",
)
_NODE_ID_TREES = ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",)
_FULL_COMPONENT = 0  # ComponentType.FULL
# Components that nodes of a NodeIdPaths tree may have. pat reads only FULL, which has the slots of
# full-attention layers.
_COMPONENTS = frozenset({"FULL", "SWA", "MAMBA"})

# A node as the Rust core returns it: its id, its parent's id, the start and the end of its span,
# the length of its KV, and the number of its children.
_Node = tuple[int, int, int, int, int, int]
_ID, _END, _NODE_FIELDS = 0, 3, 6
# Stands for the number of children if a core does not return that number. The forest then reads
# more paths than needed (docs/design/decisions.md#kept-paths).
_ANY_CHILDREN = 2
Path = Sequence[_Node]


class PathMismatchError(RuntimeError):
    """A path does not end where its request's shared KV ends."""


OnMismatch = Callable[[PathMismatchError], object]


def raise_mismatch(error: PathMismatchError) -> None:
    raise error


class PathReader(ABC):
    """Reads the paths of running requests in one tree."""

    @abstractmethod
    def read(self, reqs: Sequence[Request]) -> list[Path]:
        """Return the path of each request.

        A path is empty if the request's last node is not in the tree (streaming sessions), or if
        the path does not end where the request's shared KV ends and `on_mismatch` did not raise.
        """

    @abstractmethod
    def shared_slots(self, req: Request) -> torch.Tensor:
        """Return the KV slots that the tree has for the path of a request. For checks."""


def path_reader(tree: Any, on_mismatch: OnMismatch = raise_mismatch) -> PathReader | None:
    """Return the reader of a prefix cache, or None if pat cannot read its paths.

    on_mismatch: called with a PathMismatchError for each request whose path does not match it.
    """
    tree = unwrapped(tree)
    name = qualified_name(tree)
    if name in _NODE_OBJECT_TREES and not tree.disable:
        return NodeObjectPaths(tree, on_mismatch)
    if name in _NODE_ID_TREES and not tree.disable and _is_readable(tree):
        return NodeIdPaths(tree, on_mismatch)
    return None


def _is_readable(tree: Any) -> bool:
    """Return True if nodes have the slots of full attention and follow rules that pat knows.

    Trees of hybrid models also have window slots or Mamba states, with other rules for locks and
    eviction. A lock on full-attention slots covers all nodes from the request's last node to the
    root.
    """
    components = {kind.name: component for kind, component in tree.components.items()}
    return (
        path_access(tree.tree_core) is not None
        and set(components) <= _COMPONENTS
        and "FULL" in components
        and qualified_name(components["FULL"]) in FULL_COMPONENTS
    )


class NodeObjectPaths(PathReader):
    """Reads RadixCache or HiRadixCache, whose nodes are objects with a `parent` and a `value`."""

    def __init__(self, tree: Any, on_mismatch: OnMismatch) -> None:
        self._tree, self._on_mismatch = tree, on_mismatch

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        root = self._tree.root_node
        nodes = map(_LAST_NODE, reqs)
        paths = [_walked_path(node, root) if _is_node(node) else None for node in nodes]
        return _checked(reqs, paths, self._on_mismatch)

    def shared_slots(self, req: Request) -> torch.Tensor:
        node = req.last_node
        path = _nodes_to(node, self._tree.root_node) if _is_node(node) else []
        return _joined(node.value for node in path)


class NodeIdPaths(PathReader):
    """Reads UnifiedRadixCache, whose nodes have integer ids. See `compat.path_access`."""

    def __init__(self, tree: Any, on_mismatch: OnMismatch) -> None:
        self._tree, self._on_mismatch = tree, on_mismatch
        self._core = tree.tree_core
        self._access = path_access(self._core)

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        ids = list(map(_LAST_NODE, reqs))
        known = [id_ for id_ in ids if type(id_) is int]
        paths: list[Path | None] = [*self._collect(known)]
        if len(known) < len(ids):
            found = iter(paths)
            paths = [next(found) if type(id_) is int else None for id_ in ids]
        return _checked(reqs, paths, self._on_mismatch)

    def shared_slots(self, req: Request) -> torch.Tensor:
        if type(req.last_node) is not int:
            return _joined(())
        if self._access == "objects":
            node = self._tree.resolve_node_handle(req.last_node)
            nodes = _nodes_to(node, self._tree.root_node)
            return _joined(node.component_data[_FULL_COMPONENT].value for node in nodes)
        (path,) = self._collect([req.last_node])
        value_of = self._core.get_component_device_value
        return _joined(value_of(node[_ID], _FULL_COMPONENT) for node in path)

    def _collect(self, ids: list[int]) -> list[Path]:
        """Return the paths to the nodes with these ids."""
        if self._access == "objects":
            root, node_of = self._tree.root_node, self._tree.resolve_node_handle
            return [_walked_path(node_of(id_), root) for id_ in ids]
        if self._access == "climbs":
            return [_climbed_path(self._core, id_) for id_ in ids]
        binding = rust_binding(self._core)
        if binding is None:
            return [
                [(*_OF_SPAN(node), getattr(node, "num_children", _ANY_CHILDREN)) for node in path]
                for path in self._core.collect_path_info(ids)
            ]
        # The Rust core returns tuples. SGLang's Python adapter makes an object of each tuple, which
        # takes longer than all other work here, so pat calls the core directly.
        collected: Any = binding.collect_path_info(ids)
        first = next(filter(None, collected), None)
        if first is not None and len(first[0]) < _NODE_FIELDS:  # 0.5.22 returns no child counts
            return [[(*node, _ANY_CHILDREN) for node in path] for path in collected]
        paths: list[Path] = collected
        return paths


_OF_SPAN: attrgetter[tuple[int, int, int, int, int]] = attrgetter(
    "node_id", "parent_id", "path_start", "path_end", "full_value_len"
)
_LAST_NODE = attrgetter("last_node")


def _is_node(last_node: object) -> bool:
    """Return True if `last_node` is a node of a tree. In streaming sessions it is not."""
    return hasattr(last_node, "parent")


def _nodes_to(node: Any, root: Any) -> list[Any]:
    """Return the path from the root to `node`, without the root. It is empty if `node` is None."""
    path = []
    while node is not None and node is not root:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _walked_path(last_node: Any, root: Any) -> Path:
    path, begin = [], 0
    for node in _nodes_to(last_node, root):
        length = len(node.key)
        path.append((node.id, node.parent.id, begin, begin + length, length, len(node.children)))
        begin += length
    return path


def _climbed_path(core: Any, last_node: int) -> Path:
    """Return the path to a node of a Rust core that describes one node at a time.

    The path is empty if a node has no KV on the device. Nodes of running requests always have KV.
    """
    climbed: list[tuple[int, int, int]] = []
    node = last_node
    while not core.is_root(node):
        (length,) = core._binding.get_node_key_lengths([node])
        state = core.validate_buffer_backup(node, length)
        if state is None:
            return ()
        climbed.append((node, state.parent_node_id, length))
        node = state.parent_node_id
    path, begin = [], 0
    for node, parent, length in reversed(climbed):
        path.append((node, parent, begin, begin + length, length, _ANY_CHILDREN))
        begin += length
    return path


def _checked(
    reqs: Sequence[Request], paths: Sequence[Path | None], on_mismatch: OnMismatch
) -> list[Path]:
    """Return the paths. A path that does not end where its request's shared KV ends becomes empty.

    None stands for an unknown path, which becomes empty too, but without a call of `on_mismatch`.
    """
    lengths = [path[-1][_END] if path else 0 for path in paths]
    checked = [path or () for path in paths]
    if not reqs or lengths == [*map(RequestFields.on(reqs[0]).cache_protected_len, reqs)]:
        return checked
    protected_len = RequestFields.on(reqs[0]).cache_protected_len
    for i, (req, path, length) in enumerate(zip(reqs, paths, lengths, strict=True)):
        if path is not None and length != protected_len(req):
            on_mismatch(
                PathMismatchError(
                    f"request {req.rid}: its path in the radix tree holds {length} tokens, but its "
                    f"cache_protected_len is {protected_len(req)}; they must be equal"
                )
            )
            checked[i] = ()
    return checked


def _joined(slots: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = list(slots)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


_EVENTS = "_sglang_pat_events"  # attribute of a monitored cache

# Kind of event -> names of the method in which the event happens. The monitor wraps the first
# method that the cache has. Caches call it through `self`, so the wrapper sees every call.
_METHODS = {
    "insert": ("insert",),
    "evict": ("_evict", "evict"),
    "checkpoint": ("checkpoint", "cache_unfinished_req"),
    "lock": ("inc_lock_ref",),
    "unlock": ("dec_lock_ref",),
    "reset": ("reset",),
    "split": ("_split_node",),
}


class CacheEventMonitor:
    """Counts the events of one prefix cache, as long as the cache exists.

    Attributes
    ----------
    counts
        Number of calls by kind of event: insert, split, evict, checkpoint, lock, unlock, reset. At
        a checkpoint, a running request's KV enters the tree, and the request's row then has the
        tree's slots.
    unobservable
        Kinds that cannot be seen in this cache and are missing in `counts`. A Rust core splits
        nodes without calling a Python method.
    """

    def __init__(self, cache: Any, callbacks: Mapping[str, Callable[..., object]]) -> None:
        """Monitor a cache.

        callbacks: by kind of event, the function to call after each event, with the same arguments
        as the method in which the event happened.
        """
        self.counts: Counter[str] = Counter()
        self.unobservable: tuple[str, ...] = ()
        self._callbacks = callbacks  # by kind of event
        inner = unwrapped(cache)
        # SGLang calls a wrapped cache's checkpoint method on the wrapper.
        owners = {"checkpoint": cache, "split": node_splitter(inner, *_METHODS["split"])}
        for kind in _METHODS:
            owner = owners.get(kind, inner)
            if owner is None:
                self.unobservable = (kind,)
            else:
                self._watch(owner, kind)

    @classmethod
    def watching(
        cls, cache: Any, on_checkpoint: Callable[[Request], object], on_reset: Callable[[], object]
    ) -> CacheEventMonitor:
        """Return the monitor of a cache. The first call makes the monitor with these callbacks.

        on_checkpoint: called with the request after each checkpoint. on_reset: called after each
        reset. Raises RuntimeError if the cache lacks the method of an event.
        """
        events: CacheEventMonitor | None = vars(cache).get(_EVENTS)
        if events is None:
            callbacks: dict[str, Callable[..., object]] = {
                "checkpoint": lambda req, *_, **__: on_checkpoint(req),
                "reset": lambda *_, **__: on_reset(),
            }
            events = cls(cache, callbacks)
            setattr(cache, _EVENTS, events)
        return events

    def _watch(self, owner: Any, kind: str) -> None:
        methods = _METHODS[kind]
        method = next((name for name in methods if callable(getattr(owner, name, None))), None)
        if method is None:
            raise RuntimeError(
                f"pat could not hook {type(owner).__name__}.{' or '.join(methods)}, where it "
                f"learns of every {kind}; {support.SUPPORTED_SGLANG}"
            )
        self.counts[kind] = 0
        # Set on the instance, so that overrides in subclasses are wrapped too, and other caches in
        # the process are not.
        setattr(owner, method, self._watched(getattr(owner, method), kind))

    def _watched(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return a wrapper that counts the call, runs `method`, and then runs any callback."""
        counts, tell = self.counts, self._callbacks.get(kind)

        @wraps(method)
        def count(*args: Any, **kwargs: Any) -> Any:  # fast, because locks are frequent
            counts[kind] += 1
            return method(*args, **kwargs)

        @wraps(method)
        def count_and_tell(*args: Any, **kwargs: Any) -> Any:
            try:
                return count(*args, **kwargs)
            finally:
                assert tell is not None
                tell(*args, **kwargs)

        return count if tell is None else count_and_tell
