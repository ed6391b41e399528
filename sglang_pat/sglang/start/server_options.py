"""Server options with which pat decodes nothing. The command line imports this module."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_pat.sglang.compat import environment_is_set, plan_stream_waits, resolved
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.support import KV_CACHE_DTYPES, Unsupported

# Server arguments with which pat decodes nothing, because they change which KV a decode step reads,
# which backend decodes, or how SGLang runs the backend.
DELEGATED_ARGUMENTS = {
    "enable_two_batch_overlap": "--enable-two-batch-overlap",
    "enable_pdmux": "--enable-pdmux",
    "enable_hisparse": "--enable-hisparse",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
    "enable_page_major_kv_layout": "--enable-page-major-kv-layout",
    "enable_unified_memory": "--enable-unified-memory",
    "enable_torch_compile": "--enable-torch-compile",
    "enable_mis": "--enable-mis",
    "enable_nvidia_megakernel": "--enable-nvidia-megakernel",
    "dllm_algorithm": "--dllm-algorithm",
}
# Speculative algorithms by the form of their drafts. CHAINS: a draft model drafts one token after
# the other (with a topk above 1, its drafts form trees). BLOCKS: a draft model drafts a block of
# tokens at once. TREES: drafts are found in earlier text, and form trees.
CHAINS = ("EAGLE", "EAGLE3", "FROZEN_KV_MTP", "NEXTN", "STANDALONE")
BLOCKS = ("DFLASH", "DSPARK")
TREES = ("NGRAM",)
# Makes SGLang prepare verify steps and draft extend on a separate stream.
PLAN_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
# With "static", DSPARK verifies the same number of drafts for each request.
RAGGED_VERIFY = "SGLANG_RAGGED_VERIFY_MODE"
# Makes SGLang capture what a backend does before each replay, instead of calling the backend.
GLUE_GRAPH = "SGLANG_ENABLE_METADATA_GLUE_GRAPH"


def attention_backends(arguments: Any) -> tuple[str, str]:
    """Return the names of SGLang's backends for prefill and decode, after resolution."""
    base = resolved(arguments, "attention_backend")
    prefill = resolved(arguments, "prefill_attention_backend") or base
    return prefill, resolved(arguments, "decode_attention_backend") or base


def batch_invariant(arguments: Any, environment: Environment) -> bool:
    """Return True if pat must compute bit-identical results in any batch.

    It must if SGLANG_PAT_BATCH_INVARIANT or SGLang's deterministic inference is on. An on-policy RL
    target turns on deterministic inference.
    """
    deterministic = resolved(arguments, "enable_deterministic_inference")
    return environment.batch_invariant or bool(deterministic)


def server_reason(arguments: Any) -> Unsupported | None:
    """Return why pat decodes nothing with these resolved server arguments, or None."""
    for name, flag in DELEGATED_ARGUMENTS.items():
        value = resolved(arguments, name)
        if value:
            return Unsupported("server options", flag if value is True else f"{flag} {value}")
    dcp_size = resolved(arguments, "dcp_size")
    if dcp_size is not None and dcp_size > 1:
        return Unsupported("server options", f"--dcp-size {dcp_size}")
    reason = _speculation_reason(arguments, Environment.read())
    if reason is None and environment_is_set(GLUE_GRAPH):
        reason = Unsupported("server options", f"{GLUE_GRAPH}=1 in the environment")
    return reason


def _speculation_reason(arguments: Any, environment: Environment) -> Unsupported | None:
    """Return why pat does not verify the drafts of speculative decoding, or None."""
    from sglang.srt.environ import envs

    algorithm = resolved(arguments, "speculative_algorithm")
    if algorithm is None:
        return None
    if algorithm not in CHAINS + BLOCKS + TREES:
        return Unsupported("speculative decoding", f"--speculative-algorithm {algorithm}")
    ragged = getattr(envs, RAGGED_VERIFY).get()
    if algorithm == "DSPARK" and ragged != "static":
        return Unsupported("speculative decoding", f"{RAGGED_VERIFY}={ragged} in the environment")
    if batch_invariant(arguments, environment):
        return Unsupported("speculative decoding", "in batch-invariant mode")
    prefill, decode = attention_backends(arguments)
    if prefill != decode and resolved(arguments, "speculative_attention_mode") != "decode":
        return Unsupported(
            "speculative decoding", f"--speculative-attention-mode prefill with {prefill}"
        )
    has_draft_layers = bool(resolved(arguments, "enable_multi_layer_eagle"))
    if (
        algorithm in CHAINS
        and environment_is_set(PLAN_STREAM)
        and not plan_stream_waits(has_draft_layers=has_draft_layers)
    ):
        return Unsupported("speculative decoding", f"{PLAN_STREAM}=1 in the environment")
    return None


class Drafts(NamedTuple):
    """The draft tokens of a verify step."""

    counts: tuple[int, ...]  # drafts per request; several counts if adaptive
    are_chains: bool  # whether drafts form chains; otherwise they may branch
    lengths_are_bounds: bool = False  # whether the host may overestimate requests' lengths


def drafts_of(arguments: Any) -> Drafts | None:
    """Return the drafts of verify steps, or None without speculative decoding."""
    algorithm = resolved(arguments, "speculative_algorithm")
    if algorithm is None:
        return None
    is_block = algorithm in BLOCKS
    are_chains = is_block or (algorithm in CHAINS and branches_of(arguments) == 1)
    counts = {int(resolved(arguments, "speculative_num_draft_tokens"))}
    if resolved(arguments, "speculative_adaptive"):
        from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

        path = resolved(arguments, "speculative_adaptive_config")
        counts |= {steps + 1 for steps in resolve_candidate_steps_from_config(path)}
    return Drafts(tuple(sorted(counts)), are_chains, is_block)


def drafts_now(arguments: Any) -> int:
    """Return the number of draft tokens per request for the backend that SGLang builds now."""
    if resolved(arguments, "speculative_adaptive"):  # SGLang sets the number for each backend
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_num_draft_tokens)
    return int(resolved(arguments, "speculative_num_draft_tokens"))


def branches_of(arguments: Any) -> int:
    """Return the number of branches per request in a draft model's decode steps."""
    return int(resolved(arguments, "speculative_eagle_topk") or 1)


def early_reason(arguments: Any) -> Unsupported | None:
    """Return why pat decodes nothing, as far as resolved server arguments tell, or None.

    The reason comes from `server_reason()`, or is a dtype of the KV cache that would make every
    layer fall back.
    """
    reason = server_reason(arguments)
    dtype = resolved(arguments, "kv_cache_dtype")
    if reason is None and dtype is not None and dtype not in KV_CACHE_DTYPES:
        reason = Unsupported("dtype of queries and KV cache", f"--kv-cache-dtype {dtype}")
    return reason
