"""Runs `sglang-pat` in the process of the test."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from sglang_pat.cli.main import main


class Answer(NamedTuple):
    """The exit status of a command, and the text that it printed."""

    status: int
    out: str
    err: str

    def check_refusal(self, message: str, most: int = 500) -> None:
        """Assert that the command refused wrong input with one short line on stderr only."""
        assert (self.status, self.out) == (2, "")
        assert message in self.err
        assert self.err.count("\n") == 1, self.err
        assert len(self.err) < most


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> Answer:
    """Run `sglang-pat WORDS...`."""
    try:
        status = main(list(map(str, words)))
    except SystemExit as ended:  # raised by argparse
        status = int(ended.code or 0)
    return Answer(status, *capsys.readouterr())
