"""Options that name a file to write: a wrong one is refused before the work."""

from __future__ import annotations

import json
import os
import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.output_file import (
    STDOUT,
    check_outputs,
    output_file,
    output_or_stdout,
    problem_with,
)


def test_a_file_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_file("result.json") == Path("result.json")
    (tmp_path / "old.json").touch()
    assert output_file(f"{tmp_path}/old.json") == tmp_path / "old.json"
    (tmp_path / "link").symlink_to("new.json")
    assert output_file("link") == Path("link")
    assert output_file("/dev/null") == Path("/dev/null")
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "link"}, "nothing is made"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "it is a folder; name a file"),
        ("no/f", "its folder {folder}/no does not exist"),
        ("file/f", "{folder}/file is not a folder"),
        ("dangling", "its folder /no/such does not exist"),
        ("x" * 300, "File name too long"),
        ("nul\0", "embedded null byte"),
    ],
)
def test_problems_are_named(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dangling").symlink_to("/no/such/f")
    found = problem_with(Path(name))
    assert found == problem.format(folder=tmp_path)
    with pytest.raises(ArgumentTypeError, match=re.escape(problem.format(folder=tmp_path))):
        output_file(name)


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    problem = problem_with(tmp_path / "a")
    assert problem is not None
    assert "loop" in problem or "symbolic links" in problem


@pytest.mark.parametrize(
    ("name", "problem"), [("old", "it is not writable"), ("new", "its folder {} is not writable")]
)
def test_permissions(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").touch()
    asked = []

    def access(path: Path, mode: int) -> bool:  # root, who runs the tests in CI, may do all
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", access)
    assert problem_with(tmp_path / name) == problem.format(tmp_path)
    expected = (tmp_path / "old", os.W_OK) if name == "old" else (tmp_path, os.W_OK | os.X_OK)
    assert asked == [expected]


# --- the files of one command ---


def test_an_input_is_never_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("a trace")
    Path("soft").symlink_to(trace)
    os.link(trace, "hard")
    for name in ("trace.jsonl", "./trace.jsonl", str(trace), "soft", "hard"):
        with pytest.raises(
            ValueError, match=f"--json {Path(name)} would overwrite the input {trace}"
        ):
            check_outputs({"--csv": None, "--json": Path(name)}, [Path("other"), trace])
    assert trace.read_text() == "a trace"


def test_two_outputs_are_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("new.json")
    for first, second in (("new.json", "./new.json"), ("new.json", "link"), ("x", "x")):
        with pytest.raises(
            ValueError, match=f"--save {Path(first)} and --json .*are the same file"
        ):
            check_outputs({"--save": Path(first), "--json": Path(second)})
    check_outputs({"--save": Path("new.json"), "--json": Path("other.json"), "--csv": None})
    check_outputs({"--save": Path("/dev/null"), "--json": Path("/dev/null")})


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--csv {tmp_path}/no/f: its folder .* does not exist"):
        check_outputs({"--csv": tmp_path / "no/f"})


@pytest.mark.parametrize(
    "words",
    [
        "advise --model qwen3-8b --generate few-shot --rate 40 --limit 20",
        "replay --generate few-shot --limit 20",
        "doctor",
    ],
)
def test_results_go_to_stdout_alone(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    _, out, err = cli(*words.split(), "--json", "-")
    assert isinstance(json.loads(out), dict)
    assert len(err.splitlines()) > 4  # what is on stdout else
    assert [*tmp_path.iterdir()] == []


def test_other_files_than_results_are_no_stdout(cli: Any) -> None:
    assert output_or_stdout("-") == STDOUT
    check_outputs({"--json": STDOUT})
    for words in ("replay --html", "replay --csv", "replay --save", "demo --json"):
        told = cli(*words.split(), "-")
        assert "'-': it does not write to stdout; name a file" in told.err
