"""The console script `sglang-pat`: one subcommand per thing a user does outside of SGLang.

Beside the pipeline. Here and in the modules imported here are the arguments only; what a subcommand
needs to run, torch above all, is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_pat import support
from sglang_pat.cli import build, demo, doctor_command, replay


def _support(arguments: argparse.Namespace) -> int:
    print(support.markdown_table())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of `sglang-pat`. Every subcommand sets `run`, a function of its arguments."""
    parser = argparse.ArgumentParser(
        prog="sglang-pat", description="Prefix-shared decode attention for SGLang."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in (
        ("doctor", doctor_command),
        ("build", build),
        ("demo", demo),
        ("replay", replay),
    ):
        command.add_arguments(
            commands.add_parser(name, help=command.DESCRIPTION, description=command.DESCRIPTION)
        )
    matrix = commands.add_parser("support", help="print what is supported, as a Markdown table")
    matrix.set_defaults(run=_support)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    arguments = build_parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
