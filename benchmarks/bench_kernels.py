"""Kernel benchmark: one decode step of a prefix tree; pat, FlashInfer, FA3, FlashInfer's cascade.

All contenders of a case run interleaved in one process, as CUDA graphs, with a cold L2; each is
compared with float64 before it is timed. As in an engine, a graph holds several layers, each with a
KV cache of its own, as far as they fit into 256 MiB: launching the graph is then shared by them.
Times are per layer.

    python benchmarks/bench_kernels.py --quick
    python benchmarks/bench_kernels.py --hybrid --json FILE
    python benchmarks/bench_kernels.py --json FILE
    python benchmarks/bench_kernels.py --tree 1,64_8192,256 --heads 32/8 --contenders pat fa3
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from baselines import ABLATIONS, CONTENDERS
from metadata import gpu_state, metadata
from numerics import compare
from workloads import Workload, WorkloadTensors, hybrid_suite, pat_suite, quick_suite

from sglang_pat.bench import timing
from sglang_pat.executors.reference import dense_attention

_CHECKED_REQUESTS = 16
_LAYERS_BYTES = 256 << 20
_MAX_LAYERS = 8


def measure(
    workload: Workload, names: list[str], seed: int | None, rounds: int
) -> dict[str, object]:
    """Check and time one case."""
    tensors = WorkloadTensors.make(workload, seed=seed)
    every = max(1, len(tensors.q) // _CHECKED_REQUESTS)
    checked = [
        dense_attention(
            tensors.q[::every],
            tensors.k_cache,
            tensors.v_cache,
            tensors.req_to_token,
            tensors.req_pool_indices[::every],
            tensors.seq_lens[::every],
            sinks=tensors.sinks,
            dtype=dtype,
        )[0]
        for dtype in (torch.float64, workload.dtype)
    ]
    caches = [(tensors.k_cache, tensors.v_cache)]
    while (len(caches) + 1) * workload.unique_kv_bytes <= _LAYERS_BYTES and len(
        caches
    ) < _MAX_LAYERS:
        caches.append((tensors.k_cache.clone(), tensors.v_cache.clone()))
    layers, graphs, errors, failed = {}, {}, {}, {}
    for name in names:
        try:
            # Kept until all is timed: a graph does not own the memory that it reads and writes.
            layer = layers[name] = (CONTENDERS | ABLATIONS)[name](workload, tensors)
            report = compare(layer(*caches[0])[::every], checked[1], checked[0])
            errors[name] = report.max_error
            # Split-KV kernels with 16-bit partials are a little worse than torch; wrong is far off.
            if not report.acceptable and (name.startswith("pat") or report.max_error > 0.05):
                failed[name] = str(report)
                continue
            graphs[name] = timing.capture(lambda layer=layer: [layer(k, v) for k, v in caches])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            torch.cuda.synchronize()
    us = timing.interleaved_us({n: g.replay for n, g in graphs.items()}, rounds=rounds)
    us = {name: total / len(caches) for name, total in us.items()}
    return {"layers": len(caches), "us": us, "error": errors, "failed": failed}


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def report_line(case: dict[str, object], names: list[str]) -> str:
    us, floor = case["us"], case["floor_us"]
    cells = [f"{us[n]:9.1f}" if n in us else f"{'-':>9}" for n in names]
    mine = us.get("pat", math.nan)
    peers = [us[n] for n in us if not n.startswith("pat")]
    versus = f"{min(peers) / mine:6.2f}x" if peers else f"{'-':>7}"
    bandwidth = case["unique_kv_bytes"] / mine / 1e3
    return (
        f"{case['name']:52}{floor:9.1f}{''.join(cells)}{bandwidth:8.0f}{mine / floor:8.2f}{versus}"
    )


def summary(cases: list[dict[str, object]], names: list[str]) -> list[str]:
    """Geometric means of time / floor."""
    lines = []
    for title, shared in (("shared", True), ("nothing shared", False)):
        rows = [case for case in cases if case["shared"] is shared]
        cells = []
        for name in names:
            ratios = [case["us"][name] / case["floor_us"] for case in rows if name in case["us"]]
            cells.append(f"{name} {geomean(ratios):.2f} ({len(ratios)})")
        lines.append(f"geomean time/floor, {title}, {len(rows)} cases: {', '.join(cells)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few trees instead of 20")
    parser.add_argument(
        "--hybrid", action="store_true", help="layers of gpt-oss, Gemma 3 and Qwen3-Next"
    )
    parser.add_argument("--tree", help="one tree, e.g. 1,4,64_1024,256,64")
    parser.add_argument("--heads", default="32/8", help="of --tree: query heads / KV heads")
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS, *ABLATIONS])
    parser.add_argument("--ablations", action="store_true", help="pat's policies and one tile only")
    parser.add_argument("--scatter", action="store_true", help="random slots, not contiguous nodes")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    names = arguments.contenders or [*CONTENDERS, *(ABLATIONS if arguments.ablations else ())]
    if arguments.hybrid and not arguments.contenders:
        names.remove("cascade")
    if arguments.tree:
        heads = [int(n) for n in arguments.heads.split("/")]
        suite = [Workload(arguments.tree, *heads)]
    elif arguments.hybrid:
        suite = hybrid_suite()
    else:
        suite = quick_suite() if arguments.quick else pat_suite()

    copy_bandwidth = timing.copy_bandwidth()
    info = metadata() | {"copy_gbps": copy_bandwidth / 1e9, "clocks": {"before": gpu_state()}}
    print(f"{info['gpu']}, copy {info['copy_gbps']:.0f} GB/s, {info['clocks']['before']}")
    heads_line = "".join(f"{name[-9:]:>9}" for name in names)
    print(f"{'us':52}{'floor':>9}{heads_line}{'GB/s':>8}{'/floor':>8}{'vs best':>7}")
    cases = []
    for workload in suite:
        case: dict[str, object] = {
            "name": workload.name,
            "tree": workload.tree_name,
            "heads_q": workload.num_qo_heads,
            "heads_kv": workload.num_kv_heads,
            "head_dim": workload.head_dim,
            "sinks": workload.with_sinks,
            "shared": workload.tree.is_shared,
            "floor_us": workload.floor_us(copy_bandwidth),
            "unique_kv_bytes": workload.unique_kv_bytes,
        }
        seed = 0 if arguments.scatter else None
        case |= measure(workload, names, seed, arguments.rounds)
        cases.append(case)
        print(report_line(case, names), flush=True)
        for name, message in case["failed"].items():
            print(f"    {name}: {message}")
        torch.cuda.empty_cache()
    info["clocks"]["after"] = gpu_state()
    print("\n".join(summary(cases, names)))
    print(f"clocks after {info['clocks']['after']}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"meta": info, "cases": cases}, indent=1))
    return 1 if any("pat" in case["failed"] for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
