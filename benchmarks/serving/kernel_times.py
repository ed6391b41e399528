"""What the GPU does in the decode steps of a server, from a profile of SGLang's scheduler."""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_pat.bench.server import Server, sampling_of

GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_LENGTH = 100  # of a kernel: templates have names without end


def trace(
    server: Server, prompts: Sequence[Sequence[int]], folder: Path, *, steps: int, seconds: float
) -> list[dict[str, Any]]:
    """The events of so many decode steps of `prompts`, as of a Chrome trace, through SGLang's own
    /start_profile. TimeoutError if there are none after so many seconds."""
    server.start_profile(
        output_dir=str(folder),
        num_steps=steps,
        activities=["GPU"],  # has the calls of CUDA too; with "CPU", kineto crashes
        profile_by_stage=True,
        with_stack=False,
        record_shapes=False,
    )
    server.generate(prompts, sampling_of(2 * steps))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in folder.glob("*DECODE*.trace.json.gz"):
            events = _events_of(path)
            if events is not None:
                return events
        time.sleep(0.2)
    raise TimeoutError(f"no profile of decode steps in {folder} after {seconds} s")


def _events_of(path: Path) -> list[dict[str, Any]] | None:
    """None while the file is being written."""
    try:
        with gzip.open(path, "rt") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    except (EOFError, json.JSONDecodeError):
        return None
    return events


def kernel_times(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds of a decode step, which is a launch of a graph. ValueError if there is none.

    Returns
    -------
    dict
        `steps`; `span`: from the first kernel of all steps to the end of the last, over the steps;
        `busy`: of it, when a kernel ran; `kernels`: by name, time and launches of a step, the
        longest first.
    """
    steps = 0
    on_gpu: list[tuple[float, float, str]] = []
    for event in events:
        if event.get("name") in GRAPH_LAUNCHES:
            steps += 1
        elif event.get("cat") in _ON_GPU:
            name = str(event["name"])[:NAME_LENGTH]
            on_gpu.append((float(event["ts"]), float(event["dur"]), name))
    if not steps or not on_gpu:
        raise ValueError("the profile shows no decode step: no CUDA graph was launched")
    times: Counter[str] = Counter()
    launches = Counter(name for *_, name in on_gpu)
    busy, until = 0.0, 0.0
    for begin, duration, name in sorted(on_gpu):
        times[name] += duration  # type: ignore[assignment]
        busy += max(0.0, begin + duration - max(begin, until))
        until = max(until, begin + duration)
    return {
        "steps": steps,
        "span": (until - min(on_gpu)[0]) / steps,
        "busy": busy / steps,
        "kernels": {
            name: [time / steps, launches[name] / steps] for name, time in times.most_common()
        },
    }


def layer_us(events: Iterable[dict[str, Any]], layers: int) -> float | None:
    """Microseconds from one layer to the next, in a decode step of so many equal layers.

    By the kernel that runs longest of those that run once in each layer; None if there is none.
    """
    steps = 0
    begins: dict[str, list[float]] = {}
    times: Counter[str] = Counter()
    for event in events:
        if event.get("name") in GRAPH_LAUNCHES:
            steps += 1
        elif event.get("cat") == "kernel":
            begins.setdefault(event["name"], []).append(float(event["ts"]))
            times[event["name"]] += event["dur"]
    once = [name for name, when in begins.items() if len(when) == steps * layers]
    if not once or layers < 3:
        return None
    when = sorted(begins[max(once, key=times.__getitem__)])
    return statistics.median(after - before for before, after in pairwise(when))
