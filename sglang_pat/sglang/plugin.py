"""Entry point of the plug-in: makes `pat` one of SGLang's attention backends.

SGLang calls `register()` in each of its processes, whether or not `pat` is chosen. So it registers
a name, and one hook that does nothing unless `pat` is chosen. Everything else is imported, and
hooked into SGLang, when SGLang builds the backend.
"""

from __future__ import annotations

from typing import Any

from sglang_pat.support import BACKEND


def register() -> None:
    """Called by SGLang through the entry point group `sglang.srt.plugins`."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(create_backend)
    method = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"  # 0.5.17
    target = f"sglang.srt.server_args:ServerArgs.{method}"  # with a colon, as in hooks.py
    HookRegistry.register(target, check_variables, HookType.BEFORE)


def check_variables(arguments: Any, *rest: object, **named: object) -> None:
    """Before SGLang resolves its arguments: refuse a wrong variable before the model is loaded.

    ValueError names the variable. Nothing is read if another backend decodes.
    """
    from sglang_pat.sglang.env import Environment

    if BACKEND in (arguments.attention_backend, arguments.decode_attention_backend):
        Environment.read()


def create_backend(model_runner: Any) -> Any:
    """Called by SGLang in the scheduler process, if `pat` was chosen."""
    from sglang_pat.sglang.backend import create_pat_backend

    return create_pat_backend(model_runner)


def missing_registrations() -> list[str]:
    """Load SGLang's plug-ins, and name the places that do not know `pat` afterwards."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    places = {
        "the attention registry": ATTENTION_BACKENDS,
        "the choices of --attention-backend": ATTENTION_BACKEND_CHOICES,
    }
    return [place for place, names in places.items() if BACKEND not in names]
