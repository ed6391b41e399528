"""The CUDA kernels for latent attention (MLA, V is the start of K) are compared with float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from handwritten_plans import HandItem, HandPlan, HandSegment, tails, tails_case
from pack_decode_cases import (
    BF16,
    COLUMNS,
    FP16,
    MIXED,
    ROPE,
    Tensors,
    captured,
    check,
    check_case,
    check_plan,
    latent,
    load,
    make_sinks,
    needs_latent_kernels,
    planned,
    planned_step,
    run,
)
from sample_forests import make_case, three_level_case

from kernel.numerics import compare
from sglang_pat import PackAttention
from sglang_pat._scheduler import OPEN_END
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import KvWriter

pytestmark = [needs_latent_kernels, pytest.mark.usefixtures("kernel_body")]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("group_size", [1, 2, 5, 7, 8, 12, 16, 20, 32, 33, 64])
def test_group_sizes(dtype: torch.dtype, group_size: int) -> None:
    check_case(MIXED, latent(group_size, dtype))


@pytest.mark.parametrize("num_workers", [1, 2, 33, 132, 1000])
def test_splits(num_workers: int) -> None:
    for group_size in (5, 16, 32):
        check_case(MIXED, latent(group_size), num_workers=num_workers, min_item_tokens=64)


@pytest.mark.parametrize("count", [31, 33, 64, 100])
def test_many_items_in_a_ticket(count: int) -> None:
    """A ticket has more items than the producers prefetch, with odd or even numbers of stages."""
    case = make_case([(-1, 64)], [(0, 1 + 29 * i % 200) for i in range(count)])
    items = [HandItem([r], [HandSegment(r, 0, OPEN_END, 0, 1)]) for r in range(count)]
    check_plan(case, HandPlan(count, 16, items, tickets=[count]), latent(16))
    check_plan(case, HandPlan(count, 16, items), latent(16))


# --- queries ---


@pytest.mark.parametrize("group_size", [5, 16])
def test_queries_in_two_tensors_of_any_strides(group_size: int) -> None:
    """SGLang passes fa3 queries with distant heads, and rope as a slice of a wider projection."""
    heads = latent(group_size)
    tensors, step = planned(MIXED, heads)
    expected = run(step, tensors)
    rows = len(tensors.q)
    nope = torch.full((group_size, rows, COLUMNS), torch.nan, device="cuda", dtype=BF16)
    nope = nope.transpose(0, 1)
    nope.copy_(tensors.q[..., :COLUMNS])
    wide = torch.full((rows, group_size, 192), torch.nan, device="cuda", dtype=BF16)
    wide[..., 128:] = tensors.q[..., COLUMNS:]
    out, lse = (torch.full_like(each, torch.nan) for each in expected)
    step.decode(nope, tensors.k_cache, tensors.v_cache, out, lse, q_rope=wide[..., 128:])
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_heads_of_one_tensor_may_lie_apart() -> None:
    heads = latent(8)
    tensors, step = planned(MIXED, heads)
    expected = run(step, tensors)
    rows = len(tensors.q)
    apart = torch.full((8, rows, COLUMNS + ROPE), torch.nan, device="cuda", dtype=BF16)
    apart = apart.transpose(0, 1)
    apart.copy_(tensors.q)
    tensors.q = apart
    out, lse = (torch.full_like(each, torch.nan) for each in expected)
    step.decode(apart, tensors.k_cache, tensors.v_cache, out, lse)
    assert torch.equal(out, expected[0])


def test_queries_that_the_kernel_cannot_read_are_refused() -> None:
    tensors, step = planned(MIXED, latent(8))
    out = tensors.q.new_empty((*tensors.q.shape[:2], COLUMNS))
    shifted = tensors.q.new_empty((*tensors.q.shape[:2], 600))[..., 1:577]
    for q, rope in ((shifted, None), (tensors.q[..., :COLUMNS], shifted[..., :ROPE])):
        with pytest.raises(ValueError, match="must have dense columns and rows aligned to 16"):
            step.decode(q, tensors.k_cache, tensors.v_cache, out, q_rope=rope)


def test_sinks() -> None:
    for num_requests in (1, 31):
        heads = latent(16)
        check_case(three_level_case(num_requests), heads, sinks=make_sinks(heads))


# --- isolation ---


@pytest.mark.parametrize("group_size", [5, 8, 16, 20])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_broken_kv_stays_with_its_request(group_size: int, poison: float) -> None:
    """NaN or infinity in one request's private tail, in K or V, does not reach other requests."""
    lengths = [40, 70, 3, 129, 64, 1, 90, 33][: 64 // group_size]
    case, plan, heads = tails_case(lengths), tails(lengths, group_size), latent(group_size)
    tensors, step = Tensors.make(case, heads), planned_step(heads, num_workers=8)
    load(step, plan, tensors, case.seq_lens)
    expected, expected_lse = run(step, tensors)
    broken = 1
    row = tensors.req_to_token[tensors.req_pool_indices[broken]]
    for column in (3, 300, COLUMNS + 5):
        kept = tensors.k_cache.clone()
        tensors.k_cache[int(row[117]), 0, column] = poison
        out, lse = run(step, tensors)
        others = [r for r in range(len(lengths)) if r != broken]
        in_dtype, _ = tensors.reference(heads.dtype)
        exact, _ = tensors.reference(torch.float64)
        report = compare(out[others], in_dtype[others], exact[others])
        assert report.acceptable, str(report)
        assert torch.allclose(lse[others], expected_lse[others], atol=2e-5)
        assert not torch.isfinite(out[broken]).all()
        tensors.k_cache.copy_(kept)
    assert torch.equal(run(step, tensors)[0], expected)


# --- graphs ---


@pytest.mark.parametrize("group_size", [8, 16])
def test_a_graph_has_the_bits_of_eager_steps(group_size: int) -> None:
    heads = latent(group_size)
    tensors, step = planned(MIXED, heads)
    expected, expected_lse = run(step, tensors)
    graph, out, lse = captured(step, tensors, layers=3)
    for _ in range(3):
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    other = dataclasses.replace(MIXED, paths=[path[:1] for path in MIXED.paths])
    step.write(other.batch(), **tensors.index)
    graph.replay()
    check(out, lse, tensors)


# --- PackAttention ---


def test_pack_attention_agrees_with_its_reference() -> None:
    heads = latent(16)
    tensors = Tensors.make(MIXED, heads)
    results = []
    for executor in ("cuda", "reference"):
        attention = PackAttention(
            16, 1, 576, v_head_dim=512, dtype=BF16, device="cuda", executor=executor
        )
        attention.plan(MIXED.batch(), **tensors.index)
        results.append(attention.run(tensors.q, tensors.k_cache, tensors.v_cache))
    exact, _ = tensors.reference(torch.float64)
    report = compare(results[0], results[1], exact)
    assert report.acceptable, str(report)


# --- writes ---


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_are_written_as_they_are(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """Rows come in one tensor, or in two slices of wider tensors; no request has slot 0."""
    device = torch.device("cuda", torch.cuda.current_device())
    writer = KvWriter(KernelConfig.for_device(dtype, 576, device, COLUMNS), device)
    for num_tokens in (1, 7, 300):
        slots = torch.randperm(3 * num_tokens, device="cuda")[:num_tokens].to(index_dtype)
        k = torch.randn(num_tokens, 1, COLUMNS + ROPE, device="cuda").to(dtype)
        wide = torch.full((num_tokens, 3, COLUMNS), torch.nan, device="cuda", dtype=dtype)
        wide[:, 1:2] = k[..., :COLUMNS]
        rope = k[..., COLUMNS:].contiguous()
        expected = torch.full((3 * num_tokens, 1, COLUMNS + ROPE), 7.0, device="cuda", dtype=dtype)
        written = expected.clone(), expected.clone()
        kept = slots.long() != 0
        expected[slots.long()[kept]] = k[kept]
        assert writer.write_latent(k, None, slots, written[0])
        assert writer.write_latent(wide[:, 1:2], rope, slots, written[1])
        for cache in written:
            assert torch.equal(cache, expected)


def test_the_writer_agrees_with_torch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    writer = KvWriter(KernelConfig.for_device(BF16, 576, device, COLUMNS), device)
    assert writer.agrees_with_torch()
