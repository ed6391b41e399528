"""Metadata on the origin of numbers, which every benchmark writes with its results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from sglang_pat.workload.models import GPUS

PACKAGES = ("sglang-pat", "sglang", "flashinfer-python", "sglang-kernel", "triton")


def metadata() -> dict[str, object]:
    """Return command, commit, machine and versions. GIT_COMMIT: the commit, without git."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _of_gpus("driver_version"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
    }


def gpu_state() -> str | None:
    """Return nvidia-smi's SM and memory clocks, temperature and power."""
    return _of_gpus("clocks.sm,clocks.mem,temperature.gpu,power.draw")


def gpu_id() -> str | None:
    """Return the GPU's UUID, because GPUs of the same name may differ in speed."""
    return _of_gpus("uuid")


def known_gpu(name: str | None) -> str | None:
    """Return the GPU type in `workload/models.py` for the driver's name of a GPU."""
    words = (name or "").upper().replace("-", " ").split()
    return next((known for known in GPUS if known in words), None)


def _of_gpus(fields: str) -> str | None:
    """Return nvidia-smi's fields of this process's GPUs, a line for each."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [f"--id={seen}"] if seen else []
    return _output("nvidia-smi", *chosen, f"--query-gpu={fields}", "--format=csv,noheader")


def _commit() -> str | None:
    folder = str(Path(__file__).parent)
    return os.environ.get("GIT_COMMIT") or _output(
        "git", "-C", folder, "rev-parse", "--short", "HEAD"
    )


def _cpu() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return result.stdout.strip() or None
