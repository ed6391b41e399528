"""Tables of benchmarks/results/TABLES.md come from the recorded runs, and prose names each loss."""

from __future__ import annotations

import json
import re

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
