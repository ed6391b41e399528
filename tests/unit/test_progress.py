"""Long work shows progress on stderr only."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_pat.cli import progress

ROOT = Path(__file__).resolve().parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_every_few_seconds_and_none_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress.SECONDS < 10  # with a margin for a busy machine
    done = iter(range(100))
    monkeypatch.setattr(progress, "SECONDS", 0.02)
    with progress.sign_of_life(lambda: f"counting, {next(done)} of 100"):
        assert capsys.readouterr().err == ""
        time.sleep(0.2)
    printed, before = capsys.readouterr(), next(done)
    assert printed.out == ""
    first, second, *_ = printed.err.splitlines()
    assert (first, second) == ("counting, 0 of 100: 0 s", "counting, 1 of 100: 0 s")
    time.sleep(0.1)
    assert next(done) == before + 1  # the thread has stopped


def test_a_terminal_keeps_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(RuntimeError, match="no model"), progress.sign_of_life("loading"):
        raise RuntimeError("no model")
    assert terminal.getvalue() == "loading: 0 s\r\x1b[K"


def test_a_closed_stderr_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    closed = io.StringIO()
    closed.close()
    closed.isatty = lambda: False  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", closed)
    with progress.sign_of_life("loading"):
        time.sleep(0.1)


def test_a_build_shows_signs_of_life_and_keeps_its_status() -> None:
    """These steps of the Makefile may take minutes."""
    slow = "import sys, time; time.sleep(0.5); print('built'); sys.exit(3)"
    code = (
        "import sys; from sglang_pat.cli import progress; progress.SECONDS = 0.1; "
        f"sys.exit(progress.run('Building', [sys.executable, '-c', {slow!r}]))"
    )
    child = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (child.returncode, child.stdout) == (3, "built\n")
    lines = child.stderr.splitlines()
    assert lines
    assert all(re.fullmatch(r"Building: \d+ s", line) for line in lines)
    makefile = (ROOT / "Makefile").read_text()
    for step in ("Building the scheduler", "Installing SGLang"):
        assert f'$(SIGN_OF_LIFE) "{step}' in makefile
