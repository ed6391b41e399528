"""The picture of the README and the table of gains, both from the recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from plot import gain

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/h100"


def recorded_cases() -> list[dict[str, Any]]:
    cases = json.loads((RESULTS / "kernels.json").read_text())["cases"]
    return [case for case in cases if case["suite"] == gain.SUITE]


def test_sharing_is_what_is_read_over_what_there_is() -> None:
    assert gain.sharing("256_1024") == 1
    assert gain.sharing("1,4_100,50") == pytest.approx(4 * 150 / (100 + 4 * 50))


def test_speedup_is_over_the_fastest_other() -> None:
    us = {"pat": 10.0, "flashinfer": 30.0, "fa3": 20.0, "cascade": 40.0}
    assert gain.speedup({"us": us}) == 2


def test_the_documentation_shows_the_recorded_gains() -> None:
    page = (ROOT / "docs/when-it-does-not-pay.md").read_text()
    rows = re.findall(
        r"^\| (\d+)(?: to (\d+))?x[^|]*\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        page,
        re.MULTILINE,
    )
    cases = recorded_cases()
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


def test_the_recorded_runs_can_be_drawn(tmp_path: Path) -> None:
    serving, kernels = (
        json.loads((RESULTS / name).read_text()) for name in ("serving-gates.json", "kernels.json")
    )
    gain.draw(serving, kernels, tmp_path / "gain.png")
    assert (tmp_path / "gain.png").read_bytes().startswith(b"\x89PNG")
