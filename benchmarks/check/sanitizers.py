"""Runs the kernels under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.

    python benchmarks/check sanitizers [--tool NAME ...] [--body NAME ...] [--json FILE]

This needs a GPU and compute-sanitizer, from CUDA or from the package nvidia-cuda-sanitizer-api
(`--sanitizer`). Each tool watches the cases of `check sanitizer-grid`, in one process per tool and
body, all at once. A tool that reports anything, or does not finish its cases, fails the check.
memcheck and initcheck also fail if they do not report a planted error.

The tools do not see everything. racecheck checks only shared memory, and so neither the ticket
counters nor the partials. initcheck checks only global memory here. No graph is captured; its
kernels would be the same.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from check.sanitizer_grid import GRID
from common.metadata import metadata
from common.results import write
from common.suites import Refused, add_option
from common.terminal import console, show_failure
from sglang_pat.cli.arguments import folder_path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PLANTED = ("memcheck", "initcheck")  # tools that must find a planted error
KERNELS = ("pack_decode", "merge_partials", "fill_rows", "gather_slots", "write_kv")
# Flags by tool. memcheck must not report failed CUDA calls, which are torch's. Padding keeps
# allocations apart, so that accesses beyond one are found.
_FLAGS = {"memcheck": ("--report-api-errors", "no", "--padding", "4096")}
_PORTS = 49152
_PORTS_EACH = 20
_SHOWN_REPORTS = 8  # most reports in the result
_LONGEST_REPORT = 400
_GRID = (str(Path(__file__).resolve().parent), "sanitizer-grid")

# The oldest usable racecheck. Earlier ones misread mbarriers and report false races, as NVIDIA's
# release notes from 2025.4 to 2026.3 say.
OLDEST_RACECHECK = 2026, 4

_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (.*)$", re.MULTILINE)
_COUNT = re.compile(r"\d+")
_CASES = re.compile(r"^(\d+) of (\d+): ", re.MULTILINE)


@dataclass(frozen=True)
class Watched:
    """A tool and the cases of one body that it watches, or one case with a planted error."""

    tool: str
    body: str
    planted: bool = False

    @property
    def name(self) -> str:
        return f"{self.body}, planted" if self.planted else self.body

    def command(self, sanitizer: str, port: int) -> list[str]:
        filters = [flag for name in KERNELS for flag in ("--kernel-name", f"kns={name}")]
        cases = [sys.executable, *_GRID, "--body", self.body]
        if self.tool == "initcheck":
            cases.append("--uninitialized")
        if self.planted:
            cases.append("--planted")
        return [
            sanitizer,
            *("--tool", self.tool, *_FLAGS.get(self.tool, ())),
            *filters,
            *("--port", str(port), "--launch-timeout", "60"),
            *cases,
        ]


def verdict(
    output: str, *, timed_out: bool, seconds: float, planted: bool = False
) -> dict[str, Any]:
    """Return a tool's result. `failures` has the reasons why it fails the check."""
    summaries = _SUMMARY.findall(output)
    ran, cases = max(((int(a), int(b)) for a, b in _CASES.findall(output)), default=(0, None))
    summary = summaries[0] if summaries else None  # the first; another may be of unprinted reports
    found = _COUNT.search(summary) if summary else None
    failures = []
    if timed_out:
        failures.append("it took too long")
    if found is None:
        failures.append("no summary")
    elif planted and not int(found[0]):
        failures.append("the planted fault is not reported")
    elif not planted and int(found[0]):
        failures.append(f"{found[0]} reports")
    if ran != cases and not planted:
        failures.append(f"only {ran} of {cases or 'the'} cases ran")
    shown = reports(output)
    if len(shown) > _SHOWN_REPORTS:
        shown[_SHOWN_REPORTS:] = [f"{len(shown) - _SHOWN_REPORTS} other reports; --logs keeps them"]
    return {
        "summary": summary,
        "cases": cases,
        "cases_run": ran,
        "seconds": round(seconds, 1),
        "reports": shown,
        "failures": failures,
    }


def reports(output: str) -> list[str]:
    """Return the distinct reports as lines, without threads, addresses and host frames."""
    said = re.findall(r"^=+(?: +(.*))?$", output, re.MULTILINE)
    blocks: list[list[str]] = [[]]
    for line in said:
        if not line:
            blocks.append([])
        elif not re.search(r"COMPUTE-SANITIZER|SUMMARY|Saved host|Host Frame", line):
            blocks[-1].append(line)
    places = re.compile(r"\b(thread|block|[Aa]ddress) (?:\([^)]*\)|0x\w+)")
    texts = (places.sub(r"\1 *", " | ".join(block)) for block in blocks if block)
    return list(dict.fromkeys(text[:_LONGEST_REPORT] for text in texts))


def watch(watched: Watched, sanitizer: str, port: int, seconds: float, log: Path) -> dict[str, Any]:
    """Run a tool, for at most `seconds`."""
    # Each tensor is a separate allocation, and each process has one thread.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            watched.command(sanitizer, port),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        try:
            process.wait(seconds)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace")
    seconds = time.monotonic() - begun
    result = verdict(text, timed_out=timed_out, seconds=seconds, planted=watched.planted)
    if result["failures"] and not result["reports"]:
        result["output"] = text[-1500:]
    return result


def version_of(sanitizer: str, tools: list[str]) -> str:
    """Return the version of compute-sanitizer. Refuse one that is too old for one of the tools."""
    output = subprocess.run(
        [sanitizer, "--version"], capture_output=True, text=True, check=True
    ).stdout
    version = next(iter(re.findall(r"Version .*", output)), output.strip())
    number = re.match(r"Version (\d+)\.(\d+)", version)
    if "racecheck" in tools and (
        number is None or tuple(map(int, number.groups())) < OLDEST_RACECHECK
    ):
        oldest = ".".join(map(str, OLDEST_RACECHECK))
        raise Refused(
            f"racecheck needs compute-sanitizer {oldest} or newer (package "
            f"nvidia-cuda-sanitizer-api, option --sanitizer), got {version[:100]!r}"
        )
    return version


def check(
    tools: list[str], bodies: list[str], sanitizer: str, seconds: float, logs: Path
) -> dict[str, Any]:
    """Run every tool with every body. Compile the kernels first."""
    version = version_of(sanitizer, tools)
    subprocess.run([sys.executable, *_GRID, "--compile", "--body", *bodies], check=True)
    jobs = [Watched(tool, body) for tool in tools for body in bodies]
    jobs += [Watched(tool, bodies[0], planted=True) for tool in tools if tool in PLANTED]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(
            pool.map(
                lambda number, job: watch(
                    job,
                    sanitizer,
                    _PORTS + number * _PORTS_EACH,
                    seconds,
                    logs / f"{job.tool}-{job.name.replace(' ', '-')}.txt",
                ),
                range(len(jobs)),
                jobs,
            )
        )
    return {
        "sanitizer": version,
        "commands": {
            tool: _shown(Watched(tool, bodies[0]).command(sanitizer, _PORTS)) for tool in tools
        },
        "tools": {
            tool: {
                job.name: result
                for job, result in zip(jobs, results, strict=True)
                if job.tool == tool
            }
            for tool in tools
        },
        "failures": [
            f"{job.tool}, {job.name}: {'; '.join(result['failures'])}"
            for job, result in zip(jobs, results, strict=True)
            if result["failures"]
        ],
    }


def _shown(command: list[str]) -> str:
    """Return a command without this machine's folders."""
    names = {sys.executable: "python", _GRID[0]: "benchmarks/check"}
    return " ".join(["compute-sanitizer", *(names.get(part, part) for part in command[1:])])


def show(tools: dict[str, Any]) -> None:
    table = Table("tool", "body", "cases", "seconds", "summary")
    for tool, by_body in tools.items():
        for body, result in by_body.items():
            ran = f"{result['cases_run']} of {result['cases'] or '?'}"
            table.add_row(tool, body, ran, str(result["seconds"]), result["summary"] or "none")
            for text in result["reports"]:
                console.print(f"{tool}, {body}: {text}", markup=False)
            if "output" in result:
                console.print(f"{tool}, {body}: {result['output']}", markup=False)
    console.print(table)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tool", choices=TOOLS, nargs="*", default=[*TOOLS], help="default: all")
    parser.add_argument("--body", choices=GRID, nargs="*", default=[*GRID], help="default: all")
    parser.add_argument(
        "--sanitizer",
        metavar="FILE",
        default=shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer",
        help="the program compute-sanitizer; default: that of the path, or of CUDA (%(default)s)",
    )
    add_option(parser, "--seconds", default=600, help="seconds that a tool may take")
    parser.add_argument(
        "--logs", type=folder_path, metavar="FOLDER", help="keep what the tools print"
    )
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if shutil.which(args.sanitizer) is None:
        raise Refused(f"--sanitizer must be compute-sanitizer, got {args.sanitizer!r}")
    with tempfile.TemporaryDirectory() as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        result = check(args.tool, args.body, args.sanitizer, args.seconds, logs)
    write(args.json, {"meta": metadata(), **result})
    show(result["tools"])
    for failure in result["failures"]:
        show_failure(failure)
    console.print(f"{result['sanitizer']}: {'FAILED' if result['failures'] else 'passed'}")
    return 1 if result["failures"] else 0
