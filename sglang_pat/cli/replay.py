"""`sglang-pat replay`: its options, its progress, its signals, and where its results go.

The work is done by `replay/session.py`. All input is checked before SGLang is imported, which takes
many seconds. Libraries that only this command needs are imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_pat.cli.arguments import LARGEST_SEED, real_number, whole_number
from sglang_pat.output_file import (
    OutputError,
    check_outputs,
    output_file,
    output_or_stdout,
    write_output,
)
from sglang_pat.replay.options import FIGURE_10, PRESETS
from sglang_pat.support import POLICIES
from sglang_pat.workload.models import DEFAULT_GPU, DEFAULT_MODEL, GPUS, MODEL_NAMES

DESCRIPTION = "replay a trace of requests through SGLang's radix tree and the pack scheduler"
_USAGE = "sglang-pat replay (TRACE | --generate NAME | --preset NAME | --compare A B) [options]"
_EPILOG = (
    "It runs without a GPU and without a model: the radix tree and the scheduling are SGLang's and "
    "ours, the clock is simulated. Ctrl-C and SIGTERM end the replay and write what there is."
)
_NEEDED = ("sglang", "rich", "msgspec")
_NEEDED_FOR_HTML = ("plotly", "jinja2")

# In the order of precedence: the command line, the preset, these.
_DEFAULTS: dict[str, Any] = {
    "format": "auto",
    "model": DEFAULT_MODEL,
    "gpu": DEFAULT_GPU,
    "tp": 1,
    "kv_pool_gb": 40.0,
    "page_size": 1,
    "max_batch": 128,
    "prefill_tokens": 8192,
    "policies": "memory,paper,compute,per-node",
    "sample": 1,
    "max_rows": 2048,
    "time_scale": 1.0,
    "seed": 0,
    "device": "cpu",
}
_OUTPUTS = ("save", "json", "csv", "html")
_GENERATED_REQUESTS = 2000
_SAMPLE_ON_GPU = 256  # a sampled step takes some tenths of a second there
_MOST_REQUESTS = 10_000_000
_MOST_TOKENS = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the replay itself as the default `run`."""
    parser.usage = _USAGE
    parser.epilog = _EPILOG
    tokens = whole_number(1, _MOST_TOKENS)
    trace = parser.add_argument_group("what is replayed")
    trace.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a file of requests")
    trace.add_argument(
        "--format",
        metavar="NAME",
        help="mooncake, tokens, openai, burstgpt, azure or sglang-dump (default: by the file's "
        "first lines); gzip and zstd are read",
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
    trace.add_argument(
        "--rate",
        type=real_number(1e-3, 1e6, or_inf=True),
        help="generated requests a second, or inf",
    )
    trace.add_argument(
        "--seed", type=whole_number(0, LARGEST_SEED), help="of the generator (default: 0)"
    )
    trace.add_argument(
        "--limit",
        type=whole_number(1, _MOST_REQUESTS),
        metavar="N",
        help="only the first N requests",
    )
    trace.add_argument(
        "--time-scale",
        type=real_number(1e-3, 1e6),
        metavar="X",
        help="requests arrive X times as fast",
    )
    trace.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    trace.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="; ".join(f"{name}: {preset.description}" for name, preset in PRESETS.items()),
    )
    server = parser.add_argument_group("the server that is simulated")
    server.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(MODEL_NAMES)} or the path of a config.json (default: {DEFAULT_MODEL})",
    )
    server.add_argument(
        "--context-length", type=tokens, metavar="N", help="tokens (default: the model's own)"
    )
    server.add_argument(
        "--gpu", type=str.upper, choices=tuple(GPUS), help=f"GPU type (default: {DEFAULT_GPU})"
    )
    server.add_argument(
        "--tp",
        type=whole_number(1, 1024),
        metavar="N",
        help="GPUs that share the model (default: 1)",
    )
    pool = server.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-pool-gb",
        type=real_number(1e-3, 1e6),
        metavar="GB",
        help="KV pool of one GPU (default: 40)",
    )
    pool.add_argument("--kv-tokens", type=tokens, metavar="N", help="the same, in tokens")
    server.add_argument(
        "--page-size", type=whole_number(1, 1 << 16), metavar="N", help="tokens a page (default: 1)"
    )
    server.add_argument(
        "--max-batch",
        type=whole_number(1, 1 << 20),
        metavar="N",
        help="running requests at most (default: 128)",
    )
    server.add_argument(
        "--prefill-tokens",
        type=tokens,
        metavar="N",
        help="new tokens of one prefill (default: 8192)",
    )
    output = parser.add_argument_group("what is counted, and where it goes")
    output.add_argument(
        "--policies",
        metavar="A,B",
        help=f"of {', '.join(POLICIES)}; the first is timed (default: {_DEFAULTS['policies']})",
    )
    output.add_argument(
        "--sample",
        type=whole_number(1, 1_000_000),
        metavar="N",
        help="a row every N steps (default: 1)",
    )
    output.add_argument(
        "--max-rows",
        type=whole_number(0, 1_000_000),
        metavar="N",
        help="thin rows out beyond N (default: 2048; 0: none)",
    )
    output.add_argument(
        "--forest-step",
        type=whole_number(0, 1_000_000_000),
        metavar="N",
        help="keep the forest of this step",
    )
    output.add_argument("--capacity", action="store_true", help="also study how many requests fit")
    output.add_argument(
        "--device", choices=("cpu", "cuda"), help="cuda: also time kernels on the sampled steps"
    )
    output.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="everything, as JSON; -: to stdout, and all else to stderr",
    )
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
    """Replay and report. Returns the exit status: 0, 2 for what cannot be done, 128 plus the
    number of the signal if interrupted."""
    needed = _NEEDED if arguments.html is None else _NEEDED + _NEEDED_FOR_HTML
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"sglang-pat replay needs {', '.join(missing)}: "
            "pip install '.[sglang,replay]' in a clone",
            file=sys.stderr,
        )
        return 2
    with _Interruption() as interruption:
        try:
            if arguments.compare is not None:
                return _compare(arguments)
            return _replay(arguments, interruption)
        except (ValueError, OSError, RuntimeError) as error:
            print(f"sglang-pat replay: {error}", file=sys.stderr)
            return 2


# --- values of options ---


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
    if is_file and "save" in given:
        raise ValueError(f"--save {given['save']}: only what --generate makes can be saved")


def _check_files(settings: dict[str, Any]) -> None:
    """ValueError if an output cannot be written, is an input, or is another output."""
    from sglang_pat.workload.models import config_file
    from sglang_pat.workload.request_dump import dump_files

    inputs = [config_file(settings["model"])]
    trace = settings["trace"]
    if trace is not None:
        inputs += dump_files(trace) if trace.is_dir() else [trace]
    check_outputs({f"--{name}": settings[name] for name in _OUTPUTS}, inputs)


def _options(settings: dict[str, Any]) -> Any:
    from sglang_pat.replay.options import ReplayOptions
    from sglang_pat.workload.models import model_shape

    model = model_shape(settings["model"]).on_one_of(settings["tp"])
    if settings["context_length"] is not None:
        model = replace(model, context_length=settings["context_length"])
    kv_tokens = settings["kv_tokens"]
    if kv_tokens is None:
        kv_tokens = int(settings["kv_pool_gb"] * 1e9) // model.kv_bytes_per_token
        if kv_tokens < 2 * settings["page_size"]:
            raise ValueError(
                f"--kv-pool-gb {settings['kv_pool_gb']:g} holds {kv_tokens} tokens of "
                f"{model.name}; two pages, {2 * settings['page_size']} tokens, are needed at least"
            )
    return ReplayOptions(
        model=model,
        gpu=GPUS[settings["gpu"]],
        tp=settings["tp"],
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


def _command_line(settings: dict[str, Any]) -> str:
    """The command that repeats this replay, without where its results went. For a shell."""
    words = ["sglang-pat", "replay"]
    if settings["trace"] is not None:
        words.append(str(settings["trace"]))
    for name, value in settings.items():
        is_default = value is None or value is False or value == _DEFAULTS.get(name)
        if is_default or name in ("trace", "run", "preset", "compare", *_OUTPUTS):
            continue
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


# --- the replay ---


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from sglang_pat.replay.compare import print_comparison

    for name in ("trace", "generate", "preset", *_OUTPUTS):
        value = getattr(arguments, name)
        if value is not None:
            option = "TRACE" if name == "trace" else f"--{name}"
            raise ValueError(f"{option} {value} has no effect with --compare: leave it out")
    left, right = arguments.compare
    print_comparison(left, right, Console())
    return 0


def _replay(arguments: argparse.Namespace, interruption: _Interruption) -> int:
    from rich.console import Console

    from sglang_pat.replay.report_text import print_result
    from sglang_pat.sglang.cpu import enable_cpu_engine

    settings = _settings(arguments)
    options = _options(settings)
    _check_files(settings)
    trace = _with_first_request_read(_open_trace(settings))
    if arguments.save is not None:
        from sglang_pat.workload.formats import write_mooncake

        write_mooncake(arguments.save, _open_trace(settings).stream)
    console = Console()
    console.print("Loading SGLang, which takes some seconds ...", highlight=False)
    enable_cpu_engine()
    warnings.simplefilter("ignore")  # of SGLang's imports

    from sglang_pat.replay.session import Replay

    measure = None
    if settings["device"] == "cuda":
        from sglang_pat.replay.gpu import KernelTimes

        measure = KernelTimes(options.model, options.kv_tokens)
    replay = Replay(trace, options, measure=measure)
    interruption.ends(replay.stop)
    _run_with_progress(replay, trace.requests, options.limit, console)
    result = replay.result()
    if settings["capacity"] and interruption.signal is None:
        _add_capacity(result, settings, options, interruption)
    result["meta"]["interrupted"] = interruption.signal is not None
    result["meta"]["command"] = _command_line(settings)
    print_result(result, console)
    status = _write(result, settings)
    return status if interruption.signal is None else 128 + interruption.signal


def _open_trace(settings: dict[str, Any]) -> Any:
    from sglang_pat.workload.formats import open_trace
    from sglang_pat.workload.generate import WORKLOADS, generate

    if settings["trace"] is not None:
        return open_trace(settings["trace"], settings["format"], strict=settings["strict"])
    if settings["generate"] == FIGURE_10:
        from sglang_pat.replay.pat_trees import figure_10_trace

        return figure_10_trace()
    if settings["generate"] not in WORKLOADS:
        allowed = ", ".join((*WORKLOADS, FIGURE_10))
        raise ValueError(f"workload {settings['generate']!r}; allowed: {allowed}")
    requests = settings["limit"] or _GENERATED_REQUESTS
    return generate(
        settings["generate"], requests=requests, seed=settings["seed"], rate=settings["rate"]
    )


def _with_first_request_read(trace: Any) -> Any:
    """The trace. A file without a single request is refused now."""
    stream = iter(trace.stream)
    return replace(trace, stream=chain([next(stream)], stream))


def _add_capacity(
    result: Any, settings: dict[str, Any], options: Any, interruption: _Interruption
) -> None:
    """Study the capacity, unless that is interrupted."""
    from sglang_pat.replay.capacity import capacity

    def requests() -> Iterator[Any]:
        for request in islice(_open_trace(settings).stream, options.limit):
            if interruption.signal is not None:
                return
            yield request

    pool_bytes = options.kv_tokens * options.model.kv_bytes_per_token
    study = capacity(requests(), options.model, pool_bytes)
    if interruption.signal is None:
        result["capacity"] = study.as_dict()


def _write(result: Any, settings: dict[str, Any]) -> int:
    """Write every file that was asked for. A file that fails does not cost the others. Returns
    the exit status."""
    from sglang_pat.replay.result import write_csv

    def write_html(path: Path) -> None:
        from sglang_pat.replay.report_html import write_report

        write_report(result, path)

    writers: dict[str, Callable[[Path], object]] = {
        "json": lambda path: write_output("--json", path, json.dumps(result, indent=1) + "\n"),
        "csv": lambda path: write_csv(result["steps"], path),
        "html": write_html,
    }
    status = 0
    for name, write in writers.items():
        path = settings[name]
        if path is not None:
            try:
                write(path)
            except OutputError as error:
                print(f"sglang-pat replay: {error}", file=sys.stderr)
                status = 2
            except OSError as error:
                print(f"sglang-pat replay: --{name} {path}: {error.strerror}", file=sys.stderr)
                status = 2
    return status


class _Interruption(AbstractContextManager["_Interruption"]):
    """SIGINT (Ctrl-C) and SIGTERM while the command runs.

    Before the replay has begun they end the process: an import that takes many seconds cannot be
    left in another way without a traceback. Then the first one ends the replay after its step, and
    what there is is written; a second one acts as ever. signal: the number of the first one.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._stop: Callable[[], object] | None = None
        self._previous: dict[int, Any] = {}

    def ends(self, stop: Callable[[], object]) -> None:
        """From now on, a signal calls `stop`."""
        self._stop = stop

    def __enter__(self) -> _Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._stop is None:
            print("sglang-pat replay: interrupted before the first step", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + number)
        self.signal = number
        self._stop()
        self.__exit__()


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
