"""Handmade work items of many segments: the CUDA kernels are compared with float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from handwritten_plans import (
    HandItem,
    HandPlan,
    HandSegment,
    lengths_of_tails,
    random_case,
    random_plan,
    tails,
    tails_case,
)
from pack_decode_cases import (
    BF16,
    FP16,
    Heads,
    Tensors,
    check,
    check_plan,
    group_sizes,
    load,
    make_sinks,
    planned_step,
    run,
)
from sample_forests import ForestCase, broken_token, make_case

from kernel.numerics import compare
from sglang_pat._scheduler import OPEN_END, SHARED_KV

pytestmark = pytest.mark.usefixtures("kernel_body")


@group_sizes([1, 2, 3, 4, 5, 7, 8, 12, 16], [1, 5, 12, 16, 20, 64])
def test_random_plans(heads: Heads) -> None:
    for seed in range(8):
        case = random_case(100 * heads.group_size + seed)
        check_plan(case, random_plan(case, heads.group_size, seed), heads)


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128), (256, 256), (512, 512)])
def test_head_dims(head_dims: tuple[int, int]) -> None:
    for seed in range(4):
        case = random_case(seed, 16)
        heads = Heads(8, 2, head_dims[0], FP16 if head_dims[0] == 64 else BF16, head_dims[1])
        check_plan(case, random_plan(case, 4, seed), heads)


@pytest.mark.parametrize("logit_cap", [1.0, 30.0])
def test_logit_cap(logit_cap: float) -> None:
    case = random_case(7)
    check_plan(case, random_plan(case, 4, 7), Heads(8, 2), logit_cap=logit_cap)


@pytest.mark.parametrize("reverse", [False, True])
@group_sizes([1, 3, 4, 8, 16], [1, 3, 8, 16, 20])
def test_rows_may_be_masked_before_they_count(heads: Heads, *, reverse: bool) -> None:
    """Segments of other rows of the warp, and of other warps, precede a row's first tokens."""
    lengths = lengths_of_tails(heads.group_size)
    check_plan(tails_case(lengths), tails(lengths, heads.group_size, reverse=reverse), heads)


@pytest.mark.parametrize("reader", [0, 7, 15])
def test_many_stages_of_one_request(reader: int) -> None:
    """One request has more stages than the ring holds, which the other warps skip."""
    lengths = [3] * 16
    lengths[reader] = 3000
    for reverse in (False, True):
        check_plan(tails_case(lengths), tails(lengths, 4, reverse=reverse), Heads(8, 2))


@group_sizes([4], [4])
def test_tails_may_be_empty(heads: Heads) -> None:
    for lengths in ([0, 0, 9], [9, 0, 0], [0, 0, 0], [0] * 16, [33] + [0] * 15):
        for reverse in (False, True):
            check_plan(tails_case(lengths), tails(lengths, 4, reverse=reverse), heads)


@group_sizes([4], [4])
def test_items_may_have_no_kv(heads: Heads) -> None:
    """Items without KV are alone in a ticket or among others; some rows have KV in other items."""
    case = make_case([], [(-1, 50), (-1, 0), (-1, 33), (-1, 0)])
    whole = [HandItem([r], [HandSegment(r, 0, OPEN_END, 0, 1)]) for r in range(4)]
    nothing = HandItem([0, 1, 2], [HandSegment(0, 50, OPEN_END, 0, 2), HandSegment(2, 8, 8, 2, 3)])
    items = [nothing, *whole, nothing, nothing]
    for tickets in ([7], [1] * 7, [1, 5, 1], [2, 2, 3]):
        check_plan(case, HandPlan(4, 4, items, tickets=tickets), heads)


def test_a_row_without_kv_in_its_item_is_an_empty_partial() -> None:
    case = make_case([(-1, 64)], [(0, 40), (0, 0), (0, 10)])
    shared = HandItem([0, 1, 2], [HandSegment(SHARED_KV, 0, 64, 0, 3)])
    private = [HandSegment(0, 64, OPEN_END, 0, 1), HandSegment(2, 64, OPEN_END, 2, 3)]
    for rows in (1, 4, 16):
        plan = HandPlan(3, rows, [shared, HandItem([0, 1, 2], private)], [(0, 0, 64)])
        check_plan(case, plan, Heads(2 * rows, 2))


@pytest.mark.parametrize("count", [31, 32, 33, 63, 64, 65, 100])
@pytest.mark.parametrize("empty", [0, 1, 2, 40])
def test_more_segments_than_a_warp_has_lanes(count: int, empty: int) -> None:
    """Segments of two tokens come first, then empty segments, then a second item of the ticket."""
    case = make_case([], [(-1, 2 * count), (-1, 70)])
    segments = [HandSegment(0, 2 * i, 2 * i + 2, 0, 1) for i in range(count)]
    segments += [HandSegment(0, 2 * count, OPEN_END, 0, 1)] * empty
    items = [HandItem([0], segments), HandItem([1], [HandSegment(1, 0, OPEN_END, 0, 1)])]
    for order in (items, items[::-1]):
        check_plan(case, HandPlan(2, 4, order, tickets=[2]), Heads(8, 2))


def test_many_items_in_a_ticket() -> None:
    lengths = [1 + 7 * (i % 9) for i in range(150)]
    case = make_case([], [(-1, length) for length in lengths])
    items = [
        HandItem([r, r + 1], [HandSegment(s, 0, OPEN_END, s - r, s - r + 1) for s in (r, r + 1)])
        for r in range(0, 150, 2)
    ]
    for tickets in ([75], [32, 43], [1] * 75):
        check_plan(case, HandPlan(150, 4, items, tickets=tickets), Heads(4, 1))


def test_open_segments_grow_with_their_requests() -> None:
    for seed in range(6):
        planned = random_case(seed)
        growth = np.random.default_rng(seed).integers(0, 200, len(planned.seq_lens))
        growth[planned.seq_lens == 0] = 0  # padding rows
        whole = make_grown(planned, growth.astype(np.int32))
        heads = Heads(8, 2)
        tensors, step = Tensors.make(whole, heads), planned_step(heads)
        load(step, random_plan(planned, 4, seed), tensors, planned.seq_lens)
        check(*run(step, tensors), tensors)


def make_grown(case: ForestCase, growth: np.ndarray) -> ForestCase:
    """Return the case with more private tokens, whose slots follow all others."""
    grown = case.seq_lens + growth
    tokens = np.zeros((len(grown), int(grown.max())), dtype=np.int32)
    next_slot = case.num_slots
    for row, (old, new) in enumerate(zip(case.seq_lens, grown, strict=True)):
        tokens[row, :old] = case.tokens[row, :old]
        tokens[row, old:new] = np.arange(next_slot, next_slot + new - old)
        next_slot += int(new - old)
    return dataclasses.replace(case, seq_lens=grown, tokens=tokens)


NAN, INFINITY = float("nan"), float("inf")


def check_isolation(
    case: ForestCase,
    plan: HandPlan,
    heads: Heads,
    broken_tokens: list[tuple[int, int, np.ndarray]],
    *,
    number: float = NAN,
    cache: str = "v",
    columns: slice | None = None,
    **options,
) -> None:
    """Assert the results of requests with finite KV, and of the finite columns of the others."""
    tensors, step = Tensors.make(case, heads), planned_step(heads, num_workers=8)
    caches = [tensors.k_cache, tensors.v_cache]
    if heads.kv_dtype is not None:
        caches = [each.to(heads.kv_dtype) for each in caches]
        tensors = dataclasses.replace(tensors, k_cache=caches[0], v_cache=caches[1])
    load(step, plan, tensors, case.seq_lens)
    _, clean_lse = run(step, tensors, **options)
    k_cache, v_cache = (each.to(heads.dtype) for each in caches)
    finite = dataclasses.replace(tensors, k_cache=k_cache, v_cache=v_cache)
    exact, _ = finite.reference(torch.float64, **options)
    in_dtype, _ = finite.reference(heads.dtype, **options)

    has_result = torch.ones(exact.shape, dtype=torch.bool, device="cuda")
    for request, position, holders in broken_tokens:
        slot = tensors.req_to_token[tensors.req_pool_indices[request], position]
        elements = (int(slot), slice(None), columns or slice(None))
        target = caches[cache == "v"]
        target[elements] = torch.full_like(target[elements].float(), number).to(target.dtype)
        for holder in np.flatnonzero(holders).tolist():
            has_result[holder, :, elements[2]] = False
    out, lse = run(step, tensors, **options)
    report = compare(out[has_result], in_dtype[has_result], exact[has_result])
    assert report.acceptable, str(report)
    assert not out[~has_result].isfinite().any()
    has_lse = has_result.any(-1) if cache == "k" else torch.ones_like(lse, dtype=torch.bool)
    assert torch.equal(lse[has_lse], clean_lse[has_lse]), "the same bits"
    assert lse[~has_lse].isnan().all()
    again = run(step, tensors, **options)
    for first, second in zip((out, lse), again, strict=True):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0)), "same bits"


@group_sizes([1, 2, 3, 4, 5, 7, 8, 12, 16], [])
def test_broken_kv_stays_with_its_requests(heads: Heads) -> None:
    """Random plans with partials, direct stores and sinks; K or V has NaN or infinity."""
    group_size = heads.group_size
    for seed in range(6):
        case = random_case(100 * group_size + seed)
        found = broken_token(case, seed)
        if found is None:
            continue
        options = {"sinks": make_sinks(heads)} if seed % 2 else {}
        check_isolation(
            case,
            random_plan(case, group_size, seed),
            heads,
            [found],
            number=INFINITY if seed == 2 else NAN,
            cache="k" if seed == 3 else "v",
            **options,
        )


@pytest.mark.parametrize("reverse", [False, True])
@group_sizes([1, 3, 4, 16], [])
def test_every_request_of_an_item_may_be_the_broken_one(heads: Heads, *, reverse: bool) -> None:
    lengths = lengths_of_tails(heads.group_size)
    plan, case = tails(lengths, heads.group_size, reverse=reverse), tails_case(lengths)
    for request, length in enumerate(lengths):
        holders = np.arange(len(lengths)) == request
        check_isolation(case, plan, heads, [(request, 99 + length, holders)])
    others = np.arange(len(lengths)) != 0
    tokens = [(request, 100, others) for request in range(1, len(lengths))]
    check_isolation(case, plan, heads, tokens)


@pytest.mark.parametrize("columns", [slice(0, 1), slice(37, 38), slice(63, 64), slice(-1, None)])
@pytest.mark.parametrize(
    "heads", [Heads(8, 2), Heads(8, 2, 64, FP16), Heads(8, 2, 512)], ids=["128", "64", "512"]
)
def test_one_broken_column(heads: Heads, columns: slice) -> None:
    """NaN in some columns of V leaves the other columns of the request correct."""
    lengths = [40, 3, 70, 9]
    holders = np.arange(4) == 1
    check_isolation(
        tails_case(lengths), tails(lengths, 4), heads, [(1, 101, holders)], columns=columns
    )


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (512, 512)])
def test_isolation_in_other_variants(
    head_dims: tuple[int, int], kv_dtype: torch.dtype | None
) -> None:
    dtype = FP16 if head_dims[0] == 64 else BF16
    heads = Heads(8, 2, head_dims[0], dtype, head_dims[1], kv_dtype)
    for seed in range(4):
        case = random_case(seed, 16)
        found = broken_token(case, seed)
        if found is not None:
            options = {"logit_cap": 30.0} if seed == 3 else {}
            check_isolation(case, random_plan(case, 4, seed), heads, [found], **options)


def test_a_row_without_kv_in_its_item_stays_empty() -> None:
    """A row attends to no token of its item, whose other rows attend to NaN."""
    case = make_case([], [(-1, 50), (-1, 0), (-1, 33)])
    for first, end in ((0, 1), (2, 3)):
        request = first
        item = HandItem([0, 1, 2], [HandSegment(request, 0, OPEN_END, first, end)])
        rest = HandItem([2 - request], [HandSegment(2 - request, 0, OPEN_END, 0, 1)])
        for rows in (1, 4, 16):
            holders = np.arange(3) == request
            plan = HandPlan(3, rows, [item, rest])
            check_isolation(case, plan, Heads(2 * rows, 2), [(request, 20, holders)])
