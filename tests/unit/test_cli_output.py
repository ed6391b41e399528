"""Output of commands: a standard output that fails, full disks, echoes of input, old names."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.cli import tiny_model
from sglang_pat.cli.main import build_parser
from sglang_pat.output_file import OutputError, written

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


def test_stderr_that_is_closed_changes_nothing(tmp_path: Path) -> None:
    assert run("doctor --support-table", "2>&-", tmp_path).returncode == 0
    done = run("advise --trace /no/file", "2>&-", tmp_path)
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

    monkeypatch.setattr("sglang_pat.workload.formats.write_mooncake", fail)
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
        if told.status == 0:  # a folder of any name may be written, say
            continue
        assert told.err.count("private words") <= 200 / len("private words, ")
        assert told.err.count("\n") == 1, told.err


# --- one command, once ---


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
