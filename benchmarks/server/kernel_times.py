"""The GPU's work in the decode steps of a server, from a profile of SGLang's scheduler."""

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
    """Events of so many decode steps of `prompts`, in the form of a Chrome trace.

    They come from SGLang's own /start_profile. TimeoutError if there are none after so many
    seconds.
    """
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
        `steps`; `step`: from one step to the next, None if no kernel runs once in each; `busy`: of
        a step, when a kernel ran; `kernels`: by name, time and launches of a step, the longest
        first. One that waits for the kernel before it, as a dependent launch does, is as long as it
        waits.
    """
    profile = _Profile(events)
    times: Counter[str] = Counter()
    busy, until = 0.0, 0.0
    for begin, duration, name in sorted(profile.on_gpu):
        times[name[:NAME_LENGTH]] += duration  # type: ignore[assignment]
        busy += max(0.0, begin + duration - max(begin, until))
        until = max(until, begin + duration)
    launches = Counter(name[:NAME_LENGTH] for *_, name in profile.on_gpu)
    return {
        "steps": profile.steps,
        "step": profile.period(1),
        "busy": busy / profile.steps,
        "kernels": {
            name: [time / profile.steps, launches[name] / profile.steps]
            for name, time in times.most_common()
        },
    }


class _Profile:
    """The steps of a profile, and begin, duration and name of all that the GPU did."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.steps = 0
        self.on_gpu: list[tuple[float, float, str]] = []
        for event in events:
            if event.get("name") in GRAPH_LAUNCHES:
                self.steps += 1
            elif event.get("cat") in _ON_GPU:
                self.on_gpu.append((float(event["ts"]), float(event["dur"]), str(event["name"])))
        if not self.steps or not self.on_gpu:
            raise ValueError("the profile shows no decode step: no CUDA graph was launched")

    def period(self, per_step: int) -> float | None:
        """Between two launches of the longest kernel that is launched so often in each step."""
        begins: dict[str, list[float]] = {}
        times: Counter[str] = Counter()
        for begin, duration, name in self.on_gpu:
            begins.setdefault(name, []).append(begin)
            times[name] += duration  # type: ignore[assignment]
        regular = [name for name in begins if len(begins[name]) == self.steps * per_step]
        if not regular or self.steps * per_step < 2:
            return None
        when = sorted(begins[max(regular, key=times.__getitem__)])
        return statistics.median(after - before for before, after in pairwise(when))
