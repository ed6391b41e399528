"""Trees of drafts: each draft token reads the tokens of its branch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_tree_cases import CASES, TreeCase, Trees, assert_exact, make_trees

from sglang_pat.executors import draft_attention
from sglang_pat.sglang.speculative.tree_attention import BranchKv, TreeKv, merge_drafts
from sglang_pat.sglang.step.step_type import ExecutionMode

SCRIPT = Path(__file__).parents[1] / "support" / "draft_tree_cases.py"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_merges_trees(case: TreeCase, dtype: torch.dtype) -> None:
    trees = make_trees(case, dtype)
    assert_exact(merged(trees), trees)


@pytest.mark.parametrize(
    ("kv_dtype", "capability", "by_kernel"),
    [
        (torch.bfloat16, (8, 0), True),
        (torch.float8_e5m2, (8, 0), True),
        (torch.float8_e4m3fn, (8, 6), False),
        (torch.float8_e4m3fn, (8, 9), True),
    ],
)
def test_a_kernel_merges_trees_where_it_reads_the_caches(
    kv_dtype: torch.dtype,
    capability: tuple[int, int],
    by_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(draft_attention, "merge_drafts", lambda *each: given.append(each))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    trees = make_trees(CASES[1]._replace(kv_dtype=kv_dtype), torch.bfloat16)
    out = merged(trees)
    assert len(given) == by_kernel
    if by_kernel:
        biases, scales = given[0][3], given[0][-1]
        assert torch.equal(biases, trees.biases)
        assert scales == trees.scales
    else:
        assert_exact(out, trees)


def test_rows_that_are_no_trees_are_an_error() -> None:
    trees = make_trees(CASES[1], torch.bfloat16)
    with pytest.raises(ValueError, match="q must have 4 rows for each of 3 groups, got 11"):
        draft_attention.merge_drafts(
            trees.q[1:], trees.caches, trees.slots, trees.biases, trees.before, trees.scaling
        )
    with pytest.raises(ValueError, match="slots must be 4 for each of 3 groups, got 11"):
        draft_attention.merge_drafts(
            trees.q, trees.caches, trees.slots[1:], trees.biases, trees.before, trees.scaling
        )


@pytest.mark.parametrize("name", ["slots", "biases", "out", "lse", "q", "k_cache", "v_cache"])
def test_tensors_that_the_kernel_would_read_otherwise_are_an_error(name: str) -> None:
    trees = make_trees(CASES[1], torch.bfloat16)
    given = {"slots": trees.slots, "biases": trees.biases, "q": trees.q}
    given |= zip(("out", "lse", "k_cache", "v_cache"), (*trees.before, *trees.caches), strict=True)
    given[name] = given[name].repeat_interleave(2, dim=-1)[..., ::2]
    rule = "have dense columns" if name in ("q", "k_cache", "v_cache") else "be contiguous"
    with pytest.raises(ValueError, match=rf"{name} must {rule}, got strides \(.*2,?\)"):
        draft_attention.merge_drafts(
            given["q"],
            (given["k_cache"], given["v_cache"]),
            given["slots"],
            given["biases"],
            (given["out"], given["lse"]),
            trees.scaling,
        )


def test_the_plan_has_the_root() -> None:
    """Each row thus has a token that it reads live, and reads no token twice."""
    masks = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, -1, -1)
    trees = TreeKv(3, torch.device("cpu"))
    batch = SimpleNamespace(
        batch_size=3,
        spec_info=SimpleNamespace(custom_mask=masks.flatten()),
        seq_lens=torch.full((2,), 9),
    )
    trees.update(batch, 2, ExecutionMode.EAGER)
    expected = masks.clone()
    expected[:, :, 0] = False
    assert torch.equal(trees._biases[:2].exp().bool(), expected)
    assert trees._biases[2, :, 0].eq(-torch.inf).all()  # also in padding


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_kernel_gets_the_slots_of_a_rows_own_branch(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = BranchKv(3, 2, torch.device("cpu"))
    branches.set_slots(torch.arange(100, 124), num_rows=6)  # 4 drafts each
    branches.go_to(step)
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(draft_attention, "merge_drafts", lambda *each: given.append(each))
    monkeypatch.setattr(draft_attention, "reads", lambda *each: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    q, caches, _, _, before, *_ = make_trees(CASES[1], torch.bfloat16)
    layer: Any = SimpleNamespace(scaling=1.0, logit_cap=0.0)
    merge_drafts(q, caches, *branches.keys(None, 6), layer, before)
    _, _, slots, biases, *_ = given[0]
    assert slots.is_contiguous()
    assert slots.view(6, -1).tolist() == [
        [100 + 4 * row + read for read in range(step + 1)] for row in range(6)
    ]
    assert biases.shape == (6, 1, step + 1)
    assert biases.eq(0).all()


def merged(trees: Trees) -> torch.Tensor:
    q, caches, slots, _, before, scaling, logit_cap, scales = there = trees.to("cpu")
    layer: Any = SimpleNamespace(scaling=scaling, logit_cap=logit_cap)
    return merge_drafts(q, caches, slots, there.biases, layer, before, scales)


def test_the_heads_of_a_row_lie_side_by_side() -> None:
    """The test needs one request, with as many KV heads as query heads."""
    for dtype in (torch.float32, torch.bfloat16):
        trees = make_trees(TreeCase(4, 4, 64, 64, 3), dtype)
        out, lse = trees.before
        alone = trees._replace(
            q=trees.q[:3], slots=trees.slots[:3], masks=trees.masks[:1], before=(out[:3], lse[:3])
        )
        found = merged(alone)
        assert found.is_contiguous()
        assert_exact(found, alone)


@pytest.mark.nightly
def test_a_kernel_merges_trees() -> None:
    """Triton's interpreter must be chosen on import, so the test has its own process."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == f"exact: {2 * len(CASES)}"
