"""Waits of the host in a decode step, counted in a profile of SGLang's scheduler.

    python benchmarks/server waits [--backends pat fa3] [--json FILE]

One server per backend on the 8B shape, its decode steps profiled through SGLang's own
/start_profile. Of the scheduler's calls of the CUDA runtime, those are counted that wait for the
device, and copies from memory that is not pinned, which wait as well; per decode step, that is per
launch of a graph. SGLang itself waits for the tokens of the last step. The exit status is 1 if pat
adds any to what the other backends need.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.metadata import gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import write
from common.suites import Refused, add_option
from common.terminal import console, show_failure, table_of
from server.kernel_times import GRAPH_LAUNCHES, trace
from sglang_pat.bench.cases import Case
from sglang_pat.bench.server import Server, contender, running_server, sampling_of

STEPS = 24
TRACE_SECONDS = 120
CASE, TINY_CASE = Case(128, 8192, 256, 128), Case(6, 100, 10, 48)
# Starting and ending the profiler waits now and then.
TOLERANCE = 0.1
_WAITING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)


def per_step(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Waits by name, per decode step. events: of a Chrome trace. ValueError if there is no step."""
    counts: Counter[str] = Counter()
    steps = 0
    for event in events:
        name, category = str(event.get("name", "")), event.get("cat")
        if name in GRAPH_LAUNCHES:
            steps += 1
        elif name in _WAITING or (category == "gpu_memcpy" and "Pageable" in name):
            counts[name] += 1
    if not steps:
        raise ValueError("the profile shows no decode step: no CUDA graph was launched")
    return {"steps": float(steps)} | {name: counts[name] / steps for name in sorted(counts)}


def profile(server: Server, case: Case, vocab_size: int, folder: Path) -> list[dict[str, Any]]:
    """The trace of STEPS decode steps of `case`. TimeoutError if SGLang writes none."""
    prompts = case.prompts(vocab_size)
    server.generate(prompts[:1], sampling_of(1))
    server.generate(prompts, sampling_of(4))
    return trace(server, prompts, folder, steps=STEPS, seconds=TRACE_SECONDS)


def added(found: dict[str, dict[str, float]]) -> list[str]:
    """Name the waits of pat that no other backend has as often; for people."""
    others = [counts for name, counts in found.items() if name != "pat"]
    return [
        f"{name}: {count:.2f} per step"
        for name, count in found["pat"].items()
        if name != "steps"
        and count > max((each.get(name, 0.0) for each in others), default=0.0) + TOLERANCE
    ]


def profile_backend(model: ModelShape, backend: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="profile-steps-") as name:
        folder = Path(name)
        console.print(f"{model.name}: starting the server with {backend}")
        path = model.write(folder)
        with running_server(contender(backend), path, folder, **model.arguments) as server:
            return per_step(
                profile(server, TINY_CASE if model.name == TINY else CASE, model.vocab_size, folder)
            )


def add_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--backends", default=["pat", "fa3"])
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if "pat" not in args.backends:
        raise Refused(f"--backends needs pat; got {args.backends}")
    before = gpu_state()
    found = {backend: profile_backend(MODELS[args.model], backend) for backend in args.backends}
    table = table_of("waits for the device, per decode step", ("", *found), words=("",))
    for name in dict.fromkeys(name for counts in found.values() for name in counts):
        table.add_row(name, *(f"{counts.get(name, 0):.2f}" for counts in found.values()))
    console.print(table)
    failures = added(found)
    for failure in failures:
        show_failure(f"pat adds {failure}")
    meta = metadata() | {"gpu_before": before, "gpu_after": gpu_state()}
    write(args.json, {"meta": meta, "per_step": found, "added_by_pat": failures})
    return 1 if failures else 0
