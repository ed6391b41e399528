"""Tables of benchmarks/results/TABLES.md come from the recorded runs, and prose names each loss."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import recorded_tables
from recorded_tables import BLOCKS, PAGE, RESULTS, ROOT, filled, kernel_files, lost, read


def test_the_page_shows_the_recorded_tables() -> None:
    text = PAGE.read_text()
    assert text == filled(text), f"run: {recorded_tables.COMMAND}"


def test_every_table_is_shown_and_no_marker_is_broken() -> None:
    text = PAGE.read_text()
    begun = re.findall(r"<!-- recorded: ([a-z0-9-]+) -->", text)
    assert sorted(begun) == sorted(BLOCKS)
    assert begun == re.findall(r"<!-- end of ([a-z0-9-]+) -->", text)


def test_a_program_writes_no_sentences() -> None:
    """A generated block holds the files that it comes from, and a table."""
    for name, block in BLOCKS.items():
        rest = [line for line in block().splitlines() if not line.startswith("| ")]
        assert not rest or (rest[0].startswith("Source: `") and rest[1:] == [""]), name


def test_the_page_on_losses_names_each_of_them() -> None:
    """Latent attention is counted there, by the queries in the page's comments."""
    page = (ROOT / "docs/when-it-does-not-pay.md").read_text()
    names = [*kernel_files("h100"), *kernel_files("h200"), "h100/fp8.json", "h200/fp8.json"]
    losses = {case["name"] for name in names for case in read(name)["cases"] if lost(case)}
    assert losses
    assert [name for name in losses if f"`{name}`" not in page] == []


def test_other_results_give_other_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in which pat takes twice the time changes every table of kernels, and no other."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    result: dict[str, Any] = read("h100/kernels.json")
    for case in result["cases"]:
        case["us"]["pat"] *= 2
    (tmp_path / "h100/kernels.json").write_text(json.dumps(result))
    before = {name: block() for name, block in BLOCKS.items()}
    monkeypatch.setattr(recorded_tables, "RESULTS", tmp_path)
    changed = {name for name, block in BLOCKS.items() if block() != before[name]}
    assert changed == {"kernels", "kernel-losses", "cascade"}
    monkeypatch.setattr("sys.argv", ["recorded_tables.py", "--check"])
    assert recorded_tables.main() == 1
    assert "benchmarks/results/TABLES.md is not current" in capsys.readouterr().err


def test_a_run_with_several_ranks_that_failed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = {"steps_alike": 90, "apart_us": {"p50": 9.4, "p90": 20.1}}
    drafted = {"pat": {"off": 0.02}, "fa3": {"off": 0.03}}
    meta = {"gpu": "NVIDIA H100", "commit": "abc", "versions": {"sglang": "0.5.17"}}
    found = {"meta": meta, "ranks": 4, "chains": {"drafted": drafted, "plans": plans}}
    for gpu, result in (("h100", found | {"tp": {"failed": True}}), ("h200", {"meta": meta})):
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / "ranks.json").write_text(json.dumps(result))
    monkeypatch.setattr(recorded_tables, "RESULTS", tmp_path)
    told = BLOCKS["ranks"]()
    assert "| chains of drafts, `--tp-size 4` | 4 x H100 | 0.020 | 0.030 | 90 | 9 / 20 |" in told
    assert "`--tp-size 4` | 4 x H100 | 0.020" in told.splitlines()[-1]


def test_no_file_of_results_names_a_folder_of_its_machine() -> None:
    for path in RESULTS.rglob("*.json"):
        command = str(json.loads(path.read_text())["meta"].get("command", ""))
        assert not re.search(r"(^| )/", command), f"{path}: {command}"
