"""Measures the host time of planning, without a GPU.

    python benchmarks/kernel scheduler [--json FILE]

It prints three tables in microseconds, and one of costs.

Stages: plans built from scratch, for 16 to 4,096 requests. "cold plan" is PackScheduler.plan(),
from paths to the assembled plan. "write" copies the plan into its buffer.

Steps: decode steps of 256, 1,024 and 4,096 requests in each of SGLang's prefix caches, including
all Python code. Times are CPU time, so other processes do not count. "read" is
DecodeBatchBuilder.read(). "plan" is PackAttention.plan() up to the plan in its buffer, without the
copy to a device. Documents have equal or varied lengths. With varied lengths, every document has
more turns in the cache than are running, and every fourth new request has a document that no
running request has. These look like split nodes, and must not cost as much.

Batches replaced: PrefixForest.update() from one batch to another without common requests, for up to
16,384 requests.

Packing: by how much packings of small random forests cost more than the cheapest one, which is
found by exhaustive search (tests/support/exact_packing.py).

The path of a request is a common system prompt, a document for 16 requests, and its own turn. The
garbage collector is off while steps and updates are timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from common.metadata import metadata
from common.results import write
from common.suites import add_option
from common.terminal import console, table_of
from sglang_pat import PackAttention, PathNode, PrefixPaths
from sglang_pat._scheduler import PackScheduler, PrefixForest
from sglang_pat.attention import GROWTH_TOKENS
from sglang_pat.batch import Step
from sglang_pat.plan import BufferSizes, DecodePlan, new_scheduler, write_plan
from sglang_pat.sglang.cpu import enable_cpu_engine

REQUESTS = (16, 64, 256, 1024, 4096)
STEP_REQUESTS = (256, 1024, 4096)
REPLACED_REQUESTS = (1024, 4096, 16384)
NEWCOMERS = 32
FORESTS = 2000
SYSTEM_TOKENS, DOCUMENT_TOKENS, TURN_TOKENS, GENERATED_TOKENS = 1024, 2048, 128, 100
NUM_QO_HEADS, NUM_KV_HEADS, NUM_WORKERS = 32, 8, 33  # 33 = an H100's 264 CTAs / 8 KV heads


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
    """Return the median over `repeats` calls, after some warm-up calls."""
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
    buffer = np.zeros(sizes.buffer_size, dtype=np.int32)
    result["write_us"] = microseconds(lambda: scheduler.write(*sizes, buffer), repeats)
    result["per_request_us"] = result["cold_plan_us"] / num_requests
    return result


class HostExecutor:
    """Does the CUDA executor's work on the host: writes the plan into a large enough buffer."""

    name = "host"

    def __init__(self) -> None:
        self._buffer = np.zeros(1 << 19, dtype=np.int32)
        self._sizes = BufferSizes()

    def load_plan(self, scheduler: PackScheduler, step: Step) -> DecodePlan:
        plan = write_plan(scheduler, self._sizes, self._buffer)
        if plan is None:
            self._sizes = self._sizes.grown(BufferSizes.needed_by(scheduler))
            plan = write_plan(scheduler, self._sizes, self._buffer)
        assert plan is not None
        return plan

    def reuse_plan(self, step: Step, *, gather: bool = False) -> None: ...


class Steps:
    """Decode steps of requests in one of SGLang's prefix caches."""

    def __init__(self, cache: str, num_requests: int, *, varied: bool) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: TID251
        from sglang_trees import Tree

        from sglang_pat.sglang.tree import batch_builder, request_tracker

        self._tracker, self._view_of = request_tracker, batch_builder.StepInputs.read
        self._mode = ForwardMode.DECODE
        self.reader = batch_builder.DecodeBatchBuilder()
        self.attention: Any = PackAttention(
            NUM_QO_HEADS, NUM_KV_HEADS, 128, dtype=torch.bfloat16, num_workers=NUM_WORKERS
        )
        self.attention._executor = HostExecutor()
        self.attention._scheduler = self.attention._new_scheduler(by_time=True)  # plans as on a GPU
        self._tree = Tree(cache)
        self._varied = varied
        self._num_turns = 0
        num_documents = max(1, num_requests // 16)
        self.requests = [self._request(i // 16) for i in range(num_requests)]
        self.newcomers = [
            self._request(num_documents + i if i % 4 == 0 else 7 * i % num_documents)
            for i in range(NEWCOMERS)
        ]
        if varied:
            for document in range(num_documents + NEWCOMERS):
                for _ in range(2):
                    self._request(document)
        self._table = torch.zeros((self._num_turns + 1, 8192), dtype=torch.int32)
        self.length = SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS + TURN_TOKENS + GENERATED_TOKENS

    def _request(self, document: int) -> Any:
        """Return a request in the tree, with its own turn."""
        self._num_turns += 1
        tokens = DOCUMENT_TOKENS
        if self._varied:
            tokens = DOCUMENT_TOKENS // 2 + 997 * document % DOCUMENT_TOKENS
        first = 10_000 * (1 + document)
        turn = 100_000_000 + 1_000 * self._num_turns
        prompt = [
            *range(SYSTEM_TOKENS),
            *range(first, first + tokens),
            *range(turn, turn + TURN_TOKENS),
        ]
        self._tree.insert(prompt, range(len(prompt)))
        return self._tree.request(f"r{turn}", prompt, len(prompt), row=self._num_turns)

    def run(self, requests: list[Any]) -> tuple[float, float]:
        """Run a step. Return the microseconds of read() and of plan()."""
        lens = torch.full((len(requests),), self.length)
        rows = torch.arange(1, len(requests) + 1)
        batch = SimpleNamespace(
            batch_size=len(requests),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens,
            forward_mode=self._mode,
        )
        scheduled = SimpleNamespace(reqs=requests, tree_cache=self._tree.cache)
        target = SimpleNamespace(is_draft_worker=False)
        self._tracker._after_init_new(batch, object, scheduled, target)

        def forward(runner: object, forward_batch: Any) -> tuple[float, float]:
            begin = time.thread_time_ns()
            view = self._view_of(forward_batch, self._tracker.REQUEST_TRACKER.claim_step())
            step = self.reader.read(view)
            read = time.thread_time_ns()
            self.attention.plan(
                step, req_to_token=self._table, req_pool_indices=rows, seq_lens=lens
            )
            return (read - begin) / 1000, (time.thread_time_ns() - read) / 1000

        runner = SimpleNamespace(is_draft_worker=False)
        times: tuple[float, float] = self._tracker._around_forward(forward, runner, batch)
        return times


def measure_steps(cache: str, num_requests: int, *, varied: bool) -> list[dict[str, object]]:
    """Return medians and 99th percentiles by kind of step."""
    repeats = 300
    steps = Steps(cache, num_requests, varied=varied)
    everyone = steps.requests
    times: dict[str, list[tuple[float, float]]] = {}

    def step(kind: str, requests: list[Any]) -> None:
        times.setdefault(kind, []).append(steps.run(requests))

    gc.collect()
    gc.freeze()
    gc.disable()
    for repeat in range(repeats):
        if repeat % 10 == 0:
            steps.reader.invalidate_all()
            step("cold", everyone)
            step("unchanged", everyone)
            steps.length += GROWTH_TOKENS + 1
            step("tail growth", everyone)
            steps.length -= GROWTH_TOKENS + 1
        steps.run(everyone)
        leaver = repeat * 7 % num_requests
        remaining = everyone[:leaver] + everyone[leaver + 1 :]
        step("leave", remaining)
        step("join", [*remaining, steps.newcomers[repeat % NEWCOMERS]])
    gc.enable()
    gc.unfreeze()
    rows: list[dict[str, object]] = []
    for kind, samples in times.items():
        samples = samples[len(samples) // 30 :]
        read, plan = (statistics.median(part) for part in zip(*samples, strict=True))
        totals = sorted(map(sum, samples))
        documents = "varied" if varied else "equal"
        rows.append({"cache": cache, "documents": documents, "requests": num_requests})
        rows[-1] |= {"step": kind, "read_us": read, "plan_us": plan}
        rows[-1] |= {"p50_us": statistics.median(totals), "p99_us": totals[-1 - len(totals) // 100]}
    return rows


def measure_replaced(num_requests: int) -> dict[str, float]:
    """Measure updates from one batch to another and back."""

    class Request:
        def __init__(self, index: int) -> None:
            document = SYSTEM_TOKENS + DOCUMENT_TOKENS
            self.path = [
                (1, 0, 0, SYSTEM_TOKENS, SYSTEM_TOKENS, 9),
                (2 + index // 16, 1, SYSTEM_TOKENS, document, DOCUMENT_TOKENS, 9),
                (100_000 + index, 2, document, document + TURN_TOKENS, TURN_TOKENS, 0),
            ]

    def read(requests: list[Request]) -> list[list[tuple[int, ...]]]:
        return [request.path for request in requests]

    batches = [[Request(i + n) for i in range(num_requests)] for n in (0, num_requests)]
    forest = PrefixForest()
    forest.update([], batches[0], set(), read)  # type: ignore[arg-type]

    def there_and_back() -> None:
        forest.update(*batches, set(), read)  # type: ignore[arg-type]
        forest.update(batches[1], batches[0], set(), read)  # type: ignore[arg-type]

    gc.disable()
    update_us = microseconds(there_and_back, 20) / 2
    gc.enable()
    per_request_us = update_us / num_requests
    return {"requests": num_requests, "update_us": update_us, "per_request_us": per_request_us}


def measure_packing() -> dict[str, float]:
    """Return by how much packings cost more than the cheapest ones, in percent."""
    from exact_packing import packing_gaps

    gaps = 100 * np.array(packing_gaps(FORESTS))
    return {
        "forests": FORESTS,
        "mean_percent": float(gaps.mean()),
        "p99_percent": float(np.quantile(gaps, 0.99)),
        "worst_percent": float(gaps.max()),
    }


STAGES = (
    "requests",
    "cold_plan_us",
    "per_request_us",
    "forest_us",
    "packing_us",
    "split_us",
    "assembly_us",
    "write_us",
)
STEPS = ("cache", "documents", "step", "requests", "read_us", "plan_us", "p50_us", "p99_us")
GAPS = ("forests", "mean_percent", "p99_percent", "worst_percent")


def show(title: str, rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print a table of times in microseconds."""
    table = table_of(title, columns, words=("cache", "documents", "step"))
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    console.print(table)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if value >= 1 else f"{value:.4f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    meta = metadata()
    console.print(f"{meta['cpu']}, Python {meta['python']}, commit {meta['commit']}")
    cases = [measure(num_requests) for num_requests in REQUESTS]
    show("Stages of a plan built from scratch (us, median)", cases, STAGES)
    replaced = [measure_replaced(num_requests) for num_requests in REPLACED_REQUESTS]
    show("Batches replaced (us, median)", replaced, ("requests", "update_us", "per_request_us"))
    packing = measure_packing()
    show("Cost of a packing above the cheapest one (percent)", [packing], GAPS)

    enable_cpu_engine()
    from sglang_trees import TREE_KINDS

    steps = [
        row
        for cache in TREE_KINDS[:2]
        for num_requests in STEP_REQUESTS
        for varied in (False, True)
        for row in measure_steps(cache, num_requests, varied=varied)
    ]
    show("Decode steps (us; read and plan are medians)", steps, STEPS)
    result = {
        "meta": meta,
        "cases": cases,
        "replaced": replaced,
        "packing": packing,
        "steps": steps,
    }
    write(args.json, result)
    return 0
