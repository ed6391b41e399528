"""The console script `sglang-pat`: one subcommand per thing a user does outside of SGLang.

Only the arguments are defined when this module is imported. What a subcommand needs to run, torch
above all, is imported when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import sglang_pat
from sglang_pat import support
from sglang_pat.cli import advise, bench, build, calibrate, check, demo, doctor, replay, tiny_model
from sglang_pat.cli.arguments import Parser
from sglang_pat.output_file import STDOUT, OutputError, nothing_else_on_stdout

INTERRUPTED = 130  # exit status: 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE


def build_parser() -> argparse.ArgumentParser:
    """The parser of `sglang-pat`. Every subcommand sets `run`, a function of its arguments."""
    parser = Parser(prog="sglang-pat", description="Prefix-shared decode attention for SGLang.")
    parser.add_argument("--version", action=_PrintVersion)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in (
        ("doctor", doctor),
        ("build", build),
        ("calibrate", calibrate),
        ("demo", demo),
        ("tiny-model", tiny_model),
        ("bench", bench),
        ("advise", advise),
        ("replay", replay),
        ("check", check),
    ):
        command.add_arguments(
            commands.add_parser(name, help=command.DESCRIPTION, description=command.DESCRIPTION)
        )
    description = "print what is supported, as a Markdown table"
    matrix = commands.add_parser("support", help=description, description=description)
    matrix.set_defaults(run=_support)
    names = ", ".join(commands.choices)
    parser.set_defaults(run=lambda _: parser.error(f"give a command: {names}"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    2 for wrong input, or a file that cannot be written; 130 after Ctrl-C; 141 if nobody reads on,
    as behind `| head`.
    """
    try:
        arguments = build_parser().parse_args(argv)
        alone = STDOUT in vars(arguments).values()
        with nothing_else_on_stdout() if alone else nullcontext():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
    except OutputError as error:
        print(f"sglang-pat: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sglang-pat: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes at its end once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status


def _support(arguments: argparse.Namespace) -> int:
    print(support.markdown_table())
    return 0


class _PrintVersion(argparse.Action):
    """`--version`. argparse's own action wants the text ahead: a read of the package's metadata."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, nargs=0, default=argparse.SUPPRESS, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        print(f"sglang-pat {sglang_pat.__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
