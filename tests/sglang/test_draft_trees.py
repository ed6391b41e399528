"""Trees of drafts: what each draft token reads of its branch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "support" / "draft_tree_cases.py"


@pytest.mark.nightly
def test_a_kernel_merges_trees_as_torch_does() -> None:
    """Run by Triton's interpreter, in a process of its own: it is chosen on import."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(CASES)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "agree: 8"
