"""The tiny model as a Qwen3: SGLang's Llama has no data-parallel attention."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.tiny_model import TinyModel


def write_qwen3(model: TinyModel, folder: Path) -> Path:
    """Write config and weights of `model` to `folder`, with the norms that a Qwen3 has."""
    model.write(folder)
    config = model.config() | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for layer in range(model.num_layers):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(model.head_dim)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
