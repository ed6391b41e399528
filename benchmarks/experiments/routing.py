"""Simulates several workers behind a router, to compare how much they share by route.

A trace is divided into the requests of each worker, and a simulated server serves each part. The
routes follow the rules and defaults of SGLang's router: `cache_aware` sends a request to the worker
that has seen the longest prefix of the prompt. `random` and `round_robin` ignore the prompt.

    python benchmarks/experiments routing --generate toolagent --workers 4 --json routing.json
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.metadata import metadata
from common.results import write
from common.suites import Refused, add_option
from sglang_pat.cli.arguments import real_number, whole_number
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.generate import WORKLOADS, generate
from sglang_pat.workload.models import DEFAULT_GPU, GPUS, read_config
from sglang_pat.workload.run import DEFAULT, PAT, ServerStats, Setup, serve
from sglang_pat.workload.server import Rules
from sglang_pat.workload.trace import TraceRequest, token_ids
from sglang_pat.workload.tree import RadixTree

# Defaults of SGLang's router.
CACHE_THRESHOLD = 0.3
BALANCE_ABSOLUTE, BALANCE_RELATIVE = 64, 1.5
# Guessed duration of a request, because this script does not know when answers end.
SECONDS_PER_TOKEN = 0.02

Route = Callable[[TraceRequest], int]


@dataclass
class Worker:
    """A worker as the router sees it: the prompts sent to it, and its running requests."""

    seen: RadixTree = field(default_factory=lambda: RadixTree(1 << 60))
    ends: list[float] = field(default_factory=list)

    def running(self, now: float) -> int:
        while self.ends and self.ends[0] <= now:
            heapq.heappop(self.ends)
        return len(self.ends)


def random_route(workers: int, seed: int) -> Route:
    generator = np.random.default_rng(seed)
    return lambda _: int(generator.integers(workers))


def round_robin_route(workers: int, seed: int) -> Route:
    numbers = iter(range(1 << 62))
    return lambda _: next(numbers) % workers


def cache_aware_route(workers: int, seed: int) -> Route:
    """Route by prefix, unless the load is out of balance.

    An unknown prompt goes to the worker that has seen the fewest tokens.
    """
    known = [Worker() for _ in range(workers)]

    def route(request: TraceRequest) -> int:
        tokens = token_ids(request.prompt)
        running = [worker.running(request.arrival) for worker in known]
        most, least = max(running), min(running)
        if most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least:
            chosen = running.index(least)
        else:
            matches = [worker.seen.common_prefix(tokens) for worker in known]
            chosen = int(np.argmax(matches))
            if matches[chosen] <= CACHE_THRESHOLD * len(tokens):
                chosen = int(np.argmin([worker.seen.evictable for worker in known]))
        worker = known[chosen]
        worker.seen.insert(tokens)
        heapq.heappush(worker.ends, request.arrival + SECONDS_PER_TOKEN * request.output_length)
        return chosen

    return route


ROUTES: dict[str, Callable[[int, int], Route]] = {
    "random": random_route,
    "round_robin": round_robin_route,
    "cache_aware": cache_aware_route,
}


def cut(requests: Sequence[TraceRequest], route: Route, workers: int) -> list[list[TraceRequest]]:
    """Return the requests of each worker."""
    parts: list[list[TraceRequest]] = [[] for _ in range(workers)]
    for request in requests:
        parts[route(request)].append(request)
    return parts


def summed(servers: Sequence[tuple[ServerStats, ServerStats]]) -> dict[str, Any]:
    """Return the sums over all workers. servers: stats with the default backend and with pat."""

    def step_ms(stats: Sequence[ServerStats]) -> float:
        steps = sum(each.steps for each in stats)
        return sum(each.step_ms * each.steps for each in stats) / steps

    default, pat = ([both[index] for both in servers] for index in (0, 1))
    reads = {name: sum(each.kv_tokens[name] for each in pat) for name in pat[0].kv_tokens}
    requests = [each.requests for each in pat]
    new, prompts = (sum(getattr(each, name) for each in pat)
                    for name in ("new_tokens", "prompt_tokens"))  # fmt: skip
    return {
        "requests": requests,
        "batch_mean": round(
            sum(each.batch * each.steps for each in pat) / sum(each.steps for each in pat), 2
        ),
        "prefix_hit_rate": round(1 - new / prompts, 4),
        "kv_saved": round(1 - reads["memory"] / reads["query-centric"], 4),
        "kv_common": round(1 - reads["distinct"] / reads["query-centric"], 4),
        "step_ms": {DEFAULT: round(step_ms(default), 3), PAT: round(step_ms(pat), 3)},
        "ttft_s_mean": round(
            sum(each.ttft_ms * each.requests for each in pat) / sum(requests) / 1000, 3
        ),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace in a format of the replay")
    source.add_argument("--generate", choices=WORKLOADS, help="a workload of the replay")
    parser.add_argument("--requests", type=whole_number(1, 1000000), default=4000)
    parser.add_argument(
        "--rate", type=real_number(1e-3, 1e6), help="of all workers together (default: its own)"
    )
    parser.add_argument("--workers", type=whole_number(1, 1000), default=4)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--kv-tokens", type=whole_number(1, 1 << 30), default=400_000)
    parser.add_argument("--max-batch", type=whole_number(1, 1 << 20), default=256)
    add_option(parser, "--seed")
    add_option(parser, "--json")


def run(given: argparse.Namespace) -> int:
    try:
        _, config = read_config(given.model)
        if given.trace is not None:
            trace = open_trace(given.trace)
        else:
            trace = generate(
                given.generate, requests=given.requests, seed=given.seed, rate=given.rate
            )
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from error
    requests = [request for request, _ in zip(trace.stream, range(given.requests), strict=False)]
    rules = Rules(max_running_requests=given.max_batch)
    setup = Setup(StepTime.of_model(config, GPUS[DEFAULT_GPU]), given.kv_tokens, rules)
    results = {}
    print(f"{trace.name}: {len(requests):,} requests, {given.workers} workers")
    print("routing     | hits  | KV saved | step ms, default and pat | mean TTFT s | requests")
    for name, make in ROUTES.items():
        parts = cut(requests, make(given.workers, given.seed), given.workers)
        served = [[serve(part, setup, name) for name in (DEFAULT, PAT)] for part in parts if part]
        found = summed([(default, pat) for default, pat in served])
        results[name] = found
        steps = found["step_ms"]
        print(
            f"{name:11} | {found['prefix_hit_rate']:5.1%} | {found['kv_saved']:8.1%} | "
            f"{steps[DEFAULT]:12.2f} {steps[PAT]:11.2f} | "
            f"{found['ttft_s_mean']:11.2f} | {found['requests']}"
        )
    content = {
        "meta": metadata(),
        "trace": trace.name,
        "workers": given.workers,
        "model": given.model,
        "kv_tokens": given.kv_tokens,
        "max_batch": given.max_batch,
        "routing": results,
    }
    write(given.json, content)
    return 0
