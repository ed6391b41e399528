"""Entry point of the plug-in: makes `pat` one of SGLang's attention backends.

SGLang calls `register()` in each of its processes, even if `pat` was not chosen. So `register()`
adds only a name, a hook and wrappers. The hook and the wrappers do nothing unless `pat` was chosen.
The rest of the plug-in is imported, and hooked into SGLang, when SGLang builds a backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from sglang_pat.sglang import compat
from sglang_pat.support import BACKEND

WRAPPED = "_sglang_pat_wrapped"
_BUILDS_BACKENDS = "model_executor.model_runner:ModelRunner.init_attention_backends"


def register() -> None:
    """Called by SGLang through the entry point group `sglang.srt.plugins`."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    server_args.add_attention_backend_choices([BACKEND])
    server_args.add_deterministic_attention_backend_choices([BACKEND])
    server_args.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    for name, factory in list(ATTENTION_BACKENDS.items()):
        if name != BACKEND and not hasattr(factory, WRAPPED):
            ATTENTION_BACKENDS[name] = _wrapped(name, factory)
    ATTENTION_BACKENDS[BACKEND] = create_backend
    # See `Hook.target` for the reason for the colon.
    target = f"sglang.srt.server_args:ServerArgs.{compat.resolution_method(ServerArgs)}"
    HookRegistry.register(target, around_resolution, HookType.AROUND)


def around_resolution(resolve: Callable[[Any], None], arguments: Any) -> None:
    """Hook AROUND the method of ServerArgs that resolves the arguments."""
    from sglang_pat.sglang.start import argument_rewrite
    from sglang_pat.sglang.start.hooks import AFTER, Hook, install_hooks

    argument_rewrite.around_resolution(resolve, arguments)
    # Only processes that have imported the scheduler build backends.
    if "sglang.srt.managers.scheduler" in sys.modules and argument_rewrite.is_asked_for(arguments):
        install_hooks([Hook(_BUILDS_BACKENDS, _after_backends, AFTER)])


def create_backend(model_runner: Any) -> Any:
    """Raise RuntimeError: SGLang calls this only if the argument rewrite did not replace `pat`."""
    from sglang_pat.sglang.start.argument_rewrite import not_substituted

    raise RuntimeError(
        not_substituted(f"it asks for a backend of the name {BACKEND!r}")
        + "; a program that makes ServerArgs itself must call sglang.srt.plugins.load_plugins() "
        "before"
    )


def _wrapped(name: str, factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a factory whose backend decodes with pat if the user chose pat."""

    @wraps(factory)
    def build(model_runner: Any) -> Any:
        backend = factory(model_runner)
        if not _decodes(model_runner, name):
            return backend
        from sglang_pat.sglang.attach import with_pat

        return with_pat(backend, name, model_runner)

    setattr(build, WRAPPED, True)
    return build


def _after_backends(_: None, model_runner: Any) -> None:
    """Hook AFTER ModelRunner.init_attention_backends: report a backend without a wrapped factory.

    SGLang builds one for models whose layers all have states instead of KV.
    """
    if _decodes(model_runner):
        from sglang_pat.sglang.attach import with_pat
        from sglang_pat.sglang.report.layer_report import has_reported

        if not has_reported(model_runner):
            name = type(model_runner.attn_backend).__name__
            with_pat(model_runner.attn_backend, name, model_runner)


def _decodes(model_runner: Any, name: str | None = None) -> bool:
    """Return True if the user chose pat and this backend, or any, decodes the target model."""
    from sglang_pat.sglang.start.argument_rewrite import is_asked_for

    is_asked = is_asked_for(model_runner.server_args) and not model_runner.is_draft_worker
    return is_asked and name in (None, compat.decode_backend(model_runner))
