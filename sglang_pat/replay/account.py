"""What a replay counts: plans of all policies for every decode step, rows, and sums over all steps.

Third stage of the replay. `simulate.py` hands over each step, `result.py` says what comes out. All
policies plan from one `PrefixForest`, which the backend's own reader keeps. Memory does not grow
with the trace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from sglang_pat._scheduler import TILE_TABLE, PackScheduler, PrefixForest
from sglang_pat.batch import DecodeBatch, IntArray, PrefixPaths
from sglang_pat.plan import new_scheduler, replan_cause
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.result import (
    Forest,
    ForestNode,
    Histogram,
    KvTokenCounts,
    Latency,
    PartialBytes,
    PolicyComparison,
    PolicyTotals,
    Quantiles,
    StepRow,
    Totals,
)
from sglang_pat.workload.models import ModelShape

if TYPE_CHECKING:
    from sglang_pat.replay.simulate import RunningBatch, Served

QUERY_CENTRIC = "query_centric"  # in the result; the policy of pat is "query-centric"

_PARTIAL_ELEMENT_BYTES = 4  # float32
_SHORTEST_CHUNK = 128  # tokens, of FlashInfer's split-KV kernels
_BINS_PER_OCTAVE = 32

# Measures one step on a device: milliseconds of one layer, by contender.
Measure = Callable[[DecodeBatch], dict[str, float]]


class Planned(NamedTuple):
    """What is known of a step once it is planned."""

    cause: str  # of the new plan, "reused" if there is none
    planning_ns: int
    kv_tokens: int  # held by the requests of the step, query-centric


@dataclass(slots=True)
class _Plan:
    """The plan in force under one policy, at the lengths it was made for."""

    kv_tokens: int = 0
    partials: int = 0
    packs: int = 0
    work_items: int = 0
    split_pieces: int = 0
    bytes_before_split: int = 0


@dataclass(slots=True)
class _PolicyRecord:
    """One policy: its scheduler, its plan in force, and the sums over the steps before that."""

    scheduler: PackScheduler
    plan: _Plan = field(default_factory=_Plan)
    kv_tokens: int = 0
    partials: int = 0
    packs: int = 0
    work_items: int = 0
    split_pieces: int = 0
    rows_per_pack: Counter[int] = field(default_factory=Counter)
    tiles: Counter[int] = field(default_factory=Counter)
    tail_sum: float = 0.0
    tail_max: float = 1.0


class Account:
    """One plan per policy, all of them reused or none, and exact sums over all steps.

    Between two plans every policy reads the same new tokens of the private tails. So the sums of
    all policies follow from their plans and the growth since. The first policy is timed.
    """

    def __init__(self, model: ModelShape, policies: tuple[str, ...], workers: int) -> None:
        """model: the part of it on one GPU. workers: CTAs per KV head."""
        self._model = model
        self._workers = workers
        self._group_size = model.group_size
        self._records = {
            policy: _PolicyRecord(
                new_scheduler(group_size=self._group_size, num_workers=workers, policy=policy)
            )
            for policy in policies
        }
        self._timed = self._records[policies[0]]
        self._key: Hashable = None
        self._is_planned = False
        self._query_centric = 0  # of the plan in force, at the lengths of planning
        self._lower_bound = 0
        self._split_partials = 0  # of the query-centric kernel, of one query row
        self._steps = 0  # under the plan in force
        self._growth = 0  # tokens, summed over those steps
        self._last_growth = 0  # tokens, in the last of them
        self._total_query_centric = 0
        self._total_lower_bound = 0
        self._total_split_partials = 0
        self.plans_built: Counter[str] = Counter()
        self.plans_reused = 0
        self.built_ns = Durations()
        self.reused_ns = Durations()
        self._comparisons: dict[str, PolicyComparison] = {}
        if "memory" in self._records:
            self._comparisons = {
                policy: PolicyComparison(
                    plans=0,
                    more=0,
                    more_before_split=0,
                    worst_ratio=0.0,
                    worst_ratio_before_split=0.0,
                )
                for policy in policies
                if policy not in ("memory", "query-centric")
            }

    def step(self, batch: DecodeBatch) -> Planned:
        """Plan one decode step. batch: as the backend's reader gives it, its paths in a forest."""
        forest = batch.paths
        assert isinstance(forest, PrefixForest)
        scheduler = self._timed.scheduler
        served, total, _ = scheduler.check_lengths(batch.seq_lens)
        cause = replan_cause(
            planned=self._is_planned, same_batch=batch.key == self._key, lengths_served=served
        )
        if cause is None:
            planning_ns = perf_counter_ns() - batch.begun_ns
            self.plans_reused += 1
            self.reused_ns.add(planning_ns)
        else:
            scheduler.plan(forest, batch.seq_lens)
            planning_ns = perf_counter_ns() - batch.begun_ns
            self.built_ns.add(planning_ns)
            self._close_plan()
            self._key = batch.key
            self._is_planned = True
            self.plans_built[cause] += 1
            self._open_plan(forest, batch.seq_lens)
        self._last_growth = total - self._query_centric
        self._growth += self._last_growth
        self._steps += 1
        return Planned(cause or "reused", planning_ns, total)

    def last_kv_tokens(self) -> KvTokenCounts:
        """Of the last step."""
        growth = self._last_growth
        return KvTokenCounts(
            query_centric=self._query_centric + growth,
            lower_bound=self._lower_bound + growth,
            policies={name: r.plan.kv_tokens + growth for name, r in self._records.items()},
        )

    def last_partials(self) -> dict[str, int]:
        """Of the last step, by policy; of one query row."""
        plans = {name: record.plan.partials for name, record in self._records.items()}
        return {QUERY_CENTRIC: self._split_partials, **plans}

    def last_packs(self) -> dict[str, int]:
        """Of the last step, by policy."""
        return {name: record.plan.packs for name, record in self._records.items()}

    def total_kv_tokens(self) -> KvTokenCounts:
        """Of all steps so far."""
        self._close_plan()
        return KvTokenCounts(
            query_centric=self._total_query_centric,
            lower_bound=self._total_lower_bound,
            policies={name: record.kv_tokens for name, record in self._records.items()},
        )

    def total_partials(self) -> dict[str, int]:
        """Of all steps so far, by policy; of one query row."""
        self._close_plan()
        plans = {name: record.partials for name, record in self._records.items()}
        return {QUERY_CENTRIC: self._total_split_partials, **plans}

    def policy_totals(self) -> dict[str, PolicyTotals]:
        """What the plans looked like."""
        self._close_plan()
        plans = max(self.plans_built.total(), 1)
        return {
            name: PolicyTotals(
                packs=record.packs,
                work_items=record.work_items,
                split_pieces=record.split_pieces,
                partials=record.partials,
                rows_per_pack=_histogram(record.rows_per_pack),
                tiles=_histogram(record.tiles),
                balance={
                    "tail_mean": round(record.tail_sum / plans, 4),
                    "tail_max": round(record.tail_max, 4),
                },
            )
            for name, record in self._records.items()
        }

    def comparisons(self) -> dict[str, PolicyComparison]:
        """`memory` against the others, plan by plan."""
        return self._comparisons

    def kv_bytes(self, counts: KvTokenCounts, partials: Mapping[str, int]) -> dict[str, int]:
        """KV and partials, written and read, by policy. The lower bound has no partials."""
        per_token = self._model.kv_bytes_per_token
        read = {QUERY_CENTRIC: counts["query_centric"], **counts["policies"]}
        moved = {
            name: tokens * per_token + 2 * self._partial_bytes(partials[name])
            for name, tokens in read.items()
        }
        return {**moved, "lower_bound": counts["lower_bound"] * per_token}

    def partial_bytes(self, partials: Mapping[str, int]) -> dict[str, PartialBytes]:
        """Each partial is written once and read once."""
        return {
            name: PartialBytes(written=self._partial_bytes(n), read=self._partial_bytes(n))
            for name, n in partials.items()
        }

    def _partial_bytes(self, partials: int) -> int:
        """Output and LSE of all query heads and layers."""
        model = self._model
        rows = partials * model.num_qo_heads * model.num_layers
        return rows * (model.head_dim + 1) * _PARTIAL_ELEMENT_BYTES

    def _open_plan(self, forest: PrefixForest, seq_lens: IntArray) -> None:
        self._split_partials = split_partials(seq_lens, self._workers)
        for record in self._records.values():
            if record is not self._timed:
                record.scheduler.plan(forest, seq_lens)
            self._query_centric, planned, self._lower_bound = record.scheduler.kv_tokens
            summary = record.scheduler.summary
            before_split = planned * self._model.kv_bytes_per_token
            before_split += 2 * self._partial_bytes(summary["partials_before_split"])
            record.plan = _Plan(
                kv_tokens=planned,
                partials=summary["partials"],
                packs=summary["packs"],
                work_items=summary["work_items"],
                split_pieces=summary["work_items"] - summary["tiles"],
                bytes_before_split=before_split,
            )
            for index, packs in enumerate(summary["requests_per_pack"]):
                record.rows_per_pack[self._group_size << index] += packs
            for (block_q, *_), tiles in zip(TILE_TABLE, summary["tiles_by_body"], strict=True):
                record.tiles[block_q] += tiles
            record.tail_sum += summary["tail"]
            record.tail_max = max(record.tail_max, summary["tail"])
        for name, comparison in self._comparisons.items():
            self._compare(self._records[name].plan, comparison)

    def _compare(self, other: _Plan, comparison: PolicyComparison) -> None:
        ours = self._records["memory"].plan
        after = self._plan_bytes(ours) / self._plan_bytes(other)
        before = ours.bytes_before_split / other.bytes_before_split
        comparison["plans"] += 1
        comparison["more"] += after > 1
        comparison["more_before_split"] += before > 1
        comparison["worst_ratio"] = max(comparison["worst_ratio"], round(after, 6))
        comparison["worst_ratio_before_split"] = max(
            comparison["worst_ratio_before_split"], round(before, 6)
        )

    def _plan_bytes(self, plan: _Plan) -> int:
        return plan.kv_tokens * self._model.kv_bytes_per_token + 2 * self._partial_bytes(
            plan.partials
        )

    def _close_plan(self) -> None:
        """Add the steps under the plan in force to the sums."""
        steps, growth = self._steps, self._growth
        self._total_query_centric += steps * self._query_centric + growth
        self._total_lower_bound += steps * self._lower_bound + growth
        self._total_split_partials += steps * self._split_partials
        for record in self._records.values():
            record.kv_tokens += steps * record.plan.kv_tokens + growth
            record.partials += steps * record.plan.partials
            record.packs += steps * record.plan.packs
            record.work_items += steps * record.plan.work_items
            record.split_pieces += steps * record.plan.split_pieces
        self._steps = self._growth = 0


def _histogram(counts: Counter[int]) -> Histogram:
    return {str(key): counts[key] for key in sorted(counts) if counts[key]}


def split_partials(seq_lens: IntArray, workers: int) -> int:
    """Partials, of one query row, that a query-centric split-KV kernel writes and reads.

    FlashInfer's rule: the shortest chunk, of at least 128 tokens, with which all chunks of one KV
    head find a worker each. A request of several chunks has a partial for each of them. FA3 splits
    by the same aim. seq_lens: int32 `[num_requests]`.
    """
    longest = int(seq_lens.max(initial=0))
    low, high = min(_SHORTEST_CHUNK, longest), longest
    while low < high:
        middle = (low + high) // 2
        if int((-(-seq_lens // middle)).sum()) > workers:
            low = middle + 1
        else:
            high = middle
    chunks = -(-seq_lens // max(low, 1))
    return int(chunks[chunks > 1].sum())


class Recorder:
    """Rows of every so many steps; whenever there are too many, every second one goes."""

    def __init__(
        self, account: Account, options: ReplayOptions, measure: Measure | None = None
    ) -> None:
        self.rows: list[StepRow] = []
        self._account = account
        self._stride = options.sample
        self._max_rows = options.max_rows
        self._measure = measure
        self._forest_step = options.forest_step
        self._forest_number = 0
        self._forest_paths: tuple[PrefixPaths, IntArray] | None = None
        self._most_saved = -1

    @property
    def stride(self) -> int:
        """Steps from one row to the next."""
        return self._stride

    @property
    def is_measured(self) -> bool:
        """Whether rows hold kernel times."""
        return self._measure is not None

    def add(self, step: RunningBatch) -> None:
        if step.planned.cause != "reused" or step.number == self._forest_step:
            self._consider_forest(step)
        if step.number % self._stride or self._max_rows == 0:
            return
        if len(self.rows) == self._max_rows:
            self.rows = self.rows[::2]
            self._stride *= 2
            if step.number % self._stride:
                return
        self.rows.append(self._row(step))

    def forest(self) -> Forest | None:
        """The forest of the step that was asked for, or of the one that saved most KV reads."""
        if self._forest_paths is None:
            return None
        paths, seq_lens = self._forest_paths
        return Forest(
            step=self._forest_number, batch=len(seq_lens), nodes=_forest_nodes(paths, seq_lens)
        )

    def _consider_forest(self, step: RunningBatch) -> None:
        if self._forest_step is None:
            counts = self._account.last_kv_tokens()
            saved = counts["query_centric"] - counts["lower_bound"]
            if saved <= self._most_saved:
                return
            self._most_saved = saved
        elif step.number != self._forest_step:
            return
        self._forest_number = step.number
        self._forest_paths = step.batch.read_paths(), step.batch.seq_lens

    def _row(self, step: RunningBatch) -> StepRow:
        account = self._account
        counts, partials = account.last_kv_tokens(), account.last_partials()
        row = StepRow(
            step=step.number,
            time=round(step.time, 6),
            batch=len(step.batch.seq_lens),
            held_tokens=step.held_tokens,
            kv_tokens=counts,
            partial_bytes=account.partial_bytes(partials),
            bytes=account.kv_bytes(counts, partials),
            packs=account.last_packs(),
            cause=step.planned.cause,
            planning_us=round(step.planned.planning_ns / 1000, 2),
        )
        if self._measure is not None:
            row["gpu"] = self._measure(DecodeBatch(step.batch.seq_lens, step.batch.read_paths()))
        return row


def totals(
    served: Served,
    account: Account,
    options: ReplayOptions,
    seconds: float,
    mutations: Counter[str],
) -> Totals:
    """Sums over all steps. seconds: simulated. mutations: of the tree, by kind."""
    counts, partials = account.total_kv_tokens(), account.total_partials()
    moved = account.kv_bytes(counts, partials)
    return Totals(
        steps=served.steps,
        requests=served.finished,
        retracted=served.retracted,
        refused=served.refused_context + served.refused_pool,
        refused_by={"context": served.refused_context, "pool": served.refused_pool},
        truncated=served.truncated,
        decode_tokens=served.decode_tokens,
        prompt_tokens=served.prompt_tokens,
        simulated_seconds=round(seconds, 6),
        batch_mean=round(served.decode_tokens / max(served.steps, 1), 3),
        prefix_hit_rate=round(served.prompt_tokens_found / max(served.prompt_tokens, 1), 6),
        latency=Latency(
            queue_s=_quantiles(served.queue),
            ttft_s=_quantiles(served.ttft),
            tpot_s=_quantiles(served.tpot),
            service_s=_quantiles(served.service),
            overloaded=served.queue.mean() > served.service.mean(),
        ),
        step_ms=_step_ms(options, moved, served.steps),
        kv_tokens=counts,
        partial_bytes=account.partial_bytes(partials),
        bytes=moved,
        policies=account.policy_totals(),
        comparisons=account.comparisons(),
        mutations=dict(sorted(mutations.items())),
        plans={
            "built": dict(sorted(account.plans_built.items())),
            "reused": account.plans_reused,
        },
        planning_us={
            "p50": account.built_ns.quantile(0.5),
            "p99": account.built_ns.quantile(0.99),
            "reused_p50": account.reused_ns.quantile(0.5),
            "histogram": account.built_ns.by_microseconds(),
        },
    )


def _quantiles(durations: Durations) -> Quantiles:
    """In seconds, of simulated times."""
    return Quantiles(
        mean=round(durations.mean() / 1e6, 6),
        p50=round(durations.quantile(0.5) / 1e6, 6),
        p99=round(durations.quantile(0.99) / 1e6, 6),
    )


def _step_ms(options: ReplayOptions, moved: Mapping[str, int], steps: int) -> dict[str, float]:
    """The mean decode step by policy: overhead, weights, and the bytes that attention moves."""
    if not steps:
        return {}
    base, _ = options.time.decode_seconds(options.model)
    speed = options.time.bytes_per_second
    return {name: round(1000 * (base + count / steps / speed), 4) for name, count in moved.items()}


def _forest_nodes(paths: PrefixPaths, seq_lens: IntArray) -> list[ForestNode]:
    """Tree nodes on the paths, parents first, then the private tails; ids count from 0."""
    nodes: dict[int, ForestNode] = {}
    tails: list[tuple[int, int, int]] = []
    for request, seq_len in enumerate(seq_lens.tolist()):
        parent, end = -1, 0
        for index in range(int(paths.path_begin[request]), int(paths.path_begin[request + 1])):
            key, end = int(paths.node_id[index]), int(paths.kv_end[index])
            node = nodes.setdefault(
                key,
                ForestNode(
                    id=len(nodes),
                    parent=parent,
                    begin=int(paths.kv_begin[index]),
                    end=end,
                    holders=0,
                ),
            )
            node["holders"] += 1
            parent = node["id"]
        if end < seq_len:
            tails.append((parent, end, seq_len))
    return [
        *nodes.values(),
        *(
            ForestNode(id=len(nodes) + i, parent=parent, begin=begin, end=end, holders=1)
            for i, (parent, begin, end) in enumerate(tails)
        ),
    ]


class Durations:
    """Durations in bins of 1/32 octave: quantiles to 2%, in memory that does not grow."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._sum = 0

    def add(self, nanoseconds: int) -> None:
        self._bins[int(math.log2(max(nanoseconds, 1)) * _BINS_PER_OCTAVE)] += 1
        self._sum += nanoseconds

    def quantile(self, fraction: float) -> float:
        """In microseconds; 0 without durations."""
        rank = math.ceil(fraction * self._bins.total())
        for index, count in sorted(self._bins.items()):
            rank -= count
            if rank <= 0:
                return round(2 ** ((index + 0.5) / _BINS_PER_OCTAVE) / 1000, 2)
        return 0.0

    def mean(self) -> float:
        """In microseconds, exact; 0 without durations."""
        return self._sum / max(self._bins.total(), 1) / 1000

    def by_microseconds(self) -> dict[str, int]:
        """Counts by powers of two of a microsecond. Keys: lower ends of the bins, "0" the first."""
        octaves: Counter[int] = Counter()
        for index, count in self._bins.items():
            microseconds = int(2 ** (index / _BINS_PER_OCTAVE) / 1000)
            octaves[1 << microseconds.bit_length() >> 1] += count
        return {str(key): octaves[key] for key in sorted(octaves)}
