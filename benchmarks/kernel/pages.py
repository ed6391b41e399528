"""Copies KV into pages of 64 tokens, for kernels that need such pages."""

from __future__ import annotations

import torch

from kernel.workloads import LAYERS, PAGE_SIZE

MOST_BYTES = 14 << 30  # limit for the copies of all layers


class Unsupported(ValueError):
    """A kernel cannot run a case. The message says why."""


class PagedCopies:
    """Copies of a step's KV in pages. Whole pages of a shared prefix are copied once.

    req_to_token: slots, `[requests, tokens of the longest]`. token_bytes: copied bytes per token
    and layer. table: int32 `[requests, pages of the longest]`. Raises Unsupported if the copies of
    all layers would take more than `MOST_BYTES`.
    """

    def __init__(self, req_to_token: torch.Tensor, token_bytes: int) -> None:
        self._slots, self.table = pages_of(req_to_token)
        needed = LAYERS * self._slots.numel() * token_bytes
        if needed > MOST_BYTES:
            raise Unsupported(
                f"it reads pages of {PAGE_SIZE} tokens, and a copy in pages takes "
                f"{needed / 1e9:.0f} GB here"
            )
        self._copies: dict[int, torch.Tensor] = {}  # by address of the copied cache

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the copy of a layer's cache, `[pages, 64, ...]`, which the first call makes."""
        address = cache.data_ptr()
        if address not in self._copies:
            self._copies[address] = cache[self._slots]
        return self._copies[address]


def pages_of(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide requests into pages. Equal pages are one page.

    Returns the slot of each token of a page, `[pages, 64]`, and the page table, int32 `[requests,
    pages of the longest]`.
    """
    requests, width = table.shape
    padded = torch.nn.functional.pad(table, (0, -width % PAGE_SIZE)).view(requests, -1, PAGE_SIZE)
    slots, block_table = padded.flatten(0, 1).unique(dim=0, return_inverse=True)
    return slots.long(), block_table.view(requests, -1).int()
