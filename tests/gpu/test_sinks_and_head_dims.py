"""Attention sinks, and head_dims other than 64 and 128, against float64: bodies, splits, graphs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_decode_cases import (
    BF16,
    FP16,
    MIXED,
    Heads,
    Tensors,
    check,
    check_case,
    make_sinks,
    needs_gpu,
    planned,
    run,
)
from sample_forests import ForestCase, forest_cases, make_case, many

from sglang_pat import PackAttention
from sglang_pat.support import GQA_HEAD_DIMS

pytestmark = [*needs_gpu, pytest.mark.usefixtures("kernel_body")]

OTHER = [pair for pair in GQA_HEAD_DIMS if pair not in ((64, 64), (128, 128))]
all_head_dims = pytest.mark.parametrize(
    "pair", GQA_HEAD_DIMS, ids=lambda pair: f"{pair[0]}-{pair[1]}"
)
other_head_dims = pytest.mark.parametrize("pair", OTHER, ids=lambda pair: f"{pair[0]}-{pair[1]}")
SPLIT_FINELY = {"num_workers": 264, "min_item_tokens": 64}
LONG = make_case([(-1, 300)], [(-1, 9000)] + [(0, 90)] * 7 + [(-1, 5000), (-1, 30), (-1, 0)])


def heads_of(pair: tuple[int, int], group_size: int, num_kv_heads: int = 3) -> Heads:
    return Heads(group_size * num_kv_heads, num_kv_heads, pair[0], BF16, pair[1])


# --- head_dims ---


@other_head_dims
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8, 16])
def test_group_sizes(group_size: int, with_sinks: bool, pair: tuple[int, int]) -> None:
    heads = heads_of(pair, group_size)
    check_case(MIXED, heads, sinks=make_sinks(heads) if with_sinks else None)


@other_head_dims
@pytest.mark.parametrize("num_workers", [1, 33, 1000])
@pytest.mark.parametrize("max_block_q", [16, 32, 64])
def test_splits_and_bodies(max_block_q: int, num_workers: int, pair: tuple[int, int]) -> None:
    options = {"num_workers": num_workers, "max_block_q": max_block_q, "min_item_tokens": 64}
    check_case(MIXED, heads_of(pair, 4, 2), **options)


@other_head_dims
@pytest.mark.parametrize("length", [1, 31, 33, 65, 4096])
def test_lengths_of_one_request(length: int, pair: tuple[int, int]) -> None:
    check_case(make_case([], [(-1, length)]), heads_of(pair, 4, 2))


@other_head_dims
def test_long_rows_are_merged(pair: tuple[int, int]) -> None:
    heads = heads_of(pair, 4, 2)
    check_case(LONG, heads, **SPLIT_FINELY)
    check_case(LONG, heads, sinks=make_sinks(heads), **SPLIT_FINELY)


@other_head_dims
def test_logit_cap(pair: tuple[int, int]) -> None:
    check_case(MIXED, heads_of(pair, 4, 2), logit_cap=30.0)


@other_head_dims
def test_queries_and_caches_may_be_slices(pair: tuple[int, int]) -> None:
    """The pools' rows may lie apart, and what lies between them is never used."""
    heads = heads_of(pair, 4, 2)
    tensors, step = planned(MIXED, heads)
    expected = run(step, tensors)
    for name in ("q", "k_cache", "v_cache"):
        rows = getattr(tensors, name)
        wide = rows.new_full((len(rows), rows.shape[1] + 2, rows.shape[2]), torch.nan)
        wide[:, 1:-1] = rows
        setattr(tensors, name, wide[:, 1:-1])
    for result, like in zip(run(step, tensors), expected, strict=True):
        assert torch.equal(result, like)


# --- sinks ---


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", [1, 4, 8, 16])
@pytest.mark.parametrize("sink_dtype", [torch.float32, BF16, FP16])
def test_sinks(sink_dtype: torch.dtype, group_size: int, head_dim: int) -> None:
    heads = Heads(3 * group_size, 3, head_dim, FP16)
    check_case(MIXED, heads, sinks=make_sinks(heads, sink_dtype))
    check_case(LONG, heads, sinks=make_sinks(heads, sink_dtype), **SPLIT_FINELY)


@pytest.mark.parametrize("sink", [-math.inf, -60.0, 60.0])
def test_sinks_of_any_magnitude(sink: float) -> None:
    heads = Heads(8, 2)
    sinks = torch.full((8,), sink, device="cuda")
    for case, options in ((MIXED, {}), (LONG, SPLIT_FINELY)):
        check_case(case, heads, sinks=sinks, **options)


def test_a_nan_sink_is_not_hidden() -> None:
    heads = Heads(8, 2)
    tensors, step = planned(MIXED, heads)
    sinks = make_sinks(heads)
    sinks[3] = torch.nan
    out, lse = run(step, tensors, sinks=sinks)
    with_kv = tensors.seq_lens > 0
    assert out[with_kv][:, 3].isnan().all()
    assert lse[with_kv][:, 3].isnan().all()
    assert not out[:, [0, 1, 2, 4, 5, 6, 7]].isnan().any()


def test_sinks_beside_a_soft_cap() -> None:
    heads = Heads(8, 2)
    check_case(MIXED, heads, sinks=make_sinks(heads), logit_cap=30.0)


def test_padding_rows_with_sinks_are_zero() -> None:
    heads = Heads(8, 2)
    case, sinks = make_case([], [(-1, 0)] * 5), make_sinks(heads)
    tensors, step = planned(case, heads)
    out, lse = run(step, tensors, sinks=sinks)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks.expand_as(lse))


def test_a_graph_has_the_sinks_of_each_layer_and_sees_them_change() -> None:
    heads = Heads(8, 2, 64)
    tensors, step = planned(MIXED, heads)
    sinks = [make_sinks(heads, BF16), make_sinks(heads).flip(0).contiguous(), None]
    results = [run(step, tensors, sinks=each) for each in sinks]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (out, lse), each in zip(results, sinks, strict=True):
            step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse, sinks=each)
    for _ in range(3):
        graph.replay()
        for (out, lse), each in zip(results, sinks, strict=True):
            check(out, lse, tensors, sinks=each)
        for each in sinks[:2]:
            each.add_(1)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        ((8, torch.float32, "cpu"), "sinks must be on cuda:0, got cpu"),
        ((7, torch.float32, "cuda"), r"sinks must have shape \[8\], got \[7\]"),
        ((8, torch.float64, "cuda"), "sinks must be one of .*, got torch.float64"),
    ],
)
def test_bad_sinks(sinks: tuple[int, torch.dtype, str], message: str) -> None:
    tensors = Tensors.make(MIXED, Heads(8, 2))
    attention = PackAttention(8, 2, 128, dtype=BF16, device="cuda")
    attention.plan(MIXED.batch(), **tensors.index)
    count, dtype, device = sinks
    each = torch.zeros(count, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=message):
        attention.run(tensors.q, tensors.k_cache, tensors.v_cache, sinks=each)


# --- both ---


@all_head_dims
def test_pack_attention(pair: tuple[int, int]) -> None:
    heads = heads_of(pair, 4, 2)
    tensors, sinks = Tensors.make(MIXED, heads), make_sinks(heads, BF16)
    attention = PackAttention(8, 2, pair[0], v_head_dim=pair[1], dtype=BF16, device="cuda")
    assert attention.executor == "cuda"
    attention.plan(MIXED.batch(), **tensors.index)
    caches = tensors.k_cache, tensors.v_cache
    out, lse = attention.run(tensors.q, *caches, sinks=sinks, return_lse=True)
    check(out, lse, tensors, sinks=sinks)


@settings(many, max_examples=100, database=None)
@given(
    case=forest_cases(max_requests=20),
    pair=st.sampled_from(GQA_HEAD_DIMS),
    geometry=st.sampled_from([(1, 1), (2, 2), (16, 1), (5, 1)]),
    with_sinks=st.booleans(),
    num_workers=st.sampled_from([1, 33, 132]),
)
def test_random_forests(
    case: ForestCase,
    pair: tuple[int, int],
    geometry: tuple[int, int],
    with_sinks: bool,
    num_workers: int,
) -> None:
    heads = Heads(*geometry, pair[0], BF16, pair[1])
    sinks = make_sinks(heads) if with_sinks else None
    check_case(case, heads, sinks=sinks, num_workers=num_workers)
