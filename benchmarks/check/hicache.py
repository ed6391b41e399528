"""Checks that KV which has left the device and come back gives the same answers.

    python benchmarks/check hicache [--backends pat fa3 triton] [--json FILE]

The requests are those of `check logits`. pat runs with a host tier and a small pool. The requests
are answered, other requests evict their KV from the device, and they are answered again with KV
from the host. Both times, pat's logits may differ from the last backend's, which has no tiers, by
at most twice as much as the other backends' logits do, and tokens may differ only at ties. The
second time, KV must have come from the host and been shared.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from check import logits
from check.logits import (
    COMMON,
    DOCUMENTS,
    FLOAT32_LIMIT,
    STRICT,
    Run,
    Setup,
    answer_all,
    check_backends,
    largest_and_mean,
    problems_of_comparing,
    prompts,
    this_setup,
)
from common.counters import difference, read_ratio
from common.results import report
from common.terminal import console
from common.tiny_model import NUM_SPECIAL_TOKENS
from sglang_pat.bench.answers import agreement
from sglang_pat.bench.server import Server, Start, contender, running_servers, sampling_of
from sglang_pat.sglang.cpu import cuda_driver_is_present

LARGEST_RATIO = 0.9  # planned KV / KV that query-centric attention reads
TIERS = {
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_through",
    "hicache_ratio": 4.0,
    "enable_cache_report": True,
    "page_size": 16,
}
# Arguments for a CPU, where torch copies between the tiers (tests/support/fakes/driver.py).
TIERS_ON_CPU = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}


def pool_tokens(setup: Setup) -> int:
    """Return a pool size just above what the requests and answers need."""
    shared = setup.system + setup.document
    own = sum(len(prompt) - shared for prompt in prompts(setup))
    return -(-(own + setup.system + DOCUMENTS * setup.document) // 1024) * 1024 + 4096


def drive_out(server: Server, setup: Setup) -> None:
    """Fill the pool with other requests, which evicts the KV of the first ones."""
    source = random.Random(11)
    vocabulary = range(NUM_SPECIAL_TOKENS, setup.model.vocab_size)
    count = 8
    length = pool_tokens(setup) // count
    others = [source.choices(vocabulary, k=length) for _ in range(count)]
    for other in others:
        server.generate([other], sampling_of(4))


def found_on_host(server: Server, setup: Setup) -> int:
    """Return how many prompt tokens come from the host when prompts are sent again."""
    answers = server.generate(prompts(setup), sampling_of(1))
    details = [answer["meta_info"].get("cached_tokens_details") or {} for answer in answers]
    return sum(int(each.get("host") or 0) for each in details)


def judge(
    pat: tuple[Run, Run], others: dict[str, Run], on_host: int, counted: dict[str, Any]
) -> dict[str, Any]:
    """Compare pat's answers, before and after eviction, with those of other backends.

    pat: answers before and after. others: the last is the reference. counted: pat's counters after.
    """
    *names, yardstick = others
    reference = others[yardstick]
    noise = [largest_and_mean(others[name].logits, reference.logits) for name in names]
    limits = [2 * max(column) for column in zip(*noise, strict=True)] or [FLOAT32_LIMIT] * 2
    failures, runs = [], {}
    for when, run in zip(("before", "after"), pat, strict=True):
        off = largest_and_mean(run.logits, reference.logits)
        greedy = agreement(run.greedy, reference.greedy, limits[0])
        runs[when] = {"max": off[0], "mean": off[1], "greedy": greedy.as_dict()}
        for name, error, limit in zip(("largest", "mean"), off, limits, strict=True):
            if error > limit:
                failures.append(f"{when}: {name} difference of logits {error:.3g} > {limit:.3g}")
        failures += [f"{when}: other tokens: {error}" for error in greedy.errors]
        failures += [f"{when}: {problem}" for problem in problems_of_comparing(greedy, limits)]
    ratio = read_ratio(counted)
    if not on_host:
        failures.append("nothing came back from the host")
    if ratio is None or ratio > LARGEST_RATIO:
        failures.append(f"pat shared too little of it: KV read ratio {ratio}")
    return {
        "yardstick": yardstick,
        "limit": {"max": limits[0], "mean": limits[1]},
        "pat": runs,
        "tokens_from_host": on_host,
        "kv_read_ratio": ratio,
        "failures": failures,
    }


def run_all(setup: Setup, backends: Sequence[str], folder: Path) -> dict[str, Any]:
    model = setup.model.write(folder / "model")
    starts = {}
    for name in backends:
        arguments, environment = COMMON | setup.arguments, {}
        if name == "pat":
            arguments |= TIERS | {"max_total_tokens": pool_tokens(setup)}
            environment = {"SGLANG_PAT_DEBUG": "1", **STRICT}
            if not cuda_driver_is_present():
                arguments |= TIERS_ON_CPU
        starts[name] = Start(contender(name), model, arguments, environment)
    console.print(f"starting {len(starts)} servers: {', '.join(starts)}")
    with running_servers(starts, folder) as servers:
        server = servers["pat"]
        first = answer_all(server, setup)
        drive_out(server, setup)
        before, on_host = server.stats(), found_on_host(server, setup)
        drive_out(server, setup)
        second = answer_all(server, setup, flush=False)
        pat, counted = (first, second), difference(server.stats(), before)
        others = {
            name: answer_all(other, setup) for name, other in servers.items() if name != "pat"
        }
    return judge(pat, others, on_host, counted)


add_options = logits.add_options


def run(args: argparse.Namespace) -> int:
    check_backends(args.backends)
    with tempfile.TemporaryDirectory(prefix="check-hicache-") as folder:
        return report(run_all(this_setup(), args.backends, Path(folder)), args.json)
