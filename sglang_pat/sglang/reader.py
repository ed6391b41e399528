"""BatchReader: turns the step that SGLang runs into a DecodeBatch.

It reads the paths of requests that are new or have moved (`radix.py`, `events.py`). A forest keeps
those of the others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_pat._scheduler import PrefixForest, row_lengths
from sglang_pat.batch import DecodeBatch, IntArray, PrefixPaths
from sglang_pat.sglang.beams import BeamSource
from sglang_pat.sglang.draft_rows import DraftBatch, Drafts, DraftSource
from sglang_pat.sglang.events import RadixEvents
from sglang_pat.sglang.growth import Growth
from sglang_pat.sglang.hooks import CHANNEL, StepChannel, StepRequests
from sglang_pat.sglang.radix import (
    PathMismatchError,
    RadixSource,
    Request,
    RequestFields,
    radix_source,
    unwrapped,
)

logger = logging.getLogger(__name__)

# Reasons why a step shares nothing.
NO_REQUESTS = "no requests are known (warm-up)"
CUT = "the batch was cut into parts"
OVERFLOW = "the plan does not fit into the buffers of the CUDA graphs"

# In the order of PrefixForest.update()'s counts.
_CHANGES = ("join", "leave", "re_anchor", "split")
MISMATCH = "mismatch"  # counted with them

# Ids of moved requests that wait for a step that may share: past this, all requests have moved.
_MOST_MOVED = 10_000


class SharedStep(NamedTuple):
    """A step whose rows may share KV, where their paths are read, and what keeps them.

    reqs: one per row.
    """

    source: RadixSource
    reqs: list[Request]
    forest: PrefixForest


class BatchReader:
    """Turns the step that is being run into a DecodeBatch.

    A path is read when its request joins, and again when it has moved: a checkpoint, an extend or a
    retraction is what can give a running request another last node or another row, or a row other
    slots (docs/design/decisions/0010-kept-paths.md). The forest keeps it in between, until the
    request leaves.

    private_steps counts, by reason, the steps in which nothing could be shared. changes counts the
    requests that joined, left, or were re-anchored while they ran ("join", "leave", "re_anchor"),
    those read again because the tree had split their nodes ("split"), and those that share nothing
    because their path does not match them ("mismatch"). events are those of the last cache seen.
    """

    def __init__(self, channel: StepChannel = CHANNEL, *, strict: bool = False) -> None:
        """
        Parameters
        ----------
        channel : StepChannel
            Tells which requests have moved.
        strict : bool
            Raise PathMismatchError where a path does not match its request. Otherwise that request
            shares nothing.
        """
        self._channel = channel
        self._strict = strict
        self.private_steps: Counter[str] = Counter()
        self.changes: Counter[str] = Counter(dict.fromkeys((*_CHANGES, MISMATCH), 0))
        self.events: RadixEvents | None = None
        self._tree: Any = None
        self._source: RadixSource | None = None
        self._reqs: list[Request] = []  # whose paths the forest keeps
        self._forest = PrefixForest()
        self._version = 0  # of the requests and their paths
        self._moved: set[int] = set()  # id() of requests since the last step that may share
        self._drafts: DraftBatch | None = None  # of the last step, if it was a verify step
        self._lens: IntArray = np.zeros(0, dtype=np.int32)  # of its requests, if they speculate
        self._growth: Growth | None = None  # of these, if it is expected
        self._shares = False
        self.repeats_last = False  # whether the last step repeated the one before
        channel.subscribe(self)

    @property
    def last_shared(self) -> SharedStep | None:
        """The last step, unless nothing could be shared in it."""
        if not self._shares or self._source is None:
            return None
        return SharedStep(self._source_of_rows(), self._reqs, self._forest)

    def knows(self, step: StepRequests) -> bool:
        """Whether the step's first request was in the last step that this reader has read."""
        reqs = self._reqs if self._drafts is None else self._drafts.reqs
        return step.reqs is reqs or any(req is step.reqs[0] for req in reqs)

    def is_unchanged(self, step: StepRequests | None) -> bool:
        """Return True if a decode step repeats the last one, a token longer for each request.

        The requests are the same, in the same places, and could share.

        Nothing has run in between: not even a step in which these requests decoded elsewhere.
        """
        return step is not None and step.reqs is self._reqs and not self._moved and self._shares

    def expect_growth(self, tokens: int) -> None:
        """The plan of this step, of speculative decoding, serves requests that are so many tokens
        longer."""
        most = self._lens + np.int32(tokens)
        if self._drafts is not None:
            most = np.minimum(most, self._drafts.longest)
        self._growth = Growth(self._lens, most)

    def growth(
        self, step: StepRequests | None, forward_batch: Any, drafts: Drafts | None = None
    ) -> int | None:
        """Tokens that the requests of a step have committed since the last that was read.

        None if the step must be read: other requests than in that one, or elsewhere, or one that
        has outgrown what expect_growth() was told.

        drafts: of a verify step. None: of steps that are told how many tokens they are `ahead`.
        """
        batch = self._drafts
        if (
            self._growth is None
            or step is None
            or self._moved
            or (batch is None) != (drafts is None)
        ):
            return None
        if not self._shares or step.reqs is not (self._reqs if batch is None else batch.reqs):
            return None
        lens = row_lengths(_given_lens(forward_batch, step.reqs), len(step.reqs), len(step.reqs))
        if drafts is not None and not drafts.are_chains:
            lens -= 1  # as rows go beyond
        return self._growth.of(lens)

    def read(
        self,
        step: StepRequests | None,
        forward_batch: Any,
        drafts: Drafts | None = None,
        ahead: int = 0,
    ) -> DecodeBatch:
        """Read a step as host data.

        Parameters
        ----------
        step : StepRequests or None
            The requests of the step. None: they are not known (warm-up, capture).
        forward_batch : ForwardBatch
            A decode batch in any of SGLang's shapes (see `hooks.py`). Rows behind the requests are
            padding of a graph or of data parallelism: they get length 0.
        drafts : Drafts or None
            What the step verifies: then the DecodeBatch has a row for each draft token. None: a
            decode step.
        ahead : int
            Tokens by which the rows of a decode step are longer than the batch says. Such steps
            follow each other with any growth.

        Returns
        -------
        DecodeBatch
            Its paths are valid until the next read().

        Raises
        ------
        PathMismatchError
            In strict mode, if a path does not end where its request's shared KV ends.
        """
        begun_ns = time.perf_counter_ns()
        self._growth = None
        self.repeats_last = drafts is None and ahead == 0 and self.is_unchanged(step)
        known = num_known(step, forward_batch)
        reason = self._private_reason(step, forward_batch.batch_size)
        speculating = step.reqs if step is not None and (drafts is not None or ahead) else None
        if reason is not None or step is None:
            lens = _host_seq_lens(
                forward_batch,
                speculating if reason != CUT else None,
                known,
                drafts,
                ahead,
            )
            if step is not None:
                self.forget()
            elif _is_idle(forward_batch):
                reason = None
            batch = DecodeBatch(lens, PrefixPaths.private(len(lens)), begun_ns=begun_ns)
            return self.without_sharing(batch, reason)
        lens = _host_seq_lens(forward_batch, speculating, known, drafts, ahead)
        if drafts is not None:
            self._update_rows(step.reqs, drafts.per_request, lens)
        else:
            self._drafts = None
            self._update(step.reqs)
            if ahead:
                self._lens = lens[: len(step.reqs)] - np.int32(ahead)
        self._shares = True
        return DecodeBatch(lens, self._forest, self._version, begun_ns)

    def without_sharing(self, batch: DecodeBatch, reason: str | None) -> DecodeBatch:
        """The batch that was just read, as one in which nothing is shared. Counted if there is a
        reason."""
        self._shares = False
        if reason is not None:
            self._count_private(reason)
        paths = PrefixPaths.private(len(batch.seq_lens))
        return DecodeBatch(batch.seq_lens, paths, begun_ns=batch.begun_ns)

    def note_moved(self, ids: Iterable[int]) -> None:
        """Requests, by id(), whose paths or rows may no longer be those last read."""
        self._moved.update(ids)
        if len(self._moved) > _MOST_MOVED:  # many prompts, and nothing decoded in between
            self.forget()

    def _private_reason(self, step: StepRequests | None, num_rows: int) -> str | None:
        """Why the rows of a step share nothing; None if they may."""
        if step is None:
            return NO_REQUESTS
        if len(step.reqs) > num_rows:
            return CUT
        if step.tree is not self._tree:
            self._watch(step.tree)
        if self._source is None:
            is_off = ", which is disabled" if getattr(step.tree, "disable", False) else ""
            return f"no shared paths are known to {type(step.tree).__name__}{is_off}"
        if step.has_beams and not isinstance(self._source, BeamSource):  # from now on
            self._source = BeamSource(self._source, step.tree.req_to_token_pool.req_to_token)
        return None

    def _watch(self, tree: Any) -> None:
        self.forget()
        self._source = radix_source(tree, self._on_mismatch)
        if self._source is not None:
            self.events = RadixEvents.of(
                tree, lambda req: self._channel.note_moved([req]), self._channel.note_reset
            )
        self._tree = tree

    def forget(self) -> None:
        """Read all paths anew in the next step that may share."""
        self._reqs = []
        self._drafts = None
        self._moved.clear()

    def _source_of_rows(self) -> RadixSource:
        """Where the paths of the last step's rows are read."""
        assert self._source is not None
        if self._drafts is None:
            return self._source
        return DraftSource(self._source, unwrapped(self._tree).req_to_token_pool)

    def _update_rows(self, reqs: list[Request], count: int, lens: IntArray) -> None:
        """Bring the forest to the rows of a verify step, `count` of each request. lens: of the
        rows."""
        batch = self._drafts or DraftBatch()
        self._lens = committed = lens[: len(reqs) * count : count] - 1
        self._moved = batch.take(reqs, count, committed, self._moved)
        self._drafts = batch
        self._update(batch.rows)

    def _update(self, reqs: list[Request]) -> None:
        """Bring the forest from the requests of the last step to these."""
        if reqs is self._reqs and not self._moved:
            return
        assert self._source is not None
        before, moved = self._reqs, self._moved
        self._reqs, self._moved = [], set()  # if reading fails, all paths are read the next time
        counts = self._forest.update(before, reqs, moved, self._source_of_rows().read)
        self._reqs = reqs
        if counts is not None:
            self._version += 1
            for name, count in zip(_CHANGES, counts, strict=True):
                self.changes[name] += count

    def _on_mismatch(self, error: PathMismatchError) -> None:
        """A request's path does not match it: the request shares nothing until it moves."""
        if self._strict:
            raise error
        if self.changes[MISMATCH] == 0:
            logger.warning("pat decodes a request without sharing its KV: %s", error)
        self.changes[MISMATCH] += 1

    def _count_private(self, reason: str) -> None:
        if reason not in self.private_steps and reason != NO_REQUESTS:
            logger.warning("pat decodes without sharing KV between requests: %s", reason)
        self.private_steps[reason] += 1


def num_known(step: StepRequests | None, forward_batch: Any) -> int:
    """Count the requests of a batch without padding.

    SGLang announces the padding of a graph, and not that of MLP synchronisation. Where the requests
    are not known, as in a capture, what is not announced counts as requests.
    """
    if _is_idle(forward_batch):
        return 0
    most: int = forward_batch.batch_size - getattr(forward_batch, "num_padding", 0)
    return most if step is None else min(len(step.reqs), most)


def _is_idle(forward_batch: Any) -> bool:
    """Whether a batch without requests keeps a rank of data parallelism in step with the others.

    A graph that is replayed shows the mode of its capture, and the batch's own beside it. So does a
    batch that SGLang has turned into a verify step, of padding alone, for a hybrid model.
    """
    kinds = ("", "actual_", "_original_")
    modes = (getattr(forward_batch, f"{kind}forward_mode", None) for kind in kinds)
    return any(mode is not None and mode.is_idle() for mode in modes)


def _given_lens(forward_batch: Any, reqs: Sequence[Request] | None) -> npt.NDArray[np.int64]:
    """The lengths of requests on the host.

    Where SGLang does not give them, they are those after the last results that it has processed: in
    speculative decoding a request may be longer by what has been accepted since, never shorter.

    reqs: None if they are not known, or do not speculate. Then this waits for the device.
    """
    on_host = forward_batch.seq_lens_cpu
    if on_host is None and reqs is not None:
        committed = map(RequestFields.of(reqs[0]).committed_len, reqs)
        return np.fromiter(committed, dtype=np.int64, count=len(reqs))
    if on_host is None:
        on_host = forward_batch.seq_lens.cpu()
    lens: npt.NDArray[np.int64] = on_host.numpy()
    return lens


def _host_seq_lens(
    forward_batch: Any,
    reqs: Sequence[Request] | None,
    num_requests: int,
    drafts: Drafts | None,
    ahead: int,
) -> IntArray:
    """The lengths of the rows on the host, 0 behind the requests. A copy: SGLang may write to its
    own. reqs: see `_given_lens`."""
    given = _given_lens(forward_batch, reqs)
    lens: IntArray = row_lengths(given, num_requests, forward_batch.batch_size)
    if ahead:
        lens[lens > 0] += ahead
    return lens if drafts is None else drafts.lengths(lens)
