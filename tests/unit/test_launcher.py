"""Launcher: one kernel, launched from any thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang_pat.executors import loaded_kernels
from sglang_pat.executors.loaded_kernels import Launcher

MINE, OTHERS = (16, (264, 1)), (32, (8, 2))  # stream and grid


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_launch_on_the_stream_and_grid_that_each_asked_for(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers are shared: `load_kernels()` keeps one per kernel and device."""
    launcher = Launcher(None, 192, 64, overlap=overlap)
    launched: list[Any] = []

    def launch(config: Any, function: Any, argument: int, extra: int) -> Any:
        if not launched:  # another thread launches between this one's settings and its launch
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
