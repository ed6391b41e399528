"""New tokens into a KV cache: pat's one kernel against the kernels of SGLang's pool.

Each contender is a CUDA graph of 32 layers, timed interleaved with the others. Alone: the writes of
32 layers after each other. Added: two kernels that make queries, keys and values, the write, and
the attention; the same without a write is subtracted, so what is left is what a write adds.

SGLang's own kernels are compiled by nvcc where they run. Triton kernels stand in for them. As
there, each lets the next one start early: what stands for RoPE behind its stores, and the store of
the pool behind its own as in 0.5.17, or before them as in 0.5.23. With --sglang, the store of the
SGLang that is installed is timed too.

    python benchmarks/kernel kv-write --json benchmarks/results/h100/kv-write.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from common.metadata import metadata
from common.results import write as write_json
from common.suites import add_option
from kernel.planned_step import PlannedStep
from kernel.request_forests import Forest
from sglang_pat.bench import timing
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import KvWriter

LAYERS = 32
HEAD_DIM = 128
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16  # the second is the model's
POOLS = {"bf16": BF16, "fp8": FP8}
SLOTS = 1 << 16
_SCALE = 0.0313

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


class Shape(NamedTuple):
    """A batch, as `Forest.of_tree` reads it, and the heads that a rank has."""

    tree: str
    num_qo_heads: int
    num_kv_heads: int


SHAPES = (
    Shape("1,128_8192,256", 32, 8),
    Shape("1,8_8192,256", 32, 8),
    Shape("1_500", 32, 8),
    Shape("1,128_8192,256", 8, 1),
    Shape("1,8_8192,256", 8, 1),
    Shape("1_500", 8, 1),
)


_ROTATED = 256  # numbers of a program


@triton.jit
def _rotate(source, qkv, SIZE: tl.constexpr, OVERLAPS: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    tl.store(qkv + offsets, tl.load(source + offsets))
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


def overlap() -> tuple[bool, dict[str, Any]]:
    """Return if kernels let each other start early here, and the launch options for it."""
    overlaps = torch.cuda.get_device_capability() >= (9, 0)
    return overlaps, {"launch_pdl": True} if overlaps else {}


@triton.jit
def _store(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + token)
    if EARLY:
        keys = tl.load(k + token * k_stride + columns)
        values = tl.load(v + token * v_stride + columns)
        if OVERLAPS:
            tl.extra.cuda.gdc_launch_dependents()
        if slot != 0:
            tl.store(k_cache + slot * WIDTH + columns, keys)
            tl.store(v_cache + slot * WIDTH + columns, values)
    else:
        if slot != 0:
            keys = tl.load(k + token * k_stride + columns)
            values = tl.load(v + token * v_stride + columns)
            tl.store(k_cache + slot * WIDTH + columns, keys)
            tl.store(v_cache + slot * WIDTH + columns, values)
        if OVERLAPS:
            tl.extra.cuda.gdc_launch_dependents()


def store_of(*, early: bool) -> Write:
    """Return a stand-in of the pool's store, of numbers that have the cache's type."""
    overlaps, options = overlap()

    def write(k, v, slots, k_cache, v_cache):
        integers = torch.uint8 if k.dtype == FP8 else torch.int16
        views = [each.view(integers) for each in (k, v, k_cache, v_cache)]
        width = k.shape[1] * k.shape[2]
        warps = max(1, min(4, width * k.element_size() // 512))
        strides = k.stride(0), v.stride(0)
        _store[(len(k),)](
            *views, slots, *strides, width, early, overlaps, num_warps=warps, **options
        )

    return write


def in_torch(divisor: torch.Tensor | None) -> Write:
    """Return the conversions of MHATokenToKVPool.set_kv_buffer(), with one store."""
    store = store_of(early=False)

    def write(k, v, slots, k_cache, v_cache):
        if divisor is not None:
            k.div_(divisor)
            v.div_(divisor)
        store(k.to(FP8), v.to(FP8), slots, k_cache, v_cache)

    return write


def by_sglang() -> Write:
    """The store of SGLang's pools."""
    from sglang.kernels.ops.kvcache.kvcache import store_cache  # noqa: TID251 (it is timed)

    def write(k, v, slots, k_cache, v_cache):
        width = k.shape[1] * k.shape[2]
        rows = [each.view(-1, width) for each in (k, v, k_cache, v_cache)]
        num_bytes = width * k.element_size()
        store_cache(
            *rows, slots, row_bytes=num_bytes, v_row_bytes=num_bytes, size_limit=len(k_cache)
        )

    return write


def by_kernel(writer: KvWriter, divisor: torch.Tensor | None) -> Write:
    """The package itself."""
    scale = writer.scale(divisor)
    assert scale is not None

    def write(k, v, slots, k_cache, v_cache):
        assert writer.write(k, v, slots, k_cache, v_cache, scale, scale)

    return write


class Case:
    """Tensors of `LAYERS` layers, and a planned step over the same caches."""

    def __init__(self, shape: Shape, kv_dtype: torch.dtype) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.config = KernelConfig.for_device(BF16, HEAD_DIM, device, 0, kv_dtype)
        forest = Forest.of_tree(shape.tree)
        self.num_tokens = num_tokens = forest.num_requests
        num_qo_heads, num_kv_heads = shape.num_qo_heads, shape.num_kv_heads
        self.widths = [num_qo_heads * HEAD_DIM, *[num_kv_heads * HEAD_DIM] * 2]
        self.source = torch.randn(num_tokens, sum(self.widths), device=device).to(BF16)
        self.qkv, self.made = self.source.clone(), self.source.clone()
        cache_shape = (SLOTS, num_kv_heads, HEAD_DIM)
        self.caches = [
            [torch.randn(cache_shape, device=device, dtype=BF16).to(kv_dtype) for _ in range(2)]
            for _ in range(2)
        ]
        self.writer = KvWriter(self.config, device)
        table = forest.token_table()
        rows = torch.arange(num_tokens, device=device)
        lengths = torch.from_numpy(forest.seq_lens).to(device)
        self.slots = table[rows, lengths.long() - 1].long()
        self.step = PlannedStep(self.config, num_qo_heads, num_kv_heads)
        self.step.write(forest.batch(), table, rows, lengths)
        self.out = torch.empty(num_tokens, num_qo_heads, HEAD_DIM, dtype=BF16, device=device)
        self.scale = _SCALE if kv_dtype == FP8 else 1.0

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values in the fused rows."""
        return tuple(
            each.view(self.num_tokens, -1, HEAD_DIM) for each in self.qkv.split(self.widths, dim=1)
        )

    def alone(self, write: Write | None) -> None:
        """The writes of all layers."""
        assert write is not None
        _, k, v = self.parts()
        for layer in range(LAYERS):
            write(k, v, self.slots, *self.caches[layer % 2])

    def in_layers(self, write: Write | None) -> None:
        """All layers, with or without a write."""
        q, k, v = self.parts()
        overlaps, options = overlap()
        programs = (self.qkv.numel() // _ROTATED,)
        for layer in range(LAYERS):
            torch.add(self.source, 1.0, out=self.made)
            _rotate[programs](self.made, self.qkv, _ROTATED, overlaps, num_warps=1, **options)
            caches = self.caches[layer % 2]
            if write is not None:
                write(k, v, self.slots, *caches)
            self.step.decode(q, *caches, self.out, k_scale=self.scale, v_scale=self.scale)


def check(case: Case, writes: dict[str, Write]) -> None:
    """All leave the same bytes."""
    assert (case.slots > 0).all()
    results = []
    for write in writes.values():
        case.qkv.copy_(case.source)
        _, k, v = case.parts()
        write(k, v, case.slots, *case.caches[0])
        results.append([cache.view(torch.uint8).clone() for cache in case.caches[0]])
        for cache in case.caches[0]:
            cache.view(torch.uint8)[case.slots] = 0
    for name, result in zip(writes, results, strict=True):
        if not all(map(torch.equal, result, results[0])):
            raise SystemExit(f"{name} writes other bytes than {next(iter(writes))}")


def microseconds(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int) -> dict[str, float]:
    """Median time of a layer of each graph, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end) / LAYERS)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def contenders(case: Case, divisor: torch.Tensor | None, *, with_sglang: bool) -> dict[str, Write]:
    """By name. divisor: of an fp8 cache."""
    own = {"pat": by_kernel(case.writer, divisor)}
    if case.config.kv_dtype is not None:
        return {"torch": in_torch(divisor)} | own
    sglang = {"sglang": by_sglang()} if with_sglang else {}
    return {"as 0.5.17": store_of(early=False), "as 0.5.23": store_of(early=True)} | sglang | own


def measure(case: Case, writes: dict[str, Write], rounds: int) -> dict[str, dict[str, float]]:
    """Time of a layer by contender: of writes alone, of all of it, and what the write adds."""
    alone = {name: timing.capture(partial(case.alone, write)) for name, write in writes.items()}
    layers = {
        name: timing.capture(partial(case.in_layers, write))
        for name, write in (*writes.items(), ("no write", None))
    }
    alone_us, layer_us = microseconds(alone, rounds), microseconds(layers, rounds)
    added_us = {name: layer_us[name] - layer_us["no write"] for name in writes}
    return {"alone_us": alone_us, "layer_us": layer_us, "added_us": added_us}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    add_option(parser, "--rounds", default=30)
    parser.add_argument("--sglang", action="store_true", help="time SGLang's own store too")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    print("us per layer")
    print("pool  tokens  heads  scaled  write        added   alone   layer")
    for pool, shape in product(args.pools, SHAPES):
        case = Case(shape, POOLS[pool])
        for is_scaled in (False, True) if pool == "fp8" else (False,):
            divisor = torch.tensor(_SCALE, device="cuda") if is_scaled else None
            writes = contenders(case, divisor, with_sglang=args.sglang)
            check(case, writes)
            times = measure(case, writes, args.rounds)
            head = f"{pool:4}  {case.num_tokens:6}  {shape.num_kv_heads:5}  {is_scaled!s:>6}"
            for name in writes:
                columns = [times[key][name] for key in ("added_us", "alone_us", "layer_us")]
                print(f"{head}  {name:10}", *(f"{each:6.2f}" for each in columns), sep="  ")
            results.append({"pool": pool, **shape._asdict(), "scaled": is_scaled, **times})
    write_json(args.json, {"meta": metadata(), "results": results})
    return 0
