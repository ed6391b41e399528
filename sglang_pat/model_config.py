"""Reads a model's `config.json`: the decoder's part under the usual keys, counts, and checks.

`model_layers.py` derives the layers from it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from sglang_pat import model_classes
from sglang_pat.model_classes import class_name
from sglang_pat.model_defaults import ATTENTION, DEFAULTS

# Keys whose value is the decoder of a multimodal model. SGLang uses the first key that is present.
_DECODERS = ("thinker_config", "llm_config", "language_config", "text_config")
# Top-level keys of a multimodal model that also apply to its decoder.
_OF_THE_WHOLE = (
    "architectures",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "dtype",
    "tie_word_embeddings",
)
# Name of a key in some model families -> the key's usual name.
_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_inner": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "ff_intermediate_size": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "block_ff_dim": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "num_attention_groups": "num_key_value_heads",
    "multi_query_group_num": "num_key_value_heads",
    "kv_n_heads": "num_key_value_heads",
    "kv_channels": "head_dim",
    "attention_head_dim": "head_dim",
    "decoder_attention_heads": "num_attention_heads",  # Whisper
    "decoder_ffn_dim": "intermediate_size",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}
_PARTS = ("attn_config", "ffn_config")  # parts of DBRX's configuration
_LARGEST = 10**9


def check_architectures(config: Mapping[str, Any]) -> None:
    """Raise ValueError unless the configuration names the classes of its model."""
    names = config.get("architectures")
    if names is None and class_name(config):
        return
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError("not a model's config.json: it names no architectures")


def check_served(config: Mapping[str, Any]) -> None:
    """Raise ValueError if `config` is not a model's configuration, or the model does not decode."""
    check_architectures(config)
    name = class_name(config)
    if not model_classes.generates_tokens(config):
        raise ValueError(
            f"{name} is an embedding, reward or encoder model: it generates no tokens, so "
            "nothing is decoded"
        )
    if model_classes.is_draft_model(name):
        raise ValueError(
            f"{reprlib.repr(name)} drafts tokens for another model: give the other one"
        )


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a count that no class accepts."""
    names = ("num_attention_heads", "num_key_value_heads")
    for key in (*names, "num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(config.get(key), (list, type(None))):  # some classes take a list
            positive(config, key)
    qo_heads, kv_heads = (config.get(key) for key in names)
    if isinstance(qo_heads, int) and isinstance(kv_heads, int):
        check_groups(qo_heads, kv_heads)


def check_groups(qo_heads: int, kv_heads: int) -> None:
    if qo_heads % kv_heads:
        raise ValueError(f"{qo_heads} query heads, not a multiple of {kv_heads} KV heads")


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a configuration, with the keys that most models use.

    Multimodal models nest the decoder one or two levels deep, but describe the decoder's
    quantisation at the top level.
    """
    name = class_name(config)
    # These Llava models keep the keys of their decoder at the top level.
    is_llava = name.startswith("Llava") and name.endswith("ForCausalLM")
    for key in () if is_llava else _DECODERS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            kept = {each: config[each] for each in _OF_THE_WHOLE if config.get(each) is not None}
            own = {k: v for k, v in inner.items() if v is not None or k not in _OF_THE_WHOLE}
            if "architectures" in own and "architectures" in kept:
                own["decoder_architectures"] = own.pop("architectures")
            defaults = DEFAULTS.get(str(inner.get("model_type")), {})
            return decoder_config({**kept, **defaults, **own, "encoders": _encoders(config)})
    defaults = DEFAULTS.get(str(config.get("model_type")), {})
    named = {key: defaults[key] for key in ATTENTION if key in defaults} | dict(config)
    parts = (config[key] for key in _PARTS if isinstance(config.get(key), Mapping))
    for part in (config, *parts):
        for old, new in _NAMES.items():
            is_off = old == "multi_query_group_num" and not config.get("multi_query_attention")
            if part.get(old) is not None and named.get(new) is None and not is_off:
                named[new] = part[old]
    width = config.get("n_embd")
    if isinstance(width, int) and named.get("intermediate_size") is None:
        named["intermediate_size"] = 4 * width
    named.setdefault("encoders", _encoders(config))
    return named


def _encoders(config: Mapping[str, Any]) -> list[Any]:
    """Return the configurations of a multimodal model's vision and audio encoders."""
    found = [*config.get("encoders", ())]
    for key in ("vision_config", "audio_config"):
        if isinstance(config.get(key), Mapping):
            found.append(config[key])
    return found


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the count `config[key]`, or `default` for null, as in Transformers.

    Raises ValueError, which names the key, if the count is not valid.
    """
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError(
            f"{key}={reprlib.repr(value)}; allowed: a whole number from 1 to {_LARGEST:,}"
        )
    return value


def count(config: Mapping[str, Any], key: str) -> int:
    """Return the count `config[key]`, or 0 if it is null or missing."""
    return positive(config, key) if config.get(key) else 0


def numbers(config: Mapping[str, Any], key: str) -> list[int]:
    """Return the list of integers `config[key]`. If it is not one, ValueError names the key."""
    listed = config.get(key)
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        raise ValueError(f"{key}={reprlib.repr(listed)}; allowed: a list of whole numbers")
    return listed


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the checkpoint's `quantization_config`, or {}."""
    quantisation = config.get("quantization_config")
    return quantisation if isinstance(quantisation, Mapping) else {}


def has_float8_cache(config: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint requires fp8 KV.

    With `--kv-cache-dtype auto`, the newest SGLang then stores fp8 KV. Older versions ignore this
    requirement of compressed-tensors checkpoints.
    """
    quantisation = quantisation_of(config)
    scheme = quantisation.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return str(quantisation.get("kv_cache_quant_algo")).upper() == "FP8"
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        return False
    if quantisation.get("quant_method") != "compressed-tensors":
        return True
    is_static = scheme.get("symmetric", True) and not scheme.get("dynamic", False)
    return scheme.get("strategy") == "tensor" and bool(is_static)
