"""The plan buffer: the format both sides agree on, and what happens when a plan does not fit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from forests import make_case, make_scheduler, plan_case, three_level_case

from sglang_pat._scheduler import PLAN_MAGIC, PLAN_VERSION, TILE_TABLE, PackScheduler, PlanCapacity
from sglang_pat.plan import BufferSizes, DecodePlan, KvTokens, write_plan

SECTIONS = ("num_tickets", "num_work_items", "num_item_requests", "num_gather_spans", "num_merges")


def test_sections_start_on_cache_lines_and_do_not_overlap() -> None:
    capacity = PlanCapacity(
        num_tickets=33, num_work_items=7, num_item_requests=19, num_gather_spans=3, num_merges=5
    )
    layout = capacity.layout()
    offsets = list(layout.values())
    assert all(offset % 32 == 0 for offset in offsets)
    needed = [16, 34, 7 * 8, 19 * 2, 3 * 4, 5 * 4]
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
        sizes = {name: getattr(needed.plan, name) for name in SECTIONS}
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
    size = getattr(needed.plan if short in SECTIONS else needed, short)
    assert f"{size} {short.removeprefix('num_')}" in str(needed)


def test_a_reservation_has_room_for_paths_of_five_nodes() -> None:
    scheduler = make_scheduler(num_workers=33)
    nodes = [(-1 if depth == 0 else depth - 1, 300) for depth in range(5)]
    plan_case(scheduler, make_case(nodes, [(4, 200)] * 64))
    for max_shared_slots, fits in ((1500, True), (1, False)):
        sizes = BufferSizes.for_requests(64, max_shared_slots, num_workers=33, group_size=4)
        out = np.zeros(sizes.plan.layout()["size"], dtype=np.int32)
        assert (write_plan(scheduler, sizes, out) is not None) == fits


def test_a_buffer_without_a_plan_is_recognised() -> None:
    scheduler = make_scheduler()
    plan_case(scheduler, three_level_case(4))
    sizes = BufferSizes.needed_by(scheduler)
    capacity = sizes.plan
    buffer = np.zeros(capacity.layout()["size"], dtype=np.int32)
    tokens = KvTokens(0, 0, 0)
    with pytest.raises(ValueError, match="no plan of version"):
        DecodePlan.parse(buffer, capacity, tokens)
    scheduler.write(*sizes, buffer)
    assert DecodePlan.parse(buffer, capacity, tokens).header[:2] == (PLAN_MAGIC, PLAN_VERSION)
    with pytest.raises(ValueError, match="got 3"):
        DecodePlan.parse(buffer[:3], capacity, tokens)


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
        ({"group_size": 17}, "group_size must be 1 to 16 query heads per KV head, got 17"),
        ({"max_block_q": 48}, "max_block_q must be the block_q of a tile .* got 48"),
        (
            {"policy": "best"},
            "policy must be one of memory, paper, compute, per-node, query-centric, got best",
        ),
        ({"min_piece_tokens": 100}, "min_piece_tokens must be a positive multiple of 64, got 100"),
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"growth_tokens": 0}, "growth_tokens must be at least 1, got 0"),
    ],
)
def test_bad_scheduler_configurations(config: dict[str, object], message: str) -> None:
    good = {
        "group_size": 4,
        "num_workers": 33,
        "max_block_q": TILE_TABLE[-1][0],
        "policy": "memory",
        "min_piece_tokens": 128,
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
