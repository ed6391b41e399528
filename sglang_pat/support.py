"""Lists the features of SGLang that pat supports: documentation and refusals come from here.

`sglang-pat doctor --support-table` prints the support table. This module also has the reasons for
which a layer or a model falls back to SGLang's default backend.

All messages that refuse an argument get their words from here, so messages and documentation agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BACKEND = "pat"  # the name of the attention backend in SGLang
# Tested versions of SGLang (docs/sglang-versions.json). CI tests the oldest and the newest.
SGLANG_VERSIONS = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
SUPPORTED_SGLANG = f"supported versions of SGLang: {', '.join(SGLANG_VERSIONS)}"
PYTHON_VERSIONS = ("3.11", "3.12")
DTYPES = ("float16", "bfloat16", "float32")
KERNEL_DTYPES = ("float16", "bfloat16")  # dtypes in which the kernels compute
# dtypes of the KV cache other than the dtype of the queries.
CONVERTED_KV_DTYPES = ("float8_e4m3fn", "float8_e5m2")
WIDE_HEAD_DIMS = (512, 512)  # the full layers of Gemma 4
# (head_dim of keys and queries, head_dim of values) of layers whose KV heads store keys and values
# separately. All other pairs are refused.
GQA_HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), WIDE_HEAD_DIMS)
# Latent attention (MLA, absorbed): all query heads attend to one KV head, whose values are the
# first numbers of its keys.
LATENT_HEAD_DIMS = (576, 512)
HEAD_DIMS = (*GQA_HEAD_DIMS, LATENT_HEAD_DIMS)
OLDEST_CAPABILITY = (8, 0)  # oldest GPUs with kernels: Ampere
# Compute capabilities that the kernels can be compiled for.
CAPABILITIES = (
    OLDEST_CAPABILITY,
    (8, 6),
    (8, 7),
    (8, 9),
    (9, 0),
    (10, 0),
    (10, 3),
    (11, 0),
    (12, 0),
    (12, 1),
)
# GPUs with kernels for latent attention. The list leaves out GPUs on which default backends use
# instructions (tcgen05) that pat's kernels do not use.
LATENT_CAPABILITIES = (OLDEST_CAPABILITY, (8, 6), (8, 7), (8, 9), (9, 0), (12, 0), (12, 1))
# GPUs with kernels for head_dim 512. These kernels need wgmma, because two warpgroups share a row.
WIDE_CAPABILITIES = ((9, 0),)
# Must equal kMaxGroupSize and kMaxLatentGroupSize of kernels/contract/tile_table.h.
MAX_GROUP_SIZE = 16
MAX_LATENT_GROUP_SIZE = 64
# pat decodes latent attention if a tile holds at least this many requests. On a shared prefix, pat
# is then 3% faster than the better of FA3 and FlashMLA (`h100/mla-near-tile*.json`). The second
# number applies where the cache is fp8 and FlashMLA is the default backend. FlashMLA multiplies fp8
# numbers directly, while other backends first convert the whole pool.
_LEAST_IN_TILE, _LEAST_BESIDE_FLASHMLA = 1.5, 4
# SGLang's fa3 converts the whole pool of latent KV from fp8 in every layer, which takes 1.65 ns per
# token on an H200. If one request fills a tile of 64 rows, pat's attention itself takes 0.45 ns
# longer than fa3's per token of a tile (`h200/mla-fp8-pool-*.json`). So pat needs a pool of at
# least _POOL_PER_ROW tokens for each query row of the largest step. With such a pool, pat is faster
# for requests of up to about 60,000 tokens on average.
_CONVERTS_POOL, _POOL_PER_ROW = "fa3", 256
GROWTH_TOKENS = 256  # default of SGLANG_PAT_GROWTH_TOKENS and of PackAttention
# A request may grow by this many tokens, or by this part of a small window, before it gets another
# cut. So a cut lies that many tokens after the start of the window, and the tokens in between are
# private.
WINDOW_SLACK, WINDOW_SLACK_PART = 64, 1 / 8
MAX_WINDOW = 1 << 20  # tokens; each request has a row of that many slots
# SGLang's backends in whose place pat can decode, because they compute dense attention over the
# whole paged KV of a request.
DEFAULT_BACKENDS = (
    "fa3",
    "fa4",
    "flashinfer",
    "trtllm_mha",
    "triton",
    "torch_native",
    "intel_amx",
    "flashmla",
)
POLICIES = ("memory", "paper", "compute", "per-node", "query-centric")
# Values of --kv-cache-dtype with which pat may be able to read the KV.
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

REFUSED = "refused at start-up"
PRIVATE_ROWS = "correct, but nothing is shared"
# What happens to layers and models that pat does not accelerate.
DEFAULT_DECODES = "runs on SGLang's default backend"
LAYER = "these layers run on SGLang's default backend"
MODEL = "the model runs on SGLang's default backend"


@dataclass(frozen=True, slots=True)
class SupportRow:
    """A row of the support table: what is supported, and what happens to everything else."""

    topic: str
    supported: str
    everything_else: str


def head_dim_name(head_dim: int, v_head_dim: int) -> str:
    """Return `128`, or `192/128` if the head_dims of keys and values differ."""
    return f"{head_dim}" if head_dim == v_head_dim else f"{head_dim}/{v_head_dim}"


def is_latent(head_dim: int, v_head_dim: int) -> bool:
    """Return True if layers with these head_dims are latent attention."""
    return (head_dim, v_head_dim) == LATENT_HEAD_DIMS


def max_group_size(head_dim: int, v_head_dim: int) -> int:
    """Return the most query heads per KV head that pat supports for these head_dims."""
    return MAX_LATENT_GROUP_SIZE if is_latent(head_dim, v_head_dim) else MAX_GROUP_SIZE


def fills_tile(
    num_heads: int, num_drafts: int = 1, *, one_byte: bool = False, default: str = ""
) -> bool:
    """Return True if a tile holds so few requests of latent attention that packing does not pay.

    num_drafts: number of tokens of a request in a step, each with `num_heads` query rows. one_byte:
    the KV cache is fp8. default: the backend that decodes if pat does not.
    """
    beside_flashmla = one_byte and default == "flashmla"
    least = _LEAST_BESIDE_FLASHMLA if beside_flashmla else _LEAST_IN_TILE
    return MAX_LATENT_GROUP_SIZE // num_heads < least * num_drafts


def pool_decides(num_heads: int, *, one_byte: bool = False, default: str = "") -> bool:
    """Return True if, with a large pool, pat is faster even where `fills_tile` returns True."""
    return one_byte and default == _CONVERTS_POOL and num_heads <= MAX_LATENT_GROUP_SIZE


def is_wide(head_dim: int, v_head_dim: int) -> bool:
    """Return True for wide rows, for which only some GPUs have kernels."""
    return (head_dim, v_head_dim) == WIDE_HEAD_DIMS


def has_kernels(
    head_dim: int, v_head_dim: int, capability: tuple[int, int], *, one_byte: bool = False
) -> bool:
    """Return True if there are kernels for these head_dims and this compute capability.

    one_byte: the KV cache is fp8.
    """
    if capability < OLDEST_CAPABILITY or (head_dim, v_head_dim) not in HEAD_DIMS:
        return False
    if is_latent(head_dim, v_head_dim):
        return capability in LATENT_CAPABILITIES
    if is_wide(head_dim, v_head_dim):
        return capability in WIDE_CAPABILITIES and not one_byte
    return True


def device_reason(
    head_dim: int, v_head_dim: int, capability: tuple[int, int]
) -> Unsupported | None:
    """Return why pat does not decode these head_dims on this compute capability, or None."""
    if has_kernels(head_dim, v_head_dim, capability):
        return None
    where = "on compute capability {}.{}".format(*capability)
    if is_latent(head_dim, v_head_dim):
        return Unsupported("attention", f"latent attention {where}")
    return Unsupported("head_dim", f"{head_dim_name(head_dim, v_head_dim)} {where}")


def _capabilities(capabilities: tuple[tuple[int, int], ...]) -> str:
    return ", ".join("{}.{}".format(*each) for each in capabilities)


def _latent_devices() -> str:
    names = _capabilities(LATENT_CAPABILITIES)
    return "on the CPU" + f" and on compute capability {names}" * bool(names)


def _any_of(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)


_MATRIX = (
    SupportRow(
        "SGLang",
        _any_of(SGLANG_VERSIONS),
        "starts with a warning if all hooks take hold and a self-test passes",
    ),
    SupportRow("Python", _any_of(PYTHON_VERSIONS), "refused by pip"),
    SupportRow(
        "device",
        f"NVIDIA GPUs from compute capability {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]}, by "
        "CUDA kernels; CPU, by torch",
        MODEL,
    ),
    SupportRow("default backend", _any_of(DEFAULT_BACKENDS), MODEL),
    SupportRow("CUDA graphs", "captured and replayed", MODEL),
    SupportRow(
        "forward mode",
        "decode; with speculative decoding also verify steps, decode steps of draft models and "
        "draft extend",
        DEFAULT_DECODES,
    ),
    SupportRow(
        "attention",
        "causal self-attention with MHA, GQA or MQA heads, which may differ from layer to layer; "
        "tanh soft-cap; attention sinks; latent attention (MLA) "
        f"{_latent_devices()}, if a tile of {MAX_LATENT_GROUP_SIZE} rows, which are query heads of "
        f"draft tokens, holds {_LEAST_IN_TILE} requests ({_LEAST_BESIDE_FLASHMLA} beside flashmla "
        f"over fp8; any number beside {_CONVERTS_POOL} over fp8 with a pool of {_POOL_PER_ROW} "
        "tokens for each row of --max-running-requests), without sinks, sparse attention (DSA) and "
        "LoRA on kv_b_proj",
        LAYER,
    ),
    SupportRow(
        "head_dim",
        f"{_any_of(tuple(head_dim_name(*pair) for pair in HEAD_DIMS))}; of them "
        f"{head_dim_name(*WIDE_HEAD_DIMS)} on the CPU and on compute capability "
        f"{_capabilities(WIDE_CAPABILITIES)}, not over fp8",
        LAYER,
    ),
    SupportRow(
        "query heads per KV head",
        f"1 to {MAX_GROUP_SIZE}; of latent attention 1 to {MAX_LATENT_GROUP_SIZE}",
        LAYER,
    ),
    SupportRow(
        "dtype of queries and KV cache",
        f"{_any_of(DTYPES)}; of the KV cache also {_any_of(CONVERTED_KV_DTYPES)}",
        LAYER,
    ),
    SupportRow("KV pool", "slots of [KV head, head_dim], page size 1 or more", LAYER),
    SupportRow(
        "sliding window",
        f"up to {MAX_WINDOW:,} tokens, where the default backend is fa3, fa4, flashinfer, "
        "trtllm_mha, triton or torch_native; not in batch-invariant mode, in draft models, or with "
        "drafts other than chains on fa3 and torch_native; attention within chunks on fa3, without "
        "drafts",
        LAYER,
    ),
    SupportRow(
        "server options",
        "any except --enable-two-batch-overlap, --enable-pdmux, "
        "--enable-hisparse, --enable-kv-cache-sharding, --enable-page-major-kv-layout, "
        "--enable-unified-memory, --enable-torch-compile, --enable-mis, "
        "--enable-nvidia-megakernel, --dllm-algorithm, --dcp-size, "
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        MODEL,
    ),
    SupportRow(
        "speculative decoding",
        "--speculative-algorithm EAGLE, EAGLE3, NEXTN (MTP), FROZEN_KV_MTP, STANDALONE, NGRAM, "
        "DFLASH, DSPARK; not UNO, DSPARK with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept, "
        "batch-invariant mode, --speculative-attention-mode prefill where prefill has another "
        "backend, nor SGLANG_ENABLE_OVERLAP_PLAN_STREAM in versions whose plan stream does not "
        "wait (0.5.17)",
        MODEL,
    ),
    SupportRow(
        "prefix cache",
        "RadixCache, HiRadixCache, UnifiedRadixCache (Python and Rust core), hybrid models "
        "included",
        PRIVATE_ROWS,
    ),
    SupportRow("packing policy", _any_of(POLICIES), REFUSED),
)
_BY_TOPIC = {row.topic: row for row in _MATRIX}


def support_matrix() -> tuple[SupportRow, ...]:
    """Return all rows of the support table, in the order of the documentation."""
    return _MATRIX


def row_of(topic: str) -> SupportRow:
    """Return the row of the support table on `topic`."""
    return _BY_TOPIC[topic]


def unsupported(topic: str, value: object) -> ValueError:
    """Return an error that names `value` and what is supported on `topic`."""
    return ValueError(
        f"pat does not support {topic} = {value}; supported: {_BY_TOPIC[topic].supported}"
    )


class Unsupported(NamedTuple):
    """A reason why pat does not decode something: a topic of the support table, and a value."""

    topic: str
    value: object

    def __str__(self) -> str:
        alone = ("attention", "server options", "speculative decoding", "default backend")
        return str(self.value) if self.topic in alone else f"{self.topic} {self.value}"

    def refusal(self, where: str = "") -> ValueError:
        """Return the error to raise if pat must not fall back."""
        return unsupported(self.topic, f"{self.value}{where}")


def shape_reason(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    *,
    one_byte: bool = False,
    default: str = "",
) -> Unsupported | None:
    """Return why pat does not decode a layer of this shape, or None if it does.

    num_heads, num_kv_heads: numbers of query heads and KV heads of one rank.

    one_byte, default: see `fills_tile`.
    """
    if (head_dim, v_head_dim) not in HEAD_DIMS:
        return Unsupported("head_dim", head_dim_name(head_dim, v_head_dim))
    if is_wide(head_dim, v_head_dim) and one_byte:
        return Unsupported("head_dim", f"{head_dim} over an fp8 KV cache")
    if num_heads % num_kv_heads:
        return Unsupported("query heads per KV head", f"{num_heads}/{num_kv_heads}")
    if is_latent(head_dim, v_head_dim):
        reason = nothing_to_gain(num_heads, one_byte=one_byte, default=default)
        if reason is not None:
            return reason
    if num_heads // num_kv_heads > max_group_size(head_dim, v_head_dim):
        return Unsupported("query heads per KV head", num_heads // num_kv_heads)
    return None


def nothing_to_gain(
    num_heads: int, num_drafts: int = 1, *, one_byte: bool = False, default: str = ""
) -> Unsupported | None:
    """Return why latent attention falls back with a pool of any size, or None if it need not.

    The arguments are those of `fills_tile`.
    """
    if not fills_tile(num_heads, num_drafts, one_byte=one_byte, default=default):
        return None
    if pool_decides(num_heads, one_byte=one_byte, default=default):
        return None
    beside = "" if fills_tile(num_heads, num_drafts) else f" too far beside {default} over fp8"
    return _no_gain(num_heads, num_drafts, beside)


def pool_too_small(
    pool_tokens: int,
    max_requests: int,
    num_heads: int,
    num_drafts: int = 1,
    *,
    one_byte: bool = False,
    default: str = "",
) -> Unsupported | None:
    """Return why latent attention falls back with a pool of this size, or None if it does not.

    Call it if `nothing_to_gain` has returned None. max_requests: the number of requests in the
    largest step.
    """
    is_full = fills_tile(num_heads, num_drafts, one_byte=one_byte, default=default)
    needed = _POOL_PER_ROW * num_heads * num_drafts * max_requests
    if not is_full or pool_tokens >= needed:
        return None
    least = f", and {default} converts {pool_tokens:,} tokens soon (pat: from {needed:,} on)"
    return _no_gain(num_heads, num_drafts, least)


def _no_gain(num_heads: int, num_drafts: int, more: str) -> Unsupported:
    rows = f"{num_heads} heads" + f" x {num_drafts} draft tokens" * (num_drafts > 1)
    return Unsupported(
        "attention", f"latent attention with nothing to gain: {rows} fill a tile{more}"
    )


def markdown_table() -> str:
    """Return the support table as Markdown."""
    rows = [(row.topic, row.supported, row.everything_else) for row in _MATRIX]
    head = ("", "Supported", "Anything else")
    lines = [head, ("---",) * 3, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
