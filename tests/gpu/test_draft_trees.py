"""Trees of drafts on a GPU: one kernel computes what torch does.

python -m pytest -m cuda tests/gpu/test_draft_trees.py
"""

from __future__ import annotations

import pytest
import torch
from draft_tree_cases import CASES, TreeCase, assert_kernel_agrees

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_merges_trees_as_torch_does(case: TreeCase, dtype: torch.dtype) -> None:
    assert_kernel_agrees(case, dtype, "cuda")
