"""SGLang's real prefix caches without an engine, and requests with nodes in them."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

TREE_KINDS = ["python nodes", "unified"]
CAN_CHOOSE_CORE = "tree_core_backend" in inspect.signature(CacheInitParams).parameters
if CAN_CHOOSE_CORE:
    TREE_KINDS.append("unified, python core")


class Tree:
    """One of SGLang's prefix caches, whose slots the test chooses."""

    def __init__(self, kind: str, page_size: int = 1, *, disable: bool = False) -> None:
        core = {"tree_core_backend": "python"} if kind == "unified, python core" else {}
        allocator = SimpleNamespace(
            device=torch.device("cpu"),
            free=lambda *args, **kwargs: None,
            free_segment=lambda *args, **kwargs: None,
        )
        params = CacheInitParams(
            disable=disable,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            **core,
        )
        self.cache: Any = (RadixCache if kind == "python nodes" else UnifiedRadixCache)(params)

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        self.cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=torch.tensor(slots)))

    def last_node(self, tokens: Sequence[int]) -> Any:
        """Return the node at which the cached prefix of `tokens` ends. May split a node."""
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        return match.last_device_node

    def request(self, rid: str, tokens: Sequence[int], protected: int, row: int = 1) -> Any:
        """Return a request whose first `protected` tokens are in the tree."""
        return request(rid, self.last_node(tokens[:protected]), protected, row)


def request(rid: str, last_node: Any, protected: int, row: int = 1) -> Any:
    """Return a stand-in for the Req of the installed SGLang."""
    place = {"req_pool_idx": row, "cache_protected_len": protected}
    if "req_pool_idx" in ReqKvInfo.__dataclass_fields__:
        return SimpleNamespace(rid=rid, last_node=last_node, kv=SimpleNamespace(**place))
    return SimpleNamespace(rid=rid, last_node=last_node, kv=None, **place)


def place(req: Any) -> Any:
    """Return the object that holds a request's row and its protected length."""
    return req.kv if hasattr(req.kv, "req_pool_idx") else req


def late_lengths(reqs: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the lengths of two requests in rounds of speculative decoding.

    The requests have the lengths of the round before: SGLang has processed no later results.
    """
    known, lens = [25, 31], [25, 31]
    for accepted in ([0, 0], [1, 3], [3, 1], [2, 2]):
        known, lens = lens, [length + more for length, more in zip(lens, accepted, strict=True)]
        for req, length in zip(reqs, known, strict=True):
            place(req).kv_committed_len = length
        yield lens
