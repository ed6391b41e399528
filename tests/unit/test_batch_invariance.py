"""Batch-invariant plans: a request's result is bitwise the same whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from forests import ForestCase, forest_cases, make_case, three_level_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_pat import DecodeBatch, PackAttention, PrefixPaths
from sglang_pat._scheduler import OPEN_END, SHARED_KV, PackScheduler, num_chunks
from sglang_pat.attention import new_scheduler
from sglang_pat.executors.reference import dense_attention
from sglang_pat.plan import BufferSizes, DecodePlan, copy_plan

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
many = settings(deadline=None, suppress_health_check=list(HealthCheck))


def boundaries(length: int) -> list[int]:
    """Where the KV of a request of this length begins, is cut, and ends. Written down here once
    more: a change of the grid changes results of requests that are stored somewhere."""
    cuts = [0]
    while cuts[-1] < length:
        position, tokens, end = cuts[-1], 256, 2048
        while position >= end:
            tokens, end = 2 * tokens, 4 * end
        cuts.append(min(position + tokens, length))
    return cuts


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


@many
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
    """What the tests here would see if nothing were done."""
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


def ranges_of(plan: DecodePlan, seq_lens: np.ndarray) -> list[list[tuple[int, int]]]:
    """Per request: the positions that its work items read."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in seq_lens]
    spans = plan.gather_spans
    for _, count, first, kv_request, begin, end, *_ in plan.work_items.tolist():
        if kv_request == SHARED_KV:
            span = spans[np.searchsorted(spans[:, 3], begin, side="right") - 1]
            begin, end = (position + int(span[1] - span[3]) for position in (begin, end))
        for request in plan.item_requests[first : first + count, 0].tolist():
            ranges[request].append((begin, seq_lens[request] if end == OPEN_END else end))
    return [sorted(each) for each in ranges]


@many
@given(forest_cases())
def test_work_items_are_the_chunks_of_the_grid(case: ForestCase) -> None:
    plan = plan_of(case, scheduler_of())
    ranges = ranges_of(plan, case.seq_lens)
    for length, have in zip(case.seq_lens.tolist(), ranges, strict=True):
        cuts = boundaries(length)
        assert have == list(pairwise(cuts))
    assert plan.header.num_item_requests == sum(map(num_chunks, case.seq_lens.tolist()))


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 2048, 2049, 8192, 8193, 131_073, 10**9])
def test_chunks_are_counted(length: int) -> None:
    assert num_chunks(length) == len(boundaries(length)) - 1


def test_a_shared_chunk_is_read_once() -> None:
    """520 shared tokens are two chunks of 256, and 8 tokens that each request reads."""
    case = make_case([(-1, 520)], [(0, 100)] * 16)
    plan = plan_of(case, scheduler_of())
    assert plan.kv_tokens.planned == 2 * 256 + 16 * (8 + 100)
    assert plan.header.num_work_items == 2 + 16


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


def test_one_tile_is_the_largest() -> None:
    case = make_case([(-1, 520)], [(0, 100)] * 5)
    assert set(plan_of(case, scheduler_of()).work_items[:, 0].tolist()) == {0, 1}
    assert set(plan_of(case, scheduler_of(one_tile=True)).work_items[:, 0].tolist()) == {2}


def test_a_reservation_needs_the_longest_request() -> None:
    with pytest.raises(ValueError, match="needs max_seq_len"):
        new_attention(max_requests=4)
    with pytest.raises(ValueError, match="max_seq_len must be at least 1, got 0"):
        new_attention(max_requests=4, max_seq_len=0)
    new_attention(max_requests=4, max_seq_len=100)
