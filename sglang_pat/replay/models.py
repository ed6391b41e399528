"""The shape of a model: what a token of its KV cache costs, and what a decode step reads besides.

Beside the replay: turns KV tokens into bytes, and bytes into time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

# From the models' own config.json; the keys that matter here.
_NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    "qwen3-8b": {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    },
}
MODEL_NAMES = tuple(_NAMED_CONFIGS)

_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with the same attention in all layers.

    dtype_bytes: of an element of weights and KV cache. weight_bytes: estimated from the projections
    and embeddings; of a mixture of experts all experts count, which is what a large batch reads.
    context_length: the longest request it takes, in tokens.
    """

    name: str
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    weight_bytes: int
    context_length: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token, all layers and KV heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


def model_shape(name: str | Path) -> ModelShape:
    """The shape of a model by its name, or by the path of a Hugging Face config.json or its folder.

    ValueError names what is neither, or the key of a config that is missing or not supported.
    """
    if str(name) in _NAMED_CONFIGS:
        return _from_config(str(name), _NAMED_CONFIGS[str(name)])
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        known = ", ".join(MODEL_NAMES)
        raise ValueError(f"model {str(name)!r}; allowed: {known}, or the path of a config.json")
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a config.json: {error}") from error
    # Multimodal models keep the decoder one level down.
    return _from_config(str(path), config.get("text_config", config))


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    if "kv_lora_rank" in config:
        raise ValueError(f"{name}: kv_lora_rank is set; only MHA, GQA and MQA are supported")
    layers = _positive(name, config, "num_hidden_layers")
    qo_heads = _positive(name, config, "num_attention_heads")
    kv_heads = _positive(name, config, "num_key_value_heads", qo_heads)
    hidden = _positive(name, config, "hidden_size")
    head_dim = _positive(name, config, "head_dim", hidden // qo_heads)
    if qo_heads % kv_heads:
        raise ValueError(f"{name}: {qo_heads} query heads, no multiple of {kv_heads} KV heads")
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"{name}: torch_dtype={dtype!r}; allowed: {', '.join(_DTYPE_BYTES)}")

    attention = hidden * head_dim * (2 * qo_heads + 2 * kv_heads)
    experts = next((config[key] for key in _EXPERT_COUNTS if config.get(key)), None)
    if experts is None:
        mlp = 3 * hidden * _positive(name, config, "intermediate_size")
    else:
        default = config.get("intermediate_size")
        mlp = 3 * hidden * _positive(name, config, "moe_intermediate_size", default) * experts
    embeddings = 1 if config.get("tie_word_embeddings") else 2
    vocabulary = embeddings * hidden * _positive(name, config, "vocab_size")
    return ModelShape(
        name=name,
        num_layers=layers,
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype_bytes=_DTYPE_BYTES[dtype],
        weight_bytes=_DTYPE_BYTES[dtype] * (layers * (attention + mlp) + vocabulary),
        context_length=_positive(name, config, "max_position_embeddings"),
    )


def _positive(name: str, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count in a config; null means the default, as in Transformers."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {key}={value!r}; a positive integer is needed")
    return value
