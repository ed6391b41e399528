"""Random prefix forests for the tests, with a table of slots that shows which KV is shared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sglang_pat import DecodeBatch, DecodePlan, PathNode, PrefixPaths
from sglang_pat._scheduler import TILE_TABLE, CostModel, PackScheduler
from sglang_pat.plan import copy_plan

# Lengths around sizes that matter to the planner: tiles, cut granularity, shortest item.
LENGTHS = st.one_of(
    st.integers(1, 5), st.integers(60, 68), st.integers(120, 140), st.integers(200, 2500)
)


many = settings(deadline=None, suppress_health_check=list(HealthCheck))
# For tests that take a tenth of a second per example, or that the C++ tests repeat.
few = settings(many, max_examples=max(20, settings.default.max_examples // 5))


@dataclass(frozen=True)
class ForestCase:
    """A batch. `tokens[i, :seq_lens[i]]` are request i's KV slots; equal slots are the same KV."""

    paths: list[list[PathNode]]
    seq_lens: np.ndarray
    tokens: np.ndarray

    def batch(self, key: object = None) -> DecodeBatch:
        return DecodeBatch(self.seq_lens, PrefixPaths.from_lists(self.paths), key)

    @property
    def num_slots(self) -> int:
        return int(self.tokens.max(initial=0)) + 1


def make_case(
    nodes: list[tuple[int, int]],
    requests: list[tuple[int, int]],
    *,
    spare_tokens: int = 0,
    seed: int = 0,
    node_ids: list[int] | None = None,
) -> ForestCase:
    """nodes: (parent index or -1, length); requests: (node index or -1, private length).

    A node index of -1 with private length 0 is a padding row. Slots are scattered over the pool;
    slot 0 is unused. Each request gets slots for `spare_tokens` more private tokens, so that it can
    grow.
    """
    ids = node_ids or [3 * i + 1 for i in range(len(nodes))]
    spans: list[PathNode] = []
    for index, (parent, length) in enumerate(nodes):
        begin = 0 if parent < 0 else spans[parent].kv_end
        spans.append(PathNode(ids[index], begin, begin + length))
    paths = []
    for node, _ in requests:
        path = []
        while node >= 0:
            path.append(spans[node])
            node = nodes[node][0]
        paths.append(path[::-1])
    ends = [path[-1].kv_end if path else 0 for path in paths]
    seq_lens = np.array(
        [end + private for end, (_, private) in zip(ends, requests, strict=True)], dtype=np.int32
    )

    width = int(seq_lens.max(initial=0)) + spare_tokens + 1
    tokens = np.zeros((len(requests), width), dtype=np.int32)
    total = sum(length for _, length in nodes) + sum(p + spare_tokens for _, p in requests)
    free = iter(np.random.default_rng(seed).permutation(total).astype(np.int32) + 1)

    def take(count: int) -> np.ndarray:
        return np.fromiter(free, dtype=np.int32, count=count)

    node_tokens = {span.node_id: take(span.kv_end - span.kv_begin) for span in spans}
    for row, path in enumerate(paths):
        for span in path:
            tokens[row, span.kv_begin : span.kv_end] = node_tokens[span.node_id]
        private = requests[row][1] + spare_tokens
        tokens[row, ends[row] : ends[row] + private] = take(private)
    return ForestCase(paths, seq_lens, tokens)


@st.composite
def forest_cases(draw: st.DrawFn, max_requests: int = 40, spare_tokens: int = 0) -> ForestCase:
    num_nodes = draw(st.integers(0, 12))
    nodes = [(draw(st.integers(-1, index - 1)), draw(LENGTHS)) for index in range(num_nodes)]
    request = st.tuples(st.integers(-1, num_nodes - 1), st.one_of(st.just(0), LENGTHS))
    requests = draw(st.lists(request, min_size=1, max_size=max_requests))
    node_ids = draw(
        st.lists(st.integers(0, 2**62), min_size=num_nodes, max_size=num_nodes, unique=True)
    )
    return make_case(nodes, requests, spare_tokens=spare_tokens, node_ids=node_ids)


def broken_token(case: ForestCase, seed: int) -> tuple[int, int, np.ndarray] | None:
    """Draw a token whose KV not all requests attend to.

    Returns a request that attends to the token, its position there, and the mask of all such
    requests.
    """
    rng = np.random.default_rng(seed)
    slots = [row[:length] for row, length in zip(case.tokens, case.seq_lens, strict=True)]
    for request in rng.permutation(np.flatnonzero(case.seq_lens)).tolist():
        position = int(rng.integers(case.seq_lens[request]))
        broken = np.array([slots[request][position] in own for own in slots])
        if not broken.all():
            return request, position, broken
    return None


def three_level_case(
    num_requests: int, system: int = 512, document: int = 256, user: int = 64
) -> ForestCase:
    """Return requests with one system prompt, a document per 8 requests, and their own turns."""
    num_documents = max(1, num_requests // 8)
    nodes = [(-1, system)] + [(0, document)] * num_documents
    nodes += [(1 + r % num_documents, user) for r in range(num_requests)]
    requests = [(1 + num_documents + r, 16 + r % 7) for r in range(num_requests)]
    return make_case(nodes, requests)


def make_scheduler(
    group_size: int = 4,
    num_workers: int = 33,
    policy: str = "memory",
    max_block_q: int = 0,
    *,
    growth_tokens: int = 256,
    min_item_tokens: int = 128,
    by_time: bool = True,
    cost: CostModel | None = None,
) -> PackScheduler:
    return PackScheduler(
        group_size=group_size,
        num_workers=num_workers,
        max_block_q=max_block_q or TILE_TABLE[-1][0],
        policy=policy,
        min_item_tokens=min_item_tokens,
        growth_tokens=growth_tokens,
        by_time=by_time,
        cost=cost or CostModel(),
    )


def plan_case(scheduler: PackScheduler, case: ForestCase) -> DecodePlan:
    paths = PrefixPaths.from_lists(case.paths)
    scheduler.plan(paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, case.seq_lens)
    return copy_plan(scheduler)
