"""Entry point of the plug-in: makes `pat` one of SGLang's attention backends.

SGLang calls `register()` in each of its processes, whether or not `pat` is chosen. So it registers
a name, a hook and wrappers that do nothing unless `pat` is chosen. Everything else is imported, and
hooked into SGLang, when SGLang builds a backend.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeGuard

from sglang_pat.sglang import TOUCHPOINTS, Touchpoint, compat
from sglang_pat.support import BACKEND

_WRAPPED = "_sglang_pat_wrapped"


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
        if name != BACKEND and not hasattr(factory, _WRAPPED):
            ATTENTION_BACKENDS[name] = _with_pat(name, factory)
    ATTENTION_BACKENDS[BACKEND] = create_backend
    # With a colon, as in hooks.py.
    target = f"sglang.srt.server_args:ServerArgs.{compat.resolution_method(ServerArgs)}"
    HookRegistry.register(target, around_resolution, HookType.AROUND)


def around_resolution(resolve: Callable[[Any], None], arguments: Any) -> None:
    """AROUND the method of ServerArgs that resolves the arguments."""
    from sglang_pat.sglang.start import argument_rewrite

    argument_rewrite.around_resolution(resolve, arguments)


def create_backend(model_runner: Any) -> Any:
    """The factory of `pat`, which is called only if `pat` was not substituted."""
    from sglang_pat.sglang.start.argument_rewrite import not_substituted

    raise RuntimeError(not_substituted(f"it asks for a backend of the name {BACKEND!r}"))


def _with_pat(name: str, factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory of SGLang's, whose backend decodes by pat if that was asked for."""

    @wraps(factory)
    def build(model_runner: Any) -> Any:
        backend = factory(model_runner)
        if not _decodes(model_runner, name):
            return backend
        from sglang_pat.sglang.attach import with_pat

        return with_pat(backend, name, model_runner)

    setattr(build, _WRAPPED, True)
    return build


def _decodes(model_runner: Any, name: str) -> bool:
    """True if pat was asked for, and the backend of this name decodes the model that is served."""
    arguments = model_runner.server_args
    from sglang_pat.sglang.start.argument_rewrite import is_asked_for

    if not is_asked_for(arguments) or model_runner.is_draft_worker:
        return False
    return compat.decode_backend(model_runner) == name


def missing_registrations() -> list[str]:
    """Load SGLang's plug-ins, and name the places that do not know `pat` afterwards."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    places = {
        "the attention registry": ATTENTION_BACKENDS,
        "the choices of --attention-backend": server_args.ATTENTION_BACKEND_CHOICES,
        "the backends for deterministic inference": (
            server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
        ),
        "the backends for deterministic inference with a prefix cache": (
            server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
        ),
    }
    return [place for place, names in places.items() if BACKEND not in names]


def unwrapped_backends() -> list[str]:
    """Backends that would decode all by themselves even if pat was asked for.

    Call it after `missing_registrations()`. They are SGLang's, or of plug-ins that were loaded
    later.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    factories = ATTENTION_BACKENDS.items()
    return sorted(name for name, f in factories if name != BACKEND and not hasattr(f, _WRAPPED))


def missing_touchpoints() -> list[Touchpoint]:
    """Return the places that the installed SGLang lacks, of those that pat touches.

    SGLang's source is read, and not imported: some modules need a GPU, others take seconds. pat
    does without a place in the versions that are known to lack it.
    """
    installed = version("sglang")
    return [each for each in TOUCHPOINTS if each.not_in != installed and not _is_there(each)]


def _is_there(place: Touchpoint) -> bool:
    module, _, path = place.target.partition(":")
    *owners, names = path.split(".")
    body: list[ast.stmt] | None = _source_of(module)
    for owner in owners:
        body = next((each.body for each in body or () if _is_class(each, owner)), None)
    if body is None:
        return False
    if place.kind == "value" and place.name is not None:  # a field of the class
        body, names = next((e.body for e in body if _is_class(e, names)), []), place.name
    return names == "__class__" or not set(names.split("|")).isdisjoint(_names_in(body))


@cache
def _source_of(module: str) -> list[ast.stmt] | None:
    try:
        found = find_spec(module)
    except ImportError:
        return None
    if found is None or found.origin is None:
        return None
    return ast.parse(Path(found.origin).read_text()).body


def _is_class(statement: ast.stmt, name: str) -> TypeGuard[ast.ClassDef]:
    return isinstance(statement, ast.ClassDef) and statement.name == name


def _names_in(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module or a class binds, its methods' `self.name = ...` included."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
