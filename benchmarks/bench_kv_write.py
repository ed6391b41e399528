"""New tokens into an fp8 KV cache: pat's one kernel against the kernels of SGLang's pool.

Each contender is a CUDA graph of 32 layers, timed interleaved with the others. Alone: the writes of
32 layers after each other. In layers: a kernel that makes queries, keys and values, the write, and
the attention; the same without a write is subtracted, so what is left is what a write adds.

SGLang's own store is compiled by nvcc where it runs. A Triton kernel that copies the same bytes
stands in for it. "16 bits" is that store alone, of numbers that need no conversion.

    python benchmarks/bench_kv_write.py --json benchmarks/results/h100/kv-write.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from metadata import metadata
from planned_step import PlannedStep
from request_forests import Forest

from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kernels import DecodeKernels
from sglang_pat.executors.kv_writer import KvWriter

LAYERS = 32
HEAD_DIM = 128
GROUP = 4
KV_DTYPE, DTYPE = torch.float8_e4m3fn, torch.bfloat16
SHARED, OWN = 8192, 256
SLOTS = 1 << 16
_SCALE = 0.0313

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


@triton.jit
def _store(k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    columns = tl.arange(0, WIDTH)
    keys = tl.load(k + token * k_stride + columns)
    values = tl.load(v + token * v_stride + columns)
    tl.store(k_cache + slot * WIDTH + columns, keys)
    tl.store(v_cache + slot * WIDTH + columns, values)


def in_torch(divisor: torch.Tensor | None) -> Write:
    """As MHATokenToKVPool.set_kv_buffer() does it, with one store."""

    def write(k, v, slots, k_cache, v_cache):
        if divisor is not None:
            k.div_(divisor)
            v.div_(divisor)
        store(k.to(KV_DTYPE), v.to(KV_DTYPE), slots, k_cache, v_cache)

    return write


def store(k, v, slots, k_cache, v_cache) -> None:
    """As the pool's store, of numbers that have the cache's type."""
    integers = torch.uint8 if k.dtype == KV_DTYPE else torch.int16
    views = [each.view(integers) for each in (k, v, k_cache, v_cache)]
    width = k.shape[1] * k.shape[2]
    _store[(len(k),)](*views, slots, k.stride(0), v.stride(0), width, num_warps=4)


def of_16_bits(case: Case) -> Write:
    """Into caches that attention does not read."""
    caches = [torch.empty_like(cache, dtype=DTYPE) for cache in case.caches[0]]
    return lambda k, v, slots, *_: store(k, v, slots, *caches)


def by_kernel(writer: KvWriter, divisor: torch.Tensor | None) -> Write:
    """This package."""
    scale = writer.scale(divisor)
    assert scale is not None

    def write(k, v, slots, k_cache, v_cache):
        assert writer.write(k, v, slots, k_cache, v_cache, scale, scale)

    return write


class Case:
    """Tensors of `LAYERS` layers, and a planned step over the same caches."""

    def __init__(self, num_tokens: int, num_kv_heads: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.config = KernelConfig.for_device(DTYPE, HEAD_DIM, device, 0, KV_DTYPE)
        self.num_tokens, self.num_kv_heads = num_tokens, num_kv_heads
        self.num_qo_heads = GROUP * num_kv_heads
        self.widths = [self.num_qo_heads * HEAD_DIM, *[num_kv_heads * HEAD_DIM] * 2]
        self.source = torch.randn(num_tokens, sum(self.widths), device=device).to(DTYPE)
        self.qkv = self.source.clone()
        shape = (SLOTS, num_kv_heads, HEAD_DIM)
        self.caches = [
            [torch.randn(shape, device=device, dtype=DTYPE).to(KV_DTYPE) for _ in range(2)]
            for _ in range(2)
        ]
        self.writer = KvWriter(self.config, device)
        forest = Forest.of_tree(f"1,{num_tokens}_{SHARED},{OWN}")
        table = forest.token_table()
        rows = torch.arange(num_tokens, device=device)
        lengths = torch.from_numpy(forest.seq_lens).to(device)
        self.slots = table[rows, lengths.long() - 1].long()
        self.step = PlannedStep(DecodeKernels(self.config), self.num_qo_heads, num_kv_heads)
        self.step.write(forest.batch(), table, rows, lengths)
        self.out = torch.empty(num_tokens, self.num_qo_heads, HEAD_DIM, dtype=DTYPE, device=device)

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
        for layer in range(LAYERS):
            torch.add(self.source, 1.0, out=self.qkv)
            caches = self.caches[layer % 2]
            if write is not None:
                write(k, v, self.slots, *caches)
            self.step.decode(q, *caches, self.out, k_scale=_SCALE, v_scale=_SCALE)


def check(case: Case) -> None:
    """Both ways leave the same bytes."""
    divisor = torch.tensor(_SCALE, device="cuda")
    for scale in (None, divisor):
        results = []
        for write in (in_torch(scale), by_kernel(case.writer, scale)):
            case.qkv.copy_(case.source)
            _, k, v = case.parts()
            write(k, v, case.slots, *case.caches[0])
            results.append([cache.view(torch.uint8).clone() for cache in case.caches[0]])
            for cache in case.caches[0]:
                cache.view(torch.uint8)[case.slots] = 0
        if not all(map(torch.equal, *results)):
            raise SystemExit("the kernel writes other bytes than torch")


def captured(run: Callable[[Write | None], None], write: Write | None) -> torch.cuda.CUDAGraph:
    """A graph of `run`, after it has run once."""
    run(write)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(write)
    return graph


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


def contenders(case: Case, divisor: torch.Tensor | None) -> dict[str, Write]:
    """By name."""
    return {
        "torch": in_torch(divisor),
        "pat": by_kernel(case.writer, divisor),
        "16 bits": of_16_bits(case),
    }


def measure(num_tokens: int, num_kv_heads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Check and time a case, without scales and with them."""
    case = Case(num_tokens, num_kv_heads)
    check(case)
    for scale in (None, torch.tensor(_SCALE, device="cuda")):
        writes = contenders(case, scale)
        alone = {name: captured(case.alone, write) for name, write in writes.items()}
        layers = {
            name: captured(case.in_layers, write)
            for name, write in (*writes.items(), ("no write", None))
        }
        alone_us, layer_us = microseconds(alone, rounds), microseconds(layers, rounds)
        yield {
            "tokens": num_tokens,
            "kv_heads": num_kv_heads,
            "scaled": scale is not None,
            "alone_us": alone_us,
            "layer_us": layer_us,
            "added_us": {name: layer_us[name] - layer_us["no write"] for name in writes},
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = []
    print("us per layer           | added by the write     | writes alone")
    print("tokens  heads  scaled  | torch    pat  16 bits  | torch    pat  16 bits")
    for num_tokens, num_kv_heads in product((128, 8), (8, 1)):
        for result in measure(num_tokens, num_kv_heads, arguments.rounds):
            columns = [
                "  ".join(f"{result[key][name]:5.2f}" for name in ("torch", "pat", "16 bits"))
                for key in ("added_us", "alone_us")
            ]
            head = f"{num_tokens:6}  {num_kv_heads:5}  {result['scaled']!s:>6}"
            print(f"{head}  | {columns[0]}    | {columns[1]}", flush=True)
            results.append(result)
    if arguments.json is not None:
        text = json.dumps({"meta": metadata(), "results": results}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
