"""Writes variants of the tiny model: with latent attention (MLA), as a Qwen3, or with windows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.tiny_model import TinyModel
from sglang_pat.workload.models import NAMED_CONFIGS

_LITE = NAMED_CONFIGS["deepseek-v2-lite"]
_LATENT, _ROPE = _LITE["kv_lora_rank"], _LITE["qk_rope_head_dim"]
_NOPE, _VALUES = _LITE["qk_nope_head_dim"], _LITE["v_head_dim"]
_OF_HEADS = ("num_key_value_heads", "head_dim")


def write_latent(model: TinyModel, folder: Path) -> Path:
    """Write config and weights of `model` to `folder`, with the latent sizes of a DeepSeek-V2.

    All MLPs are dense. As in the tiny model, the softmax is sharp enough that a far away token can
    decide the next one.
    """
    model.write(folder)
    config = {
        **_LITE,
        **{name: value for name, value in model.config().items() if name not in _OF_HEADS},
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": model.num_qo_heads,
        "first_k_dense_replace": model.num_layers,
        "rope_scaling": _LITE["rope_scaling"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name: weight
        for name, weight in load_file(folder / "model.safetensors").items()
        if ".self_attn." not in name
    }
    generator = torch.Generator().manual_seed(model.seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))

    heads, hidden = model.num_qo_heads, model.hidden_size
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}.self_attn"
        weights |= {
            f"{prefix}.q_proj.weight": normal(heads * (_NOPE + _ROPE), hidden, 2.0),
            f"{prefix}.kv_a_proj_with_mqa.weight": normal(_LATENT + _ROPE, hidden, 2.0),
            f"{prefix}.kv_a_layernorm.weight": torch.ones(_LATENT),
            f"{prefix}.kv_b_proj.weight": normal(heads * (_NOPE + _VALUES), _LATENT, 2.0),
            f"{prefix}.o_proj.weight": normal(hidden, heads * _VALUES),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_qwen3(model: TinyModel, folder: Path) -> Path:
    """Write config and weights of `model` to `folder`, as a Qwen3 with its additional norms.

    It is for data-parallel attention, which SGLang's Llama lacks.
    """
    model.write(folder)
    config = model.config() | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(model.num_layers):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(model.head_dim)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_windows(model: TinyModel, folder: Path, window: int) -> Path:
    """Write config and weights of `model`, with a sliding window in every other layer.

    The model is a Mellum without layers of experts, so its weights are those of a Qwen3.
    """
    write_qwen3(model, folder)
    kinds = ("sliding_attention", "full_attention")
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "layer_types": [kinds[layer % 2] for layer in range(model.num_layers)],
        "mlp_layer_types": ["dense"] * model.num_layers,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "sliding_window": window,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
