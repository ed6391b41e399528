"""Figures of the documentation come from the recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import recorded_figures
from recorded_figures import BLOCKS, PAGES, RESULTS, ROOT, filled


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_recorded_figures(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text == filled(text), f"run: {recorded_figures.COMMAND}"


def test_every_block_is_shown_and_no_marker_is_broken() -> None:
    text = "".join((ROOT / name).read_text() for name in PAGES)
    begun = re.findall(r"<!-- recorded: ([a-z-]+) -->", text)
    assert set(begun) == set(BLOCKS)
    assert begun == re.findall(r"<!-- end of ([a-z-]+) -->", text)


def test_other_results_give_other_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in which pat takes twice the time changes every figure of kernels."""
    for path in RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    result: dict[str, Any] = json.loads((RESULTS / "kernels.json").read_text())
    for case in result["cases"]:
        case["us"]["pat"] *= 2
    (tmp_path / "kernels.json").write_text(json.dumps(result))
    names = [name for name in BLOCKS if name.startswith(("kernel-s", "kernel-l", "gains-by"))]
    before = {name: BLOCKS[name]() for name in names}
    monkeypatch.setattr(recorded_figures, "RESULTS", tmp_path)
    after = {name: BLOCKS[name]() for name in names}
    assert [name for name in names if before[name] == after[name]] == ["kernel-source"]
    slower = sum(recorded_figures.gain(case) < 0.995 for case in result["cases"])
    told = " ".join(after["kernel-losses"].split())
    assert f"in {slower} of the {len(result['cases'])} cases" in told
    monkeypatch.setattr("sys.argv", ["recorded_figures.py", "--check"])
    assert recorded_figures.main() == 1
    assert "docs/kernels.md" in capsys.readouterr().err


def test_no_file_of_results_names_a_folder_of_its_machine() -> None:
    for path in RESULTS.parent.rglob("*.json"):
        command = str(json.loads(path.read_text())["meta"].get("command", ""))
        assert not re.search(r"(^| )/", command), f"{path}: {command}"
