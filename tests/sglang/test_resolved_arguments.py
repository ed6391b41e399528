"""SGLang resolves its arguments alike with and without pat, for any model and GPU.

SGLang derives page sizes, data types and more from the backend's name. No engine starts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import resolved_arguments
from model_families import FAMILIES

# SGLang's choices for a plain model show that the platform is the intended one.
DEFAULTS = {"cpu": "torch_native", "hopper": "fa3", "sm100": "trtllm_mha"}


@pytest.mark.parametrize(
    "platform",
    [
        pytest.param("cpu", marks=pytest.mark.nightly),
        pytest.param("hopper", marks=pytest.mark.nightly),
        "sm100",
    ],
)
def test_arguments_resolve_as_without_pat(platform: str, tmp_path: Path) -> None:
    for family in FAMILIES.values():
        family.write(tmp_path / family.name)
    command = [sys.executable, resolved_arguments.__file__, platform, str(tmp_path), *FAMILIES]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    lines = [line for line in child.stdout.splitlines() if line.startswith('{"family"')]
    results = [json.loads(line) for line in lines]
    assert {each["family"] for each in results} == {*FAMILIES}
    assert len(results) == len(resolved_arguments.ASKED) * len(FAMILIES)
    different = {(each["family"], each["asked"]): each["different"] for each in results}
    assert {which: found for which, found in different.items() if found} == {}
    resolved = {each["family"]: each["default"] for each in results if each["error"] is None}
    assert resolved["llama"] == DEFAULTS[platform]
    assert len(resolved) >= 12, {each["family"]: each["error"] for each in results}
