"""WindowAttention: PackAttention for layers that attend to the last tokens of a request only.

Attention does not depend on the order of keys. So a row of such a layer becomes an ordinary row of
another table, which begins at a cut that several requests have in common:

    the cut to the end of the path    shared, as far as paths are
    the end of the path to the end    the tail, which grows
    the window's begin to the cut     private, and shrinks as the window moves on

The row has the window's length, and a plan serves it until the window begins at the cut. Only the
table changes from step to step, on the device. Scheduler and kernels are those of other layers.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat.attention import INTS, PackAttention
from sglang_pat.batch import Step, check_integers

# Tokens by which requests may grow under one cut: a row reads as many more of its own. Small
# windows have a part of them.
SLACK, SLACK_PART = 64, 8
AHEAD = 4  # the default of `ahead`
_MAX_INT32 = 2**31 - 1


class WindowAttention(PackAttention):
    """Decode attention over the last `window` tokens of each request.

    Used as PackAttention is, with three differences: a request may be at most `ahead` tokens longer
    on the device than `batch.seq_lens` says; `seq_lens` on the device are read by plan() and by
    refill(), with which a captured graph begins; and there is no advance().
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int,
        slot_map: torch.Tensor | None = None,
        ahead: int = AHEAD,
        **options: Any,
    ) -> None:
        """Refuse what is unsupported, and size everything else from the device.

        Parameters
        ----------
        num_qo_heads, num_kv_heads, head_dim
            As in PackAttention.
        window : int
            Tokens that a request attends to, its new one included.
        slot_map : torch.Tensor, optional
            int64 or int32 `[num_slots]`: the slot in the layers' caches, by the slot in
            `req_to_token`. It is borrowed, and read in each step. Default: they are the same.
        ahead : int
            Tokens by which a request may be longer on the device than `batch.seq_lens` says.
        options
            The other arguments of PackAttention. `max_shared_slots` has no effect: the rows of
            `max_requests` bound it.

        Raises
        ------
        ValueError
            Something is unsupported. The message names the value and what is supported.
        """
        check_integers(window=window, ahead=ahead)
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if options.get("batch_invariant"):
            raise ValueError("batch_invariant must be False with a window: cuts depend on others")
        if type(max_requests := options.get("max_requests")) is int:
            # There are fewer shared ranges than rows, and each lies within a row. The pool does not
            # bound them: each class of rows reads the same slots again.
            options["max_shared_slots"] = min(max_requests * window, _MAX_INT32)
        self._window_rule = {
            "window": int(window),
            "slack": min(SLACK, int(window) // SLACK_PART),
            "ahead": int(ahead),
        }
        super().__init__(num_qo_heads, num_kv_heads, head_dim, **options)
        if slot_map is not None:
            self._check_ids("slot_map", slot_map, 1, INTS)
            if not slot_map.is_contiguous():
                raise ValueError(f"slot_map must be dense, got strides {slot_map.stride()}")
        self.window = int(window)
        self.slot_map = slot_map
        self._table = _Table(options.get("max_requests") or 0, self.window, self.device)

    def _begin(self) -> None:
        super()._begin()
        self._cuts: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # of the plan's rows
        self._tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _rows_of(self, step: Step, *, is_planned_anew: bool) -> Step:
        """Write the step's rows, and return the step of the table."""
        size = len(step.host_seq_lens)
        table = self._table = self._table.of_size(size, is_fixed=self.is_reserved)
        if is_planned_anew:
            self._cuts = self._scheduler.cuts
            table.owner = None
        self._tensors = step.req_to_token, step.req_pool_indices, step.seq_lens
        self._write_table()
        return Step(*table.rows_of(size), np.minimum(step.host_seq_lens, self.window))

    def run(self, *tensors: Any, **options: Any) -> Any:
        """Attention of one layer under the last plan: see `PackAttention.run`."""
        if self._plan is not None and self._table.owner is not self:  # a sibling wrote it
            self._write_table()
        return super().run(*tensors, **options)

    def _write_table(self) -> None:
        if self._table.owner is not self:
            self._table.set_cuts(self._cuts)
            self._table.owner = self
        self.refill()

    def refill(self) -> None:
        """Write the table again, by the present contents of the tensors of the last plan().

        A captured graph does so before its layers.
        """
        assert self._tensors is not None
        self._table.fill(*self._tensors, self.slot_map)

    def advance(self, seq_lens: torch.Tensor, tokens: int) -> NoReturn:
        """Raise ValueError: the host must know the lengths of each step."""
        raise ValueError("advance() has no windows; call plan() for each step")

    def slots(self) -> list[torch.Tensor]:
        """Return the slots that each request reads now. For checks, on the CPU."""
        lens = self._table.seq_lens[: len(self.seq_lens)].tolist()
        return [row[:n].cpu() for row, n in zip(self._table.slots, lens, strict=False)]


class _Table:
    """The table of the windows' rows, which are rotated so that they begin at their cuts."""

    def __init__(self, size: int, window: int, device: torch.device) -> None:
        self.window = int(window)
        self.slots = torch.zeros((size, window), dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self.rows = torch.arange(size, dtype=torch.int32, device=device)
        self._first_rows = self.slots, self.rows, self.seq_lens
        self.owner: object = None  # whose cuts these are
        self.cuts = torch.zeros(size, dtype=torch.int64, device=device)

    def of_size(self, size: int, *, is_fixed: bool) -> _Table:
        """Return a table of `size` rows or more: this one, or a new one. ValueError if fixed."""
        have = len(self.rows)
        if size <= have:
            return self
        if is_fixed:
            raise ValueError(f"a batch must have at most {have} (max_requests), got {size}")
        return _Table(2 * size, self.window, self.slots.device)

    def rows_of(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the table, and the numbers and lengths of its first rows."""
        if size != len(self._first_rows[1]):
            self._first_rows = self.slots, self.rows[:size], self.seq_lens[:size]
        return self._first_rows

    def set_cuts(self, cuts: npt.NDArray[np.int64]) -> None:
        """Copy the cuts of a batch to the device. The host does not wait."""
        on_host = torch.from_numpy(cuts)
        if self.cuts.is_cuda:
            on_host = on_host.pin_memory()
        self.cuts[: len(cuts)].copy_(on_host, non_blocking=True)

    def fill(self, *tensors: Any) -> None:
        """Write the rows. tensors: the last four arguments of `fill_rows`."""
        rows = self.slots[: len(tensors[2])]
        if not rows.is_cuda:
            fill_rows(rows, self.seq_lens, self.cuts, *tensors)
            return
        from sglang_pat.executors.window_rows import fill_rows as fill_on_gpu  # needs Triton

        with torch.cuda.device(rows.device):
            fill_on_gpu(rows, self.seq_lens, self.cuts, *tensors)


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

    What `executors/window_rows.py` does, in plain torch. Columns after a row's length hold slots of
    the row.
    """
    size, window = rows.shape
    lens = seq_lens.long()[:, None]
    in_window = lens.clamp(max=window)
    first = torch.maximum(cuts[:size, None], lens - in_window)
    positions = first + torch.arange(window, device=rows.device)
    positions -= in_window * (positions >= lens)
    positions = torch.minimum(positions, lens - 1).clamp_(min=0)
    slots = req_to_token[req_pool_indices.long()[:, None], positions]
    rows.copy_(slots if slot_map is None else slot_map[slots.long()])
    row_lens[:size] = in_window[:, 0]
