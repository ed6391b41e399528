"""The documentation's pictures and table of gains are generated from the recorded runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest

pytest.importorskip("matplotlib")

import plot
from common import suites
from plot import gain

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h100"


def test_the_documentation_shows_the_recorded_gains() -> None:
    page = (ROOT / "docs/when-it-does-not-pay.md").read_text()
    rows = re.findall(
        r"^\| (\d+)(?: to (\d+))?(?: \([^|]*)? \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        page,
        re.MULTILINE,
    )
    recorded = json.loads((RESULTS / "kernels.json").read_text())["cases"]
    cases = [case for case in recorded if case["suite"] == gain.SUITE]
    assert sum(int(count) for _, _, count, *_ in rows) == len(cases)
    for low, high, count, *numbers in rows:
        gains = [
            gain.speedup(case)
            for case in cases
            if int(low) <= round(gain.sharing(case["tree"])) <= int(high or low)
        ]
        assert len(gains) == int(count)
        expected = geometric_mean(gains), min(gains), max(gains)
        assert numbers == [f"{number:.2f}" for number in expected]


def test_the_recorded_runs_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    names = ("compare-8b.json", "kernels.json")
    suites.main(plot, ["gain", *(str(RESULTS / name) for name in names), str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
