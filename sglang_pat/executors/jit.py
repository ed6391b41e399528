"""Compiles the kernels on first use, from the package's sources into the kernel cache.

The compiler is NVRTC, which is installed with torch, so the machine needs neither nvcc nor a C++
compiler. An image that is shipped in the wheel or is in the cache is not compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_pat import support
from sglang_pat.executors import kernel_cache
from sglang_pat.executors.kernel_cache import IMAGE, default_cache

# dtype of queries -> CUDA type, short name
_ELEMENTS = {torch.float16: ("__half", "fp16"), torch.bfloat16: ("__nv_bfloat16", "bf16")}
# dtype of a KV cache whose values the kernels convert -> KvType of kernels/kv_type.h, short name
_CONVERTED = {torch.float8_e4m3fn: ("kE4m3", "e4m3"), torch.float8_e5m2: ("kE5m2", "e5m2")}
_DIGITS = 16  # hexadecimal digits of a hash
# Architectures whose target needs the suffix "a", for instructions such as wgmma and setmaxnreg.
_SPECIFIC_ARCHS = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One variant of the kernels.

    Attributes
    ----------
    dtype
        dtype of queries and outputs: float16 or bfloat16.
    head_dim
        head_dim of queries and keys.
    arch
        Compute capability, 8.0 or newer.
    v_head_dim
        head_dim of values. 0: the same as `head_dim`.
    kv_dtype
        dtype of the KV cache: float8_e4m3fn or float8_e5m2. None: the same as `dtype`.
    force_mma_sync
        Whether to compile for Hopper the mma.sync bodies that other architectures use. Tests run
        these bodies on Hopper.

    Raises
    ------
    ValueError
        The kernels do not support these values. The message says which values.
    """

    dtype: torch.dtype
    head_dim: int
    arch: tuple[int, int]
    v_head_dim: int = 0
    kv_dtype: torch.dtype | None = None
    force_mma_sync: bool = False

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", None)
        if self.dtype not in _ELEMENTS:
            allowed = ", ".join(str(dtype) for dtype in _ELEMENTS)
            raise ValueError(f"the CUDA kernels support dtype {allowed}; got {self.dtype}")
        if self.kv_dtype not in (None, *_CONVERTED):
            allowed = ", ".join(str(dtype) for dtype in (self.dtype, *_CONVERTED))
            raise ValueError(
                f"the CUDA kernels support a KV cache of {allowed}; got {self.kv_dtype}"
            )
        if (self.head_dim, self.v_head_dim) not in support.HEAD_DIMS:
            raise support.unsupported("head_dim", self._head_dim_name)
        if self.arch < support.OLDEST_CAPABILITY:
            raise ValueError(
                "the CUDA kernels need compute capability 8.0 (Ampere) or newer; "
                f"got {self.arch[0]}.{self.arch[1]}"
            )
        one_byte = self.kv_dtype is not None
        has_body = not (self.force_mma_sync and support.is_wide(self.head_dim, self.v_head_dim))
        if not has_body or not support.has_kernels(
            self.head_dim, self.v_head_dim, self.arch, one_byte=one_byte
        ):
            raise ValueError(
                f"there are no CUDA kernels for head_dim {self._head_dim_name} "
                + f"over a KV cache of {self.kv_dtype} " * one_byte
                + f"on compute capability {self.arch[0]}.{self.arch[1]}"
                + " by mma.sync" * self.force_mma_sync
            )

    @classmethod
    def for_device(
        cls,
        dtype: torch.dtype,
        head_dim: int,
        device: torch.device,
        v_head_dim: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> KernelConfig:
        """Return the variant for a CUDA device."""
        return cls(dtype, head_dim, torch.cuda.get_device_capability(device), v_head_dim, kv_dtype)

    @property
    def is_latent(self) -> bool:
        """True for latent attention (MLA): values are the first columns of the keys."""
        return support.is_latent(self.head_dim, self.v_head_dim)

    @property
    def cache_dtype(self) -> torch.dtype:
        """dtype of the KV cache."""
        return self.kv_dtype or self.dtype

    @property
    def partial_dtype(self) -> torch.dtype:
        """dtype of the partials: float16 with a one-byte cache, else `dtype`."""
        return self.dtype if self.kv_dtype is None else torch.float16

    @property
    def name(self) -> str:
        """Short name, usable in identifiers and file names.

        For example `bf16_d128_sm90`, `bf16_d192v128_sm90` if the head_dims of keys and values
        differ, or `bf16_e4m3_d128_sm90` if the KV cache is e4m3.
        """
        dtypes = _ELEMENTS[self.dtype][1]
        if self.kv_dtype is not None:
            dtypes += f"_{_CONVERTED[self.kv_dtype][1]}"
        suffix = "_mma" if self.force_mma_sync else ""
        head_dim = self._head_dim_name.replace("/", "v")
        return f"{dtypes}_d{head_dim}_sm{self._arch_number}{suffix}"

    @property
    def tiles_agree(self) -> bool:
        """True if one body computes all tiles. A row's result is then bit-identical in every tile.

        Latent attention has one body, except on Hopper with a cache of the queries' dtype. Other
        layers have one body only in that case. In all other cases, they use mma.sync, whose tiles
        split KV among warps in different ways.
        """
        has_wgmma = self.arch == (9, 0) and not self.force_mma_sync and self.kv_dtype is None
        return has_wgmma != self.is_latent

    @property
    def has_tensor_maps(self) -> bool:
        """True if the kernels copy consecutive slots by TMA, with tensor maps (`kHasTma`)."""
        return self.arch == (9, 0)

    @property
    def build_options(self) -> str:
        """Return the options of `sglang-pat build` that build this variant."""
        dtype = str(self.dtype).removeprefix("torch.")
        arch = f"{self.arch[0]}.{self.arch[1]}"
        options = f"--arch {arch} --dtype {dtype} --head-dim {self._head_dim_name}"
        if self.kv_dtype is not None:
            options += " --kv-dtype " + str(self.kv_dtype).removeprefix("torch.")
        return options

    @property
    def options(self) -> list[str]:
        """Return the compiler's options, except the folders of headers."""
        target = f"{self._arch_number}{'a' if self.arch in _SPECIFIC_ARCHS else ''}"
        return [
            f"--gpu-architecture=sm_{target}",
            "--std=c++20",
            "--device-as-default-execution-space",
            "--ptxas-options=--verbose",
            f"-DPAT_ELEMENT={_ELEMENTS[self.dtype][0]}",
            f"-DPAT_KV_TYPE={_CONVERTED[self.kv_dtype][0] if self.kv_dtype else 'kAsQueries'}",
            f"-DPAT_HEAD_DIM={self.head_dim}",
            f"-DPAT_V_HEAD_DIM={self.v_head_dim}",
            f"-DPAT_TARGET_ARCH={self._arch_number}",
            *(["-DPAT_FORCE_MMA_SYNC"] if self.force_mma_sync else []),
        ]

    @property
    def _head_dim_name(self) -> str:
        return support.head_dim_name(self.head_dim, self.v_head_dim)

    @property
    def _arch_number(self) -> int:
        return 10 * self.arch[0] + self.arch[1]


_SOURCE = "entry_points.cu"
_STANDARD_HEADERS = "nvrtc"  # folder of stand-ins for headers that NVRTC lacks
_INCLUDED = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp")
SHIPPED = "cubins"  # folder in the package that has the images which a wheel ships
_REPORT = "compiler_report.txt"
RECORD = "build.json"


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here. The message says what is missing."""


def build_all(
    configs: Sequence[KernelConfig], *, cache: Path | None = None, force: bool = False
) -> list[Path]:
    """Call `build()` for all configs, in as many threads as there are CPUs. Return the images."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda config: build(config, cache=cache, force=force), configs))


def build(config: KernelConfig, *, cache: Path | None = None, force: bool = False) -> Path:
    """Return the compiled image of `config`. Compile it if neither the wheel nor the cache has it.

    Any number of processes may call this at the same time. One compiles, and the others wait.

    Parameters
    ----------
    config
        The variant of the kernels. The machine need not have a GPU of this architecture.
    cache
        The folder of all images. None: `default_cache()`.
    force
        Compile even if there already is an image.

    Returns
    -------
    Path
        The image: a cubin.

    Raises
    ------
    KernelBuildError
        NVRTC or CUDA's headers are missing, or the compilation fails.
    KernelCacheError
        The cache cannot be used (`kernel_cache.py`).
    """
    cache = default_cache() if cache is None else cache.absolute()
    image = None if force else find_image(config, cache)
    if image is None:
        compiler = Compiler.find(config.arch)
        key = entry_key(config, compiler)
        fill = functools.partial(_fill, config, compiler, cache / key)
        image = kernel_cache.add(cache, key, fill, replace=force)
    return image


def find_image(config: KernelConfig, cache: Path) -> Path | None:
    """Return an image of `config` without compiling: a cached one, or else the shipped one.

    Normally, a cached image counts only if this machine's compiler made it. In two cases, the
    newest cached image is returned, whichever compiler made it: if there is no compiler here, or if
    there is no other image and the cache cannot be written. None: there is no image.
    """
    made = kernel_cache.versions(cache, cache_key(config))
    if made:
        try:
            key = entry_key(config, Compiler.find(config.arch))
        except KernelBuildError:
            key = made[0]
        image = kernel_cache.find(cache, key)
        if image is not None:
            return image
    image = _shipped_image(cache_key(config))
    if image is None and made and kernel_cache.problem_with_writing(cache) is not None:
        print(
            f"sglang-pat: {cache} cannot be written: {made[0]} is used, made by another compiler",
            file=sys.stderr,
        )
        image = kernel_cache.find(cache, made[0])
    return image


def entry_key(config: KernelConfig, compiler: Compiler) -> str:
    """Return the name of the cache entry for `config`, compiled by `compiler`."""
    return f"{cache_key(config)}-{compiler.digest}"


def cache_key(config: KernelConfig) -> str:
    """Return the name of `config`'s image in a wheel.

    The names of the cache entries for `config` begin with this name. The name depends on the source
    files and options, but not on the compiler, so the images of a wheel are used wherever the wheel
    is installed.
    """
    digest = _hash_of_sources()
    digest.update(json.dumps(config.options).encode())
    return f"{config.name}-{digest.hexdigest()[:_DIGITS]}"


def source_hash() -> str:
    """Return a hash of all source files of the kernels."""
    return _hash_of_sources().hexdigest()[:_DIGITS]


def _hash_of_sources() -> hashlib._Hash:
    digest = hashlib.sha256()
    folder = source_folder()
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")
    for path in sorted(files):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(contents)}\n".encode() + contents)
    return digest


def _fill(config: KernelConfig, compiler: Compiler, entry: Path, work: Path) -> None:
    """Write an image, the compiler's report and the compiler's name into `work`."""
    print(
        f"sglang-pat: compiling CUDA kernels for {config.name}, once, into {entry}",
        file=sys.stderr,
        flush=True,
    )
    start = time.monotonic()
    image, report = compiler.compile(config)
    (work / IMAGE).write_bytes(image)
    (work / _REPORT).write_text(report)
    record = {"compiler": compiler.name, "options": config.options}
    (work / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    print(f"sglang-pat: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr)


def _shipped_image(key: str) -> Path | None:
    """Return the image in the installed wheel, or None."""
    image = Path(str(importlib.resources.files("sglang_pat"))) / SHIPPED / key / IMAGE
    return image if image.exists() else None


def report_of(image: Path) -> str:
    """Return the compiler's report on an image: registers and spills of every kernel."""
    return image.with_name(_REPORT).read_text()


def compiler_of(image: Path) -> str:
    """Return the name of the compiler of an image, such as `NVRTC 13.0`."""
    record = json.loads(image.with_name(RECORD).read_text())
    return str(record["compiler"])


def source_folder() -> Path:
    """Return the folder of the kernel sources: in the package or, if editable, in the clone."""
    folder = importlib.resources.files("sglang_pat") / "kernels"
    for path in (Path(str(folder)), Path(__file__).parents[2] / "kernels"):
        if (path / _SOURCE).exists():
            return path
    raise KernelBuildError(f"this installation of sglang-pat has no kernel sources in {folder}")


@dataclass(frozen=True, slots=True)
class Compiler:
    """NVRTC and the CUDA headers that it compiles with.

    Attributes
    ----------
    name
        `NVRTC 13.0`.
    cuda_headers
        The folder with cuda_fp16.h.
    digest
        A hash of NVRTC's build and of the CUDA headers that the kernels include.
    """

    name: str
    cuda_headers: Path
    digest: str

    @classmethod
    def find(cls, arch: tuple[int, int] | None = None) -> Compiler:
        """Return the compiler of this installation.

        Parameters
        ----------
        arch
            The compute capability to compile for. None: any.

        Raises
        ------
        KernelBuildError
            NVRTC or the headers are missing or too old. The message says what to install.
        """
        nvrtc = _nvrtc()
        major, minor = _checked(nvrtc.nvrtcVersion(), "asking for the version")
        name = f"NVRTC {major}.{minor}"
        if arch is not None:
            supported = _checked(nvrtc.nvrtcGetSupportedArchs(), "asking for architectures")
            if 10 * arch[0] + arch[1] not in supported:
                raise KernelBuildError(
                    f"{name} cannot compile for compute capability {arch[0]}.{arch[1]}: install a "
                    "torch that is built for a newer CUDA"
                )
        headers = _find_cuda_headers()
        return cls(name, headers, _digest(nvrtc, headers))

    def compile(self, config: KernelConfig) -> tuple[bytes, str]:
        """Return the cubin of `config`, and the log with each kernel's registers and spills.

        Raises
        ------
        KernelBuildError
            The compilation fails. The message includes what the compiler says.
        """
        nvrtc, sources = _nvrtc(), source_folder()
        folders = (sources, sources / _STANDARD_HEADERS, self.cuda_headers)
        options = [*config.options, *(f"--include-path={folder}" for folder in folders)]
        text = (sources / _SOURCE).read_bytes()
        program = _checked(
            nvrtc.nvrtcCreateProgram(text, _SOURCE.encode(), 0, [], []), "reading the source"
        )
        try:
            (status,) = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            report = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            log = report.rstrip(b"\0").decode(errors="replace")
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                tail = "\n".join(log.splitlines()[-40:])
                raise KernelBuildError(
                    f"{self.name} cannot compile {sources / _SOURCE} with {' '.join(options)}:\n"
                    f"{tail or status.name}"
                )
            return _output(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _digest(nvrtc: Any, cuda_headers: Path) -> str:
    """Return a hash of the CUDA headers and of NVRTC's build.

    Every PTX that NVRTC writes names its build, so the PTX of an empty program is hashed.
    """
    program = _checked(nvrtc.nvrtcCreateProgram(b"", b"", 0, [], []), "reading nothing")
    try:
        _checked(nvrtc.nvrtcCompileProgram(program, 0, []), "compiling nothing")
        digest = hashlib.sha256(_output(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    for name in _INCLUDED:
        with contextlib.suppress(FileNotFoundError):
            digest.update((cuda_headers / name).read_bytes())
    return digest.hexdigest()[:_DIGITS]


def _nvrtc() -> Any:
    """Return the Python module with NVRTC's functions."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library
    except Exception as error:  # the loader may raise anything
        raise KernelBuildError(
            f"NVRTC, which compiles the kernels, cannot be loaded ({error}): install a CUDA build "
            "of torch, which brings it along"
        ) from error
    return nvrtc


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """Return an NVRTC call's results without the status: one value, or a tuple of several."""
    status, *values = result
    if status.value:
        raise KernelBuildError(f"NVRTC failed ({what}): {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _output(program: Any, size_of: Any, get: Any) -> bytes:
    """Return an output of a program. size_of, get: NVRTC's functions for its size and contents."""
    output = bytearray(_checked(size_of(program), "asking for a size"))
    _checked(get(program, output), "reading the output")
    return bytes(output)


def _find_cuda_headers() -> Path:
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda_fp16.h").exists():
        raise KernelBuildError(
            "no headers of the CUDA runtime found (cuda_fp16.h): install a CUDA build of torch, "
            "which brings them along, or a CUDA toolkit, and set CUDA_HOME to it"
        )
    return Path(found)
