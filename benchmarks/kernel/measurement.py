"""Checks and times the contenders of cases, and writes the results."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from common.metadata import gpu_state
from common.results import write
from common.suites import add_option
from kernel.gates import Gate, as_json, is_peer, summary, versus_best
from kernel.numerics import compare
from kernel.pages import Unsupported
from kernel.pat_trees import parse_tree
from kernel.request_forests import SLOTS, Forest
from kernel.workloads import Workload, WorkloadTensors
from sglang_pat.bench import timing
from sglang_pat.cli.arguments import quoted

# Largest allowed relative error of a request in another kernel's result, by bytes of a cache
# element. With one byte, FA3, XQA and FlashMLA also round the queries to fp8.
PEER_ERROR = {2: 0.02, 1: 0.15}
# A kernel slower than FAR_BEHIND times the fastest is timed only in FEW_ROUNDS rounds. Their median
# is not the time of a round that something else disturbed.
FAR_BEHIND, FEW_ROUNDS = 3.0, 3
ROUNDS = {False: 21, True: 7}  # by whether --quick is on
_MOST_TOKENS = 1 << 24  # limit for --tree


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

    caches: arguments of the contenders' functions (contenders.py), by layer. dense: computes
    attention of the first layer without a plan, for some requests, in some dtype. About
    `checked_requests` requests are compared. dirty: also time with a dirty L2. Returns times and
    errors by name, or why a contender has none: `unsupported` or `failed`.
    """
    # The step is odd, because the rows of a request differ in what they read.
    rows = slice(None, None, len(tensors.q) // checked_requests | 1)
    exact, in_torch = (dense(rows, dtype) for dtype in (torch.float64, workload.dtype))
    layers, graphs, errors, mean_errors = {}, {}, {}, {}
    failed, unsupported = {}, {}
    for name, contender in contenders.items():
        try:
            # Layers are kept until all are timed, because a graph does not own its memory.
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
    """Time all layers in a few rounds, then those close to the fastest in all rounds."""
    times = timing.layer_us(graphs, layers, FEW_ROUNDS, warmup=1, dirty=dirty)
    fastest = min(times["us"].values(), default=0.0)
    near = {name: run for name, run in graphs.items() if times["us"][name] < FAR_BEHIND * fastest}
    for key, found in timing.layer_us(near, layers, rounds, dirty=dirty).items():
        times[key] |= found
    return times


def _forget_error() -> None:
    """Clear the CUDA runtime's last error, which the next kernel would report."""
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
    """Return an error if a second run or the graph, which ends with layer `last`, differs."""
    first = layer(*last).clone()
    out = layer(*last)
    if not torch.equal(first, out):
        return "a second run of the same plan has other bits"
    out.zero_()
    graph.replay()
    return None if torch.equal(first, out) else "the graph has other bits than the eager run"


def add_case_options(parser: argparse.ArgumentParser, contenders: Iterable[str]) -> None:
    """Add the options of `run_cases`, and those that choose its cases and contenders."""
    parser.add_argument("--quick", action="store_true", help="a few cases of each suite")
    add_option(
        parser, "--seconds", default=math.inf, help="begin no case later; what is left out is named"
    )
    parser.add_argument("--tree", type=_tree, help="one tree instead, e.g. 1,4,64_1024,256,64")
    parser.add_argument("--contenders", nargs="+", choices=[*contenders])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--slots", choices=SLOTS, default=SLOTS[0], help="how KV lies in the pool; %(default)s"
    )
    parser.add_argument(
        "--no-dirty", action="store_true", help="only behind an L2 that was read to"
    )
    add_option(parser, "--rounds", help=f"default: {ROUNDS[False]}, {ROUNDS[True]} quick")
    add_option(parser, "--json")


def _tree(text: str) -> Forest:
    """The argparse type of a tree."""
    try:
        if sum(map(math.prod, zip(*parse_tree(text), strict=True))) <= _MOST_TOKENS:
            return Forest.of_tree(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"{quoted(text)}; allowed: a tree such as 1,4,16_512,64,32 of up to {_MOST_TOKENS:,} tokens"
    )


def described(workload: Workload) -> dict[str, Any]:
    """Return the description of a case for a record."""
    forest = workload.forest
    return {
        "suite": workload.suite,
        "kind": workload.kind,
        "name": workload.name,
        "tree": forest.name,
        "heads_q": workload.num_qo_heads,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "kv_dtype": str(workload.cache_dtype).removeprefix("torch."),
        "shared": forest.is_shared,
        "requests": forest.num_requests,
        "tokens": int(forest.seq_lens.sum()),
        "unique_tokens": forest.num_tokens,
        "unique_kv_bytes": workload.unique_kv_bytes,
    }


def report_line(case: Mapping[str, Any], names: Iterable[str]) -> str:
    us, floor = case["us"], case["floor_us"]
    cells = "".join(f"{us[n]:10.1f}" if n in us else f"{'-':>10}" for n in names)
    mine = us.get("pat", math.nan)
    ratio = versus_best(case)
    versus = f"{'-':>8}" if ratio is None else f"{ratio:7.2f}x"
    bandwidth = case["unique_kv_bytes"] / mine / 1e3
    return f"{case['name']:54}{floor:9.1f}{cells}{bandwidth:8.0f}{mine / floor:8.2f}{versus}"


def run_cases(
    args: argparse.Namespace,
    workloads: Iterable[Workload],
    measured: Callable[[Workload, int], dict[str, Any]],
    gates: Callable[[list[dict[str, Any]]], list[Gate]],
    *,
    names: Sequence[str],
    info: dict[str, Any],
    begin: float,
) -> int:
    """Measure and report each case, and write the file after each.

    args: options of `add_case_options`. measured: measures a case in a number of rounds and returns
    its record. info: metadata, with the clocks before the run. begin: `time.perf_counter()` at the
    begin of the run; no case begins more than `--seconds` later. Returns the exit status, 1 if a
    result of pat was wrong.
    """
    result: dict[str, Any] = {"meta": info, "cases": [], "gates": [], "left_out": []}
    cases, found = result["cases"], list[Gate]()
    columns = "".join(f"{name[-9:]:>10}" for name in names)
    header = f"{'floor':>9}{columns}{'GB/s':>8}{'/floor':>8}{'vs best':>8}"
    for workload in workloads:
        if time.perf_counter() - begin > args.seconds:
            result["left_out"].append(f"{workload.suite}: {workload.name}")
            continue
        case = measured(workload, args.rounds or ROUNDS[args.quick])
        line = report_line(case, names)
        if not cases or cases[-1]["suite"] != case["suite"]:
            print(f"{case['suite']:{len(line) - len(header)}}{header}")
        cases.append(case)
        print(line, flush=True)
        for name, message in (case["failed"] | case["unsupported"]).items():
            print(f"    {name}: {message}", flush=True)
        info["seconds"] = time.perf_counter() - begin
        found = gates(cases) if "pat" in names else []
        result["gates"] = as_json(found)
        # Written each time, so that a run that is stopped loses nothing.
        write(args.json, result)
        torch.cuda.empty_cache()
    info["clocks"]["after"] = gpu_state()
    print("\n".join([*summary(cases, names), *map(str, found)]))
    print(f"clocks after {info['clocks']['after']}, {time.perf_counter() - begin:.0f} s")
    for name in result["left_out"]:
        print(f"left out after {args.seconds} s: {name}")
    write(args.json, result)
    return 1 if any("pat" in case["failed"] for case in cases) else 0
