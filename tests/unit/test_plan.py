"""Plans: their buffer and its format, what does not fit, and properties of every plan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_segments import plan_segments, segment_tokens
from sample_forests import (
    ForestCase,
    few,
    forest_cases,
    make_case,
    make_scheduler,
    many,
    plan_case,
    three_level_case,
)

from sglang_pat._scheduler import (
    LATENT_TILE_TABLE,
    OPEN_END,
    SHARED_KV,
    TILE_TABLE,
    CostModel,
    PackScheduler,
    PlanCapacity,
    row_lengths,
)
from sglang_pat.plan import (
    BufferSizes,
    DecodePlan,
    new_scheduler,
    write_plan,
)
from sglang_pat.support import POLICIES

SECTIONS = (
    "num_tickets",
    "num_work_items",
    "num_kv_segments",
    "num_item_requests",
    "num_gather_spans",
    "num_merges",
)


def test_a_capacity_takes_the_counts_of_the_format() -> None:
    assert PlanCapacity(num_merges=3).entries() == dict.fromkeys(SECTIONS, 0) | {"num_merges": 3}
    with pytest.raises(TypeError, match=r"a capacity has num_tickets, .*num_merges, got merges"):
        PlanCapacity(merges=3)
    for number in (-1, 1 << 31):
        with pytest.raises(ValueError, match=f"num_merges must be 0 to 2147483647, got {number}"):
            PlanCapacity(num_merges=number)


def test_sections_start_on_cache_lines_and_do_not_overlap() -> None:
    capacity = PlanCapacity(
        num_tickets=33,
        num_work_items=7,
        num_kv_segments=11,
        num_item_requests=19,
        num_gather_spans=3,
        num_merges=5,
    )
    layout = capacity.layout()
    offsets = list(layout.values())
    assert all(offset % 32 == 0 for offset in offsets)
    needed = [16, 34 * 2, 7 * 8, 11 * 4, 19 * 2, 3 * 4, 5 * 4]
    for (begin, end), length in zip(pairwise(offsets), needed, strict=True):
        assert end - begin >= length


def test_a_buffer_with_room_to_spare_holds_smaller_plans() -> None:
    scheduler = make_scheduler()
    plan_case(scheduler, three_level_case(64))
    sizes = BufferSizes().grown(BufferSizes.needed_by(scheduler))
    buffer = np.zeros(sizes.plan.layout()["size"], dtype=np.int32)
    large = write_plan(scheduler, sizes, buffer)
    assert large is not None
    assert (large.header.num_requests, large.header.num_merges) == (64, 64)
    plan_case(scheduler, make_case([], [(-1, 5)]))
    small = write_plan(scheduler, sizes, buffer)
    assert small is not None
    assert small.header.num_work_items == 1
    assert small.ticket_begin.ctypes.data == large.ticket_begin.ctypes.data


@pytest.mark.parametrize("short", [*SECTIONS, "num_partials", "num_shared_slots"])
def test_a_plan_is_written_if_no_size_is_too_small(short: str) -> None:
    scheduler = make_scheduler()
    plan_case(scheduler, three_level_case(40))
    needed = BufferSizes.needed_by(scheduler)
    out = np.full(2 * needed.plan.layout()["size"], 7, dtype=np.int32)
    if short in SECTIONS:
        sizes = needed.plan.entries()
        sizes[short] -= 1
        small = needed._replace(plan=PlanCapacity(**sizes))
    else:
        small = needed._replace(**{short: getattr(needed, short) - 1})
    assert scheduler.write(*small, out) is None
    assert (out == 7).all()
    with pytest.raises(ValueError, match="the buffer has 100"):
        scheduler.write(*needed, out[:100])
    assert (out == 7).all()

    grown = small.grown(needed)
    assert scheduler.write(*grown, out) == scheduler.kv_tokens
    more = grown.plan.layout()["size"] > needed.plan.layout()["size"]
    assert more == (short in SECTIONS)
    for name in ("num_partials", "num_shared_slots"):  # what suffices stays
        assert getattr(grown, name) == getattr(needed, name) * (2 if name == short else 1)
    size = needed.plan.entries()[short] if short in SECTIONS else getattr(needed, short)
    assert f"{size} {short.removeprefix('num_')}" in str(needed)


def test_a_reservation_bounds_shared_slots_as_it_is_told() -> None:
    scheduler = make_scheduler(num_workers=33)
    nodes = [(-1 if depth == 0 else depth - 1, 300) for depth in range(5)]
    plan_case(scheduler, make_case(nodes, [(4, 200)] * 64))
    for max_shared_slots, fits in ((1500, True), (1499, False), (1, False)):
        sizes = BufferSizes.for_requests(64, max_shared_slots, num_workers=33, group_size=4)
        out = np.zeros(sizes.plan.layout()["size"], dtype=np.int32)
        assert (write_plan(scheduler, sizes, out) is not None) == fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5, 33, 4), "max_requests must be at least 1, got 0"),
        ((1, 5, 0, 4), "num_workers must be 1 to 65536, got 0"),
        ((1, 5, 33, 17), "group_size must be 1 to 16 query heads per KV head, got 17"),
        ((1 << 30, 5, 33, 4), "max_requests 1073741824 is too large"),
    ],
)
def test_bad_reservations(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BufferSizes.for_requests(*arguments)


@pytest.mark.parametrize(
    ("heads", "one_byte", "rows"), [(16, True, 32), (8, True, 32), (20, True, 64), (8, False, 64)]
)
def test_tiles_of_latent_attention_over_fp8_kv(heads: int, one_byte: bool, rows: int) -> None:
    kind = {"latent": True, "one_byte": one_byte}
    scheduler = new_scheduler(group_size=heads, num_workers=33, **kind)
    plan = plan_case(scheduler, make_case([(-1, 9000)], [(0, 9)] * 64))
    assert max(LATENT_TILE_TABLE[tile][0] for tile in plan.work_items[:, 0]) == rows
    sizes = BufferSizes.for_requests(64, 9000, num_workers=33, group_size=heads, **kind)
    assert write_plan(scheduler, sizes, np.zeros(sizes.plan.layout()["size"], np.int32))


@pytest.mark.parametrize(
    ("lengths", "growth"),
    [
        # PackAttention's default, where all workers' tickets grow alike.
        ([600] * 132, 256),
        ([40] * 33, 256),
        # Pieces of 256 tokens. The last one, of 177, may become a sixteenth longer than those.
        ([2161], 95),
        ([2161, 0, 0], 95),  # padding does not grow
        # As many at least: a plan takes the host 30 us.
        ([500], 32),
    ],
)
def test_a_plan_serves_more_tokens_while_it_is_balanced(lengths: list[int], growth: int) -> None:
    scheduler = new_scheduler(group_size=4, num_workers=33)
    case = make_case([], [(-1, length) for length in lengths])
    plan_case(scheduler, case)
    grows = (case.seq_lens > 0).astype(np.int32)
    assert scheduler.check_lengths(case.seq_lens + np.int32(growth) * grows)[0]
    assert not scheduler.check_lengths(case.seq_lens + np.int32(growth + 1) * grows)[0]


def test_every_tile_of_the_table_is_chosen() -> None:
    """A tile that no pack can select would be dead code in the kernels."""
    chosen = set()
    for rows in (16, *(tile[0] for tile in TILE_TABLE)):
        case = make_case([(-1, 600)], [(0, 9)] * rows)
        plan = plan_case(make_scheduler(group_size=1), case)
        chosen |= set(plan.work_items[:, 0].tolist())
    assert chosen == set(range(len(TILE_TABLE)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"group_size": 0}, "group_size must be 1 to 16 query heads per KV head, got 0"),
        ({"max_block_q": 48}, "max_block_q must be the block_q of a tile .* got 48"),
        ({"min_item_tokens": 100}, "min_item_tokens must be a positive multiple of 64, got 100"),
        ({"num_workers": 65537}, "num_workers must be 1 to 65536, got 65537"),
    ],
)
def test_bad_scheduler_configurations(config: dict[str, object], message: str) -> None:
    good = {
        "group_size": 4,
        "num_workers": 33,
        "max_block_q": TILE_TABLE[-1][0],
        "policy": "memory",
        "min_item_tokens": 128,
        "growth_tokens": 256,
    }
    with pytest.raises(ValueError, match=message):
        PackScheduler(**{**good, **config})  # type: ignore[arg-type]


def test_array_dtypes_are_not_converted() -> None:
    one = np.zeros(1, dtype=np.int32)
    with pytest.raises(TypeError):
        make_scheduler().plan(one, np.zeros(1, dtype=np.int32), one, one, one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_lens must have 1 dimension, got 2"):
        make_scheduler().check_lengths(np.zeros((1, 1), dtype=np.int32))


def test_costs_have_a_range() -> None:
    values = CostModel().values()
    assert CostModel(**values) == CostModel()
    case = three_level_case(40)
    for name in values:
        least = 1 / 64 if name.startswith("token_") else 0
        for value in (least - 1 / 64, 16384.5, float("nan"), 1e300):
            with pytest.raises(ValueError, match=f"cost {name} must be [01] / 64 to 16384, got"):
                CostModel(**{name: value})
        for value in (least, 16384):
            cost = CostModel(**{name: value})
            assert cost.values() == values | {name: value}
            assert cost != CostModel()
            assert plan_case(make_scheduler(cost=cost), case).header.num_work_items > 0
    with pytest.raises(TypeError, match="item must be a number, got 'x'"):
        CostModel(item="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a cost model has reread_token, .*, token_64, got piece"):
        CostModel(piece=3)


def test_arrays_must_be_aligned() -> None:
    odd = np.zeros(9, dtype=np.int8)[1:].view(np.int32)
    with pytest.raises(ValueError, match="seq_lens must be aligned to 4 bytes"):
        make_scheduler().check_lengths(odd)
    assert row_lengths(odd, 2, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [(-1, 2), (1, -2)])
def test_numbers_of_rows_must_not_be_negative(rows: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative, got"):
        row_lengths(np.zeros(3, dtype=np.int64), *rows)


def serves(scheduler: PackScheduler, seq_lens: np.ndarray) -> bool:
    served, total, longest = scheduler.check_lengths(seq_lens)
    assert (total, longest) == (seq_lens.sum(), seq_lens.max(initial=0))
    return served


def gathered_slots(plan: DecodePlan, case: ForestCase) -> np.ndarray:
    slots = np.full(plan.header.num_shared_slots, -1, dtype=np.int32)
    for request, kv_begin, num_tokens, slot_begin in plan.gather_spans.tolist():
        assert num_tokens > 0
        assert (slots[slot_begin : slot_begin + num_tokens] == -1).all(), "slots gathered twice"
        slots[slot_begin : slot_begin + num_tokens] = case.tokens[request, kv_begin:][:num_tokens]
    assert (slots >= 0).all(), "slots never gathered"
    return slots


def check_coverage(plan: DecodePlan, case: ForestCase, seq_lens: np.ndarray) -> None:
    """Check that every request reads each of its KV tokens exactly once, and nothing else.

    KV that is marked as read by one work item is read by one.
    """
    shared = gathered_slots(plan, case)
    read: list[list[np.ndarray]] = [[] for _ in seq_lens]
    readers = np.zeros(case.tokens.max(initial=0) + 1, dtype=int)  # work items by token
    once = [np.empty(0, np.int32)]  # tokens of which the plan says that they have one
    for _, kv_request, kv_begin, kv_end, entries, is_read_once in plan_segments(plan):
        if kv_request == SHARED_KV:
            slots = shared[kv_begin:kv_end]
        else:
            end = seq_lens[kv_request] if kv_end == OPEN_END else kv_end
            slots = case.tokens[kv_request, kv_begin:end]
        for request in plan.item_requests[entries, 0].tolist():
            read[request].append(slots)
        readers[slots] += 1
        if is_read_once:
            once.append(slots)
    for request, seq_len in enumerate(seq_lens.tolist()):
        have = np.concatenate([np.empty(0, np.int32), *read[request]])
        np.testing.assert_array_equal(np.sort(have), np.sort(case.tokens[request, :seq_len]))
    assert (readers[np.concatenate(once)] == 1).all()


def check_tokens(plan: DecodePlan, case: ForestCase) -> None:
    tokens = plan.kv_tokens
    assert tokens.query_centric == case.seq_lens.sum()
    distinct = {int(t) for row, n in zip(case.tokens, case.seq_lens, strict=True) for t in row[:n]}
    # A node whose holders all end inside it cannot occur, so every distinct token counts once.
    assert tokens.lower_bound == len(distinct)
    assert tokens.lower_bound <= tokens.planned <= tokens.query_centric
    assert tokens.planned == segment_tokens(plan, case.seq_lens).sum()


@pytest.mark.parametrize("policy", POLICIES)
@few
@given(
    case=forest_cases(),
    group_size=st.integers(1, 16),
    num_workers=st.sampled_from([1, 2, 7, 33, 132]),
    max_block_q=st.sampled_from([tile[0] for tile in TILE_TABLE]),
)
def test_every_plan_is_right(
    policy: str, case: ForestCase, group_size: int, num_workers: int, max_block_q: int
) -> None:
    scheduler = make_scheduler(group_size, num_workers, policy, max_block_q)
    plan = plan_case(scheduler, case)
    check_coverage(plan, case, case.seq_lens)
    check_tokens(plan, case)


@many
@given(case=forest_cases(spare_tokens=300), growth=st.integers(1, 300), data=st.data())
def test_a_plan_serves_grown_requests(case: ForestCase, growth: int, data: st.DataObject) -> None:
    scheduler = make_scheduler()
    plan = plan_case(scheduler, case)
    grows = data.draw(
        st.lists(st.booleans(), min_size=len(case.seq_lens), max_size=len(case.seq_lens))
    )
    grown = case.seq_lens + np.where(grows, growth, 0).astype(np.int32)
    if serves(scheduler, grown):
        assert growth <= 256 or not any(grows)
        check_coverage(plan, case, grown)
    else:
        # Refused only where it must be: too long, or nothing in the plan reads the new tokens.
        open_requests = set(plan.kv_segments[plan.kv_segments[:, 2] == OPEN_END, 0].tolist())
        assert growth > 32 or any(g and r not in open_requests for r, g in enumerate(grows))
    assert not serves(scheduler, grown[:-1])
    if case.seq_lens[0] > 0:
        shrunk = case.seq_lens.copy()
        shrunk[0] -= 1
        assert not serves(scheduler, shrunk)
