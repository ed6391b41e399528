"""The rows that layers with a sliding window read: the KV slots of each request's last tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_pat.batch import Step


class Window(NamedTuple):
    """A sliding window, and how its plans are made (scheduler/window_cut.h).

    Attributes
    ----------
    tokens : number of tokens that a request attends to at most, including its new token.
    slack : tokens by which requests may grow before the next cut.
    ahead : tokens by which a request may be longer on the device than on the host.
    chunked : whether the window does not slide, but begins at the last multiple of `tokens`.
    slot_map : int64 or int32 `[num_slots]`, the slot in the layers' caches for each slot in
        `req_to_token`. Not copied: each step reads its current values. None: both slots are the
        same.
    """

    tokens: int
    slack: int
    ahead: int
    chunked: bool
    slot_map: torch.Tensor | None

    def rule(self) -> dict[str, Any]:
        """Return the window as arguments of the scheduler."""
        rule = {"slack": self.slack, "ahead": self.ahead, "chunked": self.chunked}
        return {"window": self.tokens, **rule}

    def attended(self, lens: Any) -> Any:
        """Return how many tokens requests attend to. lens: array or tensor of their lengths."""
        if self.chunked:
            return ((lens - 1) % self.tokens + 1) * (lens > 0)
        return lens.clip(max=self.tokens)


class WindowRows:
    """Rows of slots, one per request. Layers with a window read them, not `req_to_token`.

    Attributes
    ----------
    slots : int32 `[num_rows, tokens]`. Columns after a row's length are not read.
    seq_lens : int32 `[num_rows]`, the lengths of the rows.
    indices : int32 `[num_rows]`: 0, 1, 2 and so on.
    """

    def __init__(self, num_rows: int, window: Window, device: torch.device) -> None:
        self.window = window
        self.slots = torch.zeros((num_rows, window.tokens), dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.indices = torch.arange(num_rows, dtype=torch.int32, device=device)

    def step(self, step: Step) -> Step:
        """Return the step with these rows in place of `req_to_token`. Does not write the rows."""
        size = len(step.seq_lens)
        lens = self.window.attended(step.host_seq_lens)
        return Step(self.slots, self.indices[:size], self.seq_lens[:size], lens)

    def fill(self, step: Step, cuts: torch.Tensor) -> None:
        """Write the rows of a step in plain torch, as `kernels/fill_rows.cuh` does.

        A row begins with the tokens from its cut on, and ends with those before the cut. If the cut
        lies before the window, the row begins where the window begins. cuts: position of each cut.
        """
        size, slot_map = len(step.seq_lens), self.window.slot_map
        width = step.req_to_token.shape[1]
        lens = step.seq_lens.long().clamp(max=width)[:, None]
        in_window = self.window.attended(lens)
        first = torch.maximum(cuts.long()[:size, None], lens - in_window)
        columns = torch.arange(self.window.tokens, device=lens.device)
        positions = first + columns
        positions -= in_window * (positions >= lens)
        positions = torch.minimum(positions, lens - 1).clamp_(min=0)
        rows = step.req_pool_indices.long().clamp(0, len(step.req_to_token) - 1)  # of padding: any
        slots = step.req_to_token[rows[:, None], positions]
        if slot_map is not None:
            read = slots[columns < in_window]
            check_within("req_to_token must hold slots of slot_map", read, len(slot_map))
            slots = slot_map[slots.long().clamp(0, len(slot_map) - 1)]
        self.slots[:size] = slots
        self.seq_lens[:size] = in_window[:, 0]


def check_within(rule: str, indices: torch.Tensor, size: int) -> None:
    """Raise ValueError, whose message begins with `rule`, for an index outside of 0 to `size` - 1.

    Without this check, torch would count a negative index from the end.
    """
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        wrong = indices[(indices < 0) | (indices >= size)][0]
        raise ValueError(f"{rule}, 0 to {size - 1}, got {wrong}")
