"""The CUDA kernels give the same bits in every step, and graphs read current plans and lengths."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from pack_decode_cases import (
    BF16,
    MIXED,
    Heads,
    Tensors,
    captured,
    check,
    planned,
    planned_step,
    run,
)
from sample_forests import ForestCase, make_case

from sglang_pat import PackAttention

pytestmark = pytest.mark.usefixtures("kernel_body")


@pytest.mark.parametrize(
    ("case", "num_workers"),
    [
        (make_case([(-1, 700)], [(0, 1900 + 31 * r) for r in range(48)]), 4),
        (make_case([], [(-1, 200)] * 48), 8),
    ],
    ids=["with merges", "without"],
)
def test_more_tickets_than_ctas(case: ForestCase, num_workers: int) -> None:
    """CTAs take tickets from a counter, which every step leaves at 0."""
    heads = Heads(64, 64, 64)
    tensors, step = Tensors.make(case, heads), planned_step(heads, num_workers=num_workers)
    plan = step.write(case.batch(), **tensors.index)
    assert plan.header.num_tickets * heads.num_kv_heads > step.executor.kernels.num_ctas
    assert (plan.header.num_merges > 0) == (num_workers == 4)
    first = run(step, tensors)
    check(*first, tensors)
    for _ in range(20):
        out, lse = run(step, tensors)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
        assert not step.executor.buffers.counters[1:].any()


@pytest.mark.parametrize(
    "case",
    [MIXED, make_case([], [(-1, 90)] * 5), make_case([], [(-1, 500)] * 132)],
    ids=["with merges", "without", "without, on all SMs"],
)
@pytest.mark.parametrize("heads", [Heads(8, 2), Heads(8, 2, 512)], ids=["128", "512"])
def test_a_layer_reads_what_the_layer_before_has_written(case: ForestCase, heads: Heads) -> None:
    """Layers that overlap have the same bits as layers that wait for the device.

    Each kernel starts before the kernel in front of it ends. A layer's queries are the output of
    the layer before, without a kernel in between.
    """
    tensors, step = planned(case, heads)
    outputs = tensors.q.new_empty((21, *tensors.q.shape))

    def layers(*, wait: bool) -> torch.Tensor:
        outputs.fill_(torch.nan)
        outputs[0] = tensors.q
        for before, after in pairwise(outputs):
            step.decode(before, tensors.k_cache, tensors.v_cache, after)
            if wait:
                torch.cuda.synchronize()
        return outputs

    expected = layers(wait=True).clone()
    assert not expected.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(wait=False)
    for _ in range(10):
        assert torch.equal(layers(wait=False), expected)
        outputs.fill_(torch.nan)
        graph.replay()
        assert torch.equal(outputs, expected)


@pytest.mark.parametrize("heads", [Heads(8, 2), Heads(8, 2, 512)], ids=["128", "512"])
def test_graph_replay_follows_plans_and_lengths(heads: Heads) -> None:
    """A graph is captured once, then replayed with other forests, other lengths and grown tails."""
    num_requests, grown_by = 24, 40
    cases = [
        make_case([(-1, 200)], [(0, 17)] * num_requests, spare_tokens=grown_by),
        make_case(
            [(-1, 90), (0, 300), (0, 65)],
            [(1, 50)] * 10 + [(2, 3)] * 13 + [(-1, 400)],
            spare_tokens=grown_by,
            seed=1,
        ),
        make_case(
            [], [(-1, 1 + 37 * i) for i in range(num_requests)], spare_tokens=grown_by, seed=2
        ),
        make_case([(-1, 64)], [(0, 1)] * 12 + [(-1, 0)] * 12, spare_tokens=grown_by, seed=3),
    ]

    # The cases have their final lengths, so that the slots of grown tokens exist from the start.
    grown_cases = [
        dataclasses.replace(case, seq_lens=case.seq_lens + grown_by * (case.seq_lens > 0))
        for case in cases
    ]
    tensors = [Tensors.make(case, heads) for case in grown_cases]
    rows = max(len(t.req_to_token) for t in tensors)
    width = max(t.req_to_token.shape[1] for t in tensors)
    slots = max(len(t.k_cache) for t in tensors)
    static = Tensors(
        torch.empty_like(tensors[0].q),
        torch.empty(slots, 2, heads.head_dim, device="cuda", dtype=BF16),
        torch.empty(slots, 2, heads.head_dim, device="cuda", dtype=BF16),
        torch.zeros(rows, width, device="cuda", dtype=torch.int32),
        torch.empty_like(tensors[0].req_pool_indices),
        torch.empty_like(tensors[0].seq_lens),
    )
    step = planned_step(heads)

    def load(index: int, seq_lens: np.ndarray) -> None:
        source = tensors[index]
        for field in ("q", "req_pool_indices"):
            getattr(static, field).copy_(getattr(source, field))
        static.k_cache[: len(source.k_cache)].copy_(source.k_cache)
        static.v_cache[: len(source.v_cache)].copy_(source.v_cache)
        table = source.req_to_token
        static.req_to_token[: table.shape[0], : table.shape[1]].copy_(table)
        static.seq_lens.copy_(torch.from_numpy(seq_lens))

    def plan(index: int) -> None:
        batch = cases[index].batch()
        step.write(batch, **static.index)

    load(0, cases[0].seq_lens)
    plan(0)
    run(step, static)
    torch.cuda.synchronize()
    graph, out, lse = captured(step, static)

    for index in (0, 1, 2, 3, 1, 0):
        for growth in (0, 1, grown_by):
            lens = cases[index].seq_lens
            lens = lens + growth * (lens > 0)
            load(index, lens.astype(np.int32))
            if growth == 0:
                plan(index)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            graph.replay()
            check(out, lse, static)
            replayed = out.clone()
            graph.replay()
            assert torch.equal(replayed, out)


@pytest.mark.parametrize("max_requests", [None, 8])
def test_plans_under_way_to_a_slow_device_do_not_overwrite_each_other(
    max_requests: int | None,
) -> None:
    """With max_requests all plans use the same buffers; without it, larger plans get new ones."""
    heads = Heads(8, 2)
    cases = [make_case([(-1, 100 * n)], [(0, 10 * n)] * n, seed=n) for n in range(1, 9)]
    tensors = [Tensors.make(case, heads) for case in cases]
    attention = PackAttention(
        8, 2, heads.head_dim, dtype=heads.dtype, device="cuda", max_requests=max_requests
    )
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # clock cycles
    results = []
    for case, each in zip(cases, tensors, strict=True):
        attention.plan(case.batch(), **each.index)
        results.append(attention.run(each.q, each.k_cache, each.v_cache, return_lse=True))
    for result, each in zip(results, tensors, strict=True):
        check(*result, each)
