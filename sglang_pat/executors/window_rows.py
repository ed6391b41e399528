"""Writes the rows of windows on a GPU: one Triton kernel, where torch launches a dozen."""

# mypy: disable-error-code="no-untyped-def,misc,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 512  # of a row, written by one program


@triton.jit
def _fill(
    rows, row_lens, cuts, req_to_token, req_pool_indices, seq_lens, slot_map, row_stride, stride,
    WINDOW: tl.constexpr, HAS_MAP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + request).to(tl.int64)
    in_window = tl.minimum(length, WINDOW)
    first = tl.maximum(tl.load(cuts + request), length - in_window)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    position = first + column
    position = tl.where(position >= length, position - in_window, position)
    written = column < in_window
    row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
    slot = tl.load(row + position * stride, mask=written, other=0)
    if HAS_MAP:
        slot = tl.load(slot_map + slot, mask=written, other=0)
    tl.store(rows + request * WINDOW + column, slot.to(tl.int32), mask=written)
    if part == 0:
        tl.store(row_lens + request, in_window.to(tl.int32))


def fill_rows(
    rows: torch.Tensor,
    row_lens: torch.Tensor,
    cuts: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_map: torch.Tensor | None,
) -> None:
    """Write the slots of each request's window, from its cut on and around.

    Parameters
    ----------
    rows, row_lens, cuts
        int32 `[requests, window]`, int32 and int64 `[at least requests]`, dense. The first two are
        written; columns after a row's length stay as they are.
    req_to_token, req_pool_indices, seq_lens
        As in `PackAttention.plan`.
    slot_map
        See `WindowAttention`.
    """
    count, window = rows.shape
    if count:
        grid = count, triton.cdiv(window, _COLUMNS)
        _fill[grid](
            rows, row_lens, cuts, req_to_token, req_pool_indices.contiguous(),
            seq_lens.contiguous(), row_lens if slot_map is None else slot_map,
            req_to_token.stride(0), req_to_token.stride(1),
            WINDOW=window, HAS_MAP=slot_map is not None, COLUMNS=_COLUMNS,
        )  # fmt: skip
