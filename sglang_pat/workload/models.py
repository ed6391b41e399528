"""Models and GPU types of a simulated server.

The shape of a model comes from its Hugging Face `config.json`; `model_layers.py` reads the layers
from that `config.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pat.messages import quoted
from sglang_pat.model_config import decoder_config, positive, quantisation_of
from sglang_pat.support import KERNEL_DTYPES
from sglang_pat.workload.weights import read_weights as read_weights

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
# Name of a model -> the keys of its config.json that matter here.
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
# What the command line accepts as a model, in words.
MODELS = (
    f"{', '.join(MODEL_NAMES)}, the path of a config.json or of its folder, or a name on the "
    "Hugging Face hub"
)

_DTYPES = (*KERNEL_DTYPES, "float32")  # SGLang casts float32 weights to 16 bits
_LARGEST_CONFIG = 64 << 20  # bytes; larger files are weights
_CONFIG, _QUANTISATION = "config.json", "hf_quant_config.json"
_HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
_HUB_SECONDS = 3
_LONGEST_PATH = 120  # characters in a message
_LOW_BITS = re.compile(r"(?<![a-z])(?:(?:nv|mx)?fp[48]|int[48]|w\d+a\d+|awq|gptq)(?![a-z\d])", re.I)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU type, for estimates. If it is sold in several forms, the values are the SXM module's.

    The values come from pages of third parties, or were written from memory. Not all were compared
    with NVIDIA's data sheets. For H20 and B200, NVIDIA publishes no number of SMs, so `num_sms` is
    the number that users report.

    Attributes
    ----------
    num_sms
        Streaming multiprocessors.
    ctas_per_sm
        CTAs of pat's kernels that an SM runs at once: 1 if it has 100 KB of shared memory, else 2.
    l2_bytes
        Bytes of the L2 cache.
    bytes_per_second
        Peak bandwidth of the device memory.
    flops_per_second
        Peak of the tensor cores, for dense bfloat16.
    capability
        Compute capability.
    default_backend
        SGLang's default attention backend on this GPU.
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
        """Return the number of CTAs that share the work of one KV head."""
        return max(1, self.num_sms * self.ctas_per_sm // num_kv_heads)


_GB, _MB = 10**9, 10**6
GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuModel("H100", 80 * _GB, 132, 2, 50 * _MB, 3.35e12, 989e12, (9, 0), "FA3"),
        GpuModel("H200", 141 * _GB, 132, 2, 50 * _MB, 4.8e12, 989e12, (9, 0), "FA3"),
        GpuModel("H20", 96 * _GB, 78, 2, 60 * _MB, 4.0e12, 148e12, (9, 0), "FA3"),
        GpuModel("B200", 180 * _GB, 148, 2, 126 * _MB, 8.0e12, 2250e12, (10, 0), "TRT-LLM"),
        GpuModel("A100", 80 * _GB, 108, 2, 40 * _MB, 2.039e12, 312e12, (8, 0), "FlashInfer"),
        GpuModel("L40S", 48 * _GB, 142, 1, 96 * _MB, 0.864e12, 362e12, (8, 9), "FlashInfer"),
        GpuModel("L4", 24 * _GB, 58, 1, 48 * _MB, 0.300e12, 121e12, (8, 9), "FlashInfer"),
    )
}
DEFAULT_GPU = "H100"


@contextlib.contextmanager
def naming(model: str) -> Iterator[None]:
    """Prefix the message of each ValueError in this context with the label of a model."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from None


def read_config(name: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return a model's label, and the decoder's part of its `config.json`.

    Raises the errors of `read_whole_config`.
    """
    label, config = read_whole_config(name)
    return label, decoder_config(quantised_config(label, config))


def read_whole_config(name: str | Path) -> tuple[str, Mapping[str, Any]]:
    """Return a model's label and its `config.json`.

    `name` is a key of `NAMED_CONFIGS`, the path of a `config.json` or of its folder, or the name of
    a model on the Hugging Face hub. If the local cache does not have the model's file, the hub must
    be reachable. ValueError if there is no such model or file.
    """
    if str(name) in NAMED_CONFIGS:
        return str(name), NAMED_CONFIGS[str(name)]
    path = config_file(name)
    if os.path.isdir(name) and not os.path.isfile(path):
        raise ValueError(f"model {_told(name)}: no {_CONFIG} in this folder; allowed: {MODELS}")
    if not os.path.exists(path) and _HUB_NAME.fullmatch(str(name)):
        path = _from_hub(str(name))
    if not os.path.isfile(path):  # Path.is_file() raises if a name is too long
        raise ValueError(f"model {_told(name)}; allowed: {MODELS}")
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


def quantised_config(label: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration. If the model has a `hf_quant_config.json`, add its contents.

    Model Optimizer describes its quantisation in that file instead of `quantization_config`.
    """
    file = Path(label).parent / _QUANTISATION
    if label in NAMED_CONFIGS or config.get("quantization_config") or not file.is_file():
        return config
    try:
        quantisation = json.loads(file.read_text(encoding="utf-8"))["quantization"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: not a quantization of Model Optimizer: {error}") from None
    return {**config, "quantization_config": {"quant_method": "modelopt", **quantisation}}


def unread_quantisation(name: str, config: Mapping[str, Any]) -> str | None:
    """Return a warning if a model's name has a type of few bits, but no file says more, or None.

    name: the model as the user gave it. config: its configuration, with what lies beside it.
    """
    found = _LOW_BITS.search("/".join(Path(name).parts[-2:]))
    if found is None or quantisation_of(config):
        return None
    return (
        f"the model's name has {found[0]}, but neither {_CONFIG} nor {_QUANTISATION} beside it "
        "says how the weights are quantised: each counts 2 bytes"
    )


def config_file(name: str | Path) -> Path:
    """Return the path of a `config.json`. name: this path, its folder, or a cached hub model."""
    path = Path(name)
    if os.path.isdir(path):
        return path / _CONFIG
    if not os.path.exists(path) and _HUB_NAME.fullmatch(str(name)):
        return _in_cache(str(name)) or path
    return path


def _in_cache(name: str) -> Path | None:
    """Return the path of a hub model's `config.json` in the local cache, or None."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # it comes with SGLang
        return None
    found = try_to_load_from_cache(name, _CONFIG)
    return Path(found) if isinstance(found, str) else None


def ask_hub(name: str) -> None:
    """Raise ValueError if neither the local cache nor the hub has this model's `config.json`.

    Without the hub's client, which comes with SGLang, nothing is checked.
    """
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
    except ImportError:
        return
    if _in_cache(name) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=_HUB_SECONDS)
    except Exception as error:  # the hub's client or its HTTP library may raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _not_on_hub(name, reason) from None


def _not_on_hub(name: str, reason: str) -> ValueError:
    return ValueError(
        f"model {_told(name)}: no file, and the Hugging Face hub gives no config.json of that "
        f"name ({reason[:200]}); allowed: {MODELS}"
    )


def _from_hub(name: str) -> Path:
    """Download a hub model's `config.json`, and return its path. ValueError if that fails."""
    ask_hub(name)  # fails soon, whereas a download would retry for long
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise _not_on_hub(name, "huggingface_hub is not installed") from None
    path = Path(hf_hub_download(name, _CONFIG))
    with contextlib.suppress(Exception):  # few models have this file
        hf_hub_download(name, _QUANTISATION)
    return path


def _told(name: object) -> str:
    """Return a name for messages. Only very long names are shortened."""
    text = str(name)
    return repr(text) if len(text) <= _LONGEST_PATH else quoted(text)


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a request may have, or None if the configuration does not say."""
    if config.get("max_position_embeddings") is None:
        return None
    return positive(config, "max_position_embeddings")


def served_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype in which SGLang serves the weights, by its default `--dtype auto`.

    Raises ValueError if that dtype does not have 16 bits.
    """
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in _DTYPES:
        raise ValueError(f"torch_dtype={quoted(dtype)}; allowed: {', '.join(_DTYPES)}")
    if dtype != "float32":
        return dtype
    return "bfloat16" if str(config.get("model_type")).startswith("gemma") else "float16"
