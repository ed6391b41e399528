"""Kernel benchmark over an fp8 KV cache: pat, FA3 and FlashInfer on the trees of PAT and unshared.

The queries are bfloat16; FA3 has them in fp8 too, as SGLang calls it. As in bench_kernels.py, all
contenders run interleaved, as CUDA graphs of 8 layers with a cold L2, and are compared with float64
over the dequantised cache first.

    python benchmarks/bench_fp8.py --json benchmarks/results/h100/fp8.json
    python benchmarks/bench_fp8.py --quick

The exit status is 1 if a gate was measured and is not met.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from kernel_gates import geomean, is_peer, over_floor, versus_best
from metadata import metadata
from numerics import compare
from planned_step import PlannedStep
from workloads import LAYERS, REFERENCE_FLOPS, Workload, WorkloadTensors, suite

from sglang_pat.bench import peers, timing
from sglang_pat.bench.peers import Layer
from sglang_pat.cli.arguments import Parser, whole_number
from sglang_pat.executors.calibration import costs_of
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.reference import dense_attention
from sglang_pat.output_file import output_file

KV_DTYPE = torch.float8_e4m3fn
Q_DTYPE = torch.bfloat16
_CHECKED_REQUESTS = 8
_POOL_BYTES = 8 << 30  # of K, and of V; twice the largest case


def pat(workload: Workload, tensors: WorkloadTensors, kv_dtype: torch.dtype = KV_DTYPE) -> Layer:
    """This package."""
    config = KernelConfig.for_device(
        workload.dtype, workload.head_dim, tensors.q.device, 0, kv_dtype
    )
    step = PlannedStep(
        config,
        workload.num_qo_heads,
        workload.num_kv_heads,
        cost=costs_of(tensors.q.device),
    )
    step.write(
        workload.forest.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    )
    out = torch.empty_like(tensors.q)

    def run(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        step.decode(tensors.q, k, v, out)
        return out

    return run


def _peer(make: Callable[[peers.DecodeTensors], Layer]) -> Callable[..., Layer]:
    def prepare(workload: Workload, tensors: WorkloadTensors) -> Layer:
        return make(
            peers.DecodeTensors(
                tensors.q,
                workload.num_kv_heads,
                tensors.req_to_token,
                tensors.seq_lens,
                kv_dtype=KV_DTYPE,
            )
        )

    return prepare


CONTENDERS: dict[str, Callable[[Workload, WorkloadTensors], Layer]] = {
    "pat": pat,
    "flashinfer": _peer(peers.flashinfer),
    "fa3": _peer(peers.fa3),
}


class Fp8Pool:
    """K and V of all cases, cut into layers."""

    def __init__(self) -> None:
        self._numbers = torch.empty((2, _POOL_BYTES), dtype=KV_DTYPE, device="cuda")
        for half in self._numbers:
            for part in half.split(1 << 28):
                part.copy_(torch.randn(len(part), device="cuda", dtype=torch.float16))

    def layers(self, workload: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of `LAYERS` layers, shifted by far more than an L2 cache holds where they overlap."""
        shape = (workload.forest.num_tokens + 1, workload.num_kv_heads, workload.head_dim)
        size = math.prod(shape)
        stride = min(size, (_POOL_BYTES - size) // (LAYERS - 1)) // 128 * 128
        k, v = self._numbers
        begins = [index * stride for index in range(LAYERS)]
        return [(k[i : i + size].view(shape), v[i : i + size].view(shape)) for i in begins]


def floor_us(workload: Workload, copy_bandwidth: float) -> float:
    """As `Workload.floor_us`, with a byte per number of the KV."""
    forest = workload.forest
    query_bytes = 2 * forest.num_requests * workload.num_qo_heads * workload.head_dim * 2
    memory = (workload.unique_kv_bytes // 2 + query_bytes) / copy_bandwidth
    return 1e6 * max(memory, workload.flops / REFERENCE_FLOPS)


def measure(workload: Workload, pool: Fp8Pool, names: list[str], rounds: int) -> dict[str, Any]:
    """Check and time one case."""
    tensors = WorkloadTensors.make(workload)
    caches = pool.layers(workload)
    rows = slice(None, None, max(1, len(tensors.q) // _CHECKED_REQUESTS))
    exact, in_torch = (
        dense_attention(
            tensors.q[rows],
            *caches[0],
            tensors.req_to_token,
            tensors.req_pool_indices[rows],
            tensors.seq_lens[rows],
            dtype=dtype,
        )[0]
        for dtype in (torch.float64, workload.dtype)
    )
    layers, graphs, errors, failed = {}, {}, {}, {}
    for name in names:
        try:
            # Kept until all is timed: a graph does not own the memory that it reads and writes.
            layer = layers[name] = CONTENDERS[name](workload, tensors)
            report = compare(layer(*caches[0])[rows].to(workload.dtype), in_torch, exact)
            errors[name] = {"max": report.max_error, "mean": report.mean_error}
            if not is_peer(name) and not report.acceptable:
                failed[name] = str(report)
                continue
            graphs[name] = timing.capture(lambda layer=layer: [layer(k, v) for k, v in caches])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            torch.cuda.synchronize()
    us = timing.interleaved_us({n: g.replay for n, g in graphs.items()}, rounds=rounds)
    us = {name: total / len(caches) for name, total in us.items()}
    return {"us": us, "error": errors, "failed": failed}


def workloads(*, quick: bool) -> list[Workload]:
    """PAT's trees, and what shares nothing with as many heads."""
    chosen = suite("pat-20", quick=quick)
    chosen += [case for case in suite("unshared", quick=quick) if case.heads == "32/8"]
    return [replace(case, dtype=Q_DTYPE) for case in chosen]


def gates(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What has to hold."""
    shared = [case for case in cases if case["shared"]]
    versus = {True: _versus(shared), False: _versus(c for c in cases if not c["shared"])}
    pat_20 = [case for case in shared if "pat" in case["us"]]
    found = {
        "pat-20 shared: geomean time/floor": (geomean(map(over_floor, pat_20)), "<=", 1.7),
        "shared: least time of the best peer / pat": (min(versus[True]), ">=", 1.0),
        "unshared: least time of the best peer / pat": (min(versus[False]), ">=", 0.97),
        "failures of pat": (sum("pat" in case["failed"] for case in cases), "<=", 0),
    }
    for kind in ("max", "mean"):
        worst = max(_errors(cases, kind))
        found[f"largest {kind} error / that of the best peer"] = (worst, "<=", 1.0)
    return {
        name: {
            "value": value,
            "limit": f"{sign} {limit}",
            "met": None
            if math.isnan(value)
            else (value <= limit if sign == "<=" else value >= limit),
        }
        for name, (value, sign, limit) in found.items()
    }


def _versus(cases: Iterable[dict[str, Any]]) -> list[float]:
    return [ratio for case in cases if (ratio := versus_best(case)) is not None] or [math.nan]


def _errors(cases: list[dict[str, Any]], kind: str) -> list[float]:
    ratios = []
    for case in cases:
        others = [error[kind] for name, error in case["error"].items() if is_peer(name)]
        if others and "pat" in case["error"]:
            ratios.append(case["error"]["pat"][kind] / min(others))
    return ratios or [math.nan]


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--rounds", type=whole_number(1, 1000), default=15)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    names = arguments.contenders
    copy_bandwidth = timing.copy_bandwidth()
    info = metadata() | {"copy_gbps": copy_bandwidth / 1e9, "kv_dtype": "float8_e4m3fn"}
    print(f"{'us':52}{'floor':>9}{''.join(f'{name[-9:]:>11}' for name in names)}{'/floor':>8}")
    pool, cases = Fp8Pool(), []
    for workload in workloads(quick=arguments.quick):
        case: dict[str, Any] = {
            "name": workload.name,
            "suite": workload.suite,
            "shared": workload.forest.is_shared,
            "floor_us": floor_us(workload, copy_bandwidth),
        }
        case |= measure(workload, pool, names, arguments.rounds)
        cases.append(case)
        us = case["us"]
        cells = "".join(f"{us.get(name, math.nan):11.1f}" for name in names)
        ratio = over_floor(case) if "pat" in us else math.nan
        print(f"{workload.name:52}{case['floor_us']:9.1f}{cells}{ratio:8.2f}", flush=True)
        for name, message in case["failed"].items():
            print(f"    {name}: {message}")
    judged = gates(cases)
    for name, gate in judged.items():
        print(f"{name}: {gate['value']:.3f} {gate['limit']} {gate['met']}")
    if arguments.json:
        found = {"meta": info, "cases": cases, "gates": judged}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(gate["met"] is False for gate in judged.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
