"""KvWriter: stores the keys and values of new tokens in a KV cache, by one kernel.

A cache of the model's dtype gets the numbers unchanged. A one-byte cache gets the same bytes that
torch would write. With torch, that takes four more kernels: two divide keys and values in place by
their scales, and two convert them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang_pat._launch_params import ScaleUse, WriteArgument
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.loaded_kernels import load_kernels

_COLUMNS = 8  # columns that a thread writes
_ALIGNMENT = 16  # bytes that a thread loads


class KvScale(NamedTuple):
    """The scale by which keys or values are divided before rounding, as the kernel reads it."""

    address: int
    use: ScaleUse


UNSCALED = KvScale(0, ScaleUse.NONE)


class KvWriter:
    """Writes keys and values of new tokens on one device, with the kernel of one KernelConfig.

    Parameters
    ----------
    config : KernelConfig
        The variant of the kernels that will read the cache.
    device : torch.device
        The device on which the kernels are loaded. They are compiled if needed (`jit.py`).
    """

    def __init__(self, config: KernelConfig, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.config = config
        # Number of columns of k and v in write(). In latent attention, k has the columns of the
        # keys that are also the values, and v has the other columns.
        self.columns = config.head_dim, config.v_head_dim
        if config.is_latent:
            self.columns = config.v_head_dim, config.head_dim - config.v_head_dim
        self._device = device
        self._argument = WriteArgument()
        self._factors: dict[float, torch.Tensor] = {}
        self._overflow = 0
        if config.kv_dtype is not None:
            # For numbers that are too large for the cache's dtype, torch writes this byte. It
            # depends on torch's version.
            infinity = torch.full((1,), math.inf, dtype=config.dtype, device=device)
            self._overflow = int(infinity.to(config.kv_dtype).view(torch.uint8))
        if device.type == "cuda":
            with torch.cuda.device(device):  # loads now: the first launch may be in a capture
                load_kernels(config, torch.cuda.current_device())

    def scale(self, divisor: torch.Tensor | float | None) -> KvScale | None:
        """Return the scale with which write() divides as `torch.Tensor.div_(divisor)` does.

        If `divisor` is a tensor, each write reads its current value. As in SGLang's pools, nothing
        is divided if the cache has the model's dtype.

        Returns None if the kernel cannot divide by `divisor`, for example if it is a number that
        occurs for the first time during a capture.
        """
        if divisor is None or self.config.kv_dtype is None:
            return UNSCALED
        if isinstance(divisor, torch.Tensor):
            # The kernel divides only as torch divides by a 0-d float32 tensor on the device: torch
            # rounds such a divisor to the dividends' dtype, but treats other tensors differently.
            if (divisor.dim(), divisor.dtype, divisor.device) != (0, torch.float32, self._device):
                return None
            return KvScale(divisor.data_ptr(), ScaleUse.DIVIDE)
        factor = self._factors.get(divisor)
        if factor is None:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            # For a number, torch multiplies by its reciprocal. The installed torch computes that
            # here, so that the bits are the same.
            factor = torch.ones((), dtype=torch.float32, device=self._device).div_(divisor)
            self._factors[divisor] = factor
        return KvScale(factor.data_ptr(), ScaleUse.MULTIPLY)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: KvScale = UNSCALED,
        v_scale: KvScale = UNSCALED,
    ) -> bool:
        """Write `k` and `v` into the caches on the current stream. `k` and `v` stay unchanged.

        Slot 0, which SGLang gives to padding, is not written. A slot beyond the caches stops the
        kernel with an error.

        Parameters
        ----------
        k, v : torch.Tensor
            `[num_tokens, num_kv_heads, head_dim]` and `[.., v_head_dim]`. There may be gaps
            between tokens and between heads. In latent attention, `k` has the first `v_head_dim`
            columns of the rows, and `v` has the others (`write_latent`).
        slots : torch.Tensor
            int32 or int64 `[num_tokens]`.
        k_cache, v_cache : torch.Tensor
            `[num_slots, num_kv_heads, head_dim]` and `[.., v_head_dim]`; written. In latent
            attention, two views of one cache: the columns of `k`, and those of `v`.
        k_scale, v_scale : KvScale
            Results of `scale()`.

        Returns
        -------
        bool
            False if the kernel cannot read or write such tensors. Then nothing is written.
        """
        is_scaled = (k_scale.use, v_scale.use) != (ScaleUse.NONE, ScaleUse.NONE)
        if is_scaled and k.data_ptr() == v.data_ptr():
            return False  # k and v are the same memory, which torch would divide twice
        if not (
            self._takes(k, k_cache, self.columns[0])
            and self._takes(v, v_cache, self.columns[1])
            and k.shape[:2] == v.shape[:2]
            and k_cache.shape[0] == v_cache.shape[0]
            and slots.dtype in (torch.int32, torch.int64)
            and slots.device == self._device
            and slots.shape == k.shape[:1]
            and slots.is_contiguous()
        ):
            return False
        num_tokens, num_heads = k.shape[0], k.shape[1]
        columns = num_heads * sum(self.columns)
        if num_tokens * columns == 0:
            return True
        argument = self._argument
        for set_rows, source, cache, scale in (
            (argument.set_keys, k, k_cache, k_scale),
            (argument.set_values, v, v_cache, v_scale),
        ):
            strides = source.stride()
            slot_bytes = cache.stride(0) * cache.element_size()
            set_rows(
                source.data_ptr(), strides[0], strides[1], cache.data_ptr(), slot_bytes, *scale
            )
        argument.set_slots(
            slots.data_ptr(),
            slots.dtype == torch.int64,
            num_heads,
            k_cache.shape[0],
            self._overflow,
        )
        with torch.cuda.device(self._device):
            kernels = load_kernels(self.config, torch.cuda.current_device())
            stream = torch.cuda.current_stream().cuda_stream
            ctas_per_token = -(-columns // (_COLUMNS * kernels.facts.write_threads))
            kernels.write_kv(argument.address, stream, (num_tokens, ctas_per_token))
        return True

    def write_latent(
        self, k: torch.Tensor, k_rope: torch.Tensor | None, slots: torch.Tensor, cache: torch.Tensor
    ) -> bool:
        """Write the rows of latent attention. Returns what write() returns.

        Parameters
        ----------
        k : torch.Tensor
            `[num_tokens, 1, v_head_dim]`; without `k_rope`, `[num_tokens, 1, head_dim]`.
        k_rope : torch.Tensor or None
            `[num_tokens, 1, head_dim - v_head_dim]`: the columns after those of `k`.
        slots : torch.Tensor
            int32 or int64 `[num_tokens]`.
        cache : torch.Tensor
            `[num_slots, 1, head_dim]`; written.
        """
        split = self.columns[0]
        if k_rope is None:
            k, k_rope = k[..., :split], k[..., split:]
        return self.write(k, k_rope, slots, cache[..., :split], cache[..., split:])

    def _takes(self, rows: torch.Tensor, cache: torch.Tensor, head_dim: int) -> bool:
        """True if the kernel can read `rows`, `[tokens, heads, head_dim]`, and write `cache`."""
        if rows.dim() != 3 or cache.dim() != 3 or rows.shape[1:] != cache.shape[1:]:
            return False
        strides = rows.stride()
        element_bytes = rows.element_size()
        return (
            rows.shape[2] == head_dim
            and rows.dtype == self.config.dtype
            and cache.dtype == self.config.cache_dtype
            and rows.device == cache.device == self._device
            and strides[2] == 1
            and cache.stride(2) == 1
            and (cache.shape[1] == 1 or cache.stride(1) == head_dim)
            and rows.data_ptr() % _ALIGNMENT == 0
            and cache.data_ptr() % _ALIGNMENT == 0
            and strides[0] * element_bytes % _ALIGNMENT == 0
            and strides[1] * element_bytes % _ALIGNMENT == 0
            and cache.stride(0) * cache.element_size() % _ALIGNMENT == 0
        )

    def agrees_with_torch(self) -> bool:
        """True if kernel and torch write the same bytes for all numbers of the model's dtype.

        Waits for the device.
        """
        num_tokens = -(-(2**16) // min(self.columns))
        slots = torch.arange(1, num_tokens + 1, device=self._device)
        cache_dtype = self.config.cache_dtype
        divisors: list[torch.Tensor | float | None] = [None]
        if self.config.kv_dtype is not None:
            on_device = torch.tensor(0.3137, dtype=torch.float32, device=self._device)
            divisors += [float(on_device), on_device]
        for divisor in divisors:
            scale = self.scale(divisor)
            if scale is None:
                return False
            k, v = (self._all_numbers(num_tokens, each) for each in self.columns)
            k_cache, v_cache = (
                torch.zeros(num_tokens + 1, 1, each, dtype=cache_dtype, device=self._device)
                for each in self.columns
            )
            if not self.write(k, v, slots, k_cache, v_cache, scale, scale):
                return False
            for rows, cache in ((k, k_cache), (v, v_cache)):
                expected = rows if divisor is None else rows.div_(divisor)
                expected = expected.to(cache_dtype)
                if not expected.view(torch.uint8).equal(cache[1:].view(torch.uint8)):
                    return False
        return True

    def _all_numbers(self, num_tokens: int, columns: int) -> torch.Tensor:
        """Return keys or values of one head with each bit pattern of the dtype at least once."""
        patterns = torch.arange(num_tokens * columns, device=self._device).to(torch.int16)
        return patterns.view(self.config.dtype).view(num_tokens, 1, columns)
