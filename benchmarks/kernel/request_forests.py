"""Batches of the kernel benchmark: prefix forests, and the KV slots of their requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kernel.pat_trees import parse_tree
from sglang_pat.batch import DecodeBatch, IntArray, PathNode, PrefixPaths

SLOTS = ("scattered", "runs")  # how a forest's slots lie in a pool


@dataclass(frozen=True)
class Forest:
    """Shared nodes, and requests in tree order.

    nodes: (index of the parent or -1, tokens) of each shared node, parents first. requests: (index
    of the last node or -1, private tokens) of each request.
    """

    name: str
    nodes: tuple[tuple[int, int], ...]
    requests: tuple[tuple[int, int], ...]

    @classmethod
    def of_tree(cls, text: str) -> Forest:
        """Parse a uniform tree, such as `1,4,64_1024,256,64`. ValueError if it is not a tree."""
        (*counts, num_requests), (*sizes, private) = parse_tree(text)
        nodes: list[tuple[int, int]] = []
        above = [-1] * num_requests  # per request: its node on the last level
        for count, tokens in zip(counts, sizes, strict=True):
            first = len(nodes)
            owner = [request * count // num_requests for request in range(num_requests)]
            nodes += [(above[owner.index(node)], tokens) for node in range(count)]
            above = [first + node for node in owner]
        return cls(text, tuple(nodes), tuple((node, private) for node in above))

    @classmethod
    def unshared(cls, name: str, lengths: list[int]) -> Forest:
        return cls(name, (), tuple((-1, length) for length in lengths))

    @cached_property
    def paths(self) -> list[list[PathNode]]:
        """Return each request's shared nodes, from the root on."""
        of_node: list[list[PathNode]] = []
        for index, (parent, tokens) in enumerate(self.nodes):
            above = of_node[parent] if parent >= 0 else []
            begin = above[-1].kv_end if above else 0
            of_node.append([*above, PathNode(index, begin, begin + tokens)])
        return [of_node[node] if node >= 0 else [] for node, _ in self.requests]

    @cached_property
    def seq_lens(self) -> IntArray:
        shared = [path[-1].kv_end if path else 0 for path in self.paths]
        private = [tokens for _, tokens in self.requests]
        return np.add(shared, private, dtype=np.int32)

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Return the number of distinct KV tokens."""
        return sum(tokens for _, tokens in (*self.nodes, *self.requests))

    @property
    def is_shared(self) -> bool:
        return bool(self.nodes)

    def batch(self) -> DecodeBatch:
        return DecodeBatch(self.seq_lens, PrefixPaths.from_lists(self.paths), key=self.name)

    def in_pages(self, page_size: int) -> Forest:
        """Return the forest as in a radix tree of whole pages.

        A node's tokens after its last page boundary are not shared, but a part of each of its
        children and requests.
        """
        ends = {-1: 0}  # per node: its last page boundary
        kept = {-1: -1}  # per node: the remaining node, or its parent's
        nodes: list[tuple[int, int]] = []
        for index, (parent, tokens) in enumerate(self.nodes):
            begin = self.node_ends[parent] if parent >= 0 else 0
            ends[index] = (begin + tokens) // page_size * page_size
            kept[index] = kept[parent]
            if ends[index] > ends[parent]:
                kept[index] = len(nodes)
                nodes.append((kept[parent], ends[index] - ends[parent]))
        requests = tuple(
            (kept[node], int(length) - ends[node])
            for (node, _), length in zip(self.requests, self.seq_lens, strict=True)
        )
        return Forest(self.name, tuple(nodes), requests)

    @cached_property
    def node_ends(self) -> list[int]:
        """Return the tokens from the root to the end of each node."""
        ends: list[int] = []
        for parent, tokens in self.nodes:
            ends.append(tokens + (ends[parent] if parent >= 0 else 0))
        return ends

    def num_slots(self, page_size: int = 1) -> int:
        """Return the size of a pool for the forest, including the page of slot 0."""
        return (1 + int(self._pages(page_size).sum())) * page_size

    def _pages(self, page_size: int) -> IntArray:
        """Return the pages of each node, then of each request's private tokens."""
        tokens = np.array([tokens for _, tokens in (*self.nodes, *self.requests)], dtype=np.int64)
        return -(-tokens // page_size)

    def token_table(
        self, slots: str = "scattered", page_size: int = 1, *, seed: int = 0, device: str = "cuda"
    ) -> torch.Tensor:
        """Return req_to_token, int32 `[num_requests, longest length]`, without slot 0's page.

        slots: "scattered" for pages in random order, or "runs" for consecutive pages of each node
        and each request's private tokens. Each node and each private part begins at a page.
        """
        table = np.zeros((self.num_requests, int(self.seq_lens.max())), dtype=np.int64)
        pages = np.cumsum([0, *self._pages(page_size)])
        first = pages * page_size
        for request, path in enumerate(self.paths):
            end = 0
            for node, begin, end in path:
                table[request, begin:end] = np.arange(end - begin) + first[node]
            length = int(self.seq_lens[request])
            table[request, end:length] = np.arange(length - end) + first[len(self.nodes) + request]
        placed = torch.from_numpy(table).to(device)
        if slots == "scattered":
            generator = torch.Generator(device).manual_seed(seed)
            order = torch.randperm(int(pages[-1]), device=device, generator=generator)
            placed = order[placed // page_size] * page_size + placed % page_size
        return (placed + page_size).int()


def lognormal_lengths(count: int, median: int, seed: int = 0) -> list[int]:
    """Return lengths that vary like those of chats."""
    draw = random.Random(seed)
    return [
        min(max(int(median * draw.lognormvariate(0, 1)), 16), 32 * median) for _ in range(count)
    ]


def random_forest(seed: int) -> Forest:
    """Return 24 to 333 requests below nodes of any size and depth, or without nodes."""
    draw = random.Random(seed)
    nodes: list[tuple[int, int]] = []
    requests: list[tuple[int, int]] = []

    def tokens(median: int) -> int:
        return min(max(int(median * draw.lognormvariate(0, 1)), 4), 32 * median)

    def grow(parent: int, count: int, depth: int) -> None:
        nodes.append((parent, tokens(512 if depth == 0 else 128)))
        node = len(nodes) - 1
        if depth == 5 or count < 4 or draw.random() < 0.3:
            requests.extend((node, tokens(100)) for _ in range(count))
            return
        while count:
            part = min(count, draw.randint(1, max(1, count // 2)))
            count -= part
            if part == 1:
                requests.append((node, tokens(100)))
            else:
                grow(node, part, depth + 1)

    left = draw.randint(24, 333)
    while left:
        part = min(left, draw.randint(1, max(1, left * 2 // 3)))
        left -= part
        if part == 1:
            requests.append((-1, tokens(600)))
        else:
            grow(-1, part, 0)
    return Forest(f"random-{seed}", tuple(nodes), tuple(requests))
