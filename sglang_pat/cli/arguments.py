"""The argument parser of all commands and benchmarks, and argparse types for numbers and inputs.

The argparse types for output files are in `output_file.py`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from sglang_pat.messages import one_line, quoted

FLAGS = "--server-args"  # the option whose value is a text with flags of SGLang's server
LARGEST_SEED = (1 << 32) - 1
_OF_SGLANG = {  # other names of SGLang's options -> ours
    "--model-path": "--model",
    "--tp-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "--max-total-tokens": "--kv-tokens",
}
_words: list[str] = []  # words of the last parsed command line


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the wrong value and what is allowed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {bounded(message)}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        _words[:] = words
        if FLAGS in words[:-1]:  # else argparse would take a value like `--flag` for an option
            place = words.index(FLAGS)
            words[place : place + 2] = [f"{FLAGS}={words[place + 1]}"]
        words = [*map(self._in_our_words, words)]
        given = Counter(word.partition("=")[0] for word in words)
        for action in self._actions:  # without this, the last value would win silently
            names = action.option_strings
            if type(action) is argparse._StoreAction and sum(given[name] for name in names) > 1:
                self.error(f"argument {'/'.join(names)}: given twice; allowed: once")
        if self._subparsers is None:  # argparse would first name an option that is missing
            options = (word.partition("=")[0] for word in words if word.startswith("--"))
            for name in takewhile("--".__ne__, options):
                if name not in self._option_string_actions:
                    self._refuse(name)
        namespace, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return namespace, unknown

    def _in_our_words(self, word: str) -> str:
        """Return the word with our name of an option in place of another of SGLang's names."""
        name, equals, value = word.partition("=")
        ours = _OF_SGLANG.get(name)
        known = self._option_string_actions
        return f"{ours}{equals}{value}" if ours in known and name not in known else word

    def _refuse(self, word: str) -> NoReturn:
        options = [action.option_strings for action in self._actions if action.option_strings]
        allowed = ", ".join(max(names, key=len) for names in options)
        self.error(f"unknown argument {quoted(word)}; allowed: {allowed}")


def bounded(error: object) -> str:
    """Return the message of `error` on one line. Shorten long words of the command line in it."""
    return one_line(str(error), _words)


def fail(command: str, error: object, status: int = 2) -> int:
    """Print one line that says why a command fails, and return its exit status.

    command: the command's name, or "" if the error does not belong to a single command.
    """
    name = f"sglang-pat {command}: error" if command else "sglang-pat"
    try:
        print(f"{name}: {bounded(error)}", file=sys.stderr, flush=True)
    except OSError:  # stderr is full; Python's flush at exit would change the exit status
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return status


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{quoted(text)}; allowed: a whole number from {least:,} to {most:,}"
            )
        return value

    return parse


def real_number(least: float, most: float, *, or_inf: bool = False) -> Callable[[str], float]:
    """Return the argparse type of a number from `least` to `most`. or_inf: infinity is allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most or (or_inf and text == "inf")):
            raise argparse.ArgumentTypeError(
                f"{quoted(text)}; allowed: a number from {least:,.15g} to {most:,.15g}"
                + (", or inf" if or_inf else "")
            )
        return value

    return parse


def input_file(text: str) -> Path:
    """Return the path of an existing file. This is an argparse type."""
    if not os.path.isfile(text):  # Path.is_file() would raise if the name is too long
        raise argparse.ArgumentTypeError(f"{quoted(text)}: there is no such file")
    return Path(text)


def folder_path(text: str) -> Path:
    """Return the path of a folder, which need not exist yet. This is an argparse type."""
    if not text or (os.path.exists(text) and not os.path.isdir(text)):
        raise argparse.ArgumentTypeError(f"{quoted(text)}; allowed: the path of a folder")
    return Path(text)
