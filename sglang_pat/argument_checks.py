"""Checks of the arguments of PackAttention.

Each check raises TypeError or ValueError that names the argument, its value and what is allowed.
"""

from __future__ import annotations

import math
from numbers import Real

import numpy as np
import torch

from sglang_pat import support
from sglang_pat.batch import IntArray
from sglang_pat.executors.layer import Scale
from sglang_pat.messages import quoted
from sglang_pat.plan import HeadConfig

INTS = (torch.int64, torch.int32)


# --- of a PackAttention ---


def check_shape(shape: HeadConfig) -> None:
    num_qo_heads, num_kv_heads, *head_dims = shape
    if num_qo_heads < 1 or num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            "num_qo_heads must be a positive multiple of num_kv_heads, "
            f"got {num_qo_heads} and {num_kv_heads}"
        )
    if shape.group_size > support.max_group_size(*head_dims):
        raise support.unsupported("query heads per KV head", shape.group_size)
    if tuple(head_dims) not in support.HEAD_DIMS:
        raise support.unsupported("head_dim", support.head_dim_name(*head_dims))
    if shape.is_latent and num_kv_heads != 1:
        raise ValueError(f"latent attention has 1 KV head, got {num_kv_heads}")


def check_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for each in (dtype, kv_dtype):
        if not isinstance(each, torch.dtype):
            raise TypeError(f"a dtype must be a torch.dtype, got {quoted(each)}")
    name, kv_name = (str(each).removeprefix("torch.") for each in (dtype, kv_dtype))
    if name not in support.DTYPES:
        raise support.unsupported("dtype of queries and KV cache", dtype)
    if kv_dtype != dtype and kv_name not in support.CONVERTED_KV_DTYPES:
        raise support.unsupported("dtype of queries and KV cache", f"{dtype} and {kv_dtype}")


def canonical_device(device: torch.device | str) -> torch.device:
    """Return the device, with `cuda` as the `cuda:N` that tensors report."""
    given = device
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):  # torch's message lists devices that pat lacks
        raise ValueError(f"device must be cpu or cuda, got {quoted(given)}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device}")
    if device.type == "cuda" and (device.index or 0) >= (found := torch.cuda.device_count()):
        raise ValueError(f"device {device}: torch finds {found} CUDA devices here")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# --- of a step. This code runs in every step, so it must be fast. ---


def check_seq_lens(lens: IntArray) -> None:
    """Check `DecodeBatch.seq_lens`."""
    if not isinstance(lens, np.ndarray) or lens.dtype != np.int32 or lens.ndim != 1:
        raise TypeError(f"batch.seq_lens must be a 1-D int32 NumPy array, got {_description(lens)}")
    if not lens.flags.c_contiguous:
        raise ValueError(f"batch.seq_lens must be contiguous, got strides {lens.strides}")


def check_per_request(
    name: str, tensor: torch.Tensor, lens: IntArray, device: torch.device
) -> None:
    """Check a tensor that has one integer per request."""
    try:
        is_right = tensor.shape == lens.shape and tensor.dtype in INTS and tensor.device == device
    except AttributeError:
        is_right = False
    if is_right:
        return
    check_ids(name, tensor, 1, INTS, device)
    raise ValueError(f"{name} must have one entry per request, {len(lens)}, got {len(tensor)}")


def check_ids(
    name: str,
    tensor: torch.Tensor,
    ndim: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor of integers."""
    _check_is_tensor(name, tensor)
    if tensor.dtype not in dtypes or tensor.ndim != ndim:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {ndim}-D {allowed}, got {_description(tensor)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


# --- of a layer ---


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check a tensor. None as the first number of `shape` allows any number of slots."""
    if type(tensor) is not torch.Tensor:  # faster than isinstance()
        _check_is_tensor(name, tensor)
    have = tensor.shape
    is_cache = shape[0] is None
    if have != shape and not (is_cache and len(have) == len(shape) and have[1:] == shape[1:]):
        expected = ", ".join("num_slots" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{expected}], got {list(have)}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        allowed = "one of " * (len(dtypes) > 1) + ", ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {allowed}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_latent_values(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    if k_cache.data_ptr() != v_cache.data_ptr() or k_cache.stride() != v_cache.stride():
        columns = v_cache.shape[-1]
        raise ValueError(
            f"v_cache must be the view k_cache[..., :{columns}], got "
            f"address {v_cache.data_ptr()} and strides {v_cache.stride()} beside "
            f"{k_cache.data_ptr()} and {k_cache.stride()}"
        )


def check_scale(
    name: str, scale: Scale, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Check a factor for the keys or the values in a cache."""
    if not isinstance(scale, torch.Tensor):
        check_positive(name, scale)
        return
    if kv_dtype == dtype:
        raise ValueError(f"{name} must be a number over a KV cache of {dtype}")
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(
            f"{name} must be a number or one float32, got {_description(scale)} {list(scale.shape)}"
        )
    if scale.device != device:
        raise ValueError(f"{name} must be on {device}, got {scale.device}")


def check_positive(name: str, value: float, allowed: str = "positive") -> None:
    """Raise TypeError unless `value` is a number, and ValueError unless 0 < value < inf."""
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def check_number(name: str, value: float) -> None:
    # Checks for float first, because nearly all values are floats. Real includes NumPy's numbers
    # and bools, but not tensors.
    if type(value) is not float and (not isinstance(value, Real) or isinstance(value, bool)):
        raise TypeError(f"{name} must be a number, got {quoted(value)}")


def _check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def _description(value: object) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{value.ndim}-D {value.dtype}"
    return type(value).__name__
