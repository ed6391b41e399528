"""A run of the demo, in which an SGLang engine with one attention backend serves the workload."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_pat.bench.answers import Candidate
from sglang_pat.cli.demo.report import Served, console
from sglang_pat.cli.demo.workload import DemoRequest
from sglang_pat.cli.progress import sign_of_life

MAX_RUNNING_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class DemoMachine:
    """Settings of the demo on this machine.

    Attributes
    ----------
    own_backend
        The attention backend that pat is compared with. None: SGLang's default.
    exact
        Whether both runs must give the same tokens. True for float32 on the CPU. False for half
        precision on a GPU, where two tokens may tie within rounding. To find ties, the two most
        probable tokens are then requested too.
    arguments
        The arguments of sglang.Engine.
    """

    own_backend: str | None
    exact: bool
    arguments: dict[str, Any]

    @classmethod
    def choose(cls, *, on_cpu: bool) -> DemoMachine:
        """Return the settings for the CPU, or for the GPU with CUDA graphs."""
        if on_cpu:
            return cls("torch_native", True, {"device": "cpu", "dtype": "float32"})
        graphs = {
            "cuda_graph_max_bs_decode": MAX_RUNNING_REQUESTS,
            "cuda_graph_backend_prefill": "disabled",  # halves the time to start the engine
        }
        return cls(None, False, {"device": "cuda", "dtype": "float16", **graphs})


def serve(
    model_path: Path,
    backend: str | None,
    requests: list[DemoRequest],
    machine: DemoMachine,
    stats_file: Path | None = None,
) -> Served:
    """Start an engine with `backend`, send every request at its time, and shut the engine down.

    Parameters
    ----------
    model_path
        The folder of the model.
    backend
        The attention backend. None: SGLang's default.
    requests
        The workload.
    machine
        The settings of the engine.
    stats_file
        The file to which pat writes its counters. None: counters are not read.
    """
    from sglang_pat.sglang.cpu import KV_POOL_TOKENS, new_engine

    console.print(f"Starting sglang.Engine(attention_backend={backend!r}, ...)")
    with sign_of_life("loading SGLang and the model"):
        began = time.perf_counter()
        engine = new_engine(
            model_path=str(model_path),
            attention_backend=backend,
            **machine.arguments,
            skip_tokenizer_init=True,
            max_running_requests=MAX_RUNNING_REQUESTS,
            max_total_tokens=KV_POOL_TOKENS,
            log_level="error",
        )
    try:
        console.print(f"Ready after {time.perf_counter() - began:.0f} s")
        began = time.perf_counter()
        title = f"Serving with {backend or 'the default':12}"
        answers = engine.loop.run_until_complete(_send(engine, title, requests, machine))
        seconds = time.perf_counter() - began
        tokens = [answer["output_ids"] for answer in answers]
        candidates = None if machine.exact else list(map(_candidates, answers))
        stats = {}
        if stats_file is not None:
            engine.get_server_info()  # makes the scheduler write the file
            stats = json.loads(stats_file.read_text())
        return Served(tokens, seconds, candidates, stats)
    finally:
        engine.shutdown()


def _candidates(answer: dict[str, Any]) -> list[list[Candidate]]:
    positions = answer["meta_info"]["output_top_logprobs"]
    return [[Candidate(logprob, token) for logprob, token, *_ in best] for best in positions]


async def _send(
    engine: Any, title: str, requests: list[DemoRequest], machine: DemoMachine
) -> list[dict[str, Any]]:
    """Send every request at its arrival time. While the engine is full, new requests wait."""
    running = asyncio.Semaphore(MAX_RUNNING_REQUESTS)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console)

    def served() -> str:
        return f"{title.strip()}, {progress.tasks[0].completed:.0f} of {len(requests)} requests"

    with progress, nullcontext() if console.is_terminal else sign_of_life(served):
        bar = progress.add_task(title, total=len(requests))
        logprobs = {} if machine.exact else {"return_logprob": True, "top_logprobs_num": 2}

        async def send(request: DemoRequest) -> dict[str, Any]:
            await asyncio.sleep(request.arrival_s)
            async with running:
                answer: dict[str, Any] = await engine.async_generate(
                    input_ids=request.prompt,
                    sampling_params={
                        "temperature": 0,
                        "max_new_tokens": request.num_new_tokens,
                        "ignore_eos": True,
                    },
                    **logprobs,
                )
            progress.advance(bar)
            return answer

        return await asyncio.gather(*map(send, requests))
