"""The reference executor on work items of many segments, made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from handwritten_plans import HandPlan, random_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem
from sample_forests import ForestCase, broken_token, forest_cases, make_case, many

from sglang_pat.batch import Step
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.reference import ReferenceExecutor, dense_attention


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
    """Against dense attention in float64, at the lengths that the step has."""
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
    """Others in its work items have the bits that they have without it."""
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
