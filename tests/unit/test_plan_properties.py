"""Properties of every plan, on thousands of random forests."""

from __future__ import annotations

import numpy as np
import pytest
from forests import (
    ForestCase,
    chain_case,
    forest_cases,
    make_case,
    make_scheduler,
    plan_case,
    three_level_case,
    tree_case,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_segments import plan_segments, segment_tokens

from sglang_pat._scheduler import (
    DIRECT_STORE,
    MAX_PACKS_PER_REQUEST,
    OPEN_END,
    PLAN_SECTIONS,
    SHARED_KV,
    TILE_TABLE,
    PackScheduler,
)
from sglang_pat.plan import BufferSizes, DecodePlan, new_scheduler, write_plan
from sglang_pat.support import POLICIES

many = settings(deadline=None, suppress_health_check=list(HealthCheck))


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


def check_structure(plan: DecodePlan, case: ForestCase, group_size: int) -> None:
    h = plan.header
    # Work items: each in one ticket, its rows within its tile, and in the smallest tile that holds
    # them.
    assert plan.ticket_begin[0].tolist() == [0, 0]
    assert plan.ticket_begin[-1].tolist() == [h.num_work_items, h.num_kv_segments]
    assert (np.diff(plan.ticket_begin, axis=0) > 0).all()
    first_items = plan.ticket_begin[:-1, 0]
    assert (plan.ticket_begin[:-1, 1] == plan.work_items[first_items, 3]).all()
    taken = np.zeros(h.num_item_requests, dtype=int)
    for tile, count, first, *_ in plan.work_items.tolist():
        rows = count * group_size
        assert 0 < rows <= TILE_TABLE[tile][0]
        assert tile == 0 or rows > TILE_TABLE[tile - 1][0]
        taken[first : first + count] += 1
    assert (taken == 1).all()
    for _, kv_request, kv_begin, kv_end, entries, _ in plan_segments(plan):
        assert kv_begin >= 0
        assert kv_end > kv_begin or kv_end == OPEN_END
        assert kv_request == SHARED_KV or plan.item_requests[entries, 0].tolist() == [kv_request]

    # Partials: dense and unique; merged in the order of the KV; single ones stored
    # directly. A request's segments in a work item ascend or, from the tails up, descend.
    num_requests = len(case.seq_lens)
    positions: list[list[int]] = [[] for _ in range(h.num_item_requests)]
    spans = plan.gather_spans
    for _, kv_request, kv_begin, _, entries, _ in plan_segments(plan):
        position = kv_begin
        if kv_request == SHARED_KV:
            span = spans[np.searchsorted(spans[:, 3], kv_begin, side="right") - 1]
            position += int(span[1] - span[3])
        for entry in entries:
            positions[entry].append(position)
    for each in positions:
        assert each, "every request of a work item is in one of its segments"
        assert len(set(each)) == len(each)
        assert each in (sorted(each), sorted(each, reverse=True))
    first_position = [min(each) for each in positions]
    reads_of: list[list[tuple[int, int]]] = [[] for _ in range(num_requests)]
    for position, (request, slot) in zip(first_position, plan.item_requests.tolist(), strict=True):
        reads_of[request].append((position, slot))
    slots_of = [[slot for _, slot in sorted(reads)] for reads in reads_of]
    used: list[int] = []
    merged = {}
    for request, begin, count, _ in plan.merges.tolist():
        assert request not in merged
        merged[request] = list(range(begin, begin + count))
        used += merged[request]
    assert used == list(range(h.num_partials))
    for request, slots in enumerate(slots_of):
        if len(slots) == 1:
            assert slots == [DIRECT_STORE]
            assert request not in merged
        else:
            assert slots == merged[request]


def check_tokens(plan: DecodePlan, case: ForestCase) -> None:
    tokens = plan.kv_tokens
    assert tokens.query_centric == case.seq_lens.sum()
    distinct = {int(t) for row, n in zip(case.tokens, case.seq_lens, strict=True) for t in row[:n]}
    # A node whose holders all end inside it cannot occur, so every distinct token counts once.
    assert tokens.lower_bound == len(distinct)
    assert tokens.lower_bound <= tokens.planned <= tokens.query_centric
    assert tokens.planned == segment_tokens(plan, case.seq_lens).sum()


@pytest.mark.parametrize("policy", POLICIES)
@many
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
    check_structure(plan, case, group_size)
    check_coverage(plan, case, case.seq_lens)
    check_tokens(plan, case)


@many
@given(case=forest_cases(), group_size=st.integers(1, 16), num_workers=st.sampled_from([1, 33]))
def test_every_batch_invariant_plan_covers_its_batch(
    case: ForestCase, group_size: int, num_workers: int
) -> None:
    scheduler = new_scheduler(group_size=group_size, num_workers=num_workers, batch_invariant=True)
    check_coverage(plan_case(scheduler, case), case, case.seq_lens)


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
        assert growth > 256 or any(g and r not in open_requests for r, g in enumerate(grows))
    assert not serves(scheduler, grown[:-1])
    if case.seq_lens[0] > 0:
        shrunk = case.seq_lens.copy()
        shrunk[0] -= 1
        assert not serves(scheduler, shrunk)


@many
@given(case=forest_cases(spare_tokens=300), steps=st.integers(0, 300), room=st.integers(0, 300))
def test_steps_left_is_how_long_a_plan_serves(case: ForestCase, steps: int, room: int) -> None:
    scheduler = make_scheduler()
    plan_case(scheduler, case)

    def after(steps: int) -> np.ndarray:
        return case.seq_lens + np.where(case.seq_lens > 0, steps, 0).astype(np.int32)

    longest = int(case.seq_lens.max(initial=0)) + room
    left = scheduler.steps_left(case.seq_lens, longest)
    assert left == 0 or (serves(scheduler, after(left)) and after(left).max() <= longest)
    if case.seq_lens.any():
        assert left == room or not serves(scheduler, after(left + 1))
    if steps <= left:
        assert scheduler.steps_left(after(steps), longest) == left - steps


@many
@given(case=forest_cases(), other=forest_cases())
def test_the_same_batch_gives_the_same_bytes(case: ForestCase, other: ForestCase) -> None:
    fresh = plan_case(make_scheduler(), case)
    used = make_scheduler()
    plan_case(used, other)  # leaves its state behind
    again = plan_case(used, case)
    assert fresh.header == again.header
    for name, *_ in PLAN_SECTIONS:
        assert getattr(fresh, name).tobytes() == getattr(again, name).tobytes()


def check_reservation(scheduler: PackScheduler, case: ForestCase, workers: int, group: int) -> None:
    """The plan fits into what is reserved for as many requests."""
    sizes = BufferSizes.for_requests(
        len(case.seq_lens), scheduler.num_shared_slots, num_workers=workers, group_size=group
    )
    buffer = np.zeros(sizes.plan.layout()["size"], dtype=np.int32)
    needed = BufferSizes.needed_by(scheduler)
    assert write_plan(scheduler, sizes, buffer) is not None, f"{needed} exceeds {sizes}"


@pytest.mark.parametrize("policy", POLICIES)
@many
@given(case=forest_cases(), heads=st.integers(1, 8), group_size=st.integers(1, 16))
def test_every_plan_fits_its_reservation(
    policy: str, case: ForestCase, heads: int, group_size: int
) -> None:
    scheduler = make_scheduler(group_size, 264 // heads, policy)
    plan_case(scheduler, case)
    check_reservation(scheduler, case, 264 // heads, group_size)


@pytest.mark.parametrize("heads", range(1, 9))
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(tree_case([1, 4, 8, 256], 60), id="1,4,8,256"),
        pytest.param(tree_case([1, 16, 64], 150), id="1,16,64"),
        pytest.param(tree_case([2**i for i in range(8)], 70), id="1,2,4,...,128"),
        pytest.param(tree_case([1], 60_000), id="1"),
        pytest.param(tree_case([1] * 10 + [100], 40), id="a chain above 100"),
        pytest.param(chain_case(200, 40), id="each of 200 leaves a chain elsewhere"),
        pytest.param(chain_case(64, 2), id="each of 64 leaves a chain of short nodes"),
    ],
)
def test_plans_of_deep_trees_fit_their_reservation(case: ForestCase, heads: int) -> None:
    for group_size in range(1, 17):
        for policy in ("memory", "per-node") if group_size in (1, 4, 16) else ("memory",):
            scheduler = make_scheduler(group_size, 264 // heads, policy)
            plan_case(scheduler, case)
            check_reservation(scheduler, case, 264 // heads, group_size)


def test_a_plan_that_had_to_stay_within_its_reservation_is_right() -> None:
    """One in four of 200 * 201 / 2 packed requests is more than 12 for each request."""
    case = chain_case(200, 40)
    for policy in POLICIES:
        scheduler = make_scheduler(policy=policy)
        plan = plan_case(scheduler, case)
        check_structure(plan, case, 4)
        check_coverage(plan, case, case.seq_lens)
        check_tokens(plan, case)
        assert len(plan.item_requests) <= MAX_PACKS_PER_REQUEST * 200 + 33 * 16
    shared = plan_case(make_scheduler(), case).kv_tokens
    assert shared.planned < 0.2 * shared.query_centric


def test_a_thousand_requests() -> None:
    case = three_level_case(1000)
    for policy in POLICIES:
        plan = plan_case(make_scheduler(policy=policy), case)
        check_structure(plan, case, 4)
        check_coverage(plan, case, case.seq_lens)
        check_tokens(plan, case)


def test_an_empty_batch_has_an_empty_plan() -> None:
    plan = plan_case(make_scheduler(), make_case([], []))
    assert plan.header.num_work_items == plan.header.num_merges == 0


def test_a_padding_row_has_nothing_to_merge() -> None:
    plan = plan_case(make_scheduler(), make_case([], [(-1, 0), (-1, 10)]))
    assert plan.merges.tolist() == [[0, 0, 0, 0]]


def ticket_tokens(plan: DecodePlan, case: ForestCase) -> list[int]:
    """KV tokens of every ticket."""
    tokens = segment_tokens(plan, case.seq_lens)
    return [int(part.sum()) for part in np.split(tokens, plan.ticket_begin[1:-1, 1])]


def test_a_little_work_is_one_ticket_for_each_worker() -> None:
    """No worker has more than its share by more than the shortest piece, and none of 33 idles.

    One may, where less than a piece is left for it.
    """
    for num_requests, num_idle in ((14, 1), (16, 1), (20, 0), (24, 0)):
        case = make_case([(-1, 4500)], [(0, 350 + 48 * r) for r in range(num_requests)])
        tokens = ticket_tokens(plan_case(make_scheduler(), case), case)
        assert 33 - num_idle <= len(tokens) <= 33
        assert max(tokens) <= np.mean(tokens) + 128


def test_much_work_is_tickets_that_shrink() -> None:
    case = make_case([], [(-1, 700 + 970 * r) for r in range(40)])
    plan = plan_case(make_scheduler(), case)
    tokens = ticket_tokens(plan, case)
    share = sum(tokens) / 33
    assert max(tokens) <= 0.75 * share
    assert max(tokens[-33:]) <= 600
    check_coverage(plan, case, case.seq_lens)


def test_half_of_the_tickets_run_from_the_tails_up() -> None:
    """So that shared KV, out of the L2, and tails, out of device memory, are read side by side."""
    case = make_case([(-1, 512)], [(0, 32)] * 1024)
    plan = plan_case(make_scheduler(), case)
    begins = plan.kv_segments[plan.ticket_begin[:-1, 1], 0] == SHARED_KV
    assert len(begins) == 64
    assert begins[:17].all()
    assert not begins[17:33].any()
    assert begins[33::2].all()
    assert not begins[34::2].any()


def test_shared_and_private_tickets_are_drawn_side_by_side() -> None:
    """The shared ones twice as fast, so that they end first."""
    case = make_case([(-1, 2048)], [(0, 900)] * 256 + [(-1, 2000)] * 256)
    plan = plan_case(make_scheduler(), case)
    is_shared = np.array([plan.kv_segments[i[3], 0] == SHARED_KV for i in plan.work_items.tolist()])
    last_shared = np.flatnonzero(is_shared)[-1]
    private_before = (~is_shared[:last_shared]).sum()
    assert 0.3 < private_before / (~is_shared).sum() < 0.65


@pytest.mark.parametrize("tokens", [60_000, 100_000, 130_000, 300_000])
def test_long_kv_of_many_requests_is_cut_no_more_than_partials_allow(tokens: int) -> None:
    """Tickets that shrink would cut the one tile here into dozens of pieces."""
    case = make_case([(-1, tokens)], [(0, 9)] * 16)
    plan = plan_case(make_scheduler(), case)
    assert plan.header.num_item_requests <= 2 * 16 + 33 * 16
    assert len(ticket_tokens(plan, case)) == 33 or tokens < 80_000


def test_no_cut_leaves_a_piece_that_is_too_short() -> None:
    for tokens in range(30_000, 34_000, 37):
        case = make_case([], [(-1, tokens)] * 3 + [(-1, 2 * tokens)])
        plan = plan_case(make_scheduler(num_workers=7), case)
        assert segment_tokens(plan, case.seq_lens).min() >= 128
