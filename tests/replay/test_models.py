"""Models and GPUs: what a config.json says, what pat refuses, what a GPU of several holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_pat.workload.models import GPUS, MODEL_NAMES, model_shape

TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return path


def test_named_models():
    shapes = {name: model_shape(name) for name in MODEL_NAMES}
    llama, qwen, large = (shapes[n] for n in ("llama-3-8b", "qwen3-8b", "llama-3.1-70b"))
    assert (llama.num_qo_heads, llama.num_kv_heads, llama.head_dim) == (32, 8, 128)
    assert llama.kv_bytes_per_token == 128 << 10
    assert qwen.kv_bytes_per_token == 144 << 10
    assert large.kv_bytes_per_token == 320 << 10
    # 8.03, 8.19 and 70.6 billion parameters, as published.
    assert llama.weight_bytes == pytest.approx(2 * 8.03e9, rel=0.002)
    assert qwen.weight_bytes == pytest.approx(2 * 8.19e9, rel=0.002)
    assert large.weight_bytes == pytest.approx(2 * 70.6e9, rel=0.002)
    assert (llama.context_length, shapes["llama-3.1-8b"].context_length) == (8192, 131072)


def test_config_json_and_its_folder(tmp_path):
    shape = model_shape(write_config(tmp_path))
    assert (shape.num_kv_heads, shape.head_dim, shape.dtype_bytes) == (4, 64, 2)
    layer = 4 * 256 * 256 + 3 * 256 * 128
    assert shape.weight_bytes == 2 * (2 * layer + 256 * 1000)
    assert model_shape(tmp_path) == shape
    assert model_shape(write_config(tmp_path, num_key_value_heads=2)).kv_bytes_per_token == 1024


def test_config_of_experts_and_of_a_multimodal_model(tmp_path):
    experts = {"num_experts": 8, "moe_intermediate_size": 32}
    shape = model_shape(write_config(tmp_path, **experts, torch_dtype=None, dtype="bfloat16"))
    layer = 4 * 256 * 256 + 8 * 3 * 256 * 32
    assert shape.weight_bytes == 2 * (2 * layer + 256 * 1000)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": TINY}))
    assert model_shape(tmp_path).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers=None"),
        ({"num_key_value_heads": 3}, "4 query heads, no multiple of 3"),
        ({"torch_dtype": "int8"}, "torch_dtype='int8'; allowed: float16, bfloat16"),
        ({"torch_dtype": "float32"}, "torch_dtype='float32'; allowed: float16, bfloat16"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
    ],
)
def test_unusable_config_is_refused(tmp_path, changes, reason):
    with pytest.raises(ValueError, match=reason):
        model_shape(write_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_lora_rank": 512}, "attention = multi-head latent attention"),
        ({"is_encoder_decoder": True}, "attention = an encoder-decoder model"),
        ({"attention_chunk_size": 8192}, "attention = attention within chunks"),
        ({"sliding_window": 4096}, "sliding window = 4096; supported: none"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding window = of unknown length",
        ),
        ({"layer_types": ["linear_attention", "full_attention"]}, "attention = state, no KV cache"),
        ({"hybrid_override_pattern": "M-M*"}, "attention = state, no KV cache"),
        ({"head_dim": 72}, "head_dim = 72; supported: 64, 80, 96, 128"),
        (
            {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 64},
            "query heads per KV head = 32; supported: 1 to 16",
        ),
    ],
)
def test_a_model_that_pat_refuses_is_refused_with_the_same_words(tmp_path, changes, reason):
    with pytest.raises(ValueError, match=f"config.json: pat does not support .*{reason}"):
        model_shape(write_config(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 131072, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 2},
        {"kv_lora_rank": None},
    ],
)
def test_keys_without_effect_are_no_reason(tmp_path, changes):
    assert model_shape(write_config(tmp_path, **changes)).num_layers == 2


def test_unknown_model_and_broken_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model 'gpt'; allowed: llama-3\.1-8b, .*, or"):
        model_shape("gpt")
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"not a config\.json"):
            model_shape(tmp_path)


def test_tensor_parallelism_divides_heads_and_weights():
    whole = model_shape("llama-3.1-8b")
    assert whole.on_one_of(1) == whole
    half = whole.on_one_of(2)
    assert (half.num_qo_heads, half.num_kv_heads) == (16, 4)
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.weight_bytes * 2 == whole.weight_bytes
    # More GPUs than KV heads: each holds one of them.
    assert (whole.on_one_of(16).num_kv_heads, whole.on_one_of(16).group_size) == (1, 2)
    for tp in (0, 3, 64):
        with pytest.raises(ValueError, match=f"--tp {tp}: .*allowed: a divisor"):
            whole.on_one_of(tp)


def test_workers_of_a_gpu():
    assert [GPUS["H100"].workers(heads) for heads in (8, 1, 1000)] == [33, 264, 1]
    assert GPUS["L40S"].workers(8) == 17  # one CTA on each SM
