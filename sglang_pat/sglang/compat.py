"""Differences between the supported versions of SGLang, with one function for each difference.

Functions import SGLang when they run, because the command line imports this module and must not
import SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

# --- server arguments ---


def resolution_method(server_args_class: type) -> str:
    """Return the name of the ServerArgs method that resolves arguments (varies by version)."""
    return "resolve_once" if hasattr(server_args_class, "resolve_once") else "__post_init__"


def resolved(arguments: Any, name: str) -> Any:
    """Return the resolved value of an argument, or None if SGLang has no such argument."""
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return getattr(arguments, name, None)
    return resolution_result(arguments, name)


def unset_arguments(arguments: Any, names: Iterable[str], source: str) -> None:
    """Set arguments to None before SGLang resolves them. In 0.5.17 they are plain attributes."""
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        for name in names:
            setattr(arguments, name, None)
    else:
        declare_resolution(arguments, source, **dict.fromkeys(names))


def environment_is_set(name: str) -> bool:
    """Return True if SGLang has an environment switch of this name, and the switch is on."""
    from sglang.srt.environ import envs

    return hasattr(envs, name) and bool(getattr(envs, name).get())


def plan_stream_waits(*, has_draft_layers: bool) -> bool:
    """Return True if SGLang makes its plan stream wait for the forward stream.

    In 0.5.17 the plan stream does not wait, so pat would overwrite buffers that running graphs
    read. To find out, this function searches SGLang's source text: an import would take seconds.
    """
    worker = "multi_layer_eagle_worker_v2" if has_draft_layers else "eagle_worker_v2"
    for module in ("eagle_worker_common", worker):
        found = find_spec(f"sglang.srt.speculative.{module}")
        if found is None or found.origin is None:
            return False
        if "plan_stream.wait_stream(" not in Path(found.origin).read_text():
            return False
    return True


# --- the model runner ---


def decode_backend(model_runner: Any) -> str:
    """Return the name of the backend that decodes. In 0.5.17 only ServerArgs has the name."""
    arguments = model_runner.server_args
    if hasattr(arguments, "get_attention_backends"):
        return str(arguments.get_attention_backends()[1])
    return str(model_runner.decode_attention_backend_str)


def draft_backend(model_runner: Any) -> str | None:
    """Return the name of the backend that only the draft model uses, or None if it has none.

    In 0.5.17 only ServerArgs has the name.
    """
    name: str | None = getattr(model_runner, "draft_attention_backend", None)
    return name or resolved(model_runner.server_args, "speculative_draft_attention_backend")


def translates_slots(model_runner: Any) -> bool:
    """Return True if slots must be translated to slots of the KV pool. In 0.5.17 they never are."""
    translator = getattr(model_runner, "kv_index_translator", None)
    return translator is not None and bool(translator.is_translating)


def is_qwen_sparse(hf_config: Any) -> bool:
    """Return True if a model has Qwen's sparse attention. 0.5.17 does not support such models."""
    try:
        from sglang.srt.layers.attention.qsa.config import is_qwen_qsa
    except ImportError:
        return False
    return bool(is_qwen_qsa(hf_config))


def dp_rank(model_runner: Any, parallel: Any) -> int | None:
    """Return the data-parallel rank of this process. In 0.5.17 the model runner has it."""
    rank: int | None = model_runner.ps.dp_rank if hasattr(model_runner, "ps") else parallel.dp_rank
    return rank


def switches_roles(disaggregation: Any) -> bool:
    """Return True if a prefill server may become a decode server, which 0.5.17 does not support."""
    return bool(getattr(disaggregation, "enable_pd_role_switch", False))


# --- the batch ---


def beam_tail(batch: Any) -> Any | None:
    """Return the description of a batch's beam search rows, or None. 0.5.17 has no beam search."""
    return getattr(batch, "beam_tail", None)


def decoding_requests(batch: Any) -> Sequence[Any]:
    """Return the requests that decode in a mixed batch, if this version of SGLang lists them."""
    return getattr(batch, "decoding_reqs", None) or ()


def num_padding(forward_batch: Any) -> int:
    """Return the number of padding rows of a batch. Only batches of graph replays have padding."""
    count: int = getattr(forward_batch, "num_padding", 0)
    return count


def is_idle(forward_batch: Any) -> bool:
    """Return True if a batch has no requests and only keeps a rank of data parallelism in step.

    `forward_mode` does not always tell: in a replay it is the mode of the capture, and SGLang may
    turn an idle batch into a verify step of a hybrid model. In both cases, another field keeps the
    idle mode.
    """
    kinds = ("", "actual_", "_original_")
    modes = (getattr(forward_batch, f"{kind}forward_mode", None) for kind in kinds)
    return any(mode is not None and mode.is_idle() for mode in modes)


@cache
def kv_write_location() -> Callable[..., Any]:
    """Return a function that tells where a pool must write the new tokens of a batch.

    The function takes the batch and `swa_loc`, the slots in the pool of sliding-window layers. In
    versions after 0.5.17, its result marks the slots as physical, because pools require that.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if hasattr(KVWriteLoc, "for_batch"):
        location: Callable[..., Any] = KVWriteLoc.for_batch
        return location
    return lambda forward_batch, swa_loc=None: KVWriteLoc(forward_batch.out_cache_loc, swa_loc)


@cache
def latent_write_location() -> Callable[[Any], Any]:
    """Return a function like that of `kv_write_location()`, for a pool of latent attention.

    In 0.5.17 such a pool takes plain slots.
    """
    import inspect

    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    if "loc_info" in inspect.signature(MLATokenToKVPool.set_mla_kv_buffer).parameters:
        return kv_write_location()
    slots: Callable[[Any], Any] = attrgetter("out_cache_loc")
    return slots


# --- requests and the radix tree ---


class RequestFields(NamedTuple):
    """Readers of fields that a Req has itself in 0.5.17, and in its `kv` in later versions."""

    req_pool_idx: attrgetter[int]
    cache_protected_len: attrgetter[int]
    kv_committed_len: attrgetter[int]

    @classmethod
    def on(cls, req: Any) -> RequestFields:
        """Return the readers for requests of the installed SGLang, given any one request."""
        return _request_fields("kv." if hasattr(getattr(req, "kv", None), "req_pool_idx") else "")


@cache
def _request_fields(prefix: str) -> RequestFields:
    return RequestFields(*(attrgetter(prefix + name) for name in RequestFields._fields))


_SESSION_WRAPPERS = ("sglang.srt.session.streaming_session.StreamingSession",)
FULL_COMPONENTS = tuple(
    f"sglang.srt.mem_cache.unified_cache.components.{module}.FullComponent"
    for module in ("full_component", "full")  # 0.5.17, 0.5.23
)


def qualified_name(value: object) -> str:
    """Return the name of an object's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def unwrapped(tree: Any) -> Any:
    """Return the prefix cache without the wrapper that 0.5.17 adds for streaming sessions."""
    return tree.inner if qualified_name(tree) in _SESSION_WRAPPERS else tree


def path_access(core: Any) -> str | None:
    """Return how the core of a UnifiedRadixCache shows the path to a node.

    "paths": the core returns whole paths (0.5.22, 0.5.23). "climbs": a Rust core returns one node
    at a time (0.5.21). "objects": ids resolve to Python nodes (0.5.17). None: the core shows no
    paths, like the earliest Rust cores.
    """
    if hasattr(core, "collect_path_info"):
        return "paths"
    if not hasattr(core, "_binding"):
        return "objects"
    tells = hasattr(core, "validate_buffer_backup")
    return "climbs" if tells and hasattr(core._binding, "get_node_key_lengths") else None


def rust_binding(core: Any) -> Any | None:
    """Return the Python binding of a Rust core, or None if the core is in Python."""
    return getattr(core, "_binding", None)


def node_splitter(cache: Any, method: str) -> Any | None:
    """Return the object whose Python method splits nodes: the cache, its core, or None (Rust)."""
    owners = (cache, getattr(cache, "tree_core", None))
    return next((each for each in owners if callable(getattr(each, method, None))), None)
