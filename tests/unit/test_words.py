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
        ('"""Whether it is."""', "", ["a.py:1: opens with no noun or verb: Whether it is."]),
        ("# It is so\n# As it was.", "", []),
        ("\nx = 1  # As it was.", "", ["a.py:2: opens with no noun or verb: As it was."]),
        ("# It is made\n# likewise.", "", ["a.py:1: calque: likewise"]),
        ("x = 1  # made anew", "", ["a.py:1: calque: anew"]),
        ("# A thing is told of, and so is\n# told apart.", "", ["a.py:1: calque: told of"]),
        ("anew = 1", "", []),
        ('x = f"What {anew}?"', "", []),
        ('raise E(f"{x}: build it anew")', "", ["a.py:1: calque: anew"]),
        ("", "# Title\n\nIt is\nmade likewise.", ["docs/a.md:3: calque: likewise"]),
        ("", f"# Title\n\n{LONG}", ["1 of 2 sentences have over 35 words: ['docs/a.md:3']"]),
        ("", f"# Title\n\n| {LONG} |\n\n```\n{LONG}\n```", []),
    ],
)
def test_words(code: str, page: str, expected: list[str], tmp_path: Path) -> None:
    assert_found({"a.py": code, "docs/a.md": page}, expected, tmp_path)


def test_comments_of_the_kernels(tmp_path: Path) -> None:
    code = "int a;\n// As in b.\nint b;  // Of a.\n// It is so\n// as it was made anew."
    opens = "opens with no noun or verb"
    first, third = f"a.cuh:2: {opens}: As in b.", f"a.cuh:3: {opens}: Of a. It is so"
    assert_found({"a.cuh": code}, [first, "a.cuh:3: calque: anew", third], tmp_path)


def assert_found(files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci/check_words.py"
    script.write_bytes((ROOT / ".ci/check_words.py").read_bytes())
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", *files]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == bool(expected)
    found = done.stderr.splitlines()
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected))
