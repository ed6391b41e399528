"""The check of words finds what it is for, in a repository of two files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = " ".join(["word"] * 36) + ". A short one. "


@pytest.mark.parametrize(
    ("code", "page", "expected"),
    [
        ('"""Return it."""', "", []),
        ('"""Whether it is."""', "", ["a.py:1: a docstring opens with a noun or a verb"]),
        ("x = 1  # made anew", "", ["a.py:1: calque: anew"]),
        ("anew = 1", "", []),
        ("", "# Title\n\nIt is\nmade likewise.", ["docs/a.md:3: calque: likewise"]),
        ("", f"# Title\n\n{LONG}", ["1 of 2 sentences have over 35 words: ['docs/a.md:3']"]),
        ("", f"# Title\n\n| {LONG} |\n\n```\n{LONG}\n```", []),
    ],
)
def test_words(code: str, page: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / "docs").mkdir()
    script = tmp_path / ".ci/check_words.py"
    script.write_bytes((ROOT / ".ci/check_words.py").read_bytes())
    (tmp_path / "a.py").write_text(code)
    (tmp_path / "docs/a.md").write_text(page)
    for command in (["init", "-q"], ["add", "a.py", "docs"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == bool(expected)
    found = done.stderr.splitlines()
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))
