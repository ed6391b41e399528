"""Whole jobs on a server: how long they take with pat, with the default backend, and as predicted.

    python benchmarks/server jobs [--jobs rollouts agents evaluation chat] [--rounds N]
        [--seconds N] [--json jobs.json]

The Llama-3-8B shape with random weights. A job is sent in one call, all requests at once and in a
random order, to a server with an empty cache. Both servers share the GPU and are asked in turn.
What `sglang-pat advise` predicts of a job (workload/) is compared: `gates` of the result.

With --seconds no job is begun after so many; about 360 are enough for one round of all. Where there
is no GPU, a toy model answers small jobs: that shows that everything works, and predicts nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.fleet import SHARED_GPU, Member, fleet, report_starts, wait, watched
from common.metadata import gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import write
from common.suites import add_option
from common.terminal import console, show_failure, table_of
from sglang_pat.bench.server import START_SECONDS, Server, Start, contender, sampling_of
from sglang_pat.sglang.cpu import cuda_driver_is_present
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.models import GPUS
from sglang_pat.workload.run import DEFAULT, PAT, ServerStats, Setup, serve
from sglang_pat.workload.server import Rules
from sglang_pat.workload.trace import TokenPrompt, TraceRequest

LIMIT = 0.15  # how far a predicted time may be off; of rollouts, which nothing explains:
LIMITS = {"rollouts": 0.20}
CHUNK, MAX_RUNNING = 8192, 256
# KV pool of each server. Where the GPU has 80 GB, the weights of two leave less.
POOL_TOKENS, SMALL_POOL_TOKENS = 260_000, 100_000
_LARGE_GPU = 120e9  # bytes


@dataclass(frozen=True, slots=True)
class Job:
    """Groups of requests. A prompt is the group's text and some tokens of its own."""

    groups: int
    size: int
    shared: int
    private: int
    answer: int

    def smaller(self) -> Job:
        """For a toy model: as many groups as matter, and short ones."""
        return Job(
            min(self.groups, 3),
            min(self.size, 4),
            self.shared // 50,
            max(1, self.private // 50),
            min(self.answer, 12),
        )

    def requests(self, vocab_size: int, seed: int) -> list[tuple[int, TraceRequest]]:
        """(group, request), in a random order. Tokens are random and the same in every run."""
        source = random.Random(seed)
        words = range(256, vocab_size - 256)
        found = []
        for group in range(self.groups):
            shared = source.choices(words, k=self.shared)
            for _ in range(self.size):
                tokens = shared + source.choices(words, k=self.private)
                prompt = TokenPrompt(np.array(tokens, dtype=np.int64))
                found.append((group, TraceRequest(0.0, prompt, self.answer)))
        source.shuffle(found)
        return found


JOBS = {
    "rollouts": Job(48, 16, 1500, 0, 300),
    "agents": Job(32, 20, 4000, 200, 150),
    "evaluation": Job(1, 768, 3000, 300, 16),
    "chat": Job(384, 1, 0, 800, 200),
}


@dataclass(frozen=True, slots=True)
class JobRun:
    """One job on one server, in seconds: until the last answer, and until first tokens."""

    seconds: float
    ttft_mean: float
    ttft_last: float
    cached: float


def run_job(server: Server, requests: Sequence[TraceRequest]) -> JobRun:
    """Send all requests in one call to a server whose cache is emptied before.

    RuntimeError if one is not answered in full.
    """
    server.flush()
    prompts = [request.prompt.tokens.tolist() for request in requests]  # type: ignore[union-attr]
    # A first token and the last one: streams of all would keep the tokenizer's process busy.
    sampling = [
        sampling_of(request.output_length, stream_interval=request.output_length)
        for request in requests
    ]
    begin = time.perf_counter()
    first: dict[int, float] = {}
    done: dict[int, Mapping[str, Any]] = {}
    for chunk in server.stream(prompts, sampling):
        first.setdefault(chunk["index"], time.perf_counter() - begin)
        done[chunk["index"]] = chunk["meta_info"]
    seconds = time.perf_counter() - begin
    for index, request in enumerate(requests):
        got = done.get(index, {}).get("completion_tokens", 0)
        if got != request.output_length:
            raise RuntimeError(f"request {index}: {got} of {request.output_length} tokens")
    cached = sum(each.get("cached_tokens", 0) for each in done.values())
    return JobRun(
        seconds,
        statistics.fmean(first.values()),
        max(first.values()),
        cached / sum(map(len, prompts)),
    )


def predicted(
    requests: Sequence[TraceRequest], config: Mapping[str, Any], gpu: str, pool: int
) -> dict[str, ServerStats]:
    """Serve a job on the simulated servers, by backend."""
    rules = Rules(max_running_requests=MAX_RUNNING, chunked_prefill_size=CHUNK)
    setup = Setup(StepTime.of(config, GPUS[gpu]), pool, rules)
    return {name: serve(requests, setup, backend) for name, backend in _BACKENDS.items()}


_BACKENDS = {"pat": PAT, "default": DEFAULT}


def gates(jobs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Check predictions: by name, predicted over measured, and how far from 1 it may be."""
    found = {}
    for job, entry in jobs.items():
        for backend, expected in entry.get("predicted", {}).items():
            if backend not in entry["measured"]:
                continue
            measured = statistics.median(run["seconds"] for run in entry["measured"][backend])
            value, limit = expected["seconds"] / measured, LIMITS.get(job, LIMIT)
            gate = {"value": value, "limit": limit, "met": abs(value - 1) <= limit}
            found[f"{job}, {backend}: predicted / measured seconds"] = gate
    return found


def known_gpu(name: str | None) -> str | None:
    """The GPU of `workload/models.py` that a driver's name means."""
    return next((known for known in GPUS if name and known in name.upper().split()), None)


def show(data: Mapping[str, Any]) -> None:
    columns = ("job", "pat", "default", "default / pat")
    table = table_of("seconds of a job: measured, predicted", columns, words=("job",))
    for job, entry in data["jobs"].items():
        cells, medians = [], []
        for backend in _BACKENDS:
            runs = entry["measured"].get(backend)
            if runs is None:
                cells.append("")
                continue
            medians.append(statistics.median(run["seconds"] for run in runs))
            expected = entry.get("predicted", {}).get(backend)
            tail = f", {expected['seconds']:.1f}" if expected else ""
            cells.append(f"{medians[-1]:.2f}{tail}")
        ratio = f"{medians[1] / medians[0]:.2f}" if len(medians) == 2 else ""
        table.add_row(job, *cells, ratio)
    console.print(table)
    for name, gate in data["gates"].items():
        if not gate["met"]:
            show_failure(f"{name}: {gate['value']:.2f}, allowed 1 +- {gate['limit']}")


def starts(shape: ModelShape, folder: Path, pool: int) -> dict[str, Start]:
    """Return the servers by backend. folder: of the model."""
    if shape.name == TINY:
        arguments = shape.arguments | {"skip_tokenizer_init": True}
        names = {"pat": "pat", "default": "torch_native"}
    else:
        arguments = shape.arguments | SHARED_GPU
        arguments |= {
            "chunked_prefill_size": CHUNK,
            "max_running_requests": MAX_RUNNING,
            "max_total_tokens": pool,
            "cuda_graph_bs_decode": [1, 2, 4, 8, *range(16, MAX_RUNNING + 1, 16)],
        }
        names = {"pat": "pat", "default": "default"}
    return {
        name: Start(contender(backend), folder, arguments, {}) for name, backend in names.items()
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    add_option(parser, "--rounds", default=1)
    add_option(parser, "--seed")
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--seconds")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    begun = time.monotonic()
    has_gpu = cuda_driver_is_present()
    shape = MODELS["llama-3-8b" if has_gpu else TINY]
    meta = metadata()
    gpu = known_gpu(meta.get("gpu")) if has_gpu else None
    pool = POOL_TOKENS if gpu and GPUS[gpu].memory_bytes > _LARGE_GPU else SMALL_POOL_TOKENS
    data: dict[str, Any] = {
        "meta": meta,
        "model": shape.config,
        "server": {"pool": pool, "chunk": CHUNK, "max_running_requests": MAX_RUNNING},
        "servers": {},
        "jobs": {},
        "gates": {},
    }

    def save() -> None:
        data["gates"] = gates(data["jobs"])
        write(args.json, data)

    with tempfile.TemporaryDirectory(prefix="bench-jobs-") as name:
        model = shape.write(Path(name, "model"))
        with fleet(starts(shape, model, pool), Path(name)) as members:
            prepared = {}
            for job in args.jobs:
                kind = JOBS[job] if has_gpu else JOBS[job].smaller()
                grouped = kind.requests(shape.vocab_size, args.seed)
                prepared[job] = [request for _, request in grouped]
                data["jobs"][job] = {
                    "requests": len(grouped),
                    "seed": args.seed,
                    "order": [group for group, _ in grouped],
                    "arrivals": "all at once, in one call",
                    "prompt_tokens": kind.shared + kind.private,
                    "shared_tokens": kind.shared,
                    "answer_tokens": kind.answer,
                    "measured": {},
                }
                if gpu is not None:
                    found = predicted(prepared[job], shape.config, gpu, pool)
                    data["jobs"][job]["predicted"] = {
                        backend: {
                            "seconds": stats.seconds,
                            "ttft_mean": stats.ttft_ms / 1000,
                            "new_tokens": stats.new_tokens,
                        }
                        for backend, stats in found.items()
                    }
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            for backend, member in members.items():
                with watched([member], backend):
                    data["servers"][backend] = member.about()
                    _warm_up(member, prepared)
            for turn in range(args.rounds):
                for job, requests in prepared.items():
                    took = time.monotonic() - begun
                    if took > args.seconds:
                        show_failure(f"{job}, round {turn + 1}: not begun after {took:.0f} s")
                        continue
                    for backend, member in members.items():
                        if member.failure is None:
                            with watched([member], f"{job}, {backend}"):
                                _measure(data["jobs"][job], backend, member, requests)
                    save()
    data["jobs"] = {job: entry for job, entry in data["jobs"].items() if entry["measured"]}
    save()
    show(data)
    is_complete = all(len(entry["measured"]) == 2 for entry in data["jobs"].values())
    missed = [name for name, gate in data["gates"].items() if not gate["met"]]
    return 0 if data["jobs"] and is_complete and not missed else 1


def _warm_up(member: Member, prepared: Mapping[str, Sequence[TraceRequest]]) -> None:
    """Whatever first use compiles: a pass of a whole chunk, and steps with common prefixes."""
    for requests in prepared.values():
        short = [each._replace(output_length=4) for each in requests[:24]]
        run_job(member.server, short)


def _measure(
    entry: dict[str, Any], backend: str, member: Member, requests: Sequence[TraceRequest]
) -> None:
    state = gpu_state()
    run = run_job(member.server, requests)
    entry["measured"].setdefault(backend, []).append(
        {
            "seconds": run.seconds,
            "ttft_mean": run.ttft_mean,
            "ttft_last": run.ttft_last,
            "share_of_prompts_cached": run.cached,
            "gpu": {"before": state, "after": gpu_state()},
        }
    )
    console.print(f"{backend}: {run.seconds:.2f} s")
