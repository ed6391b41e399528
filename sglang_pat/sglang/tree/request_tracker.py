"""StepChannel: carries the requests of each decode step from SGLang's scheduler to the backend.

A backend is shown a copy of the batch without its requests (eager: `dataclasses.replace`; CUDA
graph replay: a namespace). The hooks note the requests when SGLang makes the batch, and publish
them while it runs. They are installed when the backend is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from sglang.srt.plugins.hook_registry import HookType

from sglang_pat._scheduler import same_objects
from sglang_pat.sglang import compat
from sglang_pat.sglang.start.hooks import Hook
from sglang_pat.sglang.tree.radix_paths import Request
from sglang_pat.sglang.tree.row_groups import batch_with_beams

_NOTE = "_sglang_pat_requests"  # attribute of ForwardBatch


class StepRequests(NamedTuple):
    """The requests of a batch in row order, and the prefix cache that they are in.

    has_beams: rows of beams are among them (`row_groups.Row`).
    """

    reqs: list[Request]  # never written to: equal lists in a row are one object
    tree: Any
    has_beams: bool


class PathKeeper(Protocol):
    """Keeps the paths of requests, and gets notes of when they may have changed."""

    def note_moved(self, ids: Collection[int]) -> None: ...

    def forget(self) -> None: ...


class StepChannel:
    """Batch that SGLang runs right now in this process, whose scheduler is a single thread.

    A batch is noted when it is made. `enter()` and `leave()` enclose its forward. A backend that
    decodes it calls `acknowledge()`: a batch that nobody acknowledged has decoded elsewhere, so the
    next equal list of requests is not taken for the same step.
    """

    def __init__(self) -> None:
        self._step: StepRequests | None = None  # None in a warm-up or a capture
        self._is_acknowledged = False
        self._acknowledged: StepRequests | None = None  # the last one
        # Requests of the last batch, if pat decoded it: equal lists of later steps become this one.
        self._last_reqs: list[Request] = []
        self._last_drafting: list[Request] = []  # of the last batch that a draft model decodes
        self._blocks: StepRequests | None = None  # whose blocks of drafts a draft model gives now
        self._keepers: WeakSet[PathKeeper] = WeakSet()

    @property
    def is_within_step(self) -> bool:
        """True if the step that is being run is known."""
        return self._step is not None

    def subscribe(self, keeper: PathKeeper) -> None:
        """Tell `keeper` from now on which requests have moved. Holds a weak reference."""
        self._keepers.add(keeper)

    def note(self, forward_batch: Any, batch: Any) -> None:
        """SGLang has made `forward_batch` of the scheduler's `batch`."""
        if not batch.reqs:
            return
        mode = forward_batch.forward_mode
        if mode.is_decode() or mode.is_target_verify():
            reqs, beam_tail = batch.reqs, compat.beam_tail(batch)
            if beam_tail is not None:
                reqs = batch_with_beams(reqs, beam_tail, self.note_moved)
            # One list for all microbatches: where they take turns no step repeats, as it must not
            # while another one's plan is in the buffers of the graphs.
            if not same_objects(self._last_reqs, reqs):
                self._last_reqs = list(reqs)
            step = StepRequests(self._last_reqs, batch.tree_cache, beam_tail is not None)
            setattr(forward_batch, _NOTE, step)
        elif mode.is_extend():
            # Rows that decode in a mixed batch stay where they are.
            decoding = set(map(id, compat.decoding_requests(batch)))
            self.note_moved(req for req in batch.reqs if id(req) not in decoding)

    def note_drafting(self, forward_batch: Any, batch: Any) -> None:
        """SGLang has made `forward_batch` of the scheduler's `batch` for its draft model."""
        if not batch.reqs:
            return
        mode = forward_batch.forward_mode
        if mode.is_decode():
            setattr(forward_batch, _NOTE, self._drafting_step(batch))
        elif mode.is_draft_extend_v2() and same_objects(self._last_reqs, batch.reqs):
            # Before a replay the backend is shown another object, with the same input.
            step = StepRequests(self._last_reqs, batch.tree_cache, has_beams=False)
            setattr(forward_batch.spec_info, _NOTE, step)

    def _drafting_step(self, batch: Any) -> StepRequests:
        if not same_objects(self._last_drafting, batch.reqs):
            self._last_drafting = list(batch.reqs)
        return StepRequests(self._last_drafting, batch.tree_cache, has_beams=False)

    def note_blocks(self, batch: Any | None) -> None:
        """Note the scheduler's `batch` for which SGLang's draft model gives blocks of drafts.

        They come in a batch that is not made of it. None: it has given them.
        """
        is_known = batch is not None and batch.reqs
        self._blocks = self._drafting_step(batch) if is_known else None

    def drafting(self, forward_batch: Any) -> StepRequests | None:
        """Return the requests whose blocks of drafts a draft model gives; see `note_blocks`."""
        return self._blocks

    def enter(self, forward_batch: Any) -> StepRequests | None:
        """The forward of a batch begins. Returns the step outside of it, for `leave()`."""
        outer = self._step
        self._step = requests_of(forward_batch)
        # A batch may be planned first, and run in a call of its own.
        self._is_acknowledged = self._step is not None and self._step is self._acknowledged
        return outer

    def leave(self, outer: StepRequests | None) -> None:
        """The forward has ended."""
        self._step = outer
        if not self._is_acknowledged:  # requests that decode may have grown all the same
            self._last_reqs = []

    def acknowledge(self, forward_batch: Any = None) -> StepRequests | None:
        """Return the step that is being run, to the backend that decodes it.

        forward_batch: one that is planned before it is run, as it was made.
        """
        step = requests_of(forward_batch) if self._step is None else self._step
        self._is_acknowledged = True
        self._acknowledged = step
        return step

    def note_moved(self, reqs: Iterable[Request]) -> None:
        """The paths or rows of these requests may have changed."""
        ids = [id(req) for req in reqs]
        for keeper in self._keepers:
            keeper.note_moved(ids)

    def note_reset(self) -> None:
        """All paths may have changed."""
        for keeper in self._keepers:
            keeper.forget()


def requests_of(forward_batch: Any) -> StepRequests | None:
    """Requests of a batch that was noted when it was made, or of a copy of it."""
    step: StepRequests | None = getattr(forward_batch, _NOTE, None)
    return step


def step_of_extend(forward_batch: Any) -> StepRequests | None:
    """Requests of a draft-extend batch.

    None unless the batch was noted when it was made and its requests were in the last verify step.
    """
    return requests_of(forward_batch.spec_info)


def note_same_step(drafts: Any, noted: Any) -> None:
    """Note that SGLang shows drafts of the same step as before."""
    step = requests_of(noted)
    if step is not None:
        setattr(drafts, _NOTE, step)


CHANNEL = StepChannel()


def _after_init_new(
    result: Any, cls: type, batch: Any, model_runner: Any, *args: object, **kwargs: object
) -> None:
    """AFTER ForwardBatch.init_new."""
    if model_runner.is_draft_worker:  # runs the same batches, in which nobody moves
        CHANNEL.note_drafting(result, batch)
    else:
        CHANNEL.note(result, batch)


def _around_forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ModelRunner._forward_raw."""
    if runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    return _within(original, runner, forward_batch, *args, **kwargs)


def _around_load_batch(
    original: Callable[..., Any], graphs: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND DecodeCudaGraphRunner.load_batch, which prepares verify steps before their forward."""
    if graphs.model_runner.is_draft_worker or CHANNEL.is_within_step:
        return original(graphs, forward_batch, *args, **kwargs)
    return _within(original, graphs, forward_batch, *args, **kwargs)


def _within(
    original: Callable[..., Any], owner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """A call that belongs to a step."""
    outer = CHANNEL.enter(forward_batch)
    try:
        return original(owner, forward_batch, *args, **kwargs)
    finally:
        CHANNEL.leave(outer)


def _around_blocks(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND forward_batch_generation of a worker that drafts blocks and verifies them."""
    CHANNEL.note_blocks(batch)
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        CHANNEL.note_blocks(None)


def _after_retraction(result: Any, req: Request, *args: object, **kwargs: object) -> None:
    """AFTER Req.reset_for_retract."""
    CHANNEL.note_moved([req])


CHANNEL_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
        "init_new",
        _after_init_new,
        HookType.AFTER,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner:ModelRunner",
        "_forward_raw",
        _around_forward,
        HookType.AROUND,
    ),
    Hook(
        "sglang.srt.managers.schedule_batch:Req",
        "reset_for_retract",
        _after_retraction,
        HookType.AFTER,
    ),
)
# The workers of speculative decoding whose draft models give blocks.
BLOCK_WORKERS = {
    "DFLASH": "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2",
    "DSPARK": "sglang.srt.speculative.dspark_components.dspark_worker_v2:DSparkWorkerV2",
}


def block_hook(algorithm: str) -> Hook:
    """Return the hook that tells whose blocks are drafted."""
    worker = BLOCK_WORKERS[algorithm]
    return Hook(worker, "forward_batch_generation", _around_blocks, HookType.AROUND)


# The methods in which the target model verifies drafts.
VERIFY_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        "load_batch",
        _around_load_batch,
        HookType.AROUND,
    ),
)
