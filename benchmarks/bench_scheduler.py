"""Host time of planning, without a GPU, for batches of three-level paths.

    python benchmarks/bench_scheduler.py [--json FILE]

Paths: one system prompt, a document per 16 requests, a turn per request. Stages, from 16 to 4,096
requests: "cold plan" is PackScheduler.plan(), paths in, plan assembled; "write" copies it into the
plan buffer. Steps, with 256 requests in each of SGLang's prefix caches: "read" is
BatchReader.read(), "plan" PackAttention.plan() up to the plan in its buffer, without the copy to a
device; with everything Python does in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from metadata import metadata
from rich.console import Console
from rich.table import Table

from sglang_pat import PackAttention, PathNode, PrefixPaths
from sglang_pat._scheduler import PackScheduler
from sglang_pat.attention import GROWTH_TOKENS, new_scheduler
from sglang_pat.batch import Step
from sglang_pat.plan import BufferSizes, DecodePlan, write_plan
from sglang_pat.sglang.cpu import enable_cpu_engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

REQUESTS = (16, 64, 256, 1024, 4096)
SYSTEM_TOKENS, DOCUMENT_TOKENS, TURN_TOKENS, GENERATED_TOKENS = 1024, 2048, 128, 100
NUM_QO_HEADS, NUM_KV_HEADS, NUM_WORKERS = 32, 8, 33  # 33: an H100's 264 CTAs over 8 KV heads


def three_level_paths(num_requests: int) -> PrefixPaths:
    paths = []
    for request in range(num_requests):
        document = SYSTEM_TOKENS + DOCUMENT_TOKENS
        paths.append(
            [
                PathNode(0, 0, SYSTEM_TOKENS),
                PathNode(1 + request // 16, SYSTEM_TOKENS, document),
                PathNode(10_000 + request, document, document + TURN_TOKENS),
            ]
        )
    return PrefixPaths.from_lists(paths)


def microseconds(function: Callable[[], object], repeats: int) -> float:
    """Median over `repeats` calls, after some to warm up."""
    for _ in range(10):
        function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        function()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def measure(num_requests: int) -> dict[str, float]:
    paths = three_level_paths(num_requests)
    length = SYSTEM_TOKENS + DOCUMENT_TOKENS + TURN_TOKENS + GENERATED_TOKENS
    seq_lens = np.full(num_requests, length, dtype=np.int32)
    scheduler = new_scheduler(group_size=NUM_QO_HEADS // NUM_KV_HEADS, num_workers=NUM_WORKERS)

    def cold() -> None:
        scheduler.plan(paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, seq_lens)

    repeats = max(50, 200_000 // num_requests)
    result = {"requests": num_requests, "cold_plan_us": microseconds(cold, repeats)}
    result |= {f"{stage}_us": ns / 1000 for stage, ns in scheduler.stage_times_ns.items()}
    sizes = BufferSizes.needed_by(scheduler)
    buffer = np.zeros(sizes.plan.layout()["size"], dtype=np.int32)
    result["write_us"] = microseconds(lambda: scheduler.write(*sizes, buffer), repeats)
    return result


class HostExecutor:
    """What the CUDA executor does on the host: the plan goes into a buffer that has room for it."""

    name = "host"

    def __init__(self) -> None:
        self._buffer = np.zeros(1 << 17, dtype=np.int32)
        self._sizes = BufferSizes()

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        plan = write_plan(scheduler, self._sizes, self._buffer)
        if plan is None:
            self._sizes = self._sizes.grown(BufferSizes.needed_by(scheduler))
            plan = write_plan(scheduler, self._sizes, self._buffer)
        assert plan is not None
        return plan

    def reuse_plan(self, step: Step) -> None: ...


class Steps:
    """Decode steps of requests in one of SGLang's prefix caches."""

    def __init__(self, cache: str, num_requests: int) -> None:
        from sglang_trees import Tree

        from sglang_pat.sglang import hooks, reader

        self._hooks = hooks
        self.reader = reader.BatchReader()
        self.attention: Any = PackAttention(
            NUM_QO_HEADS, NUM_KV_HEADS, 128, dtype=torch.bfloat16, num_workers=NUM_WORKERS
        )
        self.attention._executor = HostExecutor()
        self._tree = Tree(cache)
        self.requests = [self._request(i) for i in range(num_requests)]
        self._table = torch.zeros((num_requests + 1, 8192), dtype=torch.int32)
        self.length = SYSTEM_TOKENS + DOCUMENT_TOKENS + TURN_TOKENS + GENERATED_TOKENS

    def _request(self, index: int) -> Any:
        document, turn = 10_000 * (1 + index // 16), 10_000_000 + 1_000 * index
        prompt = [
            *range(SYSTEM_TOKENS),
            *range(document, document + DOCUMENT_TOKENS),
            *range(turn, turn + TURN_TOKENS),
        ]
        self._tree.insert(prompt, range(len(prompt)))
        return self._tree.request(f"r{index}", prompt, len(prompt), row=1 + index)

    def run(self, requests: list[Any]) -> tuple[float, float]:
        """One step: microseconds of read(), and of plan()."""
        lens = torch.full((len(requests),), self.length)
        rows = torch.arange(1, len(requests) + 1)
        mode = SimpleNamespace(is_decode=lambda: True)
        batch = SimpleNamespace(
            batch_size=len(requests), seq_lens=lens, seq_lens_cpu=lens, forward_mode=mode
        )
        scheduled = SimpleNamespace(reqs=requests, tree_cache=self._tree.cache)
        self._hooks._after_init_new(batch, object, scheduled)

        def forward(runner: object, forward_batch: Any) -> tuple[float, float]:
            begin = time.perf_counter_ns()
            step = self.reader.read(self._hooks.CHANNEL.acknowledge(), forward_batch)
            read = time.perf_counter_ns()
            self.attention.plan(
                step, req_to_token=self._table, req_pool_indices=rows, seq_lens=lens
            )
            return (read - begin) / 1000, (time.perf_counter_ns() - read) / 1000

        runner = SimpleNamespace(is_draft_worker=False)
        times: tuple[float, float] = self._hooks._around_forward(forward, runner, batch)
        return times


def measure_steps(cache: str, num_requests: int, repeats: int) -> list[dict[str, object]]:
    """Medians by kind of step."""
    steps = Steps(cache, num_requests + 1)
    everyone, newcomer = steps.requests[:-1], steps.requests[-1]
    times: dict[str, list[tuple[float, float]]] = {}

    def step(kind: str, requests: list[Any]) -> None:
        times.setdefault(kind, []).append(steps.run(requests))

    for repeat in range(repeats):
        steps.reader.forget()
        step("cold", everyone)
        for _ in range(4):
            step("unchanged", everyone)
        steps.length += GROWTH_TOKENS + 1
        step("tail growth", everyone)
        steps.length -= GROWTH_TOKENS + 1
        leaver = repeat * 7 % num_requests
        remaining = everyone[:leaver] + everyone[leaver + 1 :]
        steps.run(everyone)
        step("leave", remaining)
        step("join", [*remaining, newcomer])
    assert steps.attention.stats.plans_reused == 4 * repeats
    rows: list[dict[str, object]] = []
    for kind, samples in times.items():
        read, plan = (statistics.median(part) for part in zip(*samples[10:], strict=True))
        total = statistics.median(map(sum, samples[10:]))
        rows.append({"cache": cache, "requests": num_requests, "step": kind})
        rows[-1] |= {"read_us": read, "plan_us": plan, "total_us": total}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    args = parser.parse_args()
    console = Console(width=120)
    meta = metadata()
    console.print(f"{meta['cpu']}, Python {meta['python']}, commit {meta['commit']}")
    table = Table(title="Stages of a plan built from scratch (us, median)")
    columns = ("requests", "cold plan", "per request", "forest", "packing", "split", "assembly")
    for column in (*columns, "write"):
        table.add_column(column, justify="right", no_wrap=True)
    cases = [measure(num_requests) for num_requests in REQUESTS]
    for case in cases:
        keys = ("cold_plan", "forest", "packing", "split", "assembly", "write")
        values = [f"{case[f'{key}_us']:.1f}" for key in keys]
        per_request = f"{case['cold_plan_us'] / case['requests']:.3f}"
        table.add_row(f"{case['requests']:,}", values[0], per_request, *values[1:])
    console.print(table)

    enable_cpu_engine()
    from sglang_trees import TREE_KINDS

    steps = [row for cache in TREE_KINDS[:2] for row in measure_steps(cache, 256, 300)]
    table = Table(title="Decode steps of 256 requests (us, median)")
    for column in ("cache", "step", "read", "plan", "total"):
        table.add_column(column, justify="left" if column in ("cache", "step") else "right")
    for row in steps:
        parts = [f"{row[f'{part}_us']:.1f}" for part in ("read", "plan", "total")]
        table.add_row(str(row["cache"]), str(row["step"]), *parts)
    console.print(table)
    if args.json:
        result = {"meta": meta, "cases": cases, "steps": steps}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
