"""The layers of a model, derived from its `config.json`, and which of them pat accelerates.

This module repeats the rules of SGLang's model classes, for machines without SGLang.
`model_classes.py` lists the classes. With SGLang, `workload/model_reader.py` reads the classes
themselves, and a running server reads its layers. The limits of what pat accelerates are in
`support.py`.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_pat import model_classes
from sglang_pat.model_classes import class_name
from sglang_pat.model_config import check_groups, count, decoder_config, numbers, positive
from sglang_pat.model_defaults import DEFAULTS
from sglang_pat.support import Unsupported, shape_reason

FULL = "full attention"
WINDOW = "sliding window"
CHUNK = "attention within chunks"
_CHUNK_TOKENS = 8192  # default of Llama 4
LATENT = "latent attention"
STATE = "state, no KV cache"  # linear attention, state spaces, convolutions
NO_ATTENTION = "no attention"  # a block with only an MLP

# Names of kinds in `layer_types` and similar keys.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "attn": FULL,
    "hybrid": FULL,
    "sliding_attention": WINDOW,
    "sliding_window": WINDOW,
    "swa": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "jet": STATE,
    "conv": STATE,
    "short_conv": STATE,
    "mlp": NO_ATTENTION,
    "moe": NO_ATTENTION,
}
# Letters of `hybrid_override_pattern`, as in Nemotron-H.
_LETTERS = {"*": FULL, "M": STATE, "-": NO_ATTENTION, "E": NO_ATTENTION}
# model_type -> n, if every n-th layer attends to all tokens and the configuration may lack n.
_FULL_EVERY = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a decoder. The numbers of heads count the heads of all GPUs together.

    Attributes
    ----------
    kind
        FULL, WINDOW, CHUNK, LATENT, STATE or NO_ATTENTION; for an unknown kind, the name that it
        has in the configuration.
    num_qo_heads, num_kv_heads, head_dim, v_head_dim
        Shape of attention layers; 0 for other kinds.
    window
        The most KV tokens that a request reads, its new token included. None: all.
    kv_elements
        Number of elements that a token adds to the KV cache.
    refusal
        Why the layer runs on SGLang's default backend. None: pat accelerates it.
    """

    index: int
    kind: str
    num_qo_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int | None = None
    kv_elements: int = 0
    refusal: Unsupported | None = None

    @property
    def is_accelerated(self) -> bool:
        return self.refusal is None


def read_layers(config: Mapping[str, Any], tp: int = 1) -> tuple[Layer, ...]:
    """Return all layers of the decoder of a `config.json`, each with whether pat accelerates it.

    tp: number of GPUs that share the heads. Raises ValueError if the model's class is unknown, or
    if a key is missing or not valid.
    """
    config = decoder_config(config)
    check_class(config)
    whole = whole_refusal(config)
    layers = (_layer(config, index, kind, tp) for index, kind in enumerate(_kinds(config)))
    if whole is None:
        return tuple(layers)
    return tuple(replace(each, refusal=whole) if each.num_qo_heads else each for each in layers)


def check_ranks(layers: Sequence[Layer], tp: int) -> None:
    """Raise ValueError if SGLang cannot divide the layers' heads among `tp` GPUs."""
    heads = sorted({layer.num_qo_heads for layer in layers if layer.num_qo_heads})
    if tp < 1 or any(count % tp for count in heads):
        counts = " and ".join(map(str, heads))
        raise ValueError(f"--tp {tp}: {counts} query heads; allowed: a divisor of {counts}")
    for kv_heads in {layer.num_kv_heads for layer in layers if layer.kind != LATENT}:
        if kv_heads and max(tp, kv_heads) % min(tp, kv_heads):
            raise ValueError(
                f"--tp {tp}: {kv_heads} KV heads; allowed: a divisor or multiple of {kv_heads}"
            )


def check_class(config: Mapping[str, Any]) -> None:
    """Raise ValueError if this module has no rules for the model's class."""
    name = class_name(config)
    if not name:
        return  # only a part of a configuration
    if name not in model_classes.KNOWN:
        raise ValueError(
            f"{reprlib.repr(name)} is a class of models that sglang-pat has no rules for"
        )


def whole_refusal(config: Mapping[str, Any]) -> Unsupported | None:
    """Return why pat accelerates no layer of a model, or None."""
    name = class_name(config)
    if not model_classes.generates_tokens(config):
        return Unsupported("attention", f"a model that generates no tokens ({name})")
    if name in model_classes.ENCODER_DECODER or config.get("is_encoder_decoder"):
        return Unsupported("attention", "an encoder-decoder model" + f" ({name})" * bool(name))
    if sparse := model_classes.sparse_name(config):
        return Unsupported("attention", f"sparse attention ({sparse})")
    if config.get("dual_chunk_attention_config"):  # Qwen2.5-1M
        return Unsupported("default backend", "dual_chunk_flash_attn")
    if name in model_classes.WITH_BIAS:
        return Unsupported("attention", f"a bias by distance ({name})")
    return None


def summary(layers: Sequence[Layer]) -> list[tuple[int, str, bool]]:
    """Return (count, description, is accelerated) for each group of equal layers, largest first."""
    counts: Counter[tuple[str, bool]] = Counter()
    for layer in layers:
        words = _description(layer)
        if layer.refusal is not None and layer.refusal.topic not in ("attention", "sliding window"):
            words += f", {layer.refusal}"
        counts[words, layer.is_accelerated] += 1
    return [(count, words, accelerated) for (words, accelerated), count in counts.most_common()]


def _description(layer: Layer) -> str:
    if layer.num_qo_heads == 0:
        return layer.kind
    dims = str(layer.head_dim)
    if layer.v_head_dim != layer.head_dim:
        dims += f"/{layer.v_head_dim}"
    window = "" if layer.window is None else f" of {layer.window:,}"
    heads = f"{layer.num_qo_heads}/{layer.num_kv_heads} heads of {dims}"
    return f"{layer.kind}{window}, {heads}"


# --- kinds ---


def _rule(config: Mapping[str, Any]) -> str:
    """Return the class whose rule applies: for some multimodal models, the decoder's class."""
    inner = class_name({"architectures": config.get("decoder_architectures")})
    special = model_classes.BY_LAYER_TYPES | model_classes.OTHER_RULES
    return inner if inner in special else class_name(config)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer, by the rule of the model's class."""
    name = _rule(config)
    if name in model_classes.WITHOUT_ATTENTION:
        return [STATE] * _num_layers(config)
    rule = _RULES.get(name)
    if rule is None and name in model_classes.PLAIN:
        rule = _plain
    if rule is None:
        rule = _by_keys if name in ("", *model_classes.BY_LAYER_TYPES) else _plain
    kinds = rule(config)
    if config.get("kv_lora_rank"):
        return [LATENT if kind == FULL else kind for kind in kinds]
    return kinds


def _num_layers(config: Mapping[str, Any]) -> int:
    layers = positive(config, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers={layers:,}; allowed: 1 to {_MOST_LAYERS:,}")
    return layers


def _plain(config: Mapping[str, Any]) -> list[str]:
    blocks = config.get("block_configs")
    if blocks is not None:  # a Nemotron model that was found by architecture search
        layers = range(_num_layers(config))
        return [NO_ATTENTION if _block(config, i).get("no_op") else FULL for i in layers]
    return [FULL] * (attentions_per_layer(config) * _num_layers(config))


def attentions_per_layer(config: Mapping[str, Any]) -> int:
    """Return how many attention modules each layer of a model has."""
    return 2 if class_name(config) == "LongcatFlashForCausalLM" else 1


def _block(config: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return the `attention` of a block, for Nemotron models found by architecture search."""
    blocks = config.get("block_configs")
    block = blocks[index] if isinstance(blocks, list) and index < len(blocks) else None
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ValueError(f"block_configs={reprlib.repr(blocks)}; allowed: a list with attention")
    return attention


def _every(config: Mapping[str, Any], every: int, others: str) -> list[str]:
    """Return the kinds of all layers if every `every`-th layer is FULL, and others are `others`."""
    return [FULL if (index + 1) % every == 0 else others for index in range(_num_layers(config))]


def _by_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers by the first known key that the configuration has."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return _of_nemotron_h(config)
    if config.get("layers_block_type") and not config.get("layer_types"):
        return _of_nemotron_h(config)
    if isinstance(config.get("linear_attn_config"), Mapping):
        return _of_kimi_linear(config)
    if config.get("attention_chunk_size") and not config.get("hybrid_layer_pattern"):
        return _of_llama_4(config)
    if config.get("hybrid_layer_pattern") is not None:
        return _of_mimo_v2(config)
    layers = _num_layers(config)
    listed = config.get("layer_types")
    if listed:
        if not isinstance(listed, list):
            raise ValueError(f"layer_types={reprlib.repr(listed)}; allowed: a list")
        if len(listed) < layers:
            raise ValueError(f"layer_types has {len(listed)} entries for {layers} layers")
        return [_KINDS.get(str(kind), str(kind)) for kind in listed[:layers]]
    is_hybrid = str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    if interval := count(config, "full_attention_interval") or 4 * is_hybrid:
        return _every(config, interval, STATE)
    if config.get("full_attn_idxs"):  # LFM2
        full = {*numbers(config, "full_attn_idxs")}
        return [FULL if index in full else STATE for index in range(layers)]
    if config.get("sliding_window"):
        every = config.get("sliding_window_pattern")
        every = every or _FULL_EVERY.get(str(config.get("model_type")))
        if isinstance(every, int) and every > 0:
            return _every(config, every, WINDOW)
        return [WINDOW] * layers
    return [FULL] * layers


def _of_nemotron_h(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if isinstance(listed, str) and listed:
        kinds = [_LETTERS.get(letter, letter) for letter in listed]
    elif isinstance(listed, list):
        kinds = [_KINDS.get(str(kind), str(kind)) for kind in listed]
    else:
        raise ValueError(f"layers_block_type={reprlib.repr(listed)}; allowed: a list")
    if not config.get("sliding_window"):
        return kinds
    return [WINDOW if kind == FULL else kind for kind in kinds]


def _of_kimi_linear(config: Mapping[str, Any]) -> list[str]:
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        return [FULL] * _num_layers(config)
    full = {index - 1 for index in numbers(linear, "full_attn_layers")}  # counted from 1
    return [FULL if index in full else STATE for index in range(_num_layers(config))]


def _of_bailing(config: Mapping[str, Any]) -> list[str]:
    group = config.get("layer_group_size")
    if isinstance(group, list):
        return [FULL if each == 1 else STATE for each in numbers(config, "layer_group_size")]
    return _every(config, positive(config, "layer_group_size", 1), STATE)


def _of_llama_4(config: Mapping[str, Any]) -> list[str]:
    # Every fourth layer reads all tokens, even if no_rope_layers says otherwise: SGLang's class
    # ignores that key.
    return _every(config, 4, CHUNK if config.get("attention_chunk_size", _CHUNK_TOKENS) else FULL)


def _of_mimo_v2(config: Mapping[str, Any]) -> list[str]:
    layers, pattern = _num_layers(config), numbers(config, "hybrid_layer_pattern")
    if len(pattern) < layers:
        raise ValueError(f"hybrid_layer_pattern has {len(pattern)} entries for {layers} layers")
    return [WINDOW if window == 1 else FULL for window in pattern[:layers]]


def _of_gemma_2(config: Mapping[str, Any]) -> list[str]:
    return [FULL if index % 2 else WINDOW for index in range(_num_layers(config))]


def _of_exaone_4(config: Mapping[str, Any]) -> list[str]:
    pattern = config.get("sliding_window_pattern")  # such as LLLG
    if not pattern or not config.get("sliding_window"):
        return [FULL] * _num_layers(config)
    return _every(config, pattern if isinstance(pattern, int) else len(str(pattern)), WINDOW)


def _parallel(config: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers if each layer has attention and a state side by side."""
    return [FULL] * _num_layers(config)


_RULES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "BailingMoeV2_5ForCausalLM": _of_bailing,
    "BailingMoeV3ForCausalLM": _of_bailing,
    "Exaone4ForCausalLM": _of_exaone_4,
    "FalconH1ForCausalLM": _parallel,
    "Gemma2ForCausalLM": _of_gemma_2,
    "Glm5NextForConditionalGeneration": _by_keys,
    "JetNemotronForCausalLM": _by_keys,
    "KimiK3ForConditionalGeneration": _of_kimi_linear,
    "KimiK3LinearForCausalLM": _of_kimi_linear,
    "KimiLinearForCausalLM": _of_kimi_linear,
    "Llama4ForCausalLM": _of_llama_4,
    "Llama4ForConditionalGeneration": _of_llama_4,
    "MiMoV2FlashForCausalLM": _of_mimo_v2,
    "MiMoV2ForCausalLM": _of_mimo_v2,
    "NemotronHForCausalLM": _of_nemotron_h,
    "NemotronH_Nano_Omni_Reasoning_V3": _of_nemotron_h,
    "NemotronH_Nano_VL_V2": _of_nemotron_h,
    "NemotronH_Omni_Reasoning_V3": _of_nemotron_h,
}


# --- one layer ---


def _layer(config: Mapping[str, Any], index: int, kind: str, tp: int) -> Layer:
    if kind in (STATE, NO_ATTENTION):
        return Layer(index, kind, refusal=Unsupported("attention", kind))
    qo_heads = _query_heads(config, kind, index)
    if kind == LATENT:
        # In the cache, a token has one vector for all heads, and one part with rotary positions.
        rank = positive(config, "kv_lora_rank")
        elements = rank + count(config, "qk_rope_head_dim")
        return Layer(
            index, kind, qo_heads, 1, elements, rank, kv_elements=elements,
            refusal=shape_reason(max(1, qo_heads // tp), 1, elements, rank),
        )  # fmt: skip
    kv_heads, head_dim, v_head_dim = _attention_shape(config, kind, index, qo_heads)
    check_groups(qo_heads, kv_heads)
    key = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}.get(kind)
    window = (count(config, key) or None) if key else None
    if kind == CHUNK and window is None:
        window = _CHUNK_TOKENS
    if kind == WINDOW and window is None:
        kind = FULL
    elif kind == WINDOW and window and class_name(config) in model_classes.NEW_TOKEN_IS_EXTRA:
        window += 1
    heads = (max(1, qo_heads // tp), max(1, kv_heads // tp))  # heads of a rank
    return Layer(
        index=index,
        kind=kind,
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        window=window,
        kv_elements=kv_heads * (head_dim + v_head_dim),
        refusal=_refusal(config, kind, heads, head_dim, v_head_dim),
    )


def _query_heads(config: Mapping[str, Any], kind: str, index: int) -> int:
    if kind == WINDOW:
        other = config.get("attention_other_setting")  # Step-3.5
        if isinstance(other, Mapping):
            return positive(other, "num_attention_heads")
        if config.get("swa_num_attention_heads"):  # MiMo-V2
            return positive(config, "swa_num_attention_heads")
    listed = config.get("num_attention_heads_per_layer")  # Laguna
    if listed:
        heads = numbers(config, "num_attention_heads_per_layer")
        if index < len(heads) and heads[index] > 0:
            return heads[index]
        raise ValueError(f"num_attention_heads_per_layer has no number for layer {index}")
    return positive(config, "num_attention_heads")


def _attention_shape(
    config: Mapping[str, Any], kind: str, index: int, qo_heads: int
) -> tuple[int, int, int]:
    """Return (KV heads, head_dim, v_head_dim). In some model families, they depend on `kind`."""
    heads = positive(config, "num_attention_heads", qo_heads)
    kv_heads = positive(config, "num_key_value_heads", heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1  # StarCoder and older Falcons
    if config.get("block_configs") is not None:
        kv_heads = max(1, heads // positive(_block(config, index), "n_heads_in_group"))
    hidden = count(config, "hidden_size")
    default = DEFAULTS.get(str(config.get("model_type")), {}).get("head_dim")
    default = default or (hidden // heads if hidden else None)
    head_dim = v_head_dim = positive(config, "head_dim", default)
    if class_name(config) in ("", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"):
        v_head_dim = positive(config, "v_head_dim", head_dim)
    if kind == WINDOW:
        other = config.get("attention_other_setting")
        if isinstance(other, Mapping):  # Step-3.5
            kv_heads = positive(other, "num_attention_groups", kv_heads)
        kv_heads = positive(config, "swa_num_key_value_heads", kv_heads)  # MiMo-V2
        head_dim = positive(config, "swa_head_dim", head_dim)
        v_head_dim = positive(config, "swa_v_head_dim", min(v_head_dim, head_dim))
    elif kind == FULL and config.get("global_head_dim"):  # Gemma 4
        kv_heads = positive(config, "num_global_key_value_heads", kv_heads)
        head_dim = v_head_dim = positive(config, "global_head_dim")
    return kv_heads, head_dim, v_head_dim


def _refusal(
    config: Mapping[str, Any], kind: str, heads: tuple[int, int], head_dim: int, v_head_dim: int
) -> Unsupported | None:
    """Return why an attention layer falls back, or None."""
    if kind not in (FULL, WINDOW, CHUNK):
        return Unsupported("attention", kind)
    return shape_reason(*heads, head_dim, v_head_dim)
