"""A small model of every architecture family: its real class in SGLang, as a `config.json`.

The weights are random (`benchmarks/common/random_weights.py`). Shapes are as small as the class
allows, with what makes the family what it is: its windows, sinks, heads, recurrent states and
experts.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
WINDOW = 32  # much shorter than the prompts

_SMALL: dict[str, Any] = {
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """One family, and who decodes its layers.

    Attributes
    ----------
    modules : tuple of str
        Those of `sglang.srt.models` that its class needs.
    config : dict
        What `config.json` holds, beside the small shapes that all have.
    models : str
        Whose architecture it is.
    pat : tuple of int
        The small model's layers that pat decodes.
    default : dict
        Reason -> its layers that the default backend decodes.
    pat_has_sinks : bool
        Whether layers that pat decodes have attention sinks.
    arguments : dict
        Server arguments without which SGLang does not run it on a CPU.
    refused : dict
        Version of SGLang -> why it does not run it on a CPU: its own error.
    """

    name: str
    architecture: str
    modules: tuple[str, ...]
    config: dict[str, Any]
    _: KW_ONLY
    models: str
    pat: tuple[int, ...]
    default: dict[str, tuple[int, ...]]
    arguments: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    pat_has_sinks: bool = False
    nightly: bool = True

    def write(self, folder: Path) -> Path:
        """Write `config.json`, all that SGLang's dummy loader needs."""
        config = _SMALL | {"architectures": [self.architecture]} | self.config
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return folder


_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "deepseek_yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
}

# The default strategy, `extra_buffer`, "requires platform support for Mamba cache state snapshots".
_STATES = {
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,  # the other strategy's condition
    "max_mamba_cache_size": 64,  # of itself it fills half of the memory
}

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            ("llama",),
            {"model_type": "llama"},
            pat=(0, 1, 2, 3),
            models="Llama 2, 3; Mistral; Yi and other copies of its class",
            default={},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            ("qwen2",),
            {"model_type": "qwen2", "hidden_size": 256},
            pat=(0, 1, 2, 3),
            models="Qwen2, Qwen2.5",
            default={},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            ("qwen3", "qwen2"),
            {"model_type": "qwen3"},
            pat=(0, 1, 2, 3),
            models="Qwen3",
            default={},
        ),
        Family(
            "qwen3-moe",
            "Qwen3MoeForCausalLM",
            ("qwen3_moe", "qwen2_moe"),
            {"model_type": "qwen3_moe", **_MOE},
            pat=(0, 1, 2, 3),
            models="Qwen3-30B-A3B, 235B-A22B, Coder",
            default={},
        ),
        Family(
            "gpt-oss",
            "GptOssForCausalLM",
            ("gpt_oss",),
            {
                "model_type": "gpt_oss",
                "layer_types": _ALTERNATING,
                "sliding_window": WINDOW,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "swiglu_limit": 7.0,
                "attention_bias": True,
                "hidden_act": "silu",
            },
            arguments={"moe_runner_backend": "triton"},
            pat=(1, 3),
            models="gpt-oss 20B, 120B",
            pat_has_sinks=True,
            default={"sliding window 31": (0, 2)},
            nightly=False,
        ),
        Family(
            "gemma-2",
            "Gemma2ForCausalLM",
            ("gemma2",),
            {
                "model_type": "gemma2",
                "hidden_act": "gelu_pytorch_tanh",
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "attn_logit_softcapping": 10.0,
                "final_logit_softcapping": 30.0,
                "sliding_window": WINDOW,
                "tie_word_embeddings": True,
            },
            pat=(1, 3),
            models="Gemma 2",
            default={"sliding window 31": (0, 2)},
        ),
        Family(
            "gemma-3",
            "Gemma3ForCausalLM",
            ("gemma3_causal", "gemma2"),
            {
                "model_type": "gemma3_text",
                "head_dim": 256,
                "query_pre_attn_scalar": 256,
                "num_key_value_heads": 1,
                "layer_types": _ALTERNATING,
                "sliding_window": WINDOW,
                "tie_word_embeddings": True,
            },
            pat=(1, 3),
            models="Gemma 3",
            default={"sliding window 31": (0, 2)},
            nightly=False,
        ),
        Family(
            "gemma-4",
            "Gemma4ForCausalLM",
            ("gemma4_causal", "gemma3_causal", "gemma2"),
            {
                "model_type": "gemma4_text",
                "allow_global_per_layer_attribute_access": True,
                "head_dim": 64,
                "global_head_dim": 128,
                "swa_num_key_value_heads": 2,
                "layer_types": _ALTERNATING,
                "sliding_window": WINDOW,
                "tie_word_embeddings": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "enable_moe_block": False,
            },
            pat=(1, 3),
            models="Gemma 4 (full layers of 128)",
            default={"sliding window 31": (0, 2)},
            refused={
                "0.5.17": "Gemma4 only supports trtllm_mha, triton, or intel_xpu attention "
                "backend, got prefill=intel_amx, decode=intel_amx"
            },
        ),
        Family(
            "llama-4",
            "Llama4ForCausalLM",
            ("llama4", "llama"),
            {
                "model_type": "llama4_text",
                "attention_chunk_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 192,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0, 1, 0],
                "use_qk_norm": True,
                "attn_temperature_tuning": True,
                "floor_scale": 64,
                "attn_scale": 0.1,
            },
            pat=(3,),
            models="Llama 4 Scout, Maverick",
            default={"attention within chunks of 64": (0, 1, 2)},
        ),
        Family(
            "mimo-v2",
            "MiMoV2FlashForCausalLM",
            ("mimo_v2",),
            {
                "model_type": "mimo_v2_flash",
                "head_dim": 192,
                "v_head_dim": 128,
                "swa_head_dim": 192,
                "swa_v_head_dim": 128,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "num_key_value_heads": 1,
                "hybrid_layer_pattern": [0, 1, 1, 0],
                "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
                "sliding_window": WINDOW,
                "sliding_window_size": WINDOW,
                "add_swa_attention_sink_bias": True,
                "add_full_attention_sink_bias": False,
                "layernorm_epsilon": 1e-5,
                "moe_layer_freq": [0, 1, 1, 1],
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "n_group": 1,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "norm_topk_prob": True,
                "rope_theta": 10000,
                "swa_rope_theta": 10000,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
                "partial_rotary_factor": 0.334,
                "hidden_act": "silu",
                "attention_bias": False,
                "attention_value_scale": 0.7,
            },
            pat=(0, 3),
            models="MiMo-V2-Flash",
            default={"sliding window 32": (1, 2)},
            refused={
                "0.5.17": "has model type `mimo_v2_flash` but Transformers does not recognize "
                "this architecture"
            },
        ),
        Family(
            "mellum",
            "MellumForCausalLM",
            ("mellum", "qwen3_moe", "qwen2_moe"),
            {
                "model_type": "mellum",
                "layer_types": _ALTERNATING,
                "sliding_window": WINDOW,
                "use_sliding_window": True,
                **_MOE,
            },
            pat=(1, 3),
            models="Mellum",
            default={"sliding window 31": (0, 2)},
        ),
        Family(
            "step-3.5",
            "Step3p5ForCausalLM",
            ("step3p5",),
            {
                "model_type": "step3p5",
                "allow_global_per_layer_attribute_access": True,
                "num_attention_groups": 2,
                "layer_types": _ALTERNATING,
                "sliding_window": WINDOW,
                "attention_other_setting": {
                    "attention_type": "sliding_attention",
                    "num_attention_heads": 8,
                    "num_attention_groups": 2,
                    "head_dim": 64,
                },
                "moe_layers_enum": "2,3",
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_intermediate_size": 64,
                "share_expert_dim": 64,
                "use_head_wise_attn_gate": True,
                "rope_theta": [10000.0] * 4,
                "partial_rotary_factors": [1.0] * 4,
                "rope_scaling": None,
                "use_moe_router_bias": True,
                "need_fp32_gate": True,
                "moe_router_scaling_factor": 1.0,
                "swiglu_limits": [0.0] * 4,
                "swiglu_limits_shared": [0.0] * 4,
            },
            pat=(1, 3),
            models="Step-3.5-Flash",
            default={"sliding window 32": (0, 2)},
        ),
        Family(
            "qwen3-next",
            "Qwen3NextForCausalLM",
            ("qwen3_next", "qwen2_moe"),
            {
                "model_type": "qwen3_next",
                "head_dim": 256,
                "num_key_value_heads": 1,
                "full_attention_interval": 4,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "partial_rotary_factor": 0.25,
                "shared_expert_intermediate_size": 64,
                **_MOE,
            },
            arguments=_STATES,
            pat=(3,),
            models="Qwen3-Next",
            default={},
        ),
        Family(
            "qwen3.5",
            "Qwen3_5ForCausalLM",
            ("qwen3_5_text", "qwen3_5", "qwen3_next", "qwen2_moe", "qwen3_vl", "qwen2"),
            {
                "model_type": "qwen3_5_text",
                "head_dim": 256,
                "num_key_value_heads": 1,
                "full_attention_interval": 4,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000,
                    "partial_rotary_factor": 0.25,
                },
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            arguments=_STATES,
            pat=(3,),
            models="Qwen3.5, 3.6",
            default={},
            nightly=False,
        ),
        Family(
            "nemotron-h",
            "NemotronHForCausalLM",
            ("nemotron_h",),
            {
                "model_type": "nemotron_h",
                "hybrid_override_pattern": "M-M*-M*-",
                "num_hidden_layers": 8,
                "mamba_num_heads": 4,
                "mamba_head_dim": 64,
                "n_groups": 2,
                "mamba_n_groups": 2,
                "ssm_state_size": 32,
                "conv_kernel": 4,
                "chunk_size": 64,
                "mlp_hidden_act": "relu2",
                "mamba_hidden_act": "silu",
                "use_conv_bias": True,
                "layer_norm_epsilon": 1e-5,
            },
            arguments=_STATES,
            pat=(3, 6),
            models="Nemotron-H, Nemotron 3",
            default={},
        ),
        Family(
            "lfm2",
            "Lfm2ForCausalLM",
            ("lfm2",),
            {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention"] * 2,
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
                "norm_eps": 1e-5,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
            },
            arguments=_STATES,
            pat=(1, 3),
            models="LFM2",
            default={},
        ),
        Family(
            "falcon-h1",
            "FalconH1ForCausalLM",
            ("falcon_h1",),
            {
                "model_type": "falcon_h1",
                "mamba_d_ssm": 256,
                "mamba_n_heads": 4,
                "mamba_d_head": 64,
                "mamba_n_groups": 2,
                "mamba_d_state": 32,
                "mamba_d_conv": 4,
                "mamba_chunk_size": 64,
            },
            arguments=_STATES,
            pat=(0, 1, 2, 3),
            models="Falcon-H1",
            default={},
        ),
        Family(
            "deepseek-v2",
            "DeepseekV2ForCausalLM",
            ("deepseek_v2",),
            {
                "model_type": "deepseek_v2",
                **_MLA,
                "scoring_func": "softmax",
                "topk_method": "greedy",
            },
            pat=(0, 1, 2),
            models="DeepSeek-V2",
            default={},
        ),
        Family(
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            ("deepseek_v2",),
            {
                "model_type": "deepseek_v3",
                **_MLA,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
            },
            pat=(0, 1, 2),
            models="DeepSeek-V3, R1",
            default={},
            nightly=False,
        ),
        Family(
            "kimi-k2",
            "DeepseekV3ForCausalLM",
            ("deepseek_v2",),
            {
                "model_type": "deepseek_v3",
                **_MLA,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "q_lora_rank": 64,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
            },
            pat=(0, 1, 2),
            models="Kimi K2 (8 heads of a rank)",
            default={},
        ),
        Family(
            "glm-4.7-flash",
            "Glm4MoeLiteForCausalLM",
            ("glm4_moe_lite", "deepseek_v2"),
            {
                "model_type": "glm4_moe_lite",
                **_MLA,
                "num_attention_heads": 5,
                "num_key_value_heads": 5,
                "q_lora_rank": 64,
                "v_head_dim": 64,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
            },
            pat=(0, 1, 2),
            models="GLM-4.7-Flash",
            default={},
        ),
        Family(
            "longcat-flash",
            "LongcatFlashForCausalLM",
            ("longcat_flash", "deepseek_v2"),
            {
                "model_type": "longcat_flash",
                **_MLA,
                "num_layers": 2,
                "num_hidden_layers": 2,
                "q_lora_rank": 64,
                "ffn_hidden_size": 192,
                "expert_ffn_hidden_size": 64,
                "moe_topk": 2,
                "zero_expert_num": 0,  # SGLang's experts on a CPU do not know them
                "zero_expert_type": None,
                "mla_scale_q_lora": True,
                "mla_scale_kv_lora": True,
                "routed_scaling_factor": 1.0,
                "attention_method": "MLA",
            },
            pat=(0, 1, 2, 3),
            refused={
                "0.5.17": "CUDA error: CUDA driver version is insufficient for CUDA runtime version"
            },
            models="LongCat-Flash",
            default={},
        ),
        Family(
            "other-latent",
            "DeepseekV2ForCausalLM",
            ("deepseek_v2",),
            {
                "model_type": "deepseek_v2",
                **_MLA,
                "kv_lora_rank": 64,
                "qk_rope_head_dim": 16,
                "scoring_func": "softmax",
                "topk_method": "greedy",
            },
            pat=(),
            models="latent attention of other sizes than 512 and 64 (MiniCPM3)",
            default={"head_dim 80/64": (0, 1, 2)},
        ),
        Family(
            "phi-3",
            "Phi3ForCausalLM",
            ("llama",),
            {"model_type": "phi3", "hidden_size": 384, "head_dim": 96},
            pat=(0, 1, 2, 3),
            models="Phi-3, Phi-4 (head_dim 96 or 128)",
            default={},
        ),
        Family(
            "phi-2",
            "PhiForCausalLM",
            ("phi",),
            {
                "model_type": "phi",
                "hidden_size": 320,
                "head_dim": 80,
                "num_key_value_heads": 4,
                "partial_rotary_factor": 0.4,
            },
            pat=(0, 1, 2, 3),
            models="Phi-1, Phi-2 (head_dim 80)",
            default={},
        ),
        Family(
            "stablelm",
            "StableLmForCausalLM",
            ("stablelm",),
            {
                "model_type": "stablelm",
                "hidden_size": 320,
                "head_dim": 80,
                "num_key_value_heads": 4,
                "partial_rotary_factor": 0.25,
            },
            pat=(0, 1, 2, 3),
            models="StableLM (head_dim 80)",
            default={},
        ),
        Family(
            "olmo",
            "OlmoForCausalLM",
            ("olmo",),
            {
                "model_type": "olmo",
                "hidden_size": 256,
                "num_key_value_heads": 4,
            },
            pat=(0, 1, 2, 3),
            models="OLMo (MHA: as many KV heads as query heads)",
            default={},
        ),
        Family(
            "starcoder",
            "GPTBigCodeForCausalLM",
            ("gpt_bigcode",),
            {
                "model_type": "gpt_bigcode",
                "n_embd": 1536,
                "activation_function": "gelu_pytorch_tanh",
                "n_head": 24,
                "n_layer": 2,
                "n_inner": 256,
                "n_positions": 4096,
                "multi_query": True,
                "hidden_size": 1536,
                "num_attention_heads": 24,
                "num_hidden_layers": 2,
            },
            pat=(),
            models="StarCoder (MQA: more than 16 query heads per KV head)",
            default={"query heads per KV head 24": (0, 1)},
        ),
        Family(
            "transformers",
            "SeedOssForCausalLM",
            ("transformers",),
            {
                "model_type": "seed_oss",
                "hidden_act": "silu",
                "attention_bias": True,
                "attention_out_bias": False,
                "mlp_bias": False,
                "attention_dropout": 0.0,
                "residual_dropout": 0.0,
            },
            pat=(0, 1, 2, 3),
            models="Seed-OSS and others that SGLang has no class for, by those of transformers",
            default={},
        ),
        Family(
            "qwen2.5-vl",
            "Qwen2_5_VLForConditionalGeneration",
            ("qwen2_5_vl", "qwen2_vl", "qwen2"),
            {
                "model_type": "qwen2_5_vl",
                "image_token_id": 500,
                "video_token_id": 501,
                "vision_start_token_id": 502,
                "vision_end_token_id": 503,
                "text_config": _SMALL
                | {
                    "model_type": "qwen2_5_vl_text",
                    "hidden_size": 256,
                    "rope_parameters": {
                        "rope_type": "default",
                        "type": "mrope",
                        "mrope_section": [8, 12, 12],
                        "rope_theta": 10000.0,
                    },
                },
                "vision_config": {
                    "depth": 2,
                    "hidden_size": 64,
                    "num_heads": 2,
                    "intermediate_size": 64,
                    "out_hidden_size": 256,
                    "fullatt_block_indexes": [1],
                },
            },
            arguments={"enable_multimodal": False},  # images need files beside the configuration
            pat=(0, 1, 2, 3),
            models="Qwen2.5-VL (text)",
            default={},
        ),
    )
}


@dataclass(frozen=True)
class RecordedRun:
    """Date on which these families passed `tests/engine/test_families.py`.

    On a GPU: `tests/gpu/test_families.py`. To be updated by hand.

    Attributes
    ----------
    sglang : str
        The version.
    date : str
        Of the run.
    families : tuple of str
        Those that ran.
    """

    sglang: str
    date: str
    families: tuple[str, ...]


# By name: a family that is added has not run.
_IN_BOTH = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gpt-oss",
    "gemma-2",
    "gemma-3",
    "llama-4",
    "mellum",
    "step-3.5",
    "qwen3-next",
    "qwen3.5",
    "nemotron-h",
    "lfm2",
    "falcon-h1",
    "phi-3",
    "phi-2",
    "stablelm",
    "olmo",
    "starcoder",
)
_LATENT_IN_BOTH = ("deepseek-v2", "deepseek-v3", "kimi-k2", "glm-4.7-flash", "other-latent")
CPU_RUNS = (
    RecordedRun("0.5.23", "2026-11-21", (*_IN_BOTH, "gemma-4", "mimo-v2")),
    RecordedRun("0.5.23", "2026-11-22", ("transformers", "qwen2.5-vl")),
    RecordedRun("0.5.23", "2026-11-23", (*_LATENT_IN_BOTH, "longcat-flash")),
    RecordedRun("0.5.17", "2026-11-21", _IN_BOTH),
    RecordedRun("0.5.17", "2026-11-23", _LATENT_IN_BOTH),
)
GPU_RUNS = (RecordedRun("0.5.17", "2026-11-22", ("gemma-3", "gpt-oss", "llama-4", "qwen3-next")),)
