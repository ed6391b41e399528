"""Copies of KV in pages of 64 tokens, for kernels that read nothing smaller."""

from __future__ import annotations

import torch

from kernel.workloads import LAYERS, PAGE_SIZE

MOST_BYTES = 14 << 30  # of the copies of all layers


class Unsupported(ValueError):
    """A kernel that cannot run a case, and why."""


class PagedCopies:
    """KV of a step's requests in pages; whole pages of a shared prefix are there once.

    req_to_token: slots, `[requests, tokens of the longest]`. token_bytes: of all that is copied of
    a token in one layer. table: int32 `[requests, pages of the longest]`. Unsupported is raised if
    the copies of all layers would take more than `MOST_BYTES`.
    """

    def __init__(self, req_to_token: torch.Tensor, token_bytes: int) -> None:
        self._slots, self.table = pages_of(req_to_token)
        needed = LAYERS * self._slots.numel() * token_bytes
        if needed > MOST_BYTES:
            raise Unsupported(
                f"it reads pages of {PAGE_SIZE} tokens, and a copy in pages takes "
                f"{needed / 1e9:.0f} GB here"
            )
        self._copies: dict[int, torch.Tensor] = {}  # by the address of what was copied

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the copy of a layer's cache, made at the first call: `[pages, 64, ...]`."""
        address = cache.data_ptr()
        if address not in self._copies:
            self._copies[address] = cache[self._slots]
        return self._copies[address]


def pages_of(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut requests into pages; pages of the same slots are one.

    Returns the slot that each token of a page is a copy of, `[pages, 64]`, and the page table,
    int32 `[requests, pages of the longest]`.
    """
    requests, width = table.shape
    padded = torch.nn.functional.pad(table, (0, -width % PAGE_SIZE)).view(requests, -1, PAGE_SIZE)
    slots, block_table = padded.flatten(0, 1).unique(dim=0, return_inverse=True)
    return slots.long(), block_table.view(requests, -1).int()
