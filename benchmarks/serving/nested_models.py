"""A model and a smaller one that drafts for it: the first layers of the model, with its embeddings.

Weights have activations of unit scale, and attention is sharp: what is answered depends on tokens
far away. The layers that the smaller one lacks change little, so that most of its drafts are
accepted, as those of a trained draft model are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from serving.models import write_tokenizer

# How much the layers that drafts do without add to what a token carries.
_LATER = 0.01


def write_nested(folder: Path, config: Mapping[str, Any], layers: int, draft_layers: int) -> Path:
    """Write the model to `folder / "target"` and the smaller one to `folder / "draft"`.

    Parameters
    ----------
    folder : Path
        Exists.
    config : mapping
        Of a Llama.
    layers, draft_layers : int
        Of either model.

    Returns
    -------
    Path
        `folder`.
    """
    for name, count in (("target", layers), ("draft", draft_layers)):
        path = folder / name
        path.mkdir()
        text = json.dumps({**config, "num_hidden_layers": count}, indent=2) + "\n"
        (path / "config.json").write_text(text)
        write_tokenizer(path, config["vocab_size"], config["eos_token_id"])
    weights = _weights(config, layers, draft_layers)
    later = tuple(f"model.layers.{layer}." for layer in range(draft_layers, layers))
    of_both = {name: weight for name, weight in weights.items() if not name.startswith(later)}
    of_target = {name: weight for name, weight in weights.items() if name.startswith(later)}
    for part, name in ((of_both, "both.safetensors"), (of_target, "target.safetensors")):
        save_file(part, folder / "target" / name, metadata={"format": "pt"})
    (folder / "draft" / "both.safetensors").symlink_to(folder / "target" / "both.safetensors")
    return folder


def _weights(config: Mapping[str, Any], layers: int, draft_layers: int) -> dict[str, torch.Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, config["torch_dtype"])

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(std=gain / math.sqrt(columns), generator=generator).cpu()

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    ones = torch.ones(hidden, dtype=dtype)
    q_size, kv_size = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, math.sqrt(hidden)),
        "model.norm.weight": ones,
        "lm_head.weight": normal(config["vocab_size"], hidden),
    }
    for layer in range(layers):
        prefix, gain = f"model.layers.{layer}", 1.0 if layer < draft_layers else _LATER
        weights |= {
            f"{prefix}.input_layernorm.weight": ones.clone(),
            f"{prefix}.post_attention_layernorm.weight": ones.clone(),
            # Gain 2 in both: sharp enough that a far away token can decide the next one.
            f"{prefix}.self_attn.q_proj.weight": normal(q_size, hidden, 2.0),
            f"{prefix}.self_attn.k_proj.weight": normal(kv_size, hidden, 2.0),
            f"{prefix}.self_attn.v_proj.weight": normal(kv_size, hidden, 2.0),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, q_size, gain),
            f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, inner, gain),
        }
    return weights
