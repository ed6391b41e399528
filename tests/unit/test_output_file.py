"""Output of commands: files, a failing standard output, full disks, quoted input."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.cli import tiny_model
from sglang_pat.cli.main import build_parser
from sglang_pat.output_file import (
    STDOUT,
    OutputError,
    check_outputs,
    output_file,
    output_or_stdout,
    problem_with,
    written,
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

    def access(path: Path, mode: int) -> bool:  # root, who runs the tests in CI, may write anywhere
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
    assert len(err.splitlines()) > 4  # the text that goes to stdout without the option
    assert [*tmp_path.iterdir()] == []


def test_other_files_than_results_are_no_stdout(cli: Any) -> None:
    assert output_or_stdout("-") == STDOUT
    check_outputs({"--json": STDOUT})
    for words in ("replay --html", "replay --csv", "replay --save", "demo --json"):
        told = cli(*words.split(), "-")
        assert "'-': it does not write to stdout; name a file" in told.err


TRACE = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"
PRINTS = (
    *("--version", "--help", "doctor --support-table", "advise --help"),
    *("advise --generate toolagent --limit 5", "demo --write-model {tmp}/model"),
)


def run(words: str, redirect: str, tmp_path: Path, **environment: str) -> Any:
    words = words.format(tmp=tmp_path)
    command = f"{sys.executable} -m sglang_pat {words} {redirect}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={"PATH": "/bin", **environment}
    )


@pytest.mark.parametrize("words", PRINTS)
@pytest.mark.parametrize("redirect", ["> /dev/full", ">&-"])
def test_a_standard_output_that_cannot_be_written_is_told(
    words: str, redirect: str, tmp_path: Path
) -> None:
    for unbuffered in ("", "1") if "full" in redirect else ("",):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        done = run(words, redirect, tmp_path, PYTHONUNBUFFERED=unbuffered)
        assert done.returncode == 2, done
        assert done.stderr.startswith("sglang-pat: standard output")
        assert done.stderr.count("\n") == 1


def test_a_path_that_the_encoding_of_the_output_lacks_is_told(tmp_path: Path) -> None:
    path = tmp_path / "журнал.jsonl"
    path.write_bytes(TRACE.read_bytes())
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for words in (f"advise --limit 5 --trace {path}", f"demo --write-model {tmp_path}/модель"):
        done = run(words, "", tmp_path, **ascii_only)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        assert "the encoding ascii" in done.stderr


def test_stderr_that_is_closed_or_full_changes_nothing(tmp_path: Path) -> None:
    assert run("doctor --support-table", "2>&-", tmp_path).returncode == 0
    for redirect in ("2>&-", "2>/dev/full"):
        done = run("advise --trace /no/file", redirect, tmp_path)
        assert (done.returncode, done.stdout) == (2, "")


# --- files ---


def half_write(path: Path) -> None:
    with written("--csv", path) as draft:
        assert draft.suffix == ".gz"
        draft.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_draft_replaces_the_file_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "result.json.gz"
    for before in (None, "before"):
        if before is not None:
            path.write_text(before)
            path.chmod(0o640)
        with pytest.raises(OutputError, match=r"--csv .*result\.json\.gz: No space left"):
            half_write(path)
        assert [each.name for each in tmp_path.iterdir()] == ([path.name] if before else [])
        assert before is None or path.read_text() == before
    with written("--csv", path) as draft:
        draft.write_text("all")
    assert path.read_text() == "all"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("option", ["save", "csv", "html", "json"])
def test_a_full_disk_leaves_no_file_and_is_told_with_the_path(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sglang_pat.workload.mooncake.write_mooncake", fail)
    monkeypatch.setattr("sglang_pat.workload.html.write_report", fail)
    monkeypatch.setattr("sglang_pat.workload.record.Recorder.write_csv", fail)
    monkeypatch.setattr(Path, "write_text", fail)
    path = tmp_path / "out"
    told = cli("advise", "--generate", "toolagent", "--limit", 5, f"--{option}", path)
    assert told.status == 2
    assert told.err == f"sglang-pat: --{option} {path}: No space left on device\n"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("was_there", [True, False])
def test_a_model_on_a_full_disk_can_be_written_again(
    was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    folder, copied = tmp_path / "model", []

    def copy(source: Path, target: Path) -> None:
        copied.append(target)
        target.write_bytes(b"half")
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    if was_there:
        folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_model.shutil, "copyfile", copy)
        cli("demo", "--write-model", folder).check_refusal("No space left on device")
    assert folder.exists() == was_there
    assert cli("demo", "--write-model", folder).status == 0
    assert json.loads((folder / "config.json").read_text())


# --- input in messages ---

LONG = "private words, " * 400


@pytest.mark.parametrize("command", build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
def test_no_value_of_an_option_is_repeated_at_length(command: str, cli: Any) -> None:
    parser = build_parser()._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr, index]
    options = [each.option_strings[-1] for each in parser._actions if each.nargs is None]
    for words in ([LONG], [f"--{LONG}"], *([f"{each}={LONG}"] for each in options if each)):
        told = cli(command, *words)
        if told.status == 0:  # some commands accept a folder of any name
            continue
        assert told.err.count("private words") <= 200 / len("private words, ")
        assert told.err.count("\n") == 1, told.err


# --- one process per output file ---


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("replay --generate toolagent --limit 5", "advise"),
        ("support", "doctor --support-table"),
        ("tiny-model {tmp}/model", "demo --write-model"),
    ],
)
def test_old_names_work_and_say_the_new_one(old: str, new: str, tmp_path: Path, cli: Any) -> None:
    words = old.format(tmp=tmp_path).split()
    told = cli(*words)
    assert (told.status, told.err) == (0, f"sglang-pat: {words[0]} is now `sglang-pat {new}`\n")
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    assert cli(*new.split(), *words[1:]) == (0, told.out, "")
    assert words[0] not in cli("--help").out
