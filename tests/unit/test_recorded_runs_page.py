"""The page of recorded runs lists every file, and names what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import recorded_runs_page
from recorded_runs_page import PAGE, RESULTS, Run, page, recorded, suites


def test_the_page_is_generated() -> None:
    assert PAGE.read_text() == page(), f"run: {recorded_runs_page.COMMAND}"


def test_every_file_is_on_it() -> None:
    text = page()
    names = [path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")]
    assert len(names) > 20
    assert all(f"| `{name}` |" in text for name in names)


def made(name: str = "h100/x.json", **result: Any) -> Run:
    meta = {"command": "python soak.py --json /root/out/x.json", "gpu": "NVIDIA H100"}
    return Run(name, {"meta": meta, **result})


def test_a_command_names_no_folder_of_its_machine() -> None:
    assert made().command == "python soak.py --json x.json"
    assert made().suite == "check soak"


def test_every_recorded_command_is_of_a_suite() -> None:
    gone = [run.command for run in recorded() if ".py" in run.command and run.suite not in suites()]
    assert [command.split()[1] for command in gone] == [
        "bench_planning.py",
        "profile_steps.py",
        "bench_versions.py",
    ]
    command = {"command": "python benchmarks/kernel kv-write --json kv-write.json"}
    assert Run("h100/kv-write.json", {"meta": command}).suite == "kernel kv-write"


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            {"gates": {"price": {"value": 1.2345678, "limit": 1.15, "met": False}}},
            "| price | 1.235 (limit 1.15) |",
        ),
        (
            {"gates": [{"suite": "a", "rule": "b", "found": "c", "passed": False}]},
            "| a: b | c |",
        ),
        ({"failures": ["one", "two"]}, "| the check | one; two |"),
        ({"passed": False}, "| the check |  |"),
    ],
)
def test_what_did_not_hold_is_listed(result: dict[str, Any], expected: str) -> None:
    assert expected in recorded_runs_page._gates([made(**result)])


def test_what_held_is_counted() -> None:
    gates = [
        {"suite": "a", "rule": "b", "found": "c", "passed": passed} for passed in (True, False)
    ]
    run = made(gates=[*gates, gates[0]])
    assert "| `h100/x.json` | check soak | not recorded | 2/3 |" in recorded_runs_page._runs([run])
    assert recorded_runs_page._gates([run]).count("a: b") == 1
    assert "the check" not in recorded_runs_page._gates([made(passed=True)])


def test_what_has_no_run_is_named() -> None:
    runs = [run for run in recorded() if run.suite != "check soak"]
    text = recorded_runs_page._never_run(runs)
    assert "- `benchmarks/check soak`: " in text
    assert "- `benchmarks/check soak`: " not in recorded_runs_page._never_run([*runs, made()])
    assert "kernel attention" not in text
    assert "check soak" in suites()
    assert "8.0 (A100)" in text
    assert "9.0" not in text
    assert "- SGLang 0.5." in recorded_runs_page._never_run([made()])
