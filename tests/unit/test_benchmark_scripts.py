"""Every suite of benchmarks/ runs from any folder, and prints its help without a GPU."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import suites

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDERS = ("kernel", "server", "check", "plot")
MODULES = sorted(
    f"{path.parent.name}.{path.stem}"
    for path in BENCHMARKS.glob("*/*.py")
    if not path.stem.startswith(("__", "test_"))
)
SUITES = [(folder, suite) for folder in FOLDERS for suite in importlib.import_module(folder).SUITES]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize(("folder", "suite"), SUITES)
def test_it_prints_its_help(
    folder: str, suite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["python"])
    package = importlib.import_module(folder)
    with pytest.raises(SystemExit) as ended:
        suites.main(package, [suite, "--help"])
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: benchmarks/{folder} {suite} [-h]")
    assert suites.said(package, suite)


def test_a_copy_runs_without_the_checkout(tmp_path: Path) -> None:
    """A copy runs with the installed package, from another folder."""
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results"))
    done = run(str(tmp_path / "benchmarks/server"), "compare", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The copy lacks the modules of tests/support.
    done = run("benchmarks/check", "sanitizers", "--help", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert str(tmp_path / "tests" / "support") in done.stderr
