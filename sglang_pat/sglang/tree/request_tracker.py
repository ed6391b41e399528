"""RequestTracker: tells the backend which requests are in the step that SGLang runs.

SGLang gives its backend a copy of the scheduler's batch without the requests. Hooks note the
requests when SGLang makes the copy, and the tracker has them while the batch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat._scheduler import same_objects
from sglang_pat.sglang import compat
from sglang_pat.sglang.start.hooks import AFTER, AROUND, Hook
from sglang_pat.sglang.tree.radix_paths import Request
from sglang_pat.sglang.tree.row_groups import batch_with_beams

_NOTE = "_sglang_pat_requests"  # attribute of ForwardBatch


class StepRequests(NamedTuple):
    """The requests of a batch in row order, and their prefix cache."""

    reqs: list[Request]  # never modified; the next step gets this list if it has these requests
    tree: Any
    has_beams: bool  # whether `reqs` has beam rows (`row_groups.VirtualRequest`)


class PathListener(Protocol):
    """An object that must be told when the paths of requests may have changed."""

    def invalidate(self, ids: Collection[int]) -> None: ...

    def invalidate_all(self) -> None: ...


class RequestTracker:
    """Tracks which batch SGLang currently runs in this process, which has one scheduler thread.

    The tracker notes the requests of a batch when SGLang makes the batch. `running()` encloses the
    batch's forward pass, in which pat's backend calls `claim_step()`. If pat does not claim a
    batch, another backend has decoded it. The next batch with the same requests then counts as new.
    """

    # Called for each batch of a draft model, because ForwardBatch.init_new makes these batches too.
    on_draft_batch: Callable[[Any, Any], None] | None = None

    def __init__(self) -> None:
        self.modes = {ForwardMode.DECODE}  # forward modes of the steps that pat plans
        self._step: StepRequests | None = None  # None in warm-ups and captures
        self._is_claimed = False
        self._claimed: StepRequests | None = None  # the last claimed step
        # The last batch's requests, if pat decoded that batch. A step with the same requests
        # gets this list object.
        self.last_reqs: list[Request] = []
        self._listeners: WeakSet[PathListener] = WeakSet()

    @property
    def is_within_step(self) -> bool:
        """True if the requests of the running step are known."""
        return self._step is not None

    def subscribe(self, listener: PathListener) -> None:
        """Report to `listener` which paths may have changed. Keeps only a weak reference."""
        self._listeners.add(listener)

    def on_target_batch(self, forward_batch: Any, batch: Any) -> None:
        """Note the requests of `forward_batch`, SGLang's copy of the scheduler's `batch`."""
        if not batch.reqs:
            return
        mode = forward_batch.forward_mode
        if mode in self.modes:
            reqs, beam_tail = batch.reqs, compat.beam_tail(batch)
            if beam_tail is not None:
                reqs = batch_with_beams(reqs, beam_tail, self.invalidate)
            # All microbatches share `last_reqs`, so no step is a repeat if they alternate. That is
            # correct, because the graphs' buffers then have another microbatch's plan.
            if not same_objects(self.last_reqs, reqs):
                self.last_reqs = list(reqs)
            step = StepRequests(self.last_reqs, batch.tree_cache, beam_tail is not None)
            note_requests(forward_batch, step)
        elif mode.is_extend():
            # In a mixed batch, requests that decode keep their paths and rows.
            decoding = set(map(id, compat.decoding_requests(batch)))
            self.invalidate(req for req in batch.reqs if id(req) not in decoding)

    @contextmanager
    def running(self, forward_batch: Any) -> Iterator[None]:
        """Enclose SGLang's work on a batch: the preparation or the forward pass.

        Calls must not be nested.
        """
        self._step = requests_of(forward_batch)
        # SGLang may prepare a batch in one call and run it in a later one.
        self._is_claimed = self._step is not None and self._step is self._claimed
        try:
            yield
        finally:
            self._step = None
            if not self._is_claimed:  # another backend may have decoded the batch
                self.last_reqs = []

    def claim_step(self, forward_batch: Any = None) -> StepRequests | None:
        """Return the running step, and note that pat decodes it.

        forward_batch: the batch, if pat plans it before it runs.
        """
        step = requests_of(forward_batch) if self._step is None else self._step
        self._is_claimed = True
        self._claimed = step
        return step

    def invalidate(self, reqs: Iterable[Request]) -> None:
        """Report that the paths or rows of these requests may have changed."""
        ids = [id(req) for req in reqs]
        for listener in self._listeners:
            listener.invalidate(ids)

    def invalidate_all(self) -> None:
        """Report that all paths may have changed."""
        for listener in self._listeners:
            listener.invalidate_all()


def requests_of(forward_batch: Any) -> StepRequests | None:
    """Return the requests that `note_requests` has put on a batch or a spec_info, or None.

    In a replay, SGLang passes a namespace, which has all attributes of the batch.
    """
    step: StepRequests | None = getattr(forward_batch, _NOTE, None)
    return step


def note_requests(batch: Any, step: StepRequests) -> None:
    """Put the requests on a batch, or on a batch's spec_info."""
    setattr(batch, _NOTE, step)


REQUEST_TRACKER = RequestTracker()


def _after_init_new(
    result: Any, cls: type, batch: Any, model_runner: Any, *args: object, **kwargs: object
) -> None:
    """Hook AFTER ForwardBatch.init_new."""
    if not model_runner.is_draft_worker:
        REQUEST_TRACKER.on_target_batch(result, batch)
    elif REQUEST_TRACKER.on_draft_batch is not None:
        REQUEST_TRACKER.on_draft_batch(result, batch)


def _around_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook AROUND ModelRunner._forward_raw."""
    if runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    with REQUEST_TRACKER.running(forward_batch):
        return original(runner, forward_batch, *args, **kwargs)


def _after_retraction(result: Any, req: Request, *args: object, **kwargs: object) -> None:
    """Hook AFTER Req.reset_for_retract."""
    REQUEST_TRACKER.invalidate([req])


TRACKER_HOOKS = (
    Hook("model_executor.forward_batch_info:ForwardBatch.init_new", _after_init_new, AFTER),
    Hook("model_executor.model_runner:ModelRunner._forward_raw", _around_forward, AROUND),
    Hook("managers.schedule_batch:Req.reset_for_retract", _after_retraction, AFTER),
)
