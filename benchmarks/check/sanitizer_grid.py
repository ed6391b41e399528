"""Runs small cases of every body of the kernels, for a sanitizer.

    python benchmarks/check sanitizer-grid [--body NAME ...] [--uninitialized] [--planted]

With `--compile` it compiles the kernels, and runs nothing.

`check sanitizers` runs this below each tool. Without a GPU, the executor in plain torch runs the
cases instead. The kernels here are the only ones that are
launched: torch moves memory, and computes on the CPU. Each buffer is an allocation of its own, as
long as its plan needs (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that no access behind it falls into
another. What no kernel may read is NaN or a slot far outside of the pool; with `--uninitialized`,
for initcheck, nobody has written it. Each result is compared with float64. With `--planted`, one
request of one case reads a slot that it must not: a tool that says nothing watches nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from handwritten_plans import HandPlan, random_plan
from sample_forests import ForestCase, make_case
from slot_placements import place

from sglang_pat._scheduler import TILE_TABLE, CostModel, PackScheduler
from sglang_pat.attention import GROWTH_TOKENS
from sglang_pat.batch import Step
from sglang_pat.executors.cuda import CudaExecutor
from sglang_pat.executors.jit import KernelConfig, build_all
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.loaded_kernels import load_kernels
from sglang_pat.executors.reference import ReferenceExecutor, dense_attention
from sglang_pat.plan import BufferSizes, largest_tile
from sglang_pat.support import LATENT_CAPABILITIES, LATENT_HEAD_DIMS, WIDE_HEAD_DIMS

HOPPER = (9, 0)
BF16, FP16, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
OUTSIDE = 2147480000  # a slot of no pool

# Lengths around those of a stage; packs of one to several tiles; a padding row.
TREE = make_case(
    [(-1, 100), (0, 40), (0, 33), (-1, 65)],
    [(0, 5)] * 2 + [(1, 70)] * 5 + [(2, 1)] * 3 + [(3, 17)] * 2 + [(2, 0), (-1, 90), (-1, 0)],
)
RAGGED = make_case([], [(-1, length) for length in (1, 15, 31, 32, 33, 63, 64, 65, 127, 129)])
LONG = make_case([(-1, 700)], [(0, 90)] * 3 + [(-1, 1100), (-1, 30), (-1, 0)])
WIDE = make_case([(-1, 130)], [(0, 1 + 7 * (i % 5)) for i in range(40)])
# Many items in a ticket, or more tickets than CTAs, so that the ring's stages are used again.
MANY = make_case([(-1, 20)] * 10, [(node, 1 + 5 * node) for node in range(10)] * 14)
MORE = make_case([(-1, 20)] * 10, [(node, 1 + 5 * node) for node in range(10)] * 32)
SPLIT = {"num_workers": 33, "min_item_tokens": 64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of one layer.

    heads: numbers of query and KV heads. scheduler: options other than the defaults here. seed:
    seed of a randomly cut plan, or None for the scheduler's plan. placement: how slots lie in the
    pool, as in `slot_placements.py`. broken: make the first request's last key NaN, so that rows of
    other requests are recomputed.
    """

    name: str
    forest: ForestCase
    heads: tuple[int, int] = (8, 2)
    head_dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    force_mma_sync: bool = False
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    broken: bool = False
    logit_cap: float = 0.0
    sinks: bool = False
    placement: str = "scattered"

    def config(self, arch: tuple[int, int]) -> KernelConfig:
        return KernelConfig(
            self.dtype,
            self.head_dims[0],
            arch,
            self.head_dims[1],
            self.kv_dtype,
            self.force_mma_sync and arch == HOPPER,
        )

    def plan(self, config: KernelConfig) -> PackScheduler | HandPlan:
        """Make and return the plan of the case."""
        group_size = self.heads[0] // self.heads[1]
        if self.seed is not None:
            plan = random_plan(self.forest, group_size, self.seed)
            return plan.as_latent() if config.is_latent else plan
        batch_invariant = self.scheduler.get("batch_invariant", False)
        options = {
            "num_workers": 8,
            "max_block_q": largest_tile(
                group_size, latent=config.is_latent, one_byte=config.kv_dtype is not None
            ),
            "policy": "memory",
            "min_item_tokens": 128,
            "by_time": False,  # else small cases would not share
            "one_tile": batch_invariant and not config.tiles_agree,
            "latent": config.is_latent,
            **self.scheduler,
        }
        scheduler = PackScheduler(
            group_size=group_size, growth_tokens=GROWTH_TOKENS, cost=CostModel(), **options
        )
        batch = self.forest.batch()
        paths = batch.read_paths()
        scheduler.plan(
            paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, batch.seq_lens
        )
        return scheduler


def _of_body(**body: Any) -> list[Case]:
    """Return the cases of each body."""

    def case(name: str, forest: ForestCase, **more: Any) -> Case:
        return Case(name, forest, **{**body, **more})

    invariant = {**SPLIT, "batch_invariant": True}
    per_node = {"policy": "per-node", "num_workers": 2}
    alone = {"policy": "query-centric", "num_workers": 200}
    return [
        *(case(f"group-{g}", TREE, heads=(2 * g, 2)) for g in (1, 2, 4, 5, 8, 16)),
        case("head-dim-64", TREE, head_dims=(64, 64)),
        case("head-dim-256", TREE, head_dims=(256, 256)),
        case("head-dim-64-split", LONG, head_dims=(64, 64), scheduler=SPLIT),
        case("head-dim-256-split", LONG, head_dims=(256, 256), scheduler=SPLIT),
        case("ragged", RAGGED),
        case("wide", WIDE, heads=(16, 2)),
        *(case(f"tile-{b}", TREE, scheduler={"max_block_q": b}) for b, _, _ in TILE_TABLE),
        case("split", LONG, scheduler=SPLIT),
        case("sinks", LONG, scheduler=SPLIT, sinks=True),
        case("soft-cap", TREE, logit_cap=30.0),
        case("batch-invariant", LONG, scheduler=invariant),
        *(case(f"random-plan-{seed}", TREE, seed=seed) for seed in range(3)),
        case("broken-key", TREE, broken=True),
        case("many-items", MANY, scheduler=per_node),
        case("many-tickets", MANY, heads=(16, 4), scheduler=alone),
        case("runs", TREE, placement="ranges"),
        case("runs-split", LONG, scheduler=SPLIT, placement="ranges"),
        case("runs-mixed", LONG, scheduler=SPLIT, placement="mixed"),
        case("runs-alone", RAGGED, placement="ranges"),
        case("runs-head-dim-64", TREE, head_dims=(64, 64), placement="mixed"),
        case("runs-head-dim-256", LONG, head_dims=(256, 256), placement="mixed"),
    ]


def _of_head_dim_512() -> list[Case]:
    """Return the cases of wide rows, which two warpgroups share."""

    def case(name: str, forest: ForestCase, **more: Any) -> Case:
        return Case(f"head-dim-512-{name}", forest, (16, 2), WIDE_HEAD_DIMS, **more)

    return [
        case("tree", TREE),
        case("float16", TREE, dtype=FP16, logit_cap=30.0),
        *(case(f"tile-{b}", TREE, scheduler={"max_block_q": b}) for b, _, _ in TILE_TABLE),
        case("split", LONG, scheduler=SPLIT, sinks=True),
        case("random-plan", TREE, seed=1),
        case("broken-key", TREE, broken=True),
        case("many-items", MANY, scheduler={"policy": "per-node", "num_workers": 2}),
        case("runs-mixed", LONG, scheduler=SPLIT, placement="mixed"),
    ]


def _latent(**body: Any) -> list[Case]:
    """Return the cases of latent attention."""

    def case(name: str, forest: ForestCase, heads: int = 16, **more: Any) -> Case:
        return Case(name, forest, (heads, 1), LATENT_HEAD_DIMS, **body, **more)

    per_node = {"policy": "per-node", "num_workers": 2}
    alone = {"policy": "query-centric", "num_workers": 200}
    return [
        *(case(f"latent-group-{heads}", TREE, heads) for heads in (1, 5, 8, 16, 20, 64)),
        case("latent-float16", TREE, dtype=FP16),
        case("latent-ragged", RAGGED),
        case("latent-sinks", LONG, scheduler=SPLIT, sinks=True),
        case("latent-wide", WIDE, 8),
        case("latent-split", LONG, scheduler=SPLIT),
        case("latent-batch-invariant", LONG, scheduler={**SPLIT, "batch_invariant": True}),
        *(case(f"latent-random-plan-{seed}", TREE, 8, seed=seed) for seed in range(3)),
        case("latent-broken-key", TREE, broken=True),
        case("latent-many-items", MANY, scheduler=per_node),
        case("latent-many-tickets", MORE, scheduler=alone),
        case("latent-runs", TREE, placement="ranges"),
        case("latent-runs-mixed", LONG, scheduler=SPLIT, placement="mixed"),
    ]


GRID: dict[str, list[Case]] = {
    "wgmma": [
        *_of_body(),
        Case("float16", TREE, dtype=FP16),
        Case("head-dim-192/128", TREE, head_dims=(192, 128)),
        *_of_head_dim_512(),
    ],
    "mma.sync": [
        *_of_body(force_mma_sync=True),
        Case("float16", TREE, dtype=FP16, force_mma_sync=True),
        Case("head-dim-192/128", TREE, head_dims=(192, 128), force_mma_sync=True),
    ],
    "fp8 wgmma": [*_of_body(kv_dtype=E4M3), Case("e5m2", TREE, kv_dtype=E5M2)],
    "fp8 mma.sync": _of_body(kv_dtype=E4M3, force_mma_sync=True),
    "latent": _latent(),
    "latent mma.sync": _latent(force_mma_sync=True),
    "latent fp8": [
        *_latent(kv_dtype=E4M3),
        Case("latent-e5m2", TREE, (16, 1), LATENT_HEAD_DIMS, kv_dtype=E5M2),
    ],
    "latent fp8 mma.sync": _latent(kv_dtype=E4M3, force_mma_sync=True),
}


class _Inputs:
    """A case's tensors on the CPU, in a pool twice as large as they need."""

    def __init__(self, case: Case) -> None:
        forest, (q_heads, kv_heads) = case.forest, case.heads
        generator = torch.Generator().manual_seed(1)
        num_requests, width = forest.tokens.shape

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(case.dtype)

        # These slots are at the pool's end.
        unused = forest.num_slots + 7
        places = unused + torch.from_numpy(place(forest, case.placement))
        pool = int(places.max()) + 1
        used = [row[:n] for row, n in zip(forest.tokens, forest.seq_lens, strict=True)]
        self.slots = places[torch.from_numpy(np.unique(np.concatenate(used))).long()]
        self.q = random(num_requests, q_heads, case.head_dims[0])
        self.k, self.v = (
            torch.full((pool, kv_heads, columns), math.nan, dtype=case.dtype)
            for columns in case.head_dims
        )
        self.is_latent = case.head_dims == LATENT_HEAD_DIMS
        if self.is_latent:
            self.v = self._values_in(self.k)
        for cache in (self.v, self.k):
            cache[self.slots] = random(len(self.slots), *cache.shape[1:])
        self.rows = torch.randperm(2 * num_requests, generator=generator)[:num_requests]
        self.table = torch.full((2 * num_requests, width + 3), OUTSIDE, dtype=torch.int32)
        for row, tokens in zip(self.rows, used, strict=True):
            self.table[row, : len(tokens)] = places[torch.from_numpy(tokens).long()].int()
        self.lens = torch.from_numpy(forest.seq_lens)
        if case.broken:
            self.k[self.table[self.rows[0], self.lens[0] - 1].long()] = math.nan
        if case.kv_dtype is not None:
            self.k, self.v = self.k.to(case.kv_dtype), self.v.to(case.kv_dtype)
        self.sinks = torch.linspace(-3, 10, q_heads) if case.sinks else None

    @staticmethod
    def _values_in(keys: torch.Tensor) -> torch.Tensor:
        """Return the values of latent attention, which are columns of the keys."""
        return keys[..., : LATENT_HEAD_DIMS[1]]

    def plant(self, *, uninitialized: bool) -> None:
        """Plant the error `planted` of `run_case`."""
        self.table[self.rows[0], self.lens[0] - 1] = 0 if uninitialized else len(self.k)

    def exact(self, logit_cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        index = self.table, self.rows, self.lens
        return dense_attention(
            self.q, self.k, self.v, *index, logit_cap=logit_cap, sinks=self.sinks
        )

    def on_device(
        self, device: torch.device, *, uninitialized: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys, values and table on the device."""
        named = (self.k, self.v, self.table)
        if not uninitialized:
            k, v, table = (tensor.to(device) for tensor in named)
            return k, self._values_in(k) if self.is_latent else v, table
        k, v, table = (torch.empty_like(tensor, device=device) for tensor in named)
        # Copies by memcpy, because a torch kernel would be watched too.
        for copy, tensor in ((k, self.k), (v, self.v)):
            for begin, end in _runs(self.slots):
                copy[begin:end].copy_(tensor[begin:end])
        for row, length in zip(self.rows.tolist(), self.lens.tolist(), strict=True):
            table[row, :length].copy_(self.table[row, :length])
        return k, self._values_in(k) if self.is_latent else v, table


def _runs(slots: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the slots as ranges of consecutive slots."""
    ascending = slots.sort().values
    breaks = (ascending.diff() > 1).nonzero().flatten() + 1
    for run in ascending.tensor_split(breaks):
        yield int(run[0]), int(run[-1]) + 1


def run_case(
    case: Case, device: torch.device, *, uninitialized: bool = False, planted: bool = False
) -> None:
    """Run the case twice, so that the second run uses the counters of the first.

    On a CPU, the executor in plain torch runs it. RuntimeError if a result is wrong. uninitialized:
    leave memory unwritten that no kernel may read. planted: make the first request's last slot the
    end of the pool, or an unwritten slot.
    """
    on_gpu = device.type == "cuda"
    config = case.config(torch.cuda.get_device_capability(device) if on_gpu else HOPPER)
    plan, inputs = case.plan(config), _Inputs(case)
    if planted:
        inputs.plant(uninitialized=uninitialized)
    executor = (
        _kernels_with_tight_buffers(case, config, plan, device, poisoned=not uninitialized)
        if on_gpu
        else ReferenceExecutor(device)
    )
    k, v, table = inputs.on_device(device, uninitialized=uninitialized)
    step = Step(table, inputs.rows.to(device), inputs.lens.to(device), case.forest.seq_lens)
    executor.load_plan(plan, step)  # type: ignore[arg-type]
    q, sinks = inputs.q.to(device), None if inputs.sinks is None else inputs.sinks.to(device)
    scale = case.head_dims[0] ** -0.5
    exact = None if planted else inputs.exact(case.logit_cap)
    for _ in range(2):
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=case.dtype, device=device)
        lse = torch.empty(q.shape[:2], device=device)
        if not uninitialized:
            _poison(out, lse)
        executor.run(LayerInputs(q, k, v, out, lse, scale, case.logit_cap, sinks))
        result = out.cpu(), lse.cpu()
        if exact is not None:
            _check(case, result, exact)


def _kernels_with_tight_buffers(
    case: Case,
    config: KernelConfig,
    plan: PackScheduler | HandPlan,
    device: torch.device,
    *,
    poisoned: bool,
) -> CudaExecutor:
    """Return an executor whose buffers end where this plan ends."""
    sizes = BufferSizes.needed_by(plan)  # type: ignore[arg-type]  # a plan by hand knows it too
    kernels = load_kernels(config, torch.cuda.current_device())
    executor = CudaExecutor(kernels, case.heads[0], device, sizes)
    buffers = executor.buffers
    # Writes them by a copy too, because some versions of initcheck do not see torch's kernels.
    buffers.counters.copy_(torch.zeros(buffers.counters.shape, dtype=torch.int32))
    if poisoned:
        _poison(buffers.partial_out, buffers.partial_lse)
    return executor


def _poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.copy_(torch.full(tensor.shape, math.nan, dtype=tensor.dtype))


def _check(case: Case, result: tuple[torch.Tensor, torch.Tensor], exact: Sequence[Any]) -> None:
    """Raise RuntimeError if a result is wrong. tests/gpu have tighter bounds."""
    out_close = {"rtol": 0.02, "atol": 0.02}
    # With fp8 keys, sums of products have 13 bits of mantissa (kernels/README.md).
    exactness = 2e-5 if case.kv_dtype is None else 5e-3
    lse_close = {"rtol": 0.0, "atol": exactness + 1e-3 * case.logit_cap}
    for name, got, expected, close in zip(
        ("output", "LSE"), result, exact, (out_close, lse_close), strict=True
    ):
        if not torch.allclose(got.double(), expected, equal_nan=True, **close):
            raise RuntimeError(f"{case.name}: the {name} is wrong")


def variants(cases: Iterable[Case], arch: tuple[int, int]) -> list[KernelConfig]:
    """Return the variants to compile."""
    return list(dict.fromkeys(case.config(arch) for case in cases))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--body", choices=GRID, nargs="*", default=[*GRID], help="default: all")
    parser.add_argument(
        "--uninitialized", action="store_true", help="nobody writes what no kernel may read"
    )
    parser.add_argument(
        "--planted", action="store_true", help="only the first case of a body, with a fault"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the kernels for this GPU, or for Hopper"
    )


def run(args: argparse.Namespace) -> int:
    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.get_device_capability() not in LATENT_CAPABILITIES:
        args.body = [body for body in args.body if not body.startswith("latent")]
    cases = [case for body in args.body for case in GRID[body][: 1 if args.planted else None]]
    if args.compile:
        build_all(variants(cases, torch.cuda.get_device_capability() if on_gpu else HOPPER))
        return 0
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for number, case in enumerate(cases, 1):
        begun = time.monotonic()
        run_case(case, device, uninitialized=args.uninitialized, planted=args.planted)
        seconds = time.monotonic() - begun
        print(f"{number} of {len(cases)}: {case.name}: {seconds:.1f} s", flush=True)
    return 0
