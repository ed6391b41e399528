"""One run of the demo: a real SGLang engine serves the workload as it arrives.

Beside the pipeline, called by the demo once per attention backend.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_pat.demo.report import console
from sglang_pat.demo.workload import Request

OWN_BACKEND = "torch_native"
MAX_RUNNING_REQUESTS = 32
KV_POOL_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Served:
    """The new tokens of every request, in the order of the workload, and the seconds it took."""

    tokens: list[list[int]]
    seconds: float


def serve(model_path: Path, backend: str, requests: list[Request], *, on_cpu: bool) -> Served:
    """Start an engine with `backend`, send every request at its time, and shut the engine down."""
    import sglang

    # SGLang's default for prefill on a GPU takes no float32.
    prefill = {} if on_cpu else {"prefill_attention_backend": OWN_BACKEND}
    console.print(f"Starting sglang.Engine(attention_backend={backend!r}, ...)")
    with console.status("loading SGLang and the model"):
        began = time.perf_counter()
        engine = sglang.Engine(
            model_path=str(model_path),
            attention_backend=backend,
            **prefill,
            skip_tokenizer_init=True,
            dtype="float32",
            device="cpu" if on_cpu else "cuda",
            # Torch executes float32 plans, and cannot be captured.
            disable_cuda_graph=True,
            max_running_requests=MAX_RUNNING_REQUESTS,
            max_total_tokens=KV_POOL_TOKENS,
            log_level="error",
        )
    try:
        console.print(f"Ready after {time.perf_counter() - began:.0f} s")
        began = time.perf_counter()
        tokens = engine.loop.run_until_complete(_send(engine, backend, requests))
        return Served(tokens, time.perf_counter() - began)
    finally:
        engine.shutdown()


async def _send(engine: Any, backend: str, requests: list[Request]) -> list[list[int]]:
    """Every request at its time, but no more at once than the engine may run."""
    running = asyncio.Semaphore(MAX_RUNNING_REQUESTS)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(f"Serving with {backend:12}", total=len(requests))

        async def send(request: Request) -> list[int]:
            await asyncio.sleep(request.arrival_s)
            async with running:
                answer = await engine.async_generate(
                    input_ids=request.prompt,
                    sampling_params={
                        "temperature": 0,
                        "max_new_tokens": request.num_new_tokens,
                        "ignore_eos": True,
                    },
                )
            progress.advance(bar)
            tokens: list[int] = answer["output_ids"]
            return tokens

        return await asyncio.gather(*map(send, requests))
