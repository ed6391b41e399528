"""Check and time the contenders of cases, and write what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from common.metadata import gpu_state
from common.results import write
from kernel.gates import Gate, as_json, is_peer, summary
from kernel.numerics import compare
from kernel.pages import Unsupported
from kernel.workloads import Workload, WorkloadTensors
from sglang_pat.bench import timing

# Largest relative error of a request in another kernel's result, by bytes of a number of the cache:
# with one byte, FA3, XQA and FlashMLA round the queries to fp8 too.
PEER_ERROR = {2: 0.02, 1: 0.15}
# A kernel that takes so many times the time of the fastest is timed in a few rounds only.
FAR_BEHIND, FEW_ROUNDS = 3.0, 2


def measure(
    contenders: Mapping[str, Callable[..., Callable[..., torch.Tensor]]],
    workload: Workload,
    tensors: WorkloadTensors,
    caches: Sequence[tuple[torch.Tensor, ...]],
    dense: Callable[[slice, torch.dtype], torch.Tensor],
    *,
    checked_requests: int,
    rounds: int,
    dirty: bool,
) -> dict[str, Any]:
    """Check each contender with float64, then time those that passed, interleaved.

    Parameters
    ----------
    contenders
        By name; see contenders.py.
    caches
        Of each layer, what the contenders' functions are given.
    dense
        Attention of the first layer without a plan: of which requests, and computed in which type.
    checked_requests
        About how many are compared.
    dirty
        Time them also behind an L2 that was written to.

    Returns
    -------
    dict
        Times and errors by name. Why a contender has none: `unsupported` or `failed`.
    """
    rows = slice(None, None, max(1, len(tensors.q) // checked_requests))
    exact, in_torch = (dense(rows, dtype) for dtype in (torch.float64, workload.dtype))
    layers, graphs, errors, mean_errors = {}, {}, {}, {}
    failed, unsupported = {}, {}
    for name, contender in contenders.items():
        try:
            # Kept until all is timed: a graph does not own the memory that it reads and writes.
            layer = layers[name] = contender(workload, tensors)
            report = compare(layer(*caches[0])[rows].to(workload.dtype), in_torch, exact)
            errors[name], mean_errors[name] = report.max_error, report.mean_error
            if is_peer(name):
                limit = PEER_ERROR[workload.cache_dtype.itemsize]
                wrong = report.relative_error > limit and f"{report}, of a request {limit} allowed"
            else:
                wrong = not report.acceptable and str(report)
            if wrong:
                failed[name] = wrong
                continue
            graph = timing.capture(lambda layer=layer: [layer(*cache) for cache in caches])
            if not is_peer(name) and (differs := _differs(layer, graph, caches[-1])):
                failed[name] = differs
                continue
            graphs[name] = graph.replay
        except Unsupported as error:
            unsupported[name] = str(error)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            _forget_error()
    times = _timed(graphs, len(caches), rounds, dirty=dirty)
    found = {"layers": len(caches), "error": errors, "mean_error": mean_errors}
    return found | {"failed": failed, "unsupported": unsupported} | times


def _timed(
    graphs: Mapping[str, Callable[[], object]], layers: int, rounds: int, *, dirty: bool
) -> dict[str, dict[str, float]]:
    """Time all in a few rounds, and again, in all rounds, those that are not far behind."""
    times = timing.layer_us(graphs, layers, FEW_ROUNDS, warmup=1, dirty=dirty)
    fastest = min(times["us"].values(), default=0.0)
    near = {name: run for name, run in graphs.items() if times["us"][name] < FAR_BEHIND * fastest}
    for key, found in timing.layer_us(near, layers, rounds, dirty=dirty).items():
        times[key] |= found
    return times


def _forget_error() -> None:
    """Take a launch that failed out of the runtime's memory: the next kernel would report it."""
    for _ in range(2):
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda")
        except RuntimeError:
            continue
        return


def _differs(
    layer: Callable[..., torch.Tensor], graph: torch.cuda.CUDAGraph, last: Iterable[torch.Tensor]
) -> str | None:
    """Say if a second run or the graph, which ends with the layer `last`, has other bits."""
    first = layer(*last).clone()
    out = layer(*last)
    if not torch.equal(first, out):
        return "a second run of the same plan has other bits"
    out.zero_()
    graph.replay()
    return None if torch.equal(first, out) else "the graph has other bits than the eager run"


def run_cases(
    workloads: Iterable[Workload],
    measured: Callable[[Workload], dict[str, Any]],
    gates: Callable[[list[dict[str, Any]]], list[Gate]],
    *,
    names: Sequence[str],
    header: str,
    report_line: Callable[[dict[str, Any], Sequence[str]], str],
    info: dict[str, Any],
    begin: float,
    seconds: float,
    path: Path | None,
) -> int:
    """Measure and report case by case, and write the file after each.

    Parameters
    ----------
    measured
        The record of a case, with what `measure` found.
    info
        Metadata of the run; the clocks before it are in it.
    begin
        When the run began, by `time.perf_counter`; no case begins later than `seconds` after it.

    Returns
    -------
    int
        The exit status: 1 if a result of pat was wrong.
    """
    result: dict[str, Any] = {"meta": info, "cases": [], "gates": [], "left_out": []}
    cases, found = result["cases"], list[Gate]()
    for workload in workloads:
        if time.perf_counter() - begin > seconds:
            result["left_out"].append(f"{workload.suite}: {workload.name}")
            continue
        case = measured(workload)
        line = report_line(case, names)
        if not cases or cases[-1]["suite"] != case["suite"]:
            print(f"{case['suite']:{len(line) - len(header)}}{header}")
        cases.append(case)
        print(line, flush=True)
        for name, message in (case["failed"] | case["unsupported"]).items():
            print(f"    {name}: {message}", flush=True)
        info["seconds"] = time.perf_counter() - begin
        found = gates(cases)
        result["gates"] = as_json(found)
        # Each time: a run that is ended early loses nothing.
        write(path, result)
        torch.cuda.empty_cache()
    info["clocks"]["after"] = gpu_state()
    print("\n".join([*summary(cases, names), *map(str, found)]))
    print(f"clocks after {info['clocks']['after']}, {time.perf_counter() - begin:.0f} s")
    for name in result["left_out"]:
        print(f"left out after {seconds} s: {name}")
    write(path, result)
    return 1 if any("pat" in case["failed"] for case in cases) else 0
