"""Trees of drafts with random masks, and their attention in float64.

    TRITON_INTERPRET=1 python tests/support/draft_tree_cases.py

compares the kernel with that result, on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TreeCase(NamedTuple):
    """Shapes and options of a call of `merge_drafts()`.

    drafts: rows of a group, and its number of keys unless `keys` is given. logit_cap: 0 for none.
    kv_dtype: None for the queries' type; others have scales, and e5m2 has the scale of K on the
    device. tiled: None lets the kernel choose.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    drafts: int
    logit_cap: float = 0.0
    kv_dtype: torch.dtype | None = None
    keys: int | None = None
    tiled: bool | None = None


CASES = [
    TreeCase(8, 2, 64, 64, 1),
    TreeCase(32, 8, 128, 128, 4),
    TreeCase(5, 5, 80, 80, 3, logit_cap=20.0),
    TreeCase(12, 4, 192, 128, 7, logit_cap=0.5),
    TreeCase(14, 2, 128, 128, 6, kv_dtype=torch.float8_e4m3fn),
    TreeCase(16, 1, 256, 256, 16, kv_dtype=torch.float8_e5m2),
    TreeCase(16, 2, 512, 512, 4),
    TreeCase(16, 2, 512, 512, 12),
    # Branches of a draft model: each row has its own keys.
    TreeCase(8, 2, 64, 64, 1, keys=3),
    TreeCase(14, 2, 128, 128, 4, keys=7),
    # Large trees of several tiles of rows and of keys.
    TreeCase(32, 8, 128, 128, 64),
    TreeCase(16, 4, 128, 128, 33, logit_cap=0.5),
    TreeCase(6, 2, 80, 80, 70, kv_dtype=torch.float8_e5m2),
    TreeCase(8, 1, 192, 128, 20, kv_dtype=torch.float8_e4m3fn),
    # Shapes for which the kernel would choose the other body.
    TreeCase(32, 8, 128, 128, 8, tiled=True),
    TreeCase(12, 4, 64, 64, 3, tiled=True),
    TreeCase(8, 2, 64, 64, 17, tiled=False),
]
REQUESTS, SLOTS = 3, 220
# One rounding step of the dtype, plus the effect of another order of sums.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Trees(NamedTuple):
    """Arguments of `merge_drafts()`, with the masks from which `biases` are made."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    masks: torch.Tensor
    before: tuple[torch.Tensor, torch.Tensor]
    scaling: float
    logit_cap: float
    scales: tuple[float | torch.Tensor, float]

    @property
    def biases(self) -> torch.Tensor:
        return self.masks.float().log()

    def to(self, device: str) -> Trees:
        caches, before = ((a.to(device), b.to(device)) for a, b in (self.caches, self.before))
        return self._replace(
            # Queries are a slice of a layer's fused projection, so their rows are not contiguous.
            q=torch.cat([self.q, self.q], dim=1).to(device)[:, : self.q.shape[1]],
            caches=caches,
            slots=self.slots.to(device),
            masks=self.masks.to(device),
            before=before,
            scales=tuple(
                each.to(device) if isinstance(each, torch.Tensor) else each for each in self.scales
            ),
        )


def make_trees(case: TreeCase, dtype: torch.dtype) -> Trees:
    """Make random trees on the CPU. Some rows have no prefix; the last group is padding."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys = case.keys or case.drafts
    rows = REQUESTS * case.drafts
    masks = torch.rand(REQUESTS, case.drafts, keys, generator=generator) < 0.5
    if case.keys is None:
        masks = masks.tril() | torch.eye(keys, dtype=torch.bool)
    slots = torch.randperm(SLOTS, generator=generator)[: REQUESTS * keys]
    slots[-keys:] = 0
    out, lse = some(rows, case.heads, case.v_head_dim), 3 * some(rows, case.heads)
    out[1::3], lse[1::3] = 0, float("-inf")
    masks[-1, -1] = False  # padding reads no draft token
    if rows > REQUESTS:
        out[-1], lse[-1] = 0, float("-inf")  # and no prefix
    stored = case.kv_dtype or dtype
    k_scale = torch.tensor(0.75) if case.kv_dtype is torch.float8_e5m2 else 0.75
    return Trees(
        q=some(rows, case.heads, case.head_dim).to(dtype),
        caches=(
            some(SLOTS, case.kv_heads, case.head_dim).to(stored),
            some(SLOTS, case.kv_heads, case.v_head_dim).to(stored),
        ),
        slots=slots,
        masks=masks,
        before=(out.to(dtype), lse),
        scaling=0.2,
        logit_cap=case.logit_cap,
        scales=(1.0, 1.0) if case.kv_dtype is None else (k_scale, 1.25),
    )


def exact(trees: Trees) -> torch.Tensor:
    """Return the attention over prefix and drafts in float64. The trees are on the CPU."""
    q, (out, lse) = trees.q.double(), trees.before
    _, rows, keys_each = trees.masks.shape
    result = torch.empty_like(out, dtype=torch.float64)
    for row in range(len(q)):
        group_of_rows, draft = divmod(row, rows)
        own = trees.slots[group_of_rows * keys_each : (group_of_rows + 1) * keys_each]
        read = own[trees.masks[group_of_rows, draft]]
        group = q.shape[1] // trees.caches[0].shape[1]
        keys, values = (
            cache[read].double().repeat_interleave(group, dim=1) * scale
            for cache, scale in zip(trees.caches, trees.scales, strict=True)
        )
        logits = torch.einsum("hd,khd->hk", q[row], keys) * trees.scaling
        if trees.logit_cap:
            logits = trees.logit_cap * torch.tanh(logits / trees.logit_cap)
        weights = torch.cat([lse[row].double()[:, None], logits], dim=1).softmax(dim=1)
        weights = weights.nan_to_num(nan=0.0)  # of rows that read nothing
        result[row] = weights[:, :1] * out[row].double()
        result[row] += torch.einsum("hk,khd->hd", weights[:, 1:], values)
    return result


def assert_exact(found: torch.Tensor, trees: Trees) -> None:
    """Assert that a result is within the tolerance. The trees are on the CPU."""
    tolerance = TOLERANCE[trees.q.dtype]
    torch.testing.assert_close(found.cpu().double(), exact(trees), atol=tolerance, rtol=tolerance)


def assert_kernel_is_exact(case: TreeCase, dtype: torch.dtype, device: str) -> None:
    from sglang_pat.executors.draft_attention import merge_drafts  # needs Triton

    trees = make_trees(case, dtype)
    q, caches, slots, _, before, scaling, logit_cap, scales = there = trees.to(device)
    out = before[0].clone()
    found = merge_drafts(
        q,
        caches,
        slots,
        there.biases,
        (out, before[1]),
        scaling,
        logit_cap,
        scales,
        tiled=case.tiled,
    )
    assert found is out
    assert_exact(found, trees)


if __name__ == "__main__":
    for each in CASES:
        for kind in (torch.float32, torch.float16):
            assert_kernel_is_exact(each, kind, "cpu")
    print("exact:", 2 * len(CASES))
