"""Finds the cheapest packing of a small forest by brute force, to compare the scheduler's with it.

The search covers all sets of shared nodes that become items of their own (with a partial for each
request), and all divisions of the requests, in tree order, into runs that fit into a tile.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from sample_forests import ForestCase, make_case, plan_case

from sglang_pat._scheduler import TILE_TABLE, CostModel, PackScheduler

_UNCUT = 1 << 24


def random_forest(generator: np.random.Generator, max_requests: int = 12) -> ForestCase:
    """Draw a forest whose lengths, one to some thousand tokens, are log-uniform."""

    def tokens() -> int:
        return int(2 ** generator.uniform(0, 12))

    num_nodes = int(generator.integers(1, 8))
    nodes = [(int(generator.integers(-1, i)) if i else -1, tokens()) for i in range(num_nodes)]
    num_requests = int(generator.integers(2, max_requests + 1))
    requests = [
        (int(generator.integers(-1 if generator.random() < 0.1 else 0, num_nodes)), tokens())
        for _ in range(num_requests)
    ]
    return make_case(nodes, requests)


def packed_cost(case: ForestCase, group_size: int, block_q: int) -> float:
    """Return the cost of the scheduler's packing, without cuts and without its other candidates."""
    scheduler = PackScheduler(
        group_size=group_size,
        num_workers=1,
        max_block_q=block_q,
        policy="memory",
        min_item_tokens=_UNCUT,
        growth_tokens=256,
        by_time=False,
    )
    plan = plan_case(scheduler, case)
    tokens, cost = plan.kv_tokens, CostModel().values()
    return (
        cost["reread_token"] * (tokens.planned - tokens.lower_bound)
        + cost["partial_row"] * group_size * plan.header.num_partials
        + cost["packed_item"] * plan.header.num_work_items
        + tokens.lower_bound
    )


def exact_cost(case: ForestCase, group_size: int, block_q: int) -> float:
    """Return the cost of the cheapest packing."""
    requests_per_tile = block_q // group_size
    paths = [[node.node_id for node in path] for path in case.paths]
    length = {n.node_id: n.kv_end - n.kv_begin for path in case.paths for n in path}
    holders = {node: sum(node in path for path in paths) for node in length}
    shared = [node for node, count in holders.items() if count > 1]
    order = _tree_order(paths, holders)
    common = [[n for n in paths[a] if n in paths[b]] for a, b in pairwise(order)]
    alone = [
        int(case.seq_lens[r]) - sum(length[n] for n in paths[r] if holders[n] > 1) for r in order
    ]
    distinct = sum(length[n] for n in shared) + sum(alone)
    return distinct + min(
        _cost_of_runs(
            {n for i, n in enumerate(shared) if chosen >> i & 1},
            [paths[r] for r in order],
            common,
            alone,
            length,
            holders,
            requests_per_tile,
            group_size,
        )
        for chosen in range(1 << len(shared))
    )


def _cost_of_runs(
    apart: set[int],
    paths: list[list[int]],
    common: list[list[int]],
    alone: list[int],
    length: dict[int, int],
    holders: dict[int, int],
    requests_per_tile: int,
    group_size: int,
) -> float:
    """Return the cost of the cheapest runs if the nodes of `apart` are items of their own."""
    costs = CostModel().values()
    reread, partial, item = (costs[n] for n in ("reread_token", "partial_row", "packed_item"))
    total = 0.0
    for node in apart:
        tiles = -(-holders[node] // requests_per_tile)
        total += tiles * item + (tiles - 1) * length[node] * reread
    has_rest = []
    for path, tokens in zip(paths, alone, strict=True):
        rest = tokens > 0 or any(holders[n] > 1 and n not in apart for n in path)
        parts = sum(n in apart for n in path) + rest
        total += partial * group_size * parts * (parts > 1)
        has_rest.append(rest)
    best = [0.0]
    for end in range(1, len(paths) + 1):
        cheapest = float("inf")
        for begin in range(end - 1, max(-1, end - 1 - requests_per_tile), -1):
            if begin < end - 1 and not common[begin]:
                break  # no node spans this boundary
            again = 0
            if begin:
                again = sum(length[n] for n in common[begin - 1] if n not in apart)
            cost = best[begin] + reread * again + item * any(has_rest[begin:end])
            cheapest = min(cheapest, cost)
        best.append(cheapest)
    return total + best[-1]


def _tree_order(paths: list[list[int]], holders: dict[int, int]) -> list[int]:
    """Return the requests depth first: children before requests that end at their node."""
    kept = [[n for n in path if holders[n] > 1] for path in paths]

    def walk(requests: list[int], depth: int) -> list[int]:
        result: list[int] = []
        children = dict.fromkeys(kept[r][depth] for r in requests if len(kept[r]) > depth)
        for child in children:
            below = [r for r in requests if len(kept[r]) > depth and kept[r][depth] == child]
            result += walk(below, depth + 1)
        return result + [r for r in requests if len(kept[r]) == depth]

    return walk([*range(len(paths))], 0)


def packing_gaps(num_forests: int, seed: int = 0) -> list[float]:
    """Return the relative excess costs of the scheduler's packings for random forests."""
    generator = np.random.default_rng(seed)
    gaps = []
    for _ in range(num_forests):
        case = random_forest(generator)
        group_size = int(generator.choice([1, 2, 4, 8, 16]))
        block_q = TILE_TABLE[int(generator.integers(len(TILE_TABLE)))][0]
        exact = exact_cost(case, group_size, block_q)
        gaps.append(packed_cost(case, group_size, block_q) / exact - 1)
    return gaps
