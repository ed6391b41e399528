"""The CUDA kernels are compared with float64: bodies, shapes, splits, lengths, NaN in memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pack_decode_cases import (
    BF16,
    COLUMNS,
    FP16,
    LONG,
    MIXED,
    Heads,
    Tensors,
    all_head_dims,
    check,
    check_case,
    group_sizes,
    has_body,
    make_sinks,
    planned,
    run,
)
from sample_forests import ForestCase, forest_cases, make_case, many, three_level_case

from kernel.request_forests import Forest
from sglang_pat.support import GQA_HEAD_DIMS, POLICIES

pytestmark = pytest.mark.usefixtures("kernel_body")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@all_head_dims
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_group_sizes(dtype: torch.dtype, pair: tuple[int, int], group_size: int) -> None:
    heads = Heads(3 * group_size, 3, pair[0], dtype, pair[1])
    check_case(MIXED, heads)
    check_case(MIXED, heads, sinks=make_sinks(heads))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_kv_heads_and_policies(num_kv_heads: int, policy: str) -> None:
    check_case(MIXED, Heads(4 * num_kv_heads, num_kv_heads), policy=policy)


@pytest.mark.parametrize("num_workers", [1, 2, 33, 264, 1000])
@pytest.mark.parametrize("max_block_q", [16, 32, 64])
@all_head_dims
def test_splits_and_bodies(num_workers: int, max_block_q: int, pair: tuple[int, int]) -> None:
    for group_size in (1, 4, 8):
        heads = Heads(2 * group_size, 2, pair[0], BF16, pair[1])
        options = {"num_workers": num_workers, "max_block_q": max_block_q, "min_item_tokens": 64}
        check_case(MIXED, heads, **options)


@all_head_dims
def test_long_rows_are_merged(pair: tuple[int, int]) -> None:
    heads = Heads(8, 2, pair[0], BF16, pair[1])
    options = {"num_workers": 264, "min_item_tokens": 64}
    check_case(LONG, heads, **options)
    check_case(LONG, heads, sinks=make_sinks(heads), **options)


@all_head_dims
def test_workers_have_a_few_tickets_of_a_long_range(pair: tuple[int, int]) -> None:
    """13 tiles divide badly among 33 workers, so that each tile is cut into five pieces."""
    heads = Heads(32, 2, pair[0], BF16, pair[1])
    case = make_case([(-1, 8192)], [(0, 64 + n % 3) for n in range(52)])
    tensors, step = planned(case, heads, num_workers=33, min_item_tokens=256)
    assert step.executor.buffers.loaded.num_tickets > 33
    check(*run(step, tensors), tensors)


@pytest.mark.parametrize("logit_cap", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@all_head_dims
def test_logit_cap(logit_cap: float, dtype: torch.dtype, pair: tuple[int, int]) -> None:
    check_case(MIXED, Heads(8, 2, pair[0], dtype, pair[1]), logit_cap=logit_cap)


@pytest.mark.parametrize("num_requests", [1, 2, 31, 256, 1024])
@group_sizes([4], [8])
def test_batch_sizes(num_requests: int, heads: Heads) -> None:
    check_case(three_level_case(num_requests), heads)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 193, 4096, 65536])
@pytest.mark.parametrize("num_requests", [1, 3])
@group_sizes([4], [8, 16])
def test_lengths(length: int, num_requests: int, heads: Heads) -> None:
    check_case(make_case([], [(-1, length)] * num_requests), heads)
    check_case(make_case([(-1, length)], [(0, 7)] * num_requests), heads)


@pytest.mark.parametrize("length", [1, 31, 33, 65, 4096])
@all_head_dims
def test_lengths_of_one_request(length: int, pair: tuple[int, int]) -> None:
    check_case(make_case([], [(-1, length)]), Heads(8, 2, pair[0], BF16, pair[1]))


@group_sizes([4], [8])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("rise", "length"), [(3.0, 330), (-3.0, 330), (15.0, 150), (-15.0, 150)])
def test_logits_that_rise_or_fall(
    rise: float, length: int, dtype: torch.dtype, heads: Heads
) -> None:
    """Logits rise by `rise` every 32 tokens: a small rise rescales sums rarely, a large one often.

    In latent attention one warpgroup must pass the maximum to the other.
    """
    case = make_case([(-1, length)], [(0, 1), (0, 70)] * 3 + [(-1, length)])
    heads = dataclasses.replace(heads, dtype=dtype)
    column = COLUMNS if heads.is_latent else 0
    tensors = Tensors.make(case, heads)
    tensors.q[..., column] = 8.0
    position = torch.arange(case.tokens.shape[1], device="cuda")
    logits = rise * (position // 32 - (length // 32 if rise > 0 else 0))
    for request, tokens in enumerate(case.seq_lens):
        slots = tensors.req_to_token[tensors.req_pool_indices[request], :tokens].long()
        keys = (logits[:tokens] * heads.head_dim**0.5 / 8.0).to(dtype)
        tensors.k_cache[slots, :, column] = keys[:, None]
    check_case(case, heads, tensors)


def test_only_padding_rows() -> None:
    check_case(make_case([], [(-1, 0)] * 5), Heads(8, 2))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_types(index_dtype: torch.dtype) -> None:
    heads = Heads(8, 2)
    check_case(MIXED, heads, Tensors.make(MIXED, heads, index_dtype=index_dtype))


@all_head_dims
def test_queries_and_caches_may_be_slices(pair: tuple[int, int]) -> None:
    """The pools' rows may have gaps between them, which are never read."""
    tensors, step = planned(MIXED, Heads(8, 2, pair[0], BF16, pair[1]))
    expected = run(step, tensors)
    for name in ("q", "k_cache", "v_cache"):
        rows = getattr(tensors, name)
        wide = rows.new_full((len(rows), rows.shape[1] + 2, rows.shape[2]), torch.nan)
        wide[:, 1:-1] = rows
        setattr(tensors, name, wide[:, 1:-1])
    for result, like in zip(run(step, tensors), expected, strict=True):
        assert torch.equal(result, like)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(page_size: int) -> None:
    forest = Forest.of_tree("1,4,32_300,77,45")
    table = forest.token_table(page_size=page_size, seed=1, device="cpu").numpy()
    check_case(ForestCase(forest.paths, forest.seq_lens, table), Heads(8, 2))


@pytest.mark.usefixtures("memory_is_given_back")
def test_slots_beyond_4_gib() -> None:
    heads = Heads(32, 32)
    case = make_case([(-1, 100)], [(0, 40)] * 4)
    tensors = Tensors.make(case, heads)
    small = tensors.k_cache, tensors.v_cache
    num_slots = (5 << 30) // (32 * 128 * 2)
    shift = num_slots - len(small[0])
    large = [torch.empty(num_slots, 32, 128, device="cuda", dtype=BF16) for _ in small]
    for source, target in zip(small, large, strict=True):
        target[shift:] = source
    tensors.k_cache, tensors.v_cache = large
    table = tensors.req_to_token
    tensors.req_to_token = torch.where(table < 2147480000, table + shift, table)
    check_case(case, heads, tensors)


@settings(many, max_examples=1000, database=None)
@given(
    case=forest_cases(max_requests=40),
    geometry=st.sampled_from([(1, 1), (2, 2), (4, 2), (16, 1), (5, 1), (8, 8), (14, 2)]),
    pair=st.sampled_from([*GQA_HEAD_DIMS, *[(128, 128)] * 9]),
    with_sinks=st.booleans(),
    num_workers=st.sampled_from([1, 7, 33, 132]),
)
def test_random_forests(
    case: ForestCase,
    geometry: tuple[int, int],
    pair: tuple[int, int],
    with_sinks: bool,
    num_workers: int,
) -> None:
    heads = Heads(*geometry, pair[0], BF16, pair[1])
    assume(has_body(heads))
    sinks = make_sinks(heads) if with_sinks else None
    check_case(case, heads, sinks=sinks, num_workers=num_workers)
