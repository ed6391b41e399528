"""Runs whole jobs on a server, and compares the times with `advise`'s predictions.

A job is sent in one call, with all requests at once and in a random order, to a server with an
empty cache.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.metadata import known_gpu
from common.models import ModelShape
from common.results import at_most
from sglang_pat.bench.server import Server, sampling_of
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.models import GPUS
from sglang_pat.workload.run import DEFAULT, PAT, ServerStats, Setup, serve
from sglang_pat.workload.server import Rules
from sglang_pat.workload.trace import TokenPrompt, TraceRequest

LIMIT = 0.15  # how far a predicted time may be off; of rollouts, which nothing explains:
LIMITS = {"rollouts": 0.20}
CHUNK, MAX_RUNNING, POOL_TOKENS = 8192, 256, 100_000
WARM_UP_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Job:
    """Groups of requests. A prompt is the group's text and some private tokens."""

    name: str
    groups: int
    size: int
    shared: int
    private: int
    answer: int

    def smaller(self) -> Job:
        """Return a job with fewer and shorter groups, for a toy model."""
        return Job(
            self.name,
            min(self.groups, 3),
            min(self.size, 4),
            self.shared // 50,
            max(1, self.private // 50),
            min(self.answer, 12),
        )

    def requests(self, vocab_size: int, seed: int = 0) -> list[tuple[int, TraceRequest]]:
        """Return (group, request) pairs in a random order. Tokens are the same in every run."""
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


JOBS = (
    Job("rollouts", 48, 16, 1500, 0, 300),
    Job("agents", 32, 20, 4000, 200, 150),
    Job("evaluation", 1, 768, 3000, 300, 16),
    Job("chat", 384, 1, 0, 800, 200),
)


@dataclass(frozen=True, slots=True)
class JobRun:
    """The seconds of a job on a server, until the last answer and until first tokens.

    cached: fraction of the prompts' tokens that were in the prefix cache.
    """

    seconds: float
    ttft_mean: float
    ttft_last: float
    cached: float


def run_job(server: Server, requests: Sequence[TraceRequest]) -> JobRun:
    """Empty the server's cache, then send all requests in one call.

    RuntimeError if a request is not answered completely.
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


def warm_up(server: Server, requests: Sequence[TraceRequest]) -> None:
    """Compile what first use compiles, by a pass of a whole chunk and steps with prefixes."""
    run_job(server, [each._replace(output_length=4) for each in requests[:WARM_UP_REQUESTS]])


def predicted(
    requests: Sequence[TraceRequest], config: Mapping[str, Any], gpu: str
) -> dict[str, ServerStats]:
    """Simulate a job, and return the stats by backend."""
    rules = Rules(max_running_requests=MAX_RUNNING, chunked_prefill_size=CHUNK)
    setup = Setup(StepTime.of_model(config, GPUS[gpu]), POOL_TOKENS, rules)
    return {name: serve(requests, setup, name) for name in (PAT, DEFAULT)}


def described(job: Job, shape: ModelShape) -> tuple[dict[str, Any], list[TraceRequest]]:
    """Return an entry of the result, with the prediction for this GPU, and the requests."""
    grouped = job.requests(shape.vocab_size)
    requests = [request for _, request in grouped]
    gpu = known_gpu(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    served = predicted(requests, shape.config, gpu) if gpu else {}
    entry = {
        "job": job.name,
        "requests": len(grouped),
        "order": [group for group, _ in grouped],
        "prompt_tokens": job.shared + job.private,
        "shared_tokens": job.shared,
        "answer_tokens": job.answer,
        "measured": {},
        "predicted_seconds": {name: each.seconds for name, each in served.items()},
    }
    return entry, requests


def gates(jobs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return gates on the relative errors of the predicted times."""
    found = {}
    for job in jobs:
        for backend, expected in job["predicted_seconds"].items():
            if backend not in job["measured"]:
                continue
            measured = statistics.median(run["seconds"] for run in job["measured"][backend])
            off, limit = abs(expected / measured - 1), LIMITS.get(job["job"], LIMIT)
            found[f"{job['job']}, {backend}: error of the prediction"] = at_most(off, limit)
    return found
