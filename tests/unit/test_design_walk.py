"""The walk of a step in `docs/design/index.md`: the files that it passes in the adapter."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "sglang_pat/sglang"
NOT_PASSED = ("report/", "step/debug_checks.py")  # reports and checks change nothing


def imported(path: str) -> set[str]:
    """Return the files of the adapter that a file imports at module level."""
    found = set()
    for node in ast.parse((ADAPTER / path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang_pat.sglang"):
            folder = "/".join((node.module or "").split(".")[2:])
            files = {f"{folder}.py", *(f"{folder}/{each.name}.py" for each in node.names)}
            found |= {each.lstrip("/") for each in files if (ADAPTER / each.lstrip("/")).is_file()}
    return {each for each in found if not each.startswith(NOT_PASSED)}


def walk(*begin: str) -> set[str]:
    """Return these files and all that they import."""
    passed: set[str] = set()
    left = set(begin)
    while left:
        path = left.pop()
        passed.add(path)
        left |= imported(path) - passed
    return passed


DECODE = walk("backend.py", "step/planner.py", "tree/request_tracker.py", "layer/attention.py")
VERIFY = walk("speculative/backends.py") - DECODE


@pytest.mark.parametrize(
    ("title", "files"), [("A plain decode step", DECODE), ("A verify step adds", VERIFY)]
)
def test_the_page_lists_the_files_of_a_step(title: str, files: set[str]) -> None:
    page = (ROOT / "docs/design/index.md").read_text()
    row = re.search(rf"^\| {title} \| (.*?) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert row is not None
    assert set(re.findall(r"`(.*?)`", row[1])) == files
    lines = sum(len((ADAPTER / each).read_text().splitlines()) for each in files)
    assert int(row[2].replace(",", "")) == pytest.approx(lines, rel=0.1)
