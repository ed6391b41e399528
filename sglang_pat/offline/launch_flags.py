"""Reads the flags of SGLang's server, and names of its attention backends, from its source.

To import SGLang and use its parser takes ten seconds or more. The source text contains all flags,
but also words that are not flags. So a flag that is not in the text is certainly wrong. Only the
server can tell whether any other flag is right.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

PLUGIN_GROUP = "sglang.srt.plugins"


def launch_flags() -> frozenset[str]:
    """Return all flags of `sglang.launch_server`, and also some words that are not flags.

    Returns an empty set if SGLang is not installed.
    """
    found = set()
    for text in _sources():
        found.update(re.findall(r"""["'](--?[a-z][\w-]*)""", text))
        fields = re.findall(r"^    (\w+)\s*:\s*A\[", text, re.MULTILINE)
        found.update(f"--{name.replace('_', '-')}" for name in fields)
    return frozenset(found)


def attention_backends() -> frozenset[str]:
    """Return SGLang's own choices of `--attention-backend`, without those that plug-ins add.

    Returns an empty set if SGLang is not installed.
    """
    for text in _sources():
        choices = re.search(r"^ATTENTION_BACKEND_CHOICES[^=\n]*= (\[.*?^\])", text, re.M | re.S)
        if choices is not None:
            return frozenset(ast.literal_eval(choices[1]))
    return frozenset()


def _sources() -> Iterator[str]:
    """Yield the text of SGLang's modules for server arguments, and of all modules of plug-ins."""
    for folder in _folders("sglang"):
        arguments = folder / "srt"
        yield from _texts(arguments / "server_args.py", *arguments.glob("arg_groups/**/*.py"))
    packages = {plugin.module.partition(".")[0] for plugin in entry_points(group=PLUGIN_GROUP)}
    for package in sorted(packages - {"sglang_pat"}):
        for folder in _folders(package):
            yield from _texts(*folder.glob("**/*.py"))


def _folders(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location)


def _texts(*paths: Path) -> Iterator[str]:
    for path in sorted(paths):
        if path.is_file():
            yield path.read_text(encoding="utf-8")
