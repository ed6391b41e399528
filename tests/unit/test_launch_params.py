"""Launches on a fake driver: parameters, errors, and several threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from sglang_pat._launch_params import NUM_LAUNCH_FACTS, DecodeArgument, GatherArgument
from sglang_pat._scheduler import PlanCapacity
from sglang_pat.executors import loaded_kernels
from sglang_pat.executors.jit import SHIPPED, KernelBuildError, KernelConfig
from sglang_pat.executors.loaded_kernels import Launcher, LaunchFacts, check, kv_map, load_kernels

CAPACITY = PlanCapacity(num_tickets=3, num_work_items=5)
CONFIG = KernelConfig(torch.bfloat16, 128, (9, 0))


def parameters(argument: DecodeArgument | GatherArgument) -> int:
    (address,) = (ctypes.c_void_p * 1).from_address(argument.address)
    assert address is not None
    return address


def first_words(argument: DecodeArgument | GatherArgument, count: int) -> list[int]:
    """Return the first pointers in the parameters, which are the plan's sections."""
    return [*(ctypes.c_uint64 * count).from_address(parameters(argument))]


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


# --- tensor maps ---


class Encoder:
    """Records the arguments of tensor maps."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __call__(self, kind: Any, rank: int, address: int, *rest: Any) -> tuple[Any, Any]:
        sizes, strides, box, steps = ([int(n) for n in numbers] for numbers in rest[:4])
        self.made.append((address, sizes, strides, box, steps, rank, kind, *rest[4:]))
        pointer = 4096 * len(self.made)
        return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: pointer)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoder]:
    fake = Encoder()
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", fake)
    loaded_kernels._tensor_map.cache_clear()
    yield fake
    loaded_kernels._tensor_map.cache_clear()


@pytest.mark.parametrize(
    ("shape", "element_bytes"),
    [
        ((100, 1, 80), 2),
        ((100, 3, 96), 2),
        ((100, 1, 64), 1),
        ((100, 1, 192), 1),
        ((31, 8, 128), 2),
        ((0, 8, 128), 2),
    ],
)
def test_no_map_of_what_has_no_whole_boxes(
    encoder: Encoder, shape: tuple[int, ...], element_bytes: int
) -> None:
    """A map needs rows of whole 128 bytes, and at least as many slots as a box."""
    assert kv_map(1 << 20, torch.Size(shape), element_bytes, 4096) == 0
    assert encoder.made == []


@pytest.mark.parametrize(
    ("shape", "element_bytes", "row_bytes"),
    [((32, 1, 64), 2, 128), ((1000, 8, 128), 2, 2048), ((77, 2, 128), 1, 256)],
)
def test_a_map_has_the_rows_of_a_cache(
    encoder: Encoder, shape: tuple[int, ...], element_bytes: int, row_bytes: int
) -> None:
    """A box has 32 slots of 128 bytes, the slots' stride, and a swizzle."""
    assert kv_map(1 << 20, torch.Size(shape), element_bytes, 8192) == 4096
    ((address, sizes, strides, box, steps, rank, *modes),) = encoder.made
    assert (address, sizes, strides) == (1 << 20, [row_bytes, shape[0]], [8192])
    assert (box, steps, rank) == ([128, 32], [1, 1], 2)
    assert driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8 in modes
    assert driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B in modes
    assert driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE in modes


def test_a_map_is_made_once(encoder: Encoder) -> None:
    """Every layer of every step requests a map; each cache and view has its own."""
    shape = torch.Size((100, 8, 128))
    found = {kv_map(address, shape, 2, 2048) for address in (1 << 20, 1 << 21) for _ in range(3)}
    assert found == {4096, 8192}
    assert kv_map(1 << 20, shape, 2, 4096) == 3 * 4096
    assert kv_map(1 << 20, torch.Size((101, 8, 128)), 2, 2048) == 4 * 4096
    assert len(encoder.made) == 4


def test_a_driver_that_makes_no_maps_is_told_of_once(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoding also works without maps."""
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *_: (refused, None))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda error: (error, b"bad argument"))
    loaded_kernels._warn_once.cache_clear()
    shape = torch.Size((100, 8, 128))
    assert [kv_map(address, shape, 2, 2048) for address in (1 << 20, 1 << 21)] == [0, 0]
    (record,) = caplog.records
    assert "bad argument (describing a KV cache): slots that follow one another" in record.message


# --- the driver ---


def test_errors_of_the_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGetErrorString", lambda error: (error, b"bad argument"))
    success, failure = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert check((success, 7), "a count") == 7
    assert check((success, 7, 8), "two") == (7, 8)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE, bad argument \(a launch\)"):
        check((failure,), "a launch")


class Driver:
    """Stands in for a driver that loads some images and refuses others."""

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
        """Do nothing, in place of the stream."""

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


MINE, OTHERS = (16, (264, 1)), (32, (8, 2))  # stream and grid


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_launch_on_the_stream_and_grid_that_each_asked_for(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_kernels()` keeps one launcher per kernel and device, which threads share."""
    launcher = Launcher(None, 192, 64, overlap=overlap)
    launched: list[Any] = []

    def launch(config: Any, function: Any, argument: int, extra: int) -> Any:
        if not launched:  # another thread launches between this thread's settings and launch
            launched.append(None)
            other = threading.Thread(target=launcher, args=(0, *OTHERS))
            other.start()
            other.join()
        stream, grid = int(config.hStream), (config.gridDimX, config.gridDimY)
        launched.append((stream, grid))
        assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (192, 1, 1)
        assert (config.sharedMemBytes, config.gridDimZ) == (64, 1)
        assert config.numAttrs == int(overlap)
        return (loaded_kernels.driver.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(loaded_kernels.driver, "cuLaunchKernelEx", launch)
    launcher(0, *MINE)
    assert launched == [None, OTHERS, MINE]
