"""Numbers in prose follow the recorded runs that the pages name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from recorded_numbers import ROOT, shown_numbers, wrong_numbers

PAGES = [
    ROOT / "README.md",
    ROOT / "kernels/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_numbers_of_a_page_are_those_of_its_records(page: Path) -> None:
    assert wrong_numbers(page.read_text()) == []


def test_the_readme_traces_each_number_of_its_table() -> None:
    text = (ROOT / "README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and " ms |" in line]
    cells = [cell.strip(" *msx") for row in rows for cell in row.strip("|").split("|")[1:]]
    assert len(cells) >= 15
    assert set(cells) <= shown_numbers(text)


def page(*lines: str) -> str:
    return "\n".join(["<!-- recorded in run.json:", *lines, "-->\n"])


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("It takes 9.5 ms.", "9.5 = cases[?name=='a'].ms", None),
        ("It takes 9.4 ms.", "9.4 = cases[?name=='a'].ms", "has 9.46"),
        ("It takes 19.5 ms.", "9.5 = cases[?name=='a'].ms", "does not show"),
        ("At least 9.4.", "9.4 <= min(cases[].ms)", None),
        ("At most 20.", "20 >= max(cases[].ms)", "has 20.05"),
        ("9.5 and 20.1", "9.5 20.1 = cases[].ms", None),
        ("9.5 and 20.2", "9.5 20.2 = cases[].ms", "has 20.05"),
        ("9.5", "9.5 = cases[?name=='c'].ms", "1 numbers, but run.json has []"),
        ("9.5", "9.5 cases", "expected NUMBER"),
    ],
)
def test_what_a_record_contradicts_is_named(
    text: str, line: str, expected: str | None, tmp_path: Path
) -> None:
    cases = [{"name": "a", "ms": 9.46}, {"name": "b", "ms": 20.05}]
    (tmp_path / "run.json").write_text(json.dumps({"cases": cases}))
    wrong = wrong_numbers(text + page(line), tmp_path)
    assert wrong == [] if expected is None else len(wrong) == 1 and expected in wrong[0]


# Pages of evidence, limits and constants name the source of each number themselves.
EVIDENCE = re.compile(r"(?:docs/(?:results|check|advise|design/.*)|kernels/README)\.md")
_NUMBER = r"\b\d[\d,]*(?:\.\d+)?"
_UNIT = r"x\b|%| (?:us|ms|s|seconds|minutes|TB/s)\b| (?:tokens|requests) (?:a|per) s"
_TIMES = r"(?:\b\d+\.\d+ times|(?:\b\d+|two|three|four|five|ten) times as|twice as)\b"
MEASURED = re.compile(rf"{_NUMBER}(?:{_UNIT})|{_TIMES}")
# Numbers that nobody measured, or that a page of evidence explains: limits, examples, constants.
EXPLAINED = {
    "README.md": ["47%"],  # of an example
    "docs/configuration.md": ["0.1 s"],
    "docs/guide.md": ["53%"],  # of an example
    "docs/operate/index.md": ["3%", "30 minutes", "15 minutes"],  # limits
    "docs/recipes.md": ["16 requests a s", "twice as"],  # a workload, bytes
    "docs/support.md": ["5.9 ms", "5.7 TB/s", "3.0 ms", "40 ms"],  # calculated
    "docs/when-it-does-not-pay.md": ["1%", "0.5%"],  # noise
}


def measured_by_hand(page: str) -> list[str]:
    """Return gains and times in prose that no generated block and no comment traces to a record."""
    traced = shown_numbers(page)
    blocks = r"<!-- generated: ([a-z-]+) -->.*?<!-- end: \1 -->"
    for pattern in (blocks, r"<!--.*?-->", r"^ *```.*?^ *```", r"`[^`\n]*`"):
        page = re.sub(pattern, "", page, flags=re.DOTALL | re.MULTILINE)
    found = [match[0] for match in MEASURED.finditer(page)]
    return [number for number in found if re.split("x$| ", number)[0] not in traced]


def test_users_read_recorded_numbers_only() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
    typed = {
        name: found
        for name, text in texts.items()
        if not EVIDENCE.fullmatch(name) and (found := measured_by_hand(text))
    }
    assert typed == EXPLAINED, "trace others by a comment (tests/support/recorded_numbers.py)"
