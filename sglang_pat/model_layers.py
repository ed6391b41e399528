"""The layers of a model as its `config.json` describes them, and which of them pat accelerates.

No model is loaded and SGLang is not needed. The limits are those of `support.py`. The replay, the
advice and the checks of a machine read layers here; a running server asks the layers themselves.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_pat.support import (
    HEAD_DIMS,
    LATENT_HEAD_DIMS,
    MAX_GROUP_SIZE,
    fills_tile,
    head_dim_name,
    unsupported,
)

FULL = "full attention"
WINDOW = "sliding window"
CHUNK = "attention within chunks"
LATENT = "latent attention"
STATE = "state, no KV cache"  # linear attention, state spaces, convolutions
NO_ATTENTION = "no attention"  # a block that is an MLP alone

# Names that configurations use in `layer_types` and its like.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": WINDOW,
    "sliding_window": WINDOW,
    "chunked_attention": CHUNK,
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "conv": STATE,
    "mlp": NO_ATTENTION,
    "moe": NO_ATTENTION,
}
_GPT2_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
_LARGEST, _MOST_LAYERS = 10**9, 10_000
# Decoder values that published configurations leave to transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
# Letters of `hybrid_override_pattern`, as in Nemotron-H.
_LETTERS = {"*": FULL, "M": STATE, "-": NO_ATTENTION, "E": NO_ATTENTION}


class Refusal(NamedTuple):
    """Why pat leaves a layer to SGLang's default backend: a topic of `support.py`, and a value."""

    topic: str
    value: object

    @property
    def words(self) -> str:
        """For a table."""
        if self.topic == "attention":
            return str(self.value)
        return f"{self.topic} {self.value}"

    def error(self) -> ValueError:
        """For whoever accepts no other layer."""
        return unsupported(self.topic, self.value)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a decoder, whole: on one GPU there may be fewer heads.

    Attributes
    ----------
    kind
        FULL, WINDOW, CHUNK, LATENT, STATE, NO_ATTENTION, or the configuration's own name for a kind
        that is not known here.
    num_qo_heads, num_kv_heads, head_dim, v_head_dim
        Of attention; 0 for other kinds.
    window
        KV tokens that a request reads at most. None: all of its own.
    kv_elements
        Numbers that one token adds to the KV cache.
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
    refusal: Refusal | None = None

    @property
    def is_accelerated(self) -> bool:
        return self.refusal is None


def read_layers(config: Mapping[str, Any], tp: int = 1) -> tuple[Layer, ...]:
    """Every layer of a `config.json`'s decoder, whole, as pat runs it on one of `tp` GPUs.

    ValueError names a key that is missing or has no sense.
    """
    config = decoder_config(config)
    kinds = _kinds(config)
    return tuple(_layer(config, index, kind, tp) for index, kind in enumerate(kinds))


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a configuration, with the names that most models use.

    Multimodal models keep the decoder one level down, but not how it is quantised. GPT-2 and
    StarCoder have other names.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        outer = {key: config.get(key) for key in ("model_type", "quantization_config")}
        config = {**outer, **_DEFAULTS.get(str(inner.get("model_type")), {}), **inner}
    older = {new: config[old] for old, new in _GPT2_NAMES.items() if config.get(old) is not None}
    if not older:
        return config
    if isinstance(older.get("hidden_size"), int):
        older.setdefault("intermediate_size", 4 * older["hidden_size"])
    return {**older, **config}


def summary(layers: Sequence[Layer]) -> list[tuple[int, str, bool]]:
    """(how many, in words, whether accelerated) of the layers that are alike, most first."""
    counts: Counter[tuple[str, bool]] = Counter()
    for layer in layers:
        words = _description(layer)
        if layer.refusal is not None and layer.refusal.topic not in ("attention", "sliding window"):
            words += f", {layer.refusal.words}"
        counts[words, layer.is_accelerated] += 1
    return [(count, words, accelerated) for (words, accelerated), count in counts.most_common()]


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count in a config. Null means the default, as in Transformers. ValueError names the key."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError(
            f"{key}={reprlib.repr(value)}; allowed: a whole number from 1 to {_LARGEST:,}"
        )
    return value


def count(config: Mapping[str, Any], key: str) -> int:
    """A count in a config that may be 0, null or missing."""
    return positive(config, key) if config.get(key) else 0


def _numbers(config: Mapping[str, Any], key: str) -> list[int]:
    """A list of whole numbers in a config. ValueError names the key."""
    listed = config.get(key)
    if not isinstance(listed, list) or any(type(each) is not int for each in listed):
        raise ValueError(f"{key}={reprlib.repr(listed)}; allowed: a list of whole numbers")
    return listed


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


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of every layer, by whichever key this family of models uses."""
    if config.get("kv_lora_rank") and not config.get("linear_attn_config"):
        attentions = 2 if config.get("model_type") == "longcat_flash" else 1  # of a layer
        return [LATENT] * (attentions * _num_layers(config))
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return [_LETTERS.get(letter, letter) for letter in pattern]
    layers = _num_layers(config)
    listed = config.get("layer_types") or config.get("layers_block_type")
    if listed:
        if not isinstance(listed, list):
            raise ValueError(f"layer_types={reprlib.repr(listed)}; allowed: a list")
        if len(listed) != layers:
            raise ValueError(f"layer_types has {len(listed)} entries for {layers} layers")
        return [_KINDS.get(str(kind), str(kind)) for kind in listed]
    return _kinds_by_rule(config, layers)


def _num_layers(config: Mapping[str, Any]) -> int:
    layers = positive(config, "num_hidden_layers", config.get("num_layers"))
    if layers > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers={layers:,}; allowed: 1 to {_MOST_LAYERS:,}")
    return layers


def _kinds_by_rule(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return kinds of layers from a number in the config, which replaces a list."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):  # Kimi Linear counts layers from 1
        full = {index - 1 for index in _numbers(linear, "full_attn_layers")}
        kind = LATENT if config.get("kv_lora_rank") else FULL
        return [kind if index in full else STATE for index in range(layers)]
    if interval := count(config, "full_attention_interval"):  # Qwen3-Next
        return [FULL if (index + 1) % interval == 0 else STATE for index in range(layers)]
    for key in ("full_attn_idxs", "attn_layer_indices"):  # LFM2, Bamba
        if config.get(key):
            full = {*_numbers(config, key)}
            return [FULL if index in full else STATE for index in range(layers)]
    if period := count(config, "attn_layer_period"):  # Jamba
        offset = count(config, "attn_layer_offset")
        return [FULL if index % period == offset else STATE for index in range(layers)]
    if config.get("attention_chunk_size"):  # Llama 4: layers without rotation read everything
        # Every fourth: SGLang's class does not read no_rope_layers.
        return [CHUNK if (index + 1) % 4 else FULL for index in range(layers)]
    return _window_kinds(config, layers)


def _window_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    if config.get("hybrid_layer_pattern") is not None:  # MiMo-V2: 1 marks a window
        pattern = _numbers(config, "hybrid_layer_pattern")
        if len(pattern) != layers:
            raise ValueError(f"hybrid_layer_pattern has {len(pattern)} entries for {layers} layers")
        return [WINDOW if window else FULL for window in pattern]
    # Qwen2 has the key in every config and says in another whether it counts.
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [FULL] * layers
    every = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(
        str(config.get("model_type"))
    )
    if isinstance(every, int) and every > 1:  # the last of every so many reads everything
        return [FULL if (index + 1) % every == 0 else WINDOW for index in range(layers)]
    if "use_sliding_window" in config:  # Qwen2: the first layers read everything
        first = count(config, "max_window_layers")
        return [FULL if index < first else WINDOW for index in range(layers)]
    return [WINDOW] * layers


# --- one layer ---


def _layer(config: Mapping[str, Any], index: int, kind: str, tp: int) -> Layer:
    if kind in (STATE, NO_ATTENTION):
        return Layer(index, kind, refusal=Refusal("attention", kind))
    qo_heads = positive(config, "num_attention_heads")
    if kind == LATENT:
        # A token leaves one vector for all heads, and its rotated part.
        rank = positive(config, "kv_lora_rank")
        elements = rank + count(config, "qk_rope_head_dim")
        return Layer(
            index, kind, qo_heads, 1, elements, rank, kv_elements=elements,
            refusal=_latent_refusal(config, max(1, qo_heads // tp), elements, rank),
        )  # fmt: skip
    kv_heads, head_dim, v_head_dim = _attention_shape(config, kind, qo_heads)
    if qo_heads % kv_heads:
        raise ValueError(f"{qo_heads} query heads, no multiple of {kv_heads} KV heads")
    window = {WINDOW: "sliding_window", CHUNK: "attention_chunk_size"}.get(kind)
    return Layer(
        index=index,
        kind=kind,
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        window=(count(config, window) or None) if window else None,
        kv_elements=kv_heads * (head_dim + v_head_dim),
        refusal=_refusal(config, kind, qo_heads // kv_heads, head_dim, v_head_dim),
    )


def _attention_shape(config: Mapping[str, Any], kind: str, qo_heads: int) -> tuple[int, int, int]:
    """KV heads, head_dim and v_head_dim. Some families have others in one kind of layer."""
    kv_heads = positive(config, "num_key_value_heads", qo_heads)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1  # StarCoder; the newer Falcons count their KV heads all the same
    hidden = count(config, "hidden_size")
    default = hidden // qo_heads if hidden else None
    head_dim = positive(config, "head_dim", default)
    v_head_dim = positive(config, "v_head_dim", head_dim)
    if kind == WINDOW:  # MiMo-V2
        kv_heads = positive(config, "swa_num_key_value_heads", kv_heads)
        head_dim = positive(config, "swa_head_dim", head_dim)
        v_head_dim = positive(config, "swa_v_head_dim", min(v_head_dim, head_dim))
    elif kind == FULL and config.get("global_head_dim"):  # Gemma 4
        kv_heads = positive(config, "num_global_key_value_heads", kv_heads)
        head_dim = v_head_dim = positive(config, "global_head_dim")
    return kv_heads, head_dim, v_head_dim


def _refusal(
    config: Mapping[str, Any], kind: str, group_size: int, head_dim: int, v_head_dim: int
) -> Refusal | None:
    """Why SGLang's default backend runs this layer of attention, if it does."""
    if config.get("is_encoder_decoder"):
        return Refusal("attention", "an encoder-decoder model")
    if kind == WINDOW:
        return Refusal("sliding window", config.get("sliding_window") or "of unknown length")
    if kind == CHUNK:
        return Refusal("attention", f"{CHUNK} (attention_chunk_size is set)")
    if kind != FULL:
        return Refusal("attention", kind)
    if (head_dim, v_head_dim) not in HEAD_DIMS:
        return Refusal("head_dim", head_dim_name(head_dim, v_head_dim))
    if group_size > MAX_GROUP_SIZE:
        return Refusal("query heads per KV head", group_size)
    return None


def _latent_refusal(
    config: Mapping[str, Any], heads: int, head_dim: int, v_head_dim: int
) -> Refusal | None:
    """Why SGLang's default backend runs a layer of latent attention. heads: of a rank."""
    if config.get("index_topk"):
        return Refusal("attention", "sparse latent attention (index_topk is set)")
    if (head_dim, v_head_dim) != LATENT_HEAD_DIMS:
        return Refusal("head_dim", head_dim_name(head_dim, v_head_dim))
    if fills_tile(heads):
        words = f"latent attention with nothing to gain: {heads} heads on a GPU fill a tile"
        return Refusal("attention", words)
    return None


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checkpoint's `quantization_config`; empty without one."""
    quantisation = config.get("quantization_config")
    return quantisation if isinstance(quantisation, Mapping) else {}


def check_architectures(config: Mapping[str, Any]) -> None:
    """ValueError unless the config names the classes of its model."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ValueError("no config.json of a model: it names no architectures")


def has_float8_cache(config: Mapping[str, Any]) -> bool:
    """True if the checkpoint asks for fp8 KV.

    `--kv-cache-dtype auto` of the newest SGLang obeys; older ones do not for compressed-tensors.
    """
    quantisation = quantisation_of(config)
    scheme = quantisation.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return str(quantisation.get("kv_cache_quant_algo")).upper() == "FP8"
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        return False
    if quantisation.get("quant_method") != "compressed-tensors":
        return True
    is_static = scheme.get("symmetric", True) and not scheme.get("dynamic", False)
    return scheme.get("strategy") == "tensor" and bool(is_static)
