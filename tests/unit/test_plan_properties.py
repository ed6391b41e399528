"""Properties of every plan, on thousands of random forests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_segments import plan_segments, segment_tokens
from sample_forests import (
    ForestCase,
    few,
    forest_cases,
    make_scheduler,
    many,
    plan_case,
)

from sglang_pat._scheduler import (
    OPEN_END,
    SHARED_KV,
    TILE_TABLE,
    PackScheduler,
)
from sglang_pat.plan import DecodePlan
from sglang_pat.support import POLICIES


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
        assert growth > 256 or any(g and r not in open_requests for r, g in enumerate(grows))
    assert not serves(scheduler, grown[:-1])
    if case.seq_lens[0] > 0:
        shrunk = case.seq_lens.copy()
        shrunk[0] -= 1
        assert not serves(scheduler, shrunk)
