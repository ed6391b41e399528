"""A row that changes its request between plan() and run() does not affect other requests.

SGLang does that with stopped requests: such a request is part of the step in flight, but its row is
free as soon as the step is launched.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from sglang_pat import DecodeBatch, PackAttention, PrefixPaths
from sglang_pat.executors.reference import dense_attention, gather_slots

HEADS, KV_HEADS, HEAD_DIM, SLOTS, WIDTH = 8, 2, 64, 6000, 1200
SHARED = 700

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def in_order(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return run


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return `run`, captured in a CUDA graph that is replayed."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> torch.Tensor:
        out.fill_(torch.nan)
        graph.replay()
        return out

    return replay


@pytest.mark.parametrize(
    ("device", "dtype", "as_launched"),
    [
        pytest.param("cpu", torch.float32, in_order, id="torch"),
        pytest.param(
            "cuda", torch.bfloat16, in_order, id="kernels", marks=[pytest.mark.cuda, on_gpu]
        ),
        pytest.param(
            "cuda", torch.bfloat16, captured, id="graph", marks=[pytest.mark.cuda, on_gpu]
        ),
    ],
)
@pytest.mark.parametrize("reused_plan", [False, True])
def test_shared_ranges_survive_the_row_they_were_gathered_from(
    device: str,
    dtype: torch.dtype,
    as_launched: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]],
    reused_plan: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    lens = np.array([SHARED + 300, SHARED + 40, SHARED + 1], dtype=np.int32)
    free = torch.randperm(SLOTS, generator=generator, dtype=torch.int32)
    table = torch.zeros(5, WIDTH, dtype=torch.int32)
    rows = torch.tensor([3, 1, 4])
    for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
        table[row, :SHARED] = free[:SHARED]
        table[row, SHARED : length + 1] = free[SHARED + 400 * row :][: length + 1 - SHARED]
    next_prompt = free[-WIDTH:]  # the slots of the row's next request
    k, v = (torch.randn(SLOTS, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    k[next_prompt.long()] = v[next_prompt.long()] = torch.nan  # not yet computed
    q = torch.randn(3, HEADS, HEAD_DIM, generator=generator).to(device, dtype)
    k, v, rows, table = k.to(device, dtype), v.to(device, dtype), rows.to(device), table.to(device)
    seq_lens = torch.from_numpy(lens).to(device)

    attention = PackAttention(HEADS, KV_HEADS, HEAD_DIM, dtype=dtype, device=device, max_requests=3)
    paths = PrefixPaths.from_lists([[(7, 0, SHARED)]] * 3)
    tensors = {"req_to_token": table, "req_pool_indices": rows, "seq_lens": seq_lens}
    plan = attention.plan(DecodeBatch(lens, paths, key="batch"), **tensors)
    run = as_launched(lambda: attention.run(q, k, v))  # type: ignore[arg-type, return-value]
    if reused_plan:
        lens += 1
        seq_lens += 1
        attention.plan(DecodeBatch(lens, paths, key="batch"), **tensors)
        assert attention.stats.plans_reused == 1
    exact, _ = dense_attention(q, k, v, table, rows, seq_lens)

    (stopped,) = {span[0] for span in plan.gather_spans.tolist()}
    before = gather_slots(plan, table, rows)
    table[rows[stopped]] = next_prompt.to(device)
    assert not torch.equal(gather_slots(plan, table, rows), before)  # live reads would differ
    out = run()
    staying = [request for request in range(3) if request != stopped]
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[staying].double(), exact[staying], rtol=0, atol=bound)
