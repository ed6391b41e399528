"""`benchmarks/server compare` from end to end, on the CPU with a toy model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import server
from common import suites
from server.scenarios import SCENARIOS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_batches_and_jobs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    file = tmp_path / "found.json"
    words = ["--scenarios", "sharing", "jobs", "--rounds", "1", "--json", str(file)]
    suites.main(server, ["compare", *words])
    found = json.loads(file.read_text())
    assert [case["case"] for case in found["cases"]] == [
        batch.name for batch in SCENARIOS["sharing"].batches
    ]
    for case in found["cases"]:
        assert set(case["tpot_ms"]) == {"pat", "fa3"}
        assert case["answers"]["fa3"]["equal"] == case["batch"]
    assert [job["job"] for job in found["jobs"]] == [job.name for job in SCENARIOS["jobs"].jobs]
    for job in found["jobs"]:
        assert len(job["order"]) == job["requests"]
        assert set(job["measured"]) == {"pat", "default"}
        for runs in job["measured"].values():
            for run in runs:
                assert 0 < run["ttft_mean"] <= run["ttft_last"] <= run["seconds"]
        assert job["predicted_seconds"] == {}  # pat has no time model of a CPU
    assert found["scenarios"]["sharing"]["servers"]["pat"]["pat"]["pat_layers"] > 0
    # The times of a toy model mean nothing; the gates on answers, caches and routes apply.
    assert all(gate["met"] for name, gate in found["gates"].items() if "/ pat" not in name)
