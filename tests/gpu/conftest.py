"""Which bodies of pack_decode the tests of the kernels run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from sglang_pat.executors.jit import KernelConfig


@pytest.fixture(scope="module", params=["native", "mma_sync"])
def kernel_body(request: pytest.FixtureRequest) -> Iterator[None]:
    """On Hopper: its own body, then the mma.sync bodies that other architectures run."""
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
