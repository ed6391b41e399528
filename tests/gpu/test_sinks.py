"""Attention sinks of every head_dim are compared with float64."""

from __future__ import annotations

import math

import pytest
import torch
from pack_decode_cases import (
    BF16,
    FP16,
    LONG,
    MIXED,
    Heads,
    Tensors,
    all_head_dims,
    check,
    check_case,
    has_body,
    make_sinks,
    planned,
    run,
)
from sample_forests import make_case

from sglang_pat import PackAttention

pytestmark = pytest.mark.usefixtures("kernel_body")

SPLIT_FINELY = {"num_workers": 264, "min_item_tokens": 64}


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


@all_head_dims
def test_pack_attention(pair: tuple[int, int]) -> None:
    heads = Heads(8, 2, pair[0], BF16, pair[1])
    if not has_body(heads):
        pytest.skip(f"has no such kernels: {heads}")
    tensors, sinks = Tensors.make(MIXED, heads), make_sinks(heads, BF16)
    attention = PackAttention(8, 2, pair[0], v_head_dim=pair[1], dtype=BF16, device="cuda")
    assert attention.executor == "cuda"
    attention.plan(MIXED.batch(), **tensors.index)
    caches = tensors.k_cache, tensors.v_cache
    out, lse = attention.run(tensors.q, *caches, sinks=sinks, return_lse=True)
    check(out, lse, tensors, sinks=sinks)
