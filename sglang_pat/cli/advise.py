"""`sglang-pat advise`: estimate whether pat would serve a workload faster.

The command needs no GPU, and needs SGLang only for `--tree sglang`. It checks all input before slow
imports.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from sglang_pat.cli import workload_options
from sglang_pat.cli.arguments import fail
from sglang_pat.output_file import OutputError, check_outputs, write_output, written

DESCRIPTION = "does pat pay? By a model's config.json and a log of requests, without a GPU"
_OUTPUTS = ("save", "json", "csv", "html")
_QUIET_SECONDS, _EVERY_SECONDS = 3, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and register `run` as the function to call."""
    workload_options.add_arguments(parser)
    parser.set_defaults(run=partial(run, parser=parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Estimate and report. Return the exit status: 0, or 2 for wrong input."""
    needed = {"jinja2": arguments.html is not None, "sglang": arguments.tree == "sglang"}
    missing = [name for name, is_needed in needed.items()
               if is_needed and importlib.util.find_spec(name) is None]  # fmt: skip
    if missing:
        extras = ",".join("replay" if name == "jinja2" else name for name in missing)
        needs = f"it needs {', '.join(missing)}: pip install '.[{extras}]' in a clone"
        return fail("advise", needs)
    try:
        return _advise(arguments, _command_line(arguments, parser))
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return fail("advise", error)


def _advise(arguments: argparse.Namespace, command: str) -> int:
    files = {f"--{name}": getattr(arguments, name) for name in _OUTPUTS}
    check_outputs(files, workload_options.inputs(arguments))
    progress = Progress()
    workload = workload_options.read(arguments, progress)
    if arguments.save is not None:
        from sglang_pat.workload.mooncake import write_mooncake

        with written("--save", arguments.save) as draft:
            write_mooncake(draft, workload.requests)
    from sglang_pat.workload.record import Recorder

    recorder = Recorder(arguments.forest_step)
    report = workload.answered(recorder, progress)
    if recorder.forest is None and arguments.forest_step is not None:
        last = f"{recorder.num_steps - 1:,}"
        raise ValueError(f"--forest-step {arguments.forest_step}; the server has steps 0 to {last}")
    print("\n".join(report.lines() + (report.details() if arguments.verbose else [])))

    def write_json(path: Path) -> None:
        meta = {"command": command, "sglang_pat": version("sglang-pat"), "tree": arguments.tree}
        found = {**report.as_dict(), **recorder.as_dict(), "meta": meta}
        write_output("--json", path, json.dumps(found, indent=1) + "\n")

    def write_csv(path: Path) -> None:
        with written("--csv", path) as draft:
            recorder.write_csv(draft)

    def write_html(path: Path) -> None:
        from sglang_pat.workload.html import write_report

        with written("--html", path) as draft:
            write_report(report, recorder, command, draft)

    writers = {"json": write_json, "csv": write_csv, "html": write_html}
    return max(_wrote(getattr(arguments, name), write) for name, write in writers.items())


def _wrote(path: Path | None, write: Callable[[Path], object]) -> int:
    """Call `write(path)` unless `path` is None. Print an OutputError. Return the exit status."""
    if path is not None:
        try:
            write(path)
        except OutputError as error:
            return fail("", error)
    return 0


class Progress:
    """Reports progress on stderr if the work takes more than a few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _QUIET_SECONDS

    def __call__(self, what: str, done: int, of: int) -> None:
        """Print how many requests are done, unless a line was printed a few seconds ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            print(f"{what}: {done:,} of {of:,} requests", file=sys.stderr, flush=True)


def _command_line(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return a shell command that repeats this run, without the options for output files."""
    words = ["sglang-pat", "advise"]
    for name, value in vars(arguments).items():
        if name in ("run", "verbose", *_OUTPUTS) or value == parser.get_default(name):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
