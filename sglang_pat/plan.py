"""DecodePlan: the plan that the C++ scheduler wrote, the buffer it lies in, and how large that is.

Between the scheduler, which writes the buffer, and the executors, which read it. The format is
`kernels/contract/plan_format.h`; this file only gives its sections names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from sglang_pat._scheduler import (
    DIRECT_STORE,
    OPEN_END,
    PLAN_MAGIC,
    PLAN_VERSION,
    SHARED_KV,
    TILE_TABLE,
    PackScheduler,
    PlanCapacity,
)
from sglang_pat.batch import IntArray

_Section = Literal["ticket_begin", "work_items", "item_requests", "gather_spans", "merges"]


class PlanHeader(NamedTuple):
    """`PlanHeader` of plan_format.h without its reserved words."""

    magic: int
    version: int
    num_requests: int
    group_size: int
    num_tickets: int
    num_work_items: int
    num_item_requests: int
    num_gather_spans: int
    num_merges: int
    num_partials: int
    num_shared_slots: int


class KvTokens(NamedTuple):
    """KV tokens of one KV head that one decode step reads.

    query_centric: every request reads its own KV. planned: what the work items load; a range counts
    once per tile that reads it. lower_bound: every distinct token once.
    """

    query_centric: int
    planned: int
    lower_bound: int


class DecodePlan:
    """A plan in its buffer. Valid until the next plan is written into that buffer.

    buffer: int32, laid out for `capacity`. kv_tokens: at the lengths it was planned for.

    Header and arrays are read when they are asked for, since only the reference executor and checks
    do. The arrays are int32 views of the buffer, one row per entry, columns as in plan_format.h.
    """

    def __init__(self, buffer: IntArray, capacity: PlanCapacity, kv_tokens: KvTokens) -> None:
        self.buffer = buffer
        self.capacity = capacity
        self.kv_tokens = kv_tokens

    @classmethod
    def parse(cls, buffer: IntArray, capacity: PlanCapacity, kv_tokens: KvTokens) -> DecodePlan:
        """View a plan that was written with `capacity`. ValueError if the buffer holds none."""
        size = capacity.layout()["size"]
        if len(buffer) < size:
            raise ValueError(f"a plan buffer of {size} int32 expected, got {len(buffer)}")
        plan = cls(buffer, capacity, kv_tokens)
        header = plan.header
        if (header.magic, header.version) != (PLAN_MAGIC, PLAN_VERSION):
            raise ValueError(
                f"no plan of version {PLAN_VERSION} in this buffer: version {header.version}, "
                f"magic {header.magic:#x}, expected {PLAN_MAGIC:#x}"
            )
        return plan

    @cached_property
    def header(self) -> PlanHeader:
        """As it was when it was first asked for."""
        begin = self.capacity.layout()["header"]
        return PlanHeader(*self.buffer[begin : begin + len(PlanHeader._fields)].tolist())

    @property
    def ticket_begin(self) -> IntArray:
        """`[num_tickets + 1]`"""
        return self._section("ticket_begin", self.header.num_tickets + 1, 1)[:, 0]

    @property
    def work_items(self) -> IntArray:
        """`[num_work_items, 8]`"""
        return self._section("work_items", self.header.num_work_items, 8)

    @property
    def item_requests(self) -> IntArray:
        """`[num_item_requests, 2]`"""
        return self._section("item_requests", self.header.num_item_requests, 2)

    @property
    def gather_spans(self) -> IntArray:
        """`[num_gather_spans, 4]`"""
        return self._section("gather_spans", self.header.num_gather_spans, 4)

    @property
    def merges(self) -> IntArray:
        """`[num_merges, 4]`"""
        return self._section("merges", self.header.num_merges, 4)

    def _section(self, name: _Section, count: int, width: int) -> IntArray:
        begin = self.capacity.layout()[name]
        return self.buffer[begin : begin + count * width].reshape(count, width)

    def describe(self) -> str:
        """The plan as text: one line per work item: ticket, tile, KV range, requests."""
        return "\n".join(self._describe_lines())

    def _describe_lines(self) -> Iterator[str]:
        h, tokens = self.header, self.kv_tokens
        ticket_begin, work_items = self.ticket_begin, self.work_items
        item_requests = self.item_requests
        yield (
            f"plan v{h.version}: {h.num_requests} requests, group size {h.group_size}, "
            f"{h.num_work_items} work items in {h.num_tickets} tickets per KV head, "
            f"{h.num_partials} partials, {h.num_shared_slots} shared slots"
        )
        yield (
            f"KV tokens: {tokens.query_centric} query-centric, {tokens.planned} planned, "
            f"{tokens.lower_bound} at least"
        )
        for ticket in range(h.num_tickets):
            for item in range(ticket_begin[ticket], ticket_begin[ticket + 1]):
                tile, count, first, kv_request, kv_begin, kv_end = work_items[item, :6].tolist()
                source = "slots" if kv_request == SHARED_KV else f"request {kv_request} at"
                end = "open" if kv_end == OPEN_END else kv_end
                requests = item_requests[first : first + count]
                stores = (
                    f"{request}{'' if slot == DIRECT_STORE else f'->{slot}'}"
                    for request, slot in requests.tolist()
                )
                yield (
                    f"ticket {ticket}: item {item}, tile {TILE_TABLE[tile][0]} rows, "
                    f"{source} [{kv_begin}, {end}), requests (->partial) {' '.join(stores)}"
                )
        for request, begin, count, _ in self.merges.tolist():
            yield f"merge request {request}: partials [{begin}, {begin + count})"


def write_plan(scheduler: PackScheduler, sizes: BufferSizes, buffer: IntArray) -> DecodePlan | None:
    """Write the scheduler's last plan and view it; None, with nothing written, if it does not fit
    the sizes. ValueError if the buffer is shorter than the layout.
    """
    kv_tokens = scheduler.write(*sizes, buffer)
    return None if kv_tokens is None else DecodePlan(buffer, sizes.plan, KvTokens(*kv_tokens))


def copy_plan(scheduler: PackScheduler) -> DecodePlan:
    """The scheduler's last plan in a buffer of its own."""
    sizes = BufferSizes.needed_by(scheduler)
    plan = write_plan(scheduler, sizes, np.zeros(sizes.plan.layout()["size"], dtype=np.int32))
    assert plan is not None
    return plan


def replan_cause(*, planned: bool, same_batch: bool, lengths_served: bool) -> str | None:
    """Why the last plan does not serve a step; None if it does.

    planned: whether there is one. same_batch: its key is the step's. lengths_served: as the
    scheduler's `check_lengths` says.
    """
    if not planned:
        return "first"
    if not same_batch:
        return "batch_changed"
    return None if lengths_served else "tail_growth"


CAPACITY_FIELDS = (
    "num_tickets",
    "num_work_items",
    "num_item_requests",
    "num_gather_spans",
    "num_merges",
)


class BufferSizes(NamedTuple):
    """plan: entries of the plan's sections. num_partials: partial slots, of 4 * num_qo_heads *
    (head_dim + 1) bytes each. num_shared_slots: KV tokens of all shared ranges, 4 bytes each.
    """

    plan: PlanCapacity = PlanCapacity()
    num_partials: int = 0
    num_shared_slots: int = 0

    @classmethod
    def for_requests(
        cls, max_requests: int, num_shared_slots: int, num_workers: int, group_size: int
    ) -> BufferSizes:
        """Enough for paths of about five shared ranges per request. Cuts add at most a largest
        tile's requests for each worker (scheduler/kv_split.h).
        """
        cut_requests = num_workers * (TILE_TABLE[-1][0] // group_size)
        entries = 6 * max_requests + cut_requests
        return cls(
            plan=PlanCapacity(
                num_tickets=4 * max_requests + cut_requests,
                num_work_items=4 * max_requests + cut_requests,
                num_item_requests=entries,
                num_gather_spans=2 * max_requests,
                num_merges=max_requests,
            ),
            num_partials=entries,
            num_shared_slots=num_shared_slots,
        )

    @classmethod
    def needed_by(cls, scheduler: PackScheduler) -> BufferSizes:
        """What the scheduler's last plan needs."""
        return cls(
            scheduler.required_capacity(), scheduler.num_partials, scheduler.num_shared_slots
        )

    def grown(self, needed: BufferSizes) -> BufferSizes:
        """Sizes that are too small become twice what is needed: a growing batch then reallocates a
        logarithmic number of times.
        """
        sections = {
            name: _grown(getattr(self.plan, name), getattr(needed.plan, name))
            for name in CAPACITY_FIELDS
        }
        return BufferSizes(
            PlanCapacity(**sections),
            _grown(self.num_partials, needed.num_partials),
            _grown(self.num_shared_slots, needed.num_shared_slots),
        )

    def __str__(self) -> str:
        sections = [f"{getattr(self.plan, name)} {name[4:]}" for name in CAPACITY_FIELDS]
        others = (f"{self.num_partials} partials", f"{self.num_shared_slots} shared_slots")
        return ", ".join((*sections, *others))


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else 2 * needed
