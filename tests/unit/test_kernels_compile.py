"""The kernels compile without a GPU, within their registers.

By default one variant per family of architectures is compiled: wgmma (Hopper) and mma.sync. The
other variants are marked `nightly`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sglang_pat.executors.jit import Compiler, KernelBuildError, KernelConfig, build

# Kept between runs: the entries' names contain a hash of the sources.
CACHE = Path(__file__).parents[2] / "build" / "kernels"
HOPPER = KernelConfig(torch.bfloat16, 128, (9, 0))
AMPERE = KernelConfig(torch.bfloat16, 128, (8, 0))
ALL = [
    KernelConfig(dtype, head_dim, arch)
    for dtype in (torch.float16, torch.bfloat16)
    for head_dim in (64, 128)
    for arch in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
]


def compiler_problem() -> str | None:
    try:
        Compiler.find()
    except KernelBuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(
    compiler_problem() is not None, reason=f"needs NVRTC: {compiler_problem()}"
)


def report_of(image: Path) -> str:
    """What the compiler said when it made an image."""
    return (image.parent / "compiler_report.txt").read_text()


def check_resources(report: str, config: KernelConfig) -> None:
    names = re.findall(r"Compiling entry function '(\w+)_kernel'", report)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert sorted(names) == [
        "gather_slots",
        "merge_partials",
        "pack_decode",
        "pack_decode_soft_cap",
    ]
    assert max(registers) <= 168, "two CTAs per SM"
    spills_of = dict(zip(names, spills, strict=True))
    merge_spills = spills_of.pop("merge_partials")
    # Outside of the loops: 128 columns on mma.sync are at the limit of registers, and so is a merge
    # of 16 warps.
    assert merge_spills <= (0 if config.arch == (9, 0) else 40), report
    allowed = 0 if config.arch == (9, 0) or config.head_dim == 64 else 8
    assert max(spills_of.values()) <= allowed, report
    # C75xx: ptxas had to repair the use of wgmma, or makes one wait for the other.
    assert "C75" not in report, report


@pytest.mark.nightly
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_compiles_the_bodies_of_other_architectures(head_dim: int) -> None:
    config = KernelConfig(torch.float16, head_dim, (9, 0), force_mma_sync=True)
    report = (build(config, cache=CACHE).parent / "compiler_report.txt").read_text()
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", report)) <= 168
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", report)) <= 16, report


@pytest.mark.parametrize("config", [HOPPER, AMPERE], ids=lambda config: config.name)
def test_one_variant_of_each_family(config: KernelConfig) -> None:
    check_resources(report_of(build(config, cache=CACHE)), config)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_every_variant(config: KernelConfig) -> None:
    check_resources(report_of(build(config, cache=CACHE)), config)
