"""Finds the classes of SGLang's models in its source, because an import takes half a minute."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_pat.messages import quoted

# SGLang's own environment variables: modules that it must not import, and a package of more models.
VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
_MORE_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def modules_without(classes: Iterable[str]) -> list[str]:
    """Return the modules that define none of these classes, or [] if no module defines one.

    SGLang imports all its model modules to find a class, which takes most of the time that it needs
    to build the model.
    """
    wanted = re.compile("|".join(rf"\bclass {re.escape(name)}\b" for name in classes) or "$^")
    found: dict[bool, list[str]] = {True: [], False: []}
    for path in _files("sglang", "srt/models/[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        found[wanted.search(text) is not None].append(path.stem)
    return found[False] if found[True] else []


def check_known(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if SGLang is installed and neither it nor transformers has this class."""
    if config.get("auto_map") or os.environ.get(_MORE_MODELS):
        return  # the class may be part of the model or of that package
    word = re.compile(rf"\b{re.escape(name)}\b")
    files = [*_files("sglang", "srt/models/*.py"), *_files("sglang", "srt/configs/*.py")]
    if not files:
        return
    files += _files("transformers", "models/auto/modeling_auto.py")
    if not any(word.search(path.read_text(encoding="utf-8")) for path in files):
        raise ValueError(
            f"{quoted(name)} is a class of models that neither SGLang nor transformers here has"
        )


def _files(package: str, pattern: str) -> Iterator[Path]:
    spec = find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(location).glob(pattern))
