"""The documentation's page of recorded runs, from the files below benchmarks/results/.

`python tests/support/recorded_runs_page.py` writes `docs/recorded-runs.md`; with `--check` it only
compares. A test and `make docs` do that. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # whether or not the package is installed
import check  # noqa: E402
import experiments  # noqa: E402
import kernel  # noqa: E402
import server  # noqa: E402
from sglang_pat.support import SGLANG_VERSIONS  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/recorded-runs.md"
COMMAND = "python tests/support/recorded_runs_page.py"
NO_GPU = "none"
WITHOUT_GPU = ("kernel scheduler", "experiments routing")  # suites that need none
# Suites of benchmarks/, by the script that a command names which was recorded earlier.
EARLIER = {
    "bench_batch_invariance.py": "kernel batch-invariance",
    "bench_fp8.py": "kernel attention",
    "bench_hybrid_models.py": "server compare",
    "bench_jobs.py": "server compare",
    "bench_kernels.py": "kernel attention",
    "bench_kv_write.py": "kernel kv-write",
    "bench_scheduler.py": "kernel scheduler",
    "bench_server_gates.py": "server compare",
    "bench_serving.py": "server traffic",
    "bench_sharing.py": "kernel sharing",
    "bench_speculation.py": "server speculation",
    "check_deterministic.py": "check deterministic",
    "check_hicache.py": "check hicache",
    "check_logits.py": "check logits",
    "check_ranks.py": "check ranks",
    "check_sanitizers.py": "check sanitizers",
    "compare_routing.py": "experiments routing",
    "soak.py": "check soak",
}
# Suites under the name that they had when a run was recorded.
RENAMED = {
    **dict.fromkeys(("server gates", "server hybrids", "server jobs"), "server compare"),
    **{f"server {name}": f"experiments {name}" for name in ("planted", "rl", "routing", "trained")},
}
# GPUs whose kernels the wheels hold (.ci/wheels.py): names to expect, by compute capability.
ARCHITECTURES = {
    "8.0": ("A100",),
    "8.6": ("A10", "RTX 3090"),
    "8.9": ("L4", "L40S", "RTX 4090"),
    "9.0": ("H100", "H200"),
    "10.0": ("B200",),
    "12.0": ("RTX 5090", "RTX PRO 6000"),
}

_COLUMNS = ("File", "Made by", "Commit", "Held")
_HEAD = f"""\
# Recorded runs

Every file below `benchmarks/results/`, with the number of its rules that held. A file has the whole
command, clocks and every number. [Results](results.md) says what they mean. `{COMMAND}` generates
this page.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One file. name: below benchmarks/results/."""

    name: str
    result: Mapping[str, Any]

    @property
    def meta(self) -> Mapping[str, Any]:
        meta: Mapping[str, Any] = self.result["meta"]
        return meta

    @property
    def command(self) -> str:
        """Without the paths that only its machine had."""
        given = str(self.meta.get("command", "make demo"))
        return re.sub(r"(?<= )/\S*/(?=[\w.-]+\.json)", "", given)

    @property
    def suite(self) -> str | None:
        """Its folder and name in benchmarks/, if it is still there."""
        if found := re.search(r"\b(\w+\.py)\b", self.command):
            return EARLIER.get(found[1])
        found = re.search(r"\bbenchmarks/(\w+ [\w-]+)", self.command)
        return RENAMED.get(found[1], found[1]) if found else None

    @property
    def made_by(self) -> str:
        """Its suite, else the program of its command."""
        return self.suite or " ".join(self.command.removeprefix("python ").split()[:2])

    @property
    def gpu(self) -> str:
        return str(self.meta.get("gpu") or (NO_GPU if self.name.startswith("cpu") else "H100"))

    @property
    def versions(self) -> str:
        """Versions that the numbers depend on, without what was not installed."""
        meta = self.meta
        known = {**meta, **meta.get("versions", {})}
        known["sglang-pat"] = known.get("sglang-pat") or known.get("sglang_pat")
        names = {
            "sglang-pat": "sglang-pat",
            "sglang": "SGLang",
            "torch": "torch",
            "cuda": "CUDA",
            "driver": "driver",
        }
        if self.gpu == NO_GPU:
            del names["cuda"]
        found = {title: known.get(name) for name, title in names.items()}
        return ", ".join(
            f"{title} {str(value).splitlines()[0]}" for title, value in found.items() if value
        )

    @property
    def commit(self) -> str:
        commit = self.meta.get("commit")
        if isinstance(commit, Mapping):
            return ", ".join(f"{name} {value}" for name, value in commit.items())
        return str(commit) if commit else "not recorded"

    @property
    def gates(self) -> Iterator[tuple[str, str, bool | None]]:
        """Limit, finding and verdict of each gate; None: there was nothing to judge by."""
        gates = self.result.get("gates", {})
        if isinstance(gates, Mapping):
            for name, gate in gates.items():
                met = gate.get("met", gate.get("passed"))
                yield name, _found(gate), met
        else:
            for gate in gates:
                yield f"{gate['suite']}: {gate['rule']}", gate["found"], gate["passed"]
        if "passed" in self.result:
            yield "the check", "", self.result["passed"]
        if "failures" in self.result:
            failures = self.result["failures"]
            yield "the check", "; ".join(map(str, failures)), not failures


def _found(gate: Mapping[str, Any]) -> str:
    if "value" in gate:
        return f"{_number(gate['value'])} (limit {_number(gate['limit'])})"
    return ", ".join(
        f"{name.replace('_', ' ')} {_number(value)}"
        for name, value in gate.items()
        if name not in ("passed", "met")
    )


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def recorded() -> list[Run]:
    """All runs, sorted by name."""
    return [
        Run(path.relative_to(RESULTS).as_posix(), json.loads(path.read_text()))
        for path in sorted(RESULTS.rglob("*.json"))
    ]


def suites() -> dict[str, str]:
    """Suites of benchmarks/ that write a result -> what they say of themselves."""
    found = {}
    for package in (check, experiments, kernel, server):
        for suite in sorted({*package.SUITES} - {"sanitizer-grid"}):
            source = Path(package.__path__[0], f"{suite.replace('-', '_')}.py").read_text()
            text = ast.get_docstring(ast.parse(source)) or ""
            found[f"{package.__name__} {suite}"] = " ".join(text.partition("\n\n")[0].split())
    return found


def page() -> str:
    """The whole page."""
    runs = recorded()
    sections = [_HEAD, _runs(runs), _gates(runs), _never_run(runs)]
    return "\n".join(sections)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def _runs(runs: list[Run]) -> str:
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.gpu, run.versions), []).append(run)
    parts = []
    for (gpu, versions), group in groups.items():
        rows = []
        for run in group:
            verdicts = [held for *_, held in run.gates if held is not None]
            held = f"{sum(verdicts)}/{len(verdicts)}" if verdicts else ""
            rows.append((f"`{run.name}`", run.made_by, run.commit, held))
        machine = "No GPU" if gpu == NO_GPU else gpu
        parts.append(f"{machine}: {versions}.\n\n{_table(_COLUMNS, rows)}")
    return "\n".join(parts)


def _gates(runs: list[Run]) -> str:
    rows = [
        (f"`{run.name}`", rule, found)
        for run in runs
        for rule, found, held in run.gates
        if held is False
    ]
    return "## What did not hold\n\n" + _table(("File", "Rule", "Found"), rows)


def _never_run(runs: list[Run]) -> str:
    on_gpu = [run for run in runs if run.gpu != NO_GPU]
    done = {run.suite for run in on_gpu} | {*WITHOUT_GPU}
    lines = [
        f"- `benchmarks/{suite}`: {text}" for suite, text in suites().items() if suite not in done
    ]
    sglang = {run.meta.get("versions", {}).get("sglang") for run in on_gpu}
    versions = [each for each in SGLANG_VERSIONS if each not in sglang]
    if versions:
        lines.append(f"- SGLang {', '.join(versions)}.")
    gpus = " ".join({run.gpu for run in on_gpu})
    unseen = [
        f"{capability} ({', '.join(names)})"
        for capability, names in ARCHITECTURES.items()
        if not any(name in gpus for name in names)
    ]
    if unseen:
        lines.append(f"- GPUs of compute capability {', '.join(unseen)}.")
    return (
        "## What was never run on a GPU\n\n"
        "Suites, versions of SGLang and GPUs of the wheels' kernels without a file above:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if it is not current"
    )
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not current; run: {COMMAND}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
