"""Compiles the kernels on first use, from the package's sources into the user's cache.

A library's path contains a hash of everything it is made from, and a library appears by renaming:
what exists is complete and current.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.resources
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from sglang_pat import support

# dtype -> CUDA type, torch scalar type, short name
_ELEMENTS = {
    torch.float16: ("__half", "Half", "fp16"),
    torch.bfloat16: ("__nv_bfloat16", "BFloat16", "bf16"),
}
# Architectures whose own instructions (wgmma, setmaxnreg) need the target with an "a".
_SPECIFIC_ARCHS = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """dtype: of queries and KV, float16 or bfloat16. head_dim: 64 or 128. arch: compute capability.
    force_mma_sync: on Hopper too, the bodies that other architectures run; for tests of these.

    ValueError, naming the value and what is supported, for anything else.
    """

    dtype: torch.dtype
    head_dim: int
    arch: tuple[int, int]
    force_mma_sync: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _ELEMENTS:
            allowed = ", ".join(str(dtype) for dtype in _ELEMENTS)
            raise ValueError(f"the CUDA kernels support dtype {allowed}; got {self.dtype}")
        if self.head_dim not in support.HEAD_DIMS:
            raise support.unsupported("head_dim", self.head_dim)
        if self.arch < support.OLDEST_CAPABILITY:
            raise ValueError(
                "the CUDA kernels need compute capability 8.0 (Ampere) or newer; "
                f"got {self.arch[0]}.{self.arch[1]}"
            )

    @classmethod
    def for_device(cls, dtype: torch.dtype, head_dim: int, device: torch.device) -> KernelConfig:
        """The variant that a CUDA device runs."""
        return cls(dtype, head_dim, torch.cuda.get_device_capability(device))

    @property
    def name(self) -> str:
        """Short name, usable in identifiers and file names: `bf16_d128_sm90`."""
        suffix = "_mma" if self.force_mma_sync else ""
        return f"{_ELEMENTS[self.dtype][2]}_d{self.head_dim}_sm{self._arch_number}{suffix}"

    @property
    def namespace(self) -> str:
        """Namespace of the operators below `torch.ops`."""
        return f"sglang_pat_{self.name}"

    @property
    def defines(self) -> list[str]:
        """Preprocessor definitions, for both compilers."""
        cuda_type, scalar_type, _ = _ELEMENTS[self.dtype]
        return [
            f"-DPAT_ELEMENT={cuda_type}",
            f"-DPAT_SCALAR_TYPE={scalar_type}",
            f"-DPAT_HEAD_DIM={self.head_dim}",
            f"-DPAT_TARGET_ARCH={self._arch_number}",
            f"-DPAT_NAMESPACE={self.namespace}",
            *(["-DPAT_FORCE_MMA_SYNC"] if self.force_mma_sync else []),
        ]

    @property
    def code_generation(self) -> str:
        """nvcc's -gencode value."""
        target = f"{self._arch_number}{'a' if self.arch in _SPECIFIC_ARCHS else ''}"
        return f"arch=compute_{target},code=sm_{target}"

    @property
    def _arch_number(self) -> int:
        return 10 * self.arch[0] + self.arch[1]


def parse_arch(text: str) -> tuple[int, int]:
    """`9.0` -> (9, 0). ValueError if it is no compute capability."""
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and len(minor) == 1 and minor.isdecimal()):
        raise ValueError(f"a compute capability looks like 9.0, got {text!r}")
    return int(major), int(minor)


_CUDA_SOURCES = (
    "pack_decode/launch_pack_decode.cu",
    "pack_decode/launch_pack_decode_soft_cap.cu",
    "launch_helpers.cu",
)
_TORCH_SOURCE = "torch_ops.cpp"
_SOURCE_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")
_OLDEST_NVCC = (12, 3)  # C++20 and programmatic dependent launch in graphs
_LIBRARY = "kernels.so"
_REPORT = "compiler_report.txt"
_SYSTEM_CUDA = "/usr/local/cuda"


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled here. The message says what is missing and how to get it."""


@functools.cache
def load_operators(config: KernelConfig) -> Any:
    """The operators of `config`, compiled if need be. Once per process and config."""
    library = build(config)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return getattr(torch.ops, config.namespace)


def build(config: KernelConfig, *, cache: Path | None = None, verbose: bool = False) -> Path:
    """Compile `config` unless the cache holds it, and return the library's path.

    Safe to call from any number of processes at once: one compiles, the others wait for it. A build
    that was killed leaves nothing that blocks the next. verbose: print the compiler's report of
    registers and spills, which lies beside the library.

    KernelBuildError if there is no usable compiler, or if it fails.
    """
    toolchain = Toolchain.find()
    library = library_path(config, toolchain, default_cache() if cache is None else cache)
    if not library.exists():
        _build_locked(config, toolchain, library)
    if verbose:
        print(library.with_name(_REPORT).read_text())
    return library


def library_path(config: KernelConfig, toolchain: Toolchain, cache: Path) -> Path:
    """Where the library of `config` lies once it is compiled from today's sources and compilers."""
    return cache / f"{config.name}-{_content_hash(config, toolchain)}" / _LIBRARY


def _build_locked(config: KernelConfig, toolchain: Toolchain, library: Path) -> None:
    key, cache = library.parent.name, library.parent.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / f"{key}.lock").open("w")
    except OSError as error:
        raise KernelBuildError(
            f"the kernels' cache {cache} cannot be written ({error.strerror}): make it writable, "
            "or set XDG_CACHE_HOME to a folder that is"
        ) from error
    with _locked(lock):
        for abandoned in cache.glob(f"{key}.build-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        if library.exists():
            return
        print(
            f"sglang-pat: compiling CUDA kernels for {config.name}, once, into {library.parent}",
            file=sys.stderr,
            flush=True,
        )
        start = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"{key}.build-", dir=cache))
        try:
            (work / _REPORT).write_text(_compile(config, toolchain, work))
            work.rename(library.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        print(f"sglang-pat: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)


def default_cache() -> Path:
    """Where libraries are kept: `sglang-pat` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-pat"


def source_folder() -> Path:
    """The kernel sources, in an installed package as in an editable one."""
    folder = importlib.resources.files("sglang_pat") / "kernels"
    for path in (Path(str(folder)), Path(__file__).parents[2] / "kernels"):
        if (path / _TORCH_SOURCE).exists():
            return path
    raise KernelBuildError(f"this installation of sglang-pat has no kernel sources in {folder}")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers, and which versions they say they are."""

    nvcc: Path
    cxx: str
    cuda_home: Path
    versions: str

    @classmethod
    def find(cls) -> Toolchain:
        """KernelBuildError, saying what to install, if something is missing or does not fit."""
        if torch.version.cuda is None:
            raise KernelBuildError(
                f"this torch ({torch.__version__}) has no CUDA: install a CUDA build of torch"
            )
        cuda_home = _find_cuda_home()
        nvcc = cuda_home / "bin" / "nvcc"
        cxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if cxx is None:
            raise KernelBuildError("no C++ compiler found: install g++, or set CXX")
        report = _run([str(nvcc), "--version"])
        release = re.search(r"release (\d+)\.(\d+)", report)
        if release is None:
            raise KernelBuildError(f"{nvcc} --version names no release:\n{report}")
        found = f"{release[1]}.{release[2]}"
        version = int(release[1]), int(release[2])
        if version < _OLDEST_NVCC:
            oldest = f"{_OLDEST_NVCC[0]}.{_OLDEST_NVCC[1]}"
            raise KernelBuildError(f"{nvcc} is CUDA {found}; {oldest} or newer needed")
        if version[0] != int(torch.version.cuda.split(".")[0]):
            raise KernelBuildError(
                f"{nvcc} is CUDA {found}, but torch {torch.__version__} is built for "
                f"CUDA {torch.version.cuda}: install that CUDA toolkit, or point CUDA_HOME to it"
            )
        return cls(nvcc, cxx, cuda_home, report + _run([cxx, "--version"]))


def _find_cuda_home() -> Path:
    tried = []
    on_path = shutil.which("nvcc")
    for candidate in (
        os.environ.get("CUDA_HOME"),
        None if on_path is None else str(Path(on_path).resolve().parent.parent),
        _SYSTEM_CUDA,
    ):
        if candidate is not None:
            tried.append(candidate)
            home = Path(candidate)
            if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
                return home
    raise KernelBuildError(
        f"no nvcc with headers found (tried PATH and {', '.join(tried)}): install the CUDA toolkit "
        f"{torch.version.cuda}, or set CUDA_HOME"
    )


def _content_hash(config: KernelConfig, toolchain: Toolchain) -> str:
    digest = hashlib.sha256()
    folder = source_folder()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCE_SUFFIXES:
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    identity = (*_commands(config, toolchain, folder, Path("out")), toolchain.versions)
    digest.update(repr((identity, torch.__version__, platform.machine())).encode())
    return digest.hexdigest()[:16]


def _commands(
    config: KernelConfig, toolchain: Toolchain, sources: Path, work: Path
) -> tuple[list[list[str]], list[str]]:
    """The compile commands, which may run at once, and the link command after them."""
    torch_folder = Path(torch.__file__).parent
    includes = [f"-I{sources}"]
    common = [*config.defines, *includes, "-std=c++20", "-O3"]
    # Libraries of several configs live in one process and must not see each other's symbols.
    private = ["-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]
    nvcc = [
        str(toolchain.nvcc),
        *common,
        f"-gencode={config.code_generation}",
        f"-Xcompiler={','.join(private)}",
        "-Xptxas=-v",
        "-lineinfo",
        f"-ccbin={toolchain.cxx}",
    ]
    objects = [work / f"{Path(name).stem}.o" for name in (*_CUDA_SOURCES, _TORCH_SOURCE)]
    compiles = [
        [*nvcc, "-c", str(sources / name), "-o", str(target)]
        for name, target in zip(_CUDA_SOURCES, objects, strict=False)
    ]
    abi = int(torch.compiled_with_cxx11_abi())
    compiles.append(
        [
            toolchain.cxx,
            *common,
            *private,
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-isystem{torch_folder / 'include'}",
            f"-isystem{toolchain.cuda_home / 'include'}",
            "-c",
            str(sources / _TORCH_SOURCE),
            "-o",
            str(objects[-1]),
        ]
    )
    link = [toolchain.cxx, "-shared", "-o", str(work / _LIBRARY), *map(str, objects)]
    link += [f"-L{torch_folder / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch"]
    # The static runtime: no second libcudart to be found at load time.
    link += [f"-L{toolchain.cuda_home / lib}" for lib in ("lib64", "lib")]
    # Not the compiler's default libraries: where it would link libstdc++ statically, exceptions and
    # streams would meet a second copy of what torch has loaded.
    link += [
        "-lcudart_static",
        "-nodefaultlibs",
        "-lgcc_s",
        "-lc",
        "-lm",
        "-ldl",
        "-lrt",
        "-lpthread",
    ]
    return compiles, link


def _compile(config: KernelConfig, toolchain: Toolchain, work: Path) -> str:
    """Compile and link into `work`. Returns what the compilers printed."""
    compiles, link = _commands(config, toolchain, source_folder(), work)
    with ThreadPoolExecutor(min(len(compiles), os.cpu_count() or 1)) as pool:
        reports = list(pool.map(_run, compiles))
    _run(link)
    return "".join(reports)


def _run(command: list[str]) -> str:
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-40:])
        raise KernelBuildError(f"this command failed:\n  {' '.join(command)}\n{tail}")
    return result.stdout


@contextmanager
def _locked(file: TextIO) -> Iterator[None]:
    """Hold an exclusive lock on `file`. The system releases it however the process ends."""
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
