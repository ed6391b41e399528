"""Puts a mixin over the class of an object of SGLang's, so that it stays what it is otherwise."""

from __future__ import annotations

from typing import Any


def with_mixin(mixin: type, kind: type) -> type:
    """The class `kind` with the methods of a mixin before its own."""
    return type(f"Pat{kind.__name__}", (mixin, kind), {})


def can_become(instance: Any, kind: type) -> bool:
    """Whether Python lets the object change to a subclass of its class."""
    before = type(instance)
    try:
        instance.__class__ = kind
    except TypeError:  # the layouts of the objects differ
        return False
    instance.__class__ = before
    return True
