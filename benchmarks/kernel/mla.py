"""Latent attention (MLA): one decode step of a prefix tree; pat, FA3, FlashInfer, FlashMLA, Triton.

All contenders of a case run interleaved in one process, as CUDA graphs of 8 layers, each with KV of
its own, behind an L2 that holds other data: read (clean) and written (dirty). Each is compared with
float64 before it is timed. Times are per layer. The floor is the arithmetic without padding at the
rate of a large matrix multiplication here, or the KV read once at copy bandwidth, whichever takes
longer. What has to hold is in gates.py.

    python benchmarks/kernel mla --json mla.json
    python benchmarks/kernel mla --quick --seconds 60 --contenders pat fa3 flashmla
    python benchmarks/kernel mla --tree 1,128_8192,256 --heads 16

The exit status is 1 if a result of pat was wrong.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import torch

from common.metadata import gpu_state, metadata
from kernel.gates import fp8_latent_gates, latent_gates
from kernel.latent_contenders import COLUMNS, CONTENDERS, SM_SCALE
from kernel.measurement import add_case_options, described, run_cases
from kernel.measurement import measure as measure_contenders
from kernel.request_forests import Forest, lognormal_lengths
from kernel.workloads import E4M3, LAYERS, Workload, WorkloadTensors
from sglang_pat.bench import timing
from sglang_pat.cli.arguments import whole_number
from sglang_pat.executors.reference import dense_attention
from sglang_pat.support import LATENT_HEAD_DIMS

HEADS = (8, 12, 16, 20, 32)
SUITE = "mla"
_CHECKED_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class LatentWorkload(Workload):
    """One decode step of latent attention: one KV head, whose values are a part of its keys."""

    num_kv_heads: int = 1
    head_dim: int = LATENT_HEAD_DIMS[0]
    suite: str = SUITE

    @property
    def name(self) -> str:
        name = f"{self.forest.name} h{self.num_qo_heads}"
        return name + " e4m3" * (self.kv_dtype == E4M3)

    @property
    def token_bytes(self) -> int:
        return self.head_dim * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * int(self.forest.seq_lens.sum()) * self.num_qo_heads * (self.head_dim + COLUMNS)

    @property
    def sharing(self) -> int:
        """Requests that share the first node."""
        return sum(bool(path) and path[0].node_id == 0 for path in self.forest.paths)

    @property
    def prefix(self) -> int:
        """Tokens of the first node."""
        return self.forest.nodes[0][1] if self.forest.nodes else 0

    def least_us(self, copy_bandwidth: float, flops: float) -> float:
        """Every KV token, query and output moved once, or the arithmetic without padding."""
        columns = self.head_dim + COLUMNS
        query_bytes = self.forest.num_requests * self.num_qo_heads * columns * self.dtype.itemsize
        memory = (self.unique_kv_bytes + query_bytes) / copy_bandwidth
        return 1e6 * max(memory, self.flops / flops)


def _ragged(count: int, prefix: int, median: int) -> Forest:
    tails = lognormal_lengths(count, median)
    name = f"1,{count}_{prefix},lognormal-{median}"
    return Forest(name, ((-1, prefix),), tuple((0, tail) for tail in tails))


def workloads(*, quick: bool = False) -> list[LatentWorkload]:
    """All cases, the most telling ones first. quick: a few that stand for all."""
    gated = [("1,128_8192,256", 16), ("1,128_8192,256", 8)]
    gated += [("1,32_16384,512", 16), ("1,64_2048,128", 16)]
    unshared = [
        Forest.of_tree("128_1024"),
        Forest.of_tree("32_512"),
        Forest.of_tree("64_4096"),
        Forest.of_tree("8_16384"),
        Forest.of_tree("1_65536"),
        Forest.unshared("64_lognormal-1000", lognormal_lengths(64, 1000)),
    ]
    cases = [LatentWorkload(Forest.of_tree(tree), heads, quick=True) for tree, heads in gated]
    cases += [
        LatentWorkload(forest, heads, quick=heads == 16 and index in (0, 5))
        for heads in (16, 8, 20, 32)
        for index, forest in enumerate(unshared)
    ]
    shared = [
        f"1,{count}_{prefix},{tail}"
        for count, prefix, tail in (
            *((count, 4096, 512) for count in (2, 4, 16, 64, 256)),
            *((64, prefix, 512) for prefix in (1024, 16384, 65536)),
            *((count, 16384, 512) for count in (2, 4, 16)),
            *((64, 4096, tail) for tail in (128, 2048)),
            (256, 1024, 64),
            (256, 65536, 128),
        )
    ]
    cases += [
        LatentWorkload(Forest.of_tree(tree), 16, quick=index == 2)
        for index, tree in enumerate(shared)
    ]
    trees = [
        Forest.of_tree("1,4,64_4096,1024,256"),
        Forest.of_tree("1,8,128_8192,512,256"),
        Forest.of_tree("1,4,16,128_2048,1024,512,128"),
        _ragged(64, 8192, 400),
        _ragged(128, 2048, 1000),
    ]
    cases += [
        LatentWorkload(forest, heads, quick=heads == 16 and index == 0)
        for heads in (16, 8)
        for index, forest in enumerate(trees)
    ]
    cases += [
        LatentWorkload(Forest.of_tree(tree), heads)
        for heads in HEADS
        if heads != 16
        for tree in ("1,64_4096,512", "1,16_16384,512", "1,64_16384,512", "1,256_1024,64")
    ]
    return [case for case in cases if case.quick] if quick else cases


def measure(
    workload: LatentWorkload, names: list[str], rounds: int, *, dirty: bool
) -> dict[str, object]:
    """Check and time one case. dirty: also behind an L2 that was written to."""
    tensors = WorkloadTensors.make(workload)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = LAYERS, workload.forest.num_tokens + 1, 1, workload.head_dim
    pool = torch.empty(shape, dtype=workload.dtype, device="cuda").normal_(generator=generator)
    layers = list(pool.to(workload.cache_dtype))
    del pool
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


def _dense(
    tensors: WorkloadTensors, kv: torch.Tensor, rows: slice, dtype: torch.dtype
) -> torch.Tensor:
    """Attention without a plan, of some requests."""
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
    """FLOP/s of a large matrix multiplication on this GPU."""
    size = 8192
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    us = timing.interleaved_us({"matmul": lambda: matrix @ matrix}, rounds=10)["matmul"]
    return 2 * size**3 / (us * 1e-6)


def _described(workload: LatentWorkload, copy_bandwidth: float, flops: float) -> dict[str, object]:
    return described(workload) | {
        "sharing": workload.sharing,
        "prefix": workload.prefix,
        "floor_us": workload.least_us(copy_bandwidth, flops),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add_case_options(parser, CONTENDERS)
    parser.add_argument(
        "--heads", type=whole_number(1, 64), default=16, help="of --tree; %(default)s"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("float8_e4m3fn",),
        help="of the KV, if not that of the queries; SGLang's FA3 and FlashInfer convert all of the"
        " pool in every layer then: here it holds the KV of the case and nothing else",
    )


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    names = args.contenders or [*CONTENDERS]
    copy_bandwidth, flops = timing.copy_bandwidth(), matmul_flops()
    info = metadata() | {
        "copy_gbps": copy_bandwidth / 1e9,
        "matmul_tflops": flops / 1e12,
        "clocks": {"before": gpu_state()},
        "slots": args.slots,
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
            | measure(workload, names, rounds, dirty=not args.no_dirty)
        ),
        fp8_latent_gates if args.kv_dtype else latent_gates,
        names=names,
        info=info,
        begin=begin,
    )


def _workloads(args: argparse.Namespace) -> list[LatentWorkload]:
    chosen = [LatentWorkload(args.tree, args.heads)] if args.tree else workloads(quick=args.quick)
    dtype = getattr(torch, args.dtype)
    kv_dtype = getattr(torch, args.kv_dtype) if args.kv_dtype else None
    return [replace(case, dtype=dtype, slots=args.slots, kv_dtype=kv_dtype) for case in chosen]
