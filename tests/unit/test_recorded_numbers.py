"""Numbers in prose follow the recorded runs that the pages name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_numbers import ROOT, shown_numbers, wrong_numbers

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
        ("It takes 9.46.", "9.46 = cases[?name=='a'].ms", None),
        ("It takes 19.5 ms.", "9.5 = cases[?name=='a'].ms", "does not show"),
        ("It takes 9.55 ms.", "9.5 = cases[?name=='a'].ms", "does not show"),
        ("At least 9.4.", "9.4 <= min(cases[].ms)", None),
        ("At least 9.5.", "9.5 <= min(cases[].ms)", "has 9.46"),
        ("At most 20.1.", "20.1 >= max(cases[].ms)", None),
        ("At most 20.", "20 >= max(cases[].ms)", "has 20.05"),
        ("On average 13.8", "13.8 = geomean(cases[].ms)", None),
        ("2.1 times", "2.1 = divide(cases[1].ms, cases[0].ms)", None),
        ("47% fewer", "47% = saved", None),
        ("about 1,200 steps", "1,200 = steps", None),
        ("9.5 and 20.1", "9.5 20.1 = cases[].ms", None),
        ("9.5 and 47%", "9.5 47% = [cases[0].ms, saved]", None),
        ("9.5 and 20.2", "9.5 20.2 = cases[].ms", "has 20.05"),
        ("9.5", "9.5 = cases[?name=='c'].ms", "1 numbers, but run.json has []"),
        ("9.5", "9.5 = cases[].ms", "1 numbers, but run.json has [9.46, 20.05]"),
        ("1", "1 = flag", "1 numbers, but run.json has []"),
        ("9.5", "9.5 cases", "expected NUMBER"),
    ],
)
def test_what_a_record_contradicts_is_named(
    text: str, line: str, expected: str | None, tmp_path: Path
) -> None:
    cases = [{"name": "a", "ms": 9.46}, {"name": "b", "ms": 20.05}]
    record = {"cases": cases, "saved": 0.466, "steps": 1200, "flag": True}
    (tmp_path / "run.json").write_text(json.dumps(record))
    wrong = wrong_numbers(text + page(line), tmp_path)
    assert wrong == [] if expected is None else len(wrong) == 1 and expected in wrong[0]
