"""PathReader: the root-to-leaf paths of running requests, read from SGLang's prefix cache.

One adapter per kind of tree, chosen by type and capability. Reads only: no tree is changed, nor the
recency of its nodes. `sglang/tree/batch_builder.py` makes a DecodeBatch of it.

CacheEventMonitor: counts the mutations of SGLang's prefix cache, and reports moved requests.

A path that `tree/radix_paths.py` has read stays right until one of these events invalidates it.
`tree/batch_builder.py` watches the cache of each step's requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import wraps
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from sglang_pat import support
from sglang_pat.batch import PrefixPaths
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

# Matched exactly: a subclass from elsewhere may keep other nodes, or other rules for them.
_PYTHON_NODE_TREES = (
    "sglang.srt.mem_cache.radix_cache.RadixCache",
    "sglang.srt.mem_cache.hiradix_cache.HiRadixCache",
)
_ID_TREES = ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",)
_FULL_COMPONENT = 0  # ComponentType.FULL of id trees
# Components of an id tree's nodes. We read only FULL, the slots of layers that see all tokens.
_COMPONENTS = frozenset({"FULL", "SWA", "MAMBA"})

# A node as the Rust core gives it: its id, its parent's, where its span begins and ends, the length
# of its KV, its children.
_Node = tuple[int, int, int, int, int, int]
_ID, _BEGIN, _END, _NODE_FIELDS = 0, 2, 3, 6
# In place of the number of children, where a core does not tell it: some that are not on the path.
# The forest then reads more than it must (docs/design/decisions/0010-kept-paths.md).
_ANY_CHILDREN = 2
Path = Sequence[_Node]


class PathMismatchError(RuntimeError):
    """A path does not end where its request's shared KV ends."""


OnMismatch = Callable[[PathMismatchError], object]


def raise_mismatch(error: PathMismatchError) -> None:
    raise error


class PathReader(Protocol):
    """Reads one tree, for requests that are running."""

    def key(self, reqs: Sequence[Request]) -> Hashable:
        """Equal keys promise the same shared KV slots at the same positions of every request.

        A split of a node is the one change that leaves the key as it is: the paths last read then
        stay correct, only coarser than the tree.
        """

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        """The path of each request.

        A request whose last node is not one of the tree's (streaming sessions) gets an empty path.
        A request whose path does not end where its shared KV ends gets one too, if `on_mismatch`
        of `path_reader()` returns.
        """

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        """The paths of read(), then empty paths up to `num_rows`."""

    def shared_slots(self, req: Request) -> torch.Tensor:
        """The KV slots along the path of a request, as the tree holds them. For checks."""


def path_reader(tree: Any, on_mismatch: OnMismatch = raise_mismatch) -> PathReader | None:
    """The adapter for a prefix cache; None if it holds no paths that we can read.

    Parameters
    ----------
    tree : BasePrefixCache or None
    on_mismatch : callable
        Called with the error for each request whose path does not match it.
    """
    tree = unwrapped(tree)
    name = qualified_name(tree)
    if name in _PYTHON_NODE_TREES and not tree.disable:
        return NodeObjectPaths(tree, on_mismatch)
    if name in _ID_TREES and not tree.disable and _is_readable(tree):
        return NodeIdPaths(tree, on_mismatch)
    return None


def _is_readable(tree: Any) -> bool:
    return path_access(tree.tree_core) is not None and _has_full_component(tree)


def _has_full_component(tree: Any) -> bool:
    """True if the nodes of an id tree hold the slots of full attention, by rules that we know.

    Trees of hybrid models hold window slots or states beside them, which come and go by other
    rules. A lock on the full slots reaches from a request's last node up to the root.
    """
    components = {kind.name: component for kind, component in tree.components.items()}
    return (
        set(components) <= _COMPONENTS
        and "FULL" in components
        and qualified_name(components["FULL"]) in FULL_COMPONENTS
    )


class NodeObjectPaths:
    """RadixCache and HiRadixCache: nodes are objects with `id`, `parent`, `key` and `value`."""

    def __init__(self, tree: Any, on_mismatch: OnMismatch) -> None:
        self._tree = tree
        self._on_mismatch = on_mismatch

    def key(self, reqs: Sequence[Request]) -> Hashable:
        fields = RequestFields.on(reqs[0])
        try:
            return tuple(map(fields.key_by_node_id, reqs))
        except AttributeError:  # the last node of a streaming session has no id
            return tuple(map(fields.key_by_node, reqs))

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        root = self._tree.root_node
        nodes = map(_LAST_NODE, reqs)
        paths = [_walked_path(node, root) if _is_node(node) else None for node in nodes]
        return _checked(reqs, paths, self._on_mismatch)

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        return prefix_paths(self.read(reqs), num_rows)

    def shared_slots(self, req: Request) -> torch.Tensor:
        node = req.last_node
        path = _path_of(node, self._tree.root_node) if _is_node(node) else []
        return _joined(node.value for node in path)


class NodeIdPaths:
    """UnifiedRadixCache: nodes are integer ids. Its core, in Rust or Python, collects whole paths.

    In older versions it does not (`compat.path_access`).
    """

    def __init__(self, tree: Any, on_mismatch: OnMismatch) -> None:
        self._tree = tree
        self._core = tree.tree_core
        self._access = path_access(self._core)
        self._on_mismatch = on_mismatch

    def key(self, reqs: Sequence[Request]) -> Hashable:
        return tuple(map(RequestFields.on(reqs[0]).key_by_node, reqs))

    def read(self, reqs: Sequence[Request]) -> list[Path]:
        ids = list(map(_LAST_NODE, reqs))
        known = [id_ for id_ in ids if type(id_) is int]
        paths: list[Path | None] = [*self._collect(known)]
        if len(known) < len(ids):
            found = iter(paths)
            paths = [next(found) if type(id_) is int else None for id_ in ids]
        return _checked(reqs, paths, self._on_mismatch)

    def paths(self, reqs: Sequence[Request], num_rows: int) -> PrefixPaths:
        return prefix_paths(self.read(reqs), num_rows)

    def shared_slots(self, req: Request) -> torch.Tensor:
        if type(req.last_node) is not int:
            return _joined(())
        if self._access == "objects":
            node = self._tree.resolve_node_handle(req.last_node)
            nodes = _path_of(node, self._tree.root_node)
            return _joined(node.component_data[_FULL_COMPONENT].value for node in nodes)
        (path,) = self._collect([req.last_node])
        return _joined(
            self._core.get_component_device_value(node_id, _FULL_COMPONENT) for node_id, *_ in path
        )

    def _collect(self, ids: list[int]) -> list[Path]:
        """The path to each id."""
        if self._access == "objects":
            root, node_of = self._tree.root_node, self._tree.resolve_node_handle
            return [_walked_path(node_of(id_), root) for id_ in ids]
        if self._access == "climbs":
            return [_climbed_path(self._core, id_) for id_ in ids]
        binding = rust_binding(self._core)
        if binding is None:
            return [[_as_node(info) for info in path] for path in self._core.collect_path_info(ids)]
        # The Rust core answers with tuples. Its adapter makes an object of each, which takes longer
        # than all the rest of reading; so the core is asked itself.
        collected: Any = binding.collect_path_info(ids)
        first = next(filter(None, collected), None)
        if first is not None and len(first[0]) < _NODE_FIELDS:  # 0.5.22 tells no children
            return [[(*node, _ANY_CHILDREN) for node in path] for path in collected]
        paths: list[Path] = collected
        return paths


def _as_node(info: Any) -> _Node:
    children = getattr(info, "num_children", _ANY_CHILDREN)
    return (*_OF_SPAN(info), children)


_OF_SPAN: attrgetter[tuple[int, int, int, int, int]] = attrgetter(
    "node_id", "parent_id", "path_start", "path_end", "full_value_len"
)
_LAST_NODE = attrgetter("last_node")


def _is_node(last_node: object) -> bool:
    """True if it is one of a tree of Python nodes. That of a streaming session is not."""
    return hasattr(last_node, "parent")


def _path_of(node: Any, root: Any) -> list[Any]:
    """The nodes below the root down to `node`; none for a node that is None."""
    path = []
    while node is not None and node is not root:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _walked_path(last_node: Any, root: Any) -> Path:
    path, begin = [], 0
    for node in _path_of(last_node, root):
        length = len(node.key)
        path.append((node.id, node.parent.id, begin, begin + length, length, len(node.children)))
        begin += length
    return path


def _climbed_path(core: Any, last_node: int) -> Path:
    """The path to a node, from a core in Rust that tells of one node at a time.

    Empty if a node holds no KV on the device, which nodes of running requests do.
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
    """The paths, each if it ends where the request's shared KV ends. None: not known, so empty."""
    lengths = [path[-1][_END] if path else 0 for path in paths]
    checked = [path or () for path in paths]
    if not reqs or lengths == [*map(RequestFields.on(reqs[0]).protected_len, reqs)]:
        return checked
    protected_len = RequestFields.on(reqs[0]).protected_len
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


def prefix_paths(paths: list[Path], num_rows: int) -> PrefixPaths:
    """The paths as arrays, then empty paths up to `num_rows`."""
    spans = ([(node[_ID], node[_BEGIN], node[_END]) for node in path] for path in paths)
    return PrefixPaths.from_lists([*spans, *[()] * (num_rows - len(paths))])


# Ids of nodes that are in no tree. A tree counts its nodes from 0.
_NODE_IDS = count(1 << 62)


def new_node_id() -> int:
    """Fresh id for a node that is in no tree."""
    return next(_NODE_IDS)


def extended_path(path: Path, node_id: int, end: int) -> Path:
    """A path, and one more node below it that is in no tree, up to position `end`."""
    begin = path[-1][_END] if path else 0
    parent = path[-1][_ID] if path else -1
    node = (node_id, parent, begin, end, end - begin, 0)
    if not path:
        return [node]
    # The tree does not count this child of the last node.
    *above, (last_id, its_parent, first, its_end, length, num_children) = path
    return [*above, (last_id, its_parent, first, its_end, length, num_children + 1), node]


def _joined(slots: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = list(slots)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


_EVENTS = "_sglang_pat_events"  # attribute of a watched cache


class _Kind(NamedTuple):
    """A kind of event, and the methods it happens in. The first one that the cache has counts."""

    name: str
    methods: tuple[str, ...]


# One name: 0.5.17 and 0.5.23 agree. The cache calls these methods through itself, so one wrapper
# sees every call.
_KINDS = (
    _Kind("insert", ("insert",)),
    _Kind("evict", ("_evict", "evict")),
    _Kind("checkpoint", ("checkpoint", "cache_unfinished_req")),
    _Kind("lock", ("inc_lock_ref",)),
    _Kind("unlock", ("dec_lock_ref",)),
    _Kind("reset", ("reset",)),
)
_SPLIT = _Kind("split", ("_split_node",))


class CacheEventMonitor:
    """Counts what happens to one prefix cache, as long as that lives.

    counts: calls by kind: insert, split, evict, checkpoint (a request's KV enters the tree, and its
    row is made to point there), lock, unlock, reset. unobservable: kinds that this cache does not
    show, so that `counts` lacks them: a core in Rust splits nodes without telling.
    """

    def __init__(
        self,
        cache: Any,
        on_checkpoint: Callable[[Request], object],
        on_reset: Callable[[], object],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.unobservable: tuple[str, ...] = ()
        self._on_checkpoint = on_checkpoint
        self._on_reset = on_reset
        inner = unwrapped(cache)
        for kind in _KINDS:
            # A cache that is wrapped for sessions is asked to checkpoint by way of the wrapper.
            self._watch(cache if kind.name == "checkpoint" else inner, kind)
        splitter = node_splitter(inner, *_SPLIT.methods)
        if splitter is None:
            self.unobservable = (_SPLIT.name,)
        else:
            self._watch(splitter, _SPLIT)

    @classmethod
    def watching(
        cls,
        cache: Any,
        on_checkpoint: Callable[[Request], object],
        on_reset: Callable[[], object],
    ) -> CacheEventMonitor:
        """The events of a cache. The first call starts watching it, and sets the callbacks.

        Parameters
        ----------
        cache : BasePrefixCache
        on_checkpoint : callable
            Called with the request after each checkpoint.
        on_reset : callable
            Called after each reset.

        Raises
        ------
        RuntimeError
            If the cache lacks a method in which an event happens. Names the method.
        """
        events: CacheEventMonitor | None = vars(cache).get(_EVENTS)
        if events is None:
            events = cls(cache, on_checkpoint, on_reset)
            setattr(cache, _EVENTS, events)
        return events

    def _watch(self, owner: Any, kind: _Kind) -> None:
        method = next((name for name in kind.methods if callable(getattr(owner, name, None))), None)
        if method is None:
            raise RuntimeError(
                f"pat could not hook {type(owner).__name__}.{' or '.join(kind.methods)}, where it "
                f"learns of every {kind.name}; supported versions of SGLang: "
                f"{', '.join(support.SGLANG_VERSIONS)}"
            )
        self.counts[kind.name] = 0
        # Set on the instance: subclasses that override the method are watched too, other caches in
        # the process are not.
        setattr(owner, method, self._watched(getattr(owner, method), kind.name))

    def _watched(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """The method, with its calls counted and reported to the callbacks."""
        counts, on_checkpoint, on_reset = self.counts, self._on_checkpoint, self._on_reset

        @wraps(method)
        def count(*args: Any, **kwargs: Any) -> Any:  # often called, for locks: nothing but a count
            counts[kind] += 1
            return method(*args, **kwargs)

        @wraps(method)
        def checkpoint(req: Request, *args: Any, **kwargs: Any) -> Any:
            try:
                return count(req, *args, **kwargs)
            finally:
                on_checkpoint(req)

        @wraps(method)
        def reset(*args: Any, **kwargs: Any) -> Any:
            try:
                return count(*args, **kwargs)
            finally:
                on_reset()

        special: dict[str, Callable[..., Any]] = {"checkpoint": checkpoint, "reset": reset}
        return special.get(kind, count)
