"""WindowAttention: PackAttention for layers that attend only to a request's last tokens.

Attention does not depend on the order of keys. So the last tokens of a request become a row of a
new table, with another order of tokens. The row begins at a cut, a position that several requests
share:

    from the cut to the end of the path              shared, wherever the paths are shared
    from the end of the path to the last token       the tail, which grows
    from the start of the window to the cut          private, and shrinks as the window moves on

The row is as long as the window. Its plan is usable until the start of the window reaches the cut.
Only the table changes from step to step, on the device. The scheduler and the kernels are the same
as for layers without a window.

Windows may be chunks (Llama 4): a request attends to the tokens from the last multiple of `window`
on. The cut is then the start of the chunk, and a plan is usable until the chunk ends.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch

from sglang_pat.argument_checks import INTS, check_ids
from sglang_pat.attention import PackAttention
from sglang_pat.batch import check_integers, is_integer
from sglang_pat.executors.window_rows import Window
from sglang_pat.messages import quoted
from sglang_pat.support import MAX_WINDOW, WINDOW_SLACK, WINDOW_SLACK_PART

AHEAD = 4  # the default of `ahead`
_MAX_INT32 = 2**31 - 1


class WindowAttention(PackAttention):
    """Decode attention over the last `window` tokens of each request.

    It is used like PackAttention, with three differences. First, a request may be up to `ahead`
    tokens longer on the device than in `batch.seq_lens`, but neither shorter nor longer than a row
    of `req_to_token`. Plain torch refuses others; the kernels stop at the end of the row. Second,
    only plan() and refill() read the `seq_lens` on the device, so a captured graph must begin with
    refill(). Third, there is no advance().
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        window: int,
        chunked: bool = False,
        slot_map: torch.Tensor | None = None,
        ahead: int | None = None,
        **options: Any,
    ) -> None:
        """Check the arguments and choose defaults for the device.

        Parameters
        ----------
        num_qo_heads, num_kv_heads, head_dim
            As in PackAttention.
        window : int
            Number of tokens that a request attends to, including its new token, at most
            MAX_WINDOW. With `chunked`, the number of tokens of a chunk. A request's row takes
            `4 * window` bytes on the device.
        chunked : bool
            A request of n tokens attends to its tokens from `(n - 1) // window * window` on.
        slot_map : torch.Tensor, optional
            int64 or int32 `[num_slots]`: for each slot in `req_to_token`, the slot in the caches of
            these layers. Borrowed, and read in each step. Default: both slots are equal.
        ahead : int
            Tokens by which a request may be longer on the device than `batch.seq_lens` says.
            Default: AHEAD, or 0 with `chunked`, which allows no other value.
        options
            The other arguments of PackAttention. `max_shared_slots` has no effect:
            `max_requests` and `window` bound the shared slots.

        Raises
        ------
        ValueError, TypeError
            Something is unsupported. The message names the value and what is supported.
        """
        if ahead is None:
            ahead = 0 if chunked else AHEAD
        check_integers(window=window, ahead=ahead)
        if not 1 <= window <= MAX_WINDOW:
            raise ValueError(
                f"window must be 1 to {MAX_WINDOW}, because each request has a row of that many "
                f"slots, got {window}; for layers without a window use PackAttention"
            )
        if not isinstance(chunked, bool):
            raise TypeError(f"chunked must be True or False, got {quoted(chunked)}")
        if options.get("batch_invariant"):
            raise ValueError("batch_invariant must be False with a window: cuts depend on others")
        if is_integer(max_requests := options.get("max_requests")):
            # There are fewer shared ranges than rows, and each range is part of a row. The size of
            # the KV pool is not a bound, because several ranges may have the same slots.
            most = max(int(max_requests), 0) * int(window)
            options["max_shared_slots"] = min(most, _MAX_INT32)
        slack = min(WINDOW_SLACK, int(window * WINDOW_SLACK_PART))
        self._window = Window(int(window), slack, int(ahead), chunked, slot_map)
        super().__init__(num_qo_heads, num_kv_heads, head_dim, **options)
        if slot_map is not None:
            check_ids("slot_map", slot_map, 1, INTS, self.device)
            if not slot_map.is_contiguous():
                raise ValueError(f"slot_map must be dense, got strides {slot_map.stride()}")
        self.window = int(window)
        self.slot_map = slot_map

    def attended(self, length: int) -> int:
        """Return the number of tokens to which a request of this length attends."""
        assert self._window is not None
        return int(self._window.attended(np.int64(length)))

    def refill(self) -> None:
        """Write the rows again, from the current values of the tensors that the last plan() got.

        A captured graph must call this before its layers.
        """
        self._executor.refill()

    def advance(self, seq_lens: torch.Tensor, tokens: int) -> NoReturn:
        """Raise ValueError: the host must know the lengths of each step."""
        raise ValueError("advance() has no windows; call plan() for each step")

    def slots(self) -> list[torch.Tensor]:
        """Return the slots that each request currently reads, on the CPU. For checks."""
        rows = self._executor.window_rows
        assert rows is not None
        lens = rows.seq_lens[: len(self.seq_lens)].tolist()
        return [row[:n].cpu() for row, n in zip(rows.slots, lens, strict=False)]
