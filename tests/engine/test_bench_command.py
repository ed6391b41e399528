"""`sglang-pat bench` with two real servers, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.tiny_model import TinyModel


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.xdist_group("engine")
def test_the_command_measures_two_servers(tmp_path: Path) -> None:
    TinyModel().write(tmp_path / "model")
    out = tmp_path / "out.json"
    sizes = ("--requests", "6", "--prefix", "200", "--private", "40", "--unshared", "64")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_pat", "bench", "--model", str(tmp_path / "model")),
            *("--device", "cpu", "--against", "torch_native", *sizes, "--json", str(out)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [case["name"] for case in result["cases"]] == [
        "with a shared prefix",
        "with nothing shared",
        "with one request",
    ]
    for case in result["cases"]:
        assert all(times["median"] > 0 for times in case["tpot_ms"].values())
    assert result["servers"]["pat"]["stats"]["plans_built"] > 0
    assert result["servers"]["pat"]["pat"] is not None
    assert result["verdict"] in done.stdout.replace("\n", " ")
