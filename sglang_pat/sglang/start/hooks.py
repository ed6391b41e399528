"""Puts functions of pat on methods of SGLang, through SGLang's own registry of hooks."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat import support


class Hook(NamedTuple):
    """A function to be put on a method of SGLang's.

    owner: `module:Class` instead of dots. SGLang applies each target string once, so that a hook
    which another plug-in put on the same method when it was loaded would keep ours, which come
    later, from being applied.
    """

    owner: str
    method: str
    function: Callable[..., Any]
    kind: HookType


def install_hooks(hooks: Sequence[Hook]) -> None:
    """Install hooks in this process, once. RuntimeError if one does not take hold."""
    for owner, method, hook, kind in hooks:
        if not _is_hooked(owner, method, hook):
            HookRegistry.register(f"{owner}.{method}", hook, kind)
    HookRegistry.apply_hooks()
    check_hooks(hooks)


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raise RuntimeError, naming it, if a hook is not in place. SGLang itself only logs that."""
    for owner, method, hook, _ in hooks:
        if not _is_hooked(owner, method, hook):
            raise RuntimeError(
                f"pat could not hook {owner}.{method}; supported versions of SGLang: "
                f"{', '.join(support.SGLANG_VERSIONS)}"
            )


def _is_hooked(owner: str, method: str, hook: Callable[..., Any]) -> bool:
    """Return True if `hook` is in the chain of wrappers around the method."""
    try:
        function = inspect.getattr_static(pkgutil.resolve_name(owner), method)
    except (AttributeError, ImportError):
        return False
    function = getattr(function, "__func__", function)  # of a class method
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
