"""Times a decode step of a prefix tree with pat, FlashInfer, FA3, cascade and XQA.

All contenders of a case run in turn in one process, as CUDA graphs of 8 layers. Before each run the
L2 is filled with other data, which is read (clean) or written (dirty). Each contender is compared
with float64 before it is timed. KV slots are scattered over the pool, as in a server that has run
for a while; with `--slots runs`, slots of a node are consecutive, as in a new server. The pools of
the suites page-64 have pages, which are scattered as a whole. Times are per layer. workloads.py has
the suites, and gates.py the gates.

    python benchmarks/kernel attention --quick --seconds 110 --no-compile
    python benchmarks/kernel attention --suite rank unshared --json FILE
    python benchmarks/kernel attention --suite fp8 page-64-fp8
    python benchmarks/kernel attention --tree 1,64_8192,256 --heads 32/8 --contenders pat fa3

The exit status is 1 if a result of pat was wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from common.metadata import gpu_state, metadata
from kernel import pages
from kernel.contenders import ABLATIONS, CONTENDERS, compile_ahead
from kernel.gates import gates
from kernel.measurement import add_case_options, described, run_cases
from kernel.measurement import measure as measure_contenders
from kernel.workloads import DEFAULT_SUITES, SUITES, KvPool, Workload, WorkloadTensors, suite
from sglang_pat.bench import timing
from sglang_pat.cli.arguments import quoted
from sglang_pat.executors.reference import dense_attention

_CHECKED_REQUESTS = 16
_POOL_BYTES = 48 << 30
# Memory for plans, partials, workspaces, float64 results and paged copies.
_SPARE_BYTES = (14 << 30) + pages.MOST_BYTES


def pool_for(workloads: Iterable[Workload]) -> KvPool:
    """Return a pool for the largest workload, or as large as the GPU allows."""
    free, _ = torch.cuda.mem_get_info()
    return KvPool(min(_POOL_BYTES, free - _SPARE_BYTES, max(map(KvPool.bytes_for, workloads))))


def measure(
    workload: Workload, pool: KvPool, names: Iterable[str], rounds: int, *, dirty: bool = False
) -> dict[str, object]:
    """Check and time one case. dirty: also time it with a dirty L2."""
    tensors = WorkloadTensors.make(workload)
    caches = pool.layers(workload)
    everybody = CONTENDERS | ABLATIONS
    return measure_contenders(
        {name: everybody[name] for name in names},
        workload,
        tensors,
        caches,
        lambda rows, dtype: _dense(tensors, *caches[0], rows, dtype),
        checked_requests=_CHECKED_REQUESTS,
        rounds=rounds,
        dirty=dirty,
    )


def _dense(
    tensors: WorkloadTensors, k: torch.Tensor, v: torch.Tensor, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Return the attention of some requests, without a plan."""
    out, _ = dense_attention(
        tensors.q[rows],
        k,
        v,
        tensors.req_to_token,
        tensors.req_pool_indices[rows],
        tensors.seq_lens[rows],
        sinks=tensors.sinks,
        dtype=dtype,
    )
    return out


def _described(workload: Workload, copy_bandwidth: float) -> dict[str, object]:
    return described(workload) | {
        "heads_kv": workload.num_kv_heads,
        "head_dim": workload.head_dim,
        "sinks": workload.with_sinks,
        "page_size": workload.page_size,
        "floor_us": workload.floor_us(copy_bandwidth),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", nargs="+", choices=SUITES, default=DEFAULT_SUITES, help="default: %(default)s"
    )
    add_case_options(parser, [*CONTENDERS, *ABLATIONS])
    parser.add_argument(
        "--heads", type=_heads, default="32/8", help="of --tree: query heads / KV heads"
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="FlashInfer runs only what was compiled before; else its kernels are compiled first",
    )
    parser.add_argument("--ablations", action="store_true", help="pat's policies and one tile only")


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    if args.no_compile:  # set before FlashInfer is imported
        os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    names = args.contenders or [*CONTENDERS, *(ABLATIONS if args.ablations else ())]
    copy_bandwidth = timing.copy_bandwidth()
    info = metadata() | {
        "copy_gbps": copy_bandwidth / 1e9,
        "clocks": {"before": gpu_state()},
        "slots": args.slots,
    }
    print(f"{info['gpu']}, copy {info['copy_gbps']:.0f} GB/s, {info['clocks']['before']}")
    workloads = _workloads(args)
    if not args.no_compile:
        compile_kernels(workloads, names)
    pool = pool_for(workloads)
    print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    return run_cases(
        args,
        workloads,
        lambda workload, rounds: (
            _described(workload, copy_bandwidth)
            | measure(workload, pool, names, rounds, dirty=not args.no_dirty)
        ),
        lambda cases: [] if args.tree else gates(cases),
        names=names,
        info=info,
        begin=begin,
    )


def compile_kernels(workloads: Iterable[Workload], names: Iterable[str]) -> None:
    """Compile FlashInfer's kernels. Print failures with their cases."""
    try:
        compile_ahead(workloads, names)
    except RuntimeError as error:
        print(f"not all kernels of FlashInfer compile: {str(error).splitlines()[0]}", flush=True)


def _workloads(args: argparse.Namespace) -> list[Workload]:
    if args.tree:
        chosen = [Workload(args.tree, *args.heads)]
    else:
        chosen = [
            case for name in SUITES if name in args.suite for case in suite(name, quick=args.quick)
        ]
    dtype = getattr(torch, args.dtype)
    return [replace(case, dtype=dtype, slots=args.slots) for case in chosen]


def _heads(text: str) -> tuple[int, int]:
    """The argparse type of query heads / KV heads."""
    found = re.fullmatch(r"([1-9]\d{0,2})/([1-9]\d{0,2})", text)
    if found is None or int(found[1]) % int(found[2]):
        raise argparse.ArgumentTypeError(
            f"{quoted(text)}; allowed: a multiple of the KV heads / these, up to 999, e.g. 32/8"
        )
    return int(found[1]), int(found[2])
