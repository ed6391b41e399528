"""StepView: what a step that SGLang shows has to tell, read once.

SGLang shows a step in several shapes: a batch, a namespace before a replay, a batch whose buffers
belong to the largest graph. Behind the view nothing looks at these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat._scheduler import row_lengths
from sglang_pat.batch import IntArray
from sglang_pat.sglang.tree.channel import StepRequests
from sglang_pat.sglang.tree.radix import Request, RequestFields
from sglang_pat.sglang.tree.rows import DECODE_ROWS, RowShape


class StepView(NamedTuple):
    """A step, as far as it is read.

    Attributes
    ----------
    requests : StepRequests or None
        The requests in row order. None: they are not known (warm-up, capture).
    size : int
        Requests of the batch, padding of a graph or of data parallelism included.
    num_known : int
        Requests without padding, which lies behind them.
    is_idle : bool
        Whether the batch only keeps a rank of data parallelism in step with the others.
    shape : RowShape
        The rows of each request.
    req_pool_indices, seq_lens : torch.Tensor
        On the device, as SGLang gives them: `[size]`.
    seq_lens_cpu : torch.Tensor or None
        The lengths on the host. None: SGLang does not give them.
    """

    requests: StepRequests | None
    size: int
    num_known: int
    is_idle: bool
    shape: RowShape
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None

    @classmethod
    def of(
        cls, forward_batch: Any, requests: StepRequests | None, shape: RowShape = DECODE_ROWS
    ) -> StepView:
        """Read a decode batch of SGLang's, in any of its shapes."""
        is_idle = _is_idle(forward_batch)
        return cls(
            requests,
            forward_batch.batch_size,
            0 if is_idle else num_known(forward_batch, requests),
            is_idle,
            shape,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.seq_lens_cpu,
        )

    def lengths(self, reqs: Sequence[Request] | None) -> IntArray:
        """Return the lengths of the requests on the host, 0 behind them.

        A copy, because SGLang may write to its own.

        reqs: see `host_lengths`.
        """
        given = host_lengths(self, reqs)
        lens: IntArray = row_lengths(given, self.num_known, self.size)
        return lens


def num_known(forward_batch: Any, requests: StepRequests | None) -> int:
    """Count the requests of a batch without padding.

    SGLang announces the padding of a graph, and not that of MLP synchronisation. Where the requests
    are not known, as in a capture, what is not announced counts as requests.
    """
    most: int = forward_batch.batch_size - getattr(forward_batch, "num_padding", 0)
    return most if requests is None else min(len(requests.reqs), most)


def host_lengths(
    batch: Any, reqs: Sequence[Request] | None, *, are_bounds: bool = False
) -> npt.NDArray[np.int64]:
    """Return the lengths of requests on the host.

    Where SGLang does not give them, they are those after the last results that it has processed: in
    speculative decoding a request may be longer by what has been accepted since, never shorter.

    Parameters
    ----------
    batch : ForwardBatch or StepView
        Shows `seq_lens_cpu` and `seq_lens`.
    reqs : sequence of Req or None
        The requests, if they speculate. None: if SGLang does not give lengths, wait for the device.
    are_bounds : bool
        Whether what SGLang gives may be longer than the requests are: as if it gave nothing.
    """
    on_host = None if are_bounds else batch.seq_lens_cpu
    if on_host is None and reqs is not None:
        committed = map(RequestFields.of(reqs[0]).committed_len, reqs)
        return np.fromiter(committed, dtype=np.int64, count=len(reqs))
    if on_host is None:
        on_host = batch.seq_lens.cpu()
    lens: npt.NDArray[np.int64] = on_host.numpy()
    return lens


def _is_idle(forward_batch: Any) -> bool:
    """Return True if a batch has no requests, and keeps a rank of data parallelism in step.

    A graph that is replayed shows the mode of its capture, and the batch's own beside it. A batch
    of padding that SGLang turned into a verify step, for a hybrid model, shows both too.
    """
    kinds = ("", "actual_", "_original_")
    modes = (getattr(forward_batch, f"{kind}forward_mode", None) for kind in kinds)
    return any(mode is not None and mode.is_idle() for mode in modes)
