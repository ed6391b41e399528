"""`sglang-pat replay`: does pat pay for a workload? The same answer as `advise`, from closer by.

More options of the server, rows of its steps, a report, and SGLang's own prefix cache if asked for.
All input is checked before anything slow is imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_pat.cli import workload_options
from sglang_pat.cli.arguments import LARGEST_SEED, whole_number
from sglang_pat.output_file import OutputError, check_outputs, output_file, write_output
from sglang_pat.support import POLICIES

DESCRIPTION = "does pat pay? The answer of advise with rows, a report, and more options"
_OUTPUTS = ("save", "json", "csv", "html")
_MOST_TOKENS = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the replay itself as the default `run`."""
    workload_options.add_arguments(parser)
    trace = parser.add_argument_group("more of the workload")
    trace.add_argument(
        "--format",
        metavar="NAME",
        help="mooncake, tokens, openai, burstgpt, azure or sglang-dump (default: by the file's "
        "first lines); gzip and zstd are read",
    )
    trace.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    trace.add_argument(
        "--seed",
        type=whole_number(0, LARGEST_SEED),
        metavar="N",
        help="seed of what is generated (default: 0)",
    )
    trace.add_argument(
        "--save", type=output_file, metavar="FILE", help="keep what is generated, as Mooncake JSONL"
    )
    server = parser.add_argument_group("more of the server")
    server.add_argument(
        "--page-size", type=whole_number(1, 1 << 16), default=1, metavar="N",
        help="tokens a page (default: 1)",
    )  # fmt: skip
    server.add_argument(
        "--chunked-prefill-size", type=whole_number(1, _MOST_TOKENS), default=8192, metavar="N",
        help="new tokens of one pass (default: 8192)",
    )  # fmt: skip
    server.add_argument(
        "--context-length", type=whole_number(1, _MOST_TOKENS), metavar="N",
        help="longest request, in tokens (default: the model's own)",
    )  # fmt: skip
    server.add_argument(
        "--tree",
        choices=("own", "sglang"),
        default="own",
        help="the prefix cache: ours, or SGLang's classes, which takes seconds (default: own)",
    )
    output = parser.add_argument_group("more of the answer")
    output.add_argument(
        "--policies",
        default="memory",
        metavar="A,B",
        help=f"packing policies to count, of {', '.join(POLICIES)}; pat takes the first "
        "(default: memory)",
    )
    output.add_argument("--csv", type=output_file, metavar="FILE", help="rows of the steps, as CSV")
    output.add_argument(
        "--html", type=output_file, metavar="FILE", help="a report of one file, with charts"
    )
    output.add_argument(
        "--forest-step",
        type=whole_number(0, 1_000_000_000),
        metavar="N",
        help="keep the forest of this step (default: the one that shares most)",
    )
    parser.set_defaults(run=partial(run, parser=parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Replay and report. Returns the exit status: 0, or 2 for what cannot be done."""
    needed = {"jinja2": arguments.html is not None, "sglang": arguments.tree == "sglang"}
    missing = [name for name, is_needed in needed.items()
               if is_needed and importlib.util.find_spec(name) is None]  # fmt: skip
    if missing:
        extras = ",".join("replay" if name == "jinja2" else name for name in missing)
        print(
            f"sglang-pat replay needs {', '.join(missing)}: pip install '.[{extras}]' in a clone",
            file=sys.stderr,
        )
        return 2
    try:
        return _replay(arguments, _command_line(arguments, parser))
    except (ValueError, OSError) as error:
        print(f"sglang-pat replay: {error}", file=sys.stderr)
        return 2


def _replay(arguments: argparse.Namespace, command: str) -> int:
    _refuse_unused(arguments)
    files = {f"--{name}": getattr(arguments, name) for name in _OUTPUTS}
    check_outputs(files, workload_options.inputs(arguments))
    policies = _policies(arguments.policies)
    workload = workload_options.read(
        arguments,
        seed=arguments.seed or 0,
        open_trace=partial(_open_trace, arguments),
        context_length=arguments.context_length,
        chunked_prefill_size=arguments.chunked_prefill_size,
        page_size=arguments.page_size,
        policies=policies,
        **({"new_tree": _sglang_tree()} if arguments.tree == "sglang" else {}),
    )
    if arguments.save is not None:
        from sglang_pat.workload.formats import write_mooncake

        write_mooncake(arguments.save, workload.requests)
    from sglang_pat.workload.record import Recorder

    recorder = Recorder(arguments.forest_step)
    report = workload.answered(recorder)
    if recorder.forest is None and arguments.forest_step is not None:
        last = f"{recorder.num_steps - 1:,}"
        raise ValueError(f"--forest-step {arguments.forest_step}; the server has steps 0 to {last}")
    workload_options.show(report, arguments.verbose)

    def write_json(path: Path) -> None:
        meta = {"command": command, "sglang_pat": version("sglang-pat"), "tree": arguments.tree}
        found = {**report.as_dict(), **recorder.as_dict(), "meta": meta}
        write_output("--json", path, json.dumps(found, indent=1) + "\n")

    def write_html(path: Path) -> None:
        from sglang_pat.workload.html import write_report

        write_report(report, recorder, command, path)

    writers = {"json": write_json, "csv": recorder.write_csv, "html": write_html}
    return max(_written(name, getattr(arguments, name), write) for name, write in writers.items())


def _written(name: str, path: Path | None, write: Callable[[Path], object]) -> int:
    """Write a file, if it is asked for. One that fails does not cost the others."""
    if path is None:
        return 0
    try:
        write(path)
    except OutputError as error:
        print(f"sglang-pat replay: {error}", file=sys.stderr)
    except OSError as error:
        print(f"sglang-pat replay: --{name} {path}: {error.strerror}", file=sys.stderr)
    else:
        return 0
    return 2


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """ValueError for an option about traces of the other kind."""
    is_file = arguments.trace is not None
    for name in ("seed", "save") if is_file else ("format", "strict"):
        value = getattr(arguments, name)
        if value is not None and value is not False:
            source = arguments.trace or arguments.generate
            raise ValueError(f"--{name} {value} has no effect on {source}: leave it out")


def _policies(text: str) -> tuple[str, ...]:
    policies = tuple(text.split(","))
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"--policies {policy!r}; allowed: {', '.join(POLICIES)}")
    if len(set(policies)) < len(policies):
        raise ValueError(f"--policies {text}: each is named once")
    return policies


def _open_trace(arguments: argparse.Namespace, path: Path) -> Any:
    from sglang_pat.workload.formats import open_trace

    return open_trace(path, arguments.format or "auto", strict=arguments.strict)


def _sglang_tree() -> Any:
    from sglang_pat.sglang.cpu import enable_cpu_engine

    print("Loading SGLang, which takes some seconds ...", file=sys.stderr)
    enable_cpu_engine()
    warnings.simplefilter("ignore")  # of SGLang's imports
    from sglang_pat.sglang.offline.simulated_cache import new_tree

    return new_tree


def _command_line(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command that repeats this replay, without where its results went. For a shell."""
    words = ["sglang-pat", "replay"]
    for name, value in vars(arguments).items():
        if name in ("run", "verbose", *_OUTPUTS) or value == parser.get_default(name):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
