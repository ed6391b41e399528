"""Defaults of configs equal the defaults of the config classes that SGLang uses."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_pat.model_defaults import DEFAULTS
from sglang_pat.model_layers import WINDOW, read_layers

auto = pytest.importorskip("transformers.models.auto.configuration_auto")

# Keys for which SGLang's own class has another default, or no attribute.
_OF_SGLANG = {("qwen3_5_text", "num_key_value_heads"), ("gemma4_text", "head_dim")}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_transformers(name: str) -> None:
    if name not in auto.CONFIG_MAPPING:
        pytest.skip("unknown to this version of transformers")
    config = auto.CONFIG_MAPPING[name]()
    for key, value in DEFAULTS[name].items():
        if (name, key) not in _OF_SGLANG:
            assert getattr(config, key, False) == value, key


@pytest.mark.parametrize(
    ("changes", "heads", "window"),
    [
        ({"model_type": "qwen3_moe"}, (32, 4, 128), None),
        ({"model_type": "qwen3_moe", "num_key_value_heads": None}, (32, 32, 128), None),
        ({"model_type": "minimax_m2", "hidden_size": 3072}, (32, 8, 128), None),
        ({"model_type": "no_such"}, (32, 32, 128), None),
        ({"model_type": "gpt_oss"}, (32, 8, 64), 128),
        ({"model_type": "gpt_oss", "sliding_window": None}, (32, 8, 64), None),
        ({"model_type": "gemma4_text", "global_head_dim": 512}, (32, 4, 256), 512),
        ({"model_type": "gemma4_text", "global_head_dim": 512, "sliding_window": 0},
         (32, 4, 256), None),
    ],
)  # fmt: skip
def test_a_missing_key_has_the_default_and_null_has_none(
    changes: dict[str, Any], heads: tuple[int, ...], window: int | None
) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}
    kinds = ["sliding_attention", "full_attention"]
    (layer, _) = read_layers({**config, "layer_types": kinds, **changes})
    assert (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim) == heads
    assert layer.window == window
    assert (layer.kind == WINDOW) == (window is not None)


def test_a_decoder_of_a_multimodal_model_may_lack_what_equals_its_class() -> None:
    config = {"architectures": ["InternVLChatModel"], "llm_config": {"model_type": "qwen3"}}
    layers = read_layers(config)
    assert len(layers) == 32
    assert (layers[0].num_kv_heads, layers[0].head_dim) == (32, 128)
