"""The console script `sglang-pat`, with a subcommand for each task outside of SGLang.

The import of this module defines only the arguments. Each subcommand imports what it needs, above
all torch, when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from typing import Any, NoReturn, TextIO, cast

import sglang_pat
from sglang_pat.cli import advise, bench, build, calibrate, check, demo, doctor
from sglang_pat.cli.arguments import Parser, fail
from sglang_pat.output_file import (
    STDOUT,
    CheckedStdout,
    OutputError,
    StdoutError,
    nothing_else_on_stdout,
)

INTERRUPTED = 130  # exit status: 128 + SIGINT
BROKEN_PIPE = 141  # 128 + SIGPIPE
_OLD_NAMES = {  # old name -> new words; accepted until version 0.4
    "replay": ["advise"],
    "support": ["doctor", "--support-table"],
    "tiny-model": ["demo", "--write-model"],
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser. Every subcommand sets `run`, a function of the parsed arguments."""
    parser = Parser(prog="sglang-pat", description="Prefix-shared decode attention for SGLang.")
    parser.add_argument("--version", action=_PrintVersion)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, command in (
        ("doctor", doctor),
        ("build", build),
        ("calibrate", calibrate),
        ("demo", demo),
        ("bench", bench),
        ("advise", advise),
        ("check", check),
    ):
        command.add_arguments(
            commands.add_parser(name, help=command.DESCRIPTION, description=command.DESCRIPTION)
        )
    names = ", ".join(commands.choices)
    parser.set_defaults(run=lambda _: parser.error(f"give a command: {names}"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    The status is 2 if the input is wrong, or if a file or standard output cannot be written. It is
    130 after Ctrl-C, and 141 if standard output is a pipe that its reader has closed, as in
    `| head`.
    """
    if sys.stderr is None:  # stderr is closed: print(file=None) would write to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return fail("", "standard output is closed")
    stdout = sys.stdout
    try:
        with redirect_stdout(cast(TextIO, CheckedStdout(stdout))):
            try:
                return _run(_by_new_name(sys.argv[1:] if argv is None else argv))
            finally:  # even if argparse exits, as after --help
                sys.stdout.flush()
    except OutputError as error:
        if isinstance(error, StdoutError):
            _write_nowhere(stdout)
        return fail("", error)
    except KeyboardInterrupt:
        return fail("", "interrupted", INTERRUPTED)
    except BrokenPipeError:
        _write_nowhere(stdout)
        return BROKEN_PIPE


def _run(words: Sequence[str]) -> int:
    arguments = build_parser().parse_args(words)
    alone = STDOUT in vars(arguments).values()
    with nothing_else_on_stdout() if alone else nullcontext():
        status: int = arguments.run(arguments)
    return status


def _by_new_name(words: Sequence[str]) -> list[str]:
    """Return the words of the command line. If the first is an old name, replace it."""
    if not words or words[0] not in _OLD_NAMES:
        return list(words)
    new = _OLD_NAMES[words[0]]
    print(f"sglang-pat: {words[0]} is now `sglang-pat {' '.join(new)}`", file=sys.stderr)
    return [*new, *words[1:]]


def _write_nowhere(stdout: TextIO) -> None:
    """Redirect standard output to /dev/null, so that Python's flush at exit does not fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())


class _PrintVersion(argparse.Action):
    """`--version`. argparse's own action would make every command look up the version."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, nargs=0, default=argparse.SUPPRESS, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        print(f"sglang-pat {sglang_pat.__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
