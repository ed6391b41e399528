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
from sglang_pat.executors.layer import Scale
from sglang_pat.sglang.start.options import Reason

# Stores and reads the numbers as they are, whatever scales a layer has.
_UNSCALED = ("torch_native",)
# Scales in some versions of SGLang only.
_UNCERTAIN = ("intel_amx",)
# Multiply latent KV with the scales of its layer when they read it.
_SCALES_LATENT = ("triton", "flashmla")
# Values of --kv-cache-dtype that have more than one scale per layer.
_BLOCK_SCALED = ("mxfp8",)


def is_converted(model_runner: Any) -> bool:
    """True if the pool has a type of one byte that pat converts."""
    name = str(model_runner.kv_cache_dtype).removeprefix("torch.")
    return name in support.CONVERTED_KV_DTYPES


def are_scaled(model_runner: Any, default: str) -> bool:
    """True if the scales of the layers apply to the pool under the default backend."""
    return is_converted(model_runner) and default not in _UNSCALED


def scales_reason(layer: RadixAttention, model_runner: Any, default: str) -> Reason | None:
    """Why pat does not decode a layer for the sake of its scales. Waits for the device."""
    if model_runner.kv_cache_dtype_str in _BLOCK_SCALED:
        return Reason("dtype of queries and KV cache", model_runner.kv_cache_dtype_str)
    if not are_scaled(model_runner, default):
        return None
    if default in _UNCERTAIN and (layer.k_scale, layer.v_scale) != (None, None):
        return Reason("KV pool", f"scaled, under {default}")
    for scale in read_scales(layer):
        if isinstance(scale, torch.Tensor):
            if scale.dtype != torch.float32 or scale.numel() != 1:
                return Reason("KV pool", f"scaled by {scale.numel()} numbers of {scale.dtype}")
            if scale.device.type != model_runner.device:
                return Reason("KV pool", f"scaled by a number on {scale.device}")
            scale = scale.item()
        if not 0 < scale < math.inf:
            return Reason("KV pool", f"scaled by {scale}")
    return None


def latent_scales_reason(layer: RadixAttention, model_runner: Any, default: str) -> Reason | None:
    """Why pat does not decode a layer of latent attention for the sake of its scales.

    SGLang stores latent KV without them. Most backends read it so; others multiply. Waits for the
    device.
    """
    if model_runner.kv_cache_dtype_str in _BLOCK_SCALED:
        return Reason("dtype of queries and KV cache", model_runner.kv_cache_dtype_str)
    if not is_converted(model_runner) or default not in _SCALES_LATENT:
        return None
    for scale in (layer.k_scale, layer.v_scale):
        if scale is not None and float(scale) != 1.0:
            return Reason("KV pool", f"latent KV scaled by {float(scale)}, under {default}")
    return None


def read_scales(layer: RadixAttention) -> tuple[Scale, Scale]:
    """Return what the stored keys and values are multiplied with: latent ones with 1.

    A tensor is the one that the pool divides by, not the number that SGLang keeps beside it:
    loading new weights overwrites the tensor alone.
    """
    if support.is_latent(layer.qk_head_dim, layer.v_head_dim):
        return 1.0, 1.0
    return (
        1.0 if layer.k_scale is None else layer.k_scale,
        1.0 if layer.v_scale is None else layer.v_scale,
    )
