"""On a GPU, logits with pat differ no more than between SGLang's own backends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / "benchmarks" / "check"

pytestmark = pytest.mark.engine


def test_logits_differ_by_no_more_than_those_of_other_backends() -> None:
    command = [sys.executable, CHECK, "logits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "passed" in done.stdout
