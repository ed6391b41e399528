"""The kernels compile without a GPU, within their registers, and export no symbols.

By default one variant per family of architectures is compiled: wgmma (Hopper) and mma.sync, and of
other head_dims those that need the most registers. The other variants are marked `nightly`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from sglang_pat.executors import jit
from sglang_pat.executors.jit import KernelBuildError, KernelConfig, Toolchain, build, report_of
from sglang_pat.support import HEAD_DIMS

# Kept between runs: the entries' names contain a hash of the sources.
CACHE = Path(__file__).parents[2] / "build" / "kernels"
HOPPER = KernelConfig(torch.bfloat16, 128, (9, 0))
AMPERE = KernelConfig(torch.bfloat16, 128, (8, 0))
ALL = [
    KernelConfig(dtype, head_dim, arch, v_head_dim)
    for dtype in (torch.float16, torch.bfloat16)
    for head_dim, v_head_dim in HEAD_DIMS
    for arch in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
]


def toolchain_problem() -> str | None:
    try:
        Toolchain.find()
    except KernelBuildError as error:
        return str(error)
    return None


pytestmark = pytest.mark.skipif(
    toolchain_problem() is not None, reason=f"needs nvcc: {toolchain_problem()}"
)


def check_resources(report: str, config: KernelConfig, num_kernels: int) -> None:
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(spills) == len(registers) == num_kernels, report
    wgmma = config.arch == (9, 0) and not config.force_mma_sync
    two_ctas = config.head_dim + config.v_head_dim <= (320 if wgmma else 256)
    assert max(registers) <= (168 if two_ctas else 255), "CTAs per SM"
    # 128 and 256 columns on mma.sync are at the limit; the loop over KV is free of spills.
    at_the_limit = {128: 16 if config.force_mma_sync else 8, 256: 16}
    allowed = 0 if wgmma else at_the_limit.get(config.head_dim, 0)
    assert max(spills) <= allowed, report
    # C75xx: ptxas had to repair the use of wgmma, or makes one wait for the other.
    assert "C75" not in report, report


def compile_one(source: str, config: KernelConfig, work: Path) -> str:
    """What the compiler says of one source; no torch binding and no link."""
    compiles, _ = jit._commands(config, Toolchain.find(), jit.source_folder(), work)
    (command,) = (each for each in compiles if any(word.endswith(f"/{source}") for word in each))
    return jit._run(command)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", HEAD_DIMS)
def test_hopper_compiles_the_bodies_of_other_architectures(pair: tuple[int, int]) -> None:
    config = KernelConfig(torch.float16, pair[0], (9, 0), pair[1], force_mma_sync=True)
    check_resources(report_of(build(config, cache=CACHE)), config, num_kernels=5)


@pytest.fixture(scope="module")
def hopper() -> Path:
    return build(HOPPER, cache=CACHE)


def test_hopper(hopper: Path) -> None:
    """All kernels, the torch binding, and the link."""
    check_resources(report_of(hopper), HOPPER, num_kernels=5)


@pytest.mark.parametrize(
    "config",
    [
        AMPERE,
        KernelConfig(torch.bfloat16, 80, (8, 0)),
        KernelConfig(torch.bfloat16, 192, (9, 0), 128),
        KernelConfig(torch.bfloat16, 256, (9, 0)),
    ],
    ids=lambda config: config.name,
)
def test_the_kernel_without_soft_cap(config: KernelConfig, tmp_path: Path) -> None:
    """The binding is that of the variant above."""
    report = compile_one("pack_decode/launch_pack_decode.cu", config, tmp_path)
    check_resources(report, config, num_kernels=1)


@pytest.mark.parametrize(
    "config",
    [KernelConfig(torch.bfloat16, 80, (8, 0)), KernelConfig(torch.bfloat16, 256, (9, 0))],
    ids=lambda config: config.name,
)
def test_the_kernels_around_it(config: KernelConfig, tmp_path: Path) -> None:
    check_resources(compile_one("launch_helpers.cu", config, tmp_path), config, num_kernels=3)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_every_variant(config: KernelConfig) -> None:
    report = report_of(build(config, cache=CACHE))
    check_resources(report, config, num_kernels=5)  # pack_decode and merge twice, gather


def test_libraries_hide_their_symbols(hopper: Path) -> None:
    """Two variants in one process would otherwise call each other's launchers."""
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(hopper)], capture_output=True, text=True, check=True
    ).stdout
    assert "launch_pack_decode" not in exported
