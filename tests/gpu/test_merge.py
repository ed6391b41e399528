"""merge_partials is compared with float64: few and many partials, launches, NaN."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from handwritten_plans import HandItem, HandPlan, HandSegment
from pack_decode_cases import (
    BF16,
    FP16,
    MIXED,
    Heads,
    Tensors,
    captured,
    check,
    load,
    make_sinks,
    planned_step,
    run,
)
from sample_forests import ForestCase, make_case

from sglang_pat._scheduler import OPEN_END

# A batch with long and short rows, and a batch of a single request.
LONG_AND_SHORT = make_case(
    [(-1, 300), (0, 200)], [(-1, 24000)] + [(1, 90)] * 7 + [(-1, 5000), (-1, 30), (-1, 0)]
)
ALONE = make_case([], [(-1, 40000)])


def split_finely(case: ForestCase, heads: Heads):
    """Return the case on the device, with a plan of many partials per request."""
    tensors = Tensors.make(case, heads)
    step = planned_step(heads, num_workers=264, min_item_tokens=64)
    plan = step.write(case.batch(), **tensors.index)
    return tensors, step, plan


@pytest.mark.parametrize("case", [LONG_AND_SHORT, ALONE], ids=["long and short", "alone"])
@pytest.mark.parametrize("heads", [(8, 1), (32, 8), (5, 5)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_of_many_partials(
    case: ForestCase, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    tensors, step, plan = split_finely(case, Heads(*heads, head_dim, dtype))
    assert plan.merges[:, 2].max() > 96, "more than the parts of a CTA take in one round"
    check(*run(step, tensors), tensors)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_launch_does_not_change_the_bits(head_dim: int) -> None:
    """A graph's grid is sized for any plan, an eager launch's grid for the current plan."""
    tensors, step, _ = split_finely(LONG_AND_SHORT, Heads(8, 1, head_dim))
    eager = run(step, tensors)
    graph, out, lse = captured(step, tensors)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])


MANY = 640  # requests
COUNTS = {
    "two": [2],
    "none to two": [0, 2],
    "two to four": [2, 3, 4],
    "up to five": [0, 1, 2, 3, 4, 5],
    "mostly two": [2] * 40 + [5, 13, 40],
}


def cut(counts: np.ndarray, seq_lens: np.ndarray, group_size: int) -> HandPlan:
    """Return a plan that reads each request alone, in `counts` work items."""
    items = []
    for request, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        ends = [*(int(length) * i // int(count) for i in range(count)), OPEN_END]
        items += [
            HandItem([request], [HandSegment(request, begin, end, 0, 1)])
            for begin, end in pairwise(ends)
        ]
    return HandPlan(len(counts), group_size, items)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(32, 2, 64),
        Heads(32, 2, 80, FP16),
        Heads(32, 2, 128),
        Heads(32, 2, 256),
        Heads(32, 2, 512),
        Heads(32, 2, 128, kv_dtype=torch.float8_e4m3fn),
    ],
    ids=["64", "80", "128", "256", "512", "fp8"],
)
@pytest.mark.parametrize("name", COUNTS)
def test_many_rows_have_the_bits_of_few(name: str, heads: Heads, sinks: bool) -> None:
    """A warp merges several rows at once if each has few partials."""
    rng = np.random.default_rng(0)
    counts = rng.choice(COUNTS[name], MANY)
    case = make_case([], [(-1, int(n) * int(rng.integers(1, 9))) for n in counts])
    tensors = Tensors.make(case, heads)
    if heads.kv_dtype is not None:
        caches = {n: getattr(tensors, n).to(heads.kv_dtype) for n in ("k_cache", "v_cache")}
        tensors = dataclasses.replace(tensors, **caches)
    step = planned_step(heads, max_requests=1024, max_partials=8192)
    options = {"sinks": make_sinks(heads) if sinks else None}
    if heads.kv_dtype is not None:
        options["v_scale"] = 0.75

    def of_requests(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, lens = torch.from_numpy(rows).cuda(), case.seq_lens[rows]
        part = dataclasses.replace(
            tensors,
            q=tensors.q[chosen],
            req_pool_indices=tensors.req_pool_indices[chosen],
            seq_lens=tensors.seq_lens[chosen],
        )
        plan = cut(counts[rows], lens, heads.num_qo_heads // heads.num_kv_heads)
        load(step, plan, part, lens)
        return run(step, part, **options)

    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    num_warps = 2 * 16 * num_sms
    assert (counts != 1).sum() * heads.num_qo_heads > 2 * num_warps, "several rows for a warp"
    out, lse = of_requests(np.arange(MANY))
    if heads.kv_dtype is None:
        check(out, lse, tensors, sinks=options["sinks"])
    for _ in range(5):
        again = of_requests(np.arange(MANY))
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    few = num_warps // heads.num_qo_heads // 2
    for rows in np.array_split(rng.permutation(MANY), MANY // few + 1):
        alone = of_requests(rows)
        chosen = torch.from_numpy(rows).cuda()
        assert torch.equal(alone[0], out[chosen])
        assert torch.equal(alone[1], lse[chosen])


@pytest.mark.parametrize("long", [False, True])
def test_nan_is_neither_hidden_nor_spread(long: bool) -> None:
    heads = Heads(8, 2)
    if long:
        tensors, step, plan = split_finely(LONG_AND_SHORT, heads)
    else:
        tensors, step = Tensors.make(MIXED, heads), planned_step(heads)
        plan = step.write(MIXED.batch(), **tensors.index)
    clean, clean_lse = run(step, tensors)
    request = int(plan.merges[plan.merges[:, 2].argmax(), 0])
    tensors.q[request, 3] = torch.nan
    out, lse = run(step, tensors)
    assert torch.isnan(out[request, 3]).all()
    assert torch.isnan(lse[request, 3])
    clean[request, 3] = out[request, 3] = 0
    clean_lse[request, 3] = lse[request, 3] = 0
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)


@pytest.mark.parametrize("case", [make_case([], [(-1, 90)] * 5), MIXED], ids=["none", "some"])
def test_it_is_launched_where_there_is_something_to_merge(case: ForestCase) -> None:
    heads = Heads(8, 2)
    tensors, step = Tensors.make(case, heads), planned_step(heads)
    plan = step.write(case.batch(), **tensors.index)
    run(step, tensors)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(step, tensors)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("pack_decode_kernel" in name for name in names)
    launched = any("merge_partials_kernel" in name for name in names)
    assert launched is (len(plan.merges) > 0)
