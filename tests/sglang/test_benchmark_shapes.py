"""The shapes of the benchmarks are what SGLang takes them for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.configs.model_config import ModelConfig

from common.models import TINY
from server.shapes import SHAPES
from sglang_pat.model_layers import FULL, LATENT, read_layers

# Query heads, KV heads and head_dim of one rank, or of the whole model.
HEADS = {
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b-rank": (8, 1, 128),
    "gpt-oss-20b": (64, 8, 64),
    "gemma-3-12b": (16, 8, 256),
    "qwen3-next": (16, 2, 256),
    "qwen3.6": (16, 2, 256),
    "glm-4.6": (96, 8, 128),
}


@pytest.mark.parametrize("name", [name for name in SHAPES if name != TINY])
def test_shapes(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config))
    config = ModelConfig(str(tmp_path))
    if name in HEADS:
        heads = (config.num_attention_heads, config.get_num_kv_heads(1), config.head_dim)
        assert heads == HEADS[name]
    assert config.has_attention_sinks == (name == "gpt-oss-20b")
    assert set(shape.cut) <= set(shape.config)
    # The layers of full attention by which `compare` judges whether pat decodes them.
    full = [layer for layer in read_layers(shape.config) if layer.kind in (FULL, LATENT)]
    text = config.hf_text_config
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    if kinds is None:
        assert len(full) == shape.config["num_hidden_layers"]
    else:
        assert len(full) == sum(kind in ("full_attention", "attention") for kind in kinds)
