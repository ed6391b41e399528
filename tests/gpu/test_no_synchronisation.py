"""A decode step of PackAttention never waits for the GPU: not to plan, not to copy, not to run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernel.request_forests import Forest
from sglang_pat import DecodeBatch, PackAttention


@pytest.fixture
def every_synchronisation_is_an_error() -> Iterator[None]:
    """Let every synchronisation raise within the block."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("every_synchronisation_is_an_error")
@pytest.mark.parametrize("captured", [True, False], ids=["graph", "eager"])
def test_steps_run_without_synchronisation(captured: bool) -> None:
    """Steps rebuild or reuse plans, and more plans are in flight than there are pinned buffers."""
    tree = Forest.of_tree("1,4,64_512,128,40")
    pool = tree.num_slots()
    heads, kv_heads, dim, steps = 32, 8, 128, 12
    attention = PackAttention(
        heads,
        kv_heads,
        dim,
        dtype=torch.bfloat16,
        device="cuda",
        max_requests=tree.num_requests if captured else None,
        growth_tokens=1,  # a new plan at every other step
    )
    table = tree.token_table("runs", device="cpu").numpy()
    spare = np.arange(tree.num_requests * steps).reshape(tree.num_requests, steps)
    table = np.concatenate((table, spare + pool), axis=1).astype(np.int32)
    req_to_token = torch.from_numpy(table).cuda()
    rows = torch.arange(tree.num_requests, device="cuda")
    seq_lens = torch.from_numpy(tree.seq_lens).long().cuda()
    q = torch.randn(tree.num_requests, heads, dim, device="cuda", dtype=torch.bfloat16)
    caches = torch.randn(2, pool + spare.size, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    first = tree.batch()

    def plan(step: int) -> None:
        batch = DecodeBatch(first.seq_lens + np.int32(step), first.paths, key=tree.name)
        attention.plan(batch, req_to_token=req_to_token, req_pool_indices=rows, seq_lens=seq_lens)

    def decode() -> None:
        attention.run(q, caches[0], caches[1], out=out)

    plan(0)
    decode()
    torch.cuda.synchronize()
    graph = None
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()

    torch.cuda.set_sync_debug_mode("error")
    for step in range(1, steps):
        seq_lens += 1
        plan(step)
        if graph is None:
            decode()
        else:
            graph.replay()
    torch.cuda.set_sync_debug_mode("default")

    assert attention.stats.plans_built == steps // 2
    assert attention.stats.plans_reused > 0
    assert torch.isfinite(out).all()
