"""DecodePlan: a view of the plan buffer, which the C++ scheduler writes and executors read.

`kernels/contract/plan_format.h` defines the format. This module gives its sections names and
shapes, computes the sizes of the buffers, and makes schedulers.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from functools import cached_property
from operator import le
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sglang_pat._scheduler import (
    DIRECT_STORE,
    LATENT_TILE_TABLE,
    OPEN_END,
    PLAN_SECTIONS,
    READ_ONCE,
    SHARED_KV,
    SHIPPED_LATENT_COSTS,
    TILE_TABLE,
    CostModel,
    PackScheduler,
    PlanCapacity,
    invariant_plan_bounds,
    plan_bounds,
)
from sglang_pat.batch import IntArray
from sglang_pat.support import GROWTH_TOKENS, is_latent

MIN_ITEM_TOKENS = 256
_ONE_BYTE_LATENT_TILE = 32  # query rows of a tile of latent attention over fp8 KV
_Integers = TypeVar("_Integers", int, npt.NDArray[np.int64])


def _capacity_of(entries: dict[str, int]) -> PlanCapacity:
    return PlanCapacity(**entries)


# Makes plans copyable and picklable. A copy has its own buffer.
copyreg.pickle(PlanCapacity, lambda capacity: (_capacity_of, (capacity.entries(),)))


def new_scheduler(
    *,
    group_size: int,
    num_workers: int,
    policy: str = "memory",
    growth_tokens: int = GROWTH_TOKENS,
    batch_invariant: bool = False,
    one_tile: bool = False,
    by_time: bool = True,
    latent: bool = False,
    one_byte: bool = False,
    cost: CostModel | None = None,
    window: int = 0,
    slack: int = 0,
    ahead: int = 0,
    chunked: bool = False,
) -> PackScheduler:
    """Make a scheduler, with PackAttention's constants for growth and item lengths.

    by_time: with the policy `memory`, a small step may get other packs, or packs that share
    nothing, if the cost model predicts an earlier end of the step. latent: plan for latent
    attention. one_byte: the KV cache is fp8. cost: None for an H100's costs. window, slack, ahead,
    chunked: see scheduler/window_cut.h.
    """
    return PackScheduler(
        group_size=group_size,
        num_workers=num_workers,
        max_block_q=largest_tile(group_size, latent=latent, one_byte=one_byte),
        policy=policy,
        min_item_tokens=MIN_ITEM_TOKENS,
        growth_tokens=growth_tokens,
        batch_invariant=batch_invariant,
        one_tile=one_tile,
        by_time=by_time,
        latent=latent,
        cost=CostModel() if cost is None else cost,
        window=window,
        slack=slack,
        ahead=ahead,
        chunked=chunked,
    )


def largest_tile(group_size: int, *, latent: bool = False, one_byte: bool = False) -> int:
    """Return the number of query rows of the largest tile that plans use.

    With fp8 KV, latent attention uses tiles of 32 rows, because two such tiles take 0.64 to 0.94
    times as long as one tile of 64 rows (the shared cases of `benchmarks/kernel mla`). A group of
    more than 16 query heads needs the tile of 64 rows.
    """
    if latent and one_byte and 2 * group_size <= _ONE_BYTE_LATENT_TILE:
        return _ONE_BYTE_LATENT_TILE
    return int((LATENT_TILE_TABLE if latent else TILE_TABLE)[-1][0])


def shipped_latent_costs(gpu: str) -> CostModel:
    """Return the shipped costs of latent attention on a GPU, or an H100's for an unknown GPU."""
    first = SHIPPED_LATENT_COSTS[0][2]
    return next((costs for name, _, costs in SHIPPED_LATENT_COSTS if name in gpu), first)


class HeadConfig(NamedTuple):
    """The numbers of heads on this rank, and the head_dims of keys and values."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def is_latent(self) -> bool:
        """True for latent attention: values are the first columns of the keys."""
        return is_latent(self.head_dim, self.v_head_dim)


class LayerKind(NamedTuple):
    """The shape and the window of a layer. Layers of the same kind have the same plans."""

    heads: HeadConfig
    window: int = 0  # the most tokens that a request attends to; 0: all
    chunked: bool = False  # whether the window is a chunk, with fixed bounds


class PlanHeader(NamedTuple):
    """`PlanHeader` of plan_format.h without its reserved words."""

    magic: int
    version: int
    num_requests: int
    group_size: int
    num_tickets: int
    num_work_items: int
    num_kv_segments: int
    num_item_requests: int
    num_gather_spans: int
    num_merges: int
    num_partials: int
    num_shared_slots: int
    num_kv_tokens: int
    largest_tile: int


class KvTokens(NamedTuple):
    """KV tokens of one KV head that one decode step reads.

    query_centric: the tokens if every request read its KV alone. planned: the tokens that the work
    items read, where a range counts once per item that reads it. lower_bound: the distinct tokens.
    """

    query_centric: int
    planned: int
    lower_bound: int


class _Section:
    """Descriptor of a DecodePlan's section: an int32 view of the buffer, named like the section.

    Its shape is `[entries]` if an entry is one integer, else `[entries, integers per entry]`.
    """

    def __set_name__(self, owner: type[DecodePlan], name: str) -> None:
        self._name = name
        (section,) = (section for section in PLAN_SECTIONS if section[0] == name)
        _, self._count, self._extra, self._width = section

    def __get__(self, plan: DecodePlan, owner: type[DecodePlan]) -> IntArray:
        count: int = getattr(plan.header, self._count) + self._extra
        begin = plan.capacity.layout()[self._name]
        section = plan.buffer[begin : begin + count * self._width]
        return section if self._width == 1 else section.reshape(count, self._width)


class DecodePlan:
    """A plan in its buffer. Valid until the next plan is written into that buffer.

    A deep copy stays valid.

    Header and sections are read when they are accessed, because only the reference executor and
    checks need them. plan_format.h says what the columns of a section mean.

    Parameters
    ----------
    buffer
        int32, laid out for `capacity`. The caller owns it.
    capacity
        How many entries each section of the buffer can hold.
    kv_tokens
        KV tokens that a step reads at the planned lengths.
    tile_table
        The scheduler's tiles. Work items have indices in this table.
    """

    ticket_begin = _Section()
    work_items = _Section()
    kv_segments = _Section()
    item_requests = _Section()
    gather_spans = _Section()
    merges = _Section()

    def __init__(
        self,
        buffer: IntArray,
        capacity: PlanCapacity,
        kv_tokens: KvTokens,
        tile_table: tuple[tuple[int, int, int], ...],
    ) -> None:
        self.buffer = buffer
        self.capacity = capacity
        self.kv_tokens = kv_tokens
        self.tile_table = tile_table

    @cached_property
    def header(self) -> PlanHeader:
        """A copy of the header from the first access."""
        begin = self.capacity.layout()["header"]
        return PlanHeader(*self.buffer[begin : begin + len(PlanHeader._fields)].tolist())

    def live_requests(self) -> IntArray:
        """Return the requests that run() reads up to their current length, not the planned one."""
        segments = self.kv_segments
        live: IntArray = segments[segments[:, 2] == OPEN_END, 0]
        return live

    def cuts(self, num_requests: int) -> IntArray:
        """Return the cut of each request in layers with a window (scheduler/window_cut.h)."""
        begin = self.capacity.layout()["size"]
        return self.buffer[begin : begin + num_requests]

    def describe(self) -> str:
        """Return the plan as text, a line per work item: ticket, tile, KV segments, requests."""
        return "\n".join(self._describe_lines())

    def _describe_lines(self) -> Iterator[str]:
        h, tokens = self.header, self.kv_tokens
        ticket_begin, work_items = self.ticket_begin[:, 0].tolist(), self.work_items
        kv_segments, item_requests = self.kv_segments, self.item_requests
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
                tile, count, first, segment, num_segments = work_items[item, :5].tolist()
                segments = (
                    _describe_segment(fields, count)
                    for fields in kv_segments[segment : segment + num_segments].tolist()
                )
                requests = item_requests[first : first + count]
                stores = (
                    f"{request}{'' if slot == DIRECT_STORE else f'->{slot}'}"
                    for request, slot in requests.tolist()
                )
                yield (
                    f"ticket {ticket}: item {item}, tile {self.tile_table[tile][0]} rows, "
                    f"{' + '.join(segments)}, requests (->partial) {' '.join(stores)}"
                )
        for request, begin, count, _ in self.merges.tolist():
            yield f"merge request {request}: partials [{begin}, {begin + count})"


def segment_interval(requests: _Integers) -> tuple[_Integers, _Integers]:
    """Return (first, end) of a segment's requests, counted from the work item's first request."""
    return requests & (READ_ONCE - 1), requests >> 16


def _describe_segment(segment: list[int], of_item: int) -> str:
    kv_request, kv_begin, kv_end, requests = segment
    source = "slots" if kv_request == SHARED_KV else f"request {kv_request} at"
    end = "open" if kv_end == OPEN_END else kv_end
    first, last = segment_interval(requests)
    rows = "" if (first, last) == (0, of_item) else f" of its [{first}, {last})"
    return f"{source} [{kv_begin}, {end}){rows}"


def write_plan(scheduler: PackScheduler, sizes: BufferSizes, buffer: IntArray) -> DecodePlan | None:
    """Write the scheduler's last plan into a buffer.

    Parameters
    ----------
    scheduler
        The scheduler that has made the plan.
    sizes
        The capacities of the plan buffer, the partials and the slot buffer.
    buffer
        int32, C-contiguous, at least as long as `sizes.buffer_size`. It is written.

    Returns
    -------
    DecodePlan or None
        A view of the buffer, or None if the plan needs more than `sizes`. Nothing is written then.

    Raises
    ------
    ValueError
        The buffer is shorter than `sizes.buffer_size`.
    """
    kv_tokens = scheduler.write(*sizes, buffer)
    if kv_tokens is None:
        return None
    return DecodePlan(buffer, sizes.plan, KvTokens(*kv_tokens), scheduler.tile_table)


def copy_plan(scheduler: PackScheduler) -> DecodePlan:
    """Return the scheduler's last plan in a new buffer."""
    sizes = BufferSizes.needed_by(scheduler)
    plan = write_plan(scheduler, sizes, np.zeros(sizes.buffer_size, dtype=np.int32))
    assert plan is not None
    return plan


class PlanOverflowError(ValueError):
    """A plan does not fit into the buffers that were reserved. Nothing was launched."""


class BufferSizes(NamedTuple):
    """The capacity of a plan's buffers.

    plan: entries of each section. num_partials: partials, of 2 * num_qo_heads * (v_head_dim + 2)
    bytes each. num_shared_slots: KV tokens of all shared ranges, 4 bytes each. num_cuts: one per
    request if layers have a window, else 0. The cuts follow the plan in its buffer, 4 bytes each.
    """

    plan: PlanCapacity = PlanCapacity()
    num_partials: int = 0
    num_shared_slots: int = 0
    num_cuts: int = 0

    @property
    def buffer_size(self) -> int:
        """Length of the plan buffer, in int32."""
        return self.plan.layout()["size"] + self.num_cuts

    @classmethod
    def for_requests(
        cls,
        max_requests: int,
        num_shared_slots: int,
        num_workers: int,
        group_size: int,
        *,
        latent: bool = False,
        one_byte: bool = False,
    ) -> BufferSizes:
        """Return the capacity for the plan of any batch of up to `max_requests` requests.

        Plans always fit, unless they have more shared slots than `num_shared_slots`. Only the KV
        pool bounds how many shared slots a plan has. `plan_bounds` in scheduler/pack_scheduler.cpp
        gives the other bounds.

        Parameters
        ----------
        max_requests
            Rows of a batch, including padding.
        num_shared_slots
            KV tokens of all shared ranges of a batch.
        num_workers, group_size, latent, one_byte
            The arguments of the scheduler.

        Raises
        ------
        ValueError
            A parameter is out of range.
        """
        max_block_q = largest_tile(group_size, latent=latent, one_byte=one_byte)
        capacity, num_partials = plan_bounds(
            max_requests, num_workers, group_size, max_block_q, latent=latent
        )
        return cls(capacity, num_partials, num_shared_slots)

    @classmethod
    def for_invariant(
        cls, max_requests: int, num_shared_slots: int, max_seq_len: int
    ) -> BufferSizes:
        """Return the capacity for any batch-invariant plan within these limits.

        A batch has up to `max_requests` requests of up to `max_seq_len` KV tokens each. Raises
        ValueError if a parameter is out of range.
        """
        capacity, num_partials = invariant_plan_bounds(max_requests, max_seq_len)
        return cls(capacity, num_partials, num_shared_slots)

    @classmethod
    def needed_by(cls, scheduler: PackScheduler) -> BufferSizes:
        """Return the capacity that the scheduler's last plan needs."""
        return cls(
            scheduler.required_capacity(),
            scheduler.num_partials,
            scheduler.num_shared_slots,
            scheduler.num_cuts,
        )

    def grown(self, needed: BufferSizes) -> BufferSizes:
        """Return sizes for `needed`. Each size that is too small becomes twice the needed size.

        So a growing batch allocates its buffers a logarithmic number of times.
        """
        entries, needed_entries = self.plan.entries(), needed.plan.entries()
        return BufferSizes(
            PlanCapacity(**{name: _grown(entries[name], needed_entries[name]) for name in entries}),
            _grown(self.num_partials, needed.num_partials),
            _grown(self.num_shared_slots, needed.num_shared_slots),
            _grown(self.num_cuts, needed.num_cuts),
        )

    def hold(self, needed: BufferSizes) -> bool:
        """Return True if no size is below the needed one."""
        return all(map(le, needed._entries().values(), self._entries().values()))

    def _entries(self) -> dict[str, int]:
        return self.plan.entries() | {name: getattr(self, name) for name in self._fields[1:]}

    def __str__(self) -> str:
        sizes = {name: n for name, n in self._entries().items() if n or name != "num_cuts"}
        return ", ".join(f"{size} {name.removeprefix('num_')}" for name, size in sizes.items())


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else 2 * needed
