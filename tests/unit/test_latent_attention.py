"""PackAttention of latent attention (MLA, absorbed): one KV head, whose V is a part of its K."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problems import Problem
from sample_forests import make_case

from sglang_pat import PackAttention
from sglang_pat.support import LATENT_HEAD_DIMS, POLICIES

KEYS, VALUES = LATENT_HEAD_DIMS
GROUPS = (1, 5, 8, 12, 16, 20, 32, 64)
TREE = make_case(
    [(-1, 130), (0, 70), (0, 5)], [(1, 30), (1, 1), (2, 64), (0, 65), (-1, 5), (-1, 0)]
)


def make_attention(num_heads: int, **kwargs: Any) -> PackAttention:
    options = {"dtype": torch.float32, "v_head_dim": VALUES, **kwargs}
    return PackAttention(num_heads, 1, KEYS, **options)


def make_problem(num_heads: int, case: Any = None, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(case or TREE, (num_heads, 1, KEYS), dtype, v_head_dim=VALUES, latent=True)


def planned(problem: Problem, attention: PackAttention) -> PackAttention:
    lens = torch.from_numpy(problem.case.seq_lens)
    attention.plan(problem.case.batch(), seq_lens=lens, **problem.tables)
    return attention


@pytest.mark.parametrize("num_heads", GROUPS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_group_of_heads_is_exact(num_heads: int, batch_invariant: bool) -> None:
    problem = make_problem(num_heads)
    problem.check(make_attention(num_heads, batch_invariant=batch_invariant), sm_scale=192**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    problem = make_problem(16, dtype=dtype)
    problem.check(make_attention(16, dtype=dtype), sm_scale=192**-0.5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "case",
    [
        make_case([], [(-1, 300), (-1, 1), (-1, 0), (-1, 70)]),
        make_case([(-1, 300), (0, 140), (0, 5)], [(1, 90), (1, 1), (2, 64), (0, 65), (-1, 5)] * 2),
        make_case([(-1, 400)], [(0, n) for n in range(1, 14)]),
    ],
    ids=["nothing shared", "ragged tree", "one prefix"],
)
def test_every_policy_over_trees_and_ragged_lengths(case: Any, policy: str) -> None:
    make_problem(8, case).check(make_attention(8, policy=policy, num_workers=7))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_queries_in_two_parts_are_whole_queries(batch_invariant: bool) -> None:
    """Each part has its own strides; SGLang's first part is the transpose of `[heads, rows]`."""
    problem = make_problem(12)
    attention = planned(problem, make_attention(12, batch_invariant=batch_invariant))
    whole = attention.run(problem.q, problem.k, problem.v)
    nope, rope = problem.q[..., :VALUES], problem.q[..., VALUES:]
    rows = len(problem.q)
    by_head = nope.transpose(0, 1).contiguous().transpose(0, 1)
    assert by_head.stride() == (VALUES, rows * VALUES, 1)
    wide = torch.full((rows, 12, 192), math.nan)
    wide[..., 128:] = rope
    for parts in ((nope, rope), (by_head, rope.clone()), (nope.clone(), wide[..., 128:])):
        out = attention.run(parts[0], problem.k, problem.v, q_rope=parts[1])
        assert torch.equal(out, whole)
    strided = torch.full((rows, 15, 600), math.nan)[:, 1:13, 4:580]
    strided.copy_(problem.q)
    assert torch.equal(attention.run(strided, problem.k, problem.v), whole)


def test_values_are_the_view_of_the_keys() -> None:
    problem = make_problem(8)
    attention = planned(problem, make_attention(8))
    out = torch.zeros(len(problem.q), 8, VALUES)
    for wrong in (problem.v.clone(), problem.k[..., 64:], problem.k.clone()[..., :VALUES]):
        with pytest.raises(ValueError, match=r"v_cache must be the view k_cache\[..., :512\], got"):
            attention.run(problem.q, problem.k, wrong, out=out)
    assert not out.any()


def test_parts_of_another_shape_are_refused() -> None:
    problem = make_problem(8)
    attention = planned(problem, make_attention(8))
    rows, caches = len(problem.q), (problem.k, problem.v)
    nope, rope = problem.q[..., :VALUES], problem.q[..., VALUES:]
    with pytest.raises(ValueError, match=rf"q must have shape \[{rows}, 8, 512\], got"):
        attention.run(problem.q, *caches, q_rope=rope)
    with pytest.raises(ValueError, match=rf"q_rope must have shape \[{rows}, 8, 64\], got"):
        attention.run(nope, *caches, q_rope=rope[:, :7])
    with pytest.raises(ValueError, match=rf"q must have shape \[{rows}, 8, 576\], got"):
        attention.run(nope, *caches)
    with pytest.raises(ValueError, match=r"q_rope must be torch\.float32, got torch\.float16"):
        attention.run(nope, *caches, q_rope=rope.half())
    with pytest.raises(ValueError, match=r"latent attention has no logit_cap, got 5\.0"):
        attention.run(problem.q, *caches, logit_cap=5.0)


def test_other_attention_has_whole_queries() -> None:
    problem = Problem(TREE, (8, 2, 64), torch.float32)
    attention = planned(problem, PackAttention(8, 2, 64, dtype=torch.float32))
    with pytest.raises(ValueError, match="q_rope belongs to latent attention"):
        attention.run(problem.q, problem.k, problem.v, q_rope=problem.q)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((65, 1), "query heads per KV head = 65; supported: 1 to 16; of latent attention 1 to 64"),
        ((16, 2), "latent attention has 1 KV head, got 2"),
    ],
)
def test_unsupported_heads(heads: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackAttention(*heads, KEYS, v_head_dim=VALUES, dtype=torch.float32)
