"""Estimates from a model's `config.json` how many parameters it has, and the bytes of each.

A nightly test compares the numbers of parameters with those of SGLang's classes.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_pat.model_classes import WITHOUT_ATTENTION, class_name
from sglang_pat.model_config import count, positive, quantisation_of
from sglang_pat.model_layers import (
    CHUNK,
    FULL,
    LATENT,
    NO_ATTENTION,
    WINDOW,
    Layer,
    attentions_per_layer,
)

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_EXPERT_INPUTS = ("moe_latent_size", "routed_expert_hidden_size")  # Nemotron 3, Kimi K3
_DENSE_WIDTHS = ("intermediate_size_mlp", "intermediate_size", "moe_intermediate_size")
# _SHARED_COUNTS are keys of the number of shared experts, each of which is as wide as a routed one.
# _SHARED_WIDTHS are keys of the width of all shared experts together.
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "num_shared_expert")
_SHARED_WIDTHS = (
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
# Keys of a list or string that says which layers are MLPs.
_PATTERNS = ("hybrid_override_pattern", "layers_block_type")
# Model types whose MLPs have two matrices and no gate.
_WITHOUT_GATE = (
    *("apertus", "arcee", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "nemotron_h"),
    *("opt", "persimmon", "phi", "starcoder2"),
)
# Model types whose output head is the embedding, unless the configuration says otherwise.
_TIED = (
    *("cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"),
    *("gpt2", "gpt_bigcode", "lfm2", "lfm2_moe", "opt", "phi3small", "starcoder2"),
)
_STATE_SQUARES = 6  # parameters of an unknown kind of state, in units of hidden_size ** 2
# quant_method, or modelopt's quant_algo -> bytes of a parameter, including the scales of its block.
_BYTES = {
    "fp8": 1.0,
    "fp8_pb_wo": 1.0,
    "fp8_per_channel_per_token": 1.0,
    "fbgemm_fp8": 1.0,
    "w8a8_fp8": 1.0,
    "w8a8_int8": 1.0,
    "w8a8_sq_per_channel": 1.0,
    "mxfp8": 33 / 32,
    "mxfp4": 17 / 32,
    "fp4": 17 / 32,
    "nvfp4": 9 / 16,
    "nvfp4_awq": 9 / 16,
    "w4a16_nvfp4": 9 / 16,
    "w4a16_awq": 4.2 / 8,
    "int4_awq": 4.2 / 8,
    "w4a8_awq": 4.2 / 8,
    "modelopt_fp8": 1.0,
    "modelopt_fp4": 9 / 16,
}
_SKIPPED = ("ignore", "ignored_layers", "exclude_modules", "modules_to_not_convert")
# What follows a module's name in a pattern of the whole module, or of one of its large matrices. A
# router (`mlp.gate`) and `kv_b_proj` are small parts.
_WHOLE_MODULE = r"(?:\W*$|.*\b(?:qkv?|o|q_b|down|(?:gate_)?up|gate)(?:\b.*)?_proj)"
_FEW_LAYERS = 8  # up to this many unquantised layers, often the first and last, are neglected
WHOLE_BYTES = 2.0  # bytes of an unquantised parameter


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of a model's parameters, estimated from its shape.

    Attributes
    ----------
    dense
        Parameters that every step reads: those of attention, MLPs, shared experts and output head.
    experts
        Parameters of all routed experts.
    num_experts, experts_per_token
        Routed experts of a layer, and how many of them a token uses; 1 and 1 without experts.
    vocabulary
        Parameters of the output head. `dense` includes them. An embedding has as many.
    embedding
        Further parameters in memory: those of encoders for images and audio, and those of the
        embedding, unless it is also the output head.
    attention
        Parameters of attention and states. `dense` includes them.
    """

    dense: int
    experts: int
    num_experts: int
    experts_per_token: int
    vocabulary: int
    embedding: int
    attention: int = 0


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes per parameter, including scales. Embeddings and output heads always have 2.

    Attributes
    ----------
    attention
        Bytes of a parameter of attention or states.
    dense
        Bytes of a parameter of MLPs and shared experts.
    experts
        Bytes of a parameter of routed experts.
    """

    attention: float = WHOLE_BYTES
    dense: float = WHOLE_BYTES
    experts: float = WHOLE_BYTES


def read_weights(config: Mapping[str, Any], layers: Sequence[Layer]) -> Weights:
    """Return the parameters of a model. ValueError names a key that is missing or wrong."""
    hidden = positive(config, "hidden_size")
    vocabulary = hidden * positive(config, "vocab_size")
    attention = sum(_mixer(config, layer, hidden) for layer in layers)
    dense = vocabulary + attention
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = config.get("model_type") in _TIED
    embedding = (0 if tied else vocabulary) + _encoders(config, hidden)
    if per_layer := count(config, "hidden_size_per_layer_input"):  # Gemma 3n and 4
        words = positive(config, "vocab_size_per_layer_input", config.get("vocab_size"))
        embedding += len(layers) * per_layer * words
    experts = 0
    num_experts = _first(config, _EXPERT_COUNTS)
    inner = _first(config, _EXPERT_INPUTS) or hidden
    matrices = 2 if config.get("model_type") in _WITHOUT_GATE else 3
    for is_mixture, width in _mlps(config, layers, num_experts):
        if not is_mixture:
            dense += matrices * hidden * width
            continue
        experts += num_experts * matrices * inner * width
        dense += matrices * hidden * _shared_width(config, width) + num_experts * hidden
        if inner != hidden:
            dense += 2 * hidden * inner
        if config.get("enable_moe_block"):  # Gemma 4 also has a dense MLP per layer
            dense += matrices * hidden * positive(config, "intermediate_size")
    widths = config.get("moe_intermediate_size")
    if isinstance(widths, list) and config.get("model_type") == "ernie4_5_moe_vl":
        # Text uses the wide experts. As many narrow ones are for images.
        of_text = _first(config, _EXPERT_WIDTHS)
        others = sum(each for each in widths if type(each) is int) - of_text
        embedding += experts * others // of_text
    if not experts:
        return Weights(dense, 0, 1, 1, vocabulary, embedding, attention)
    per_token = min(_first(config, _EXPERTS_PER_TOKEN) or 1, num_experts)
    return Weights(dense, experts, num_experts, per_token, vocabulary, embedding, attention)


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> int:
    """Return the value of the first key that is set (of a list, the largest element), or 0."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value:
            value = max((each for each in value if type(each) is int), default=0)
        if value:
            return positive({key: value}, key)
    return 0


# --- MLPs ---


def _mlps(
    config: Mapping[str, Any], layers: Sequence[Layer], num_experts: int
) -> Iterable[tuple[bool, int]]:
    """Yield, for every MLP, whether it is a mixture of experts, and its width."""
    if class_name(config) in WITHOUT_ATTENTION:
        return
    blocks = config.get("block_configs")
    if isinstance(blocks, list):  # Nemotron models from architecture search
        for block in blocks:
            ffn = block.get("ffn") if isinstance(block, Mapping) else None
            if isinstance(ffn, Mapping) and not ffn.get("no_op"):
                width = int(2 * float(ffn.get("ffn_mult") or 0) * config["hidden_size"] / 3)
                yield False, -(-width // 256) * 256
        return
    expert_width = _first(config, _EXPERT_WIDTHS)
    key = next((each for each in _PATTERNS if config.get(each)), None)
    if key is not None:  # MLPs are separate layers
        pattern = config[key]
        if not isinstance(pattern, (str, list)):
            raise ValueError(f"{key}={reprlib.repr(pattern)}; allowed: a string or a list")
        for letter in pattern:
            if letter in ("-", "mlp"):
                yield False, positive(config, "intermediate_size")
            elif letter in ("E", "moe"):
                yield True, expert_width
        return
    attentions = attentions_per_layer(config)
    for index in range(len(layers) // attentions):
        if num_experts and _is_mixture(config, index):
            yield True, expert_width
        if not num_experts or not _is_mixture(config, index) or attentions == 2:
            width = _first(config, _DENSE_WIDTHS)
            if config.get("block_auto_adjust_ff_dim"):  # LFM2
                multiple = count(config, "block_multiple_of") or 1
                width = -(-2 * width // 3 // multiple) * multiple
            if config.get("model_type") == "qwen":  # its width counts gate and up together
                width //= 2
            for _ in range(attentions):
                yield False, positive({"intermediate_size": width or None}, "intermediate_size")


def _is_mixture(config: Mapping[str, Any], index: int) -> bool:
    """Return True if the MLP of layer `index` is a mixture of experts."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] != "dense")
    listed = config.get("moe_layers_enum")  # Step models list the layers as text
    if listed:
        numbers = listed.split(",") if isinstance(listed, str) else listed
        if not isinstance(numbers, list):
            raise ValueError(f"moe_layers_enum={reprlib.repr(listed)}; allowed: layers, as 3,4,5")
        return str(index) in [str(each).strip() for each in numbers]
    if isinstance(config.get("moe_layers"), list):
        return index in config["moe_layers"]
    if step := count(config, "interleave_moe_layer_step"):  # Llama 4
        return (index + 1) % step == 0
    if isinstance(config.get("mlp_only_layers"), list) and index in config["mlp_only_layers"]:
        return False
    if step := count(config, "decoder_sparse_step"):  # Qwen
        return (index + 1) % step == 0
    first = _first(config, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"))
    frequency = config.get("moe_layer_freq", config.get("moe_layer_interval"))
    if isinstance(frequency, list):
        return bool(frequency[index]) if index < len(frequency) else True
    every = count({"moe_layer_freq": frequency}, "moe_layer_freq") or 1
    return index >= first and index % every == 0


def _shared_width(config: Mapping[str, Any], width: int) -> int:
    """Return the total width of the shared experts, which every token uses.

    width: the width of a routed expert.
    """
    shared = _first(config, _SHARED_COUNTS)
    own = _first(config, _SHARED_WIDTHS)
    if own:
        return own * max(1, shared if config.get("model_type") == "nemotron_h" else 1)
    if not shared and str(config.get("model_type")).startswith("llama4"):
        return width
    return shared * width


# --- what mixes tokens ---


def _mixer(config: Mapping[str, Any], layer: Layer, hidden: int) -> int:
    """Return how many parameters a layer's token mixer has: attention or what replaces it."""
    if layer.kind == NO_ATTENTION:
        return 0
    if layer.kind in (FULL, WINDOW, CHUNK):
        queries = layer.num_qo_heads * (layer.head_dim + layer.v_head_dim)
        if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next":
            queries += layer.num_qo_heads * layer.head_dim
        found = hidden * (queries + layer.kv_elements)
        if config.get("model_type") == "falcon_h1":  # attention and a state side by side
            found += _mamba(config, hidden)
        return found
    if layer.kind == LATENT:
        return _latent(config, layer, hidden)
    return _state(config, hidden)


def _latent(config: Mapping[str, Any], layer: Layer, hidden: int) -> int:
    rope, nope, value = (
        count(config, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    rank, query_rank = layer.kv_elements - rope, count(config, "q_lora_rank")
    heads = layer.num_qo_heads
    down = hidden * (query_rank + layer.kv_elements)
    up = (query_rank or hidden) * heads * (nope + rope) + rank * heads * (nope + value)
    return down + up + heads * value * hidden


def _state(config: Mapping[str, Any], hidden: int) -> int:
    """Return how many parameters a layer that keeps a state has."""
    if heads := count(config, "linear_num_value_heads"):  # gated delta rule: Qwen3-Next, Qwen3.5
        values = heads * positive(config, "linear_value_head_dim")
        keys = positive(config, "linear_num_key_heads") * positive(config, "linear_key_head_dim")
        return hidden * (2 * keys + 3 * values + 2 * heads)
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi
        width = positive(linear, "num_heads") * positive(linear, "head_dim")
        return hidden * 4 * width + 2 * positive(linear, "head_dim") * (hidden + width)
    if config.get("layer_group_size"):  # Ling 2.5: queries, keys, values, a gate and the output
        heads = positive(config, "num_attention_heads")
        return 5 * hidden * heads * positive(config, "head_dim", hidden // heads)
    if config.get("conv_L_cache"):  # LFM2
        return 4 * hidden * hidden
    return _mamba(config, hidden) or _STATE_SQUARES * hidden * hidden


def _mamba(config: Mapping[str, Any], hidden: int) -> int:
    """Return how many parameters a Mamba 2 layer has, or 0 if the model has no such layer."""
    heads = _first(config, ("mamba_num_heads", "mamba_n_heads"))
    width = heads * _first(config, ("mamba_head_dim", "mamba_d_head"))
    width = count(config, "mamba_d_ssm") or width
    groups = _first(config, ("n_groups", "mamba_n_groups"))
    states = groups * _first(config, ("ssm_state_size", "mamba_d_state"))
    return hidden * (3 * width + 2 * states + heads)


# --- encoders ---


def _encoders(config: Mapping[str, Any], hidden: int) -> int:
    """Return how many parameters the known encoders of a multimodal model have together."""
    return sum(
        _encoder(each, hidden) for each in config.get("encoders", ()) if isinstance(each, Mapping)
    )


def _encoder(config: Mapping[str, Any], hidden: int) -> int:
    if config.get("model_type") == "gemma3n_vision":  # MobileNet V5, of one size
        return 300_000_000
    if conformers := count(config, "conf_num_hidden_layers"):  # each has two MLPs and a convolution
        return conformers * 23 * positive(config, "hidden_size") ** 2
    layers = _any(config, "depth", "num_hidden_layers", "num_layers", "encoder_layers", "layers")
    width = _any(config, "embed_dim", "hidden_size", "d_model", "width")
    if config.get("model_type") in ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5"):
        width = _any(config, "hidden_size")
    inner = _any(config, "intermediate_size", "encoder_ffn_dim")
    ratio = config.get("mlp_ratio")
    if str(config.get("model_type")).startswith("glm4v"):
        inner = _any(config, "out_hidden_size")
    inner = inner or int(width * (ratio if isinstance(ratio, int | float) and ratio > 0 else 4))
    is_gated = config.get("model_type") == "qwen2_5_vl" or config.get("hidden_act") == "silu"
    found = layers * (4 * width * width + (3 if is_gated else 2) * width * inner)
    merge = _any(config, "spatial_merge_size")
    if merge:  # a layer that merges patches into decoder tokens
        merged = width * merge * merge
        deep = config.get("deepstack_visual_indexes")
        mergers = 1 + (len(deep) if isinstance(deep, list) else 0)
        found += mergers * merged * (merged + (_any(config, "out_hidden_size") or hidden))
    return found


def _any(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first integer under these keys, or 0."""
    return next((config[key] for key in keys if type(config.get(key)) is int), 0)


# --- bytes ---


def weight_bytes(config: Mapping[str, Any]) -> WeightBytes:
    """Return the bytes of a parameter in the checkpoint's quantisation.

    All sizes are 2 if the configuration names no quantisation, or a method that is unknown here.
    """
    quantisation = quantisation_of(config)
    if not quantisation:
        return WeightBytes()
    layers = quantisation.get("quantized_layers")
    if isinstance(layers, Mapping) and layers:
        return _mixed(quantisation, layers)
    size = _quantised(quantisation)
    experts = _BYTES.get(str(config.get("expert_dtype")).lower(), size)
    is_mxfp4 = str(quantisation.get("quant_method")).lower() == "mxfp4"
    attention, dense = (
        WHOLE_BYTES if is_mxfp4 or _skips(quantisation, *names) else size
        for names in (("self_attn", "attn"), ("shared_experts", "shared_expert", "mlp"))
    )
    return WeightBytes(attention, dense, experts)


def _mixed(quantisation: Mapping[str, Any], layers: Mapping[str, Any]) -> WeightBytes:
    """Return the average bytes of a parameter if each module has its own quantisation."""
    sizes: dict[str, list[float]] = {"attention": [], "dense": [], "experts": []}
    for name, how in layers.items():
        algorithm = how.get("quant_algo") if isinstance(how, Mapping) else None
        kind = "experts" if re.search(r"\bexperts\b", name) else "dense"
        kind = "attention" if re.search(r"attn|mixer", name) else kind
        sizes[kind].append(_BYTES.get(str(algorithm).lower(), WHOLE_BYTES))
    other = _BYTES.get(str(quantisation.get("quant_method")).lower(), WHOLE_BYTES)
    return WeightBytes(
        **{kind: sum(found) / len(found) if found else other for kind, found in sizes.items()}
    )


def _quantised(quantisation: Mapping[str, Any]) -> float:
    """Return the bytes of a quantised parameter."""
    bits = quantisation.get("bits", quantisation.get("w_bit"))
    if isinstance(bits, int):  # GPTQ, AWQ, AutoRound
        return _with_scales(bits, quantisation.get("group_size"), 16 + bits)
    names = (quantisation.get("quant_algo"), quantisation.get("quant_method"))
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping) and str(names[0]).upper() != "NVFP4":
        found = []
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
                size = weights.get("group_size")
                scale = 8 if weights.get("type") == "float" else 16
                found.append(_with_scales(weights["num_bits"], size, scale))
        if found:
            return max(found)
    for load, size in (("load_in_4bit", 9 / 16), ("load_in_8bit", 1.0)):  # bitsandbytes
        if quantisation.get(load):
            return size
    known = [_BYTES.get(str(name).lower()) for name in names]
    return next((size for size in known if size is not None), WHOLE_BYTES)


def _with_scales(bits: int, group_size: object, scale_bits: int) -> float:
    per_parameter = scale_bits / group_size if isinstance(group_size, int) and group_size > 0 else 0
    return (bits + per_parameter) / 8


def _skips(quantisation: Mapping[str, Any], *modules: str) -> bool:
    """Return True if modules of these names are unquantised in more than a few layers."""
    patterns = next((quantisation[key] for key in _SKIPPED if quantisation.get(key)), ())
    layers = set()
    for pattern in map(str, patterns if isinstance(patterns, list) else [patterns]):
        path = pattern.removeprefix("re:").replace("\\", "")
        if any(re.search(rf"(?:^|[.*]){module}\b{_WHOLE_MODULE}", path) for module in modules):
            numbered = re.search(r"layers\.(\d+)\.", path)
            if numbered is None:
                return True
            layers.add(numbered[1])
    return len(layers) > _FEW_LAYERS
