"""The checks of `sglang-pat doctor`: what a user would otherwise learn from a failed start.

A check never raises: what goes wrong is what it reports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Literal

import torch

from sglang_pat import support
from sglang_pat.executors.jit import (
    KernelBuildError,
    KernelConfig,
    Toolchain,
    default_cache,
    library_path,
)
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.plugin import NAME, missing_registrations

Status = Literal["ok", "warning", "failed"]

PLUGIN_GROUP = "sglang.srt.plugins"
NO_GPU = "no NVIDIA GPU: plans are executed by torch (tests only)"
_INSTALL = "pip install '.[sglang]' in a clone of sglang-pat"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. advice: what to do about it; empty where nothing is to be done."""

    topic: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this machine."""

    name: str
    capability: tuple[int, int]
    driver: str

    @property
    def arch(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


def all_checks() -> list[Check]:
    """Every check, in the order in which their failures should be mended."""
    gpus, sglang = find_gpus(), check_sglang()
    checks = [check_scheduler(), check_gpu(gpus), check_torch(gpus), *check_kernels(gpus)]
    checks += [check_environment(), sglang, check_entry_point(), check_white_list()]
    if sglang.status != "failed":
        checks += _checks_by_sglang()
    return checks


def worst(checks: Sequence[Check]) -> Status:
    """The status of the whole report."""
    found = {check.status for check in checks}
    return "failed" if "failed" in found else "warning" if "warning" in found else "ok"


def _checks_by_sglang() -> list[Check]:
    from sglang_pat.sglang.cpu import enable_cpu_engine

    enable_cpu_engine()  # without a driver SGLang can be imported in no other way
    try:
        import sglang_pat.sglang.hooks  # noqa: F401
    except Exception as error:
        return [import_failed(error)]
    return [check_registration(), check_hooks()]


def check_registration() -> Check:
    """Whether `pat` is an attention backend once SGLang has loaded its plug-ins."""
    missing = missing_registrations()
    if missing:
        return Check(
            "registration",
            "failed",
            f"{NAME} is missing from {' and '.join(missing)}",
            "look for 'Failed to execute general plugin: pat' in SGLang's log, and report it",
        )
    return Check("registration", "ok", f"{NAME} can be chosen by --attention-backend")


def check_hooks() -> Check:
    """Whether the hooks find what they are put on."""
    from sglang_pat.sglang.hooks import install_hooks

    try:
        install_hooks()
    except Exception as error:  # an import of SGLang's may raise anything
        advice = "use a supported version of SGLang"
        return Check("hooks", "failed", f"{type(error).__name__}: {error}", advice)
    return Check("hooks", "ok", "applied to SGLang in this process")


def import_failed(error: Exception) -> Check:
    """The check in place of all that need SGLang, where it cannot be imported."""
    return Check(
        "import of SGLang",
        "failed",
        f"{type(error).__name__}: {error}",
        "repair the installation until python -c 'import sglang.srt.server_args' works",
    )


# --- this package ---


def check_scheduler() -> Check:
    """The compiled half of the package."""
    try:
        from sglang_pat._scheduler import TILE_TABLE
    except ImportError as error:
        advice = "reinstall sglang-pat with this Python: pip install --force-reinstall ."
        return Check("C++ scheduler", "failed", str(error), advice)
    found = f"sglang-pat {version('sglang-pat')}, {len(TILE_TABLE)} tiles"
    return Check("C++ scheduler", "ok", found)


def check_environment() -> Check:
    """The SGLANG_PAT_* variables of this shell."""
    try:
        environment = Environment.read()
    except ValueError as error:
        return Check("variables", "failed", str(error), "unset it, or give it an allowed value")
    values = (f"{field.name} {getattr(environment, field.name)}" for field in fields(environment))
    return Check("variables", "ok", ", ".join(values))


# --- GPU, torch, compilers ---


def find_gpus() -> list[Gpu]:
    """The GPUs that torch can use; if it can use none, those that nvidia-smi knows."""
    known = _ask_nvidia_smi()
    if not torch.cuda.is_available():
        return known
    driver = known[0].driver if known else "unknown"
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(device.name, (device.major, device.minor), driver) for device in devices]


def _ask_nvidia_smi() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs is no driver
        return []
    if answer.returncode:  # no driver is loaded
        return []
    gpus = []
    for line in answer.stdout.splitlines():
        name, capability, driver = (part.strip() for part in line.rsplit(",", 2))
        major, _, minor = capability.partition(".")
        if major.isdecimal() and minor.isdecimal():  # a GPU that does not tell says "[N/A]"
            gpus.append(Gpu(name, (int(major), int(minor)), driver))
    return gpus


def check_gpu(gpus: Sequence[Gpu]) -> Check:
    """Whether the kernels run on every GPU here."""
    if not gpus:
        return Check("GPU", "warning", NO_GPU, "nothing, for tests; else install NVIDIA's driver")
    found = ", ".join(f"{gpu.name} (compute capability {gpu.arch})" for gpu in gpus)
    found += f"; driver {gpus[0].driver}"
    if any(gpu.capability < support.OLDEST_CAPABILITY for gpu in gpus):
        advice = "hide the older ones by CUDA_VISIBLE_DEVICES; pat needs 8.0 (Ampere) or newer"
        return Check("GPU", "failed", found, advice)
    return Check("GPU", "ok", found)


def check_torch(gpus: Sequence[Gpu]) -> Check:
    """Whether torch can use the GPUs."""
    cuda = torch.version.cuda
    found = f"torch {torch.__version__}, {'no CUDA' if cuda is None else f'CUDA {cuda}'}"
    if not gpus:
        return Check("torch", "ok", found)
    if cuda is None:
        return Check("torch", "failed", found, "install a CUDA build of torch (pytorch.org)")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = (
            f"CUDA_VISIBLE_DEVICES={visible!r} shows torch no GPU; unset it"
            if visible is not None
            else f"driver {gpus[0].driver} may be too old for CUDA {cuda}: update it, or install a "
            "torch for an older CUDA"
        )
        return Check("torch", "failed", found + ", which finds no GPU", advice)
    return Check("torch", "ok", found)


def check_kernels(gpus: Sequence[Gpu], cache: Path | None = None) -> list[Check]:
    """The compiler of the kernels, and which of them are compiled for the GPUs here."""
    cache = default_cache() if cache is None else cache
    try:
        toolchain = Toolchain.find()
    except KernelBuildError as error:
        # Without a GPU nothing will be compiled here.
        return [Check("nvcc", "failed" if gpus else "warning", *_found_and_advice(error))]
    release = next(line for line in toolchain.versions.splitlines() if "release" in line)
    compiler = Check("nvcc", "ok", f"{toolchain.nvcc}, {release.partition('release ')[2]}")
    return [compiler, _check_cache(gpus, toolchain, cache)]


def _found_and_advice(error: Exception) -> tuple[str, str]:
    found, _, advice = str(error).partition(": ")
    return found, advice


def _check_cache(gpus: Sequence[Gpu], toolchain: Toolchain, cache: Path) -> Check:
    topic = "kernel cache"
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        advice = f"make {folder} writable, or set XDG_CACHE_HOME to a folder that is"
        return Check(topic, "failed", f"{cache} cannot be written", advice)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    found = f"{cache}, {size / 1e6:.1f} MB"
    if not gpus:
        return Check(topic, "ok", found)
    configs = [
        KernelConfig(getattr(torch, dtype), head_dim, capability)
        for capability in sorted({gpu.capability for gpu in gpus})
        if capability >= support.OLDEST_CAPABILITY
        for dtype in support.KERNEL_DTYPES
        for head_dim in support.HEAD_DIMS
    ]
    compiled = [
        config.name for config in configs if library_path(config, toolchain, cache).exists()
    ]
    if compiled:
        return Check(topic, "ok", f"{found}; compiled: {', '.join(compiled)}")
    advice = (
        "nothing: the first start compiles them, in half a minute; or do it now: "
        f"sglang-pat build --arch {gpus[0].arch}"
    )
    return Check(topic, "warning", f"{found}; none compiled for this GPU", advice)


# --- SGLang, as far as it need not be imported ---


def check_sglang() -> Check:
    """Its version."""
    supported = ", ".join(support.SGLANG_VERSIONS)
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return Check("SGLang", "failed", "not installed", _INSTALL)
    if found not in support.SGLANG_VERSIONS:
        return Check(
            "SGLang",
            "warning",
            f"{found}, which pat was not tested with",
            f"if the checks below are ok it may work; tested: {supported}",
        )
    return Check("SGLang", "ok", found)


def check_entry_point() -> Check:
    """Whether SGLang can see the plug-in."""
    names = [point.value for point in entry_points(group=PLUGIN_GROUP, name=NAME)]
    if len(names) != 1:
        found = "none" if not names else f"several: {', '.join(names)}"
        advice = "install sglang-pat, once, into the Python that runs SGLang: " + _INSTALL
        return Check("entry point", "failed", found, advice)
    return Check("entry point", "ok", names[0])


def check_white_list() -> Check:
    """Whether SGLANG_PLUGINS lets SGLang load the plug-in."""
    given = os.environ.get("SGLANG_PLUGINS", "")
    allowed = [name.strip() for name in given.split(",") if name.strip()]
    if allowed and NAME not in allowed:
        advice = f"add {NAME}: SGLANG_PLUGINS={','.join([*allowed, NAME])}"
        return Check("SGLANG_PLUGINS", "failed", given, advice)
    return Check("SGLANG_PLUGINS", "ok", given or "not set: every plug-in is loaded")
