"""Decides which layers pat decodes, when SGLang builds the backend.

The whole model falls back if a server option or the type of the model rules out all layers.
Otherwise each layer's shape, KV pool and scales decide. Scales are the numbers by which SGLang
divides a layer's keys and values before it stores them in a one-byte dtype. Not all backends use
scales, and pat must read KV as the default backend has stored it in a prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_pat import support
from sglang_pat.model_classes import WITH_BIAS
from sglang_pat.plan import HeadConfig
from sglang_pat.sglang import compat
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.layer_support import LayerSupport, read_scales
from sglang_pat.sglang.start.server_options import batch_invariant, drafts_of, server_reason
from sglang_pat.support import MAX_WINDOW, Unsupported

# Names of attention sinks in SGLang's models. pat looks for sinks only to log which layers have
# them.
_SINKS = ("sinks", "attention_sink_bias")


def layers_of_runner(
    model_runner: Any, default: str, types: Collection[AttentionType] = (AttentionType.DECODER,)
) -> LayerSupport:
    """Decide which layers of a runner's model pat decodes.

    default: the name of the backend that decodes without pat. types: the types of attention layers
    that run in the model's decode steps.
    """
    model = model_runner.model
    whole = _reason_for_all(model_runner, default)
    layer_support = layers_of_model(
        model, default, whole, lambda layer: layer_reason(layer, model_runner, default, types)
    )
    layer_support.are_scaled = are_scaled(model_runner, default)
    layer_support.is_converted = is_converted(model_runner)
    note_windows(layer_support, model_runner, default)
    has_pool = type(model_runner.token_to_kv_pool) is SWAKVPool
    if layer_support.windows:
        longest = model_runner.req_to_token_pool.req_to_token.shape[1]
        _limit_windows(layer_support, longest, has_pool=has_pool)
    if has_pool:
        layer_support.window_slots = model_runner.token_to_kv_pool.full_to_swa_index_mapping
    drafts = drafts_of(model_runner.server_args) if layer_support.windows else None
    if drafts is not None:  # lengths on the host may be a step old
        layer_support.drafts_ahead = 2 * max(drafts.counts)
    return layer_support


def note_windows(layer_support: LayerSupport, model_runner: Any, default: str) -> None:
    """Record the window or chunk, in tokens, of each layer that pat decodes and that has one.

    Reads only `sliding_window_size` and `attention_chunk_size` of the model runner.
    """
    found: dict[int, int] = {}
    for layer in layer_support.layers:
        layer_id, window = layer.layer_id, window_size(layer, model_runner, default)
        if layer_id not in layer_support.shapes or window is None:
            continue
        if found.setdefault(layer_id, window) != window:
            reason = Unsupported("attention", "layers of different windows with the same id")
            layer_support.fall_back(layer_id, reason)
    layer_support.windows = {layer_id: window for layer_id, window in found.items() if window}
    layer_support.chunked = frozenset(
        layer.layer_id for layer in layer_support.layers if chunk_size(layer, model_runner)
    )


def _limit_windows(layer_support: LayerSupport, longest: int, *, has_pool: bool) -> None:
    """Limit all windows to the length of the longest possible request.

    Drops a window that no request can outgrow, unless layers with windows have their own pool.
    Layers whose window is then still longer than MAX_WINDOW fall back.
    """
    layer_support.windows = {
        layer_id: min(window, longest)
        for layer_id, window in layer_support.windows.items()
        if window < longest or has_pool
    }
    for layer_id, window in layer_support.windows.items():
        if window > MAX_WINDOW:
            reason = f"{window} of more than {MAX_WINDOW} tokens"
            layer_support.fall_back(layer_id, Unsupported("sliding window", reason))


def layers_of_model(
    model: torch.nn.Module,
    default: str,
    whole: Unsupported | None,
    reason_of: Callable[[RadixAttention], Unsupported | None],
) -> LayerSupport:
    """Decide which layers of a model pat decodes.

    whole: why all layers fall back, or None. reason_of: returns why a layer falls back, or None.
    """
    layers = attention_layers(model)
    if not layers:
        name = type(model).__name__
        whole = Unsupported("attention", f"no attention layer (RadixAttention) in {name}")
    layer_support = LayerSupport(default)
    layer_support.whole = whole
    layer_support.layers = layers
    layer_support.sinks = _layers_with_sinks(model)
    for layer in layers:
        reason = whole or reason_of(layer)
        shape = shape_of(layer)
        if reason is None and layer_support.shapes.get(layer.layer_id, shape) != shape:
            reason = Unsupported("attention", "layers of different shapes with the same id")
        if reason is not None:
            layer_support.fall_back(layer.layer_id, reason)
        elif layer.layer_id not in layer_support.fallback:
            layer_support.shapes[layer.layer_id] = shape
    return layer_support


def shape_of(layer: RadixAttention) -> HeadConfig:
    """Return the shape of a layer on this rank."""
    return HeadConfig(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)


def attention_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """Return the attention layers of this rank's part of a model.

    Also finds layers in plain lists and dicts of a module, as in SGLang's wrapper of transformers
    models. Latent attention has two layers with the same id: the absorbed one, which is returned,
    and one for prompts. Layers that keep a state instead of KV are left out.
    """
    layers: dict[int, RadixAttention] = {}  # by id(), because a layer may be found twice
    twins = set()
    for module in model.modules():
        absorbed, twin = getattr(module, "attn_mqa", None), getattr(module, "attn_mha", None)
        if isinstance(absorbed, RadixAttention) and isinstance(twin, RadixAttention):
            twins.add(id(twin))
        found: list[Any] = [module]
        for value in vars(module).values():
            if type(value) in (list, tuple):
                found += value
            elif type(value) is dict:
                found += value.values()
        layers |= {id(each): each for each in found if isinstance(each, RadixAttention)}
    config = getattr(model, "config", None)
    # A layer in both lists has a state in addition to KV.
    states = {*getattr(config, "linear_layer_ids", ())}
    states -= {*getattr(config, "full_attention_layer_ids", ())}
    found = [each for each in layers.values() if id(each) not in twins]
    return [each for each in found if each.layer_id not in states]


def _layers_with_sinks(model: torch.nn.Module) -> frozenset[int]:
    """Return the ids of attention layers whose parent module has sinks as parameters."""
    return frozenset(
        layer.layer_id
        for module in model.modules()
        if any(getattr(module, name, None) is not None for name in _SINKS)
        for layer in module.children()
        if isinstance(layer, RadixAttention)
    )


def _with_lora_on_latent(model: torch.nn.Module) -> frozenset[int]:
    """Return the ids of latent attention layers whose `kv_b_proj` has LoRA adapters."""
    return frozenset(
        absorbed.layer_id
        for module in model.modules()
        if isinstance(absorbed := getattr(module, "attn_mqa", None), RadixAttention)
        and hasattr(getattr(module, "kv_b_proj", None), "set_lora")
    )


def model_reason(config: Any) -> Unsupported | None:
    """Return why a ModelConfig makes all layers of the model fall back, or None."""
    name = ", ".join(config.hf_config.architectures or ["unknown"])
    if not getattr(config, "is_generation", True):
        return Unsupported("attention", f"a model that generates no tokens ({name})")
    if config.is_encoder_decoder:
        return Unsupported("attention", f"an encoder-decoder model ({name})")
    if _is_sparse(config):
        return Unsupported("attention", f"sparse attention ({name})")
    if name in WITH_BIAS:
        return Unsupported("attention", f"a bias by distance ({name})")
    return None


def _is_sparse(config: Any) -> bool:
    """Return True if SGLang runs the model on a special backend for sparse attention.

    The special backend wraps or replaces the default one, so no layer would ever reach pat.
    """
    text_config = getattr(config, "hf_text_config", None)
    is_sparse = is_minimax_sparse(config.hf_config) or is_deepseek_dsa(config.hf_config)
    is_sparse = is_sparse or "DeepseekV4" in str(config.hf_config.architectures)
    if is_sparse or hasattr(text_config, "wrap_attention_backend"):
        return True
    return compat.is_qwen_sparse(config.hf_config)


def window_reason(model: torch.nn.Module) -> Unsupported | None:
    """Return a reason if the model's class has a window that its layers do not show.

    In such a model, fa3 reads the whole prompt, but only the last of the tokens after the prompt.
    """
    asks = getattr(model, "is_prefill_aware_swa", bool)
    return Unsupported("sliding window", "only after the prompt") if asks() else None


def _reason_for_all(model_runner: Any, default: str) -> Unsupported | None:
    reason = server_reason(model_runner.server_args)
    reason = reason or model_reason(model_runner.model_config)
    reason = reason or window_reason(model_runner.model)
    if reason is not None:
        return reason
    if default not in support.DEFAULT_BACKENDS:
        return Unsupported("default backend", default)
    if compat.translates_slots(model_runner):
        return Unsupported("KV pool", "with virtual slots")
    return dtypes_reason(model_runner)


def dtypes_reason(model_runner: Any) -> Unsupported | None:
    """Return why there are no kernels for a device, or for the dtypes on it, or None.

    A CPU needs no kernels. Reads only `device`, `dtype` and `kv_cache_dtype` of the model runner.
    """
    device, dtype, kv_dtype = model_runner.device, model_runner.dtype, model_runner.kv_cache_dtype
    allowed: Collection[str] = support.DTYPES
    where = ""
    if device != "cpu":
        if device != "cuda" or torch.version.hip is not None:
            return Unsupported("device", device if torch.version.hip is None else "ROCm")
        allowed, where = support.KERNEL_DTYPES, " on a GPU"
        capability = torch.cuda.get_device_capability()
        if capability < support.OLDEST_CAPABILITY:
            return Unsupported("device", "compute capability {}.{}".format(*capability))
    if str(dtype).removeprefix("torch.") not in allowed:
        return Unsupported("dtype of queries and KV cache", f"{dtype}{where}")
    if kv_dtype != dtype and not is_converted(model_runner):
        return Unsupported("dtype of queries and KV cache", f"{dtype} and {kv_dtype}")
    return None


def layer_reason(
    layer: RadixAttention,
    model_runner: Any,
    default: str,
    types: Collection[AttentionType] = (AttentionType.DECODER,),
) -> Unsupported | None:
    """Return why a layer falls back, or None. types: see `layers_of_runner`."""
    one_byte = is_converted(model_runner)
    reason = shape_reason(layer, types, one_byte=one_byte, default=default)
    reason = reason or layer_window_reason(layer, model_runner, default)
    if reason is None and shape_of(layer).is_latent:
        reason = latent_reason(layer, model_runner, default)
        reason = reason or _latent_pool_reason(layer, model_runner, default)
    elif reason is None:
        reason = _pool_reason(layer, model_runner) or _window_pool_reason(layer, model_runner)
    reason = reason or kernels_reason(layer, model_runner)
    return reason or scales_reason(layer, model_runner, default)


def kernels_reason(layer: RadixAttention, model_runner: Any) -> Unsupported | None:
    """Return why pat has kernels for a layer on other GPUs but not on this one, or None.

    Reads only `device` of the model runner.
    """
    if model_runner.device == "cpu":
        return None
    head_dims = layer.qk_head_dim, layer.v_head_dim
    return support.device_reason(*head_dims, torch.cuda.get_device_capability())


def latent_reason(layer: RadixAttention, model_runner: Any, default: str) -> Unsupported | None:
    """Return why a latent attention layer falls back on this server, or None.

    Reads only `server_args`, `model`, `device` and `kv_cache_dtype` of the model runner.
    """
    drafts = drafts_of(model_runner.server_args)
    reason = support.nothing_to_gain(**_rows_of(layer, model_runner, default))
    if reason is not None:
        return reason
    if drafts is not None and not drafts.are_chains and model_runner.device != "cpu":
        return Unsupported("attention", "trees of drafts over latent attention on a GPU")
    if layer.layer_id in _with_lora_on_latent(model_runner.model):
        return Unsupported("attention", "latent attention with LoRA on kv_b_proj")
    return None


def _rows_of(layer: RadixAttention, model_runner: Any, default: str) -> dict[str, Any]:
    """Return the arguments of `support.fills_tile` for a latent attention layer."""
    drafts = drafts_of(model_runner.server_args)
    return {
        "num_heads": layer.tp_q_head_num,
        "num_drafts": 1 if drafts is None else max(drafts.counts),
        "one_byte": is_converted(model_runner),
        "default": default,
    }


def _latent_pool_reason(
    layer: RadixAttention, model_runner: Any, default: str
) -> Unsupported | None:
    """Return a reason unless each slot has one row of KV, whose first columns are the value."""
    pool = model_runner.token_to_kv_pool
    of_attention = pool.full_kv_pool if type(pool) is HybridLinearKVPool else pool
    # Other pools store KV in their own formats.
    if type(of_attention) is not MLATokenToKVPool or of_attention.use_dsa:
        return Unsupported("KV pool", type(of_attention).__name__)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    is_known = (
        keys.dtype == values.dtype == model_runner.kv_cache_dtype
        and tuple(keys.shape[1:]) == (1, layer.qk_head_dim)
        and keys.is_contiguous()
        and tuple(values.shape[1:]) == (1, layer.v_head_dim)
        and (values.data_ptr(), values.stride()) == (keys.data_ptr(), keys.stride())
    )
    if not is_known:
        return _unknown_pool(of_attention, keys)
    most = model_runner.req_to_token_pool.size
    return support.pool_too_small(len(keys), most, **_rows_of(layer, model_runner, default))


def _unknown_pool(pool: Any, buffer: torch.Tensor) -> Unsupported:
    what = f"{type(pool).__name__} of {buffer.dtype} {[*buffer.shape[1:]]}"
    return Unsupported("KV pool", what)


def shape_reason(
    layer: RadixAttention,
    types: Collection[AttentionType] = (AttentionType.DECODER,),
    *,
    one_byte: bool = False,
    default: str = "",
) -> Unsupported | None:
    """Return why a layer's attributes make it fall back, or None.

    types: see `layers_of_runner`. one_byte, default: see `support.fills_tile`.
    """
    if layer.is_cross_attention:
        return Unsupported("attention", "cross attention")
    if layer.attn_type not in types:
        return Unsupported("attention", f"attention of type {layer.attn_type.value}")
    head_dims = (layer.qk_head_dim, layer.v_head_dim)
    heads = (layer.tp_q_head_num, layer.tp_k_head_num)
    reason = support.shape_reason(*heads, *head_dims, one_byte=one_byte, default=default)
    if reason is not None:
        return reason
    if layer.logit_cap and support.is_latent(*head_dims):
        return Unsupported("attention", "latent attention with a soft-cap")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return Unsupported("attention", f"a soft-cap by {layer.logit_capping_method}")
    if layer.pos_encoding_mode != "NONE":
        return Unsupported("attention", f"{layer.pos_encoding_mode} positions")
    if layer.xai_temperature_len > 0:
        return Unsupported("attention", "a temperature by position")
    return None


# Backends that use the same window when they verify as when they decode.
_VERIFIES_WINDOWS = ("fa3", "torch_native")
_WITHIN_CHUNKS = ("fa3",)  # backends that respect a layer's chunks


def layer_window_reason(
    layer: RadixAttention, model_runner: Any, default: str
) -> Unsupported | None:
    """Return why a layer's window makes it fall back, or None.

    Reads only `server_args`, `sliding_window_size`, `attention_chunk_size` and `is_draft_worker` of
    the model runner.
    """
    size, arguments = layer.sliding_window_size, model_runner.server_args
    if not has_window(layer, model_runner):
        return None
    if chunk := chunk_size(layer, model_runner):
        return _chunk_reason(chunk, arguments, default)
    drafts = drafts_of(arguments)
    if drafts is not None:
        if getattr(model_runner, "is_draft_worker", False):
            return Unsupported("sliding window", f"{size} of a draft model")
        if not drafts.are_chains or drafts.lengths_are_bounds:
            return Unsupported("sliding window", f"{size} with drafts in trees or blocks")
        if default not in _VERIFIES_WINDOWS:  # it verifies with another window than pat
            return Unsupported("sliding window", f"{size} with drafts on {default}")
    if batch_invariant(arguments, Environment.read()):
        return Unsupported("sliding window", f"{size} in batch-invariant mode")
    if shape_of(layer).is_latent:
        return Unsupported("sliding window", f"{size} over latent attention")
    if window_size(layer, model_runner, default) is None:
        return Unsupported("sliding window", f"{size} on {default}")
    return None


def _chunk_reason(size: int, arguments: Any, default: str) -> Unsupported | None:
    """Return why a layer that attends within chunks falls back, or None."""
    within = f"attention within chunks of {size}"
    if default not in _WITHIN_CHUNKS:
        return Unsupported("attention", f"{within} on {default}")
    if drafts_of(arguments) is not None:  # a request may be in the next chunk before the host knows
        return Unsupported("attention", f"{within} with drafts")
    if batch_invariant(arguments, Environment.read()):
        return Unsupported("attention", f"{within} in batch-invariant mode")
    return None


def chunk_size(layer: RadixAttention, model_runner: Any) -> int:
    """Return the tokens per chunk of a layer that attends within chunks, or 0 for other layers."""
    return (layer.use_irope and getattr(model_runner, "attention_chunk_size", None)) or 0


def has_window(layer: RadixAttention, model_runner: Any) -> bool:
    """Return True if a layer has a window or chunks: it reads only a request's last tokens."""
    size = layer.sliding_window_size
    return (size is not None and size > -1) or chunk_size(layer, model_runner) > 0


def window_size(layer: RadixAttention, model_runner: Any, default: str) -> int | None:
    """Return how many tokens of a request the default backend reads at most when it decodes.

    0: it reads all tokens. None: the number is not known. The number includes the new token, which
    SGLang's sizes do not include. When triton decodes, it reads one token less than other backends.
    """
    if not has_window(layer, model_runner):
        return 0
    if chunk := chunk_size(layer, model_runner):
        return chunk
    size = layer.sliding_window_size
    if default in ("fa3", "fa4", "torch_native", "trtllm_mha"):
        return int(size) + 1
    # flashinfer and triton use the same window for all layers.
    common = model_runner.sliding_window_size
    if not common or common < 0 or default not in ("flashinfer", "triton"):
        return None
    return int(common) + (default == "flashinfer")


def _pool_reason(layer: RadixAttention, model_runner: Any) -> Unsupported | None:
    """Return a reason unless the KV is `[slot, KV head, head_dim]` in a dtype that pat reads."""
    dtype, pool = model_runner.kv_cache_dtype, model_runner.token_to_kv_pool
    for head_dim, buffer in (
        (layer.qk_head_dim, pool.get_key_buffer(layer.layer_id)),
        (layer.v_head_dim, pool.get_value_buffer(layer.layer_id)),
    ):
        found, expected = [buffer.dtype, *buffer.shape[1:]], [dtype, layer.tp_k_head_num, head_dim]
        if found != expected or not buffer.is_contiguous():
            return _unknown_pool(pool, buffer)
    return None


def _window_pool_reason(layer: RadixAttention, model_runner: Any) -> Unsupported | None:
    """Return a reason if pat cannot find the slots of the tokens in a layer's window."""
    pool = model_runner.token_to_kv_pool
    # There is no reason if the layer has no window, or if all layers have the same pool.
    if not has_window(layer, model_runner) or not hasattr(pool, "full_kv_pool"):
        return None
    is_known = (
        type(pool) is SWAKVPool
        and pool.layers_mapping[layer.layer_id][1]
        and isinstance(pool.full_to_swa_index_mapping, torch.Tensor)
        and getattr(pool, "swa_req_ring_size", None) is None  # else each request has a ring
    )
    return None if is_known else Unsupported("KV pool", f"{type(pool).__name__} with windows")


# Backends that ignore layers' scales.
_UNSCALED = ("torch_native",)
# Backends that apply layers' scales only in some versions of SGLang.
_UNCERTAIN = ("intel_amx",)
# Backends that multiply latent KV by the scales when they read the KV.
_SCALES_LATENT = ("triton", "flashmla")
_BLOCK_SCALED = ("mxfp8",)  # values of --kv-cache-dtype with more than one scale per layer


def is_converted(model_runner: Any) -> bool:
    """Return True if the pool's dtype is a one-byte type that pat converts."""
    name = str(model_runner.kv_cache_dtype).removeprefix("torch.")
    return name in support.CONVERTED_KV_DTYPES


def are_scaled(model_runner: Any, default: str) -> bool:
    """Return True if the default backend applies the scales of the layers."""
    return is_converted(model_runner) and default not in _UNSCALED


def scales_reason(layer: RadixAttention, model_runner: Any, default: str) -> Unsupported | None:
    """Return why a layer's scales make it fall back, or None. Waits for the device."""
    if model_runner.kv_cache_dtype_str in _BLOCK_SCALED:
        return Unsupported("dtype of queries and KV cache", model_runner.kv_cache_dtype_str)
    if not are_scaled(model_runner, default):
        return None
    given = (layer.k_scale, layer.v_scale)
    if shape_of(layer).is_latent:
        # SGLang stores latent KV without scales. Most backends then read the KV without scales too.
        if default in _SCALES_LATENT:
            for scale in given:
                if scale is not None and float(scale) != 1.0:
                    scaled = f"latent KV scaled by {float(scale)}, under {default}"
                    return Unsupported("KV pool", scaled)
        return None
    if default in _UNCERTAIN and given != (None, None):
        return Unsupported("KV pool", f"scaled, under {default}")
    for scale in read_scales(layer):
        if isinstance(scale, torch.Tensor):
            if scale.dtype != torch.float32 or scale.numel() != 1:
                return Unsupported("KV pool", f"scaled by {scale.numel()} numbers of {scale.dtype}")
            if scale.device.type != model_runner.device:
                return Unsupported("KV pool", f"scaled by a number on {scale.device}")
            scale = scale.item()
        if not 0 < scale < math.inf:
            return Unsupported("KV pool", f"scaled by {scale}")
    return None
