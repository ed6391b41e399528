"""Kernel headers compiled for the host: rounding to one byte, layout of shared memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_pat.executors.jit import source_folder
from sglang_pat.support import HEAD_DIMS

SOURCE = Path(__file__).parents[1] / "support" / "fp8_rounding.cpp"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
both_types = pytest.mark.parametrize("kv_dtype", NAMES, ids=NAMES.values())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounding") / "fp8_rounding"
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", f"-I{source_folder()}"]
    subprocess.run(["c++", *flags, SOURCE, "-o", path], check=True)
    return path


def in_kernels(
    program: Path, numbers: torch.Tensor, kv_dtype: torch.dtype, overflow: int
) -> torch.Tensor:
    command = [program, NAMES[kv_dtype], str(overflow)]
    done = subprocess.run(command, input=numbers.numpy().tobytes(), capture_output=True, check=True)
    return torch.from_numpy(np.frombuffer(done.stdout, np.uint8).copy())


def of_torch(numbers: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    return numbers.to(kv_dtype).view(torch.uint8)


def overflow_of_torch(kv_dtype: torch.dtype) -> int:
    return int(of_torch(torch.tensor([torch.inf]), kv_dtype))


@both_types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_number(program: Path, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    rounded = in_kernels(program, numbers.float(), kv_dtype, overflow_of_torch(kv_dtype))
    assert rounded.equal(of_torch(numbers, kv_dtype))


@both_types
def test_ties_and_their_neighbours(program: Path, kv_dtype: torch.dtype) -> None:
    """All midpoints of two numbers of the type are tested, and numbers beyond its largest."""
    ordered = torch.arange(0x80, dtype=torch.uint8).view(kv_dtype).double()
    ordered = torch.cat([ordered[ordered.isfinite()], torch.tensor([480.0, 65536.0, 1e30])])
    ties = ((ordered[1:] + ordered[:-1]) / 2).float()
    near = [ties, *(torch.nextafter(ties, torch.tensor(end)) for end in (0.0, torch.inf))]
    numbers = torch.cat([*near, *(-each for each in near)])
    rounded = in_kernels(program, numbers, kv_dtype, overflow_of_torch(kv_dtype))
    assert rounded.equal(of_torch(numbers, kv_dtype))


@pytest.mark.parametrize("overflow", [0x7E, 0x7F])
def test_what_is_too_large_becomes_what_the_host_says(program: Path, overflow: int) -> None:
    """torch 2.11 converts too large numbers to NaN, 2.14 to the type's largest number."""
    numbers = torch.tensor([448.0, 464.0, 464.1, 480.0, 1e9, torch.inf, -1e9, -torch.inf])
    rounded = in_kernels(program, numbers, E4M3, overflow)
    assert rounded.tolist() == [0x7E, 0x7E, *[overflow] * 4, *[0x80 | overflow] * 2]


@both_types
def test_nan_stays_nan_with_its_sign(program: Path, kv_dtype: torch.dtype) -> None:
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    numbers = torch.cat([patterns, patterns | -(2**31)]).view(torch.float32)
    assert in_kernels(program, numbers, kv_dtype, 0x7E).tolist() == [0x7F] * 3 + [0xFF] * 3


CHECK = Path(__file__).parents[1] / "support" / "shared_layout.cpp"


def test_copies_and_matrix_instructions_mean_the_same_bytes(tmp_path: Path) -> None:
    """The program checks every element of stages and query tiles, for every pair of head_dims."""
    pairs = " ".join(f"PAT_PAIR({key}, {value})" for key, value in HEAD_DIMS)
    program = tmp_path / "shared_layout"
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", f"-I{source_folder()}"]
    subprocess.run(["c++", *flags, f"-DPAT_PAIRS={pairs}", CHECK, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.split() == [f"{key}/{value}" for key, value in HEAD_DIMS]
