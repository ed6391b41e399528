"""The cost model of a GPU: the file that `sglang-pat calibrate` writes and schedulers read.

There is one file per GPU, driver, kernels and kind of layer, in the folder of compiled kernels. All
ranks of a server read the same file, so they make the same plans. Without a file, the costs that
are shipped with the package apply.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_pat._scheduler import SHIPPED_COSTS, CostModel
from sglang_pat.executors import jit, kernel_cache
from sglang_pat.output_file import replace_file
from sglang_pat.plan import shipped_latent_costs

FOLDER = "calibration"
# Kinds of layers with separate costs. Latent attention has two kinds, by the dtype of the KV cache.
PLAIN, LATENT, ONE_BYTE_LATENT = KINDS = ("plain", "latent", "latent-fp8")
_FORMAT = 1
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Machine:
    """GPU, driver and kernels for which a calibration is valid."""

    gpu: str
    driver: str
    kernels: str

    @classmethod
    def of_device(cls, device: torch.device) -> Machine:
        return cls(torch.cuda.get_device_name(device), driver_version(), jit.source_hash())

    def file_name(self, kind: str = PLAIN) -> str:
        """Return the name of the calibration file of a kind of layer."""
        words = f"{self.gpu} {self.driver} {self.kernels}"
        if kind != PLAIN:
            words += f" {kind}"
        return "".join(c if c.isalnum() or c in "." else "-" for c in words) + ".json"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted cost model, as its file stores it.

    Attributes
    ----------
    machine
        The machine that was measured.
    costs
        Arguments of `CostModel`.
    microseconds
        The fitted times, by name.
    error, worst
        The root mean square and the maximum of the fit's relative errors.
    num_plans
        How many plans were measured.
    kind
        The kind of the layers: one of `KINDS`.
    """

    machine: Machine
    costs: Mapping[str, float]
    microseconds: Mapping[str, float]
    error: float
    worst: float
    num_plans: int
    kind: str = PLAIN

    @property
    def cost_model(self) -> CostModel:
        return CostModel(**self.costs)

    def save(self, cache: Path | None = None) -> Path:
        """Write the file atomically. Raise OSError if it cannot be written."""
        path = _folder(cache) / self.machine.file_name(self.kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": _FORMAT, **asdict(self)}
        if self.kind == PLAIN:
            # Earlier versions of this package with the same kernels read this file, too, and they
            # refuse this field.
            del data["kind"]
        replace_file(path, json.dumps(data, indent=1))
        return path


def load(machine: Machine, cache: Path | None = None, *, kind: str = PLAIN) -> Calibration | None:
    """Return the calibration of a machine for a kind of layer, or None if there is none.

    Raises KernelCacheError if the file cannot be used. The message says what to do.
    """
    path = _folder(cache) / machine.file_name(kind)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error
    try:
        return _read(data, machine, kind)
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, error) from error


def costs_of(device: torch.device, *, latent: bool = False, one_byte: bool = False) -> CostModel:
    """Return the costs that were measured on this machine, or else those shipped for its GPU.

    latent: costs of latent attention. one_byte: costs with an fp8 KV cache; only latent attention
    has separate costs for it. Raises KernelCacheError like `load`.
    """
    machine = _machine(device)
    found = load(machine, kind=kind_of(latent=latent, one_byte=one_byte))
    if found is not None:
        return found.cost_model
    return shipped_latent_costs(machine.gpu) if latent else shipped_costs(machine.gpu)[0]


def kind_of(*, latent: bool, one_byte: bool) -> str:
    """Return the kind of a layer."""
    if not latent:
        return PLAIN
    return ONE_BYTE_LATENT if one_byte else LATENT


def shipped_costs(gpu: str) -> tuple[CostModel, str]:
    """Return the costs that the package ships for a GPU, and where they come from."""
    for name, is_measured, costs in SHIPPED_COSTS:
        if name in gpu:
            return costs, f"measured on the {name}" if is_measured else f"estimates for the {name}"
    return CostModel(), "those of the H100"


def driver_version() -> str:
    """Return the version of the driver. If it cannot be read, return the driver's CUDA version."""
    try:
        words = _DRIVER_FILE.read_text().split()
    except OSError:
        return f"cuda-{torch._C._cuda_getDriverVersion()}"  # type: ignore[attr-defined]
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


@functools.cache
def _machine(device: torch.device) -> Machine:
    return Machine.of_device(device)


def _folder(cache: Path | None) -> Path:
    return (kernel_cache.default_cache() if cache is None else cache) / FOLDER


def _read(data: Any, machine: Machine, kind: str) -> Calibration:
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise ValueError(f"not in format {_FORMAT}")
    found = Calibration(**(data | {"machine": Machine(**data["machine"])}))
    if found.machine != machine:
        raise ValueError(f"made for {found.machine}, this is {machine}")
    if found.kind != kind:
        raise ValueError(f"made for layers of kind {found.kind!r}, not {kind!r}")
    _ = found.cost_model  # raises if a cost is out of range
    return found


def _unusable(path: Path, error: Exception) -> kernel_cache.KernelCacheError:
    return kernel_cache.KernelCacheError(
        f"{path} is not a usable calibration ({error}): remove it, or make it again: "
        "sglang-pat calibrate"
    )
