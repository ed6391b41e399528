"""CacheEventMonitor counts events of SGLang's trees, and reports what it cannot count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_trees import TREE_KINDS, Tree

from sglang_pat.sglang.tree.radix_paths import CacheEventMonitor


class Watched:
    """A tree and its reported events."""

    def __init__(self, kind: str) -> None:
        self.tree = Tree(kind)
        self.told: list[Any] = []
        self.events = CacheEventMonitor.watching(
            self.tree.cache, self.told.append, lambda: self.told.append("reset")
        )

    @property
    def counts(self) -> dict[str, int]:
        return {kind: count for kind, count in self.events.counts.items() if count}


@pytest.fixture(params=TREE_KINDS)
def watched(request: pytest.FixtureRequest) -> Watched:
    return Watched(request.param)


def test_insert_and_split(watched: Watched) -> None:
    watched.tree.insert([1, 2, 3], range(3))
    assert watched.counts == {"insert": 1}
    watched.tree.insert([1, 2, 9], range(3))
    if "split" in watched.events.unobservable:
        assert watched.counts == {"insert": 2}
        assert "split" not in watched.events.counts
    else:
        assert watched.counts == {"insert": 2, "split": 1}
    watched.tree.last_node([1])  # splits by matching
    assert watched.events.counts.get("split", 2) == 2


def test_lock_unlock_evict_and_reset(watched: Watched) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache = watched.tree.cache
    watched.tree.insert([1, 2, 3], range(3))
    node = watched.tree.last_node([1, 2, 3])
    locked = cache.inc_lock_ref(node)
    assert locked is not None  # the hook returns the method's result
    if hasattr(locked, "to_dec_params"):
        cache.dec_lock_ref(node, locked.to_dec_params())
    else:
        cache.dec_lock_ref(node)
    assert cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 3
    cache.reset()
    assert watched.counts == {"insert": 1, "lock": 1, "unlock": 1, "evict": 1, "reset": 1}
    assert watched.told == ["reset"]


def test_a_tree_is_watched_once(watched: Watched) -> None:
    again = CacheEventMonitor.watching(watched.tree.cache, print, print)
    assert again is watched.events
    watched.tree.insert([1], range(1))
    assert watched.counts == {"insert": 1}


def test_other_trees_are_not_watched(watched: Watched) -> None:
    other = Tree("unified")
    other.insert([1], range(1))
    assert watched.counts == {}


class Cache:
    """A cache with methods of a future SGLang."""

    def checkpoint(self, req: Any, *, up_to: int) -> str:
        raise KeyError(req)

    def insert(self, params: Any) -> str:
        return f"inserted {params}"

    evict = inc_lock_ref = dec_lock_ref = reset = _split_node = insert


def test_a_checkpoint_that_fails_moved_its_request_all_the_same() -> None:
    told: list[Any] = []
    cache = Cache()
    events = CacheEventMonitor.watching(cache, told.append, print)
    with pytest.raises(KeyError):
        cache.checkpoint("request", up_to=3)
    assert told == ["request"]
    assert events.counts["checkpoint"] == 1
    assert cache.insert("this") == "inserted this"


@pytest.mark.parametrize("method", ["insert", "evict", "inc_lock_ref", "dec_lock_ref", "reset"])
def test_a_missing_method_is_an_error(method: str) -> None:
    class Changed(Cache):
        pass

    setattr(Changed, method, None)
    with pytest.raises(RuntimeError, match=rf"could not hook Changed\..*{method}, where it learns"):
        CacheEventMonitor.watching(Changed(), print, print)


def test_a_split_that_cannot_be_seen_is_said() -> None:
    cache = Cache()
    cache._split_node = None  # type: ignore[assignment]
    assert CacheEventMonitor.watching(cache, print, print).unobservable == ("split",)


def test_an_overriding_subclass_is_watched() -> None:
    class Heir(Cache):
        """A subclass that overrides methods, like HiRadixCache."""

        def insert(self, params: Any) -> str:
            return "by the heir"

    cache = Heir()
    events = CacheEventMonitor.watching(cache, print, print)
    assert cache.insert("this") == "by the heir"
    assert events.counts["insert"] == 1


def test_a_cache_wrapped_for_sessions_is_watched_in_both_layers() -> None:
    from sglang.srt.session.streaming_session import StreamingSession

    wrapped = StreamingSession(Tree("python nodes").cache)
    if not hasattr(wrapped, "inner"):
        pytest.skip("this SGLang does not wrap the cache")
    told: list[Any] = []
    events = CacheEventMonitor.watching(wrapped, told.append, print)
    wrapped.inner.cache_unfinished_req = lambda req, **kwargs: None
    request = SimpleNamespace(session=None)
    wrapped.cache_unfinished_req(request)
    assert told == [request]
    assert events.counts["checkpoint"] == 1
    wrapped.inner.reset()
    assert events.counts["reset"] == 1
