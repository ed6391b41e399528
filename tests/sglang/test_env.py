"""SGLANG_PAT_* variables: typed and strict."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_pat.executors.kernel_cache import default_cache
from sglang_pat.sglang.start.environment import Environment


def test_defaults() -> None:
    assert Environment.read({"HOME": "/", "SGLANG_OTHER": "1"}) == Environment(
        "memory", "0", False, None, 256, default_cache({})
    )


def test_values(tmp_path: Path) -> None:
    given = {
        "SGLANG_PAT_POLICY": "query-centric",
        "SGLANG_PAT_DEBUG": "ranks",
        "SGLANG_PAT_STRICT": "1",
        "SGLANG_PAT_STATS_FILE": str(tmp_path / "stats-{pid}.json"),
        "SGLANG_PAT_GROWTH_TOKENS": "1",
        "SGLANG_PAT_KERNEL_CACHE": "/kernels",
    }
    stats_file = tmp_path / f"stats-{os.getpid()}.json"
    assert Environment.read(given) == Environment(
        "query-centric", "ranks", True, stats_file, 1, Path("/kernels")
    )


def test_the_variables_of_the_process_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_POLICY", "paper")
    assert Environment.read().policy == "paper"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SGLANG_PAT_POLICY", "greedy", "SGLANG_PAT_POLICY='greedy'; allowed: memory, paper"),
        ("SGLANG_PAT_DEBUG", "yes", "SGLANG_PAT_DEBUG='yes'; allowed: 0, 1, ranks"),
        ("SGLANG_PAT_DEBUG", "", "SGLANG_PAT_DEBUG=''; allowed: 0, 1, ranks"),
        ("SGLANG_PAT_DEBUG", "x" * 999, "^SGLANG_PAT_DEBUG='x{9,99}[.]{3}x{9,99}'; allowed: 0, 1,"),
        ("SGLANG_PAT_STRICT", "true", "SGLANG_PAT_STRICT='true'; allowed: 0, 1"),
        ("SGLANG_PAT_STATS_FILE", "/no/such/folder/f", "can be written .its folder /no/such/fold"),
        ("SGLANG_PAT_STATS_FILE", "/", "SGLANG_PAT_STATS_FILE='/'; allowed: the path of a file th"),
        ("SGLANG_PAT_STATS_FILE", "", "SGLANG_PAT_STATS_FILE=''; allowed: the path of a file that"),
        ("SGLANG_PAT_STATS_FILE", "/dev/null", "='/dev/null'; allowed: .*it is not a regular file"),
        ("SGLANG_PAT_STATS_FILE", f"/tmp/{'x' * 300}", "allowed: .*File name too long"),
        ("SGLANG_PAT_KERNEL_CACHE", "", "SGLANG_PAT_KERNEL_CACHE=''; allowed: an absolute path"),
        ("SGLANG_PAT_KERNEL_CACHE", "k", "SGLANG_PAT_KERNEL_CACHE='k'; allowed: an absolute path"),
        ("SGLANG_PAT_GROWTH_TOKENS", "0", "SGLANG_PAT_GROWTH_TOKENS='0'; allowed: 1 to 65536"),
        ("SGLANG_PAT_GROWTH_TOKENS", "-5", "='-5'; allowed: 1 to 65536"),
        ("SGLANG_PAT_GROWTH_TOKENS", "65537", "='65537'; allowed: 1 to 65536"),
        (
            "SGLANG_PAT_POLCY",
            "memory",
            "unknown variable SGLANG_PAT_POLCY; allowed: SGLANG_PAT_POL",
        ),
        (f"SGLANG_PAT_{'x' * 999}", "1", "^unknown variable SGLANG_PAT_x{9,99}[.]{3}; allowed: S"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Environment.read({name: value})
