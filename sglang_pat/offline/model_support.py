"""Finds the layers of a model that pat would decode. Needs no weights, no GPU and no server.

It builds the model as the server's rank 0 would, but on torch's meta device. Two things are known
only in a running server: the KV pool, and the arguments that the model passes to its attention
layers in its first step.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat.model_config import has_float8_cache
from sglang_pat.sglang import compat
from sglang_pat.sglang.start.layer_rules import (
    dtypes_reason,
    is_converted,
    kernels_reason,
    latent_reason,
    layer_window_reason,
    layers_of_model,
    model_reason,
    note_windows,
    shape_of,
    shape_reason,
    window_reason,
)
from sglang_pat.sglang.start.layer_support import PAT, LayerSupport
from sglang_pat.sglang.start.server_options import attention_backends, early_reason
from sglang_pat.support import BACKEND, DEFAULT_BACKENDS, Unsupported

# Value of --kv-cache-dtype -> the dtype. All other values stand for the dtype of queries.
_KV_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_CAPABILITY = (9, 0)  # an H100's, which is assumed if there is no GPU


def layers_of_config(path: str, flags: Sequence[str] = ()) -> LayerSupport:
    """Return a server's layer support on this machine's GPU, or on an H100 if there is no GPU.

    A process can build only one model.

    Parameters
    ----------
    path
        A folder, or a name from which SGLang can load a configuration.
    flags
        The server's flags as words, for example "--tp", "8". If they ask for several pipeline
        stages, the result still has the layers of all stages.

    Raises
    ------
    ValueError
        SGLang refuses the flags, or the heads cannot be divided among the ranks.
    Exception
        Whatever SGLang raises for a model that it cannot build in this process.
    """
    return build_model(path, flags)[1]


def build_model(path: str, flags: Sequence[str] = ()) -> tuple[torch.nn.Module, LayerSupport]:
    """Return the model on torch's meta device, and its layer support. See `layers_of_config`."""
    with without_gpu():
        return _build(path, flags)[:2]


def layer_table(support: LayerSupport) -> Iterator[tuple[str, str, str]]:
    """Yield (layers, route, reason) for each run of layers with the same route and reason."""
    reasons = dict.fromkeys(support.shapes, "")
    reasons |= {layer_id: str(reason) for layer_id, reason in support.fallback.items()}
    # Within a run of consecutive ids, the difference between the id and its place is constant.
    ordered = enumerate(sorted(reasons))
    for (_, reason), run in groupby(ordered, lambda pair: (pair[1] - pair[0], reasons[pair[1]])):
        ids = [layer_id for _, layer_id in run]
        first, last = ids[0], ids[-1]
        layers = str(first) if first == last else f"{first}-{last}"
        yield layers, support.default if reason else PAT, reason


class KernelNeeds(NamedTuple):
    """The properties for which a server's kernels are compiled. Dtypes have their names in torch.

    Attributes
    ----------
    dtype
        The dtype of queries.
    kv_dtypes
        The dtypes that the KV cache may have. None stands for the dtype of queries. If the
        checkpoint asks for an fp8 cache, there are two: only some versions of SGLang obey.
    head_dims
        (head_dim, v_head_dim) of the layers that pat decodes.
    """

    dtype: str
    kv_dtypes: tuple[str | None, ...]
    head_dims: tuple[tuple[int, int], ...]


def kernels_of_model(path: str, flags: Sequence[str] = ()) -> tuple[KernelNeeds, LayerSupport]:
    """Return the kernels that a server needs, and its layer support. See `layers_of_config`."""
    with without_gpu():
        _, layer_support, runner, config = _build(path, flags)
    shapes = {(shape.head_dim, shape.v_head_dim) for shape in layer_support.shapes.values()}
    dtype, *names = (
        str(each).removeprefix("torch.")
        for each in (runner.dtype, *_kv_dtypes(runner.server_args, config))
    )
    kv_dtypes = tuple(None if name == dtype else name for name in names)
    return KernelNeeds(dtype, kv_dtypes, tuple(sorted(shapes))), layer_support


def _kv_dtypes(arguments: Any, config: Any) -> list[torch.dtype]:
    """Return the dtypes that the KV cache may have, that of the newest SGLang last."""
    name = compat.resolved(arguments, "kv_cache_dtype")
    if name == "auto" and has_float8_cache(config.hf_config.to_dict()):
        return [config.dtype, _KV_DTYPES["fp8_e4m3"]]
    return [_KV_DTYPES.get(name, config.dtype)]


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Allow SGLang's models to be imported and built without a GPU, in this context.

    Some models need a CUDA stream or event, the compute capability, or CPU kernels that this build
    of sgl_kernel lacks. The context replaces all of these. If there is a GPU, it replaces nothing.
    """
    if torch.cuda.is_available():
        yield
        return

    class Kernels(torch._ops._OpNamespace):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if not name.endswith("_cpu"):
                    raise
                return object()

    replaced = (
        (torch.ops, "sgl_kernel", Kernels("sgl_kernel")),
        (torch.cuda, "Stream", lambda *_, **__: None),
        (torch.cuda, "Event", lambda *_, **__: None),
        (torch.cuda, "current_device", lambda: torch.device("meta")),
        (torch.cuda, "get_device_capability", lambda *_: _CAPABILITY),
        (torch, "linspace", partial(torch.linspace, device="cpu")),  # InternVL reads its numbers
    )
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)


def _build(path: str, flags: Sequence[str]) -> tuple[torch.nn.Module, LayerSupport, Any, Any]:
    """Return the model, its layer support, a stand-in for its runner, and SGLang's ModelConfig."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner_components.load_model_utils import (
        resolve_sliding_window_size,
    )
    from sglang.srt.plugins import load_plugins

    load_plugins()
    arguments = _server_arguments(path, flags)
    config = ModelConfig.from_server_args(arguments)
    prefill, default = map(_on_gpu, attention_backends(arguments))
    whole = early_reason(arguments) or model_reason(config)
    if whole is None and default not in DEFAULT_BACKENDS:
        whole = Unsupported("default backend", default)
    _become_a_rank(arguments, config)
    model = _on_meta_device(config)
    runner = SimpleNamespace(
        server_args=arguments,
        model=model,
        dtype=config.dtype,
        kv_cache_dtype=_kv_dtypes(arguments, config)[-1],
        device="cuda",
        sliding_window_size=resolve_sliding_window_size(model, config),
        attention_chunk_size=getattr(config, "attention_chunk_size", None),
    )
    whole = whole or window_reason(model) or dtypes_reason(runner)

    def reason_of(layer: RadixAttention) -> Unsupported | None:
        one_byte = is_converted(runner)
        reason = shape_reason(layer, one_byte=one_byte, default=default)
        reason = reason or layer_window_reason(layer, runner, default)
        if reason is None and shape_of(layer).is_latent:
            reason = latent_reason(layer, runner, default)
        return reason or kernels_reason(layer, runner)

    layer_support = layers_of_model(model, default, whole, reason_of)
    layer_support.prefill = prefill
    note_windows(layer_support, runner, default)
    return model, layer_support, runner, config


def _server_arguments(path: str, flags: Sequence[str]) -> Any:
    """Return the resolved arguments of a server. ValueError for flags that SGLang refuses."""
    from sglang.srt.server_args import prepare_server_args

    words = ["--model-path", path, "--attention-backend", BACKEND, "--load-format", "dummy"]
    words += ["--skip-tokenizer-init"]
    words += ["--disable-radix-cache"]  # some kinds of radix cache need a GPU
    told, handlers = io.StringIO(), logging.root.handlers[:]
    with _platform_with_gpu() as device:
        words += [*device, *flags, "--pp-size", "1"]
        try:
            with contextlib.redirect_stderr(told):
                arguments = prepare_server_args(words)
        except SystemExit as error:  # raised by argparse
            *_, last = told.getvalue().strip().splitlines() or [str(error)]
            raise ValueError(last) from None
        finally:
            logging.root.handlers[:] = handlers
        _resolve(arguments)
    return arguments


def _become_a_rank(arguments: Any, config: Any) -> None:
    """Make this process rank 0, without other ranks, so that it can build a model."""

    def init_distributed() -> None:
        from sglang.srt.distributed import parallel_state
        from torch.testing._internal.distributed.fake_pg import FakeStore

        world_size = int(compat.resolved(arguments, "tp_size"))
        with _groups_without_others():
            torch.distributed.init_process_group(
                "fake", store=FakeStore(), rank=0, world_size=world_size
            )
            parallel_state.init_distributed_environment(
                backend="fake", world_size=world_size, rank=0, local_rank=0
            )
            sizes = _parallel_sizes(arguments)
            parallel_state.initialize_model_parallel(backend="fake", **sizes)

    _publish_only_rank(arguments, before_dp=init_distributed, config=config)


@contextlib.contextmanager
def _groups_without_others() -> Iterator[None]:
    """Allow SGLang to make groups of ranks without the other ranks, in this context."""
    from sglang.srt.distributed import parallel_state

    class Group(parallel_state.GroupCoordinator):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            talks = {name: False for name in options if name.startswith("use_")}
            super().__init__(*arguments, **options | talks)

    def new_group(ranks: Any = None, **options: Any) -> Any:
        return make_group(ranks, backend="fake")

    make_group, coordinator = torch.distributed.new_group, parallel_state.GroupCoordinator
    setattr(torch.distributed, "new_group", new_group)  # noqa: B010  # other arguments
    parallel_state.GroupCoordinator = Group
    try:
        yield
    finally:
        torch.distributed.new_group, parallel_state.GroupCoordinator = make_group, coordinator


def _on_meta_device(config: Any) -> torch.nn.Module:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.model_loader.utils import get_model_architecture, set_default_torch_dtype

    model_class, _ = get_model_architecture(config)
    if not torch.cuda.is_available():
        _forget_cpu(config)
    try:
        with set_default_torch_dtype(config.dtype), torch.device("meta"):
            model: torch.nn.Module = model_class(config=config.hf_config, quant_config=None)
    except AssertionError as error:
        # SGLang's assertion about heads has no message. Most classes divide the heads among the
        # ranks of the attention group. Classes without data-parallel attention divide them among
        # all ranks.
        attention = parallel_state.get_attn_tp_group().world_size
        ranks = (attention, parallel_state.get_tensor_model_parallel_world_size())
        why = undivided(config.num_attention_heads, config.num_key_value_heads, ranks)
        if str(error) or why is None:
            raise
        raise ValueError(why) from error
    return model


def undivided(heads: int, kv_heads: int, ranks: Sequence[int]) -> str | None:
    """Return why a model's heads cannot be divided among these numbers of ranks, or None."""
    for count in ranks:
        if heads % count:
            return f"{heads} query heads on {count} GPUs; allowed: a divisor of {heads}"
        if kv_heads and max(kv_heads, count) % min(kv_heads, count):
            allowed = f"a divisor or multiple of {kv_heads}"
            return f"{kv_heads} KV heads on {count} GPUs; allowed: {allowed}"
    return None


def _forget_cpu(config: Any) -> None:
    """Make SGLang build a model as for a GPU. For a CPU, SGLang would change heads and RoPE."""
    for part in (config.hf_config, config.hf_text_config):
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            if hasattr(part, name):
                setattr(part, f"{name}_cpu", getattr(part, name))
    with contextlib.suppress(ImportError):  # older SGLang versions lack `factory`
        from sglang.srt.layers.rotary_embedding import factory

        factory.get_rope_cpu = lambda *arguments, **named: factory.get_rope(*arguments[:8])


# --- differences between versions of SGLang ---


@contextlib.contextmanager
def _platform_with_gpu() -> Iterator[Sequence[str]]:
    """Without a GPU, make SGLang resolve its arguments as on an H100. Yield the flags for that.

    Some model classes have their own default backend for a GPU, and others refuse the backends of
    CPUs. SGLang 0.5.17 can resolve its arguments only for the machine on which it runs, so for that
    version `_on_gpu` corrects the backends later. If there is a GPU, nothing changes.
    """
    from sglang.srt import runtime_context

    if torch.cuda.is_available() or not hasattr(runtime_context, "override_platform"):
        yield ()
        return
    facts = dict.fromkeys(("is_cuda", "is_sm90", "is_hopper_with_cuda_12_3"), True)
    with runtime_context.override_platform(
        **facts, has_amx=False, device_sm=90, device_capability=_CAPABILITY
    ):
        yield ("--device", "cuda")


def _on_gpu(backend: str) -> str:
    """Return `backend`, or the H100's default if SGLang has chosen a CPU's backend.

    SGLang 0.5.17 chooses a CPU's backend if this machine has no GPU.
    """
    is_of_cpu = backend in ("torch_native", "intel_amx") and not torch.cuda.is_available()
    return "fa3" if is_of_cpu else backend


def _resolve(arguments: Any) -> None:
    """Resolve server arguments. In SGLang 0.5.17, their constructor has already done so."""
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()


def _parallel_sizes(arguments: Any) -> dict[str, int]:
    """Return arguments of initialize_model_parallel(). Only SGLang 0.5.17 needs group sizes."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "SpawnRanks"):
        return {}
    return {
        "tensor_model_parallel_size": arguments.tp_size,
        "expert_model_parallel_size": arguments.ep_size,
        "attention_data_parallel_size": arguments.dp_size if arguments.enable_dp_attention else 1,
        "attention_context_model_parallel_size": arguments.attn_cp_size,
        "moe_data_model_parallel_size": arguments.moe_dp_size,
    }


def _publish_only_rank(arguments: Any, *, before_dp: Callable[[], None], config: Any) -> None:
    """Make this process rank 0, call `before_dp()`, then set up data-parallel attention.

    SGLang 0.5.17 has no SpawnRanks, and its initialize_dp_attention() also takes `config`.
    """
    from sglang.srt import runtime_context
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    if hasattr(runtime_context, "SpawnRanks"):
        ranks = runtime_context.SpawnRanks(world_rank=0)
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        before_dp()
        initialize_dp_attention(arguments)
    else:
        runtime_context.publish(arguments, role="scheduler")
        before_dp()
        initialize_dp_attention(arguments, config)
