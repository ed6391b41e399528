"""Options that `advise` and `replay` have in common, and the way from these to a report.

The options of a server have SGLang's names. Nothing here needs SGLang.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.cli.arguments import real_number, whole_number
from sglang_pat.output_file import output_or_stdout
from sglang_pat.workload.models import DEFAULT_GPU, DEFAULT_MODEL, GPUS, MODELS

if TYPE_CHECKING:
    from sglang_pat.workload.report import Report
    from sglang_pat.workload.run import Setup, Watch
    from sglang_pat.workload.trace import Trace, TraceRequest

LARGEST_LIMIT = 1_000_000
_LIMIT, _GENERATED = 20_000, 2_000
_MOST_TOKENS = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both commands."""
    workload = parser.add_argument_group("the workload")
    trace = workload.add_mutually_exclusive_group(required=True)
    trace.add_argument("--trace", type=Path, metavar="FILE", help="a log of requests")
    trace.add_argument(
        "--generate",
        metavar="NAME",
        help="instead of a file: conversation, toolagent, few-shot, multi-chain, multi-document, "
        "rl-rollout or no-sharing",
    )
    workload.add_argument(
        "--rate",
        type=real_number(1e-3, 1e6, or_inf=True),
        metavar="N",
        help="requests a second, or inf (default: the trace's)",
    )
    workload.add_argument(
        "--limit",
        type=whole_number(1, LARGEST_LIMIT),
        metavar="N",
        help=f"only the first N requests (default: {_LIMIT:,}, generated: {_GENERATED:,})",
    )
    workload.add_argument(
        "--max-new-tokens",
        type=whole_number(1, _MOST_TOKENS),
        metavar="N",
        help="what clients ask for (default: the length of the answer, as with ignore_eos)",
    )
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="CONFIG",
        help=f"{MODELS} (default: {DEFAULT_MODEL})",
    )
    server.add_argument(
        "--gpu",
        type=str.upper,
        choices=tuple(GPUS),
        default=DEFAULT_GPU,
        help=f"GPU type (default: {DEFAULT_GPU})",
    )
    server.add_argument(
        "--tp",
        type=whole_number(1, 1024),
        default=1,
        metavar="N",
        help="GPUs that share the model (default: 1)",
    )
    pool = server.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-pool-gb",
        type=real_number(1e-3, 1e6),
        metavar="GB",
        help="KV pool of one GPU (default: what the weights leave)",
    )
    pool.add_argument(
        "--kv-tokens", type=whole_number(2, _MOST_TOKENS), metavar="N", help="the same, in tokens"
    )
    server.add_argument(
        "--max-running-requests",
        type=whole_number(1, 1 << 20),
        default=256,
        metavar="N",
        help="requests that decode together at most (default: 256)",
    )
    server.add_argument(
        "--schedule-policy",
        choices=("fcfs", "lpm", "dfs-weight"),
        default="fcfs",
        help="order of the queue (default: fcfs)",
    )
    output = parser.add_argument_group("the answer")
    output.add_argument("--verbose", action="store_true", help="more than the verdict")
    output.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="everything, as JSON; -: to stdout, and all else to stderr",
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and the server that they are for."""

    model: str
    trace: Trace
    requests: list[TraceRequest]
    label: str
    setup: Setup

    def answered(self, watch: Watch | None = None) -> Report:
        """Serve it with both backends."""
        from sglang_pat.workload.report import Report
        from sglang_pat.workload.run import answer
        from sglang_pat.workload.verdict import verdict

        found = answer(self.requests, self.setup, watch)
        return Report(
            self.model, self.label, self.trace, found, verdict(found, self.model, self.label)
        )


def read(
    arguments: argparse.Namespace,
    *,
    seed: int = 0,
    open_trace: Callable[[Path], Trace] | None = None,
    context_length: int | None = None,
    chunked_prefill_size: int = 8192,
    **more: Any,
) -> Workload:
    """The workload that the options describe. ValueError for what cannot be served.

    Parameters
    ----------
    context_length
        None: the model's own.
    more
        Of `Setup`.
    """
    from sglang_pat.workload.cost import StepTime
    from sglang_pat.workload.model_reader import read_model
    from sglang_pat.workload.models import context_length_of
    from sglang_pat.workload.server import Rules

    model = read_model(arguments.model, arguments.tp)
    if model.note:
        print(f"{model.note}; the rules of sglang-pat tell its layers", file=sys.stderr)
    name, gpu = model.label, GPUS[arguments.gpu]
    try:
        time = StepTime.of(model.config, gpu, arguments.tp, model.layers, model.weights)
        if context_length is None:
            context_length = context_length_of(model.config)
        pool = arguments.kv_tokens
        if pool is None:
            given = arguments.kv_pool_gb
            pool = time.pool_tokens(None if given is None else given * 1e9)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    page = more.get("page_size", 1)
    if pool < 2 * page:
        raise ValueError(f"a KV pool of {pool:,} tokens; at least two pages of {page} are needed")
    if chunked_prefill_size < page:
        raise ValueError(f"--chunked-prefill-size {chunked_prefill_size}; a page is {page} tokens")
    trace = _open(arguments, seed, open_trace)
    limit = arguments.limit or _LIMIT
    requests = trace.first(limit)

    # Imports numpy's and the scheduler's parts: wrong input has been refused by now.
    from sglang_pat.workload.run import Setup

    rules = Rules(
        max_running_requests=arguments.max_running_requests,
        chunked_prefill_size=chunked_prefill_size,
        context_length=context_length,
        max_new_tokens=arguments.max_new_tokens,
        ignore_eos=arguments.max_new_tokens is None,
        schedule_policy=arguments.schedule_policy,
    )
    requests, per_second = _at_rate(requests, arguments.rate)
    label = f"{trace.name}: {len(requests):,} requests"
    if trace.requests is not None and trace.requests > len(requests) + trace.errors.count:
        label = f"{trace.name}: the first {len(requests):,} of {trace.requests:,} requests"
    label += f", {per_second}"
    return Workload(name, trace, requests, label, Setup(time, pool, rules, **more))


def _open(
    arguments: argparse.Namespace, seed: int, open_file: Callable[[Path], Trace] | None
) -> Trace:
    from sglang_pat.workload.formats import open_trace
    from sglang_pat.workload.generate import WORKLOADS, generate

    if arguments.trace is not None:
        return (open_file or open_trace)(arguments.trace)
    if arguments.generate not in WORKLOADS:
        raise ValueError(f"workload {arguments.generate!r}; allowed: {', '.join(WORKLOADS)}")
    return generate(arguments.generate, requests=arguments.limit or _GENERATED, seed=seed)


def _at_rate(requests: list[TraceRequest], rate: float | None) -> tuple[list[TraceRequest], str]:
    """The requests, so many a second, and how many that is in words."""
    first = min(each.arrival for each in requests)
    span = max(each.arrival for each in requests) - first
    if rate is not None and span > 0:
        scale = len(requests) / rate / span
        requests = [each._replace(arrival=(each.arrival - first) * scale) for each in requests]
        span *= scale
    if span == 0:
        return requests, "all at once"
    return requests, f"{len(requests) / span:.3g} a second"


def inputs(arguments: argparse.Namespace) -> list[Path]:
    """The files that are read: no output may overwrite them."""
    from sglang_pat.workload.models import config_file
    from sglang_pat.workload.request_dump import dump_files

    found = [config_file(arguments.model)]
    trace = arguments.trace
    if trace is not None:
        found += dump_files(trace) if trace.is_dir() else [trace]
    return found


def show(report: Report, verbose: bool) -> None:
    """Print the verdict, and details if they are asked for."""
    print("\n".join(report.lines() + (report.details() if verbose else [])))
