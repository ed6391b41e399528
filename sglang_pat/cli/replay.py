"""`sglang-pat replay`: its options, its progress, and where its results go.

What a user sees of the replay. The work is done by `session.py`; libraries that only this command
needs are imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_pat.output_file import output_file
from sglang_pat.replay.presets import FIGURE_10, PRESETS
from sglang_pat.support import POLICIES

DESCRIPTION = "replay a trace of requests through SGLang's radix tree and the pack scheduler"
_EPILOG = (
    "Without a GPU and without a model: the radix tree and the scheduling are SGLang's and ours, "
    "the clock is simulated. Ctrl-C ends the replay and writes what there is."
)
_NEEDED = ("sglang", "rich", "msgspec")
_NEEDED_FOR_HTML = ("plotly", "jinja2")

# In the order of precedence: the command line, the preset, these.
_DEFAULTS: dict[str, Any] = {
    "format": "auto",
    "model": "llama-3-8b",
    "kv_pool_gb": 40.0,
    "page_size": 1,
    "max_batch": 128,
    "prefill_tokens": 8192,
    "policies": "memory,paper,compute,per-node",
    "sample": 1,
    "max_rows": 2048,
    "time_scale": 1.0,
    "seed": 0,
}
_GENERATED_REQUESTS = 2000
_SAMPLE_ON_GPU = 256  # a sampled step takes some tenths of a second there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the replay itself as the default `run`."""
    parser.epilog = _EPILOG
    trace = parser.add_argument_group("what is replayed")
    trace.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a file of requests")
    trace.add_argument(
        "--format",
        metavar="NAME",
        help="mooncake, burstgpt, sglang-dump or tokens (default: by the file's first lines)",
    )
    trace.add_argument(
        "--generate",
        metavar="NAME",
        help="instead of a file: conversation, toolagent, few-shot, multi-chain, multi-document, "
        f"rl-rollout, no-sharing or {FIGURE_10}",
    )
    trace.add_argument(
        "--save", type=output_file, metavar="FILE", help="keep what is generated, as Mooncake JSONL"
    )
    trace.add_argument("--rate", type=float, help="generated requests a second, or inf")
    trace.add_argument("--seed", type=int, help="of the generator (default: 0)")
    trace.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    trace.add_argument("--time-scale", type=float, metavar="X", help="arrive X times as fast")
    trace.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    trace.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="; ".join(f"{name}: {preset.description}" for name, preset in PRESETS.items()),
    )
    server = parser.add_argument_group("the server that is simulated")
    server.add_argument("--model", metavar="NAME", help="llama-3-8b, qwen3-8b or a config.json")
    pool = server.add_mutually_exclusive_group()
    pool.add_argument("--kv-pool-gb", type=float, metavar="GB", help="KV pool (default: 40)")
    pool.add_argument("--kv-tokens", type=int, metavar="N", help="the same, in tokens")
    server.add_argument("--page-size", type=int, metavar="N", help="tokens a page (default: 1)")
    server.add_argument("--max-batch", type=int, metavar="N", help="running requests at most")
    server.add_argument(
        "--prefill-tokens", type=int, metavar="N", help="new tokens of one prefill (default: 8192)"
    )
    output = parser.add_argument_group("what is counted, and where it goes")
    output.add_argument(
        "--policies",
        metavar="A,B",
        help=f"of {', '.join(POLICIES)}; the first is timed (default: {_DEFAULTS['policies']})",
    )
    output.add_argument("--sample", type=int, metavar="N", help="a row every N steps (default: 1)")
    output.add_argument(
        "--max-rows", type=int, metavar="N", help="thin rows out beyond N (default: 2048; 0: none)"
    )
    output.add_argument("--forest-step", type=int, metavar="N", help="keep the forest of this step")
    output.add_argument("--capacity", action="store_true", help="also study how many requests fit")
    output.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: also time kernels on the sampled steps",
    )
    output.add_argument("--json", type=output_file, metavar="FILE", help="everything, as JSON")
    output.add_argument("--csv", type=output_file, metavar="FILE", help="the sampled steps, as CSV")
    output.add_argument("--html", type=output_file, metavar="FILE", help="a report with plots")
    output.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="replay nothing; put two results side by side",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay, report. Returns the exit status: 0, 2 for what cannot be done, 130 interrupted."""
    needed = _NEEDED if arguments.html is None else _NEEDED + _NEEDED_FOR_HTML
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"sglang-pat replay needs {', '.join(missing)}: "
            "pip install '.[sglang,replay]' in a clone",
            file=sys.stderr,
        )
        return 2
    try:
        if arguments.compare is not None:
            return _compare(*arguments.compare)
        return _replay(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"sglang-pat replay: {error}", file=sys.stderr)
        return 2


def _compare(left: Path, right: Path) -> int:
    from rich.console import Console

    from sglang_pat.replay.compare import print_comparison

    print_comparison(left, right, Console())
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_pat.replay.step_csv import write_csv
    from sglang_pat.replay.tables import print_result
    from sglang_pat.sglang.cpu import enable_cpu_engine

    settings = _settings(arguments)
    options = _options(settings)
    trace = _open_trace(settings)
    if arguments.save is not None:
        _save(arguments.save, settings)
    enable_cpu_engine()
    warnings.simplefilter("ignore")  # of SGLang's imports

    from sglang_pat.replay.session import Replay

    measure = None
    if arguments.device == "cuda":
        from sglang_pat.replay.gpu import KernelTimes

        measure = KernelTimes(options.model, options.kv_tokens)
    replay = Replay(trace, options, measure=measure)
    console = Console()
    with _interruptible(replay):
        _run_with_progress(replay, trace.requests, options.limit, console)
    result = replay.result()
    interrupted = result["meta"]["interrupted"]
    result["meta"]["command"] = _command_line(settings)
    if settings["capacity"] and not interrupted:
        from sglang_pat.replay.capacity import capacity

        pool_bytes = options.kv_tokens * options.model.kv_bytes_per_token
        requests = _limited(_open_trace(settings).stream, options.limit)
        result["capacity"] = capacity(requests, options.model, pool_bytes).as_dict()
    print_result(result, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.csv is not None:
        write_csv(result["steps"], arguments.csv)
    if arguments.html is not None:
        from sglang_pat.replay.report import write_report

        write_report(result, arguments.html)
    return 130 if interrupted else 0


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every option: as given, else as the preset says, else its default."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    preset = dict(PRESETS[arguments.preset].options) if arguments.preset else {}
    if "kv_pool_gb" in given:
        preset.pop("kv_tokens", None)
    if "trace" in given:
        if "generate" in given:
            raise ValueError("give a TRACE or --generate NAME, not both")
        preset.pop("generate", None)
    if arguments.device == "cuda":
        preset.setdefault("sample", _SAMPLE_ON_GPU)
    settings = dict.fromkeys(vars(arguments)) | _DEFAULTS | preset | given
    if settings["trace"] is None and settings["generate"] is None:
        raise ValueError("what is to be replayed? give a TRACE, --generate NAME or --preset NAME")
    _refuse_unused(given, settings)
    return settings


def _refuse_unused(given: dict[str, Any], settings: dict[str, Any]) -> None:
    """ValueError for an option about traces of another kind than the one that is replayed."""
    is_file = settings["trace"] is not None
    unused: tuple[str, ...] = () if is_file else ("format", "strict")
    if is_file or settings["generate"] == FIGURE_10:
        unused += ("rate", "seed")
    for name in unused:
        if given.get(name, False) is not False:
            replayed = settings["trace"] or settings["generate"]
            raise ValueError(f"--{name} {given[name]} has no effect on {replayed}: leave it out")


def _options(settings: dict[str, Any]) -> Any:
    from sglang_pat.replay.models import model_shape
    from sglang_pat.replay.options import ReplayOptions

    model = model_shape(settings["model"])
    kv_tokens = settings["kv_tokens"]
    if kv_tokens is None:
        kv_tokens = int(settings["kv_pool_gb"] * 1e9) // model.kv_bytes_per_token
    return ReplayOptions(
        model=model,
        kv_tokens=kv_tokens,
        page_size=settings["page_size"],
        max_batch=settings["max_batch"],
        prefill_tokens=settings["prefill_tokens"],
        policies=tuple(settings["policies"].split(",")),
        sample=settings["sample"],
        max_rows=settings["max_rows"],
        time_scale=settings["time_scale"],
        limit=settings["limit"],
        seed=settings["seed"],
        forest_step=settings["forest_step"],
    )


def _open_trace(settings: dict[str, Any]) -> Any:
    from sglang_pat.replay.generators import WORKLOADS, generate
    from sglang_pat.replay.pat_trees import figure_10_trace
    from sglang_pat.replay.readers import open_trace

    if settings["trace"] is not None:
        return open_trace(settings["trace"], settings["format"], strict=settings["strict"])
    if settings["generate"] == FIGURE_10:
        return figure_10_trace()
    if settings["generate"] not in WORKLOADS:
        allowed = ", ".join((*WORKLOADS, FIGURE_10))
        raise ValueError(f"workload {settings['generate']!r}; allowed: {allowed}")
    requests = settings["limit"] or _GENERATED_REQUESTS
    return generate(
        settings["generate"], requests=requests, seed=settings["seed"], rate=settings["rate"]
    )


def _save(path: Path, settings: dict[str, Any]) -> None:
    from sglang_pat.replay.mooncake import write_mooncake

    if settings["trace"] is not None:
        raise ValueError(f"--save {path}: only what --generate makes can be saved")
    write_mooncake(path, _open_trace(settings).stream)


def _limited(stream: Any, limit: int | None) -> Iterator[Any]:
    from itertools import islice

    return islice(stream, limit)


def _command_line(settings: dict[str, Any]) -> str:
    """The command that repeats this replay, without where its results went."""
    words = ["sglang-pat", "replay"]
    if settings["trace"] is not None:
        words.append(str(settings["trace"]))
    for name, value in settings.items():
        is_default = value is None or value is False or value == _DEFAULTS.get(name)
        if is_default or name in (
            "trace",
            "run",
            "json",
            "csv",
            "html",
            "save",
            "preset",
            "compare",
        ):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return " ".join(words)


@contextmanager
def _interruptible(replay: Any) -> Iterator[None]:
    """Ctrl-C ends the replay after its step; a second one is as ever."""

    def stop(*_: object) -> None:
        replay.stop()
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _run_with_progress(replay: Any, requests: int | None, limit: int | None, console: Any) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    known = [count for count in (requests, limit) if count is not None]
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=min(known, default=None), rate="")

        def on_progress() -> None:
            seconds = progress.tasks[0].elapsed or 0
            rate = f"{replay.steps_done / seconds:,.0f} steps/s" if seconds else ""
            progress.update(task, completed=replay.requests_done, rate=rate)

        replay.run(on_progress)
