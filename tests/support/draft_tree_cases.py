"""Trees of drafts, computed by the kernel and by torch.

    TRITON_INTERPRET=1 python tests/support/draft_tree_cases.py

runs the kernel on a CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

from sglang_pat.sglang.draft_trees import DraftTrees


class TreeCase(NamedTuple):
    """drafts: of each request. logit_cap: 0 for none."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    drafts: int
    logit_cap: float


CASES = [
    TreeCase(8, 2, 64, 64, 4, 0.0),
    TreeCase(32, 8, 128, 128, 4, 0.0),
    TreeCase(5, 5, 80, 80, 3, 20.0),
    TreeCase(12, 4, 192, 128, 7, 30.0),
]
REQUESTS, SLOTS = 3, 60


def assert_kernel_agrees(case: TreeCase, dtype: torch.dtype, device: str) -> None:
    """Also of rows that had nothing before, and of padding, whose slots are one."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    count = case.drafts
    masks = torch.rand(REQUESTS, count, count, generator=generator) < 0.5
    masks = masks.tril() | torch.eye(count, dtype=torch.bool)
    rows = (REQUESTS + 1) * count
    view = SimpleNamespace(
        batch_size=REQUESTS + 1,
        num_padding=1,
        spec_info=SimpleNamespace(custom_mask=masks.flatten().to(device)),
        seq_lens=torch.full((REQUESTS + 1,), 9, device=device),
    )
    q = some(rows, case.heads + 3, case.head_dim).to(device, dtype)[:, : case.heads]  # of a slice
    keys = some(SLOTS, case.kv_heads, case.head_dim).to(device, dtype)
    values = some(SLOTS, case.kv_heads, case.v_head_dim).to(device, dtype)
    slots = torch.randperm(SLOTS, generator=generator)[:rows].to(device)
    slots[-count:] = 0
    out, lse = some(rows, case.heads, case.v_head_dim), 3 * some(rows, case.heads)
    out[1::3], lse[1::3] = 0, float("-inf")
    before = (out.to(device, dtype), lse.to(device))
    layer = SimpleNamespace(scaling=0.2, logit_cap=case.logit_cap)
    trees = DraftTrees(count, torch.device(device), reserved=REQUESTS + 2)
    trees.take(view, in_capture=False)
    expected = trees.merge(q, keys[slots], values[slots], layer, before)
    found = trees.merge_stored(q, (keys, values), slots, layer, before)
    assert found.isfinite().all()
    # A step of the dtype: both round numbers that are float32 before.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    for each in CASES:
        for kind in (torch.float32, torch.bfloat16):
            assert_kernel_agrees(each, kind, "cpu")
    print("agree:", 2 * len(CASES))
