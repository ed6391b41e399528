"""SGLang's prefix cache without an engine: implements `Tree` of `workload/tree.py`.

SGLang's classes match, split, lock and evict. The KV pool only counts tokens, because a simulated
server has no KV: every slot is 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.version import __version__ as sglang_version

from sglang_pat.batch import PrefixPaths
from sglang_pat.sglang.tree.radix_paths import path_reader


class _CountingPool:
    """Replaces SGLang's KV allocator. Only counts free tokens, in whole pages."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.size = self.available = num_tokens // page_size * page_size
        self.device = torch.device("cpu")

    def available_size(self) -> int:
        return self.available

    def free_tokens(self, num_tokens: int) -> None:
        """Free the pages of `num_tokens` tokens, the first of which begins a page."""
        self.available += -(-num_tokens // self.page_size) * self.page_size

    def free_segment(self, indices: torch.Tensor, *args: object, **kwargs: object) -> None:
        self.free_tokens(len(indices))

    def free_segments(self, segments: list[tuple[torch.Tensor, int]]) -> None:
        for indices, _ in segments:
            self.free_tokens(len(indices))


class _ZeroRows:
    """Stands in for `req_to_token`, the table of slots. All slots are 0."""

    def __init__(self) -> None:
        self._zeros = torch.zeros(1 << 16, dtype=torch.int32)

    def __getitem__(self, index: tuple[int, slice]) -> torch.Tensor:
        columns = index[1]
        while columns.stop > len(self._zeros):
            self._zeros = torch.zeros(2 * len(self._zeros), dtype=torch.int32)
        return self._zeros[columns]


class _CountingRows:
    """Replaces SGLang's ReqToTokenPool."""

    def __init__(self) -> None:
        self.req_to_token = _ZeroRows()

    def write(self, index: object, values: torch.Tensor) -> None:
        pass


class _RequestKv:
    """Stands in for `req.kv`, an attribute of SGLang's requests from 0.5.23 on."""

    __slots__ = ("cache_inserted_len", "cache_protected_len", "req_pool_idx")

    def __init__(self, protected: int) -> None:
        self.req_pool_idx = 0
        self.cache_protected_len = protected
        self.cache_inserted_len = 0


class ServedRequest:
    """Stands in for a Req. Has the fields that prefix caches and PathReaders read."""

    extra_key = cache_salt = session = session_id = kv_rotation_base = None
    priority = 0
    req_pool_idx = 0
    return_logprob = False

    def __init__(self, request: Any) -> None:
        self.rid = request.number
        self.tokens: array[int] = array("q", request.tokens.tobytes())
        self.prompt_length = request.prompt_length
        self.kv_len = 0
        self.is_finished = False
        self.last_node: Any = None
        self.cache_protected_len = 0
        self.prefix_indices: Any = None
        self.lock: Any = None
        self.kv: _RequestKv | None = None

    @property
    def origin_input_ids(self) -> array[int]:
        return self.tokens[: self.prompt_length]

    @property
    def output_ids(self) -> array[int]:
        return self.tokens[self.prompt_length :]

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.tokens

    def get_fill_ids(self) -> array[int]:
        return self.tokens[: self.kv_len]

    def finished(self) -> bool:
        return self.is_finished


class SGLangTree(ABC):
    """A prefix cache of SGLang over a pool of `num_tokens` tokens."""

    finished_leave_late: ClassVar[bool]
    refreshes_waiting = hasattr(BasePrefixCache, "touch_prefix")

    def __init__(self, num_tokens: int, page_size: int = 1) -> None:
        self._pool = _CountingPool(num_tokens, page_size)
        self.page_size, self.size = page_size, self._pool.size
        self.tree = self._new_tree(
            CacheInitParams(
                disable=False,
                req_to_token_pool=_CountingRows(),
                token_to_kv_pool_allocator=self._pool,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        reader = path_reader(self.tree)
        assert reader is not None, f"no PathReader reads {type(self.tree).__name__}"
        self.reader = reader

    @property
    def name(self) -> str:
        return f"{type(self.tree).__name__} of SGLang {sglang_version}"

    @property
    def available(self) -> int:
        return self._pool.available

    @property
    def evictable(self) -> int:
        return int(self.tree.evictable_size())

    @property
    def reachable(self) -> int:
        return self.available + self.evictable

    def match(self, request: Any, length: int) -> int:
        served = request.handle = ServedRequest(request)
        result = self._result(served, length - 1)
        served.last_node = result.last_device_node
        request.protected = self._lock_match(served, result)
        return int(request.protected)

    def find(self, request: Any, length: int) -> int:
        result = self._result(ServedRequest(request), length)
        request.handle = result.last_device_node
        return _cached(result)

    def make_room(self, num_tokens: int) -> bool:
        missing = num_tokens - self.available
        if missing > 0 and self.evictable:
            self.tree.evict(EvictParams(num_tokens=missing))
        return num_tokens <= self.available

    def allocate(self, num_tokens: int) -> None:
        if num_tokens > self.available:
            raise RuntimeError(f"{num_tokens} tokens wanted of a KV pool with {self.available}")
        self._pool.available -= num_tokens

    def checkpoint(self, request: Any) -> None:
        served = request.handle
        served.kv_len = request.kv_len
        self._checkpoint(served)
        request.protected = self._protected(served)

    def finish(self, request: Any) -> None:
        request.handle.is_finished = True
        request.handle.kv_len = request.kv_len
        self._finish(request)

    def release(self, request: Any) -> None:
        self._pool.free_tokens(request.kv_len - self._protected(request.handle))
        self.unlock(request)

    def paths(self, requests: Sequence[Any]) -> PrefixPaths:
        paths = self.reader.read([request.handle for request in requests])
        return PrefixPaths.from_lists(
            [[(node_id, begin, end) for node_id, _, begin, end, *_ in path] for path in paths]
        )

    def by_weight(self, requests: Sequence[Any]) -> list[int]:
        return list(self.tree.dfs_weight_order([each.handle for each in requests]))

    def _result(self, served: ServedRequest, length: int) -> Any:
        key = RadixKey(served.tokens[:length])
        return self.tree.match_prefix(MatchPrefixParams(key=key))

    @abstractmethod
    def unlock(self, request: Any) -> None: ...

    @abstractmethod
    def _new_tree(self, params: CacheInitParams) -> Any: ...

    @abstractmethod
    def _lock_match(self, served: ServedRequest, result: Any) -> int: ...

    @abstractmethod
    def _checkpoint(self, served: ServedRequest) -> None: ...

    @abstractmethod
    def _finish(self, request: Any) -> None: ...

    @abstractmethod
    def _protected(self, served: ServedRequest) -> int:
        """Return how many of the request's tokens are in the tree, which has locked them."""


class NodeTree(SGLangTree):
    """SGLang's RadixCache, whose nodes are objects. It is the default up to 0.5.17."""

    finished_leave_late = True

    def _new_tree(self, params: CacheInitParams) -> Any:
        return RadixCache(params)

    def unlock(self, request: Any) -> None:
        self.tree.dec_lock_ref(request.handle.last_node)

    def _lock_match(self, served: ServedRequest, result: Any) -> int:
        self.tree.inc_lock_ref(served.last_node)
        served.prefix_indices = result.device_indices
        served.cache_protected_len = _cached(result)
        return served.cache_protected_len

    def _checkpoint(self, served: ServedRequest) -> None:
        self.tree.cache_unfinished_req(served)

    def _finish(self, request: Any) -> None:
        self.tree.cache_finished_req(request.handle, kv_len_to_handle=request.kv_len)

    def _protected(self, served: ServedRequest) -> int:
        return served.cache_protected_len


class IdTree(SGLangTree):
    """SGLang's UnifiedRadixCache, whose nodes are ids. It is the default of 0.5.23."""

    finished_leave_late = False

    def _new_tree(self, params: CacheInitParams) -> Any:
        return UnifiedRadixCache(params)

    def unlock(self, request: Any) -> None:
        self.tree.unlock(request.handle.lock)
        request.handle.lock = None

    def _lock_match(self, served: ServedRequest, result: Any) -> int:
        served.kv = _RequestKv(_cached(result))
        served.lock = self.tree.lock(served.last_node)
        return served.kv.cache_protected_len

    def _checkpoint(self, served: ServedRequest) -> None:
        self.tree.checkpoint(served, up_to=served.kv_len)

    def _finish(self, request: Any) -> None:
        self._checkpoint(request.handle)
        self.release(request)

    def _protected(self, served: ServedRequest) -> int:
        assert served.kv is not None
        return served.kv.cache_protected_len


def _cached(result: Any) -> int:
    """Return the number of matched tokens."""
    if hasattr(result, "device_prefix_len"):
        return int(result.device_prefix_len)
    return len(result.device_indices)


def new_tree(num_tokens: int, page_size: int = 1) -> SGLangTree:
    """Return an empty prefix cache, of the class that the installed SGLang uses by default."""
    kind = IdTree if hasattr(UnifiedRadixCache, "checkpoint") else NodeTree
    return kind(num_tokens, page_size)
