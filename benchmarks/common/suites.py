"""The command line of a folder: `python benchmarks/FOLDER SUITE ...`.

A folder is a package that lists its SUITES. Each is a module of that name. They run from anywhere,
against the sglang_pat that is installed. Some need modules of the checkout's tests/support.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pat.cli.arguments import quoted

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"


def module_of(package: ModuleType, suite: str) -> ModuleType:
    return import_module(f"{package.__name__}.{suite.replace('-', '_')}")


def said(package: ModuleType, suite: str) -> str:
    """The first sentence of a suite's docstring, without importing it."""
    path = Path(package.__path__[0], f"{suite.replace('-', '_')}.py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def main(package: ModuleType, words: Sequence[str]) -> Any:
    """Run the suite that `words` name, with the other words as its options."""
    folder = f"benchmarks/{package.__name__}"
    if words and words[0] in package.SUITES:
        sys.argv = [f"{folder} {words[0]}", *words[1:]]
        sys.path.append(str(SUPPORT))
        try:
            suite = module_of(package, words[0])
        except ModuleNotFoundError as error:
            if SUPPORT.is_dir():
                raise
            return _wrong(f"{sys.argv[0]}: no module {error.name!r}, and no folder {SUPPORT}")
        return suite.main()
    if words and words[0] not in ("-h", "--help"):
        allowed = ", ".join(package.SUITES)
        return _wrong(f"{folder}: error: {quoted(words[0])}; allowed: {allowed}")
    print(f"usage: python {folder} SUITE ...\n\n{package.__doc__}\n\nsuites, each with --help:")
    width = max(map(len, package.SUITES))
    for suite in package.SUITES:
        print(f"  {suite:{width}}  {said(package, suite)}")
    return 0 if words else 2


def _wrong(message: str) -> int:
    print(message, file=sys.stderr)
    return 2
