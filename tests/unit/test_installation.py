"""The wheel beside an SGLang leaves that SGLang, and all that it needs, alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Extras for users; the others are for work on the project itself.
FOR_USERS = ("sglang", "torch", "replay")
REQUIREMENTS = [
    Requirement(text)
    for text in (
        *PROJECT["dependencies"],
        *(each for extra in FOR_USERS for each in PROJECT["optional-dependencies"][extra]),
    )
]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_what_is_installed_satisfies_every_requirement(requirement: Requirement) -> None:
    """Then pip has nothing to change."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        pytest.fail(f"{requirement.name} is missing from the test environment")
    assert requirement.specifier.contains(installed, prereleases=True)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_no_requirement_pins_a_package(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    # SGLang alone has an upper bound: its next minor series may move every hook.
    assert operators <= ({">=", "<"} if requirement.name == "sglang" else {">="})


@pytest.mark.nightly
@pytest.mark.parametrize("extra", ["", "[torch]", "[sglang]", "[sglang,replay]"])
def test_an_installation_changes_no_other_package(extra: str) -> None:
    uv = shutil.which("uv") or str(ROOT / "build/uv/bin/uv")
    command = [uv, "pip", "install", "--dry-run", "--python", sys.executable]
    result = subprocess.run(
        [*command, "--no-build-isolation", f".{extra}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    changes = re.findall(r"^ [-+~] (\S+?)(?:==| @|\[| |$)", result.stderr, re.MULTILINE)
    assert set(changes) <= {"sglang-pat"}, result.stderr
