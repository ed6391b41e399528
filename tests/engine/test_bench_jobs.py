"""`benchmarks/server jobs` from end to end, on the CPU with a toy model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import server
from common import suites

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def test_jobs_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    file = tmp_path / "jobs.json"
    words = ["--jobs", "rollouts", "chat", "--json", str(file)]
    assert suites.main(server, ["jobs", *words]) == 0
    found = json.loads(file.read_text())
    assert set(found["jobs"]) == {"rollouts", "chat"}
    for job in found["jobs"].values():
        assert len(job["order"]) == job["requests"]
        assert set(job["measured"]) == {"pat", "default"}
        for runs in job["measured"].values():
            for run in runs:
                assert 0 < run["ttft_mean"] <= run["ttft_last"] <= run["seconds"]
    assert found["servers"]["pat"]["pat"]["pat_layers"] > 0
    # A clock for a CPU there is none.
    assert found["gates"] == {}
