"""Refuses SGLang configurations that `pat` does not support, before any request is served.

Called once, when SGLang builds the backend. Each error names the value and what is supported.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_pat import support

# Server arguments that change which KV a decode step reads, or who decodes.
REFUSED_ARGUMENTS = {
    "speculative_algorithm": "--speculative-algorithm",
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "enable_pdmux": "--enable-pdmux",
    "enable_hisparse": "--enable-hisparse",
    "dllm_algorithm": "--dllm-algorithm",
}
# Makes a graph of what a backend does before a replay, and from then on asks it no more. Not in
# 0.5.17.
GLUE_GRAPH = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"


def attention_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """The attention layers of a model's part on this rank. All have passed `check_layer`."""
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        raise ValueError(f"pat found no attention layer (RadixAttention) in {type(model).__name__}")
    for layer in layers:
        check_layer(layer, layers[0])
    return layers


def check_server(model_runner: Any) -> None:
    """Raise ValueError if the model's kind or a server argument is not supported."""
    config, arguments = model_runner.model_config, model_runner.server_args
    if model_runner.use_mla_backend:
        raise support.unsupported("attention", f"multi-head latent attention ({_name(config)})")
    if config.is_encoder_decoder:
        raise support.unsupported("attention", f"an encoder-decoder model ({_name(config)})")
    if model_runner.is_hybrid_swa:
        raise support.unsupported("sliding window", f"a hybrid pool ({_name(config)})")
    if config.has_attention_sinks:
        raise support.unsupported("attention", f"attention sinks ({_name(config)})")
    if getattr(model_runner, "attention_chunk_size", None):
        raise support.unsupported("attention", f"attention within chunks ({_name(config)})")
    for name, flag in REFUSED_ARGUMENTS.items():
        value = getattr(arguments, name)
        if value:
            raise support.unsupported("server options", f"{flag} {value}")
    if arguments.dcp_size > 1:
        raise support.unsupported("server options", f"--dcp-size {arguments.dcp_size}")
    if hasattr(envs, GLUE_GRAPH) and getattr(envs, GLUE_GRAPH).get():
        raise support.unsupported("server options", f"{GLUE_GRAPH}=1 in the environment")
    if arguments.page_size is not None and arguments.page_size < 1:
        raise support.unsupported("KV pool", f"page size {arguments.page_size}")


def check_layer(layer: RadixAttention, first: RadixAttention) -> None:
    """Raise ValueError if a layer's attention is not supported, or not shaped like the first's."""
    where = f" (layer {layer.layer_id})"
    if layer.is_cross_attention:
        raise support.unsupported("attention", "cross attention" + where)
    if layer.attn_type != AttentionType.DECODER:
        raise support.unsupported("attention", f"attention of type {layer.attn_type.value}" + where)
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        raise support.unsupported("sliding window", f"{layer.sliding_window_size}{where}")
    if layer.qk_head_dim != layer.v_head_dim:
        raise support.unsupported(
            "head_dim", f"{layer.qk_head_dim} for keys and {layer.v_head_dim} for values{where}"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise support.unsupported("attention", f"a soft-cap by {layer.logit_capping_method}{where}")
    if layer.pos_encoding_mode != "NONE":
        raise support.unsupported("attention", f"{layer.pos_encoding_mode} positions{where}")
    if layer.xai_temperature_len > 0:
        raise support.unsupported("attention", f"a temperature by position{where}")
    if _shape(layer) != _shape(first):
        raise support.unsupported(
            "attention",
            f"layers of different (query heads, KV heads, head_dim): {_shape(first)} in layer "
            f"{first.layer_id}, {_shape(layer)} in layer {layer.layer_id}",
        )


def check_kv_pool(model_runner: Any, layer: RadixAttention) -> None:
    """Raise ValueError if the KV cache is of another type or not `[slot, KV head, head_dim]`."""
    dtype = model_runner.kv_cache_dtype
    if dtype != model_runner.dtype:
        raise support.unsupported(
            "dtype of queries and KV cache", f"{model_runner.dtype} and {dtype}"
        )
    keys = model_runner.token_to_kv_pool.get_key_buffer(layer.layer_id)
    expected = (layer.tp_k_head_num, layer.qk_head_dim)
    if keys.dtype != dtype or tuple(keys.shape[1:]) != expected or not keys.is_contiguous():
        raise support.unsupported(
            "KV pool",
            f"{type(model_runner.token_to_kv_pool).__name__} of {keys.dtype} {[*keys.shape]}",
        )


def check_argument_names(layer: RadixAttention, arguments: dict[str, Any]) -> None:
    """Raise ValueError if a model passes attention arguments that would be ignored."""
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise support.unsupported("attention", f"{', '.join(given)} (layer {layer.layer_id})")


def _shape(layer: RadixAttention) -> tuple[int, int, int]:
    return layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim


def _name(config: Any) -> str:
    return ", ".join(config.hf_config.architectures or ["unknown"])
