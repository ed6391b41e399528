"""Models and GPUs of a replay: bytes of a KV token, bytes of the weights, workers, speed.

The shape of a model comes from its Hugging Face `config.json`. A model that pat does not accelerate
is refused here with the words of `support.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_pat.support import HEAD_DIMS, KERNEL_DTYPES, MAX_GROUP_SIZE, unsupported

_LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
# The keys of the models' own config.json that matter here.
_NAMED_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {**_LLAMA_8B, "max_position_embeddings": 131072},
    "llama-3-8b": {**_LLAMA_8B, "max_position_embeddings": 8192},
    "llama-3.1-70b": {
        **_LLAMA_8B,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
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
DEFAULT_MODEL = "llama-3.1-8b"

_DTYPE_BYTES = dict.fromkeys(KERNEL_DTYPES, 2)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU type, by its data sheet.

    Attributes
    ----------
    num_sms
        Streaming multiprocessors.
    ctas_per_sm
        CTAs of pat's kernels that one SM holds: 1 where it has 100 KB of shared memory, else 2.
    bytes_per_second
        Peak bandwidth of the device memory.
    flops_per_second
        Peak of the tensor cores, bfloat16, dense.
    """

    name: str
    memory_bytes: int
    num_sms: int
    ctas_per_sm: int
    bytes_per_second: float
    flops_per_second: float

    def workers(self, num_kv_heads: int) -> int:
        """CTAs that share the work of one KV head."""
        return max(1, self.num_sms * self.ctas_per_sm // num_kv_heads)


_GB = 10**9
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 80 * _GB, 132, 2, 3.35e12, 989e12),
        Gpu("H200", 141 * _GB, 132, 2, 4.8e12, 989e12),
        Gpu("H20", 96 * _GB, 78, 2, 4.0e12, 148e12),
        Gpu("B200", 180 * _GB, 148, 2, 8.0e12, 2250e12),
        Gpu("A100", 80 * _GB, 108, 2, 2.039e12, 312e12),
        Gpu("L40S", 48 * _GB, 142, 1, 0.864e12, 362e12),
        Gpu("L4", 24 * _GB, 58, 1, 0.300e12, 121e12),
    )
}
DEFAULT_GPU = "H100"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with the same attention in all layers: the part of it on one GPU.

    Attributes
    ----------
    dtype_bytes
        Bytes of one element of the weights and of the KV cache.
    weight_bytes
        Estimated from the projections and embeddings. All experts of a mixture count: a large
        batch reads them all.
    context_length
        Tokens of the longest request that the model takes.
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
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token, all layers and KV heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def on_one_of(self, tp: int) -> ModelShape:
        """The part of the model that each of `tp` GPUs holds under tensor parallelism.

        As in SGLang, a KV head is held several times where there are more GPUs than KV heads.
        ValueError if the heads cannot be divided.
        """
        if tp < 1 or self.num_qo_heads % tp:
            raise ValueError(
                f"--tp {tp}: {self.name} has {self.num_qo_heads} query heads; "
                f"allowed: a divisor of {self.num_qo_heads}"
            )
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"--tp {tp}: {self.name} has {self.num_kv_heads} KV heads; "
                f"allowed: a divisor or a multiple of {self.num_kv_heads}"
            )
        return replace(
            self,
            num_qo_heads=self.num_qo_heads // tp,
            num_kv_heads=max(1, self.num_kv_heads // tp),
            weight_bytes=self.weight_bytes // tp,
        )


def model_shape(name: str | Path) -> ModelShape:
    """The shape of a model, by its name or by the path of a `config.json` or of its folder.

    ValueError names what is neither, the key of a config that is missing, or what pat refuses.
    """
    if str(name) in _NAMED_CONFIGS:
        return _from_config(str(name), _NAMED_CONFIGS[str(name)])
    path = config_file(name)
    if not path.is_file():
        known = ", ".join(MODEL_NAMES)
        raise ValueError(f"model {str(name)!r}; allowed: {known}, or the path of a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a config.json: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a config.json: it holds no JSON object")
    # Multimodal models keep the decoder one level down.
    return _from_config(str(path), config.get("text_config", config))


def config_file(name: str | Path) -> Path:
    """The file that a model's name stands for, if it is no name that is known here."""
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    _refuse_unsupported(name, config)
    layers = _positive(name, config, "num_hidden_layers")
    qo_heads = _positive(name, config, "num_attention_heads")
    kv_heads = _positive(name, config, "num_key_value_heads", qo_heads)
    hidden = _positive(name, config, "hidden_size")
    head_dim = _positive(name, config, "head_dim", hidden // qo_heads)
    if qo_heads % kv_heads:
        raise ValueError(f"{name}: {qo_heads} query heads, no multiple of {kv_heads} KV heads")
    if (head_dim, head_dim) not in HEAD_DIMS:
        raise _refusal(name, "head_dim", head_dim)
    if qo_heads // kv_heads > MAX_GROUP_SIZE:
        raise _refusal(name, "query heads per KV head", qo_heads // kv_heads)
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


def _refuse_unsupported(name: str, config: Mapping[str, Any]) -> None:
    """ValueError for a kind of attention that pat refuses at start-up."""
    if config.get("kv_lora_rank"):
        raise _refusal(name, "attention", "multi-head latent attention (kv_lora_rank is set)")
    if config.get("is_encoder_decoder"):
        raise _refusal(name, "attention", "an encoder-decoder model")
    if config.get("attention_chunk_size"):
        raise _refusal(name, "attention", "attention within chunks (attention_chunk_size is set)")
    kinds = config.get("layer_types") or ()
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other or config.get("hybrid_override_pattern"):
        raise _refusal(name, "attention", ", ".join(other) or "hybrid_override_pattern")
    window = config.get("sliding_window")
    # Qwen2 has the key in every config and says in another whether it counts.
    if window and config.get("use_sliding_window", True) and not kinds:
        raise _refusal(name, "sliding window", window)


def _refusal(name: str, topic: str, value: object) -> ValueError:
    return ValueError(f"{name}: {unsupported(topic, value)}")


def _positive(name: str, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count in a config. Null means the default, as in Transformers."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {key}={value!r}; a positive integer is needed")
    return value
