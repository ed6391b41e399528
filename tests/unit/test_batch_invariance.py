"""Batch-invariant plans: a request's result is bitwise the same whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_forests import ForestCase, few, forest_cases, make_case, many, three_level_case

from sglang_pat import DecodeBatch, PackAttention, PrefixPaths
from sglang_pat._scheduler import OPEN_END, SHARED_KV, CostModel, PackScheduler, num_chunks
from sglang_pat.executors.reference import dense_attention
from sglang_pat.plan import BufferSizes, DecodePlan, copy_plan, new_scheduler, segment_interval

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
STEP = 64


def boundaries(length: int) -> list[int]:
    """Positions where the KV of a request of this length begins, is cut, and ends.

    Written down here once more: a change of the grid changes results of requests that are stored
    somewhere.
    """
    cuts = [0]
    while cuts[-1] < length:
        cut = cuts[-1] + _chunk_tokens(cuts[-1])
        cuts.append(cut if length - cut >= _chunk_tokens(cut) // 2 else length)
    return cuts


def _chunk_tokens(position: int) -> int:
    tokens, end = 512, 8192
    while position >= end:
        tokens, end = 2 * tokens, 4 * end
    return tokens


def select(case: ForestCase, rows: list[int]) -> ForestCase:
    """The batch of these requests, in this order."""
    paths = [case.paths[row] for row in rows]
    return replace(case, paths=paths, seq_lens=case.seq_lens[rows], tokens=case.tokens[rows])


class Model:
    """One layer: queries that belong to requests, and the KV pool."""

    def __init__(self, case: ForestCase, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.case = case
        self.q = random(len(case.seq_lens), HEADS, HEAD_DIM)
        self.k = random(case.num_slots, KV_HEADS, HEAD_DIM)
        self.v = random(case.num_slots, KV_HEADS, HEAD_DIM)
        self.sinks = random(HEADS)

    def attend(
        self, attention: PackAttention, rows: list[int], *, shared: bool = True, sinks: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        case = select(self.case, rows)
        paths = case.paths if shared else [[] for _ in rows]
        lens = torch.from_numpy(case.seq_lens)
        attention.plan(
            DecodeBatch(case.seq_lens, PrefixPaths.from_lists(paths)),
            req_to_token=torch.from_numpy(case.tokens),
            req_pool_indices=torch.arange(len(rows)),
            seq_lens=lens,
        )
        return attention.run(
            self.q[rows], self.k, self.v, sinks=self.sinks if sinks else None, return_lse=True
        )


def new_attention(**kwargs: object) -> PackAttention:
    kwargs = {"dtype": torch.float32, "batch_invariant": True} | kwargs
    return PackAttention(HEADS, KV_HEADS, HEAD_DIM, **kwargs)  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn) -> tuple[ForestCase, list[int], int]:
    """A forest, some of its requests in some order, and a number of workers."""
    case = draw(forest_cases(max_requests=12))
    everyone = list(range(len(case.seq_lens)))
    rows = draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=12))
    return case, rows, draw(st.sampled_from([1, 3, 33]))


@few
@given(batches(), st.booleans())
def test_a_request_has_the_same_bits_alone_and_in_any_batch(
    drawn: tuple[ForestCase, list[int], int], sinks: bool
) -> None:
    case, rows, num_workers = drawn
    model = Model(case)
    out, lse = model.attend(new_attention(num_workers=num_workers), rows, sinks=sinks)
    unshared, _ = model.attend(new_attention(), rows, shared=False, sinks=sinks)
    assert torch.equal(out, unshared)
    alone = new_attention()
    for i, row in enumerate(rows):
        expected_out, expected_lse = model.attend(alone, [row], sinks=sinks)
        assert torch.equal(out[i], expected_out[0])
        assert torch.equal(lse[i], expected_lse[0])


def test_without_the_mode_bits_depend_on_the_batch() -> None:
    """Shows that the other tests here can fail."""
    case = three_level_case(32)
    model = Model(case)
    attention = new_attention(batch_invariant=False)
    everyone, _ = model.attend(attention, list(range(32)))
    alone, _ = model.attend(attention, [5])
    assert not torch.equal(everyone[5], alone[0])


def test_results_are_right() -> None:
    case = make_case([(-1, 2300), (0, 300)], [(1, 40), (1, 900), (0, 0), (-1, 9000), (-1, 0)])
    model = Model(case)
    rows = list(range(5))
    out, lse = model.attend(new_attention(), rows, sinks=True)
    expected = dense_attention(
        model.q,
        model.k,
        model.v,
        torch.from_numpy(case.tokens),
        torch.arange(5),
        torch.from_numpy(case.seq_lens),
        sinks=model.sinks,
    )
    torch.testing.assert_close(out.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-5)


# --- plans ---


def scheduler_of(**kwargs: object) -> PackScheduler:
    kwargs = {"group_size": 4, "num_workers": 33, "batch_invariant": True} | kwargs
    return new_scheduler(**kwargs)  # type: ignore[arg-type]


def plan_of(case: ForestCase, scheduler: PackScheduler) -> DecodePlan:
    paths = PrefixPaths.from_lists(case.paths)
    scheduler.plan(paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, case.seq_lens)
    return copy_plan(scheduler)


def positions_of(plan: DecodePlan, segment: list[int], seq_lens: np.ndarray) -> tuple[int, int]:
    kv_request, begin, end, _ = segment
    if kv_request != SHARED_KV:
        return begin, int(seq_lens[kv_request]) if end == OPEN_END else end
    spans = plan.gather_spans
    span = spans[np.searchsorted(spans[:, 3], begin, side="right") - 1]
    return begin + int(span[1] - span[3]), end + int(span[1] - span[3])


def ranges_of(plan: DecodePlan, seq_lens: np.ndarray) -> list[list[list[tuple[int, int]]]]:
    """Per request: the positions that its work items read, segment by segment."""
    ranges: list[list[list[tuple[int, int]]]] = [[] for _ in seq_lens]
    segments = plan.kv_segments.tolist()
    for _, count, first, segment_begin, num_segments, *_ in plan.work_items.tolist():
        of_item: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for segment in segments[segment_begin : segment_begin + num_segments]:
            for request in range(*segment_interval(segment[3])):
                of_item[request].append(positions_of(plan, segment, seq_lens))
        requests = plan.item_requests[first : first + count, 0].tolist()
        for request, each in zip(requests, of_item, strict=True):
            ranges[request].append(each)
    return [sorted(each) for each in ranges]


@many
@given(forest_cases())
def test_work_items_are_the_chunks_of_the_grid(case: ForestCase) -> None:
    plan = plan_of(case, scheduler_of())
    ranges = ranges_of(plan, case.seq_lens)
    for length, have in zip(case.seq_lens.tolist(), ranges, strict=True):
        cuts = boundaries(length)
        assert [(each[0][0], each[-1][1]) for each in have] == list(pairwise(cuts))
        for chunk in have:
            for before, after in pairwise(chunk):
                assert before[1] == after[0], "segments follow one another"
                assert (after[0] - chunk[0][0]) % STEP == 0, "steps are the same in all segments"
    assert plan.header.num_item_requests == sum(map(num_chunks, case.seq_lens.tolist()))


def test_shared_steps_are_read_once() -> None:
    """1,100 shared tokens are a chunk of 512 and 9 steps of 64 in the last one.

    12 tokens are left, which each request reads, and its own. An item is as long as two chunks at
    most.
    """
    case = make_case([(-1, 1100)], [(0, 20)] * 8)
    plan = plan_of(case, scheduler_of(num_workers=1))
    assert plan.kv_tokens.planned == 512 + 576 + 8 * (12 + 20)
    assert plan.header.num_work_items == 2
    assert plan.header.num_shared_slots == 512 + 576
    case = make_case([(-1, 1100)], [(0, 400)] * 16)
    plan = plan_of(case, scheduler_of(num_workers=1000))
    assert plan.kv_tokens.planned == 1024 + 8 * (64 + 2 * (12 + 400))
    assert plan.header.num_work_items == 2 + 8


def test_a_short_rest_belongs_to_the_chunk_before() -> None:
    """No rest of 32 tokens behind a boundary is an item of its own."""
    case = make_case([(-1, 512)], [(0, 32)] * 16)
    plan = plan_of(case, scheduler_of(num_workers=1))
    assert plan.header.num_work_items == 1
    assert plan.header.num_partials == 0
    case = make_case([(-1, 512)], [(0, 256)] * 16)
    plan = plan_of(case, scheduler_of(num_workers=1))
    assert plan.header.num_partials == 2 * 16


def test_chunks_of_different_ends_share_what_both_have() -> None:
    """One request ends 50 tokens behind the boundary, the other is cut there."""
    case = make_case([(-1, 562)], [(0, 0), (0, 1000)])
    plan = plan_of(case, scheduler_of(num_workers=1))
    ranges = ranges_of(plan, case.seq_lens)
    assert ranges[0] == [[(0, 512), (512, 562)]]
    assert ranges[1][0] == [(0, 512)]
    assert plan.header.num_shared_slots == 512


@many
@given(forest_cases(max_requests=20))
def test_a_reservation_holds_every_plan(case: ForestCase) -> None:
    scheduler = scheduler_of()
    plan_of(case, scheduler)
    requests, longest = len(case.seq_lens), int(case.seq_lens.max())
    reserved = BufferSizes.for_invariant(requests, 1 << 30, max(longest, 1))
    needed = BufferSizes.needed_by(scheduler)
    assert needed.num_partials <= reserved.num_partials
    entries = reserved.plan.entries()
    assert all(count <= entries[name] for name, count in needed.plan.entries().items())


def test_tickets_of_latent_attention_follow_the_rows_of_its_tiles() -> None:
    case = make_case([(-1, 3000)], [(0, 100)] * 7 + [(-1, n) for n in (4000, 2000, 3000, 9000)])

    def tickets(**cost: float) -> list[int]:
        scheduler = new_scheduler(
            group_size=8, num_workers=8, batch_invariant=True, latent=True, cost=CostModel(**cost)
        )
        return plan_of(case, scheduler).ticket_begin[:, 0].tolist()

    assert tickets(token_16=10) == tickets()  # its tiles have 32 and 64 rows
    assert tickets(token_64=10) != tickets()


def test_one_tile_is_the_largest() -> None:
    case = make_case([(-1, 512)], [(0, 500)] * 5)
    assert set(plan_of(case, scheduler_of()).work_items[:, 0].tolist()) == {0, 1}
    assert set(plan_of(case, scheduler_of(one_tile=True)).work_items[:, 0].tolist()) == {2}


def test_a_reservation_needs_the_longest_request() -> None:
    with pytest.raises(ValueError, match="needs max_seq_len"):
        new_attention(max_requests=4)
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        new_attention(max_requests=4, max_seq_len=0)
    new_attention(max_requests=4, max_seq_len=100)
