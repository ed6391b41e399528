"""The GPUs of this machine, for `doctor` and `build`."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from sglang_pat.sglang.cpu import cuda_driver_is_present

_NVIDIA_SMI_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: name, compute capability, and version of its driver."""

    name: str
    capability: tuple[int, int]
    driver: str

    @property
    def arch(self) -> str:
        """The compute capability as text: `9.0`."""
        return f"{self.capability[0]}.{self.capability[1]}"


def find_gpus() -> list[Gpu]:
    """Return the GPUs that torch can use. If torch finds none, those that nvidia-smi lists."""
    known = ask_nvidia_smi()
    if not cuda_driver_is_present():  # saves the import of torch
        return known
    try:
        import torch
    except Exception:  # a broken installation may raise anything; `doctor` reports it
        return known
    if not torch.cuda.is_available():
        return known
    driver = known[0].driver if known else "unknown"
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(device.name, (device.major, device.minor), driver) for device in devices]


def ask_nvidia_smi() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists. Without a working driver, the list is empty."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            ["nvidia-smi", *query],
            capture_output=True,
            text=True,
            check=False,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs counts as not working
        return []
    if answer.returncode:  # no driver is loaded
        return []
    gpus = []
    for line in answer.stdout.splitlines():
        name, capability, driver = (part.strip() for part in line.rsplit(",", 2))
        major, _, minor = capability.partition(".")
        if major.isdecimal() and minor.isdecimal():  # "[N/A]" if the GPU does not report it
            gpus.append(Gpu(name, (int(major), int(minor)), driver))
    return gpus
