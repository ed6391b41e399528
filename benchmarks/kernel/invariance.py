"""Checks, in random batches, that a request's bits depend only on the request.

A world is a KV pool with requests that share prefixes. Each request is computed alone, then in
random batches, and the results are compared bit by bit. Batches have any requests in any order,
with or without sharing, any number of workers, any largest tile, plans that were made for shorter
requests, and captured graphs with padding rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from sample_forests import ForestCase, make_case

from kernel.planned_step import PlannedStep
from sglang_pat._scheduler import TILE_TABLE, num_chunks
from sglang_pat.batch import DecodeBatch, PathNode, PrefixPaths
from sglang_pat.executors.jit import KernelConfig

_WORKERS = (1, 5, 33, 264)
_GRAPH_ROWS = (8, 40)
_MAX_REQUESTS = 1024  # of a plan, for all chunks of _GRAPH_ROWS[-1] requests


def random_forest(random: np.random.Generator) -> ForestCase:
    """Return up to 64 requests, of up to some thousand tokens, in a random tree."""

    def length() -> int:
        near = random.choice([1, 32, 64, 255, 256, 512, 700, 2048])
        return max(1, int(near + random.integers(-3, 4)))

    num_nodes = int(random.integers(0, 9))
    nodes = [(int(random.integers(-1, i)) if i else -1, length()) for i in range(num_nodes)]
    requests = [
        (int(random.integers(-1, num_nodes)) if num_nodes else -1, length())
        for _ in range(random.integers(1, 65))
    ]
    return make_case(nodes, requests, seed=int(random.integers(1 << 30)))


@dataclass
class _Graph:
    """A captured layer, and the tensors that it reads."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    step: PlannedStep
    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)


class World:
    """Requests in a pool, for one variant of the kernels."""

    def __init__(
        self,
        config: KernelConfig,
        heads: tuple[int, int],
        case: ForestCase,
        random: np.random.Generator,
        *,
        sinks: bool = False,
    ) -> None:
        self._case, self._random = case, random
        self._heads = heads

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(config.dtype)

        # With so different logits, the maxima of rows rise and sums are rescaled.
        self.q = 8 * tensor(len(case.seq_lens), heads[0], config.head_dim)
        self.k = tensor(case.num_slots, heads[1], config.head_dim).to(config.cache_dtype)
        self.v = tensor(case.num_slots, heads[1], config.v_head_dim).to(config.cache_dtype)
        self.sinks = tensor(heads[0]) if sinks else None
        # Adds a row for padding.
        tokens = np.concatenate([case.tokens, np.zeros_like(case.tokens[:1])])
        self.table = torch.from_numpy(tokens).cuda()
        # If bodies sum in different orders, the mode uses only one tile.
        blocks = [tile[0] for tile in TILE_TABLE] if config.tiles_agree else [TILE_TABLE[-1][0]]
        self._steps = [
            PlannedStep(
                config,
                *heads,
                num_workers=workers,
                max_block_q=block_q,
                max_requests=_MAX_REQUESTS,
                max_shared_slots=1 << 15,
                max_partials=4 * _MAX_REQUESTS,
                batch_invariant=True,
            )
            for workers in _WORKERS
            for block_q in blocks
        ]
        self._graphs = [self._capture(rows, self._steps[-1]) for rows in _GRAPH_ROWS]
        self.out, self.lse = self._alone()

    def differing(self, num_batches: int) -> Iterator[tuple[int, int]]:
        """Run random batches. Yield the requests, and how many have other bits, of each batch."""
        for _ in range(num_batches):
            count = int(self._random.integers(1, _GRAPH_ROWS[-1] + 1))
            rows = self._random.integers(0, len(self._case.seq_lens), count)
            out, lse = self._run_random(rows)
            chosen = torch.from_numpy(rows).cuda()
            same = (_bits(out) == _bits(self.out[chosen])).flatten(1).all(1)
            same &= (_bits(lse) == _bits(self.lse[chosen])).all(1)
            yield count, count - int(same.sum())

    def _alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        results = [
            self._run(self._steps[0], np.array([row]), shared=False)
            for row in range(len(self._case.seq_lens))
        ]
        out, lse = (torch.cat(part) for part in zip(*results, strict=True))
        return out, lse

    def _run_random(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        shared = bool(self._random.random() < 0.8)
        shorter = self._random.random() < 0.3
        if self._random.random() < 0.3:
            graph = next(g for g in self._graphs if len(g.rows) >= len(rows))
            return self._replay(graph, rows, shared=shared)
        step = self._steps[self._random.integers(len(self._steps))]
        return self._run(step, rows, shared=shared, shorter=shorter)

    def _write(
        self,
        step: PlannedStep,
        rows: np.ndarray,
        tensors: tuple[torch.Tensor, torch.Tensor],
        *,
        shared: bool,
        shorter: bool = False,
    ) -> None:
        """Plan the batch of these requests, with padding up to the tensors' size."""
        paths = [self._case.paths[row] if shared else [] for row in rows]
        padding = len(tensors[0]) - len(rows)
        lens = self._case.seq_lens[rows]
        if shorter:
            lens = np.array([self._earlier(int(n), p) for n, p in zip(lens, paths, strict=True)])
        lens = np.concatenate([lens, np.zeros(padding)]).astype(np.int32)
        all_paths = PrefixPaths.from_lists(paths + [[]] * padding)
        step.write(DecodeBatch(lens, all_paths), self.table, *tensors)

    def _earlier(self, length: int, path: list[PathNode]) -> int:
        """Return an earlier length, whose plan is still usable for this length."""
        first = path[-1].kv_end + 1 if path else 1
        if first >= length:
            return length
        earlier = int(self._random.integers(max(first, length - 100), length + 1))
        while num_chunks(earlier) != num_chunks(length):
            earlier = (earlier + length + 1) // 2
        return earlier

    def _run(
        self, step: PlannedStep, rows: np.ndarray, *, shared: bool, shorter: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.from_numpy(rows).cuda()
        lens = torch.from_numpy(self._case.seq_lens[rows]).cuda()
        self._write(step, rows, (chosen, lens), shared=shared, shorter=shorter)
        q = self.q[chosen]
        out = q.new_empty((len(rows), self._heads[0], self.v.shape[2]))
        lse = torch.empty(out.shape[:2], device="cuda")
        step.decode(q, self.k, self.v, out, lse, sinks=self.sinks)
        return out, lse

    def _capture(self, num_rows: int, step: PlannedStep) -> _Graph:
        heads, columns = self._heads[0], self.v.shape[2]
        graph = _Graph(
            rows=torch.full((num_rows,), len(self.table) - 1, device="cuda"),
            seq_lens=torch.zeros(num_rows, dtype=torch.int32, device="cuda"),
            q=self.q.new_zeros((num_rows, *self.q.shape[1:])),
            out=self.q.new_empty((num_rows, heads, columns)),
            lse=torch.empty((num_rows, heads), device="cuda"),
            step=step,
        )
        self._write(step, np.zeros(0, dtype=np.int64), (graph.rows, graph.seq_lens), shared=False)
        with torch.cuda.graph(graph.graph):
            step.decode(graph.q, self.k, self.v, graph.out, graph.lse, sinks=self.sinks)
        return graph

    def _replay(
        self, graph: _Graph, rows: np.ndarray, *, shared: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(rows)
        graph.rows.fill_(len(self.table) - 1)
        graph.seq_lens.zero_()
        graph.rows[:count] = chosen = torch.from_numpy(rows).cuda()
        graph.seq_lens[:count] = torch.from_numpy(self._case.seq_lens[rows]).cuda()
        graph.q[:count] = self.q[chosen]
        self._write(graph.step, rows, (graph.rows, graph.seq_lens), shared=shared)
        graph.graph.replay()
        return graph.out[:count], graph.lse[:count]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)
