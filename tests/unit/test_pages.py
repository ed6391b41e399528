"""Generated pages say what their sources say: recorded runs, model families, places in SGLang."""

from __future__ import annotations

import ast
from pathlib import Path

import model_families_page
import recorded_runs_page
import touchpoints_page
from model_families import CPU_RUNS, FAMILIES, GPU_RUNS
from recorded_runs_page import RESULTS

from sglang_pat import support

ROOT = Path(__file__).parents[2]


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
