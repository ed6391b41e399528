"""The page of model families says what the tests assert, and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from model_families import CPU_RUNS, FAMILIES, GPU_RUNS
from model_families_page import FEATURES, PAGE, published_table, runs, updated
from published_shapes import read_shapes

from sglang_pat import support

ROOT = Path(__file__).parents[2]


def test_the_page_is_generated() -> None:
    page = PAGE.read_text()
    assert page == updated(page), "run: python tests/support/model_families_page.py"


def test_a_page_without_a_section_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page has no section 'published'"):
        updated("# Model families")


def test_every_published_model_has_a_row() -> None:
    table = published_table()
    for name, shape in read_shapes().items():
        rows = [row for row in table.splitlines() if f"| `{shape.architecture}` |" in row]
        assert any((name.partition("/")[2] or name) in row for row in rows)


def test_what_operators_ask_for_is_named() -> None:
    rows = {row.split(" | ")[0].strip("| "): row for row in published_table().splitlines()}
    (gemma,) = (row for names, row in rows.items() if "gemma-4-26B-A4B" in names)
    assert "| none | none | head_dim 512; sliding window |" in gemma
    (glm,) = (row for names, row in rows.items() if "GLM-4.6" in names)
    assert "| `Glm4MoeForCausalLM` | all | all |" in glm
    (deepseek,) = (row for names, row in rows.items() if "DeepSeek-R1" in names)
    assert "| none | all |" in deepseek


def test_every_recorded_run_is_listed() -> None:
    lines = runs().splitlines()
    assert [line.partition(" (")[0] for line in lines[:-1]] == [
        "- CPU, SGLang 0.5.23",
        "- CPU, SGLang 0.5.17",
        "- GPU, SGLang 0.5.17",
    ]
    often = lines[-1].removesuffix(". The others run nightly.").partition(": ")[2].split("; ")
    assert often == [family.models for family in FAMILIES.values() if not family.nightly]
    missing = lines[1].removesuffix(".").partition("all except ")[2].split("; ")
    passed = {name for run in CPU_RUNS if run.sglang == "0.5.17" for name in run.families}
    assert missing == [each.models for name, each in FAMILIES.items() if name not in passed]
    assert lines[0].endswith("): all.")
    assert all(FAMILIES[name].models in lines[2] for run in GPU_RUNS for name in run.families)


def test_families_are_consistent() -> None:
    for name, family in FAMILIES.items():
        delegated = [layer for layers in family.default.values() for layer in layers]
        assert not set(delegated) & set(family.pat), name
        assert set(family.refused) < set(support.SGLANG_VERSIONS), name


def test_recorded_runs_are_of_families_that_sglang_runs() -> None:
    assert {run.sglang for run in (*CPU_RUNS, *GPU_RUNS)} <= set(support.SGLANG_VERSIONS)
    for run in CPU_RUNS:
        for name in run.families:
            assert run.sglang not in FAMILIES[name].refused, name
    assert {name for run in (*CPU_RUNS, *GPU_RUNS) for name in run.families} <= {*FAMILIES}


def test_tests_that_the_page_names_exist() -> None:
    named = [test for feature in FEATURES for test in feature.tests]
    assert named
    for test in named:
        path, _, rest = test.partition("::")
        source = (ROOT / path).read_text()
        name, _, parameter = rest.partition("[")
        nodes: list[ast.stmt] = ast.parse(source).body
        for part in name.split("::"):
            (node,) = (each for each in nodes if getattr(each, "name", None) == part)
            assert isinstance(node, ast.FunctionDef | ast.ClassDef)
            nodes = node.body
        assert not parameter or f'"{parameter.removesuffix("]")}":' in source, test
