"""The shapes of well-known models that `compare` serves with random weights.

Real architecture classes. Where layers or experts are cut, so that several servers fit on a GPU and
start quickly, `cut` says what the model has. Experts are not quantised: the 8 of gpt-oss are as
many bytes as the 32 of the real one, which have four bits.
"""

from __future__ import annotations

from typing import Any

from common.models import MODELS, TINY, ModelShape
from sglang_pat.workload.models import NAMED_CONFIGS

CONTEXT = 262_144  # tokens with tabulated rotary embeddings


def _layer_types(windowed: int, groups: int) -> list[str]:
    """Return groups of `windowed` layers with a window and one without."""
    return (["sliding_attention"] * windowed + ["full_attention"]) * groups


_GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "layer_types": _layer_types(1, 6),
    "sliding_window": 128,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
}
_GEMMA_3_12B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "layer_types": _layer_types(5, 1),
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# The full layers have two KV heads of 512 columns, and the same projection for keys and values.
# SGLang reads the latter only if the text model is part of the published multimodal one.
_GEMMA_4_26B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": _layer_types(5, 5),
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 16,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
    },
    "vision_config": {  # nobody sends an image
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_OLMO_3_32B = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 8,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "layer_types": _layer_types(3, 2),
    "sliding_window": 4096,
    "attention_bias": False,
    "vocab_size": 100278,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
    "rope_scaling": {"rope_type": "default", "rope_theta": 500000},  # both keys are read
    "tie_word_embeddings": False,
    "bos_token_id": 100257,
    "eos_token_id": 100265,
    "pad_token_id": 100277,
}
_GATED_DELTA = {
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_NEXT = _GATED_DELTA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 5120,
    "num_experts": 32,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
# Only the decoder, with an MLP as wide as the experts of one token.
_QWEN3_6 = _GATED_DELTA | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "intermediate_size": 4608,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "vocab_size": 248320,
}
_V2_LITE = {
    **NAMED_CONFIGS["deepseek-v2-lite"],
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 14,
    "max_position_embeddings": 163840,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
_GLM_4_7_FLASH = {
    **_V2_LITE,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 10,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "intermediate_size": 10240,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "vocab_size": 154880,
    "rope_theta": 1000000,
    "rope_scaling": None,
}


# All 27 layers, of which 7 are latent attention and the others keep states.
_KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 1024,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_experts": 16,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}


def _rank(heads: int, vocab_size: int) -> dict[str, Any]:
    """Return one of eight ranks of DeepSeek-V3 or Kimi K2, with few experts."""
    return {
        **_V2_LITE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "vocab_size": vocab_size,
    }


def _rank_of_70b() -> dict[str, Any]:
    """Return one of eight ranks of Llama-3-70B, with its part of the vocabulary."""
    return _LLAMA | {
        "num_hidden_layers": 32,
        "hidden_size": 8192,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "vocab_size": 16032,
        "bos_token_id": 16000,
        "eos_token_id": 16001,
    }


def _latent(heads: int) -> dict[str, Any]:
    """Return DeepSeek-V3 or Kimi K2 with all attention layers, and few small experts."""
    return _rank(heads, 129280) | {"num_hidden_layers": 61, "moe_intermediate_size": 512}


_LLAMA = MODELS["llama-3-8b"].config
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
_GLM_4_6 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 151552,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "bos_token_id": 151331,
    "eos_token_id": 151329,
}

_SWA = {"swa_full_tokens_ratio": 1.0}  # else windows are evicted and recomputed


def _shape(
    name: str, config: dict[str, Any], cut: dict[str, int] | None = None, **arguments: Any
) -> ModelShape:
    return ModelShape(name, config | {"max_position_embeddings": CONTEXT}, arguments, cut or {})


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("llama-3-8b", _LLAMA | {"num_hidden_layers": 16}, {"num_hidden_layers": 32}),
        _shape("llama-3-8b-whole", _LLAMA),
        _shape("llama-3-70b", _LLAMA | _70B | {"num_hidden_layers": 80}),
        _shape("llama-3-70b-rank", _rank_of_70b(), {"num_hidden_layers": 80}),
        _shape(
            "gpt-oss-20b", _GPT_OSS_20B, {"num_hidden_layers": 24, "num_local_experts": 32}, **_SWA
        ),
        _shape("gemma-3-12b", _GEMMA_3_12B, {"num_hidden_layers": 48}),
        _shape(
            "gemma-4-26b",
            _GEMMA_4_26B,
            {"num_experts": 128},
            enable_multimodal=False,
            **_SWA,
        ),
        _shape("olmo-3-32b", _OLMO_3_32B, {"num_hidden_layers": 64}),
        _shape("qwen3-next", _QWEN3_NEXT, {"num_hidden_layers": 48, "num_experts": 512}),
        _shape("qwen3.6", _QWEN3_6, {"num_hidden_layers": 40}),
        _shape("glm-4.6", _GLM_4_6, {"num_hidden_layers": 92, "n_routed_experts": 160}),
        _shape("deepseek-v2-lite", _V2_LITE, {"num_hidden_layers": 27}),
        _shape("glm-4.7-flash", _GLM_4_7_FLASH, {"num_hidden_layers": 47}),
        _shape("kimi-linear", _KIMI_LINEAR, {"num_experts": 256}),
        _shape(
            "v3-rank",
            _rank(16, 16160),
            {"num_hidden_layers": 61, "n_routed_experts": 256, "num_attention_heads": 128},
        ),
        _shape(
            "k2-rank",
            _rank(8, 20480),
            {"num_hidden_layers": 61, "n_routed_experts": 384, "num_attention_heads": 64},
        ),
        _shape("v3", _latent(128), {"n_routed_experts": 256, "moe_intermediate_size": 2048}),
        _shape("k2", _latent(64), {"n_routed_experts": 384, "moe_intermediate_size": 2048}),
        # For a machine without a GPU, to test that everything works.
        ModelShape(TINY, MODELS[TINY].config, MODELS[TINY].arguments, {}),
    )
}
