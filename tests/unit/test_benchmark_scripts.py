"""Every script in benchmarks/ can be imported and prints its help, where there is no GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
SCRIPTS = [name for name in MODULES if "__main__" in (BENCHMARKS / f"{name}.py").read_text()]


def test_there_are_scripts() -> None:
    assert {"bench_kernels", "bench_batch_invariance", "plot_kernels", "soak"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_prints_its_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")
