"""Servers that share a GPU: one that fails takes only itself out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.fleet import Member, groups_that_fit, wait, watched


class StubServer:
    """Ready after so many looks; with `ends`, it ends at the first."""

    def __init__(self, log: Path, looks: int = 1, *, ends: bool = False) -> None:
        self.process = self
        self.log = log
        self.looks = looks
        self.ends = ends
        log.write_text("".join(f"line {i}\n" for i in range(100)))

    def is_ready(self) -> bool:
        if self.ends:
            raise RuntimeError("the server ended")
        self.looks -= 1
        return self.looks <= 0


def member(tmp_path: Path, name: str, **more: Any) -> Member:
    return Member(name, StubServer(tmp_path / name, **more))  # type: ignore[arg-type]


def test_servers_that_end_or_hang_do_not_hold_up_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, ended = member(tmp_path, "good", looks=2), member(tmp_path, "ended", ends=True)
    hangs = member(tmp_path, "hangs", looks=1000)
    wait([good, ended, hangs], seconds=1.0)
    assert good.failure is None
    assert good.start_seconds is not None
    assert ended.failure == "ended while it started"
    assert hangs.failure == "not ready after 1 s"
    printed = capsys.readouterr().out
    assert "line 99" in printed
    assert "line 69" not in printed


def test_servers_start_together_as_far_as_the_memory_goes() -> None:
    gigabytes = {"a": 30.0, "b": 30.0, "c": 30.0, "d": 90.0, "e": 10.0}
    needs = {name: (2, need) for name, need in gigabytes.items()}
    assert groups_that_fit(needs, 80) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert groups_that_fit(needs, 0) == [[each] for each in needs]
    # No more than eight servers, whatever the memory.
    assert groups_that_fit(needs, 1e6) == [["a", "b", "c", "d"], ["e"]]


def test_an_error_is_the_failure_of_servers_that_do_not_answer(tmp_path: Path) -> None:
    good, ended = member(tmp_path, "good"), member(tmp_path, "ended", ends=True)
    with watched([good, ended], "a case"):
        raise ValueError("too few slices")
    assert good.failure is None
    assert ended.failure == "a case: ValueError: too few slices"
