"""Options of `advise`, and the workload and report that they describe.

Options that describe the server have the names of SGLang's flags. SGLang need not be installed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.cli.arguments import LARGEST_SEED, real_number, whole_number
from sglang_pat.cli.progress import sign_of_life
from sglang_pat.messages import quoted
from sglang_pat.output_file import output_file, output_or_stdout
from sglang_pat.support import KV_CACHE_DTYPES, POLICIES
from sglang_pat.workload.models import DEFAULT_GPU, DEFAULT_MODEL, GPUS, MODELS

if TYPE_CHECKING:
    from sglang_pat.workload.cost import StepTime
    from sglang_pat.workload.report import ReplayReport
    from sglang_pat.workload.run import Setup, Watch
    from sglang_pat.workload.trace import Progress, Trace, TraceRequest

LARGEST_LIMIT = 1_000_000
_LIMIT, _GENERATED = 20_000, 2_000
_MOST_TOKENS = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    _add_workload(parser)
    _add_server(parser)
    _add_answer(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    workload = parser.add_argument_group("the workload")
    trace = workload.add_mutually_exclusive_group(required=True)
    trace.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="a log of requests, gzip and zstd included",
    )  # fmt: skip
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
        help="requests a second, or inf (default: the trace's). A log without times needs it",
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
        help="what clients ask for (default: the length of the answer, as with ignore_eos). Also "
        "the length of answers for which the log has neither a length nor a limit",
    )
    workload.add_argument(
        "--format",
        metavar="NAME",
        help="mooncake, tokens, openai, burstgpt, azure or sglang-dump (default: by the file's "
        "first lines)",
    )
    workload.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    workload.add_argument(
        "--seed",
        type=whole_number(0, LARGEST_SEED),
        metavar="N",
        help="seed of what is generated (default: 0)",
    )
    workload.add_argument(
        "--save", type=output_file, metavar="FILE", help="keep what is generated, as Mooncake JSONL"
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
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
    server.add_argument(
        "--dp-size", type=whole_number(1, 1024), default=1, metavar="N",
        help="groups of these GPUs with requests of their own, as with SGLang's "
        "--enable-dp-attention (default: 1)",
    )  # fmt: skip
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
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        metavar="DTYPE",
        default="auto",
        help=f"type of the KV cache: {', '.join(KV_CACHE_DTYPES)} (default: the checkpoint's)",
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


def _add_answer(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("the answer")
    output.add_argument("--verbose", action="store_true", help="more than the verdict")
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
    output.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="everything, as JSON; -: to stdout, and all else to stderr",
    )


@dataclass(frozen=True, slots=True)
class GivenWorkload:
    """Requests, and the server that will answer them."""

    model: str
    trace: Trace
    requests: list[TraceRequest]
    label: str
    setup: Setup

    def answered(self, watch: Watch, progress: Progress) -> ReplayReport:
        """Simulate the server with both backends, and return the report."""
        from sglang_pat.workload.report import ReplayReport
        from sglang_pat.workload.run import answer
        from sglang_pat.workload.verdict import verdict

        found = answer(self.requests, self.setup, watch, progress)
        return ReplayReport(
            self.model, self.label, self.trace, found, verdict(found, self.model, self.label)
        )


def read(arguments: argparse.Namespace, progress: Progress) -> GivenWorkload:
    """Return the workload that the options describe. ValueError if it cannot be served."""
    from sglang_pat.workload.cost import StepTime
    from sglang_pat.workload.model_reader import check_model, read_model
    from sglang_pat.workload.models import context_length_of, naming, unread_quantisation
    from sglang_pat.workload.server import Rules

    # The import of SGLang is slow, so everything that can be checked without it is checked first.
    policies = _policies(arguments.policies)
    page, chunk = arguments.page_size, arguments.chunked_prefill_size
    tp, dp = arguments.tp, arguments.dp_size
    if tp % dp:
        raise ValueError(f"--dp-size {dp}; allowed: a divisor of --tp {tp}")
    if chunk < page:
        raise ValueError(f"--chunked-prefill-size {chunk}; a page is {page} tokens")
    name, config = check_model(arguments.model)
    if warning := unread_quantisation(arguments.model, config):
        print(warning, file=sys.stderr)
    gpu = GPUS[arguments.gpu]
    with naming(name):
        context_length = arguments.context_length or context_length_of(config)
        _check_by_rules(config, arguments)
    trace = _open(arguments)
    limit = arguments.limit or _LIMIT
    requests = trace.first(limit, progress)
    with sign_of_life("reading the model, by SGLang's class where SGLang is installed"):
        model = read_model(arguments.model, tp // dp, arguments.kv_cache_dtype)
    if model.note:
        print(f"{model.note}; the rules of sglang-pat tell its layers", file=sys.stderr)
    with naming(name):
        kv = arguments.kv_cache_dtype
        time = StepTime.of_model(config, gpu, tp, model.layers, model.weights, kv, dp)
        pool = _pool_tokens(time, arguments)

    # Only now, after wrong input has been refused: this also imports numpy and the scheduler.
    from sglang_pat.workload.run import Setup

    rules = Rules(  # SGLang divides both among the groups
        max_running_requests=max(1, arguments.max_running_requests // dp),
        chunked_prefill_size=max(page, chunk // dp),
        context_length=context_length,
        max_new_tokens=arguments.max_new_tokens,
        ignore_eos=arguments.max_new_tokens is None,
        schedule_policy=arguments.schedule_policy,
    )
    requests, per_second = _at_rate(requests, arguments.rate)
    label = f"{trace.name}: {len(requests):,} requests"
    if trace.requests is not None and trace.requests > len(requests) == limit:
        label = f"{trace.name}: the first {len(requests):,} of {trace.requests:,} requests"
    label += f", {per_second}"
    trees = {"new_tree": _sglang_tree()} if arguments.tree == "sglang" else {}
    setup = Setup(time, pool, rules, page_size=page, policies=policies, **trees)
    return GivenWorkload(name, trace, requests, label, setup)


def _check_by_rules(config: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Raise ValueError if, by the rules of `model_layers.py`, the model does not fit into the GPUs.

    The rules may misjudge the size of the weights by a tenth. So a model is refused only if it
    would not even fit into GPUs with a quarter more memory.
    """
    from sglang_pat.model_layers import read_layers
    from sglang_pat.workload.cost import StepTime
    from sglang_pat.workload.weights import read_weights

    tp, dp, gpu = arguments.tp, arguments.dp_size, GPUS[arguments.gpu]
    try:
        layers = read_layers(config, tp // dp)
        weights = read_weights(config, layers)
    except ValueError:  # the rules do not know the model's class, or its default values
        return
    time = StepTime.of_model(config, gpu, tp, layers, weights, arguments.kv_cache_dtype, dp)
    larger = replace(gpu, memory_bytes=gpu.memory_bytes * 5 // 4)
    try:
        _pool_tokens(replace(time, gpu=larger), arguments)
    except ValueError:
        _pool_tokens(time, arguments)


def _pool_tokens(time: StepTime, arguments: argparse.Namespace) -> int:
    """Return how many tokens the KV pool holds. ValueError if it is too small.

    An option may give the size. If none does, the pool fills the memory that the weights leave.
    """
    pool: int | None = arguments.kv_tokens
    given, page = arguments.kv_pool_gb, arguments.page_size
    if pool is None:
        pool = time.pool_tokens(None if given is None else given * 1e9)
    if pool < 2 * page:
        raise ValueError(f"a KV pool of {pool:,} tokens; at least two pages of {page} are needed")
    return pool


def _open(arguments: argparse.Namespace) -> Trace:
    """Return the chosen trace. ValueError for an option that applies only to other traces."""
    from sglang_pat.workload.formats import open_trace
    from sglang_pat.workload.generate import WORKLOADS, generate

    path = arguments.trace
    for name in ("seed", "save") if path is not None else ("format", "strict"):
        value = getattr(arguments, name)
        if value is not None and value is not False:
            source = path or arguments.generate
            raise ValueError(f"--{name} {value} has no effect on {source}: leave it out")
    if path is not None:
        is_timed = arguments.rate is None
        format = arguments.format or "auto"
        return open_trace(
            path,
            format,
            strict=arguments.strict,
            untimed=not is_timed,
            longest_answer=arguments.max_new_tokens,
        )
    if arguments.generate not in WORKLOADS:
        raise ValueError(f"workload {quoted(arguments.generate)}; allowed: {', '.join(WORKLOADS)}")
    limit = arguments.limit or _GENERATED
    return generate(arguments.generate, requests=limit, seed=arguments.seed or 0)


def _policies(text: str) -> tuple[str, ...]:
    policies = tuple(text.split(","))
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"--policies {quoted(policy)}; allowed: {', '.join(POLICIES)}")
    if len(set(policies)) < len(policies):
        raise ValueError(f"--policies {text}: each is named once")
    return policies


def _sglang_tree() -> Any:
    from sglang_pat.sglang.cpu import enable_cpu_engine

    print("Loading SGLang, which takes some seconds ...", file=sys.stderr)
    enable_cpu_engine()
    warnings.simplefilter("ignore")  # SGLang's imports warn
    from sglang_pat.offline.simulated_cache import new_tree

    return new_tree


def _at_rate(requests: list[TraceRequest], rate: float | None) -> tuple[list[TraceRequest], str]:
    """Return the requests, rescaled to `rate` arrivals a second, and their actual rate in words.

    rate: infinity lets all requests arrive at once. None: the arrivals stay as they are.
    """
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
    """Return the input files, which no output may overwrite."""
    from sglang_pat.workload.models import config_file
    from sglang_pat.workload.request_dump import dump_files

    found = [config_file(arguments.model)]
    trace = arguments.trace
    if trace is not None:
        found += dump_files(trace) if trace.is_dir() else [trace]
    return found
