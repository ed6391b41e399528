"""A plug-in for tests: replaces parts of SGLang that need a CUDA driver even on the CPU.

- LoRA makes tensors in pinned memory. The plug-in pins nothing.
- The hierarchical cache copies KV between its tiers with kernels. The plug-in copies with torch, as
  far as an engine with HICACHE_ARGUMENTS needs.
- Data parallelism pads a batch on a CPU with a fill length that `torch_native` lacks, and in 0.5.17
  gathers it by an operator without a CPU version. The plug-in gathers with `torch.distributed`.

With a driver nothing is replaced. The replacements apply to every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.plugins import install_plugin
from sglang_pat.sglang.cpu import cuda_driver_is_present

HICACHE_ARGUMENTS = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}


def go_without_driver(folder: Path, environment: pytest.MonkeyPatch) -> None:
    """Install the plug-in for engines that start later, or skip the test if there is a driver."""
    if cuda_driver_is_present():
        pytest.skip("runs only where there is no CUDA driver")
    install_plugin(folder, "fakes.driver")
    environment.syspath_prepend(folder)  # inherited by the engine's processes


def register() -> None:
    """The plug-in's entry point, in every process of the engine."""
    if cuda_driver_is_present():
        return
    from sglang.srt.distributed.parallel_state import GroupCoordinator as Group
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common, mha

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    for device in ("cpu", "cuda"):  # 0.5.17 uses the GPU's entry
        name = f"get_{device}_graph_seq_len_fill_value"
        setattr(TorchNativeAttnBackend, name, lambda self: 1)
    Group.all_gather_into_tensor = Group._all_gather_into_tensor
    Group.reduce_scatter_tensor = Group._reduce_scatter_tensor
    torch.Tensor.pin_memory = lambda self, *args: self
    mha.transfer_kv_direct = transfer_kv_direct
    common.ALLOC_MEMORY_FUNCS["cpu"] = new_host_memory


def _unpinned(new_tensor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(new_tensor)
    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return new_tensor(*args, **kwargs | {"pin_memory": False})

    return unpinned


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the tokens at `src_indices` to `dst_indices`, in each layer."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def new_host_memory(dims: Sequence[int], dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """Return host memory that is not registered with a driver."""
    return torch.zeros(*dims, dtype=dtype)
