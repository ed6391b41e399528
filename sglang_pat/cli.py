"""The console script `sglang-pat`: one subcommand per thing a user does outside of SGLang.

Beside the pipeline. What only one subcommand needs is imported when that one runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_pat import demo, kernel_loader, support
from sglang_pat.replay import command as replay


def _support(arguments: argparse.Namespace) -> int:
    print(support.markdown_table())
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of `sglang-pat`. Every subcommand sets `run`, a function of its arguments."""
    parser = argparse.ArgumentParser(
        prog="sglang-pat", description="Prefix-shared decode attention for SGLang."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    demo.add_arguments(
        commands.add_parser("demo", help=demo.DESCRIPTION, description=demo.DESCRIPTION)
    )
    compile_now = "compile the CUDA kernels now instead of on first use"
    kernel_loader.add_arguments(
        commands.add_parser("build", help=compile_now, description=compile_now)
    )
    replay.add_arguments(
        commands.add_parser("replay", help=replay.DESCRIPTION, description=replay.DESCRIPTION)
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
