"""Generated pages and tables say what their sources say, and prose names each loss."""

from __future__ import annotations

import ast
import json
import re

import model_families_page
import recorded_runs_page
import recorded_tables
import touchpoints_page
from model_families import CPU_RUNS, FAMILIES, GPU_RUNS
from recorded_tables import BLOCKS, PAGE, RESULTS, ROOT, filled, kernel_files, lost, read

from sglang_pat import support


def test_pages_are_generated() -> None:
    """Run the program of the page if it is not."""
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
    """Latent attention is counted there, by the queries in the page's comments."""
    page = (ROOT / "docs/when-it-does-not-pay.md").read_text()
    names = [*kernel_files("h100"), *kernel_files("h200"), "h100/fp8.json", "h200/fp8.json"]
    losses = {case["name"] for name in names for case in read(name)["cases"] if lost(case)}
    assert losses
    assert [name for name in losses if f"`{name}`" not in page] == []


def test_no_file_of_results_names_a_folder_of_its_machine() -> None:
    for path in RESULTS.rglob("*.json"):
        command = str(json.loads(path.read_text())["meta"].get("command", ""))
        assert not re.search(r"(^| )/", command), f"{path}: {command}"
