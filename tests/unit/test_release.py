"""The release workflow tests what it publishes, and pins everything that it runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from sglang_pat import support

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / ".github/workflows/release.yml").read_text()
# YAML reads the key `on` as True.
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_only_a_tag_publishes_and_only_after_the_tests() -> None:
    assert WORKFLOW[True]["push"] == {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}
    publish = JOBS["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/')"
    assert (publish["needs"], JOBS["test"]["needs"]) == ("test", "build")
    assert WORKFLOW["permissions"] == {"contents": "read"}
    writing = [name for name, job in JOBS.items() if "write" in str(job.get("permissions"))]
    assert writing == ["publish"]
    # The publishing job executes no code of the repository.
    assert "actions/checkout" not in str(publish)
    assert "attest-build-provenance" in str(publish)


def test_every_supported_python_and_sglang_is_released_and_tested() -> None:
    matrix = JOBS["test"]["strategy"]["matrix"]
    assert tuple(matrix["python"]) == support.PYTHON_VERSIONS
    assert {support.SGLANG_VERSIONS[0], support.SGLANG_VERSIONS[-1]} <= set(matrix["sglang"])
    wheels = re.findall(r"cp3(\d+)-manylinux", TEXT)
    assert tuple(f"3.{minor}" for minor in wheels) == support.PYTHON_VERSIONS


def test_the_version_check_accepts_a_dated_changelog_only() -> None:
    (pattern,) = re.findall(r'grep -qE "(.*?)" CHANGELOG.md', TEXT)
    pattern = pattern.replace("$version", re.escape(PROJECT["version"]))
    dated = f"## [{PROJECT['version']}] - 2026-12-01"
    assert re.search(pattern, dated, re.MULTILINE)
    assert not re.search(pattern, f"## [{PROJECT['version']}]", re.MULTILINE)
