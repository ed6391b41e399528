"""StatsFile: when it is written, how it survives the end of a process, how it is read."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.sglang.report.stats_file import StatsFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stats.json"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_follows_the_steps_and_what_happens_soon_after(path: Path) -> None:
    counters = {"steps": 0, "events": {"unlock": 0}}
    file = StatsFile(path, lambda: json.loads(json.dumps(counters)))
    file.start()
    assert json.loads(path.read_text()) == counters
    counters["steps"] = 1
    file.mark()
    wait_until(lambda: json.loads(path.read_text())["steps"] == 1)
    time.sleep(0.2)
    counters["events"] = {"unlock": 3}  # after the step, and no other step follows
    wait_until(lambda: json.loads(path.read_text()) == counters)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_many_steps_are_few_writes_and_an_unchanged_state_is_none(path: Path) -> None:
    counters = {"steps": 0}
    file = StatsFile(path, lambda: dict(counters))
    file.start()
    begin = time.monotonic()
    files = set()
    for _ in range(300):
        counters["steps"] += 1
        file.mark()
        time.sleep(0.001)
        files.add(path.stat().st_mtime_ns)
    assert 1 < len(files) <= (time.monotonic() - begin) / 0.05 + 2
    wait_until(lambda: json.loads(path.read_text()) == {"steps": 300})
    written = path.stat()
    for _ in range(10):
        file.mark()
        time.sleep(0.02)
    assert path.stat() == written  # every write would make a new file


def test_no_link_is_followed(path: Path, tmp_path: Path) -> None:
    """Another user may write to the folder (like /tmp), and knows the process id."""
    precious = tmp_path / "precious"
    precious.write_text("not to be overwritten")
    for name in (path.name, f"{path.name}.new", f"{path.name}.{os.getpid()}.new"):
        (tmp_path / name).symlink_to(precious)
    StatsFile(path, lambda: {"steps": 0}).write()
    assert precious.read_text() == "not to be overwritten"
    assert json.loads(path.read_text()) == {"steps": 0}
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_nothing(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        StatsFile(path, dict).write()
    assert list(path.parent.iterdir()) == [path]


def test_a_mark_never_waits_for_the_file(path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def read_counters() -> dict[str, Any]:
        if threading.current_thread() is not threading.main_thread():
            writing.set()
            assert go_on.wait(10)
        return {}

    file = StatsFile(path, read_counters)
    file.start()
    file.mark()
    assert writing.wait(10)
    begin = time.perf_counter()
    for _ in range(1000):
        file.mark()
    assert time.perf_counter() - begin < 1
    go_on.set()


def test_an_error_is_logged_and_decode_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counters: dict[str, Any] = {}
    file = StatsFile(path, lambda: dict(counters))
    file.start()
    counters["steps"] = object()  # not serialisable
    file.mark()
    wait_until(lambda: "decode continues" in caplog.text)
    assert f"pat no longer writes {path}" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR
    assert json.loads(path.read_text()) == {}, "what was written last is whole"
    counters.clear()
    file.mark()
    assert file._outdated.is_set(), "marking still works, and nobody waits for it"


def _decode(path: Path, lasting_seconds: float, killed: bool) -> None:
    """Run a step like SGLang's scheduler, then end the process."""
    counters = {"steps": 0}
    file = StatsFile(path, lambda: dict(counters))
    file.start()
    counters["steps"] = 1
    file.mark()
    time.sleep(lasting_seconds)
    counters["steps"] = 2  # not marked as changed, so the thread does not write it
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("lasting_seconds", "killed", "expected"),
    [(0.0, False, [2]), (0.0, True, [0, 1]), (2.0, True, [1])],
)
def test_only_a_kill_loses_anything_and_only_the_newest(
    path: Path, lasting_seconds: float, killed: bool, expected: list[int]
) -> None:
    # SGLang spawns its processes, too.
    process = multiprocessing.get_context("spawn").Process(
        target=_decode, args=(path, lasting_seconds, killed)
    )
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if killed else 0)
    found = json.loads(path.read_text())["steps"]  # the file is complete in any case
    assert found in expected
