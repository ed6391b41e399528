"""Every variant of the kernels compiles without a GPU, and none spills on Hopper."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from sglang_pat.executors.jit import KernelBuildError, KernelConfig, Toolchain, build

# Kept between runs: the folder's names contain a hash of the sources.
CACHE = Path(__file__).parents[2] / "build" / "kernels"


def toolchain_problem() -> str | None:
    try:
        Toolchain.find()
    except KernelBuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None or toolchain_problem() is not None,
    reason=f"needs nvcc: {toolchain_problem()}",
)


@pytest.mark.parametrize("arch", [(8, 0), (9, 0)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiles(dtype: torch.dtype, head_dim: int, arch: tuple[int, int]) -> None:
    library = build(KernelConfig(dtype, head_dim, arch), cache=CACHE)
    report = (library.parent / "compiler_report.txt").read_text()
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(spills) == len(registers) == 4, "pack_decode twice, merge_partials, gather_slots"
    assert max(registers) <= 168, "two CTAs per SM"
    # 128 columns on mma.sync are at the limit; what spills lies outside of the loop over KV.
    allowed = 8 if arch == (8, 0) and head_dim == 128 else 0
    assert max(spills) <= allowed, report
    # What ptxas says where it had to repair the use of wgmma, or runs it one by one.
    assert "C75" not in report, report


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_compiles_the_bodies_of_other_architectures(head_dim: int) -> None:
    config = KernelConfig(torch.float16, head_dim, (9, 0), force_mma_sync=True)
    report = (build(config, cache=CACHE).parent / "compiler_report.txt").read_text()
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", report)) <= 168
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", report)) <= 16, report


def test_libraries_hide_their_symbols() -> None:
    """Two configs in one process would otherwise call each other's launchers."""
    library = build(KernelConfig(torch.bfloat16, 128, (9, 0)), cache=CACHE)
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "launch_pack_decode" not in exported
