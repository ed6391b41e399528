"""Batches for window layers: random trees, and the slots that each row must read."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import torch

from sglang_pat.batch import DecodeBatch, PrefixPaths
from sglang_pat.executors.reference import dense_attention

HEADS, KV_HEADS, DIM = 4, 2, 64


class Scene:
    """Random trees, a table of slots, and the caches of a pool that may have its own slots.

    chunked: requests attend within chunks, which are as long as a window.
    """

    def __init__(self, seed: int, *, has_map: bool = False, chunked: bool = False) -> None:
        self.chunked = chunked
        chooser = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        trees, paths, lens = [], [], []
        for tree in range(chooser.randrange(1, 4)):
            root = (10 * tree, 0, chooser.randrange(1, 300))
            ends = [chooser.randrange(1, 150) for _ in range(chooser.randrange(4))]
            trees.append(
                (root, [(10 * tree + 1 + i, root[2], root[2] + n) for i, n in enumerate(ends)])
            )
        for _ in range(chooser.randrange(1, 24)):
            root, children = chooser.choice(trees)
            path = [root]
            if children and chooser.random() < 0.7:
                path.append(chooser.choice(children))
            paths.append([] if chooser.random() < 0.1 else path)
            end = paths[-1][-1][2] if paths[-1] else 0
            lens.append(end + chooser.choice([1, 2, 5, 30, 31, 32, 33, 60, 120, 200]))
        self.paths, self.lens = paths, np.array(lens, dtype=np.int32)
        self.padding = chooser.randrange(3)
        rows, width = len(lens), int(self.lens.max()) + 200
        slots = torch.randperm(rows * width, generator=self.torch)
        self.table = slots.view(rows, width).to(torch.int32)
        first: dict[int, int] = {}
        for row, path in enumerate(paths):
            for node, begin, end in path:
                self.table[row, begin:end] = self.table[first.setdefault(node, row), begin:end]
        self.caches = [
            torch.randn(rows * width, KV_HEADS, DIM, generator=self.torch) for _ in range(2)
        ]
        self.map = torch.randperm(rows * width, generator=self.torch) if has_map else None

    def step(self, grown: int, key: Any = "same") -> tuple[DecodeBatch, dict[str, torch.Tensor]]:
        lens = np.append(self.lens + grown, np.zeros(self.padding, np.int32)).astype(np.int32)
        paths = PrefixPaths.from_lists([*self.paths, *[()] * self.padding])
        rows = torch.cat([torch.arange(len(self.lens)), torch.zeros(self.padding).long()])
        return DecodeBatch(lens, paths, key), {
            "req_to_token": self.table,
            "req_pool_indices": rows,
            "seq_lens": torch.from_numpy(np.maximum(lens, 1)).long(),
        }

    def in_caches(self) -> torch.Tensor:
        """The table, translated to slots of the caches."""
        return self.table if self.map is None else self.map[self.table.long()].int()

    def windows(self, grown: int, window: int) -> list[Counter[int]]:
        """Return the slots that each request attends to."""
        return [
            Counter(row[self._begin(n, window) : n].tolist())
            for row, n in zip(self.in_caches(), self._lengths(grown), strict=True)
        ]

    def _lengths(self, grown: int) -> list[int]:
        return [min(int(n) + grown, self.table.shape[1]) for n in self.lens]

    def _begin(self, length: int, window: int) -> int:
        return (length - 1) // window * window if self.chunked else max(0, length - window)

    def dense(self, q: torch.Tensor, grown: int, window: int, **more: Any) -> Any:
        """Return float64 attention of each request over its window."""
        found = []
        for i, n in enumerate(self._lengths(grown)):
            part = self.in_caches()[i : i + 1, self._begin(n, window) : n].contiguous()
            lens = torch.tensor([part.shape[1]])
            row = torch.tensor([0])
            found.append(
                dense_attention(
                    q[i : i + 1], self.caches[0], self.caches[1], part, row, lens, **more
                )
            )
        return map(torch.cat, zip(*found, strict=True))

    def queries(self) -> torch.Tensor:
        return torch.randn(len(self.lens) + self.padding, HEADS, DIM, generator=self.torch)


def prefix_scene(tails: list[int], prefix: int = 8192) -> Scene:
    scene = Scene(0)
    scene.paths = [[(0, 0, prefix)] for _ in tails]
    scene.lens = np.array([prefix + tail for tail in tails], dtype=np.int32)
    scene.padding = 0
    width = prefix + max(tails) + 300
    slots = torch.arange(len(tails) * width).view(len(tails), width).to(torch.int32)
    slots[:, :prefix] = slots[0, :prefix]
    scene.table = slots
    return scene
