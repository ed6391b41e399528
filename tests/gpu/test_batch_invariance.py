"""Batch-invariant mode on the GPU: a request's bits do not depend on its forest or batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pack_decode_cases import BF16, FP16, MIXED, Heads, check_case, config_of
from sample_forests import make_case

pytestmark = pytest.mark.usefixtures("kernel_body")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "heads",
    [
        Heads(8, 2),
        Heads(5, 1),
        Heads(32, 8),
        Heads(16, 2, 64),
        Heads(16, 16, 64, FP16),
        Heads(8, 2, 128, FP16),
        Heads(16, 1, 256, BF16),
        Heads(16, 2, 512),
        Heads(8, 2, kv_dtype=torch.float8_e4m3fn),
        Heads(5, 1, 64, FP16, kv_dtype=torch.float8_e5m2),
    ],
    ids=lambda h: f"{h.num_qo_heads}-{h.num_kv_heads}-{h.head_dim}-{h.dtype}-{h.kv_dtype}",
)
def test_a_request_has_the_same_bits_in_every_batch(heads: Heads, sinks: bool) -> None:
    from kernel.invariance import World, random_forest

    config = config_of(heads)
    for seed in range(4):
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        qo_kv = (heads.num_qo_heads, heads.num_kv_heads)
        world = World(config, qo_kv, random_forest(random), random, sinks=sinks)
        batches = list(world.differing(50))
        assert len(batches) == 50
        assert [other for _, other in batches] == [0] * 50


@pytest.mark.parametrize("group_size", [1, 4, 7, 16])
def test_results_are_right(group_size: int) -> None:
    heads = Heads(2 * group_size, 2)
    check_case(MIXED, heads, batch_invariant=True)
    long = make_case([(-1, 9000)], [(0, 300), (0, 0), (-1, 33_000), (-1, 0)])
    check_case(long, heads, batch_invariant=True)


def test_the_comparison_sees_other_bits() -> None:
    """Without the mode, another split changes bits, so the tests above can fail."""
    from pack_decode_cases import Tensors, planned_step, run

    case = make_case([(-1, 3000)], [(0, 300)] * 3)
    tensors = Tensors.make(case, Heads(8, 2))
    results = []
    for workers in (1, 33):
        step = planned_step(Heads(8, 2), num_workers=workers)
        step.write(case.batch(), **tensors.index)
        results.append(run(step, tensors)[0])
    assert not torch.equal(*results)
