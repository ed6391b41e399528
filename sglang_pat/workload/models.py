"""Models and GPUs of a simulated server: configurations, weights, memory, speed.

The shape of a model comes from its Hugging Face `config.json`. `model_layers.py` reads its layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pat.model_layers import (
    CHUNK,
    FULL,
    LATENT,
    NO_ATTENTION,
    WINDOW,
    Layer,
    count,
    decoder_config,
    positive,
    quantisation_of,
)
from sglang_pat.support import KERNEL_DTYPES

_LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
# The keys of the models' own config.json that matter here.
NAMED_CONFIGS: dict[str, dict[str, Any]] = {
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
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": 1000000.0,
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
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
    },
}
MODEL_NAMES = tuple(NAMED_CONFIGS)
DEFAULT_MODEL = "llama-3.1-8b"

_DTYPES = (*KERNEL_DTYPES, "float32")  # the last one is cast when it is loaded
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
_STATE_SQUARES = 6
_LARGEST_CONFIG = 64 << 20  # bytes: weights are no config


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU type (the SXM module where there are several), for estimates.

    The values come from pages of third parties, some from memory. Not all were compared with
    NVIDIA's data sheets. NVIDIA publishes no number of SMs for H20 and B200: those are what users
    of the GPUs report.

    Attributes
    ----------
    num_sms
        Streaming multiprocessors.
    ctas_per_sm
        CTAs of pat's kernels that one SM holds: 1 where it has 100 KB of shared memory, else 2.
    l2_bytes
        The cache that all SMs share.
    bytes_per_second
        Peak bandwidth of the device memory.
    flops_per_second
        Peak of the tensor cores, bfloat16, dense.
    capability
        Compute capability.
    default_backend
        SGLang's default attention backend there.
    """

    name: str
    memory_bytes: int
    num_sms: int
    ctas_per_sm: int
    l2_bytes: int
    bytes_per_second: float
    flops_per_second: float
    capability: tuple[int, int]
    default_backend: str

    def workers(self, num_kv_heads: int) -> int:
        """CTAs that share the work of one KV head."""
        return max(1, self.num_sms * self.ctas_per_sm // num_kv_heads)


_GB, _MB = 10**9, 10**6
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 80 * _GB, 132, 2, 50 * _MB, 3.35e12, 989e12, (9, 0), "FA3"),
        Gpu("H200", 141 * _GB, 132, 2, 50 * _MB, 4.8e12, 989e12, (9, 0), "FA3"),
        Gpu("H20", 96 * _GB, 78, 2, 60 * _MB, 4.0e12, 148e12, (9, 0), "FA3"),
        Gpu("B200", 180 * _GB, 148, 2, 126 * _MB, 8.0e12, 2250e12, (10, 0), "TRT-LLM"),
        Gpu("A100", 80 * _GB, 108, 2, 40 * _MB, 2.039e12, 312e12, (8, 0), "FlashInfer"),
        Gpu("L40S", 48 * _GB, 142, 1, 96 * _MB, 0.864e12, 362e12, (8, 9), "FlashInfer"),
        Gpu("L4", 24 * _GB, 58, 1, 48 * _MB, 0.300e12, 121e12, (8, 9), "FlashInfer"),
    )
}
DEFAULT_GPU = "H100"


def read_config(name: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return a label of a model, and the part of its `config.json` about the decoder.

    Raises what `read_whole_config` does.
    """
    label, config = read_whole_config(name)
    return label, decoder_config(config)


def read_whole_config(name: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return a label of a model, and its `config.json`.

    ValueError if `name` is neither a name that is known here, nor such a file or its folder.
    """
    if str(name) in NAMED_CONFIGS:
        return str(name), NAMED_CONFIGS[str(name)]
    path = config_file(name)
    if not path.is_file():
        known = ", ".join(MODEL_NAMES)
        raise ValueError(f"model {str(name)!r}; allowed: {known}, or the path of a config.json")
    try:
        size = path.stat().st_size
        if size > _LARGEST_CONFIG:
            raise ValueError(f"it has {size:,} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a config.json: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a config.json: it holds no JSON object")
    return str(path), config


def config_file(name: str | Path) -> Path:
    """The file that a model's name stands for, if it is no name that is known here."""
    path = Path(name)
    return path / "config.json" if path.is_dir() else path


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest request; None where the configuration does not say."""
    if config.get("max_position_embeddings") is None:
        return None
    return positive(config, "max_position_embeddings")


def check_dtype(config: Mapping[str, Any]) -> None:
    """ValueError for a type of weights that SGLang does not serve in 16 bits."""
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise ValueError(f"torch_dtype={dtype!r}; allowed: {', '.join(_DTYPES)}")


# --- weights ---

# By quant_method, or by the quant_algo of modelopt: bytes of one parameter, with the scales of its
# block.
_QUANTISED_BYTES = {
    "fp8": 1.0,
    "fbgemm_fp8": 1.0,
    "w8a8_fp8": 1.0,
    "w8a8_int8": 1.0,
    "mxfp8": 33 / 32,
    "mxfp4": 17 / 32,
    "nvfp4": 9 / 16,
    "modelopt_fp8": 1.0,
    "modelopt_fp4": 9 / 16,
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a decoder, estimated from its shape.

    Attributes
    ----------
    dense
        Read in every step: attention, MLPs, shared experts, the output head.
    experts
        Of all routed experts.
    num_experts, experts_per_token
        Of one layer; 1 and 1 without experts.
    vocabulary
        Of the output head, as many as an embedding has. They are part of `dense`.
    embedding
        Held beside them: the embedding, unless it is the output head.
    """

    dense: int
    experts: int
    num_experts: int
    experts_per_token: int
    vocabulary: int
    embedding: int


def read_weights(config: Mapping[str, Any], layers: Sequence[Layer]) -> Weights:
    """The parameters of a model. Blocks that keep a state count as 6 x hidden_size squared."""
    hidden = positive(config, "hidden_size")
    vocabulary = hidden * positive(config, "vocab_size")
    dense = vocabulary + sum(_mixer_parameters(config, layer, hidden) for layer in layers)
    embedding = 0 if config.get("tie_word_embeddings") else vocabulary
    num_experts = next((positive(config, key) for key in _EXPERT_COUNTS if config.get(key)), 0)
    # With a pattern of letters an MLP is a layer of its own, else every layer has one.
    pattern = config.get("hybrid_override_pattern")
    num_mlps = sum(letter in "-E" for letter in pattern) if pattern else len(layers)
    if not num_experts:
        matrices = 2 if "n_embd" in config else 3  # GPT-2's MLPs have no gate
        dense += num_mlps * matrices * hidden * positive(config, "intermediate_size")
        return Weights(dense, 0, 1, 1, vocabulary, embedding)
    num_dense = min(count(config, "first_k_dense_replace"), num_mlps)
    if num_dense:
        dense += num_dense * 3 * hidden * positive(config, "intermediate_size")
    width = positive(config, "moe_intermediate_size", config.get("intermediate_size"))
    num_mixtures = num_mlps - num_dense
    dense += num_mixtures * 3 * hidden * width * count(config, "n_shared_experts")
    per_token = next((positive(config, key) for key in _EXPERTS_PER_TOKEN if config.get(key)), 1)
    experts = num_mixtures * 3 * hidden * width * num_experts
    per_token = min(per_token, num_experts)
    return Weights(dense, experts, num_experts, per_token, vocabulary, embedding)


def _mixer_parameters(config: Mapping[str, Any], layer: Layer, hidden: int) -> int:
    """Parameters of what mixes tokens in a layer: attention, or what is in its place."""
    if layer.kind == NO_ATTENTION:
        return 0
    if layer.kind in (FULL, WINDOW, CHUNK):
        queries = layer.num_qo_heads * (layer.head_dim + layer.v_head_dim)
        return hidden * (queries + layer.kv_elements)
    if layer.kind == LATENT:
        rope, nope, value = (
            count(config, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        rank, query_rank = layer.kv_elements - rope, count(config, "q_lora_rank")
        down = hidden * (query_rank + layer.kv_elements)
        heads = layer.num_qo_heads
        up = (query_rank or hidden) * heads * (nope + rope) + rank * heads * (nope + value)
        return down + up + heads * value * hidden
    return _STATE_SQUARES * hidden * hidden  # STATE, or unknown


def parameter_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of one parameter, as quantised, mostly without scales.

    2 if the configuration does not say, or says it in a way that is not known here.
    """
    quantisation = quantisation_of(config)
    if isinstance(quantisation.get("bits"), int):
        return int(quantisation["bits"]) / 8
    groups = quantisation.get("config_groups")  # of compressed-tensors
    if isinstance(groups, Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        bits = [each.get("num_bits") for each in weights if isinstance(each, Mapping)]
        return max((each for each in bits if isinstance(each, int)), default=16) / 8
    for load, size in (("load_in_4bit", 0.5), ("load_in_8bit", 1.0)):  # of bitsandbytes
        if quantisation.get(load):
            return size
    names = (quantisation.get("quant_algo"), quantisation.get("quant_method"))
    known = [_QUANTISED_BYTES.get(str(name).lower()) for name in names]
    return next((size for size in known if size is not None), 2.0)
