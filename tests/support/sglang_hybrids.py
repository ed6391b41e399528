"""SGLang's prefix caches of hybrid models, with its pools and requests, without an engine.

Requests go the way that SGLang's scheduler takes them, and every slot of the full-attention pool
remembers which tokens its KV was computed from.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ReqKvInfo
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang_trees import CAN_CHOOSE_CORE, place

WINDOW = 8
CHUNK = 16
FULL_LAYERS, OTHER_LAYERS = [1], [0]
IS_CHECKPOINTED = hasattr(UnifiedRadixCache, "checkpoint")  # from 0.5.23 on

HYBRID_KINDS = [
    "window",
    "window, pages of 4",
    "state",
    "state at chunks",
    "window and state",
]
if CAN_CHOOSE_CORE:
    HYBRID_KINDS += [f"{kind}, python core" for kind in HYBRID_KINDS]
WINDOW_KINDS = [kind for kind in HYBRID_KINDS if "window" in kind]


class HybridCache:
    """A UnifiedRadixCache over pools of `num_tokens`, and the requests that run in it."""

    def __init__(self, kind: str, num_tokens: int = 160, max_requests: int = 8) -> None:
        self.page_size = 4 if "pages of 4" in kind else 1
        self.has_window, self.has_state = "window" in kind, "state" in kind
        self.at_chunks = "at chunks" in kind  # states are kept at multiples of CHUNK
        arguments = ServerArgs(model_path="dummy", page_size=self.page_size)
        arguments._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(arguments)
        self.rows = self._row_pool(max_requests)
        self.allocator = self._allocator(num_tokens)
        core = {"tree_core_backend": "python"} if "python core" in kind else {}
        self.cache: Any = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.page_size,
                sliding_window_size=WINDOW if self.has_window else None,
                enable_mamba_extra_buffer=self.at_chunks,
                tree_components=(
                    ComponentType.FULL,
                    *([ComponentType.SWA] if self.has_window else []),
                    *([ComponentType.MAMBA] if self.has_state else []),
                ),
                **core,
            )
        )
        self.running: list[Any] = []
        # Tokens from which the KV in a slot was computed.
        self.content: dict[int, tuple[int, ...]] = {}
        self._names = count()

    def _row_pool(self, max_requests: int) -> Any:
        common = {
            "size": max_requests,
            "max_context_len": 256,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if not self.has_state:
            return ReqToTokenPool(**common)
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=16,
            n_groups=1,
            num_heads=2,
            head_dim=8,
            state_size=4,
            conv_kernel=4,
        )
        return HybridReqToTokenPool(
            **common,
            mamba_size=3 * max_requests,
            mamba_spec_state_size=max_requests,
            cache_params=Mamba2CacheParams(shape=shape, layers=OTHER_LAYERS),
            mamba_layer_ids=OTHER_LAYERS,
            enable_mamba_extra_buffer=self.at_chunks,
        )

    def _allocator(self, num_tokens: int) -> Any:
        common = {"dtype": torch.float32, "device": "cpu", "need_sort": False}
        shape = {"page_size": self.page_size, "head_num": 1, "head_dim": 8, "dtype": torch.float32}
        if self.has_window:
            pool = SWAKVPool(
                size=num_tokens,
                size_swa=num_tokens,
                swa_attention_layer_ids=OTHER_LAYERS,
                full_attention_layer_ids=FULL_LAYERS,
                device="cpu",
                **shape,
            )
            return SWATokenToKVPoolAllocator(
                size=num_tokens,
                size_swa=num_tokens,
                page_size=self.page_size,
                kvcache=pool,
                **common,
            )
        pool = HybridLinearKVPool(
            size=num_tokens,
            full_attention_layer_ids=FULL_LAYERS,
            device="cpu",
            enable_memory_saver=False,
            mamba_pool=self.rows.mamba_pool,
            **shape,
        )
        return TokenToKVPoolAllocator(size=num_tokens, kvcache=pool, **common)

    # --- slots ---

    @property
    def num_free(self) -> int:
        """Tokens that fit into the full-attention pool."""
        pool = self.allocator.full_attn_allocator if self.has_window else self.allocator
        return int(pool.available_size())

    def _take(self, count: int) -> torch.Tensor | None:
        """Slots of whole pages for `count` tokens."""
        count = -(-count // self.page_size) * self.page_size
        if self.page_size == 1:
            slots: torch.Tensor | None = self.allocator.alloc(count)
            return slots
        pools = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        if any(count > pool.available_size() for pool in pools):
            return None
        full, window = (pool.alloc(count) for pool in pools)
        self.allocator.full_to_swa_index_mapping[full] = window
        return full

    def slots_of(self, req: Any) -> torch.Tensor:
        """Those of the request's KV, from its row."""
        return self.rows.req_to_token[place(req).req_pool_idx, : self.length(req)]

    def length(self, req: Any) -> int:
        return len(req.origin_input_ids) + len(req.output_ids)

    def _tokens(self, req: Any) -> tuple[int, ...]:
        return (*req.origin_input_ids, *req.output_ids)

    def _store(self, req: Any, begin: int, slots: torch.Tensor) -> None:
        """The request's KV from `begin` on goes to these slots."""
        tokens = self._tokens(req)
        row = place(req).req_pool_idx
        end = min(begin + len(slots), len(tokens))
        self.rows.write((row, slice(begin, begin + len(slots))), slots.to(torch.int32))
        for position, slot in zip(range(begin, end), slots.tolist(), strict=False):
            self.content[slot] = tokens[: position + 1]
        self._set_lengths(req, len(tokens))

    def _set_lengths(self, req: Any, length: int) -> None:
        if IS_CHECKPOINTED:
            req.full_untruncated_fill_ids = array("q", self._tokens(req))
            req.extend_end = length
            req.kv.kv_committed_len = req.kv.kv_allocated_len = length
        else:
            req._refresh_fill_ids()
            req.set_extend_range(len(req.prefix_indices), length)
            if req.kv is None:
                req.kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)
            req.kv.kv_allocated_len = length
            place(req).kv_committed_len = length

    # --- what the scheduler does with a request ---

    def admit(self, tokens: Sequence[int]) -> Any:
        """Match, lock, prefill and checkpoint a prompt. None if there is no room."""
        req = Req(
            rid=f"r{next(self._names)}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(max_new_tokens=64),
        )
        req.init_next_round_input(self.cache)
        matched = place(req).cache_protected_len if IS_CHECKPOINTED else len(req.prefix_indices)
        self._lock(req)
        prefix = (
            self.cache.path_device_indices(req.last_node) if IS_CHECKPOINTED else req.prefix_indices
        )
        assert len(prefix) == matched
        slots = self._take(len(tokens) - matched)
        rows = None if slots is None else self.rows.alloc([req])
        assert rows is not None, "the test must leave room"
        self.rows.write((place(req).req_pool_idx, slice(0, matched)), prefix.to(torch.int32))
        assert slots is not None
        self._store(req, matched, slots)
        if self.at_chunks:
            place(req).mamba_last_track_seqlen = len(tokens) // CHUNK * CHUNK or None
        if IS_CHECKPOINTED:
            self.cache.checkpoint(req, up_to=len(tokens))
        else:
            place(req).cache_protected_len = matched
            self.cache.cache_unfinished_req(req)
        self.running.append(req)
        return req

    def _lock(self, req: Any) -> None:
        if IS_CHECKPOINTED:
            req.lock = self.cache.lock(req.last_node)
            return
        result = self.cache.inc_lock_ref(req.last_node)
        if hasattr(req, "lock_receipt"):  # from 0.5.20 on
            req.lock_receipt = result.to_dec_params()
        else:
            req.swa_uuid_for_lock = result.swa_uuid_for_lock
            req.skip_lock_node_ids = {}

    def decode(self, req: Any, token: int) -> None:
        """One step: the window moves on, and leaves slots behind."""
        length = self.length(req)
        req.output_ids.append(token)
        req.decode_batch_idx += 1
        if length % self.page_size == 0:
            slots = self._take(1)
            assert slots is not None, "the test must leave room"
            self._store(req, length, slots)
        else:
            # The page goes on. Only its first slot is known to be in the row.
            before = self.rows.req_to_token[place(req).req_pool_idx, length - 1 : length]
            self._store(req, length, before + 1)
        if self.has_window:
            self._move_window(req)

    def _move_window(self, req: Any) -> None:
        more = {} if IS_CHECKPOINTED else {"is_chunk_cache": False}
        free_swa_out_of_window_slots(
            req,
            self.length(req) - 1,
            sliding_window_size=WINDOW,
            page_size=self.page_size,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            **more,
        )
        if req.decode_batch_idx < WINDOW:
            return
        if IS_CHECKPOINTED:
            self.cache.release_swa_prefix_lock(req)
        elif not req.swa_prefix_lock_released:
            self._release_window(req)

    def _release_window(self, req: Any) -> None:
        if hasattr(req, "lock_receipt"):
            receipt = req.lock_receipt
            if hasattr(receipt, "component_lock_uuids"):  # 0.5.21 and 0.5.22
                lock = receipt.component_lock_uuids.get(ComponentType.SWA)
            else:
                lock = receipt.swa_uuid_for_lock
            if lock is None:
                return
            self.cache.dec_swa_lock_only(req.last_node, req.lock_receipt)
        elif req.swa_uuid_for_lock is None:
            return
        else:
            self.cache.dec_swa_lock_only(
                req.last_node, req.swa_uuid_for_lock, skip_lock_node_ids=req.skip_lock_node_ids
            )
        req.swa_prefix_lock_released = True

    def finish(self, req: Any) -> None:
        """Hand all of its KV to the tree."""
        self.running.remove(req)
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        if not hasattr(self.cache, "cache_finished_req"):  # from 0.5.21 on
            from sglang.srt.mem_cache.common import release_kv_cache

            release_kv_cache(req, self.cache, **({"checkpoint": True} if IS_CHECKPOINTED else {}))
        else:
            self.cache.cache_finished_req(req, kv_len_to_handle=self.length(req))
            self.rows.free(req)
            req.kv = None

    def evict(self, *, full: int = 0, window: int = 0, states: int = 0) -> None:
        self.cache.evict(EvictParams(num_tokens=full, swa_num_tokens=window, mamba_num=states))

    def make_room(self, num_tokens: int) -> None:
        """Evict until a request of that many tokens fits in every pool."""
        self.evict(
            full=max(0, num_tokens - self.num_free),
            window=max(0, num_tokens - self.allocator.swa_attn_allocator.available_size())
            if self.has_window
            else 0,
            states=max(0, 3 - self.rows.mamba_allocator.available_size()) if self.has_state else 0,
        )
