"""Handmade plans: work items of many segments, as the plan format allows.

These plans are valid but not efficient. They test executors with orders, cuts and empty segments
that the scheduler may never write.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from sample_forests import ForestCase, make_case

from sglang_pat._scheduler import (
    DIRECT_STORE,
    LATENT_TILE_TABLE,
    OPEN_END,
    PLAN_MAGIC,
    PLAN_SECTIONS,
    PLAN_VERSION,
    READ_ONCE,
    SHARED_KV,
    TILE_TABLE,
    PlanCapacity,
)

MAX_ROWS = TILE_TABLE[-1][0]


class HandSegment(NamedTuple):
    """A KvSegment whose interval of requests is two numbers."""

    kv_request: int
    kv_begin: int
    kv_end: int
    first: int
    end: int
    is_read_once: bool = False


@dataclasses.dataclass
class HandItem:
    requests: list[int]
    segments: list[HandSegment]


def _tile(table: Sequence[tuple[int, int, int]], rows: int) -> int:
    """Return the index of the smallest tile that holds `rows` rows."""
    return next(i for i, (block_q, _, _) in enumerate(table) if rows <= block_q)


class HandPlan:
    """Stands in for a scheduler that has made a given plan, for an executor's load_plan().

    Its header claims enough KV tokens for the kernels to use `is_read_once`.

    Parameters
    ----------
    num_requests, group_size
        As in the header.
    items
        The work items, which imply the partials: a request in only one item is stored directly.
    spans
        (request, kv_begin, num_tokens) of every shared range, in the order of their slots.
    tickets
        The number of items of each ticket; 1 by default.
    """

    def __init__(
        self,
        num_requests: int,
        group_size: int,
        items: Sequence[HandItem],
        spans: Sequence[tuple[int, int, int]] = (),
        tickets: Sequence[int] | None = None,
    ) -> None:
        tickets = [1] * len(items) if tickets is None else tickets
        self.tile_table = TILE_TABLE
        assert sum(tickets) == len(items)
        counts = [0] * num_requests
        for item in items:
            for request in item.requests:
                counts[request] += 1
        merges, next_slot = [], [DIRECT_STORE] * num_requests
        self.num_partials = self.num_cuts = 0
        for request, count in enumerate(counts):
            if count != 1:
                merges.append((request, self.num_partials, count, 0))
                next_slot[request] = self.num_partials
                self.num_partials += count
        work_items, segments, item_requests = [], [], []
        for requests, own in ((item.requests, item.segments) for item in items):
            rows = len(requests) * group_size
            head = (
                _tile(TILE_TABLE, rows),
                len(requests),
                len(item_requests),
                len(segments),
                len(own),
                0,
                0,
                0,
            )
            work_items.append(head)
            segments += [
                (*s[:3], s.first | s.end << 16 | (READ_ONCE if s.is_read_once else 0)) for s in own
            ]
            for request in requests:
                item_requests.append((request, next_slot[request]))
                next_slot[request] += counts[request] != 1
        ends = np.cumsum([0, *tickets]).tolist()
        segment_ends = [*(head[3] for head in work_items), len(segments)]
        gather_spans, self.num_shared_slots = [], 0
        for request, kv_begin, num_tokens in spans:
            gather_spans.append((request, kv_begin, num_tokens, self.num_shared_slots))
            self.num_shared_slots += num_tokens
        self._sections = {
            "ticket_begin": [(end, segment_ends[end]) for end in ends],
            "work_items": work_items,
            "kv_segments": segments,
            "item_requests": item_requests,
            "gather_spans": gather_spans,
            "merges": merges,
        }
        self._counts = {
            count: len(self._sections[name]) - extra for name, count, extra, _ in PLAN_SECTIONS
        }
        self._header = [
            *(PLAN_MAGIC, PLAN_VERSION, num_requests, group_size),
            *self._counts.values(),
            *(self.num_partials, self.num_shared_slots, np.iinfo(np.int32).max),
            max((tile for tile, *_ in work_items), default=0),
        ]

    def as_latent(self) -> HandPlan:
        """Return the same plan for latent attention, which has other tiles."""
        plan = copy.copy(self)
        plan.tile_table = LATENT_TILE_TABLE
        tiles = [
            _tile(LATENT_TILE_TABLE, TILE_TABLE[tile][0])
            for tile, *_ in self._sections["work_items"]
        ]
        plan._sections = self._sections | {
            "work_items": [
                (tile, *rest)
                for tile, (_, *rest) in zip(tiles, self._sections["work_items"], strict=True)
            ]
        }
        plan._header = [*self._header[:-1], max(tiles, default=0)]
        return plan

    def said_to_be_read_once(self, value: bool) -> HandPlan:
        """Return the same plan with this `is_read_once` in all segments."""
        plan = copy.copy(self)
        segments = [
            (*fields, requests & ~READ_ONCE | (READ_ONCE if value else 0))
            for *fields, requests in self._sections["kv_segments"]
        ]
        plan._sections = self._sections | {"kv_segments": segments}
        return plan

    def required_capacity(self) -> PlanCapacity:
        return PlanCapacity(**self._counts)

    def write(
        self,
        capacity: PlanCapacity,
        num_partials: int,
        num_shared_slots: int,
        num_cuts: int,
        out: np.ndarray,
    ) -> tuple[int, int, int] | None:
        entries = capacity.entries()
        if (
            any(count > entries[name] for name, count in self._counts.items())
            or self.num_partials > num_partials
            or self.num_shared_slots > num_shared_slots
        ):
            return None
        layout = capacity.layout()
        out[layout["header"] : layout["header"] + len(self._header)] = self._header
        for name, section in self._sections.items():
            flat = np.array(section, dtype=np.int32).reshape(-1)
            out[layout[name] : layout[name] + len(flat)] = flat
        return 0, 0, 0


def random_plan(case: ForestCase, group_size: int, seed: int) -> HandPlan:
    """Cut a batch into work items at random.

    Items are subtree tiles or packs of single nodes, with segments in any order, empty segments,
    requests without KV in their item, and a random `is_read_once`.
    """
    rng = np.random.default_rng(seed)
    cap = MAX_ROWS // group_size
    num_requests = len(case.seq_lens)
    # In tree order the requests of a node are neighbours.
    order = sorted(range(num_requests), key=lambda r: [node.node_id for node in case.paths[r]])
    holders: dict[int, list[int]] = {}
    for request in order:
        for node in case.paths[request]:
            holders.setdefault(node.node_id, []).append(request)
    span_of = {node.node_id: node for path in case.paths for node in path}
    spans, slot_begin, num_slots = [], {}, 0
    for node_id, held in holders.items():
        num_tokens = span_of[node_id].kv_end - span_of[node_id].kv_begin
        spans.append((held[0], span_of[node_id].kv_begin, num_tokens))
        slot_begin[node_id] = num_slots
        num_slots += num_tokens

    def cuts(begin: int, end: int) -> list[int]:
        """Return random positions from begin to end; repeated ones make empty segments."""
        inner = rng.integers(begin, end + 1, rng.integers(0, 3)).tolist()
        return [begin, *sorted(inner * int(rng.integers(1, 3))), end]

    def of_node(node_id: int, first: int, end: int) -> list[HandSegment]:
        node = span_of[node_id]
        live = rng.random() < 0.3
        source = int(rng.choice(holders[node_id])) if live else SHARED_KV
        shift = 0 if live else slot_begin[node_id] - node.kv_begin
        ends = cuts(node.kv_begin, node.kv_end)
        return [HandSegment(source, a + shift, b + shift, first, end) for a, b in pairwise(ends)]

    def of_tail(request: int, row: int) -> list[HandSegment]:
        begin = case.paths[request][-1].kv_end if case.paths[request] else 0
        ends = [*cuts(begin, int(case.seq_lens[request]))[:-1], OPEN_END]
        return [HandSegment(request, a, b, row, row + 1) for a, b in pairwise(ends)]

    def runs(requests: list[int]) -> list[list[int]]:
        result = []
        while requests:
            size = int(rng.integers(1, cap + 1)) if rng.random() < 0.5 else cap
            result.append(requests[:size])
            requests = requests[size:]
        return result

    def items_of(run: list[int], segments: list[HandSegment]) -> list[HandItem]:
        if rng.random() < 0.5:
            segments = [segments[i] for i in rng.permutation(len(segments))]
        result = []
        while segments:
            size = int(rng.integers(1, len(segments) + 1)) if rng.random() < 0.3 else len(segments)
            part, segments = segments[:size], segments[size:]
            first, end = min(s.first for s in part), max(s.end for s in part)
            # is_read_once must not change any result.
            part = [s._replace(is_read_once=rng.random() < 0.5) for s in part]
            if rng.random() < 0.5:  # else some requests may have no KV in the item
                part = [s._replace(first=s.first - first, end=s.end - first) for s in part]
                result.append(HandItem(run[first:end], part))
            else:
                result.append(HandItem(run, part))
        return result

    items = []
    packs = {node_id for node_id in holders if rng.random() < 0.3}
    for node_id in packs:
        for run in runs(holders[node_id]):
            items += items_of(run, of_node(node_id, 0, len(run)))
    for run in runs([r for r in order if case.seq_lens[r] > 0 or rng.random() < 0.5]):
        segments = []
        for node_id in dict.fromkeys(node.node_id for r in run for node in case.paths[r]):
            if node_id not in packs:
                rows = [row for row, r in enumerate(run) if r in holders[node_id]]
                segments += of_node(node_id, rows[0], rows[-1] + 1)
        for row, request in enumerate(run):
            segments += of_tail(request, row)
        items += items_of(run, segments)
    items = [items[i] for i in rng.permutation(len(items))]
    tickets = []
    while sum(tickets) < len(items):
        tickets.append(int(rng.integers(1, min(40, len(items) - sum(tickets)) + 1)))
    return HandPlan(num_requests, group_size, items, spans, tickets)


def random_case(seed: int, max_requests: int = 40) -> ForestCase:
    rng = np.random.default_rng(seed)

    def length() -> int:
        return int(rng.choice([1, 3, 16, 31, 32, 33, 65, 128, 200, 700]))

    num_nodes = int(rng.integers(0, 12))
    nodes = [(int(rng.integers(-1, i)) if i else -1, length()) for i in range(num_nodes)]
    requests = [
        (int(rng.integers(-1, num_nodes)), length() if rng.random() < 0.8 else 0)
        for _ in range(int(rng.integers(1, max_requests)))
    ]
    return make_case(nodes, requests, seed=seed)


def tails(lengths: list[int], group_size: int, *, reverse: bool = False) -> HandPlan:
    """Return one item of a prefix of 100 tokens and private tails, or of the tails first."""
    segments = [HandSegment(SHARED_KV, 0, 100, 0, len(lengths))]
    segments += [HandSegment(r, 100, OPEN_END, r, r + 1) for r in range(len(lengths))]
    requests = [*range(len(lengths))]
    items = [HandItem(requests, segments[::-1] if reverse else segments)]
    return HandPlan(len(lengths), group_size, items, [(0, 0, 100)])


def lengths_of_tails(group_size: int) -> list[int]:
    """Return tail lengths around multiples of a stage, as many as fit into one item."""
    lengths = [1, 31, 32, 33, 5, 64, 2, 17, 90, 3, 1, 40, 7, 96, 129, 4]
    return lengths[: MAX_ROWS // group_size]


def tails_case(lengths: list[int]) -> ForestCase:
    return make_case([(-1, 100)], [(0, length) for length in lengths])
