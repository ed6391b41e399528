"""Layers of a config.json: their kinds, and which of them pat decodes, or why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, Family

from sglang_pat import support
from sglang_pat.model_config import check_served, decoder_config, has_float8_cache
from sglang_pat.model_layers import (
    CHUNK,
    FULL,
    LATENT,
    NO_ATTENTION,
    STATE,
    WINDOW,
    read_layers,
    summary,
)

# Part of the config of a compressed-tensors checkpoint with an fp8 KV cache.
SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
PLAIN: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
}

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # like DeepSeek's


def kinds(**changes: object) -> list[str]:
    return [layer.kind for layer in read_layers({**PLAIN, **changes})]


def refused(**changes: object) -> list[str]:
    """Return the reason of every layer, or an empty string if pat decodes it."""
    layers = read_layers({**PLAIN, **changes})
    return ["" if layer.refusal is None else str(layer.refusal) for layer in layers]


@pytest.mark.parametrize(("heads", "tp", "accelerated"), [(16, 1, 1), (128, 8, 1), (128, 2, 0)])
def test_latent_attention_is_accelerated_where_a_rank_has_few_heads(
    heads: int, tp: int, accelerated: bool
) -> None:
    layers = read_layers({**PLAIN, **MLA, "num_attention_heads": heads}, tp)
    assert {layer.is_accelerated for layer in layers} == {bool(accelerated)}
    assert (layers[0].head_dim, layers[0].v_head_dim) == (576, 512)
    assert (layers[0].num_kv_heads, layers[0].kv_elements) == (1, 576)


@pytest.mark.parametrize(("tp", "reason"), [(1, "query heads per KV head 24"), (2, "")])
def test_a_rank_that_holds_a_copy_of_a_kv_head_has_fewer_query_heads(tp: int, reason: str) -> None:
    layers = read_layers({**PLAIN, "num_attention_heads": 24, "num_key_value_heads": 1}, tp)
    assert {str(layer.refusal) if layer.refusal else "" for layer in layers} == {reason}


def test_a_plain_decoder_is_accelerated() -> None:
    layers = read_layers(PLAIN)
    assert len(layers) == 6
    assert all(layer.is_accelerated and layer.kind == FULL for layer in layers)
    assert (layers[0].num_kv_heads, layers[0].kv_elements) == (4, 4 * 2 * 128)
    assert summary(layers) == [(6, "full attention, 16/4 heads of 128", True)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # gpt-oss and Gemma 3, as transformers writes them today
        ({"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 128},
         [WINDOW, FULL] * 3),
        # older files of Gemma 3 and 2
        ({"sliding_window": 512, "sliding_window_pattern": 6}, [WINDOW] * 5 + [FULL]),
        ({"sliding_window": 512, "model_type": "gemma2"}, [WINDOW, FULL] * 3),
        # Qwen2, Mistral: SGLang's classes have no window.
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512,
          "use_sliding_window": True, "max_window_layers": 4}, [FULL] * 6),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, [FULL] * 6),
        ({"architectures": ["Exaone4ForCausalLM"], "sliding_window": 512,
          "sliding_window_pattern": "LLG"}, [WINDOW, WINDOW, FULL] * 2),
        # Llama 4: every fourth layer has no rotation
        ({"attention_chunk_size": 8192}, [CHUNK] * 3 + [FULL] + [CHUNK] * 2),
        # SGLang's class does not read the list.
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 0] * 3},
         [CHUNK] * 3 + [FULL] + [CHUNK] * 2),
        # Qwen3-Next
        ({"full_attention_interval": 3}, [STATE, STATE, FULL] * 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, [STATE, FULL] * 3),
        # Nemotron-H, LFM2, Ling 2.5
        ({"hybrid_override_pattern": "M-M*E-"},
         [STATE, NO_ATTENTION, STATE, FULL, NO_ATTENTION, NO_ATTENTION]),
        ({"full_attn_idxs": [2]}, [STATE, STATE, FULL, STATE, STATE, STATE]),
        ({"layers_block_type": ["mamba", "moe", "attention"] * 2}, [STATE, NO_ATTENTION, FULL] * 2),
        ({"architectures": ["BailingMoeV2_5ForCausalLM"], "layer_group_size": 3,
          "kv_lora_rank": 512}, [STATE, STATE, LATENT] * 2),
        # MiMo-V2, DeepSeek, Kimi Linear
        ({"hybrid_layer_pattern": [0, 1, 1, 0, 1, 1], "sliding_window": 128},
         [FULL, WINDOW, WINDOW, FULL, WINDOW, WINDOW]),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [LATENT] * 6),
        ({"kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [3, 6]}},
         [STATE, STATE, LATENT] * 2),
        # A kind of layer that pat does not know keeps its name.
        ({"layer_types": ["full_attention"] * 5 + ["hyperbolic"]}, [FULL] * 5 + ["hyperbolic"]),
    ],
)  # fmt: skip
def test_kinds_of_layers_by_the_keys_of_each_family(
    changes: dict[str, Any], expected: list[str]
) -> None:
    assert kinds(**changes) == expected


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("GptOssForCausalLM", 128), ("Cohere2MoeForCausalLM", 129), ("SeedOssForCausalLM", 129)],
)
def test_the_window_of_some_classes_does_not_count_the_new_token(name: str, tokens: int) -> None:
    types = ["sliding_attention", "full_attention"] * 3
    config = {**PLAIN, "layer_types": types, "sliding_window": 128, "architectures": [name]}
    assert [layer.window for layer in read_layers(config)] == [tokens, None] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"v_head_dim": 64}, "head_dim 128/64"),
        ({"num_attention_heads": 128, "num_key_value_heads": 1}, "query heads per KV head 128"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model"),
        # Latent attention of other sizes (MiniCPM3, Mistral-Small-4), sparse, or with too many
        # heads.
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, "head_dim 288/256"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 64}, "head_dim 320/256"),
        ({**MLA, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048},
         "sparse attention (DeepseekV32ForCausalLM)"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"]},
         "sparse attention (MiniMaxM3SparseForCausalLM)"),
        ({"architectures": ["MistralModel"]}, "a model that generates no tokens (MistralModel)"),
        ({"architectures": ["InklingForConditionalGeneration"]},
         "a bias by distance (InklingForConditionalGeneration)"),
        ({**MLA, "num_attention_heads": 64},
         "latent attention with nothing to gain: 64 heads fill a tile"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_accelerated_says_why(changes: dict[str, Any], reason: str) -> None:
    assert refused(**changes) == [reason] * 6


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        (None, False),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, False),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME}, True),
        # SGLang loads no such scales.
        *(
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME | change}, False)
            for change in (
                {"type": "int"}, {"strategy": "channel"}, {"symmetric": False}, {"dynamic": True}
            )
        ),
    ],
)  # fmt: skip
def test_an_fp8_cache_that_the_checkpoint_asks_for_is_accelerated(
    quantisation: dict[str, Any] | None, expected: bool
) -> None:
    changes = {} if quantisation is None else {"quantization_config": quantisation}
    assert has_float8_cache(PLAIN | changes) is expected
    assert refused(**changes) == [""] * 6


def test_a_refusal_has_the_words_of_the_support_table() -> None:
    (layer, *_) = read_layers({**PLAIN, "head_dim": 72})
    assert layer.refusal is not None
    assert str(layer.refusal.refusal()) == str(support.unsupported("head_dim", 72))


def test_hybrids_are_accelerated_in_all_layers_with_attention() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    assert refused(layer_types=types, sliding_window=512) == [""] * 6
    assert refused(full_attention_interval=6) == [STATE] * 5 + [""]


def test_names_that_older_configurations_have() -> None:
    older = {"n_embd": 6144, "n_head": 48, "n_layer": 40, "n_positions": 8192, "n_inner": None}
    decoder = decoder_config(older)
    assert decoder["intermediate_size"] == 4 * 6144
    assert decoder["max_position_embeddings"] == 8192
    assert decoder_config({**older, "n_inner": 1000})["intermediate_size"] == 1000


def test_the_decoder_of_a_multimodal_model() -> None:
    layers = read_layers({"model_type": "vl", "text_config": PLAIN})
    assert len(layers) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers=None; allowed: a whole number from 1"),
        ({"num_key_value_heads": 3}, "16 query heads, not a multiple of 3 KV heads"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 6 layers"),
        ({"full_attention_interval": "4"}, "full_attention_interval='4'; allowed: a whole number"),
        ({"full_attention_interval": 0.5}, "full_attention_interval=0.5; allowed: a whole number"),
        ({"full_attn_idxs": 5}, "full_attn_idxs=5; allowed: a list of whole numbers"),
        ({"architectures": ["TomorrowForCausalLM"]}, "'TomorrowForCausalLM' is a class of models"),
        ({"block_configs": [{}]}, "block_configs=.*; allowed: a list with attention"),
        ({"num_attention_heads_per_layer": [8]}, "num_attention_heads_per_layer has no number"),
        ({"hybrid_layer_pattern": "10"}, "hybrid_layer_pattern='10'; allowed: a list of whole"),
        ({"hybrid_layer_pattern": [1]}, "hybrid_layer_pattern has 1 entries for 6 layers"),
        ({"linear_attn_config": {"full_attn_layers": None}}, "full_attn_layers=None; allowed: a "),
    ],
)
def test_a_config_without_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kinds(**changes)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_configuration_tells_what_the_engine_decides(family: Family, tmp_path: Path) -> None:
    """`Family.pat` and `Family.default` agree with the configuration.

    A running engine (tests/engine) reads the layers of SGLang's class; `advise` reads only the
    config.
    """
    config = json.loads((family.write(tmp_path) / "config.json").read_text())
    layers = {layer.index: layer for layer in read_layers(config)}
    assert {index for index, layer in layers.items() if layer.is_accelerated} == set(family.pat)
    for reason, indices in family.default.items():
        for index in indices:
            refusal = layers[index].refusal
            assert refusal is not None
            # Some of SGLang's classes do not count the token itself, so their window is smaller by
            # one.
            topic = refusal.topic if refusal.topic != "attention" else str(refusal)
            assert reason.startswith(" ".join(topic.split()[:2]))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"model_type": "deepseek_vl_v2", "language_config": PLAIN | MLA}, [LATENT] * 6),
        ({"model_type": "multi_modality", "language_config": {**PLAIN, "model_type": "llama"}},
         [FULL] * 6),
        ({"model_type": "longcat_flash", **PLAIN, **MLA}, [LATENT] * 12),
        ({"architectures": ["LongcatCausalLM"], "model_type": "longcat", **PLAIN, **MLA},
         [LATENT] * 12),
    ],
)  # fmt: skip
def test_sglang_knows_the_class_of_some_types_of_models(
    changes: dict[str, Any], layers: list[str]
) -> None:
    check_served(changes)
    assert [layer.kind for layer in read_layers(changes)] == layers


def test_an_index_of_sparse_attention_may_be_a_default() -> None:
    for name, value, is_sparse in (
        ("GlmMoeDsaForCausalLM", {}, True),
        ("DeepseekV32ForCausalLM", {}, True),
        ("GlmMoeDsaForCausalLM", {"index_topk": None}, False),
        ("DeepseekV3ForCausalLM", {}, False),
        ("DeepseekV3ForCausalLM", {"index_topk": 2048}, True),
    ):
        found = refused(**MLA, **value, architectures=[name])
        assert found == [f"sparse attention ({name})" if is_sparse else ""] * 6


@pytest.mark.parametrize("changes", [{}, {"model_type": "llama"}, {"architectures": []}])
def test_other_configurations_name_their_class(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it names no architectures"):
        check_served({**PLAIN, **changes})
