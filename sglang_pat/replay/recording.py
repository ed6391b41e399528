"""What is kept of a replay while it runs: a few rows, one forest; and in the end the result.

Third stage of the replay, between the simulator and the reports. Memory does not grow with the
trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat.batch import DecodeBatch, IntArray, PrefixPaths
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.planning import StepPlanner
from sglang_pat.replay.result import Forest, ForestNode, StepRow, Totals
from sglang_pat.replay.simulator import Served, Step

# Measures one step on a device: milliseconds of one layer, by contender.
Measure = Callable[[DecodeBatch], dict[str, float]]


class StepRecorder:
    """Rows of every so many steps; whenever there are too many, every second one goes."""

    def __init__(
        self, planner: StepPlanner, options: ReplayOptions, measure: Measure | None = None
    ) -> None:
        self.rows: list[StepRow] = []
        self._planner = planner
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

    def add(self, step: Step) -> None:
        if step.plan.cause != "reused" or step.number == self._forest_step:
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

    def _consider_forest(self, step: Step) -> None:
        if self._forest_step is None:
            counts = self._planner.last_kv_tokens()
            saved = counts["query_centric"] - counts["lower_bound"]
            if saved <= self._most_saved:
                return
            self._most_saved = saved
        elif step.number != self._forest_step:
            return
        self._forest_number = step.number
        self._forest_paths = step.read_paths(), step.seq_lens.copy()

    def _row(self, step: Step) -> StepRow:
        planner = self._planner
        counts, partials = planner.last_kv_tokens(), planner.last_partials()
        row = StepRow(
            step=step.number,
            time=round(step.time, 6),
            batch=len(step.reqs),
            held_tokens=step.held_tokens,
            kv_tokens=counts,
            partial_bytes=planner.partial_bytes(partials),
            bytes=planner.kv_bytes(counts, partials),
            packs=planner.last_packs(),
            cause=step.plan.cause,
            planning_us=round(step.plan.planning_ns / 1000, 2),
        )
        if self._measure is not None:
            row["gpu"] = self._measure(DecodeBatch(step.seq_lens, step.read_paths()))
        return row


def totals(served: Served, planner: StepPlanner, seconds: float, mutations: Any) -> Totals:
    """Sums over all steps. seconds: simulated. mutations: of the tree, by kind."""
    counts, partials = planner.total_kv_tokens(), planner.total_partials()
    return Totals(
        steps=served.steps,
        requests=served.finished,
        retracted=served.retracted,
        refused=served.refused,
        decode_tokens=served.decode_tokens,
        prompt_tokens=served.prompt_tokens,
        simulated_seconds=round(seconds, 6),
        batch_mean=round(served.decode_tokens / max(served.steps, 1), 3),
        prefix_hit_rate=round(served.prompt_tokens_found / max(served.prompt_tokens, 1), 6),
        kv_tokens=counts,
        partial_bytes=planner.partial_bytes(partials),
        bytes=planner.kv_bytes(counts, partials),
        policies=planner.policy_totals(),
        comparisons=planner.comparisons(),
        mutations=dict(sorted(mutations.items())),
        plans={
            "built": dict(sorted(planner.plans_built.items())),
            "reused": planner.plans_reused,
        },
        planning_us={
            "p50": planner.built_ns.quantile(0.5),
            "p99": planner.built_ns.quantile(0.99),
            "reused_p50": planner.reused_ns.quantile(0.5),
            "histogram": planner.built_ns.by_microseconds(),
        },
    )


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
