"""Installs functions of pat as hooks on methods of SGLang, with SGLang's own hook registry."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat.support import SUPPORTED_SGLANG

AFTER, AROUND = HookType.AFTER, HookType.AROUND


class Hook(NamedTuple):
    """A function that is run after or around a method of SGLang."""

    # `module:Class.method` in sglang.srt. SGLang applies the hooks of each target string only once.
    # If another plug-in had used the same string earlier, this hook would be lost. So pat writes a
    # colon, where others write a dot.
    target: str
    function: Callable[..., Any]
    kind: HookType


def install_hooks(hooks: Sequence[Hook]) -> None:
    """Install hooks in this process, once. Raise RuntimeError if a hook has no effect."""
    for target, function, kind in hooks:
        if not _is_hooked(target, function):
            HookRegistry.register(f"sglang.srt.{target}", function, kind)
    HookRegistry.apply_hooks()
    check_hooks(hooks)


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raise RuntimeError if a hook is not in place. SGLang itself would only log an error."""
    for target, function, _ in hooks:
        if not _is_hooked(target, function):
            raise RuntimeError(f"pat could not hook sglang.srt.{target}; {SUPPORTED_SGLANG}")


def _is_hooked(target: str, hook: Callable[..., Any]) -> bool:
    """Return True if `hook` is in the chain of wrappers around the method."""
    owner, _, method = target.rpartition(".")
    try:
        function = inspect.getattr_static(pkgutil.resolve_name(f"sglang.srt.{owner}"), method)
    except (AttributeError, ImportError):
        return False
    function = getattr(function, "__func__", function)  # unwraps a class method
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
