"""All differences between the versions of SGLang that pat supports, one per function.

No other module of the adapter tests which features SGLang has. SGLang is imported inside functions,
because the command line imports this module.
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
    """Set arguments to None before they are resolved. 0.5.17 takes plain assignments."""
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        for name in names:
            setattr(arguments, name, None)
    else:
        declare_resolution(arguments, source, **dict.fromkeys(names))


def environment_is_set(name: str) -> bool:
    """Return True if a switch of SGLang's environment is on. Some versions lack some switches."""
    from sglang.srt.environ import envs

    return hasattr(envs, name) and bool(getattr(envs, name).get())


def plan_stream_waits(*, has_draft_layers: bool) -> bool:
    """Return True if SGLang's plan stream waits for the forward stream before each use.

    In 0.5.17 it does not, and pat would write to buffers of graphs that are running. This searches
    the source text of the modules, because importing them would take seconds.
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
    """Return the name of the backend that decodes. 0.5.17 has it only in ServerArgs."""
    arguments = model_runner.server_args
    if hasattr(arguments, "get_attention_backends"):
        return str(arguments.get_attention_backends()[1])
    return str(model_runner.decode_attention_backend_str)


def draft_backend(model_runner: Any) -> str | None:
    """Return the name of a draft model's own backend. 0.5.17 has it only in ServerArgs."""
    name: str | None = getattr(model_runner, "draft_attention_backend", None)
    return name or resolved(model_runner.server_args, "speculative_draft_attention_backend")


def translates_slots(model_runner: Any) -> bool:
    """Return True if slots of the KV pool are virtual. In 0.5.17 they never are."""
    translator = getattr(model_runner, "kv_index_translator", None)
    return translator is not None and bool(translator.is_translating)


def is_qwen_sparse(hf_config: Any) -> bool:
    """Return True for Qwen's sparse attention. 0.5.17 does not have such models."""
    try:
        from sglang.srt.layers.attention.qsa.config import is_qwen_qsa
    except ImportError:
        return False
    return bool(is_qwen_qsa(hf_config))


def dp_rank(model_runner: Any, parallel: Any) -> int | None:
    """Return the data-parallel rank of this process. 0.5.17 keeps it on the model runner."""
    rank: int | None = model_runner.ps.dp_rank if hasattr(model_runner, "ps") else parallel.dp_rank
    return rank


def switches_roles(disaggregation: Any) -> bool:
    """Return True if a prefill server may become a decode server. In 0.5.17 it may not."""
    return bool(getattr(disaggregation, "enable_pd_role_switch", False))


# --- the batch ---


def beam_tail(batch: Any) -> Any | None:
    """Return the rows of beam searches in a batch. 0.5.17 has none."""
    return getattr(batch, "beam_tail", None)


def decoding_requests(batch: Any) -> Sequence[Any]:
    """Return the requests that decode in a mixed batch. Some versions have no such field."""
    return getattr(batch, "decoding_reqs", None) or ()


def num_padding(forward_batch: Any) -> int:
    """Return the number of padding rows of a graph. Only a replay's batch has the field."""
    count: int = getattr(forward_batch, "num_padding", 0)
    return count


def is_idle(forward_batch: Any) -> bool:
    """Return True if a batch has no requests and only keeps a rank of data parallelism in step.

    The batch of a replay has the mode of the capture. SGLang may turn a padding batch into a verify
    step of a hybrid model. Both batches keep their own mode in another field.
    """
    kinds = ("", "actual_", "_original_")
    modes = (getattr(forward_batch, f"{kind}forward_mode", None) for kind in kinds)
    return any(mode is not None and mode.is_idle() for mode in modes)


@cache
def kv_write_location() -> Callable[..., Any]:
    """Return a function that returns where a pool writes the new tokens of a batch.

    The function takes the batch and `swa_loc`, the slots in the pool of sliding-window layers.
    After 0.5.17, the pool requires slots that are marked as physical, and the function marks them.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if hasattr(KVWriteLoc, "for_batch"):
        location: Callable[..., Any] = KVWriteLoc.for_batch
        return location
    return lambda forward_batch, swa_loc=None: KVWriteLoc(forward_batch.out_cache_loc, swa_loc)


@cache
def latent_write_location() -> Callable[[Any], Any]:
    """Return the function of `kv_write_location()`, but for a pool of latent attention.

    In 0.5.17 such a pool takes the slots alone.
    """
    import inspect

    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    if "loc_info" in inspect.signature(MLATokenToKVPool.set_mla_kv_buffer).parameters:
        return kv_write_location()
    slots: Callable[[Any], Any] = attrgetter("out_cache_loc")
    return slots


# --- requests and the radix tree ---


class RequestFields(NamedTuple):
    """Readers of a Req's fields, which are on the Req in 0.5.17 and on `req.kv` later."""

    row: attrgetter[int]
    protected_len: attrgetter[int]
    committed_len: attrgetter[int]

    @classmethod
    def on(cls, req: Any) -> RequestFields:
        """Return the readers for requests like this one."""
        return _request_fields("kv." if hasattr(getattr(req, "kv", None), "req_pool_idx") else "")


@cache
def _request_fields(prefix: str) -> RequestFields:
    names = ("req_pool_idx", "cache_protected_len", "kv_committed_len")
    return RequestFields(*(attrgetter(prefix + name) for name in names))


_SESSION_WRAPPERS = ("sglang.srt.session.streaming_session.StreamingSession",)
FULL_COMPONENTS = tuple(
    f"sglang.srt.mem_cache.unified_cache.components.{module}.FullComponent"
    for module in ("full_component", "full")  # 0.5.17, 0.5.23
)


def qualified_name(value: object) -> str:
    """Return the name of an object's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def unwrapped(tree: Any) -> Any:
    """Return the prefix cache itself. 0.5.17 wraps it for streaming sessions."""
    return tree.inner if qualified_name(tree) in _SESSION_WRAPPERS else tree


def path_access(core: Any) -> str | None:
    """Return how the core of a UnifiedRadixCache shows the path to a node.

    "paths": it collects whole paths (0.5.22, 0.5.23). "climbs": a core in Rust describes one node
    at a time (0.5.21). "objects": ids resolve to Python nodes (0.5.17). None: the earliest
    Rust cores show no paths.
    """
    if hasattr(core, "collect_path_info"):
        return "paths"
    if not hasattr(core, "_binding"):
        return "objects"
    tells = hasattr(core, "validate_buffer_backup")
    return "climbs" if tells and hasattr(core._binding, "get_node_key_lengths") else None


def rust_binding(core: Any) -> Any | None:
    """Return the binding of a core in Rust. None: the core is in Python."""
    return getattr(core, "_binding", None)


def node_splitter(cache: Any, method: str) -> Any | None:
    """Return the object that splits nodes: a prefix cache or its core. None: a Rust core does."""
    owners = (cache, getattr(cache, "tree_core", None))
    return next((each for each in owners if callable(getattr(each, method, None))), None)
