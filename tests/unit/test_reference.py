"""The reference executor is compared with dense float64 attention; unused memory is NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from handwritten_plans import HandPlan, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem
from sample_forests import (
    ForestCase,
    broken_token,
    few,
    forest_cases,
    make_case,
    many,
    three_level_case,
)

from sglang_pat import PackAttention
from sglang_pat.batch import Step
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.reference import (
    ReferenceExecutor,
    add_sinks,
    dense_attention,
    merge_partials,
)
from sglang_pat.support import GQA_HEAD_DIMS, POLICIES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_sinks(num_heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return sinks of the size of the LSEs here, which are 0 to 10."""
    return torch.linspace(-2.0, 9.0, num_heads).to(dtype)


@few
@given(
    case=forest_cases(max_requests=12),
    group_size=st.integers(1, 16),
    num_kv_heads=st.integers(1, 3),
    head_dims=st.sampled_from([(64, 64), (80, 80), (192, 128)]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_random_forests(
    case: ForestCase,
    group_size: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    with_sinks: bool,
    dtype: torch.dtype,
    policy: str,
    seed: int,
) -> None:
    head_dim, v_head_dim = head_dims
    heads = (group_size * num_kv_heads, num_kv_heads, head_dim)
    attention = PackAttention(*heads, dtype=dtype, v_head_dim=v_head_dim, policy=policy)
    problem = Problem(case, heads, dtype, seed, v_head_dim=v_head_dim)
    problem.check(attention, sinks=make_sinks(heads[0]) if with_sinks else None)


def test_a_long_request_is_gathered_in_bounded_memory() -> None:
    heads = (4, 1, 64)
    case = make_case([(-1, 20_000)], [(0, 70_000), (0, 5)])
    Problem(case, heads, torch.float32).check(PackAttention(*heads, dtype=torch.float32))


@pytest.mark.parametrize("sm_scale", [0.5, 1.0])
@pytest.mark.parametrize("sinks_dtype", [None, *DTYPES])
def test_scale_and_soft_cap(sm_scale: float, sinks_dtype: torch.dtype | None) -> None:
    heads = (6, 2, 64)
    problem = Problem(three_level_case(9), heads, torch.float32)
    attention = PackAttention(*heads, dtype=torch.float32)
    sinks = None if sinks_dtype is None else make_sinks(6, sinks_dtype)
    problem.check(attention, sinks=sinks, sm_scale=sm_scale, logit_cap=2.0)
    capped, _ = problem.dense(torch.float64, sm_scale=sm_scale, logit_cap=2.0)
    plain, _ = problem.dense(torch.float64, sm_scale=sm_scale)
    assert (capped - plain).abs().max() > 1e-3, "the cap must matter for this test to say anything"


@pytest.mark.parametrize("sinks", [None, make_sinks(4)], ids=["", "sinks"])
def test_padding_rows_are_zero(sinks: torch.Tensor | None) -> None:
    heads = (4, 1, 64)
    problem = Problem(make_case([], [(-1, 0), (-1, 3), (-1, 0)]), heads, torch.float32)
    attention = PackAttention(*heads, dtype=torch.float32)
    problem.check(attention, sinks=sinks)
    out, lse = attention.run(problem.q, problem.k, problem.v, sinks=sinks, return_lse=True)
    assert (out[[0, 2]] == 0).all()
    nothing = torch.tensor(-math.inf) if sinks is None else sinks
    assert torch.equal(lse[[0, 2]], nothing.expand(2, 4))


@pytest.mark.parametrize("as_scale", [float, torch.tensor])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_one_byte_is_read_with_its_scales(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    batch_invariant: bool,
    as_scale: Callable[[float], float | torch.Tensor],
) -> None:
    heads = (8, 2, 64)
    problem = Problem(three_level_case(9), heads, dtype)
    caches = problem.k.to(kv_dtype), problem.v.to(kv_dtype)
    attention = PackAttention(
        *heads, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=batch_invariant
    )
    lens = torch.from_numpy(problem.case.seq_lens)
    attention.plan(problem.case.batch(), seq_lens=lens, **problem.tables)
    sinks = make_sinks(8)
    scales = {"k_scale": as_scale(0.3), "v_scale": as_scale(5.0)}
    out, lse = attention.run(problem.q, *caches, **scales, sinks=sinks, return_lse=True)
    # KV that no request may read is NaN in fp8 as well.
    problem.k, problem.v = caches[0].double() * 0.3, caches[1].double() * 5.0
    exact, exact_lse = problem.dense(torch.float64, sinks=sinks)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=eps, atol=20 * eps if eps < 1e-5 else eps)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


# --- sinks ---


@pytest.mark.parametrize("head_dims", GQA_HEAD_DIMS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("num_requests", [1, 5])
def test_sinks_count_once_however_a_request_is_split(
    num_requests: int, head_dims: tuple[int, int]
) -> None:
    heads = (8, 2, head_dims[0])
    case = make_case([(-1, 900), (0, 400)], [(1, 300)] * num_requests + [(-1, 5), (-1, 0)])
    problem = Problem(case, heads, torch.float32, v_head_dim=head_dims[1])
    attention = PackAttention(*heads, dtype=torch.float32, v_head_dim=head_dims[1])
    problem.check(attention, sinks=make_sinks(8))
    plan = attention._plan
    assert plan is not None
    assert 0 < len(plan.merges) < len(case.seq_lens), "requests of several partials, and of one"
    with_sinks, _ = problem.dense(torch.float64, sinks=make_sinks(8))
    without, _ = problem.dense(torch.float64)
    assert (with_sinks - without).abs().max() > 1e-2, "the sinks must matter"


@pytest.mark.parametrize("sink", [-math.inf, -300.0, 300.0])
def test_sinks_of_any_magnitude(sink: float) -> None:
    out, lse = torch.full((2, 1, 3), 2.0), torch.tensor([[5.0], [-math.inf]])
    out[1] = 0
    new_out, new_lse = add_sinks(out, lse, torch.tensor([sink]))
    assert torch.isfinite(new_out).all()
    assert (new_out == out * (sink < 0)).all()
    assert new_lse.flatten().tolist() == [max(5.0, sink), sink]


def test_the_oracle_with_sinks_is_the_formula() -> None:
    """`dense_attention` equals the written-out sum: exp(sink) is only in the denominator."""
    q, k = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[0.5, 0.0]], [[0.0, 1.0]]])
    v = torch.tensor([[[1.0]], [[3.0]]])
    table, rows, lens = torch.tensor([[0, 1]], dtype=torch.int32), [0], torch.tensor([2])
    sinks = torch.tensor([0.7])
    out, lse = dense_attention(q, k, v, table, torch.tensor(rows), lens, sm_scale=1.0, sinks=sinks)
    weights = [math.exp(0.5), math.exp(2.0)]
    total = sum(weights) + math.exp(sinks.double().item())
    assert out.item() == pytest.approx((weights[0] + 3 * weights[1]) / total, rel=1e-12)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-12)


def test_merging_partials_of_any_magnitude() -> None:
    # exp(100) overflows float32, so weights must be relative to the largest LSE.
    lse = torch.tensor([[100.0], [100.0], [-200.0], [300.0]])
    out = torch.tensor([[[1.0]], [[3.0]], [[5.0]], [[7.0]]])
    merged, merged_lse = merge_partials(out, lse, torch.tensor([0, 0, 1, 1]), num_merges=2)
    assert merged.flatten().tolist() == [2.0, 7.0]
    torch.testing.assert_close(merged_lse.flatten(), torch.tensor([100 + math.log(2), 300.0]))


def test_merging_empty_partials() -> None:
    lse = torch.tensor([[-math.inf], [0.0], [-math.inf]])
    out = torch.tensor([[[9.0]], [[2.0]], [[9.0]]])
    merged, merged_lse = merge_partials(out, lse, torch.tensor([0, 0, 1]), num_merges=3)
    assert merged.flatten().tolist() == [2.0, 0.0, 0.0]
    assert merged_lse.flatten().tolist() == [0.0, -math.inf, -math.inf]


def execute(
    problem: Problem, plan: HandPlan, seq_lens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    executor = ReferenceExecutor(torch.device("cpu"))
    step = Step(problem.req_to_token, problem.rows, torch.from_numpy(seq_lens), seq_lens)
    executor.load_plan(plan, step)  # type: ignore[arg-type]
    out = torch.full_like(problem.q, torch.nan)
    lse = torch.full(problem.q.shape[:2], torch.nan, dtype=torch.float64)
    executor.run(LayerInputs(problem.q, problem.k, problem.v, out, lse, 0.125, 0.0, None))
    return out, lse


def check(case: ForestCase, plan: HandPlan, group_size: int, seq_lens: np.ndarray) -> None:
    """Compare with dense attention in float64, at the step's lengths."""
    heads = (2 * group_size, 2, 64)
    problem = Problem(case, heads, torch.float64)
    lens = torch.from_numpy(seq_lens)
    out, lse = execute(problem, plan, seq_lens)
    exact, exact_lse = dense_attention(
        problem.q, problem.k, problem.v, problem.req_to_token, problem.rows, lens
    )
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-9, atol=1e-9)


@settings(many, max_examples=25)
@given(case=forest_cases(max_requests=20), group_size=st.integers(1, 16), seed=st.integers(0, 1000))
def test_random_plans(case: ForestCase, group_size: int, seed: int) -> None:
    check(case, random_plan(case, group_size, seed), group_size, case.seq_lens)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("broken_cache", ["k", "v"])
def test_broken_kv_stays_with_its_requests(broken_cache: str, number: float) -> None:
    """Other requests of its work items have the same bits as without broken KV."""
    for seed in range(6):
        nodes = [(-1, 40), (0, 30), (0, 70), (2, 5)]
        case = make_case(nodes, [(i % 5 - 1, 3 + 11 * i) for i in range(12)], seed=seed)
        plan = random_plan(case, 4, seed)
        problem = Problem(case, (8, 2, 64), torch.float64)
        clean, clean_lse = execute(problem, plan, case.seq_lens)
        found = broken_token(case, seed)
        assert found is not None
        request, position, broken = found
        getattr(problem, broken_cache)[case.tokens[request, position]] = number
        out, lse = execute(problem, plan, case.seq_lens)
        assert torch.equal(out[~broken], clean[~broken])
        assert torch.equal(lse[~broken], clean_lse[~broken])
        if np.isnan(number) or broken_cache == "v":
            assert not out[broken].isfinite().any()
