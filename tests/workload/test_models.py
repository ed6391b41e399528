"""Models and GPUs: config.json files, refusals, and the share of one of several GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.model_config import decoder_config
from sglang_pat.model_layers import summary
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.models import GPUS, MODEL_NAMES, read_config
from sglang_pat.workload.verdict import unchecked
from sglang_pat.workload.weights import WeightBytes

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
LAYER = 4 * 256 * 256 + 3 * 256 * 128


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return path


def model(name: str | Path, gpu: str = "H100", tp: int = 1) -> StepTime:
    return StepTime.of_model(read_config(name)[1], GPUS[gpu], tp)


def tiny(**changes: object) -> StepTime:
    return StepTime.of_model(decoder_config({**TINY, **changes}), GPUS["H100"])


def llama(gpu: str = "H100", tp: int = 1, **changes: Any) -> StepTime:
    _, config = read_config("llama-3.1-8b")
    return StepTime.of_model({**config, **changes}, GPUS[gpu], tp)


def test_named_models() -> None:
    found = {name: model(name) for name in MODEL_NAMES}
    llama, qwen, large = (found[name] for name in ("llama-3-8b", "qwen3-8b", "llama-3.1-70b"))
    assert llama.kv_bytes_per_token == 128 << 10
    assert qwen.kv_bytes_per_token == 144 << 10
    assert large.kv_bytes_per_token == 320 << 10
    # Published sizes: 8.03, 8.19 and 70.6 billion parameters.
    assert llama.held_weight_bytes == pytest.approx(2 * 8.03e9, rel=0.002)
    assert qwen.held_weight_bytes == pytest.approx(2 * 8.19e9, rel=0.002)
    assert large.held_weight_bytes == pytest.approx(2 * 70.6e9, rel=0.002)
    latent = found["deepseek-v2-lite"]  # 15.7 billion; a token is 576 numbers in each layer
    assert latent.held_weight_bytes == pytest.approx(2 * 15.7e9, rel=0.003)
    assert latent.kv_bytes_per_token == 27 * 1152
    assert all(layer.is_accelerated for layer in latent.layers)


def test_config_json_and_its_folder(tmp_path: Path) -> None:
    found = model(write_config(tmp_path))
    assert found.held_weight_bytes == 2 * (2 * LAYER + 256 * 1000)
    assert model(tmp_path) == found
    untied = model(write_config(tmp_path, tie_word_embeddings=False))
    assert untied.held_weight_bytes - found.held_weight_bytes == 2 * 256 * 1000
    assert untied.without_attention(1) == found.without_attention(1)
    grouped = model(write_config(tmp_path, num_key_value_heads=2))
    assert grouped.kv_bytes_per_token == 1024


def test_config_of_experts() -> None:
    found = tiny(num_experts=8, moe_intermediate_size=32, torch_dtype=None, dtype="bfloat16")
    layer = 4 * 256 * 256 + 8 * (3 * 256 * 32 + 256)  # experts and a router
    assert found.held_weight_bytes == 2 * (2 * layer + 256 * 1000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": True}, "num_hidden_layers=True; allowed: a whole number from 1"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1,000,000; allowed: 1 to 10,000"),
        ({"hidden_size": 10**400}, r"hidden_size=100\d*\.\.\.0*; allowed: .* to 1,000,000,000"),
        ({"hybrid_override_pattern": 5}, "hybrid_override_pattern=5; allowed: a string or a list"),
        ({"torch_dtype": "int7"}, "torch_dtype='int7'; allowed: float16, bfloat16, float32"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
    ],
)
def test_unusable_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tiny(**changes)


# The published fields; transformers has defaults for the rest.
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}


def test_gemma_3_leaves_most_of_its_shape_to_transformers() -> None:
    found = StepTime.of_model(decoder_config(GEMMA_3_4B), GPUS["H100"])
    assert found.held_weight_bytes == pytest.approx(2 * 3.88e9, rel=0.01)
    assert [
        (count, "window of 1,024" in words, int(words.split("/")[0].split()[-1]))
        for count, words, _ in summary(found.layers)
    ] == [(29, True, 8), (5, False, 8)]


def test_tensor_parallelism_divides_heads_and_weights() -> None:
    whole, half = llama(), llama(tp=2)
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert half.held_weight_bytes * 2 == whole.held_weight_bytes
    # With more GPUs than KV heads, each GPU holds one head.
    assert llama(tp=16).kv_heads(whole.layers[0]) == 1
    for tp in (0, 3, 64):
        with pytest.raises(ValueError, match=f"--tp {tp}: .*allowed: a divisor"):
            llama(tp=tp)


def test_what_no_run_has_checked_is_said() -> None:
    assert unchecked(llama()) == []
    experts = {"num_experts": 8, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    said = " ".join(unchecked(llama("L4", 2, **experts, **fp8)))
    for words in ("L4 is scaled", "between 2 GPUs", "mixtures of experts", "quantised"):
        assert words in said
    vocabulary = 2 * 2 * 4096 * 128256  # embedding and output head of 2 bytes
    whole, quantised = (llama(**each).held_weight_bytes - vocabulary for each in ({}, fp8))
    assert quantised * 2 == whole
    assert unchecked(llama(kv_lora_rank=512, qk_rope_head_dim=64)) == ["latent attention"]
    for name, by_triton in (("LlamaForCausalLM", True), ("DeepseekV4ForCausalLM", False)):
        said = " ".join(unchecked(llama(head_dim=512, architectures=[name])))
        assert ("by Triton" in said) == by_triton, name


@pytest.mark.parametrize(
    ("quantisation", "size"),
    [
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 9 / 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 9 / 16),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
            },
            1,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:30] if isinstance(value, dict) else None,
)
def test_quantised_weights_have_their_size(quantisation: dict[str, Any], size: float) -> None:
    quantised = llama(quantization_config=quantisation)
    assert quantised.bytes_of_weights == WeightBytes(size, size, size)
    assert unchecked(quantised) == ["quantised weights"]


INT4 = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}


@pytest.mark.parametrize(
    ("quantisation", "sizes"),
    [
        ({"quant_method": "mxfp4"}, (2, 2, 17 / 32)),  # gpt-oss: only the experts
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, [(4 + 20 / 128) / 8] * 3),
        # Gemma 4 31B: attention modules are listed as not quantised.
        ({"quant_method": "modelopt", "quant_algo": "NVFP4",
          "ignore": ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(60))]},
         (2, 9 / 16, 9 / 16)),
        # Llama 3.1 405B lists matrix by matrix. Others list their routers.
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": [
            f"model.layers.{i}.self_attn.{each}_proj" for i in range(32) for each in "qkvo"]},
         (2, 1, 1)),
        ({"quant_method": "fp8", "ignored_layers": ["re:.*mlp.gate$", "re:.*kv_b_proj",
            *(f"model.layers.{i}.mlp.gate" for i in range(32)), "model.layers.*.mlp.gate",
            "re:.*shared_expert_gate$", "re:.*self_attn.kv_b_proj.*"]}, (1, 1, 1)),
        ({"quant_method": "fp8", "ignore": [r"re:.*mlp\.(gate|up|down)_proj.*"]}, (1, 2, 1)),
        # Some checkpoints do not quantise the first and last layers.
        ({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]},
         (1, 1, 1)),
        # Kimi K2.5: all but the routed experts, by patterns.
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": INT4},
          "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]},
         (2, 2, 4.5 / 8)),
        # Qwen3.6: module by module.
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.linear_attn.out_proj": {"quant_algo": "FP8"},
            "model.layers.0.mlp.gate_proj": {"quant_algo": "MXFP8"},
            "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}},
         (1, 33 / 32, 9 / 16)),
    ],
)  # fmt: skip
def test_parts_of_a_model_are_quantised(
    quantisation: dict[str, Any], sizes: tuple[float, float, float]
) -> None:
    found = llama(quantization_config=quantisation).bytes_of_weights
    assert found == WeightBytes(*sizes)


def test_an_unknown_quantisation_is_said() -> None:
    said = " ".join(unchecked(llama(quantization_config={"quant_method": "tomorrow"})))
    assert "weights of tomorrow, counted as 2 bytes each" in said


def test_a_multimodal_model_is_quantised_as_a_whole() -> None:
    fp8 = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    _, inner = read_config("llama-3-8b")
    config = decoder_config({"text_config": inner, "quantization_config": fp8})
    found = StepTime.of_model(config, GPUS["H100"])
    assert (found.bytes_of_weights.dense, found.kv_bytes) == (1, 1)


def test_a_mixture_of_experts_reads_what_its_batch_touches() -> None:
    mixture = llama(num_experts=128, moe_intermediate_size=512, num_experts_per_tok=8)
    assert mixture.without_attention(1) < mixture.without_attention(16) / 1.5
    assert mixture.without_attention(200) < 1.5 * mixture.without_attention(100)
