"""Finds out whether the installed SGLang has what pat needs, for `sglang-pat doctor`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeGuard

from sglang_pat import sglang as adapter
from sglang_pat.sglang.plugin import WRAPPED
from sglang_pat.support import BACKEND


class Touchpoint(NamedTuple):
    """A place where pat changes what SGLang does, or a field that pat reads.

    Attributes
    ----------
    kind
        The kind of change, as `touchpoints.txt` defines it.
    target
        `module:path` in SGLang. The path ends in `a|b` if its last name depends on the version.
    name
        The attribute, field or variable that pat sets or reads, unless the target itself names it.
    not_in
        The supported version of SGLang that lacks the target. There, pat does not need the target.
        None: no supported version lacks it.
    module
        The module of pat that makes the change, or reads the field.
    why
        What pat does there.
    """

    kind: str
    target: str
    name: str | None
    not_in: str | None
    module: str
    why: str


_TEXT = Path(adapter.__file__).with_name("touchpoints.txt").read_text()
_ROW = re.compile(r"(\w+) +([\w.]+:\s*\S+|\S+)(?: = (\w+))?(?: \(not in (\S+)\))?\n +(\S+): (.+)")


def _touchpoint(kind: str, target: str, *rest: str) -> Touchpoint:
    if ":" not in target:
        target = f"layers.attention.base_attn_backend:AttentionBackend.{target}"
    target = "".join(target.split())
    return Touchpoint(kind, f"sglang.srt.{target}", *rest)


TOUCHPOINTS = tuple(_touchpoint(*match.groups()) for match in _ROW.finditer(_TEXT))


def missing_registrations() -> list[str]:
    """Load SGLang's plug-ins. Return the places where they have not registered `pat`."""
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
    """Return the names of backends that would decode without pat even if the user chose pat.

    Call `missing_registrations()` before, so that plug-ins are loaded. pat has not wrapped these
    backends: they are SGLang's own, or come from plug-ins that SGLang has loaded after pat.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    factories = ATTENTION_BACKENDS.items()
    return sorted(name for name, f in factories if name != BACKEND and not hasattr(f, WRAPPED))


def missing_touchpoints() -> list[Touchpoint]:
    """Return the touchpoints whose targets the installed SGLang lacks.

    Parses SGLang's source instead of importing it, because some modules need a GPU, and others take
    seconds to import. Skips a touchpoint if its `not_in` is the installed version.
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
    if place.kind in ("value", "field") and place.name is not None:  # a field of the target
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
    """Yield the names that a module or a class binds, including `self.name = ...` in methods."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
