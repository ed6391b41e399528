"""Producers of the kernels put keys, values and queries where the consumers look."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sglang_pat.executors.jit import source_folder
from sglang_pat.support import HEAD_DIMS

CHECK = Path(__file__).parents[1] / "support" / "shared_layout.cpp"


def test_copies_and_matrix_instructions_mean_the_same_bytes(tmp_path: Path) -> None:
    """Every element of a stage and of the query tiles, for every pair of head_dims."""
    pairs = " ".join(f"PAT_PAIR({key}, {value})" for key, value in HEAD_DIMS)
    program = tmp_path / "shared_layout"
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", f"-I{source_folder()}"]
    subprocess.run(["c++", *flags, f"-DPAT_PAIRS={pairs}", CHECK, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.split() == [f"{key}/{value}" for key, value in HEAD_DIMS]
