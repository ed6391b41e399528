"""The reference executor against dense float64 attention, with everything unused poisoned."""

from __future__ import annotations

import math

import pytest
import torch
from forests import ForestCase, forest_cases, make_case, three_level_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import Problem

from sglang_pat import PackAttention
from sglang_pat.executors.reference import merge_partials
from sglang_pat.support import POLICIES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    case=forest_cases(max_requests=12),
    group_size=st.integers(1, 16),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([64, 128]),
    dtype=st.sampled_from(DTYPES),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_random_forests(
    case: ForestCase,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    policy: str,
    seed: int,
) -> None:
    heads = (group_size * num_kv_heads, num_kv_heads, head_dim)
    attention = PackAttention(*heads, dtype=dtype, policy=policy)
    Problem(case, heads, dtype, seed).check(attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_requests", [1, 2, 100])
def test_three_levels(num_requests: int, dtype: torch.dtype) -> None:
    heads = (8, 2, 64)
    attention = PackAttention(*heads, dtype=dtype)
    Problem(three_level_case(num_requests), heads, dtype).check(attention)


def test_a_long_request_is_gathered_in_bounded_memory() -> None:
    heads = (4, 1, 64)
    case = make_case([(-1, 20_000)], [(0, 70_000), (0, 5)])
    Problem(case, heads, torch.float32).check(PackAttention(*heads, dtype=torch.float32))


@pytest.mark.parametrize("sm_scale", [0.5, 1.0])
def test_scale_and_soft_cap(sm_scale: float) -> None:
    heads = (6, 2, 64)
    problem = Problem(three_level_case(9), heads, torch.float32)
    attention = PackAttention(*heads, dtype=torch.float32)
    problem.check(attention, sm_scale=sm_scale, logit_cap=2.0)
    capped, _ = problem.dense(torch.float64, sm_scale=sm_scale, logit_cap=2.0)
    plain, _ = problem.dense(torch.float64, sm_scale=sm_scale)
    assert (capped - plain).abs().max() > 1e-3, "the cap must matter for this test to say anything"


def test_padding_rows_are_zero() -> None:
    heads = (4, 1, 64)
    problem = Problem(make_case([], [(-1, 0), (-1, 3), (-1, 0)]), heads, torch.float32)
    attention = PackAttention(*heads, dtype=torch.float32)
    problem.check(attention)
    out, lse = attention.run(problem.q, problem.k, problem.v, return_lse=True)
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == -math.inf).all()


def test_merging_partials_of_any_magnitude() -> None:
    # exp(100) is no float32: weights must be relative to the largest LSE.
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
