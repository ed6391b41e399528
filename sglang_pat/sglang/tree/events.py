"""RadixEvents: counts the mutations of SGLang's prefix cache, and reports moved requests.

A path that `radix.py` has read stays right until one of these events invalidates it. `reader.py`
watches the cache of each step's requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from sglang_pat import support
from sglang_pat.sglang.tree.radix import Request, unwrapped

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


class RadixEvents:
    """Counts what happens to one prefix cache, as long as that lives.

    counts: calls by kind: insert, split, evict, checkpoint (a request's KV enters the tree, and its
    row is made to point there), lock, unlock, reset. unseen: kinds that cannot be seen in this
    cache: a core in Rust splits nodes without telling; `counts` does not hold them.
    """

    def __init__(
        self,
        cache: Any,
        on_checkpoint: Callable[[Request], object],
        on_reset: Callable[[], object],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.unseen: tuple[str, ...] = ()
        self._on_checkpoint = on_checkpoint
        self._on_reset = on_reset
        inner = unwrapped(cache)
        for kind in _KINDS:
            # A cache that is wrapped for sessions is asked to checkpoint by way of the wrapper.
            self._watch(cache if kind.name == "checkpoint" else inner, kind)
        splitter = next(
            (each for each in (inner, getattr(inner, "tree_core", None)) if _has(each, _SPLIT)),
            None,
        )
        if splitter is None:
            self.unseen = (_SPLIT.name,)
        else:
            self._watch(splitter, _SPLIT)

    @classmethod
    def of(
        cls,
        cache: Any,
        on_checkpoint: Callable[[Request], object],
        on_reset: Callable[[], object],
    ) -> RadixEvents:
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
        events: RadixEvents | None = vars(cache).get(_EVENTS)
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


def _has(owner: Any, kind: _Kind) -> bool:
    return any(callable(getattr(owner, name, None)) for name in kind.methods)
