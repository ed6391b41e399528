"""`sglang-pat advise`: whether pat pays for a model, a trace and a GPU, in a minute or two.

Needs neither SGLang nor a GPU. The work is done by `replay/advice.py`; `sglang-pat replay` is the
slow and exact way.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_pat.cli.arguments import real_number, whole_number
from sglang_pat.output_file import check_outputs, output_or_stdout, write_output
from sglang_pat.workload.models import DEFAULT_GPU, GPUS, MODEL_NAMES

DESCRIPTION = "estimate what pat would save, by a model's config.json and a trace of requests"
_MOST_REQUESTS = 20_000
_LARGEST_LIMIT = 1_000_000  # a request takes about 1 kB
_GENERATED_REQUESTS = 2000
_WIDTH = 9  # of the first column


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="CONFIG",
        help=f"the path of a config.json or of its folder, or {', '.join(MODEL_NAMES)}",
    )
    trace = parser.add_mutually_exclusive_group(required=True)
    trace.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests, in a format that the replay reads"
    )
    trace.add_argument(
        "--generate", metavar="NAME", help="instead of a file: a workload of the replay"
    )
    parser.add_argument(
        "--gpu",
        type=str.upper,
        choices=tuple(GPUS),
        default=DEFAULT_GPU,
        help=f"GPU type (default: {DEFAULT_GPU})",
    )
    parser.add_argument(
        "--tp",
        type=whole_number(1, 1024),
        default=1,
        metavar="N",
        help="GPUs that share the model (default: 1)",
    )
    parser.add_argument(
        "--kv-pool-gb",
        type=real_number(1e-3, 1e6),
        metavar="GB",
        help="KV pool of one GPU (default: what the weights leave)",
    )
    parser.add_argument(
        "--max-batch",
        type=whole_number(1, 1 << 20),
        metavar="N",
        help="running requests at most (default: 256)",
    )
    parser.add_argument(
        "--rate",
        type=real_number(1e-3, 1e6),
        metavar="N",
        help="requests a second (default: the trace's)",
    )
    parser.add_argument(
        "--limit",
        type=whole_number(1, _LARGEST_LIMIT),
        metavar="N",
        help=f"only the first N requests (default: {_MOST_REQUESTS:,})",
    )
    parser.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="everything, as JSON; -: to stdout, and all else to stderr",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Estimate and print. Returns the exit status: 0, or 2 for what cannot be done."""
    try:
        found = _advise(arguments)
    except (ValueError, OSError) as error:
        print(f"sglang-pat advise: {error}", file=sys.stderr)
        return 2
    print(text(found))
    if arguments.json is not None:
        write_output("--json", arguments.json, json.dumps(found.as_dict(), indent=1) + "\n")
    return 0


def text(advice: Any) -> str:
    """An `Advice` for a terminal. The verdict comes last, where a reader looks."""
    default, pat = advice.default, advice.pat
    gpus = advice.gpu if advice.tp == 1 else f"{advice.tp} x {advice.gpu}"
    accelerated = f"{advice.num_accelerated} of {advice.num_layers} layers accelerated"
    lines = [_row("model", f"{advice.model} on {gpus}: {accelerated}")]
    for count, words, is_accelerated in advice.layers:
        backend = "pat" if is_accelerated else "SGLang's default backend"
        lines.append(_row("", f"{count} x {words}: {backend}"))
    lines.append(_row("trace", advice.trace))
    if default.refused:
        lines.append(_row("", f"{default.refused:,} requests are too long for the KV pool"))
    lines += [
        _row("batch", f"{default.batch:.0f} requests in the mean with {advice.default_backend}"),
        _row("common", f"{default.common:.0%} of the KV that the requests of a step attend to"),
    ]
    times = ((advice.default_backend, default), ("pat", pat))
    tpot = ", ".join(
        f"{name} {server.tpot_ms:.1f} ms ({server.tpot_ms * (1 - advice.error):.1f} to "
        f"{server.tpot_ms * (1 + advice.error):.1f})"
        for name, server in times
    )
    lines.append(_row("TPOT", f"{tpot}, prefills of others included"))
    steps = ", ".join(f"{name} {server.step_ms:.1f} ms" for name, server in times)
    lines.append(
        _row(
            "step",
            f"{steps}: a decode step, of which attention is "
            f"{default.attention:.0%} and {pat.attention:.0%}",
        )
    )
    lines.append(_row("error", _error(advice)))
    if default.overloaded:
        lines.append(
            _row("load", "requests wait longer than they are served: the trace asks for more")
        )
        lines.append(_row("", "than one such server gives, so the batch is as full as it gets"))
    return "\n".join([*lines, "", advice.verdict])


def _row(name: str, words: str) -> str:
    return f"{name:{_WIDTH}}{words}".rstrip()


def _error(advice: Any) -> str:
    within = f"within {advice.error:.0%}"
    if not advice.reasons:
        return f"{within}, as for the recorded runs of an H100"
    return f"perhaps {within}, not checked: {'; '.join(advice.reasons)}"


def _advise(arguments: argparse.Namespace) -> Any:
    from sglang_pat.replay.step_time import StepTime
    from sglang_pat.workload.models import config_file, read_config

    inputs = [config_file(arguments.model)]
    if arguments.trace is not None:
        inputs.append(arguments.trace)
    check_outputs({"--json": arguments.json}, inputs)
    name, config = read_config(arguments.model)
    try:
        time = StepTime.of(config, GPUS[arguments.gpu], arguments.tp)
        given = arguments.kv_pool_gb
        pool = time.pool_tokens(None if given is None else given * 1e9)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    trace = _trace(arguments)

    # Imports torch, which takes seconds: wrong input has been refused by now.
    from sglang_pat.replay.advice import MAX_BATCH, advise, read_requests

    requests = read_requests(trace.stream, arguments.limit or _MOST_REQUESTS)
    label = f"{trace.name}: {len(requests):,} requests"
    if trace.requests is not None and trace.requests > len(requests) + trace.errors.count:
        label = f"{trace.name}: the first {len(requests):,} of {trace.requests:,} requests"
    if trace.errors.count:
        label += f", {trace.errors.count:,} malformed lines left out"
    span = requests[-1].arrival
    if arguments.rate is not None and span > 0:
        scale = len(requests) / arguments.rate / span
        requests = [each._replace(arrival=each.arrival * scale) for each in requests]
        span *= scale
    if span > 0:
        label += f", {len(requests) / span:.1f} a second"
    return advise(
        name, label, requests, time, pool=pool, max_batch=arguments.max_batch or MAX_BATCH
    )


def _trace(arguments: argparse.Namespace) -> Any:
    from sglang_pat.workload.formats import open_trace
    from sglang_pat.workload.generate import WORKLOADS, generate

    if arguments.trace is not None:
        return open_trace(arguments.trace)
    if arguments.generate not in WORKLOADS:
        raise ValueError(f"workload {arguments.generate!r}; allowed: {', '.join(WORKLOADS)}")
    requests = arguments.limit or _GENERATED_REQUESTS
    return generate(arguments.generate, requests=requests, seed=0, rate=None)
