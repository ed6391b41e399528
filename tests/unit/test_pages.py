"""Pages and tables agree with their sources: records, model families, the adapter's files."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import model_families_page
import pytest
import recorded_runs_page
import recorded_tables
import touchpoints_page
from model_families import CPU_RUNS, FAMILIES, GPU_RUNS
from recorded_numbers import ROOT, shown_numbers, wrong_numbers
from recorded_tables import BLOCKS, PAGE, RESULTS, filled, gqa_runs, kernel_cases, lost

from sglang_pat import support


def test_pages_are_generated() -> None:
    """On failure, run the program that generates the page."""
    page = model_families_page.PAGE.read_text()
    assert page == model_families_page.updated(page)
    assert touchpoints_page.PAGE.read_text() == touchpoints_page.written()
    text = recorded_runs_page.page()
    assert recorded_runs_page.PAGE.read_text() == text
    names = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")]
    assert len(names) > 20
    assert all(f"| `{name}` |" in text for name in names)


def test_families_are_consistent() -> None:
    for name, family in FAMILIES.items():
        delegated = [layer for layers in family.default.values() for layer in layers]
        assert not set(delegated) & set(family.pat), name
        assert set(family.refused) < set(support.SGLANG_VERSIONS), name
    assert {run.sglang for run in (*CPU_RUNS, *GPU_RUNS)} <= set(support.SGLANG_VERSIONS)
    assert {name for run in (*CPU_RUNS, *GPU_RUNS) for name in run.families} <= {*FAMILIES}
    for run in CPU_RUNS:
        for name in run.families:
            assert run.sglang not in FAMILIES[name].refused, name


def test_tests_that_the_page_names_exist() -> None:
    named = [test for feature in model_families_page.FEATURES for test in feature.tests]
    assert named
    for test in named:
        path, _, name = test.partition("::")
        nodes: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in name.split("::"):
            (node,) = (each for each in nodes if getattr(each, "name", None) == part)
            assert isinstance(node, ast.FunctionDef | ast.ClassDef)
            nodes = node.body


def test_the_page_shows_the_recorded_tables() -> None:
    text = PAGE.read_text()
    assert text == filled(text), f"run: {recorded_tables.COMMAND}"


def test_every_table_is_shown_and_no_marker_is_broken() -> None:
    text = PAGE.read_text()
    begun = re.findall(r"<!-- recorded: ([a-z0-9-]+) -->", text)
    assert sorted(begun) == sorted(BLOCKS)
    assert begun == re.findall(r"<!-- end of ([a-z0-9-]+) -->", text)


def test_the_page_on_losses_names_each_of_them() -> None:
    """Queries in the page's comments count the losses of latent attention."""
    page = (ROOT / "docs/when-it-does-not-pay.md").read_text()
    cases = (
        case for names in gqa_runs() for found in kernel_cases(names).values() for case in found
    )
    losses = {case["name"] for case in cases if lost(case)}
    assert losses
    assert [name for name in losses if f"`{name}`" not in page] == []


def test_no_file_of_results_names_a_folder_of_its_machine() -> None:
    for path in RESULTS.rglob("*.json"):
        command = str(json.loads(path.read_text())["meta"].get("command", ""))
        assert not re.search(r"(^| )/", command), f"{path}: {command}"


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


PAGES = [ROOT / "README.md", ROOT / "kernels/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
# Numbers that are not measured, or that another page explains: limits, examples, constants.
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
