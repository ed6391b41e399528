"""GPU timing for benchmarks. Contenders, mostly graphs, run in turn, each with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

_FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU


def capture(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `function` in a graph, after a warm-up call."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def interleaved_us(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = 3,
    dirty: bool = False,
) -> dict[str, float]:
    """Return the median microseconds of each contender. Each round runs every contender once.

    Before each run, other data is read, so that it fills the L2. This data is not written, because
    the write-back would be part of the measured time. dirty: write it nevertheless, as an earlier
    layer may do.
    """
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    total = torch.empty((), dtype=torch.int64, device="cuda")
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in contenders}
    for i in range(warmup + rounds):
        for name, run in contenders.items():
            begin, end = _event(), _event()
            if dirty:
                flush.zero_()
            else:
                torch.sum(flush, dim=None, out=total)
            begin.record()
            run()
            end.record()
            if i >= warmup:
                pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(1e3 * begin.elapsed_time(end) for begin, end in events)
        for name, events in pairs.items()
    }


def layer_us(
    graphs: Mapping[str, Callable[[], object]],
    layers: int,
    rounds: int,
    *,
    warmup: int = 3,
    dirty: bool,
) -> dict[str, dict[str, float]]:
    """Time graphs that have `layers` layers each.

    Returns the microseconds per layer by graph: `us` from interleaved_us() and, if `dirty`, also
    `us_dirty_l2` from interleaved_us(dirty=True).
    """
    found = {}
    for key, is_dirty in {"us": False, "us_dirty_l2": True}.items():
        if dirty or not is_dirty:
            times = interleaved_us(graphs, rounds=rounds, warmup=warmup, dirty=is_dirty)
            found[key] = {name: total / layers for name, total in times.items()}
    return found


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_bandwidth() -> float:
    """Return the bytes read and written per second by a device-to-device copy."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    us = interleaved_us({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return 2 * source.numel() / (us * 1e-6)
