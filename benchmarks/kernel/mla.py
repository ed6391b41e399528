"""Times latent attention (MLA) with pat, FA3, FlashInfer, FlashMLA and Triton.

A case is a decode step of a prefix tree. All contenders of a case run in turn in one process, as
CUDA graphs of 8 layers, each with its own KV. Before each run the L2 is filled with other data,
which is read (clean) or written (dirty). Each contender is compared with float64 before it is
timed. Times are per layer. The floor is the time of the arithmetic without padding, at the rate of
a large matrix multiplication on this GPU, or the time to read the KV once at copy bandwidth,
whichever is longer. The gates are in gates.py.

    python benchmarks/kernel mla --json mla.json
    python benchmarks/kernel mla --quick --seconds 60 --contenders pat fa3 flashmla
    python benchmarks/kernel mla --tree 1,128_8192,256 --heads 16
    python benchmarks/kernel mla --suite many-rows --contenders pat fa3 flashmla

The exit status is 1 if a result of pat was wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from common.metadata import gpu_state, metadata
from kernel.gates import Gate, fp8_latent_gates, latent_gates, many_rows_gates
from kernel.latent_contenders import CONTENDERS, SM_SCALE
from kernel.latent_workloads import (
    COLUMNS,
    MANY,
    MANY_ROWS,
    SUITE,
    SUITES,
    LatentWorkload,
    many_rows,
    workloads,
)
from kernel.measurement import add_case_options, described, run_cases
from kernel.measurement import measure as measure_contenders
from kernel.workloads import LAYERS, WorkloadTensors
from sglang_pat.bench import timing
from sglang_pat.cli.arguments import whole_number
from sglang_pat.executors.reference import dense_attention

_CHECKED_REQUESTS = 8


def measure(
    workload: LatentWorkload, names: list[str], rounds: int, *, dirty: bool, pool_tokens: int = 0
) -> dict[str, object]:
    """Check and time one case. dirty: also time it with a dirty L2.

    pool_tokens: slots of the pool, if the case has fewer.
    """
    tensors = _tensors(workload)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = max(workload.forest.num_tokens + 1, pool_tokens), 1, workload.head_dim
    layers = [
        torch.empty(shape, dtype=workload.dtype, device="cuda")
        .normal_(generator=generator)
        .to(workload.cache_dtype)
        for _ in range(LAYERS)
    ]
    return measure_contenders(
        {name: CONTENDERS[name] for name in names},
        workload,
        tensors,
        [(layer,) for layer in layers],
        lambda rows, dtype: _dense(tensors, layers[0].to(workload.dtype), rows, dtype),
        checked_requests=_CHECKED_REQUESTS,
        rounds=rounds,
        dirty=dirty,
    )


def _tensors(workload: LatentWorkload) -> WorkloadTensors:
    """Return the step's tensors: queries, lengths and requests by row, the table by request."""
    tensors = WorkloadTensors.make(workload)
    if workload.drafts == 1:
        return tensors
    queries = [torch.randn_like(tensors.q) for _ in range(workload.drafts)]
    return replace(
        tensors,
        q=torch.stack(queries, 1).flatten(0, 1),
        req_pool_indices=tensors.req_pool_indices.repeat_interleave(workload.drafts),
        seq_lens=torch.from_numpy(workload.row_lens).to(tensors.seq_lens),
    )


def _dense(
    tensors: WorkloadTensors, kv: torch.Tensor, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Return the attention of some requests, without a plan."""
    out, _ = dense_attention(
        tensors.q[rows],
        kv,
        kv[..., :COLUMNS],
        tensors.req_to_token,
        tensors.req_pool_indices[rows],
        tensors.seq_lens[rows],
        sm_scale=SM_SCALE,
        dtype=dtype,
    )
    return out


def matmul_flops() -> float:
    """Return the FLOP/s of a large matrix multiplication on this GPU."""
    size = 8192
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    us = timing.interleaved_us({"matmul": lambda: matrix @ matrix}, rounds=10)["matmul"]
    return 2 * size**3 / (us * 1e-6)


def _described(workload: LatentWorkload, copy_bandwidth: float, flops: float) -> dict[str, object]:
    return described(workload) | {
        "drafts": workload.drafts,
        "sharing": workload.sharing,
        "prefix": workload.prefix,
        "floor_us": workload.least_us(copy_bandwidth, flops),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add_case_options(parser, CONTENDERS)
    parser.add_argument(
        "--heads", type=whole_number(1, 64), default=16, help="of --tree; %(default)s"
    )
    parser.add_argument("--suite", choices=SUITES, default=SUITE, help="%(default)s")
    parser.add_argument(
        "--drafts", type=whole_number(1, 64), default=1, help="of --tree; %(default)s"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("float8_e4m3fn",),
        help="of the KV, if not that of the queries; SGLang's FA3 and FlashInfer convert all of the"
        " pool in every layer then",
    )
    parser.add_argument(
        "--pool-tokens",
        type=whole_number(0, 1 << 24),
        default=0,
        help="slots of the pool, where the case has fewer; default: the KV of the case, no more",
    )
    parser.add_argument(
        "--rows",
        type=_rows,
        nargs="+",
        default=MANY,
        metavar="HEADSxDRAFTS",
        help="of --suite many-rows; 16x4 64x1 20x4 8x8",
    )


def _rows(text: str) -> tuple[int, int]:
    """The argparse type of query heads and draft tokens."""
    heads, _, drafts = text.partition("x")
    limit = whole_number(1, 64)
    return limit(heads), limit(drafts)


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    names = args.contenders or [*CONTENDERS]
    copy_bandwidth, flops = timing.copy_bandwidth(), matmul_flops()
    info = metadata() | {
        "copy_gbps": copy_bandwidth / 1e9,
        "matmul_tflops": flops / 1e12,
        "clocks": {"before": gpu_state()},
        "slots": args.slots,
        "pool_tokens": args.pool_tokens,
    }
    print(
        f"{info['gpu']}, copy {info['copy_gbps']:.0f} GB/s, matmul {info['matmul_tflops']:.0f} "
        f"TFLOP/s, {info['clocks']['before']}"
    )
    return run_cases(
        args,
        _workloads(args),
        lambda workload, rounds: (
            _described(workload, copy_bandwidth, flops)
            | measure(
                workload,
                names,
                rounds,
                dirty=not args.no_dirty,
                pool_tokens=args.pool_tokens,
            )
        ),
        _gates(args),
        names=names,
        info=info,
        begin=begin,
    )


def _gates(args: argparse.Namespace) -> Callable[[list[dict[str, object]]], list[Gate]]:
    if args.suite == MANY_ROWS:
        return many_rows_gates
    return fp8_latent_gates if args.kv_dtype else latent_gates


def _workloads(args: argparse.Namespace) -> list[LatentWorkload]:
    chosen = many_rows(args.rows) if args.suite == MANY_ROWS else workloads(quick=args.quick)
    if args.tree:
        chosen = [LatentWorkload(args.tree, args.heads, suite=args.suite, drafts=args.drafts)]
    dtype = getattr(torch, args.dtype)
    kv_dtype = getattr(torch, args.kv_dtype) if args.kv_dtype else None
    return [replace(case, dtype=dtype, slots=args.slots, kv_dtype=kv_dtype) for case in chosen]
