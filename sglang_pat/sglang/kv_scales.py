"""KV pools of another type than the queries: which of them pat reads, and how they are scaled.

SGLang divides keys and values by a number per layer before it stores them. Its backends differ in
whether they do: what the default backend stores in a prefill, decode must read, and the reverse.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat import support
from sglang_pat.sglang.options import Reason

# Stores and reads the numbers as they are, whatever scales a layer has.
_UNSCALED = ("torch_native",)
# Scales in some versions of SGLang only.
_UNCERTAIN = ("intel_amx",)
# Of --kv-cache-dtype, what has more scales than one per layer.
_BLOCK_SCALED = ("mxfp8",)


def is_converted(model_runner: Any) -> bool:
    """Whether the pool has a type of one byte that pat converts."""
    name = str(model_runner.kv_cache_dtype).removeprefix("torch.")
    return name in support.CONVERTED_KV_DTYPES


def are_scaled(model_runner: Any, default: str) -> bool:
    """Whether the scales of the layers apply to the pool under the default backend."""
    return is_converted(model_runner) and default not in _UNSCALED


def scales_reason(layer: RadixAttention, model_runner: Any, default: str) -> Reason | None:
    """Why pat does not decode a layer for the sake of its scales."""
    if model_runner.kv_cache_dtype_str in _BLOCK_SCALED:
        return Reason("dtype of queries and KV cache", model_runner.kv_cache_dtype_str)
    if not are_scaled(model_runner, default):
        return None
    scales = layer.k_scale, layer.v_scale
    if default in _UNCERTAIN and scales != (None, None):
        return Reason("KV pool", f"scaled, under {default}")
    try:
        read = read_scales(layer)
    except ValueError as error:
        return Reason("KV pool", str(error))
    for scale in read:
        if not 0 < scale < math.inf:
            return Reason("KV pool", f"scaled by {scale}")
    return None


def read_scales(layer: RadixAttention) -> tuple[float, float]:
    """What the stored keys and values are multiplied with. No waiting for the device.

    Raises
    ------
    ValueError
        The host does not know them.
    """
    return (
        _on_host(layer.k_scale, layer.k_scale_float),
        _on_host(layer.v_scale, layer.v_scale_float),
    )


def _on_host(stored: torch.Tensor | float | None, on_host: float | None) -> float:
    if stored is None:
        return 1.0
    if not isinstance(stored, torch.Tensor):  # from a file of scales
        return float(stored)
    if on_host is None:
        raise ValueError("with scales that the host does not know")
    return on_host
