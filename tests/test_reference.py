"""The reference executor against dense float64 attention, with everything unused poisoned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from forests import ForestCase, forest_cases, make_case, three_level_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_pat import PackAttention
from sglang_pat.reference import dense_attention, merge_partials
from sglang_pat.support import POLICIES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Problem:
    """A case with random queries and a KV pool in which every unused slot is NaN."""

    def __init__(
        self, case: ForestCase, heads: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
    ) -> None:
        num_qo_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(seed)
        num_requests = len(case.seq_lens)
        self.case = case
        self.q = torch.randn(
            (num_requests, num_qo_heads, head_dim), generator=generator, dtype=torch.float32
        ).to(dtype)
        pool = (case.num_slots, num_kv_heads, head_dim)
        self.k = torch.full(pool, math.nan, dtype=dtype)
        self.v = torch.full(pool, math.nan, dtype=dtype)
        used = np.unique(np.concatenate([np.empty(0, np.int32), *self._used_slots(case.seq_lens)]))
        slots = torch.from_numpy(used).long()
        for cache in (self.k, self.v):
            cache[slots] = torch.randn((len(slots), *pool[1:]), generator=generator).to(dtype)
        # Rows in another order than the batch; the rest of the table points at poisoned slots.
        self.rows = torch.randperm(num_requests, generator=generator) + 1
        width = case.tokens.shape[1]
        self.req_to_token = torch.zeros((num_requests + 1, width), dtype=torch.int32)
        for request, used_slots in enumerate(self._used_slots(case.seq_lens)):
            row = self.req_to_token[self.rows[request]]
            row[: len(used_slots)] = torch.from_numpy(used_slots)
        self.tables = {"req_to_token": self.req_to_token, "req_pool_indices": self.rows}

    def _used_slots(self, seq_lens: np.ndarray) -> list[np.ndarray]:
        return [row[:n] for row, n in zip(self.case.tokens, seq_lens, strict=True)]

    def dense(self, dtype: torch.dtype, **kwargs: float) -> tuple[torch.Tensor, torch.Tensor]:
        lens = torch.from_numpy(self.case.seq_lens)
        return dense_attention(
            self.q, self.k, self.v, self.req_to_token, self.rows, lens, dtype=dtype, **kwargs
        )

    def check(self, attention: PackAttention, **kwargs: float) -> None:
        """Error against float64 at most twice plain torch's in the same dtype; LSE within 1e-5."""
        lens = torch.from_numpy(self.case.seq_lens)
        attention.plan(self.case.batch(), seq_lens=lens, **self.tables)
        out, lse = attention.run(self.q, self.k, self.v, return_lse=True, **kwargs)
        exact, exact_lse = self.dense(torch.float64, **kwargs)
        plain, _ = self.dense(self.q.dtype, **kwargs)
        error = (out.double() - exact).abs()
        allowed = 2 * (plain.double() - exact).abs().max().item() + 1e-6
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= allowed, f"error {worst} > {allowed} at {int(error.argmax())}"
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


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


def test_merging_empty_partials() -> None:
    lse = torch.tensor([[-math.inf], [0.0], [-math.inf]])
    out = torch.tensor([[[9.0]], [[2.0]], [[9.0]]])
    merged, merged_lse = merge_partials(out, lse, torch.tensor([0, 0, 1]), num_merges=3)
    assert merged.flatten().tolist() == [2.0, 0.0, 0.0]
    assert merged_lse.flatten().tolist() == [0.0, -math.inf, -math.inf]
