"""Finds model classes in SGLang's source text, because to import them takes half a minute."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_pat.messages import quoted

# Environment variables of SGLang. The first lists model modules that SGLang must not import. The
# second names a package that has more models.
VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"
_MORE_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def modules_without(classes: Iterable[str]) -> list[str]:
    """Return the model modules that define none of `classes`, or [] if all modules define none.

    To find a class, SGLang imports all its model modules. These imports take most of the time that
    it needs to build a model.
    """
    wanted = re.compile("|".join(rf"\bclass {re.escape(name)}\b" for name in classes) or "$^")
    found: dict[bool, list[str]] = {True: [], False: []}
    for path in _files("sglang", "srt/models/[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        found[wanted.search(text) is not None].append(path.stem)
    return found[False] if found[True] else []


def check_known(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if neither the installed SGLang nor transformers has the class `name`.

    Without SGLang, nothing is checked.
    """
    if config.get("auto_map") or os.environ.get(_MORE_MODELS):
        return  # the class may come with the model, or from the package that the variable names
    word = re.compile(rf"\b{re.escape(name)}\b")
    files = [*_files("sglang", "srt/models/*.py"), *_files("sglang", "srt/configs/*.py")]
    if not files:
        return
    files += _files("transformers", "models/auto/modeling_auto.py")
    if not any(word.search(path.read_text(encoding="utf-8")) for path in files):
        raise ValueError(
            f"neither the installed SGLang nor transformers has the model class {quoted(name)}"
        )


def _files(package: str, pattern: str) -> Iterator[Path]:
    spec = find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(location).glob(pattern))
