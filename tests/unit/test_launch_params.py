"""What the host passes to the driver, without a GPU: the parameters, and the driver's answers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from sglang_pat._launch_params import NUM_LAUNCH_FACTS, DecodeArgument, GatherArgument
from sglang_pat._scheduler import PlanCapacity
from sglang_pat.executors import loaded_kernels
from sglang_pat.executors.jit import SHIPPED, KernelBuildError, KernelConfig
from sglang_pat.executors.loaded_kernels import LaunchFacts, check, load_kernels

CAPACITY = PlanCapacity(num_tickets=3, num_work_items=5)
CONFIG = KernelConfig(torch.bfloat16, 128, (9, 0))


def first_words(argument: DecodeArgument | GatherArgument, count: int) -> list[int]:
    """The first pointers in the parameters: those of the plan's sections."""
    (address,) = (ctypes.c_void_p * 1).from_address(argument.address)
    return [*(ctypes.c_uint64 * count).from_address(address)]


def test_facts_have_a_name_each() -> None:
    assert len(LaunchFacts._fields) == NUM_LAUNCH_FACTS


def test_the_plan_is_found_section_by_section() -> None:
    layout = CAPACITY.layout()
    offsets = [4 * offset for name, offset in layout.items() if name != "size"]
    gather, decode = GatherArgument(), DecodeArgument()
    entries = [*CAPACITY.entries().values()]
    gather.set(4096, entries, 1, 2, 3, 4, True)
    decode.set_buffers(4096, entries, 1, 2, 3)
    for argument in (gather, decode):
        assert first_words(argument, len(offsets)) == [4096 + offset for offset in offsets]


def test_a_capacity_of_other_sections_is_refused() -> None:
    with pytest.raises(ValueError, match=r"capacity must have 6 entries \(PlanCapacity\), got 2"):
        DecodeArgument().set_buffers(4096, [1, 2], 1, 2, 3)


def test_errors_of_the_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGetErrorString", lambda error: (error, b"bad argument"))
    success, failure = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert check((success, 7), "a count") == 7
    assert check((success, 7, 8), "two") == (7, 8)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE, bad argument \(a launch\)"):
        check((failure,), "a launch")


class Driver:
    """Loads some images, and refuses others."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, refused: str) -> None:
        self.built: list[bool] = []
        self._folder, self._refused = tmp_path, refused
        for folder in (SHIPPED, "cache"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "kernels.cubin").write_text(folder)
        load_kernels.cache_clear()
        monkeypatch.setattr(loaded_kernels, "build", self._build)
        monkeypatch.setattr(loaded_kernels, "LoadedKernels", self._load)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: self)

    def synchronize(self) -> None:
        """Of the stream."""

    def _build(self, config: KernelConfig, *, force: bool = False) -> Path:
        self.built.append(force)
        first = "cache" if self._refused == "cache" else SHIPPED
        return self._folder / ("cache" if force else first) / "kernels.cubin"

    def _load(self, image: bytes, config: KernelConfig) -> Any:
        if image.decode() == self._refused:
            raise RuntimeError("CUDA error: CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
        return image.decode()


@pytest.fixture(autouse=True)
def _no_kernels_are_kept() -> Any:
    yield
    load_kernels.cache_clear()


def test_an_image_of_the_wheel_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Driver(tmp_path, monkeypatch, refused="none")
    assert load_kernels(CONFIG, 0) == load_kernels(CONFIG, 0) == SHIPPED
    assert cuda.built == [False]


def test_an_image_of_the_wheel_that_the_driver_refuses_is_compiled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Driver(tmp_path, monkeypatch, refused=SHIPPED)
    assert load_kernels(CONFIG, 0) == "cache"
    assert cuda.built == [False, True]
    assert "the kernels are compiled here instead" in caplog.text


def test_another_image_that_the_driver_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(tmp_path, monkeypatch, refused="cache")
    command = r"sglang-pat build --force --arch 9\.0 --dtype bfloat16 --head-dim 128"
    with pytest.raises(KernelBuildError, match=rf"kernels\.cubin cannot be loaded.*{command}"):
        load_kernels(CONFIG, 0)
