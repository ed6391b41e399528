"""The hybrid models of the benchmark are what SGLang takes them for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang.srt.configs.model_config import ModelConfig

from server.hybrid_shapes import HYBRIDS


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim", "windowed"),
    [("gpt-oss-20b", 64, 8, 64, 6), ("gemma-3-12b", 16, 8, 256, 5), ("qwen3-next", 16, 2, 256, 0)],
)
def test_shapes(
    name: str, heads: int, kv_heads: int, head_dim: int, windowed: int, tmp_path: Path
) -> None:
    model = HYBRIDS[name]
    (tmp_path / "config.json").write_text(json.dumps(model.shape.config))
    config = ModelConfig(str(tmp_path))
    assert config.num_attention_heads == heads
    assert config.get_num_kv_heads(1) == kv_heads
    assert config.head_dim == head_dim
    text = config.hf_text_config
    kinds = list(getattr(text, "layer_types", None) or text.layers_block_type)
    assert kinds.count("sliding_attention") == windowed
    full = [kind for kind in kinds if kind in ("full_attention", "attention")]
    assert len(full) == model.full_layers
    assert config.has_attention_sinks == (name == "gpt-oss-20b")
    assert set(model.cut) <= set(model.shape.config)
