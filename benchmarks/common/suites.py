"""The command line of a folder: `python benchmarks/FOLDER SUITE ...`.

A folder is a package with a list SUITES. Each suite is a module with two functions:
`add_options(parser)`, and `run(args)`, which returns the exit status. Suites run from any folder,
with the installed sglang_pat. Some need modules of the checkout's tests/support.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pat.bench.stand_ins import refuse_stand_ins
from sglang_pat.cli.arguments import LARGEST_SEED, Parser, quoted, real_number, whole_number
from sglang_pat.output_file import output_file

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
# Options that several suites have.
_OPTIONS: dict[str, dict[str, Any]] = {
    "--backends": {"nargs": "+", "metavar": "NAME", "help": "of SGLang, by name: %(default)s"},
    "--json": {"type": output_file, "metavar": "FILE", "help": "write all numbers to FILE"},
    "--rounds": {"type": whole_number(1, 1000), "metavar": "N", "help": "default: %(default)s"},
    "--seconds": {
        "type": real_number(1, 1e6, or_inf=True),
        "default": 3600,
        "metavar": "N",
        "help": "begin nothing after so many (default: %(default)s)",
    },
    "--seed": {"type": whole_number(0, LARGEST_SEED), "default": 0, "metavar": "N"},
    "--start-seconds": {
        "type": real_number(1, 1e6),
        "metavar": "N",
        "help": "for servers to be ready (default: %(default)s)",
    },
}


class Refused(ValueError):
    """Options exclude one another, or are not possible on this machine."""


def add_option(parser: argparse.ArgumentParser, name: str, **changes: Any) -> None:
    """Add an option that several suites have. changes: arguments of add_argument."""
    parser.add_argument(name, **_OPTIONS[name] | changes)


def module_of(package: ModuleType, suite: str) -> ModuleType:
    return import_module(f"{package.__name__}.{suite.replace('-', '_')}")


def parser_of(package: ModuleType, suite: str) -> Parser:
    """Return the parser of a suite's options."""
    module = module_of(package, suite)
    parser = Parser(
        prog=f"benchmarks/{package.__name__} {suite}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_options(parser)
    return parser


def said(package: ModuleType, suite: str) -> str:
    """Return the first sentence of a suite's docstring, without importing the suite."""
    path = Path(package.__path__[0], f"{suite.replace('-', '_')}.py")
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def main(package: ModuleType, words: Sequence[str]) -> Any:
    """Run the suite named by the first word, with the other words as its options."""
    folder = f"benchmarks/{package.__name__}"
    if words and words[0] in package.SUITES:
        suite = words[0]
        sys.argv = [f"{folder} {suite}", *words[1:]]  # the command, for the metadata
        if str(SUPPORT) not in sys.path:
            sys.path.append(str(SUPPORT))
        try:
            parser = parser_of(package, suite)
        except ModuleNotFoundError as error:
            if SUPPORT.is_dir():
                raise
            return _wrong(f"{folder} {suite}: no module {error.name!r}, and no folder {SUPPORT}")
        args = parser.parse_args(words[1:])
        try:
            refuse_stand_ins()
        except ValueError as error:
            parser.error(str(error))
        try:
            return module_of(package, suite).run(args)
        except Refused as error:
            parser.error(str(error))
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
