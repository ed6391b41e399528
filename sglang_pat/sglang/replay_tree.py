"""SGLang's prefix cache without an engine: what the replay serves its requests through.

The tree is SGLang's own, and so is all that it decides: matches, splits, locks, evictions. The KV
pool behind it only counts, since a replay moves no KV: every slot is 0. `replay/simulate.py` drives
it. The backend's `BatchReader` reads the paths of each step, as in an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import Counter
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.version import __version__ as sglang_version

from sglang_pat.batch import DecodeBatch, IntArray
from sglang_pat.sglang.hooks import StepChannel
from sglang_pat.sglang.radix import radix_source
from sglang_pat.sglang.reader import BatchReader


class CountingPool:
    """In place of SGLang's KV allocator: how many tokens are free, in whole pages."""

    def __init__(self, num_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.size = num_tokens // page_size * page_size
        self.available = self.size
        self.device = torch.device("cpu")

    def available_size(self) -> int:
        return self.available

    def take(self, num_tokens: int) -> None:
        """Allocate whole pages."""
        if num_tokens > self.available:
            raise RuntimeError(f"{num_tokens} tokens wanted of a KV pool with {self.available}")
        self.available -= num_tokens

    def pages(self, num_tokens: int) -> int:
        """Tokens of the pages that `num_tokens` from the beginning of a page need."""
        return -(-num_tokens // self.page_size) * self.page_size

    def free_segment(self, indices: torch.Tensor, *args: object, **kwargs: object) -> None:
        """Every segment that a tree frees begins with a page."""
        self.available += self.pages(len(indices))

    def free_segments(self, segments: list[tuple[torch.Tensor, int]]) -> None:
        for indices, _ in segments:
            self.free_segment(indices)


class _ZeroRows:
    """In place of `req_to_token`, the table of slots: every row is the same, of zeros."""

    def __init__(self) -> None:
        self._zeros = torch.zeros(1 << 16, dtype=torch.int32)

    def __getitem__(self, index: tuple[int, slice]) -> torch.Tensor:
        columns = index[1]
        while columns.stop > len(self._zeros):
            self._zeros = torch.zeros(2 * len(self._zeros), dtype=torch.int32)
        return self._zeros[columns]


class _CountingRows:
    """In place of SGLang's ReqToTokenPool."""

    def __init__(self) -> None:
        self.req_to_token = _ZeroRows()

    def write(self, index: object, values: torch.Tensor) -> None:
        pass


class _RequestKv:
    """`req.kv` from 0.5.23 on."""

    __slots__ = ("cache_inserted_len", "cache_protected_len", "req_pool_idx")

    def __init__(self, row: int) -> None:
        self.req_pool_idx = row
        self.cache_protected_len = 0
        self.cache_inserted_len = 0


class ReplayRequest:
    """What a prefix cache and a RadixSource read of a Req, in either layout.

    tokens: the prompt and the whole answer, `array('q')`. kv_len: tokens whose KV is in the pool.
    """

    extra_key = cache_salt = session = session_id = kv_rotation_base = None
    priority = 0
    return_logprob = False

    def __init__(self, rid: int, tokens: array[int], prompt_length: int, row: int) -> None:
        self.rid = rid
        self.tokens = tokens
        self.prompt_length = prompt_length
        self.kv_len = 0
        self.is_finished = False
        self.last_node: Any = None
        self.req_pool_idx = row
        self.cache_protected_len = 0
        self.prefix_indices: Any = None
        self.lock: Any = None
        self.kv: _RequestKv | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

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


class ReplayTree(ABC):
    """One prefix cache over a pool of `num_tokens`, as the scheduler of SGLang uses it.

    mutations counts what happened to the tree: "match", "insert", "split", "lock", "unlock",
    "evict" (calls) and "evicted_tokens".
    """

    # Up to 0.5.17 a finished request keeps its place until the next decode step is prepared, which
    # is after requests are admitted.
    FINISHED_LEAVE_WITH_NEXT_DECODE: ClassVar[bool]

    def __init__(self, tree: Any, pool: CountingPool) -> None:
        self.tree = tree
        self.pool = pool
        self.mutations: Counter[str] = Counter()
        source = radix_source(tree)
        assert source is not None, f"no RadixSource reads {type(tree).__name__}"
        self.source = source

    @property
    def name(self) -> str:
        return f"{type(self.tree).__name__} of SGLang {sglang_version}"

    @property
    def reachable(self) -> int:
        """Tokens that can be had: free, or held by nobody but the tree."""
        return self.pool.available + int(self.tree.evictable_size())

    def match(self, request: ReplayRequest, length: int) -> int:
        """Find the cached prefix of the first `length` tokens, and lock it. Its length.

        One token at least is left to compute: the last one's output is what the prefill is for.
        """
        self.mutations["match"] += 1
        key = RadixKey(request.tokens[: length - 1])
        result = self.tree.match_prefix(MatchPrefixParams(key=key))
        request.last_node = result.last_device_node
        self.mutations["lock"] += 1
        return self._lock_match(request, result)

    def make_room(self, num_tokens: int) -> bool:
        """Whether that many tokens are free, after evicting what nobody uses if need be."""
        missing = num_tokens - self.pool.available
        if missing > 0 and self.tree.evictable_size() > 0:
            self.mutations["evict"] += 1
            evicted = self.tree.evict(EvictParams(num_tokens=missing))
            self.mutations["evicted_tokens"] += evicted.num_tokens_evicted
        return num_tokens <= self.pool.available

    @abstractmethod
    def unlock(self, request: ReplayRequest) -> None:
        """Let go of the prefix of a request that is not admitted after all, or retracted."""

    @abstractmethod
    def cache_prompt(self, request: ReplayRequest) -> None:
        """Put what the prefill computed into the tree; the request's path ends there from now."""

    @abstractmethod
    def cache_finished(self, request: ReplayRequest) -> None:
        """Put all of a request's KV into the tree, and free what the tree had already."""

    def release(self, request: ReplayRequest) -> None:
        """Free the KV of a retracted request that is not in the tree, and unlock the rest."""
        self.pool.available += self.pool.pages(request.kv_len - self.protected(request))
        self.unlock(request)

    @abstractmethod
    def protected(self, request: ReplayRequest) -> int:
        """Tokens of a request that are in the tree, locked."""

    @abstractmethod
    def _lock_match(self, request: ReplayRequest, result: Any) -> int: ...


class NodeTree(ReplayTree):
    """RadixCache, the default up to 0.5.17: nodes are objects, a Req holds its own fields."""

    FINISHED_LEAVE_WITH_NEXT_DECODE = True

    def __init__(self, num_tokens: int, page_size: int) -> None:
        pool = CountingPool(num_tokens, page_size)
        tree = RadixCache(_init_params(pool))
        super().__init__(tree, pool)
        split = tree._split_node

        def counting_split(*arguments: Any) -> Any:
            self.mutations["split"] += 1
            return split(*arguments)

        tree._split_node = counting_split

    def _lock_match(self, request: ReplayRequest, result: Any) -> int:
        self.tree.inc_lock_ref(request.last_node)
        request.prefix_indices = result.device_indices
        request.cache_protected_len = len(result.device_indices)
        return request.cache_protected_len

    def unlock(self, request: ReplayRequest) -> None:
        self.mutations["unlock"] += 1
        self.tree.dec_lock_ref(request.last_node)

    def cache_prompt(self, request: ReplayRequest) -> None:
        self.mutations["insert"] += 1
        self.tree.cache_unfinished_req(request)

    def cache_finished(self, request: ReplayRequest) -> None:
        self.mutations["insert"] += 1
        self.mutations["unlock"] += 1
        request.is_finished = True
        self.tree.cache_finished_req(request, kv_len_to_handle=request.kv_len)

    def protected(self, request: ReplayRequest) -> int:
        return request.cache_protected_len


class IdTree(ReplayTree):
    """UnifiedRadixCache of 0.5.23: nodes are ids, splits happen out of sight."""

    FINISHED_LEAVE_WITH_NEXT_DECODE = False

    def __init__(self, num_tokens: int, page_size: int) -> None:
        pool = CountingPool(num_tokens, page_size)
        super().__init__(UnifiedRadixCache(_init_params(pool)), pool)

    def _lock_match(self, request: ReplayRequest, result: Any) -> int:
        request.kv = _RequestKv(request.req_pool_idx)
        request.lock = self.tree.lock(request.last_node)
        request.kv.cache_protected_len = int(result.device_prefix_len)
        return request.kv.cache_protected_len

    def unlock(self, request: ReplayRequest) -> None:
        self.mutations["unlock"] += 1
        self.tree.unlock(request.lock)
        request.lock = None

    def cache_prompt(self, request: ReplayRequest) -> None:
        self.mutations["insert"] += 1
        self.tree.checkpoint(request, up_to=request.kv_len)

    def cache_finished(self, request: ReplayRequest) -> None:
        self.mutations["insert"] += 1
        request.is_finished = True
        self.tree.checkpoint(request, up_to=request.kv_len)
        self.release(request)

    def protected(self, request: ReplayRequest) -> int:
        assert request.kv is not None
        return request.kv.cache_protected_len


def _init_params(pool: CountingPool) -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=_CountingRows(),
        token_to_kv_pool_allocator=pool,
        page_size=pool.page_size,
        tree_components=(ComponentType.FULL,),
    )


def new_tree(num_tokens: int, page_size: int) -> ReplayTree:
    """The prefix cache that the installed SGLang uses by default, empty."""
    kind = IdTree if hasattr(UnifiedRadixCache, "checkpoint") else NodeTree
    return kind(num_tokens, page_size)


class _Mode(NamedTuple):
    """In place of SGLang's ForwardMode."""

    decodes: bool

    def is_decode(self) -> bool:
        return self.decodes

    def is_extend(self) -> bool:
        return not self.decodes

    def is_target_verify(self) -> bool:
        return False

    def is_idle(self) -> bool:
        return False


class _Batch(NamedTuple):
    """In place of the scheduler's ScheduleBatch."""

    reqs: list[ReplayRequest]
    tree_cache: Any


class _Forward:
    """In place of a ForwardBatch: what the hooks and the reader look at."""

    def __init__(self, mode: _Mode, seq_lens: IntArray | None = None) -> None:
        self.forward_mode = mode
        if seq_lens is not None:
            self.batch_size = len(seq_lens)
            self.seq_lens_cpu = torch.from_numpy(seq_lens)


_DECODE, _EXTEND = _Mode(decodes=True), _Mode(decodes=False)


class ReplayReader:
    """The backend's BatchReader, told of each forward as SGLang's hooks tell it."""

    def __init__(self, tree: ReplayTree) -> None:
        self._tree = tree.tree
        self._channel = StepChannel()
        self._reader = BatchReader(self._channel)

    def prefilled(self, reqs: list[ReplayRequest]) -> None:
        """A prefill of these requests has run."""
        self._channel.note(_Forward(_EXTEND), _Batch(reqs, self._tree))

    def retracted(self, req: ReplayRequest) -> None:
        """A request has lost its row and its lock."""
        self._channel.note_moved([req])

    def read(self, reqs: list[ReplayRequest], seq_lens: IntArray) -> DecodeBatch:
        """The decode step of these requests. Its paths are valid until the next read().

        seq_lens: int32 `[num_requests]`, this step's token included. They are copied.
        """
        forward = _Forward(_DECODE, seq_lens)
        self._channel.note(forward, _Batch(reqs, self._tree))
        outer = self._channel.enter(forward)
        try:
            return self._reader.read(self._channel.acknowledge(), forward)
        finally:
            self._channel.leave(outer)
