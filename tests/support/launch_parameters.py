"""Parameters of a launch, read with the structs of `kernels/decode_params.h`."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from sglang_pat._scheduler import PLAN_SECTIONS

_HEADER = Path(__file__).resolve().parents[2] / "kernels" / "decode_params.h"


class _Address(ctypes.c_uint64):
    """Address of a tensor."""


def _struct(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "ScaleUse": ctypes.c_int32,
    "float": ctypes.c_float,
    "bool": ctypes.c_bool,
    "PlanView": _Address * (1 + len(PLAN_SECTIONS)),  # header and sections
    "IndexArray": _struct(("data", _Address), ("is_int64", ctypes.c_bool)),
    "SinkArray": _struct(("data", _Address), ("type", ctypes.c_int32)),
    "QueryArray": _struct(
        ("data", _Address), ("row_chunks", ctypes.c_uint32), ("head_chunks", ctypes.c_uint32)
    ),
    "QueryRows": _struct(("group_size", ctypes.c_int32), ("reciprocal", ctypes.c_int32)),
    "LogitScale": _struct(("inner", ctypes.c_float), ("outer", ctypes.c_float)),
    "TensorMap": ctypes.c_uint8 * 128,
}


def parameters(name: str) -> type[ctypes.Structure]:
    """A struct of the header."""
    (body,) = re.findall(rf"struct {name} {{\n(.*?)\n}};", _HEADER.read_text(), re.DOTALL)
    fields: list[tuple[str, Any]] = []
    declared = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?;", body, re.MULTILINE)
    for kind, star, field, count in declared:
        one = _Address if star else _TYPES.get(kind) or parameters(kind)
        if kind == "TensorMap":  # aligned to 64 bytes
            last = getattr(_struct(*fields), fields[-1][0])
            fields.append(("_", ctypes.c_uint8 * (-(last.offset + last.size) % 64)))
        fields.append((field, one * int(count) if count else one))
    return _struct(*fields)


def read(argument: int, struct: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Read the parameters of a launch, except the tensor maps.

    Parameters
    ----------
    argument
        The argument of the launch: a pointer to the pointer to the parameters.
    struct
        GatherParams, FillParams or DecodeParams.
    tensors
        Tensors into which an address may point, by name.

    Returns
    -------
    dict
        Field -> value. An address is `name` or `name+bytes`, or None if it is 0; the plan is given
        by the address of its first section.
    """

    def name_of(address: int) -> str | None:
        if not address:
            return None
        found = []
        for name, tensor in tensors.items():
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.untyped_storage().nbytes():
                found.append(f"{name}+{offset}" if offset else name)
        assert found, f"address {address} is in no tensor"
        return found[0]

    def value_of(value: Any) -> Any:
        if isinstance(value, _Address):
            return name_of(value.value)
        if isinstance(value, ctypes.Structure):
            return tuple(value_of(getattr(value, name)) for name, *_ in value._fields_)
        return value_of(value[0]) if isinstance(value, ctypes.Array) else value

    (begin,) = (ctypes.c_uint64 * 1).from_address(argument)
    found = parameters(struct).from_address(begin)
    names = [name for name, *_ in found._fields_ if name not in ("_", "kv_maps")]
    return {name: value_of(getattr(found, name)) for name in names}
