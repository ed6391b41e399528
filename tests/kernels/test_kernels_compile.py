"""The kernels compile without a GPU, and do not spill registers where that would cost time.

By default one variant per family of architectures is compiled (wgmma on Hopper, mma.sync
elsewhere), and the variants of other head_dims that need the most registers. The others are marked
`nightly`.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch
from cubin import constant

from sglang_pat.executors.jit import Compiler, KernelBuildError, KernelConfig, build, report_of
from sglang_pat.executors.loaded_kernels import LaunchFacts
from sglang_pat.support import GQA_HEAD_DIMS, HEAD_DIMS, WIDE_HEAD_DIMS, has_kernels

# Kept between runs: the entries' names contain a hash of the sources.
CACHE = Path(__file__).parents[2] / "build" / "kernels"
HOPPER = KernelConfig(torch.bfloat16, 128, (9, 0))
AMPERE = KernelConfig(torch.bfloat16, 128, (8, 0))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALL = [
    KernelConfig(dtype, head_dim, arch, v_head_dim, kv_dtype)
    for dtype in (torch.float16, torch.bfloat16)
    for kv_dtype in (None, E4M3, E5M2)
    for head_dim, v_head_dim in HEAD_DIMS
    for arch in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
    if has_kernels(head_dim, v_head_dim, arch, one_byte=kv_dtype is not None)
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


def wgmma_over_bytes(config: KernelConfig) -> bool:
    dims = config.head_dim, config.v_head_dim
    return (
        (config.arch, config.force_mma_sync) == ((9, 0), False)
        and config.kv_dtype is not None
        and dims in ((64, 64), (128, 128))
    )


# KB of shared memory of an SM by architecture; a CTA can use 1 KB less.
SM_SHARED_KB = {
    (8, 0): 164,
    (8, 6): 100,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (11, 0): 228,
    (12, 0): 100,
}
MAX_STAGES, STAGE_TOKENS = 12, 32


def ctas_per_sm(config: KernelConfig, image: bytes) -> int:
    """Return how many CTAs of pack_decode fit into the shared memory of an SM.

    A CTA of latent attention uses all registers of an SM. If only one CTA fits, it uses all of the
    shared memory: the ring has no room for another stage.
    """
    facts = LaunchFacts(*struct.unpack("<8i", constant(image, "launch_facts")))
    shared, sm_bytes = facts.decode_shared_bytes, SM_SHARED_KB[config.arch] * 1024
    ctas = sm_bytes // (shared + 1024)
    assert ctas >= 1
    if config.is_latent:
        return 1
    if ctas == 1:
        columns = -(-config.head_dim // 64) * 64 + -(-config.v_head_dim // 64) * 64
        stage = STAGE_TOKENS * columns * config.cache_dtype.itemsize
        assert shared + stage > sm_bytes - 1024 or shared > MAX_STAGES * stage
    return min(ctas, 2)


def check_resources(config: KernelConfig) -> None:
    path = build(config, cache=CACHE)
    report = report_of(path)
    names = re.findall(r"Compiling entry function '(\w+)_kernel'", report)
    # Spills of the kernels, and of the functions that they call.
    spills = re.findall(r"properties for (\w+)\n.* (\d+) bytes spill stores", report)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert sorted(names) == [
        "fill_rows",
        "gather_slots",
        "merge_partials",
        "merge_partials_sinks",
        "pack_decode",
        *([] if config.is_latent else ["pack_decode_soft_cap"]),
        "write_kv",
    ]
    # With fp8 KV, some head_dims use wgmma, and warpgroups reallocate registers.
    wgmma = config.arch == (9, 0) and not config.force_mma_sync and config.kv_dtype is None
    ctas = ctas_per_sm(config, path.read_bytes())
    assert max(registers) <= {1: 255, 2: 168}[ctas], "CTAs per SM"
    has_room = SM_SHARED_KB[config.arch] > 100
    fits_registers = config.head_dim + config.v_head_dim <= (320 if wgmma else 256)
    assert ctas == (2 if has_room and fits_registers else 1)
    if wgmma_over_bytes(config):
        # Warpgroups reallocate registers: with fewer at the start, some would wait for ever.
        decoding = re.findall(r"'pack_decode\w*'(?:.*\n)+?.*Used (\d+) registers", report)
        assert decoding == ["128", "128"], report
    if config.is_latent or config.head_dim == 512:
        # The 12 warps start with so many registers, and then reallocate them. The 10 warps on
        # mma.sync may use as many at most.
        found = re.findall(r"'pack_decode_kernel'(?:.*\n)+?.*Used (\d+) registers", report)
        assert found == ["168"] if wgmma else int(found[0]) <= 168
    at_the_limit = {
        128: 16 if config.force_mma_sync or config.kv_dtype else 8,
        256: 32,
        576: 16 if config.arch == (8, 0) else 8 if config.force_mma_sync else 0,
    }
    assert len(spills) == report.count("bytes spill stores") >= len(names)
    for name, spilled in spills:
        if name.startswith("merge"):
            # Spills outside of loops are allowed: a CTA has 16 warps, so a thread has 64 registers.
            allowed = 64 if config.arch != (9, 0) else 16 if config.head_dim == 256 else 0
        else:
            # Bytes of spills that are allowed. On mma.sync, 128 and 256 columns reach the register
            # limit, but the loop over KV has no spills. On wgmma, 192/128 reloads one or two words
            # per stage, 256 one word per item; producers of latent attention and of 512 reload a
            # few words per stage.
            limit = {192: 40, 256: 8, 512: 80, 576: 128} if wgmma else at_the_limit
            allowed = limit.get(config.head_dim, 0)
        assert int(spilled) <= allowed, report
    # Warnings C75xx: ptxas had to correct the use of wgmma, or serialises the instructions.
    assert "C75" not in report, report


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("pair", [pair for pair in GQA_HEAD_DIMS if pair != WIDE_HEAD_DIMS])
def test_hopper_compiles_the_bodies_of_other_architectures(
    pair: tuple[int, int], kv_dtype: torch.dtype | None
) -> None:
    config = KernelConfig(torch.float16, pair[0], (9, 0), pair[1], kv_dtype, force_mma_sync=True)
    check_resources(config)


@pytest.mark.parametrize(
    "config",
    [
        HOPPER,
        AMPERE,
        KernelConfig(torch.bfloat16, 192, (9, 0), 128),
        KernelConfig(torch.bfloat16, 256, (9, 0)),
        KernelConfig(torch.bfloat16, 512, (9, 0)),
        KernelConfig(torch.bfloat16, 576, (9, 0), 512),
        KernelConfig(torch.bfloat16, 576, (8, 0), 512),
        KernelConfig(torch.bfloat16, 128, (9, 0), kv_dtype=E4M3),
        KernelConfig(torch.bfloat16, 192, (8, 0), 128, E4M3),
        # With 100 KB of shared memory the fewest CTAs fit. No other test covers 11.0.
        KernelConfig(torch.bfloat16, 64, (8, 9)),
        KernelConfig(torch.bfloat16, 128, (11, 0)),
        pytest.param(
            KernelConfig(torch.bfloat16, 576, (9, 0), 512, force_mma_sync=True),
            id="latent mma.sync",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=lambda config: config.name,
)
def test_one_variant_of_each_kind(config: KernelConfig) -> None:
    check_resources(config)


@pytest.mark.nightly
@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_every_variant(config: KernelConfig) -> None:
    check_resources(config)
