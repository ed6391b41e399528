"""Measures plans on this GPU and fits the cost model to them, for `sglang-pat calibrate`.

A set of designed plans is timed, each in a graph of several layers. The model of a layer's time is
a sum: a constant, another constant if partials are merged, and a cost for each KV token from
memory, each token that is read again, each partial row, each work item and each query row of an
item. An item with fewer than `shortest` tokens takes as long as one with `shortest` tokens. The sum
is fitted by non-negative least squares on the relative error, for several values of `shortest`, and
the best fit is kept. The tiles are timed separately, with prefixes that have exactly as many query
rows as a tile. Latent attention has separate costs. They are measured with 16 query heads, once
with a cache of the queries' dtype and once with an fp8 cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat._scheduler import LATENT_TILE_TABLE, OPEN_END, TILE_TABLE
from sglang_pat.attention import PackAttention
from sglang_pat.batch import DecodeBatch, IntArray, PathNode, PrefixPaths
from sglang_pat.bench import timing
from sglang_pat.bench.token_table import token_table
from sglang_pat.executors.calibration import LATENT, ONE_BYTE_LATENT, PLAIN, Calibration, Machine
from sglang_pat.plan import DecodePlan, HeadConfig, largest_tile
from sglang_pat.support import LATENT_HEAD_DIMS

FloatArray = npt.NDArray[np.float64]

LARGEST_ERROR = 0.10  # a fit is refused if the RMS of its relative errors is larger
LAYERS = 8
ROUNDS = 9
POOL_BYTES = 8 << 30  # upper limit
SHORTEST = (0, 16, 32, 48, 64, 80, 96, 128, 192)  # tokens


class Layers(NamedTuple):
    """The shape and the KV dtype of the timed layers."""

    shape: HeadConfig
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def one_byte(self) -> bool:
        """True if the KV cache is fp8."""
        return self.kv_dtype.itemsize == 1

    def bodies(self) -> list[int]:
        """Query rows of the tiles that plans use, ascending."""
        latent = self.shape.is_latent
        most = largest_tile(self.shape.group_size, latent=latent, one_byte=self.one_byte)
        table = LATENT_TILE_TABLE if latent else TILE_TABLE
        return sorted({rows for rows, *_ in table if rows <= most})

    def attention(
        self, *, policy: str, device: str = "cuda", num_workers: int | None = None
    ) -> PackAttention:
        """Return a PackAttention for these layers and a packing policy."""
        return PackAttention(
            *self.shape[:3],
            v_head_dim=self.shape.v_head_dim,
            dtype=torch.bfloat16,
            kv_dtype=self.kv_dtype,
            device=device,
            policy=policy,
            num_workers=num_workers,
        )


_LATENT_SHAPE = HeadConfig(16, 1, *LATENT_HEAD_DIMS)
LAYERS_OF = {
    PLAIN: Layers(HeadConfig(32, 8, 128, 128)),
    LATENT: Layers(_LATENT_SHAPE),
    ONE_BYTE_LATENT: Layers(_LATENT_SHAPE, torch.float8_e4m3fn),
}


class CalibrationError(RuntimeError):
    """The fit must not be used. The message says why."""


class Features(NamedTuple):
    """Counts how often each cost occurs in a layer, over all KV heads."""

    layer: float  # always 1
    merge: float  # 1 if partials are merged
    token: float  # tokens read from memory
    reread: float  # tokens read again from memory or the L2
    partial_row: float
    item: float
    query_row: float

    @classmethod
    def of_plan(cls, plan: DecodePlan, shape: HeadConfig) -> Features:
        header, tokens = plan.header, plan.kv_tokens
        return cls(
            1.0,
            float(header.num_partials > 0),
            float(tokens.lower_bound * shape.num_kv_heads),
            float((tokens.planned - tokens.lower_bound) * shape.num_kv_heads),
            float(header.num_partials * shape.num_qo_heads),
            float(header.num_work_items * shape.num_kv_heads),
            float(header.num_item_requests * shape.num_qo_heads),
        )


def missing_tokens(plan: DecodePlan, seq_lens: IntArray, num_kv_heads: int) -> list[float]:
    """For each length in `SHORTEST`, return how many tokens the shorter items lack in total."""
    kv_request, begin, end, _ = plan.kv_segments.T
    end = np.where(end == OPEN_END, seq_lens[np.maximum(kv_request, 0)], end)
    ends = np.concatenate([[0], np.cumsum(end - begin)])
    first, count = plan.work_items[:, 3], plan.work_items[:, 4]
    tokens = ends[first + count] - ends[first]
    return [float(np.maximum(0, least - tokens).sum() * num_kv_heads) for least in SHORTEST]


class Design(NamedTuple):
    """A plan to measure.

    It has `prefixes` prefixes of `prefix` tokens. `sharers` requests share each prefix, and each
    request has `private` more tokens. body: query rows of the tile that the plan measures, or 0 if
    it measures the other costs.
    """

    prefixes: int
    prefix: int
    sharers: int
    private: int
    policy: str = "memory"
    body: int = 0

    def batch(self) -> DecodeBatch:
        count = self.prefixes * self.sharers
        path = [PathNode(0, 0, self.prefix)] if self.prefix else []
        paths = [
            [node._replace(node_id=request // self.sharers) for node in path]
            for request in range(count)
        ]
        lens = np.full(count, self.prefix + self.private, dtype=np.int32)
        return DecodeBatch(lens, PrefixPaths.from_lists(paths), key=self)

    @property
    def num_tokens(self) -> int:
        return self.prefixes * (self.prefix + self.sharers * self.private)


def designs(kind: str = PLAIN) -> list[Design]:
    """Return memory-bound plans of different composition, and one plan for each tile."""
    unshared = [
        Design(count, 0, 1, tokens)
        for count, tokens in (
            (1024, 64),
            (3072, 64),
            (1024, 160),
            (512, 512),
            (256, 1024),
            (64, 4096),
            (8, 32768),
            (1, 65536),
        )
    ]
    one_item_each = [  # many query rows, no partials
        Design(512, 64, 16, 0),
        Design(1024, 64, 8, 0),
        Design(2048, 64, 4, 0),
        Design(256, 512, 16, 0),
    ]
    cut = [Design(1, 65536, sharers, 0) for sharers in (4, 8, 16)]  # many partials, many query rows
    shared = [  # one pack per node, so that there are partials
        Design(*shape, "per-node")
        for shape in (
            (64, 256, 4, 64),
            (128, 512, 4, 128),
            (16, 1024, 16, 128),
            (32, 2048, 4, 512),
            (8, 4096, 16, 256),
            (1, 4096, 16, 256),
            (256, 128, 4, 32),
            (128, 64, 16, 16),
        )
    ]
    # Several tiles read a prefix at the same time, as in real plans. Most reads then hit the L2.
    read_again = [
        Design(*shape)
        for shape in (
            (1, 8192, 64, 16),
            (4, 2048, 64, 64),
            (8, 1024, 128, 32),
            (32, 512, 64, 32),
            (2, 4096, 128, 64),
            (1, 2048, 1024, 32),
        )
    ]
    return [
        *unshared,
        *one_item_each,
        *cut,
        *shared,
        *read_again,
        *(_for_body(rows, LAYERS_OF[kind].shape) for rows in LAYERS_OF[kind].bodies()),
    ]


def _for_body(rows: int, shape: HeadConfig) -> Design:
    return Design(32, 4096, max(1, rows // shape.group_size), 16, "per-node", rows)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The time of one layer with the plan of a design. missing: see `missing_tokens`."""

    design: Design
    features: Features
    missing: list[float]
    us: float


def measure(report: Callable[[str], None], kind: str = PLAIN) -> list[Measurement]:
    """Time all designs on the current CUDA device.

    report: called with a line for each design. kind: kind of the layers.
    """
    timer = _Timer(LAYERS_OF[kind], max(design.num_tokens for design in designs(kind)))
    found = []
    for design in designs(kind):
        measured = timer.measure(design)
        report(f"{design}: {measured.us:.1f} us")
        found.append(measured)
    return found


class _Timer:
    """Times designs, with K and V caches of its own. In latent attention, V is a view of K."""

    def __init__(self, layers: Layers, most_tokens: int) -> None:
        self._of = layers
        shape = layers.shape
        free, _ = torch.cuda.mem_get_info()
        columns = shape.head_dim + (0 if shape.is_latent else shape.v_head_dim)
        slot_bytes = shape.num_kv_heads * columns * layers.kv_dtype.itemsize
        slots = min(POOL_BYTES, free // 2) // slot_bytes
        if slots <= most_tokens:
            raise CalibrationError(
                f"{free / 1e9:.1f} GB of the GPU's memory are free; "
                f"{2 * slot_bytes * most_tokens / 1e9:.1f} GB are needed"
            )
        self._k = self._random(slots, shape.head_dim)
        self._v = (
            self._k[..., : shape.v_head_dim]
            if shape.is_latent
            else self._random(slots, shape.v_head_dim)
        )

    def _random(self, slots: int, columns: int) -> torch.Tensor:
        shape = (slots, self._of.shape.num_kv_heads, columns)
        if not self._of.one_byte:
            return torch.empty(shape, dtype=self._of.kv_dtype, device="cuda").normal_()
        # As e4m3 numbers, these bytes are 0.25 to less than 2.
        drawn = torch.randint(0x28, 0x40, shape, dtype=torch.uint8, device="cuda")
        return drawn.view(self._of.kv_dtype)

    def measure(self, design: Design) -> Measurement:
        attention, shape = self._of.attention(policy=design.policy), self._of.shape
        batch = design.batch()
        table = torch.from_numpy(token_table(batch.read_paths(), batch.seq_lens)).cuda()
        num_slots = int(table.max()) + 1
        table = torch.randperm(num_slots, device="cuda").int()[table.long()]
        lens = torch.from_numpy(batch.seq_lens).cuda()
        rows_of = (len(lens), shape.num_qo_heads)
        q = torch.randn(*rows_of, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(*rows_of, shape.v_head_dim, dtype=torch.bfloat16, device="cuda")
        rows = torch.arange(len(lens), device="cuda")
        plan = attention.plan(batch, req_to_token=table, req_pool_indices=rows, seq_lens=lens)
        features = Features.of_plan(plan, shape)
        missing = missing_tokens(plan, batch.seq_lens, shape.num_kv_heads)
        layers = list(self._layers(num_slots))

        def step() -> None:
            for k_cache, v_cache in layers:
                attention.run(q, k_cache, v_cache, out=out)

        graph = timing.capture(step)
        us = timing.interleaved_us({"pat": graph.replay}, rounds=ROUNDS)["pat"]
        return Measurement(design, features, missing, us / len(layers))

    def _layers(self, num_slots: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's K and V of `num_slots` slots. If memory is short, layers overlap."""
        stride = min(num_slots, (len(self._k) - num_slots) // (LAYERS - 1))
        for begin in range(0, LAYERS * stride, stride):
            yield self._k[begin : begin + num_slots], self._v[begin : begin + num_slots]


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted costs.

    microseconds: cost of each feature. shortest: an item costs at least as much as one with this
    many tokens. bodies: query rows of a tile -> cost of a token in this tile (`_rate`). errors:
    relative error of each fitted plan.
    """

    microseconds: Features
    shortest: int
    bodies: dict[int, float]
    errors: FloatArray

    @property
    def error(self) -> float:
        return float(np.sqrt(np.mean(self.errors**2)))

    @property
    def worst(self) -> float:
        return float(np.abs(self.errors).max())

    def costs(self) -> dict[str, float]:
        """Return the arguments of CostModel. Their unit is the cost of a token from memory."""
        us = self.microseconds
        costs = {
            "reread_token": us.reread / us.token,
            "partial_row": us.partial_row / us.token,
            "packed_item": us.item / us.token,
            "item": us.item / us.token,
            "query_row": us.query_row / us.token,
            "shortest": self.shortest,
            **{f"token_{rows}": rate for rows, rate in self.bodies.items()},
        }
        # With fp8 latent KV, 64 rows take two passes of 32 rows.
        if 64 not in self.bodies:
            costs["token_64"] = 2 * self.bodies[max(self.bodies)]
        return {name: round(value, 3) for name, value in costs.items()}


def fit(measurements: Sequence[Measurement]) -> Fit:
    """Fit the costs. CalibrationError if no sum of costs describes the measured times."""
    summed = [each for each in measurements if not each.design.body]
    found = min((_fit(summed, least) for least in SHORTEST), key=lambda each: each.error)
    _check(found)
    for each in measurements:
        if each.design.body:
            found.bodies[each.design.body] = _rate(each, found)
    return found


def _fit(measurements: Sequence[Measurement], shortest: int) -> Fit:
    matrix = np.array([_counted(each, shortest) for each in measurements])
    us = np.array([each.us for each in measurements])
    # Scales the columns to the same size. Divides each row by its time, so that errors are
    # relative.
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1
    relative = matrix / scale / us[:, None]
    solution = nnls(relative, np.ones(len(us)))
    return Fit(Features(*(solution / scale)), shortest, {}, relative @ solution - 1)


def _counted(measured: Measurement, shortest: int) -> Features:
    """Return the features. Their `token` includes the tokens that short items lack."""
    missing = measured.missing[SHORTEST.index(shortest)]
    return measured.features._replace(token=measured.features.token + missing)


def nnls(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """Return the x >= 0 that minimises |matrix @ x - target| (Lawson and Hanson's algorithm)."""
    count = matrix.shape[1]
    x = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    tolerance = 1e-12 * np.abs(matrix.T @ target).max()
    for _ in range(3 * count):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            if trial[passive].min() > 0:
                break
            falling = passive & (trial <= 0)
            step = (x[falling] / (x[falling] - trial[falling])).min()
            x += step * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0
            if not passive.any():
                break
        x = np.where(passive, trial, 0.0)
    return x


def samples_json(machine: Machine, measured: Mapping[str, Sequence[Measurement]]) -> str:
    """Return the measurements of each kind of layer as JSON, to fit them elsewhere."""
    samples = [
        asdict(each)
        | {"kind": kind, "design": each.design._asdict(), "features": each.features._asdict()}
        for kind, measurements in measured.items()
        for each in measurements
    ]
    return json.dumps({"machine": asdict(machine), "samples": samples}, indent=1) + "\n"


def calibrate(
    machine: Machine, measurements: Sequence[Measurement], kind: str = PLAIN
) -> Calibration:
    """Fit the costs and return the calibration. CalibrationError if the fit is bad."""
    found = fit(measurements)
    microseconds = found.microseconds._asdict()
    return Calibration(
        machine,
        found.costs(),
        microseconds | {f"body_{rows}": rate for rows, rate in found.bodies.items()},
        found.error,
        found.worst,
        len(measurements),
        kind,
    )


def _check(found: Fit) -> None:
    if found.error > LARGEST_ERROR:
        raise CalibrationError(
            f"the fit is off by {found.error:.1%} (allowed: {LARGEST_ERROR:.0%}), at most by "
            f"{found.worst:.1%}: is the GPU used by somebody else, or throttled?"
        )
    if found.microseconds.token <= 0:
        raise CalibrationError("the fit gives KV tokens no time: is the GPU used by others?")


def _rate(measured: Measurement, found: Fit) -> float:
    """Return what a KV token costs in the measured tile, relative to its load from memory.

    The time of the tile's tokens is the measured time minus all other costs.
    """
    us = found.microseconds
    tokens = measured.features.token * us.token
    rest = measured.us - float(np.dot(_counted(measured, found.shortest), us)) + tokens
    return max(1.0, rest / tokens)
