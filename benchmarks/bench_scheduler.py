"""Host time of planning, without a GPU: cold plans and unchanged steps, from 16 to 4,096 requests.

    python benchmarks/bench_scheduler.py [--json FILE]

Every batch has three-level paths: one system prompt, a document per 16 requests, a turn per
request. "cold plan" is PackScheduler.plan(), paths in, plan assembled; "write" copies it into the
plan buffer; "unchanged step" is PackAttention.plan() when the last plan is reused, with everything
Python does around it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from metadata import metadata
from rich.console import Console
from rich.table import Table

from sglang_pat import DecodeBatch, PackAttention, PathNode, PrefixPaths
from sglang_pat.pack_attention import new_scheduler

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
    capacity = scheduler.required_capacity()
    buffer = np.zeros(capacity.layout()["size"], dtype=np.int32)
    result["write_us"] = microseconds(lambda: scheduler.write(capacity, buffer), repeats)

    attention = PackAttention(
        NUM_QO_HEADS, NUM_KV_HEADS, 128, dtype=torch.bfloat16, num_workers=NUM_WORKERS
    )
    batch = DecodeBatch(seq_lens, paths, key=tuple(range(num_requests)))
    req_to_token = torch.zeros((num_requests, length), dtype=torch.int32)
    rows = torch.arange(num_requests)
    lens = torch.from_numpy(seq_lens)

    def unchanged() -> None:
        attention.plan(batch, req_to_token=req_to_token, req_pool_indices=rows, seq_lens=lens)

    result["unchanged_step_us"] = microseconds(unchanged, 1000)
    assert attention.stats.plans_built == 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    args = parser.parse_args()
    console = Console(width=120)
    meta = metadata()
    console.print(f"{meta['cpu']}, Python {meta['python']}, commit {meta['commit']}")
    table = Table(title="Host time of planning (us, median)")
    columns = ("requests", "cold plan", "per request", "forest", "packing", "split", "assembly")
    for column in (*columns, "write", "unchanged step"):
        table.add_column(column, justify="right", no_wrap=True)
    cases = [measure(num_requests) for num_requests in REQUESTS]
    for case in cases:
        keys = ("cold_plan", "forest", "packing", "split", "assembly", "write", "unchanged_step")
        values = [f"{case[f'{key}_us']:.1f}" for key in keys]
        per_request = f"{case['cold_plan_us'] / case['requests']:.3f}"
        table.add_row(f"{case['requests']:,}", values[0], per_request, *values[1:])
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
