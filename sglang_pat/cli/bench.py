"""`sglang-pat bench`: pat against the server's present attention backend, on this machine's GPUs.

Two starts of SGLang's server and the batches between take two to five minutes. Weights are random
unless `--weights` is given: the time of a token does not depend on them. If it is stopped, what has
been measured is shown and kept.

pat comes second: on a new machine the first start also compiles modules of SGLang's own, and a GPU
that has become warm is no faster.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.cli.arguments import whole_number
from sglang_pat.cli.gpus import Gpu, find_gpus
from sglang_pat.output_file import check_outputs, output_or_stdout, write_output
from sglang_pat.sglang.start.launch_flags import PLUGIN_GROUP, attention_backends, launch_flags
from sglang_pat.workload.models import MODEL_NAMES, config_file, read_whole_config

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sglang_pat.bench.cases import Case
    from sglang_pat.bench.comparison import Compared, Measured

DESCRIPTION = "measure pat against the present attention backend in SGLang's server"
DEFAULT = "default"
TOKENS = 136  # of an answer
_PACKAGES = ("sglang-pat", "sglang", "torch", "flashinfer-python", "sglang-kernel")
_GPU_ARGUMENTS = {"cuda_graph_backend_prefill": "disabled"}  # half of the time of a start
_PLUGINS_WITHOUT_OTHERS = {"pat", "smg-servicer", "smg-zmq"}  # the last two come with SGLang
_OWN_FLAGS = (
    *("--attention-backend", "--decode-attention-backend", "--model-path", "--model", "--device"),
    *("--host", "--port", "--help"),
)
_CPU_ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.95,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    tokens = whole_number(1, 1 << 20)
    parser.add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help=f"the path of a config.json or of its folder, or {', '.join(MODEL_NAMES)}",
    )
    parser.add_argument(
        "--against",
        default=DEFAULT,
        metavar="BACKEND",
        help="a backend of SGLang (default: the one that SGLang chooses)",
    )
    parser.add_argument(
        "--weights", action="store_true", help="load the model's weights (default: random ones)"
    )
    parser.add_argument(
        "--requests",
        type=whole_number(1, 1 << 14),
        default=64,
        metavar="N",
        help="that run together (default: 64)",
    )
    parser.add_argument(
        "--prefix", type=tokens, default=4096, metavar="N", help="shared tokens (default: 4096)"
    )
    parser.add_argument(
        "--private",
        type=tokens,
        default=256,
        metavar="N",
        help="tokens of each request behind the prefix (default: 256)",
    )
    parser.add_argument(
        "--unshared",
        type=tokens,
        default=1024,
        metavar="N",
        help="tokens of each request where nothing is shared (default: 1024)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: only to see that it works, with a tiny model (default: cuda)",
    )
    parser.add_argument(
        "--server-args",
        default="",
        metavar="ARGS",
        help="more arguments of the server, as one text: '--tp 2 --kv-cache-dtype bfloat16'",
    )
    parser.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="everything, as JSON; -: to stdout, and all else to stderr",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print.

    Returns the exit status: 0, 1 if a server failed, 2 for wrong input, 130 if interrupted.
    """
    try:
        label, config = read_whole_config(arguments.model)
        check_outputs({"--json": arguments.json}, [config_file(arguments.model)])
        _check_options(arguments)
    except (ValueError, OSError) as error:
        return _refuse(error)
    gpus = find_gpus()
    if arguments.device == "cuda" and not gpus:
        return _refuse("no NVIDIA GPU that the driver reports; `sglang-pat doctor` says more")
    from sglang_pat.bench import comparison
    from sglang_pat.bench.http_server import RefusedArguments

    measured = {backend: comparison.Measured() for backend in (arguments.against, "pat")}
    failure: str | None = None
    with tempfile.TemporaryDirectory(prefix="sglang-pat-bench-") as folder:
        path = config_file(label).parent if arguments.weights else Path(folder)
        try:
            model = comparison.Model.of(config, path)
            for case in _cases(arguments).values():
                comparison.fit(case, model, {"max_total_num_tokens": sys.maxsize})
        except (ValueError, RuntimeError) as error:
            return _refuse(f"{label}: {error}")
        if not arguments.weights:
            (path / "config.json").write_text(json.dumps(config))
        try:
            _measure(arguments, model, Path(folder), measured)
        except RefusedArguments as error:
            return _refuse(f"--server-args {arguments.server_args!r}: {error}")
        except (RuntimeError, TimeoutError) as error:
            failure = str(error)
        except KeyboardInterrupt:
            _conclude(arguments, gpus, measured, "interrupted")
            return 130
        except SystemExit:  # told to end, by somebody to whom it took too long
            _conclude(arguments, gpus, measured, "told to end")
            raise
    return 0 if _conclude(arguments, gpus, measured, failure) else 1


def _conclude(
    arguments: argparse.Namespace,
    gpus: list[Gpu],
    measured: dict[str, Measured],
    failure: str | None,
) -> bool:
    """Show and keep what has been measured, and tell the failure. Returns whether there is none."""
    from sglang_pat.bench import comparison

    compared: list[Compared] = []
    try:
        compared = comparison.compare(measured["pat"], measured[arguments.against])
    except RuntimeError as error:
        failure = failure or str(error)
    verdict = None
    if compared:
        other = _backend_name(arguments.against, measured[arguments.against].info)
        verdict = comparison.verdict(compared, other)
        console = _console()
        console.print(_table(compared, other))
        console.print(verdict, soft_wrap=True)  # one line in a pipe
    if failure is not None:
        print(f"sglang-pat bench: {failure}", file=sys.stderr)
    if arguments.json is not None:
        result = _as_json(arguments, gpus, measured, compared, verdict, failure)
        write_output("--json", arguments.json, json.dumps(result, indent=1) + "\n")
    return failure is None


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _refuse(error: object) -> int:
    print(f"sglang-pat bench: {error}", file=sys.stderr)
    return 2


def _check_options(arguments: argparse.Namespace) -> None:
    """ValueError for what the servers would refuse, or what would spoil the comparison."""
    if arguments.weights and arguments.model in MODEL_NAMES:
        raise ValueError(f"--weights: {arguments.model} has none; allowed: with a model's folder")
    if importlib.util.find_spec("sglang") is None:
        raise ValueError("SGLang is not installed beside this package; run `sglang-pat doctor`")
    if arguments.against == "pat":
        raise ValueError("--against pat; allowed: another backend of SGLang, or default")
    known = {DEFAULT, *attention_backends()}
    plugins = {plugin.name for plugin in entry_points(group=PLUGIN_GROUP)}
    may_be_more = not plugins <= _PLUGINS_WITHOUT_OTHERS or known == {DEFAULT}
    if arguments.against not in known and not may_be_more:
        raise ValueError(f"--against {arguments.against!r}; allowed: {', '.join(sorted(known))}")
    try:
        words = _flags(arguments)
    except ValueError as error:
        raise ValueError(
            f"--server-args {arguments.server_args!r}: {error}; allowed: words as in a shell"
        ) from None
    _check_flags(words)


def _check_flags(words: Sequence[str]) -> None:
    """ValueError for flags that SGLang does not know, or that the command itself sets."""
    if words and not words[0].startswith("-"):
        raise ValueError(f"--server-args: {words[0]!r} is no flag; allowed: flags of SGLang")
    known = launch_flags()
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        # SGLang takes the beginning of a flag for the flag.
        own = next((own for own in _OWN_FLAGS if own.startswith(flag)), None)
        if own is not None and (flag == own or flag not in known):
            instead = "--against names the other backend" if "backend" in own else "it is set here"
            raise ValueError(f"--server-args must not hold {flag}; {instead}")
        name = flag.replace("--no-", "--", 1)
        if known and not any(each.startswith((flag, name)) for each in known):
            raise ValueError(f"--server-args: {flag!r} is no flag of the installed SGLang")
    for word, following in pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        file = value or following
        if flag == "--config" and not Path(file).is_file():
            raise ValueError(f"--server-args: --config {file}: there is no such file")


def _flags(arguments: argparse.Namespace) -> list[str]:
    """The words of --server-args. ValueError for a quotation without an end."""
    return shlex.split(arguments.server_args)


def _cases(arguments: argparse.Namespace) -> dict[str, Case]:
    from sglang_pat.bench.cases import Case

    requests = arguments.requests
    return {
        "with a shared prefix": Case(requests, arguments.prefix, arguments.private, TOKENS),
        "with nothing shared": Case(requests, 0, arguments.unshared, TOKENS),
        "with one request": Case(1, 0, arguments.unshared, TOKENS),
    }


def _measure(
    arguments: argparse.Namespace, model: Any, folder: Path, measured: dict[str, Measured]
) -> None:
    """Both servers; the first one decides how large the cases are."""
    from sglang_pat.bench import comparison

    given = {
        "skip_tokenizer_init": True,
        "max_running_requests": arguments.requests,
        **({} if arguments.weights else {"load_format": "dummy"}),
        **(_CPU_ARGUMENTS if arguments.device == "cpu" else _GPU_ARGUMENTS),
    }
    first = measured[arguments.against]
    for backend, into in measured.items():
        comparison.measure(
            backend,
            model,
            first.cases or _cases(arguments),
            folder,
            arguments=given,
            flags=_flags(arguments),
            report=_console().print,
            into=into,
            exactly=into is not first,
        )


def _backend_name(asked: str, info: dict[str, Any]) -> str:
    """Name of the decode backend: the one asked for, else SGLang's choice."""
    chosen = info.get("decode_attention_backend") or info.get("attention_backend")
    return asked if asked != DEFAULT or not chosen else f"{chosen} (SGLang's default)"


def _table(compared: list[Compared], other: str) -> Table:
    from rich.table import Table

    table = Table(title="ms per output token: median (quartiles)")
    for column in ("batch", "pat", other, "gain"):
        table.add_column(column, justify="left" if column == "batch" else "right", no_wrap=True)
    for each in compared:
        cells = (
            f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"
            for spread in (each.pat, each.other, each.gain)
        )
        table.add_row(each.case.title, *cells)
    return table


def _as_json(
    arguments: argparse.Namespace,
    gpus: list[Gpu],
    measured: dict[str, Measured],
    compared: list[Compared],
    verdict: str | None,
    failure: str | None,
) -> dict[str, Any]:
    from sglang_pat.bench.decoding import held_up_ms, tpot

    info = ("attention_backend", "decode_attention_backend", "max_total_num_tokens", "pat")
    return {
        "meta": {
            "command": shlex.join(["sglang-pat", *sys.argv[1:]]),
            "gpus": [{"name": gpu.name, "driver": gpu.driver} for gpu in gpus],
            "versions": {package: _version(package) for package in _PACKAGES},
            "model": str(arguments.model),
            "weights": "the model's" if arguments.weights else "random",
            "server_args": arguments.server_args,
            "device": arguments.device,
        },
        "servers": {
            backend: {
                "start_seconds": each.start_seconds,
                **{name: each.info[name] for name in info if name in each.info},
                "tpot_ms": {name: tpot(runs).as_dict() for name, runs in each.runs.items()},
                "held_up_ms": {name: held_up_ms(runs) for name, runs in each.runs.items()},
                # All requests at once, prefixes in the cache, groups one after another.
                "ttft_ms": {
                    name: [run.ttft_ms for run in runs] for name, runs in each.runs.items()
                },
                "job_ms": {name: [run.job_ms for run in runs] for name, runs in each.runs.items()},
                "stats": each.stats,
            }
            for backend, each in measured.items()
        },
        "cases": [each.as_dict(arguments.against) for each in compared],
        "verdict": verdict,
        "failure": failure,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
