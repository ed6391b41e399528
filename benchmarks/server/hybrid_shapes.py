"""Models that are no plain Llama: hybrid ones, and models with latent attention (MLA).

For comparisons over several GPUs there are two Llamas as well.

In hybrid models only some layers attend to everything.

Real architecture classes with dummy weights. Layers and experts are cut, so that the servers of
several models fit on a GPU at once and start quickly: `cut` says what was. Experts are not
quantised: the 8 of gpt-oss are as many bytes as the 32 of the real one, which have four bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.fleet import SHARED_GPU, groups_that_fit
from common.models import MODELS, TINY, ModelShape
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.models import GPUS, NAMED_CONFIGS

# Memory of each server beside weights and KV: context, graphs, workspaces, a prefill.
_OTHER_BYTES = 4e9
_SHARE = 0.9  # of the GPU's memory, for servers: with 0.95 one of eight ran out of it in a prefill

_GPU = SHARED_GPU | {
    "context_length": 16384,
    "max_total_tokens": 96_000,  # 128 x (512 + an answer), and room
    "max_running_requests": 128,
    "cuda_graph_bs_decode": [128],  # of the batch that is measured; each takes its time to capture
}


@dataclass(frozen=True)
class HybridModel:
    """Shape of a hybrid model.

    cut: config's name -> what the model has that the shape is of. full_layers: how many layers
    attend to everything.
    """

    shape: ModelShape
    full_layers: int
    cut: dict[str, int]

    @property
    def name(self) -> str:
        return self.shape.name

    def served(
        self, kv_cache_dtype: str = "auto", ranks: int = 1, *, own_requests: bool = False
    ) -> HybridModel:
        """The model over a cache of a type, by SGLang's name, on so many GPUs.

        own_requests: with data-parallel attention.
        """
        more: dict[str, Any] = {}
        if kv_cache_dtype != "auto":
            more["kv_cache_dtype"] = kv_cache_dtype
        if ranks > 1:
            # SGLang's own all-reduce is compiled for a minute, and pat has no part in it.
            more |= {"tp_size": ranks, "disable_custom_all_reduce": True}
        if own_requests:
            more |= {"dp_size": ranks, "enable_dp_attention": True}
        return replace(self, shape=replace(self.shape, arguments=self.shape.arguments | more))

    @property
    def server_bytes(self) -> float:
        """Memory of one server on each of its GPUs, about."""
        arguments = self.shape.arguments
        ranks = 1 if "dp_size" in arguments else arguments.get("tp_size", 1)
        time = StepTime.of(self.shape.config, GPUS["H100"], ranks)
        if "kv_cache_dtype" in arguments:
            time = replace(time, kv_bytes=1.0)
        pool = time.kv_bytes_per_token * arguments["max_total_tokens"]
        return time.held_weight_bytes + pool + _OTHER_BYTES


def groups_on_gpu(
    models: Sequence[HybridModel], memory: float | None = None
) -> list[list[HybridModel]]:
    """Models whose servers, two of each, fit on a GPU at once.

    memory: of the GPU, in bytes. None: of the one here; without a GPU all fit.
    """
    if memory is None:
        found = torch.cuda.is_available()
        memory = float(torch.cuda.mem_get_info()[1]) if found else math.inf
    by_name = {model.name: model for model in models}
    needs = {name: 2 * model.server_bytes / 1e9 for name, model in by_name.items()}
    groups = groups_that_fit(needs, _SHARE * memory / 1e9, servers_each=2)
    return [[by_name[name] for name in group] for group in groups]


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
_QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
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
    "num_experts": 32,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_LATENT_GPU = _GPU | {"context_length": 32768, "cuda_graph_bs_decode": [64, 128]}
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


def _rank(heads: int, vocab_size: int) -> dict[str, Any]:
    """One of eight ranks of DeepSeek-V3 or Kimi K2, with few experts."""
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
        "vocab_size": vocab_size,
    }


# Windows get the same number of tokens: else prompts lose theirs, and are found again less often.
_WINDOWS = {"swa_full_tokens_ratio": 1.0}
# SGLang counts five states per request that runs; the cached prompts have theirs among them.
_STATES = {"max_mamba_cache_size": 640}

LATENT = ("deepseek-v2-lite", "glm-4.7-flash", "v3-rank", "k2-rank")
LLAMAS = ("llama-3-8b", "llama-3-70b")
_LLAMA = MODELS["llama-3-8b"].config
_LLAMA_70B = _LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
HYBRIDS = {
    model.name: model
    for model in (
        HybridModel(
            ModelShape("gpt-oss-20b", _GPT_OSS_20B, _GPU | _WINDOWS),
            6,
            {"num_hidden_layers": 24, "num_local_experts": 32},
        ),
        HybridModel(ModelShape("gemma-3-12b", _GEMMA_3_12B, _GPU), 1, {"num_hidden_layers": 48}),
        HybridModel(
            ModelShape("qwen3-next", _QWEN3_NEXT, _GPU | _STATES),
            2,
            {"num_hidden_layers": 48, "num_experts": 512},
        ),
        HybridModel(
            ModelShape("deepseek-v2-lite", _V2_LITE, _LATENT_GPU), 14, {"num_hidden_layers": 27}
        ),
        HybridModel(
            ModelShape("glm-4.7-flash", _GLM_4_7_FLASH, _LATENT_GPU), 10, {"num_hidden_layers": 47}
        ),
        HybridModel(
            ModelShape("v3-rank", _rank(16, 16160), _LATENT_GPU),
            12,
            {"num_hidden_layers": 61, "n_routed_experts": 256, "num_attention_heads": 128},
        ),
        HybridModel(
            ModelShape("k2-rank", _rank(8, 20480), _LATENT_GPU),
            12,
            {"num_hidden_layers": 61, "n_routed_experts": 384, "num_attention_heads": 64},
        ),
        HybridModel(
            ModelShape("llama-3-8b", _LLAMA | {"num_hidden_layers": 16}, _GPU),
            16,
            {"num_hidden_layers": 32},
        ),
        HybridModel(ModelShape("llama-3-70b", _LLAMA_70B, _GPU), 80, {}),
        # For a machine without a GPU: shows that everything works.
        HybridModel(MODELS[TINY], MODELS[TINY].config["num_hidden_layers"], {}),
    )
}
