"""Plans every decode step as the backend does, under several policies, and adds up what they read.

Second stage of the replay: the simulator hands over each step, `result.py` says what comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple

from sglang_pat._scheduler import TILE_TABLE, PackScheduler, PrefixForest
from sglang_pat.attention import new_scheduler
from sglang_pat.batch import IntArray
from sglang_pat.plan import replan_cause
from sglang_pat.replay.models import ModelShape
from sglang_pat.replay.result import (
    Histogram,
    KvTokenCounts,
    PartialBytes,
    PolicyComparison,
    PolicyTotals,
)
from sglang_pat.replay.time_histogram import TimeHistogram

_PARTIAL_ELEMENT_BYTES = 4  # float32


class StepPlan(NamedTuple):
    """What is known of a step after planning it."""

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


class StepPlanner:
    """Keeps one plan per policy, reuses all of them or none, and sums over steps exactly.

    Between two plans every policy reads the same new tokens of the private tails, so that the sums
    of all policies follow from their plans and the growth since. The first policy is the one that
    is timed.
    """

    def __init__(self, model: ModelShape, policies: tuple[str, ...], workers: int) -> None:
        self._model = model
        self._group_size = model.num_qo_heads // model.num_kv_heads
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
        self._steps = 0  # under the plan in force
        self._growth = 0  # tokens, summed over those steps
        self._last_growth = 0  # tokens, in the last of them
        self._total_query_centric = 0
        self._total_lower_bound = 0
        self.plans_built: Counter[str] = Counter()
        self.plans_reused = 0
        self.built_ns = TimeHistogram()
        self.reused_ns = TimeHistogram()
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

    def step(
        self,
        read_key: Callable[[], Hashable] | None,
        read_forest: Callable[[], PrefixForest],
        seq_lens: IntArray,
    ) -> StepPlan:
        """Plan one decode step. Key, forest and lengths as in `DecodeBatch`.

        read_key: None promises the key of the last step.
        """
        started = perf_counter_ns()
        scheduler = self._timed.scheduler
        served, total, _ = scheduler.check_lengths(seq_lens)
        key = self._key if read_key is None else read_key()
        cause = replan_cause(
            planned=self._is_planned, same_batch=key == self._key, lengths_served=served
        )
        if cause is None:
            planning_ns = perf_counter_ns() - started
            self.plans_reused += 1
            self.reused_ns.add(planning_ns)
        else:
            forest = read_forest()
            scheduler.plan(forest, seq_lens)
            planning_ns = perf_counter_ns() - started
            self.built_ns.add(planning_ns)
            self._close_plan()
            self._key = key
            self._is_planned = True
            self.plans_built[cause] += 1
            self._open_plan(forest, seq_lens)
        self._last_growth = total - self._query_centric
        self._growth += self._last_growth
        self._steps += 1
        return StepPlan(cause or "reused", planning_ns, total)

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
        return {name: record.plan.partials for name, record in self._records.items()}

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
        return {name: record.partials for name, record in self._records.items()}

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

    def kv_bytes(self, counts: KvTokenCounts, partials: dict[str, int]) -> dict[str, int]:
        """All bytes by policy; "query_centric" and "lower_bound" without partials."""
        per_token = self._model.kv_bytes_per_token
        moved = {
            name: tokens * per_token + self._partial_bytes(partials[name]) * 2
            for name, tokens in counts["policies"].items()
        }
        return {
            "query_centric": counts["query_centric"] * per_token,
            "lower_bound": counts["lower_bound"] * per_token,
            **moved,
        }

    def partial_bytes(self, partials: dict[str, int]) -> dict[str, PartialBytes]:
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
        for record in self._records.values():
            record.kv_tokens += steps * record.plan.kv_tokens + growth
            record.partials += steps * record.plan.partials
            record.packs += steps * record.plan.packs
            record.work_items += steps * record.plan.work_items
            record.split_pieces += steps * record.plan.split_pieces
        self._steps = self._growth = 0


def _histogram(counts: Counter[int]) -> Histogram:
    return {str(key): counts[key] for key in sorted(counts) if counts[key]}
