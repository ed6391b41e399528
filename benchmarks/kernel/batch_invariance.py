"""Batch-invariant mode: whether bits are equal, and what it costs on the trees of PAT's Figure 10.

    python benchmarks/kernel batch-invariance --json FILE
    python benchmarks/kernel batch-invariance --heads 32/8 --worlds 4 --batches 60 --rounds 5

Bits: `invariance.py` says what is compared. Price: time with the mode over time without, both in
one run, as CUDA graphs; geometric mean over the trees.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

import numpy as np
import torch

from common.metadata import gpu_state, metadata
from common.results import write
from common.suites import add_option
from kernel.attention import measure, pool_for
from kernel.gates import geomean
from kernel.invariance import World, random_forest
from kernel.workloads import Workload, suite
from sglang_pat.cli.arguments import whole_number
from sglang_pat.executors.jit import KernelConfig

MODE = "pat-batch-invariant"
PRICE_LIMIT = 1.15
# (query heads, KV heads, head_dim, dtype, mma.sync, sinks)
VARIANTS = (
    (8, 2, 128, torch.bfloat16, False, False),
    (8, 2, 128, torch.bfloat16, True, False),
    (16, 2, 64, torch.float16, False, True),
    (5, 1, 64, torch.float16, True, True),
    (32, 8, 128, torch.float16, False, False),
)


def check_bits(num_worlds: int, num_batches: int, seed: int) -> list[dict[str, object]]:
    """Per variant of the kernels: batches, requests in them, and those that have other bits."""
    cases = []
    for q_heads, kv_heads, head_dim, dtype, force_mma_sync, sinks in VARIANTS:
        device = torch.device("cuda", torch.cuda.current_device())
        config = KernelConfig.for_device(dtype, head_dim, device)
        if force_mma_sync and not config.tiles_agree:
            continue  # the device's own bodies, which the other variants are about already
        config = replace(config, force_mma_sync=force_mma_sync)
        case = {"name": f"{config.name} {q_heads}/{kv_heads}" + " sinks" * sinks}
        case |= {"worlds": num_worlds, "batches": 0, "requests": 0, "differing": 0}
        for world in range(num_worlds):
            random = np.random.default_rng((seed, world))
            torch.manual_seed(seed + world)
            made = World(config, (q_heads, kv_heads), random_forest(random), random, sinks=sinks)
            for requests, differing in made.differing(num_batches):
                case["batches"] += 1
                case["requests"] += requests
                case["differing"] += differing
        print(case, flush=True)
        cases.append(case)
    return cases


def measure_price(
    workloads: list[Workload], rounds: int, end: float
) -> tuple[list[dict[str, object]], list[str]]:
    """Per tree and heads: times with the mode and without. Names of those left out after `end`."""
    pool = pool_for(workloads)
    cases = []
    for index, workload in enumerate(workloads):
        if time.monotonic() > end:
            return cases, [each.name for each in workloads[index:]]
        case = {"name": workload.name, "heads": workload.heads, "shared": workload.forest.is_shared}
        case |= measure(workload, pool, ["pat", MODE], rounds)
        if len(case["us"]) == 2:
            case["price"] = case["us"][MODE] / case["us"]["pat"]
        times = " ".join(f"{case['us'].get(name, 0):9.1f}" for name in ("pat", MODE))
        print(
            f"{case['name']:52}{times}{case.get('price', 0):7.3f} {case['failed'] or ''}",
            flush=True,
        )
        cases.append(case)
        torch.cuda.empty_cache()
    return cases, []


def gates(bits: list[dict[str, object]], price: list[dict[str, object]]) -> dict[str, object]:
    """Judge bits and price."""
    differing = sum(case["differing"] for case in bits)
    batches = sum(case["batches"] for case in bits)
    mean = geomean([case["price"] for case in price if "price" in case])
    failed = sum(bool(case["failed"]) for case in price)
    return {
        "requests with other bits": {"value": differing, "limit": 0, "met": differing == 0},
        "random batches": {"value": batches, "limit": 1000, "met": batches >= 1000},
        "wrong results": {"value": failed, "limit": 0, "met": failed == 0},
        "price on PAT-20": {"value": mean, "limit": PRICE_LIMIT, "met": mean <= PRICE_LIMIT},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    worlds, batches = whole_number(1, 1000), whole_number(1, 10000)
    parser.add_argument("--worlds", type=worlds, default=20, help="per variant of the kernels")
    parser.add_argument("--batches", type=batches, default=100, help="per world")
    parser.add_argument(
        "--heads",
        choices=dict.fromkeys(case.heads for case in suite("pat-20")),
        help="query heads / KV heads of the trees; default: all four",
    )
    add_option(parser, "--rounds", default=25)
    add_option(parser, "--seed")
    add_option(
        parser, "--seconds", default=math.inf, help="begin no tree later; what is left out is named"
    )
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    info = metadata() | {"clocks": {"before": gpu_state()}}
    begun = time.monotonic()
    bits = check_bits(args.worlds, args.batches, args.seed)
    print(f"{time.monotonic() - begun:.1f} s for bits")
    workloads = [case for case in suite("pat-20") if args.heads in (None, case.heads)]
    price, left_out = measure_price(workloads, args.rounds, begun + args.seconds)
    for heads in dict.fromkeys(case.heads for case in workloads):
        prices = [case["price"] for case in price if "price" in case and case["heads"] == heads]
        print(f"price {heads}: {geomean(prices):.3f}")
    info["clocks"]["after"] = gpu_state()
    info["seconds"] = time.monotonic() - begun
    found = gates(bits, price)
    result = {"meta": info, "cases": bits + price, "gates": found, "left_out": left_out}
    for name, gate in result["gates"].items():
        met = "ok" if gate["met"] else "NOT MET"
        print(f"{name}: {gate['value']:.4g} (limit {gate['limit']}) {met}")
    for name in left_out:
        print(f"left out after {args.seconds:.0f} s: {name}")
    write(args.json, result)
    return 0 if all(gate["met"] for gate in result["gates"].values()) else 1
