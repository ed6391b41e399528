"""Records the decode steps of a server, and the prefix forest of one step."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sglang_pat.batch import PrefixPaths
from sglang_pat.workload.run import DEFAULT, PAT, SimulatedStep
from sglang_pat.workload.server import Batch, Decode
from sglang_pat.workload.tree import Tree

_MOST_ROWS = 2048
COLUMNS = (
    "step", "time", "steps", "batch", "kv_tokens", "distinct", "read", "default_ms", "pat_ms"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForestNode:
    """KV positions [begin, end) that `holders` requests share. parent: a node's index, or -1."""

    parent: int
    begin: int
    end: int
    holders: int


@dataclass(frozen=True, slots=True)
class Forest:
    """The shared nodes of a batch, parents first, and then one private node per request."""

    step: int
    batch: int
    nodes: list[ForestNode]


@dataclass(slots=True)
class Recorder:
    """Records the steps of a server.

    Attributes
    ----------
    forest_step
        The step whose forest is kept. None: the step whose requests share the most tokens.
    rows
        The recorded steps. Whenever there are too many, every second one is dropped.
    num_steps
        Number of steps so far, including those not recorded.
    """

    forest_step: int | None = None
    rows: list[SimulatedStep] = field(default_factory=list)
    forest: Forest | None = None
    num_steps: int = 0
    _stride: int = 1
    _seen: int = 0
    _most_shared: float = 0.0

    def __call__(self, step: SimulatedStep, event: Decode, tree: Tree) -> None:
        self.num_steps = step.step + step.steps
        if self.forest_step is None:
            shared = step.kv_tokens - step.distinct
            if self.forest is None or shared > self._most_shared:
                self._most_shared = shared
                self.forest = forest_of(step.step, event.batch, tree)
        elif step.step <= self.forest_step < step.step + step.steps:
            self.forest = forest_of(self.forest_step, event.batch, tree)
        if self._seen % self._stride == 0:
            self.rows.append(step)
            if len(self.rows) > _MOST_ROWS:
                self.rows = self.rows[::2]
                self._stride *= 2
        self._seen += 1

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "steps": [row_of(step) for step in self.rows],
            "forest": None if self.forest is None else asdict(self.forest),
        }

    def write_csv(self, path: Path) -> None:
        """Write a header, and a row for each kept step, in UTF-8."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(row_of, self.rows))


def row_of(step: SimulatedStep) -> dict[str, float]:
    """Return the numbers of a step, by the names in `COLUMNS`."""
    values = (*step[:-1], step.ms[DEFAULT], step.ms[PAT])
    return {name: round(value, 6) for name, value in zip(COLUMNS, values, strict=True)}


def forest_of(step: int, batch: Batch, tree: Tree) -> Forest:
    """Return the forest of a batch."""
    paths = tree.paths(batch.requests)
    return Forest(step, len(batch.lengths), _nodes(paths, batch.lengths.tolist()))


def _nodes(paths: PrefixPaths, lengths: list[int]) -> list[ForestNode]:
    ids, holders = np.unique(paths.node_id, return_counts=True)
    held = dict(zip(ids.tolist(), holders.tolist(), strict=True))
    index: dict[int, int] = {}
    nodes: list[ForestNode] = []
    alone: list[ForestNode] = []
    for request, length in enumerate(lengths):
        parent, end = -1, 0
        for at in range(int(paths.path_begin[request]), int(paths.path_begin[request + 1])):
            node = int(paths.node_id[at])
            if held[node] == 1:
                break
            end = int(paths.kv_end[at])
            if node not in index:
                index[node] = len(nodes)
                nodes.append(ForestNode(parent, int(paths.kv_begin[at]), end, held[node]))
            parent = index[node]
        alone.append(ForestNode(parent, end, length, 1))
    return nodes + alone
