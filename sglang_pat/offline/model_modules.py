"""Modules of SGLang's models that a class does not need, from the text of its source.

SGLang imports all of its models to find one, which takes most of the time until it is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

# SGLang's own variable: names of modules that it does not import.
VARIABLE = "SGLANG_DISABLED_MODEL_ARCHS"


def modules_without(classes: Iterable[str]) -> list[str]:
    """Return the modules that define none of these classes. Empty: it is not known."""
    spec = find_spec("sglang")
    wanted = re.compile("|".join(rf"\bclass {re.escape(name)}\b" for name in classes) or "$^")
    found: dict[bool, list[str]] = {True: [], False: []}
    for location in (spec and spec.submodule_search_locations) or ():
        for path in sorted((Path(location) / "srt/models").iterdir()):
            if path.suffix == ".py" and not path.name.startswith("_"):
                text = path.read_text(encoding="utf-8")
                found[wanted.search(text) is not None].append(path.stem)
    return found[False] if found[True] else []
