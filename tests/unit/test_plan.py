"""Plans: buffer, format, overflow, and properties of every plan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sample_forests import make_case, make_scheduler, plan_case, three_level_case

from sglang_pat._scheduler import (
    LATENT_TILE_TABLE,
    TILE_TABLE,
    CostModel,
    PackScheduler,
    PlanCapacity,
    row_lengths,
)
from sglang_pat.plan import BufferSizes, new_scheduler, write_plan

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
    for name in ("num_partials", "num_shared_slots"):  # a sufficient buffer stays
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
        # PackAttention's default, for tickets that all grow alike.
        ([600] * 132, 256),
        ([40] * 33, 256),
        # Pieces have 256 tokens. The last one, of 177, may grow to a sixteenth more than that.
        ([2161], 95),
        ([2161, 0, 0], 95),  # padding does not grow
        # A plan costs the host 30 us, so it must be valid for at least so many steps.
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
    """A tile that no pack selects would be dead code in the kernels."""
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
