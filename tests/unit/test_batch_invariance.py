"""Batch-invariant plans: a request's bits do not depend on the other requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_forests import ForestCase, few, forest_cases, make_case, three_level_case

from sglang_pat import DecodeBatch, PackAttention, PrefixPaths
from sglang_pat._scheduler import CostModel, PackScheduler
from sglang_pat.executors.reference import dense_attention
from sglang_pat.plan import DecodePlan, copy_plan, new_scheduler

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
STEP = 64


def select(case: ForestCase, rows: list[int]) -> ForestCase:
    """Return the batch of these requests, in this order."""
    paths = [case.paths[row] for row in rows]
    return replace(case, paths=paths, seq_lens=case.seq_lens[rows], tokens=case.tokens[rows])


class Model:
    """A layer: a query for each request, and the KV pool."""

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
    """Draw a forest, some of its requests in any order, and a number of workers."""
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


def test_shared_steps_are_read_once() -> None:
    """1,100 shared tokens are a chunk of 512 and 9 steps of 64 in the last one.

    Each request reads the last 12 shared tokens and its private ones. An item has at most the
    length of two chunks.
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
    """32 tokens after a boundary are not an item of their own."""
    case = make_case([(-1, 512)], [(0, 32)] * 16)
    plan = plan_of(case, scheduler_of(num_workers=1))
    assert plan.header.num_work_items == 1
    assert plan.header.num_partials == 0
    case = make_case([(-1, 512)], [(0, 256)] * 16)
    plan = plan_of(case, scheduler_of(num_workers=1))
    assert plan.header.num_partials == 2 * 16


def test_chunks_of_different_ends_share_what_both_have() -> None:
    """One request ends 50 tokens after the boundary; the other is cut at the boundary."""
    case = make_case([(-1, 562)], [(0, 0), (0, 1000)])
    plan = plan_of(case, scheduler_of(num_workers=1))
    assert plan.kv_tokens.planned == 512 + 50 + (50 + 1000)
    assert plan.header.num_shared_slots == 512


def test_tickets_of_latent_attention_follow_the_rows_of_its_tiles() -> None:
    case = make_case([(-1, 3000)], [(0, 100)] * 7 + [(-1, n) for n in (4000, 2000, 3000, 9000)])

    def tickets(**cost: float) -> list[int]:
        scheduler = new_scheduler(
            group_size=8, num_workers=8, batch_invariant=True, latent=True, cost=CostModel(**cost)
        )
        return plan_of(case, scheduler).ticket_begin[:, 0].tolist()

    assert tickets(token_16=10) == tickets()  # the tiles have 32 and 64 rows
    assert tickets(token_64=10) != tickets()


def test_one_tile_is_the_largest() -> None:
    case = make_case([(-1, 512)], [(0, 500)] * 5)
    assert set(plan_of(case, scheduler_of()).work_items[:, 0].tolist()) == {0, 1}
    assert set(plan_of(case, scheduler_of(one_tile=True)).work_items[:, 0].tolist()) == {2}


def test_a_reservation_needs_the_longest_request() -> None:
    with pytest.raises(ValueError, match="needs max_seq_len"):
        new_attention(max_requests=4)
    new_attention(max_requests=4, max_seq_len=100)
