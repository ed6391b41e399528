"""Compiles the kernels on first use, from the package's sources into the kernel cache.

The cache is asked first. Compilers are looked for only when something must be compiled: a machine
without nvcc runs kernels that were built elsewhere.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch

from sglang_pat import support
from sglang_pat.executors import kernel_cache
from sglang_pat.executors.kernel_cache import LIBRARY, default_cache

# dtype -> CUDA type, torch scalar type, short name
_ELEMENTS = {
    torch.float16: ("__half", "Half", "fp16"),
    torch.bfloat16: ("__nv_bfloat16", "BFloat16", "bf16"),
}
# Architectures whose own instructions (wgmma, setmaxnreg) need the target with an "a".
_SPECIFIC_ARCHS = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One variant of the kernels.

    Attributes
    ----------
    dtype
        Of queries and KV cache: float16 or bfloat16.
    head_dim
        Of queries and keys.
    arch
        Compute capability, 8.0 or newer.
    v_head_dim
        Of values. 0 becomes `head_dim`.
    force_mma_sync
        On Hopper too, the bodies that other architectures run: for their tests.

    Raises
    ------
    ValueError
        Names the value and what is supported.
    """

    dtype: torch.dtype
    head_dim: int
    arch: tuple[int, int]
    v_head_dim: int = 0
    force_mma_sync: bool = False

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        if self.dtype not in _ELEMENTS:
            allowed = ", ".join(str(dtype) for dtype in _ELEMENTS)
            raise ValueError(f"the CUDA kernels support dtype {allowed}; got {self.dtype}")
        if (self.head_dim, self.v_head_dim) not in support.HEAD_DIMS:
            raise support.unsupported("head_dim", self._head_dim_name)
        if self.arch < support.OLDEST_CAPABILITY:
            raise ValueError(
                "the CUDA kernels need compute capability 8.0 (Ampere) or newer; "
                f"got {self.arch[0]}.{self.arch[1]}"
            )

    @classmethod
    def for_device(
        cls,
        dtype: torch.dtype,
        head_dim: int,
        device: torch.device,
        v_head_dim: int = 0,
    ) -> KernelConfig:
        """The variant that a CUDA device runs."""
        return cls(dtype, head_dim, torch.cuda.get_device_capability(device), v_head_dim)

    @property
    def name(self) -> str:
        """Short name, usable in identifiers and file names: `bf16_d128_sm90`, or `bf16_d192v128_sm90`
        where values have another head_dim than keys.
        """
        suffix = "_mma" if self.force_mma_sync else ""
        head_dim = self._head_dim_name.replace("/", "v")
        return f"{_ELEMENTS[self.dtype][2]}_d{head_dim}_sm{self._arch_number}{suffix}"

    @property
    def namespace(self) -> str:
        """Namespace of the operators below `torch.ops`."""
        return f"sglang_pat_{self.name}"

    @property
    def build_options(self) -> str:
        """The options of `sglang-pat build` for this variant."""
        dtype = str(self.dtype).removeprefix("torch.")
        arch = f"{self.arch[0]}.{self.arch[1]}"
        return f"--arch {arch} --dtype {dtype} --head-dim {self._head_dim_name}"

    @property
    def defines(self) -> list[str]:
        """Preprocessor definitions, for both compilers."""
        cuda_type, scalar_type, _ = _ELEMENTS[self.dtype]
        return [
            f"-DPAT_ELEMENT={cuda_type}",
            f"-DPAT_SCALAR_TYPE={scalar_type}",
            f"-DPAT_HEAD_DIM={self.head_dim}",
            f"-DPAT_V_HEAD_DIM={self.v_head_dim}",
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
    def _head_dim_name(self) -> str:
        return support.head_dim_name(self.head_dim, self.v_head_dim)

    @property
    def _arch_number(self) -> int:
        return 10 * self.arch[0] + self.arch[1]


_CUDA_SOURCES = (
    "pack_decode/launch_pack_decode.cu",
    "pack_decode/launch_pack_decode_soft_cap.cu",
    "launch_helpers.cu",
)
_TORCH_SOURCE = "torch_ops.cpp"
_SOURCE_SUFFIXES = (".cu", ".cuh", ".h", ".cpp")
_REPORT = "compiler_report.txt"
_RECORD = "build.json"
_SYSTEM_CUDA = "/usr/local/cuda"
_COMPILERS = threading.BoundedSemaphore(os.cpu_count() or 1)  # that run at once
_LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")  # words of CXX before the compiler


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled here. The message says what is missing and how to get it."""


@functools.cache
def load_operators(config: KernelConfig) -> Any:
    """The operators of `config`, compiled if need be. Once per process and config.

    Raises
    ------
    KernelBuildError
        There is no usable compiler, it fails, or the library that it made cannot be loaded.
    KernelCacheError
        The cache cannot be used (`kernel_cache.py`).
    """
    library = build(config)
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelBuildError(
            f"{library} cannot be loaded ({error}): it was built on another system, or is damaged; "
            f"compile it anew: sglang-pat build --force {config.build_options}"
        ) from error
    return getattr(torch.ops, config.namespace)


def build_all(
    configs: Sequence[KernelConfig], *, cache: Path | None = None, force: bool = False
) -> list[Path]:
    """`build()` of each config, all at once, by as many compilers as there are CPUs."""
    if not configs:
        return []
    with ThreadPoolExecutor(len(configs)) as pool:
        return list(pool.map(lambda config: build(config, cache=cache, force=force), configs))


def build(config: KernelConfig, *, cache: Path | None = None, force: bool = False) -> Path:
    """The library of `config`, compiled unless the cache holds it.

    Any number of processes may call this at once: one compiles, the others wait for it.

    Parameters
    ----------
    config
        What the kernels are compiled for. No GPU is needed.
    cache
        The folder of all libraries. None: `default_cache()`.
    force
        Compile even if the cache holds the library, for example after an update of nvcc.

    Returns
    -------
    Path
        The shared library.

    Raises
    ------
    KernelBuildError
        There is no usable compiler, or it fails.
    KernelCacheError
        The cache cannot be used (`kernel_cache.py`).
    """
    cache = default_cache() if cache is None else cache.absolute()
    key = cache_key(config)
    library = None if force else kernel_cache.find(cache, key)
    if library is None:
        toolchain = Toolchain.find(config.arch)
        fill = functools.partial(_fill, config, toolchain, cache / key)
        library = kernel_cache.add(cache, key, fill, replace=force)
    return library


def cache_key(config: KernelConfig) -> str:
    """The name of the cache entry of `config`: it changes with everything that makes kernels stale.

    That is: every source file, the compilers' flags, and torch (its version, its CUDA, its C++
    ABI), whose C++ interface the library uses. The compilers are no part of it: a machine that runs
    the kernels need not have any. Which ones built an entry is recorded in its build.json.
    """
    digest = hashlib.sha256()
    folder = source_folder()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SOURCE_SUFFIXES:
            contents = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(contents)}\n".encode() + contents)
    digest.update(json.dumps(_identity(config)).encode())
    return f"{config.name}-{digest.hexdigest()[:16]}"


def _identity(config: KernelConfig) -> dict[str, Any]:
    """All that a library depends on besides its sources. The flags stand beside stand-in paths."""
    nowhere = Toolchain(Path("nvcc"), ("c++",), Path("cuda"), Path("torch"), "")
    return {
        "commands": _commands(config, nowhere, Path("sources"), Path("out")),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "machine": platform.machine(),
    }


def _fill(config: KernelConfig, toolchain: Toolchain, entry: Path, work: Path) -> None:
    """Write a library into `work`, the compilers' report, and a record of what it was made by."""
    print(
        f"sglang-pat: compiling CUDA kernels for {config.name}, once, into {entry}",
        file=sys.stderr,
        flush=True,
    )
    start = time.monotonic()
    (work / _REPORT).write_text(_compile(config, toolchain, work))
    record = {"compilers": toolchain.as_dict(), **_identity(config)}
    (work / _RECORD).write_text(json.dumps(record, indent=1) + "\n")
    for path in work.glob("*.o"):
        path.unlink()
    print(f"sglang-pat: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)


def report_of(library: Path) -> str:
    """What the compilers said when they made a library: registers and spills of every kernel."""
    return library.with_name(_REPORT).read_text()


def compiler_of(library: Path) -> str:
    """Which nvcc built a library: its release."""
    record = json.loads(library.with_name(_RECORD).read_text())
    return str(record["compilers"]["release"])


def source_folder() -> Path:
    """The kernel sources, in an installed package as in an editable one."""
    folder = importlib.resources.files("sglang_pat") / "kernels"
    for path in (Path(str(folder)), Path(__file__).parents[2] / "kernels"):
        if (path / _TORCH_SOURCE).exists():
            return path
    raise KernelBuildError(f"this installation of sglang-pat has no kernel sources in {folder}")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compilers, and where headers and libraries are.

    Attributes
    ----------
    nvcc
        Its path.
    cxx
        The words of the command that compiles C++.
    cuda_home
        The folder of the CUDA toolkit.
    torch
        The folder of torch.
    release
        Of nvcc, like `13.0, V13.0.88`.
    """

    nvcc: Path
    cxx: tuple[str, ...]
    cuda_home: Path
    torch: Path
    release: str

    @classmethod
    def find(cls, arch: tuple[int, int] | None = None) -> Toolchain:
        """The compilers of this machine.

        Parameters
        ----------
        arch
            The compute capability to compile for: newer ones need a newer nvcc. None: any.

        Raises
        ------
        KernelBuildError
            Something is missing or does not fit. The message says what to install.
        """
        if torch.version.cuda is None:
            raise KernelBuildError(
                f"this torch ({torch.__version__}) has no CUDA: install a CUDA build of torch"
            )
        cuda_home = _find_cuda_home()
        nvcc = cuda_home / "bin" / "nvcc"
        report = _run([str(nvcc), "--version"])
        release = re.search(r"release ((\d+)\.(\d+).*)", report)
        if release is None:
            raise KernelBuildError(f"{nvcc} --version names no release:\n{report}")
        version = int(release[2]), int(release[3])
        found = f"{release[2]}.{release[3]}"
        oldest = _oldest_nvcc(arch)
        if version < oldest:
            purpose = "" if arch is None else f" for compute capability {arch[0]}.{arch[1]}"
            raise KernelBuildError(
                f"{nvcc} is CUDA {found}: {oldest[0]}.{oldest[1]} or newer is needed{purpose}"
            )
        if version[0] != int(torch.version.cuda.split(".")[0]):
            raise KernelBuildError(
                f"{nvcc} is CUDA {found}, but torch {torch.__version__} is built for "
                f"CUDA {torch.version.cuda}: install that CUDA toolkit, or point CUDA_HOME to it"
            )
        return cls(nvcc, _find_cxx(), cuda_home, Path(torch.__file__).parent, release[1])

    @property
    def host_compiler(self) -> tuple[str, ...]:
        """`cxx` without launchers such as ccache: the compiler, and the flags given with it."""
        return tuple(dropwhile(lambda word: Path(word).name in _LAUNCHERS, self.cxx))

    def as_dict(self) -> dict[str, Any]:
        """For the record beside a library."""
        first_line = _run([*self.cxx, "--version"]).partition("\n")[0]
        paths = {name: str(value) for name, value in asdict(self).items()}
        return paths | {"cxx": shlex.join(self.cxx), "cxx_version": first_line}


def _oldest_nvcc(arch: tuple[int, int] | None) -> tuple[int, int]:
    """The oldest nvcc for an architecture. One that is not known is newer than all that are."""
    if arch is None:
        return min(support.OLDEST_NVCC.values())
    return support.OLDEST_NVCC.get(arch, max(support.OLDEST_NVCC.values()))


def _find_cxx() -> tuple[str, ...]:
    given = os.environ.get("CXX")
    if not given:
        found = shutil.which("g++") or shutil.which("c++")
        if found is None:
            raise KernelBuildError("no C++ compiler found: install g++, or set CXX")
        return (found,)
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise KernelBuildError(f"CXX={given!r} is no command ({error}): set it to one") from error
    compiler = next((word for word in words if Path(word).name not in _LAUNCHERS), None)
    if compiler is None:
        raise KernelBuildError(f"CXX={given!r} names no compiler: set it like 'ccache g++'")
    for program in words[: words.index(compiler) + 1]:
        if shutil.which(program) is None:
            raise KernelBuildError(
                f"CXX={given!r}: there is no program {program!r}: install it, or unset CXX"
            )
    return tuple(words)


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


def _commands(
    config: KernelConfig, toolchain: Toolchain, sources: Path, work: Path
) -> tuple[list[list[str]], list[str]]:
    """The compile commands, which may run at once, and the link command after them."""
    common = [*config.defines, f"-I{sources}", "-std=c++20", "-O3"]
    # Libraries of several configs live in one process and must not see each other's symbols.
    private = ["-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]
    host_compiler, *host_flags = toolchain.host_compiler
    nvcc = [
        str(toolchain.nvcc),
        *common,
        f"-gencode={config.code_generation}",
        f"-Xcompiler={','.join([*private, *host_flags])}",
        "-Xptxas=-v",
        "-lineinfo",
        f"-ccbin={host_compiler}",
    ]
    objects = [work / f"{Path(name).stem}.o" for name in (*_CUDA_SOURCES, _TORCH_SOURCE)]
    compiles = [
        [*nvcc, "-c", str(sources / name), "-o", str(target)]
        for name, target in zip(_CUDA_SOURCES, objects, strict=False)
    ]
    abi = int(torch.compiled_with_cxx11_abi())
    compiles.append(
        [
            *toolchain.cxx,
            *common,
            *private,
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-isystem{toolchain.torch / 'include'}",
            f"-isystem{toolchain.cuda_home / 'include'}",
            "-c",
            str(sources / _TORCH_SOURCE),
            "-o",
            str(objects[-1]),
        ]
    )
    link = [*toolchain.cxx, "-shared", "-o", str(work / LIBRARY), *map(str, objects)]
    link += [f"-L{toolchain.torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch"]
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
    with ThreadPoolExecutor(len(compiles)) as pool:
        reports = list(pool.map(_run_compiler, compiles))
    _run(link)
    return "".join(reports)


def _run_compiler(command: list[str]) -> str:
    with _COMPILERS:
        return _run(command)


def _run(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise KernelBuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-40:])
        raise KernelBuildError(f"this command failed:\n  {shlex.join(command)}\n{tail}")
    return result.stdout
