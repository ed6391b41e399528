"""The kernel for trees of drafts is compared with float64.

python -m pytest -m cuda tests/gpu/test_draft_trees.py
"""

from __future__ import annotations

import pytest
import torch
from draft_tree_cases import CASES, TreeCase, assert_kernel_is_exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_merges_trees(case: TreeCase, dtype: torch.dtype) -> None:
    from sglang_pat.executors.draft_attention import reads

    if not reads(case.kv_dtype or dtype, torch.device("cuda")):
        pytest.skip(f"torch merges trees over {case.kv_dtype} on this GPU")
    assert_kernel_is_exact(case, dtype, "cuda")
