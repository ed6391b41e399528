"""`sglang-pat bench`: compare pat with the current attention backend, on this machine's GPUs.

The command takes two to five minutes: it starts SGLang's server twice and sends batches of requests
to both servers. Weights are random unless `--weights` is given, because the time per token does not
depend on their values. If the command is stopped, it shows and keeps what it has measured.

The server with pat starts second, because on a new machine the first start also compiles modules of
SGLang. A warm GPU is not faster, so this order gives pat no advantage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.cli.arguments import bounded, whole_number
from sglang_pat.cli.gpus import Gpu
from sglang_pat.cli.served_model import check_config
from sglang_pat.cli.server_options import (
    CPU_ARGUMENTS,
    GPU_ARGUMENTS,
    add_server_options,
    backend_name,
    check_server_options,
    new_console,
    run_metadata,
    server_flags,
    usable_gpus,
)
from sglang_pat.output_file import check_outputs, write_output
from sglang_pat.workload.models import MODEL_NAMES, MODELS, config_file, naming, read_whole_config

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_pat.bench.cases import Case
    from sglang_pat.bench.comparison import Compared, Measured

DESCRIPTION = "measure pat against the present attention backend in SGLang's server"
TOKENS = 136  # tokens of an answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and register `run` as the function to call."""
    tokens = whole_number(1, 1 << 20)
    parser.add_argument("--model", required=True, metavar="CONFIG", help=MODELS)
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
        help="tokens of each request after the prefix (default: 256)",
    )
    parser.add_argument(
        "--unshared",
        type=tokens,
        default=1024,
        metavar="N",
        help="tokens of each request where nothing is shared (default: 1024)",
    )
    add_server_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print.

    Returns the exit status: 0, 1 if a server failed, 2 for wrong input, 130 if interrupted.
    """
    try:
        label, config = read_whole_config(arguments.model)
        check_outputs({"--json": arguments.json}, [config_file(arguments.model)])
        with naming(label):
            check_config(config, arguments)
        _check_options(arguments)
        gpus = usable_gpus(arguments)
    except (ValueError, OSError) as error:
        return _refuse(error)
    from sglang_pat.bench import comparison
    from sglang_pat.bench.http_server import RefusedArguments

    measured = {backend: comparison.Measured() for backend in (arguments.against, "pat")}
    failure: str | None = None
    with tempfile.TemporaryDirectory(prefix="sglang-pat-bench-") as folder:
        path = config_file(label).parent if arguments.weights else Path(folder)
        try:
            model = comparison.ComparedModel.of(config, path)
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
        except SystemExit:  # on SIGTERM, e.g. after a time limit
            _conclude(arguments, gpus, measured, "told to end")
            raise
    return 0 if _conclude(arguments, gpus, measured, failure) else 1


def _conclude(
    arguments: argparse.Namespace,
    gpus: list[Gpu],
    measured: dict[str, Measured],
    failure: str | None,
) -> bool:
    """Print the results and the failure, if any, and write both to --json.

    Returns True if there is no failure.
    """
    from sglang_pat.bench import comparison

    compared: list[Compared] = []
    try:
        compared = comparison.compare(measured["pat"], measured[arguments.against])
    except RuntimeError as error:
        failure = failure or str(error)
    verdict = None
    if compared:
        other = backend_name(arguments.against, measured[arguments.against].info)
        verdict = comparison.verdict(compared, other)
        console = new_console()
        console.print(_table(compared, other))
        console.print(verdict, soft_wrap=True)  # else rich would break the line in a pipe
    if failure is not None:
        print(f"sglang-pat bench: {failure}", file=sys.stderr)
    if arguments.json is not None:
        result = _as_json(arguments, gpus, measured, compared, verdict, failure)
        write_output("--json", arguments.json, json.dumps(result, indent=1) + "\n")
    return failure is None


def _refuse(error: object) -> int:
    print(f"sglang-pat bench: {bounded(error)}", file=sys.stderr)
    return 2


def _check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for options that servers refuse or that make the comparison invalid."""
    if arguments.weights and arguments.model in MODEL_NAMES:
        raise ValueError(f"--weights: {arguments.model} has none; allowed: with a model's folder")
    check_server_options(arguments)


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
    """Measure both servers. The cases are fitted to the first server; both get these cases."""
    from sglang_pat.bench import comparison

    given = {
        "skip_tokenizer_init": True,
        "max_running_requests": arguments.requests,
        **({} if arguments.weights else {"load_format": "dummy"}),
        **(CPU_ARGUMENTS if arguments.device == "cpu" else GPU_ARGUMENTS),
    }
    first = measured[arguments.against]
    for backend, into in measured.items():
        comparison.measure(
            backend,
            model,
            first.cases or _cases(arguments),
            folder,
            arguments=given,
            flags=server_flags(arguments),
            report=new_console().print,
            into=into,
            exactly=into is not first,
        )


def _table(compared: list[Compared], other: str) -> Table:
    from rich.table import Table

    table = Table(title="ms per output token: median (quartiles)")
    for column in ("batch", "pat", other, "gain"):
        table.add_column(column, justify="left" if column == "batch" else "right")
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
            **run_metadata(arguments, gpus),
            "weights": "the model's" if arguments.weights else "random",
        },
        "servers": {
            backend: {
                "start_seconds": each.start_seconds,
                **{name: each.info[name] for name in info if name in each.info},
                "tpot_ms": {name: tpot(runs).as_dict() for name, runs in each.runs.items()},
                "held_up_ms": {name: held_up_ms(runs) for name, runs in each.runs.items()},
                # All requests are sent at once, ordered by group. Their prefixes are cached.
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
