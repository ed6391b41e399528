"""merge_partials against float64: rows of few and of many partials, launches, NaN."""

from __future__ import annotations

import pytest
import torch
from forests import ForestCase, make_case
from pack_decode_cases import (
    BF16,
    FP16,
    MIXED,
    Heads,
    Tensors,
    check,
    needs_gpu,
    planned_step,
    run,
)

pytestmark = needs_gpu

# Long rows beside short ones; and one request alone, whose rows are a handful.
LONG_AND_SHORT = make_case(
    [(-1, 300), (0, 200)], [(-1, 24000)] + [(1, 90)] * 7 + [(-1, 5000), (-1, 30), (-1, 0)]
)
ALONE = make_case([], [(-1, 40000)])


def split_finely(case: ForestCase, heads: Heads):
    """The case on the device, with a plan of many partials per request."""
    tensors = Tensors.make(case, heads)
    step = planned_step(heads, num_workers=264, min_piece_tokens=64)
    plan = step.write(
        case.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    )
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
    """The grid of a graph is sized for other plans, that of an eager launch for this one."""
    tensors, step, _ = split_finely(LONG_AND_SHORT, Heads(8, 1, head_dim))
    eager = run(step, tensors)
    out, lse = torch.full_like(eager[0], torch.nan), torch.full_like(eager[1], torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])


@pytest.mark.parametrize("long", [False, True])
def test_nan_is_neither_hidden_nor_spread(long: bool) -> None:
    heads = Heads(8, 2)
    if long:
        tensors, step, plan = split_finely(LONG_AND_SHORT, heads)
    else:
        tensors, step = Tensors.make(MIXED, heads), planned_step(heads)
        plan = step.write(
            MIXED.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
        )
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
    plan = step.write(
        case.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    )
    run(step, tensors)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(step, tensors)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert any("pack_decode_kernel" in name for name in names)
    launched = any("merge_partials_kernel" in name for name in names)
    assert launched is (len(plan.merges) > 0)
