"""Builds the DecodeBatch of the step that SGLang runs.

`StepInputs` has the step's fields. `DecodeBatchBuilder` reads the paths of requests that are new or
whose path may have changed (`radix_paths.py`). A `PrefixForest` keeps all other paths.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat._scheduler import PrefixForest, row_lengths
from sglang_pat.batch import DecodeBatch, IntArray, PrefixPaths
from sglang_pat.reasons import StepReason
from sglang_pat.sglang import compat
from sglang_pat.sglang.tree.radix_paths import (
    CacheEventMonitor,
    PathMismatchError,
    PathReader,
    Request,
    path_reader,
)
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, RequestTracker, StepRequests
from sglang_pat.sglang.tree.row_groups import RowPaths

logger = logging.getLogger(__name__)

# The counts that PrefixForest.update() returns, in this order.
_CHANGES = ("join", "leave", "last_node_changed", "split")
MISMATCH = "mismatch"  # also a key of `changes`

# If the paths of more requests than this must be read again, the builder reads all paths again.
_MOST_MOVED = 10_000


class SharedStep(NamedTuple):
    """A step whose rows may share KV: the reader of paths, the rows, and the forest of paths."""

    reader: PathReader
    reqs: list[Request]
    forest: PrefixForest


class DecodeBatchBuilder:
    """Makes the DecodeBatch of each step of a batch that SGLang runs.

    The builder reads a request's path when the request joins, and again after each checkpoint,
    extend or retraction. These events can give a running request another last node, another row, or
    other slots (docs/design/decisions.md#kept-paths). In between, the forest keeps the path.

    Attributes
    ----------
    steps_without_sharing
        Numbers of steps in which nothing could be shared, by reason.
    changes
        Numbers of rows, by kind of change. "join", "leave": the row joined or left.
        "last_node_changed": it got another last node while it ran. "split": its path was read again
        because the tree had split a node. "mismatch": it shares nothing because its path does not
        match it; counts requests.
    events
        The monitor of the prefix cache, None before the first step that has a readable cache.
    lens
        SGLang's lengths of the last step's requests, in tokens.
    """

    def __init__(self, tracker: RequestTracker = REQUEST_TRACKER, *, strict: bool = False) -> None:
        """Make a builder.

        tracker: reports requests whose paths may have changed. strict: what happens if a path does
        not match its request. If True, PathMismatchError is raised, else the request shares
        nothing.
        """
        self._tracker = tracker
        self._strict = strict
        self.steps_without_sharing: Counter[str] = Counter()
        self.changes: Counter[str] = Counter(dict.fromkeys((*_CHANGES, MISMATCH), 0))
        self.events: CacheEventMonitor | None = None
        self._tree: Any = None
        self._reader: PathReader | None = None
        self._reqs: list[Request] = []  # requests whose paths the forest has
        self._forest = PrefixForest()
        self._version = 0  # counts changes of requests and paths
        self._moved: set[int] = set()  # id() of requests whose paths to read again
        self.lens: IntArray = np.zeros(0, dtype=np.int32)
        self._shares = False
        tracker.subscribe(self)

    @property
    def last_shared(self) -> SharedStep | None:
        """The last step, or None if nothing could be shared in it."""
        if not self._shares or self._reader is None:
            return None
        return SharedStep(self._row_reader(), self._reqs, self._forest)

    def knows(self, step: StepRequests) -> bool:
        """Return True if the step's first request was in the last step of this builder."""
        return step.reqs is self._reqs or any(req is step.reqs[0] for req in self._reqs)

    def read(self, inputs: StepInputs) -> DecodeBatch:
        """Return the DecodeBatch of a step. Its paths are valid until the next call of `read`.

        Rows after the requests are padding of length 0. In strict mode, raises PathMismatchError
        if a path does not end where its request's shared KV ends.
        """
        begun_ns = time.perf_counter_ns()
        step = inputs.requests
        reason = self._private_reason(step, inputs.size)
        given = self._request_lengths(inputs, reason)
        lens = self._row_lengths(inputs, given)
        if reason is not None or step is None:
            if step is not None:
                self.invalidate_all()
            elif inputs.is_idle:
                reason = None
            batch = DecodeBatch(lens, PrefixPaths.private(len(lens)), begun_ns=begun_ns)
            return self.without_sharing(batch, reason)
        self.lens = given[: len(step.reqs)]
        self._update(self._rows(inputs, step.reqs))
        self._shares = True
        return DecodeBatch(lens, self._forest, self._version, begun_ns)

    # --- how requests become rows: here one row each; overridden for speculative decoding ---

    def _request_lengths(self, inputs: StepInputs, reason: str | None) -> IntArray:
        """Return the lengths of the requests as far as the host knows them, and 0 for padding.

        reason: why the step shares nothing, or None.
        """
        return inputs.lengths()

    def _row_lengths(self, inputs: StepInputs, lens: IntArray) -> IntArray:
        """Return the lengths of the rows, given the lengths of the requests."""
        return lens

    def _rows(self, inputs: StepInputs, reqs: list[Request]) -> list[Request]:
        """Return the rows: one per request, or one per draft token."""
        return reqs

    def _row_reader(self) -> PathReader:
        """Return the reader of paths for the rows of the last step."""
        assert self._reader is not None
        return self._reader

    def without_sharing(self, batch: DecodeBatch, reason: str | None) -> DecodeBatch:
        """Return a copy of `batch` without shared KV, and count the reason."""
        self._shares = False
        if reason is not None:
            self._count_private(reason)
        paths = PrefixPaths.private(len(batch.seq_lens))
        return DecodeBatch(batch.seq_lens, paths, begun_ns=batch.begun_ns)

    def invalidate(self, ids: Iterable[int]) -> None:
        """Read these requests' paths again in the next step that may share. ids: their id()."""
        self._moved.update(ids)
        if len(self._moved) > _MOST_MOVED:  # after many prefills without a decode step
            self.invalidate_all()

    def _private_reason(self, step: StepRequests | None, num_rows: int) -> str | None:
        """Return why the rows of a step share nothing, or None if they may share."""
        if step is None:
            return StepReason.NO_REQUESTS
        if len(step.reqs) > num_rows:
            return StepReason.CUT
        if step.tree is not self._tree:
            self._watch(step.tree)
        if self._reader is None:
            is_off = ", which is disabled" if getattr(step.tree, "disable", False) else ""
            return f"no shared paths are known to {type(step.tree).__name__}{is_off}"
        if step.has_beams and not isinstance(self._reader, RowPaths):  # first step with beams
            self._reader = RowPaths(self._reader, step.tree.req_to_token_pool)
        return None

    def _watch(self, tree: Any) -> None:
        self.invalidate_all()
        self._reader = path_reader(tree, self._on_mismatch)
        if self._reader is not None:
            tracker = self._tracker  # callbacks must not keep this builder alive
            self.events = CacheEventMonitor.watching(
                tree, lambda req: tracker.invalidate([req]), tracker.invalidate_all
            )
        self._tree = tree

    def invalidate_all(self) -> None:
        """Read all paths again in the next step that may share."""
        self._reqs = []
        self._moved.clear()

    def _update(self, reqs: list[Request]) -> None:
        """Update the forest from the last step's requests to `reqs`."""
        if reqs is self._reqs and not self._moved:
            return
        assert self._reader is not None
        before, moved = self._reqs, self._moved
        self._reqs, self._moved = [], set()  # if reading fails, the next step reads all paths
        counts = self._forest.update(before, reqs, moved, self._row_reader().read)
        self._reqs = reqs
        if counts is not None:
            self._version += 1
            for name, count in zip(_CHANGES, counts, strict=True):
                self.changes[name] += count

    def _on_mismatch(self, error: PathMismatchError) -> None:
        """Handle a path that does not match its request: the request shares nothing for now."""
        if self._strict:
            raise error
        if self.changes[MISMATCH] == 0:
            logger.warning("pat decodes a request without sharing its KV: %s", error)
        self.changes[MISMATCH] += 1

    def _count_private(self, reason: str) -> None:
        if reason not in self.steps_without_sharing and reason != StepReason.NO_REQUESTS:
            logger.warning("pat decodes without sharing KV between requests: %s", reason)
        self.steps_without_sharing[reason] += 1


@dataclass(slots=True)
class StepInputs:
    """The fields of a step that pat reads.

    SGLang passes a ForwardBatch or, before a replay, a namespace. The tensors of the ForwardBatch
    may be the buffers of the largest graph.
    """

    requests: StepRequests | None  # in row order; None: unknown (warm-up, capture)
    size: int  # requests in the batch, with the padding of graphs or of data parallelism
    num_known: int  # requests in the batch without the padding, which comes last
    is_idle: bool  # the batch only keeps a rank of data parallelism in step with the others
    req_pool_indices: torch.Tensor  # on the device: [size]
    seq_lens: torch.Tensor  # on the device: [size]
    seq_lens_cpu: torch.Tensor | None  # None: the host has no lengths

    @classmethod
    def read(cls, forward_batch: Any, requests: StepRequests | None, **more: Any) -> Self:
        """Return the fields of SGLang's batch. more: fields of a subclass."""
        is_idle = compat.is_idle(forward_batch)
        return cls(
            requests,
            forward_batch.batch_size,
            0 if is_idle else num_known(forward_batch, requests),
            is_idle,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.seq_lens_cpu,
            **more,
        )

    def lengths(self, given: npt.NDArray[np.int64] | None = None) -> IntArray:
        """Return a copy of the lengths, because SGLang may overwrite its array. Padding gets 0.

        given: lengths to use instead of SGLang's. Waits for the device if the host has no lengths.
        """
        if given is None:
            on_host = self.seq_lens.cpu() if self.seq_lens_cpu is None else self.seq_lens_cpu
            given = on_host.numpy()
        lens: IntArray = row_lengths(given, self.num_known, self.size)
        return lens


def num_known(forward_batch: Any, requests: StepRequests | None) -> int:
    """Return the number of requests in a batch, without padding.

    SGLang reports the padding of graphs, but not the padding of MLP synchronisation. If the
    requests are not known, as in a capture, the latter padding is included.
    """
    most: int = forward_batch.batch_size - compat.num_padding(forward_batch)
    return most if requests is None else min(len(requests.reqs), most)
