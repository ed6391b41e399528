"""KvWrites stores the KV of new tokens, in the layers that pat decodes.

If pat knows the type of SGLang's KV pool, a kernel of pat writes the bytes that the pool would
write (`executors/kv_writer.py`). Otherwise the pool writes them itself. This is decided when SGLang
starts.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import KvWriter
from sglang_pat.plan import HeadConfig
from sglang_pat.sglang.compat import kv_write_location, latent_write_location
from sglang_pat.sglang.report import reports
from sglang_pat.sglang.start.layer_support import LayerSupport

logger = logging.getLogger(__name__)

_location, _latent_location = kv_write_location(), latent_write_location()


class KvWrites:
    """Stores keys and values of new tokens."""

    def __init__(self, model_runner: Any, layer_support: LayerSupport) -> None:
        self._pool = model_runner.token_to_kv_pool
        self._are_scaled = layer_support.are_scaled
        self._window_slots = layer_support.window_slots
        # Slots of the step's new tokens in the pool of sliding-window layers. None: not computed.
        self._new_window_slots: torch.Tensor | None = None
        self._writers: dict[int, KvWriter] = {}  # by layer id
        if model_runner.device != "cuda":
            return
        # Some default backends store fp8 without the layer's scales. Pools differ in what they do
        # without scales (some multiply by 1), so with these backends the pool stores the KV itself.
        if layer_support.is_converted and not layer_support.are_scaled:
            return
        writer_of = cache(partial(_writer, model_runner))
        reasons: dict[str, None] = {}
        for layer_id, shape in layer_support.shapes.items():
            found = pool_reason(self._pool, layer_id) or writer_of(shape)
            if isinstance(found, KvWriter):
                self._writers[layer_id] = found
            else:
                reasons[found] = None
        for layer in layer_support.layers:
            known = self._writers.get(layer.layer_id)
            if known is not None:  # copies the scales now, because a capture cannot
                known.scale(layer.k_scale)
                known.scale(layer.v_scale)
        if reasons and reports.rank_speaks():
            logger.info("SGLang's pool stores new KV itself: %s", "; ".join(reasons))

    def begin_step(self) -> None:
        """Forget the last step's slots. Each eager step and each captured graph makes its own."""
        self._new_window_slots = None

    def _slots(self, layer: RadixAttention, forward_batch: Any) -> torch.Tensor | None:
        """Return the new tokens' slots in the window pool, if the layer uses this pool."""
        if self._window_slots is None or not has_window_pool(self._pool, layer.layer_id):
            return None
        if self._new_window_slots is None:
            self._new_window_slots = self._window_slots[forward_batch.out_cache_loc]
        return self._new_window_slots

    def store(
        self,
        layer: RadixAttention,
        forward_batch: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """Write the KV of a layer's new tokens to the slots `forward_batch.out_cache_loc`.

        k and v are `[rows, KV heads, head_dim]`. The pool may scale them in place. k_rope has the
        last columns of latent keys. If it is given, v is not read.
        """
        if k_rope is not None:
            # The slots of a draft model's step have a stride. SGLang's kernel for latent KV ignores
            # strides, and would write to wrong slots.
            forward_batch.out_cache_loc = forward_batch.out_cache_loc.contiguous()
        writer = self._writers.get(layer.layer_id)
        if writer is not None and self._write(writer, layer, forward_batch, k, v, k_rope):
            return
        if k_rope is not None:
            self._pool.set_mla_kv_buffer(layer, _latent_location(forward_batch), k, k_rope)
            return
        # SGLang's pools use the scales only if the pool's dtype differs from the model's.
        scales = (layer.k_scale, layer.v_scale) if self._are_scaled else ()
        location = _location(forward_batch, swa_loc=self._slots(layer, forward_batch))
        self._pool.set_kv_buffer(layer, location, k, v, *scales)

    def _write(
        self,
        writer: KvWriter,
        layer: RadixAttention,
        forward_batch: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        k_rope: torch.Tensor | None,
    ) -> bool:
        """Store the KV with pat's kernel. Return False if the kernel cannot store it."""
        if writer.config.is_latent:
            cache = self._pool.get_key_buffer(layer.layer_id)
            rope = None if k_rope is None else k_rope.view(len(k_rope), 1, -1)
            slots = forward_batch.out_cache_loc
            return writer.write_latent(k.view(len(k), 1, -1), rope, slots, cache)
        k_scale, v_scale = writer.scale(layer.k_scale), writer.scale(layer.v_scale)
        if k_scale is None or v_scale is None:
            return False
        keys = self._pool.get_key_buffer(layer.layer_id)
        values = self._pool.get_value_buffer(layer.layer_id)
        slots = self._slots(layer, forward_batch)
        slots = forward_batch.out_cache_loc if slots is None else slots
        return writer.write(k, v, slots, keys, values, k_scale, v_scale)


def has_window_pool(pool: Any, layer_id: int) -> bool:
    """Return True if the KV of a layer lies in the pool of sliding-window layers."""
    return type(pool) is SWAKVPool and bool(pool.layers_mapping[layer_id][1])


def pool_reason(pool: Any, layer_id: int) -> str | None:
    """Return why the kernel cannot write a layer's KV to a pool, or None if it can.

    Unknown pools, such as subclasses, may do more than scale, convert and store.
    """
    if envs.SGLANG_ENABLE_ASYNC_ASSERT.get():
        return "SGLANG_ENABLE_ASYNC_ASSERT, with which it checks slots"
    if type(pool) is SWAKVPool:
        pool = pool.swa_kv_pool if has_window_pool(pool, layer_id) else pool.full_kv_pool
    elif type(pool) is HybridLinearKVPool:
        pool = pool.full_kv_pool
    if type(pool) is MLATokenToKVPool:
        return "it is of sparse attention" if pool.use_dsa else None
    if type(pool) is not MHATokenToKVPool:
        return f"it is a {type(pool).__name__}"
    if pool.is_quantized_kv_cache:
        return "it quantizes by a method of its own"
    if pool.kv_cache_layout != "nhd":
        return f"its layout is {pool.kv_cache_layout}"
    return None


def _writer(model_runner: Any, shape: HeadConfig) -> KvWriter | str:
    """Return the writer for layers of this shape, or the reason why there is none."""
    device = model_runner.req_to_token_pool.req_to_token.device
    config = KernelConfig.for_device(
        model_runner.dtype, shape.head_dim, device, shape.v_head_dim, model_runner.kv_cache_dtype
    )
    writer = KvWriter(config, device)
    if writer.agrees_with_torch():
        return writer
    return f"torch {torch.__version__} stores {model_runner.dtype} in another way than pat"
