"""Every command line bounds its numbers and paths, and refuses others in one line."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import check
import kernel
import plot
import server
from common import suites
from sglang_pat.cli import main
from sglang_pat.cli.arguments import Parser, folder_path, input_file, real_number, whole_number
from sglang_pat.output_file import output_file, output_or_stdout

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    *(f"{each.__name__} {name}" for each in (kernel, server, check, plot) for name in each.SUITES),
    *(path.name for path in (ROOT / ".ci").glob("*.py") if "parse_args(" in path.read_text()),
]
NO_NUMBERS = ["1" + 30 * "0", "-1", "nan", "1e400", "-inf", "x", "", "9" * 5000]
# Types of options without a number.
NAMES = (None, str.upper)
PATHS = (Path, output_file, output_or_stdout, input_file, folder_path)


class _Defined(Exception):
    """Raised with a script's parser when the script would parse."""


def parser_of(script: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    folder, _, suite = script.partition(" ")
    if suite:
        return suites.parser_of(importlib.import_module(folder), suite)

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Defined(parser)

    monkeypatch.setattr(sys, "argv", [script])
    entry = runpy.run_path(str(ROOT / ".ci" / script))["main"]
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(_Defined) as defined:
            entry()
    parser: argparse.ArgumentParser = defined.value.args[0]
    return parser


def commands() -> dict[str, argparse.ArgumentParser]:
    choices: Any = main.build_parser()._subparsers
    return dict(choices._group_actions[0].choices)


def with_values(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options and positional arguments with a converted value."""
    for action in parser._actions:
        if action.nargs != 0 and not isinstance(action, argparse._SubParsersAction):
            yield action


def refusal(
    parser: argparse.ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    assert len(told.err) < 300
    return told.err


def check_numbers(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> int:
    """Assert that every typed option refuses values that are no number within bounds."""
    assert isinstance(parser, Parser), "wrong input is answered by argparse, in many lines"
    checked = 0
    for action in with_values(parser):
        assert action.type not in (int, float), f"{action.dest} has no bounds"
        if action.type in (*NAMES, *PATHS) or action.choices:
            continue
        for text in NO_NUMBERS:
            word = f"{action.option_strings[-1]}={text}"
            assert action.option_strings[-1] in refusal(parser, [word], capsys)
        checked += 1
    return checked


@pytest.mark.parametrize("name", commands())
def test_every_number_of_a_command_has_bounds(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = check_numbers(commands()[name], capsys)
    least = {"build": 2, "demo": 1, "bench": 4, "advise": 12}
    assert checked >= least.get(name, 0)


@pytest.mark.parametrize("name", commands())
def test_no_second_value_wins_silently(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = commands()[name]
    for action in with_values(parser):
        kept = isinstance(action, argparse._AppendAction)
        for option in () if kept else action.option_strings:
            words = [f"{option}=1", action.option_strings[-1], "2"]
            assert f"{option}: given twice" in refusal(parser, words, capsys).replace("/", ": ")


def test_options_of_the_server_have_all_of_sglangs_names() -> None:
    words = ["--trace", "x", "--model-path", "m", "--tp-size=4", "--dp=2", "--max-total-tokens=9"]
    found = commands()["advise"].parse_args(words)
    assert (found.model, found.tp, found.dp_size, found.kv_tokens) == ("m", 4, 2, 9)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_of_a_script_has_bounds(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_numbers(parser_of(script, monkeypatch), capsys)


def test_bounds_are_told() -> None:
    assert whole_number(1, 1000)("1000") == 1000
    assert real_number(0.001, 10)("0.001") == 0.001
    assert real_number(0.001, 10, or_inf=True)("inf") == float("inf")
    for convert, text, allowed in (
        (whole_number(1, 1000), "1001", "a whole number from 1 to 1,000"),
        (whole_number(1, 1000), "0", "a whole number from 1 to 1,000"),
        (real_number(0.001, 1e6), "0.0009", "a number from 0.001 to 1,000,000"),
        (real_number(0.001, 1e6), "inf", "a number from 0.001 to 1,000,000"),
        (real_number(0.001, 10, or_inf=True), "nan", "a number from 0.001 to 10, or inf"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            convert(text)
        assert str(refused.value) == f"{text!r}; allowed: {allowed}"
