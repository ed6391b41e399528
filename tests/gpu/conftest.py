"""Fixtures of the GPU tests: compiled kernels, and the kernel bodies that each test runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from sglang_pat import support
from sglang_pat.executors.jit import KernelConfig, build_all

_WHOLE_SUITE = 100  # a run with fewer tests compiles only what they need


class GpuModule(pytest.Module):
    """A file of tests marked `cuda`. Without a GPU it is imported, and its tests are skipped."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        self.add_marker(pytest.mark.cuda)
        tests = [*super().collect()]
        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
        return tests


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> GpuModule:
    module: GpuModule = GpuModule.from_parent(parent, path=module_path)
    return module


@pytest.fixture(scope="session", autouse=True)
def compiled_variants(request: pytest.FixtureRequest) -> None:
    """All variants of the suite, compiled at once by all CPUs, before its first test."""
    of_kernels = [item for item in request.session.items if "kit" not in item.path.name]
    if not torch.cuda.is_available() or len(of_kernels) < _WHOLE_SUITE:
        return
    arch = torch.cuda.get_device_capability()
    bodies = (False, True) if arch == (9, 0) else (False,)
    build_all(
        [
            KernelConfig(dtype, head_dim, arch, v_head_dim, kv_dtype, force_mma_sync)
            for head_dim, v_head_dim in support.HEAD_DIMS
            for dtype in (torch.bfloat16, torch.float16)
            for kv_dtype in (None, torch.float8_e4m3fn, torch.float8_e5m2)
            if kv_dtype != torch.float8_e5m2 or head_dim == 128
            if support.has_kernels(head_dim, v_head_dim, arch, one_byte=kv_dtype is not None)
            for force_mma_sync in bodies
            if not (force_mma_sync and support.is_wide(head_dim, v_head_dim))
        ]
    )


@pytest.fixture(scope="module", params=["native", "mma_sync"])
def kernel_body(request: pytest.FixtureRequest) -> Iterator[None]:
    """On Hopper, run a test with Hopper's kernel body, then with those of other architectures."""
    native = KernelConfig.for_device
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "mma_sync":
            if torch.cuda.get_device_capability() != (9, 0):
                pytest.skip("the mma.sync bodies are this device's own")
            patch.setattr(
                KernelConfig,
                "for_device",
                lambda *args: dataclasses.replace(native(*args), force_mma_sync=True),
            )
        yield


@pytest.fixture
def memory_is_given_back() -> Iterator[None]:
    """Free cached GPU memory after the test: other test processes may use the same GPU."""
    yield
    torch.cuda.empty_cache()
