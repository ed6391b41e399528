"""Which requests a decode step is for: a side channel from SGLang's scheduler to the attention
backend.

The batch that a backend is shown is a copy without its requests (eager: `dataclasses.replace`; CUDA
graph replay: a namespace). So the requests are noted when SGLang makes the batch, and published
while it runs. The hooks are installed when the backend is built. BatchReader makes a DecodeBatch of
a step: it reads the paths of requests that are new or have moved (`sglang_radix.py`,
`sglang_events.py`), and a forest keeps those of the others.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat import support
from sglang_pat._scheduler import PrefixForest, row_lengths, same_objects
from sglang_pat.decode_batch import DecodeBatch, IntArray, PrefixPaths
from sglang_pat.sglang_events import RadixEvents
from sglang_pat.sglang_radix import RadixSource, Request, radix_source

logger = logging.getLogger(__name__)

# Reasons why a step shares nothing.
NO_REQUESTS = "no requests are known (warm-up)"
BEAMS = "beam search moves the KV of a request to other rows"
CUT = "the batch was cut into parts"
OVERFLOW = "the plan does not fit into the buffers of the CUDA graphs"

_NOTE = "_sglang_pat_requests"  # attribute of ForwardBatch

# In the order of PrefixForest.update()'s counts.
_CHANGES = ("join", "leave", "re_anchor", "split")

# Ids of moved requests that wait for a step that may share: past this, all requests have moved.
_MOST_MOVED = 10_000


class StepRequests(NamedTuple):
    """The requests of a batch in row order, and the prefix cache that they are in."""

    reqs: list[Request]  # never written to: equal lists in a row are one object
    tree: Any
    has_beams: bool


class _Running:
    """What is being run right now in this process, whose scheduler is a single thread."""

    step: StepRequests | None = None  # None in a warm-up or a capture
    is_shown = False  # whether a reader has been asked about `step`
    # Of the last batch, if that was decoded by pat: equal lists of later steps are this one.
    last_reqs: ClassVar[list[Request]] = []
    readers: ClassVar[WeakSet[BatchReader]] = WeakSet()


def _note_requests(result: Any, cls: type, batch: Any, *args: object, **kwargs: object) -> None:
    """AFTER ForwardBatch.init_new."""
    if result.forward_mode.is_decode() and batch.reqs:
        reqs = _Running.last_reqs
        if not same_objects(reqs, batch.reqs):
            reqs = _Running.last_reqs = list(batch.reqs)
        has_beams = getattr(batch, "beam_tail", None) is not None
        setattr(result, _NOTE, StepRequests(reqs, batch.tree_cache, has_beams))
    elif result.forward_mode.is_extend() and batch.reqs:
        # Rows that decode in a mixed batch stay where they are.
        decoding = set(map(id, getattr(batch, "decoding_reqs", None) or ()))
        _note_moved(req for req in batch.reqs if id(req) not in decoding)


def _publish_requests(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ModelRunner._forward_raw."""
    if runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    outer = _Running.step
    _Running.step, _Running.is_shown = getattr(forward_batch, _NOTE, None), False
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        _Running.step = outer
        if not _Running.is_shown:  # requests that decode may have grown all the same
            _Running.last_reqs = []


def _note_retraction(result: Any, req: Request, *args: object, **kwargs: object) -> None:
    """AFTER Req.reset_for_retract."""
    _note_moved_request(req)


def _note_moved_request(req: Request) -> None:
    _note_moved([req])


def _note_moved(reqs: Iterable[Request]) -> None:
    ids = [id(req) for req in reqs]
    for reader in _Running.readers:
        reader.note_moved(ids)


def _note_reset() -> None:
    for reader in _Running.readers:
        reader.forget()


# `module:Class` instead of dots: SGLang applies each target string once, so that a hook which
# another plug-in put on the same method when it was loaded would keep ours, which come later, from
# being applied.
_HOOKS: tuple[tuple[str, str, Callable[..., Any], HookType], ...] = (
    (
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
        "init_new",
        _note_requests,
        HookType.AFTER,
    ),
    (
        "sglang.srt.model_executor.model_runner:ModelRunner",
        "_forward_raw",
        _publish_requests,
        HookType.AROUND,
    ),
    (
        "sglang.srt.managers.schedule_batch:Req",
        "reset_for_retract",
        _note_retraction,
        HookType.AFTER,
    ),
)


def install_hooks() -> None:
    """Install the side channel in this process, once. RuntimeError if a hook does not take hold."""
    for owner, method, hook, kind in _HOOKS:
        if not _is_hooked(owner, method, hook):
            HookRegistry.register(f"{owner}.{method}", hook, kind)
    HookRegistry.apply_hooks()
    check_hooks()


def check_hooks() -> None:
    """RuntimeError, naming it, if a hook is not in place: SGLang itself would only log that."""
    for owner, method, hook, _ in _HOOKS:
        if not _is_hooked(owner, method, hook):
            raise RuntimeError(
                f"pat could not hook {owner}.{method}, through which it learns the requests of a "
                f"batch and where they are; supported versions of SGLang: "
                f"{', '.join(support.SGLANG_VERSIONS)}"
            )


def _is_hooked(owner: str, method: str, hook: Callable[..., Any]) -> bool:
    """Whether `hook` is in the chain of wrappers around the method."""
    try:
        function = inspect.getattr_static(pkgutil.resolve_name(owner), method)
    except AttributeError:
        return False
    function = getattr(function, "__func__", function)  # of a class method
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class SharedStep(NamedTuple):
    """A step whose rows may share KV, where their paths are read, and what keeps them."""

    source: RadixSource
    reqs: list[Request]
    forest: PrefixForest


class BatchReader:
    """Turns the step that is being run into a DecodeBatch.

    A path is read when its request joins, and again when it has moved: a checkpoint, an extend or a
    retraction is what can give a running request another last node or another row, or a row other
    slots (docs/design.md). The forest keeps it in between, until the request leaves.

    private_steps counts, by reason, the steps in which nothing could be shared. changes counts the
    requests that joined, left, or were re-anchored while they ran ("join", "leave", "re_anchor"),
    and those read again because the tree had split their nodes ("split"). events are those of the
    last cache seen.
    """

    def __init__(self) -> None:
        self.private_steps: Counter[str] = Counter()
        self.changes: Counter[str] = Counter(dict.fromkeys(_CHANGES, 0))
        self.events: RadixEvents | None = None
        self._tree: Any = None
        self._source: RadixSource | None = None
        self._reqs: list[Request] = []  # whose paths the forest keeps
        self._forest = PrefixForest()
        self._version = 0  # of the requests and their paths
        self._moved: set[int] = set()  # id() of requests since the last step that may share
        self._shares = False
        _Running.readers.add(self)

    @property
    def last_shared(self) -> SharedStep | None:
        """The last step, unless nothing could be shared in it."""
        if not self._shares or self._source is None:
            return None
        return SharedStep(self._source, self._reqs, self._forest)

    def is_unchanged(self) -> bool:
        """Whether the step that is being run has the requests of the last one, where they were, and
        these could share. It is then like the last, but that each request is a token longer.

        Nothing has run in between: not even a step in which these requests decoded elsewhere.
        """
        _Running.is_shown = True
        step = _Running.step
        return (
            step is not None
            and step.reqs is self._reqs
            and not self._moved
            and self._shares
            and not step.has_beams
        )

    def read(self, forward_batch: Any) -> DecodeBatch:
        """forward_batch: a decode batch in any of SGLang's shapes (see the module's docstring).

        Rows behind the requests are padding of a graph or of data parallelism: length 0. The paths
        of the batch are valid until the next read().
        """
        begun_ns = time.perf_counter_ns()
        _Running.is_shown = True
        step = _Running.step
        num_rows: int = forward_batch.batch_size
        reason = self._private_reason(step, num_rows)
        if reason is not None or step is None:
            lens = _host_seq_lens(
                forward_batch, num_rows - getattr(forward_batch, "num_padding", 0)
            )
            if step is not None:
                self.forget()
            batch = DecodeBatch(lens, PrefixPaths.private(num_rows), begun_ns=begun_ns)
            return self.without_sharing(batch, reason or NO_REQUESTS)
        if step.reqs is not self._reqs or self._moved:
            self._update(step.reqs)
        self._shares = True
        lens = _host_seq_lens(forward_batch, len(step.reqs))
        return DecodeBatch(lens, self._forest, self._version, begun_ns)

    def without_sharing(self, batch: DecodeBatch, reason: str) -> DecodeBatch:
        """The batch that was just read, as one in which nothing is shared."""
        self._shares = False
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
        if step.has_beams:
            return BEAMS
        if len(step.reqs) > num_rows:
            return CUT
        if step.tree is not self._tree:
            self._watch(step.tree)
        if self._source is None:
            return f"no shared paths are known to {type(step.tree).__name__}"
        return None

    def _watch(self, tree: Any) -> None:
        self.forget()
        self._source = radix_source(tree)
        if self._source is not None:
            self.events = RadixEvents.of(tree, _note_moved_request, _note_reset)
        self._tree = tree

    def forget(self) -> None:
        """Read all paths anew in the next step that may share."""
        self._reqs = []
        self._moved.clear()

    def _update(self, reqs: list[Request]) -> None:
        """Bring the forest from the requests of the last step to these."""
        assert self._source is not None
        before, moved = self._reqs, self._moved
        self._reqs, self._moved = [], set()  # if reading fails, all paths are read the next time
        counts = self._forest.update(before, reqs, moved, self._source.read)
        self._reqs = reqs
        if counts is None:
            return
        self._version += 1
        for name, count in zip(_CHANGES, counts, strict=True):
            self.changes[name] += count

    def _count_private(self, reason: str) -> None:
        if reason not in self.private_steps and reason != NO_REQUESTS:
            logger.warning("pat decodes without sharing KV between requests: %s", reason)
        self.private_steps[reason] += 1


def _host_seq_lens(forward_batch: Any, num_requests: int) -> IntArray:
    """The lengths on the host, 0 behind the requests. A copy: SGLang may write to its own."""
    on_host = forward_batch.seq_lens_cpu
    if on_host is None:  # only where no requests are known either: this waits for the device
        on_host = forward_batch.seq_lens.cpu()
    return row_lengths(on_host.numpy(), num_requests, forward_batch.batch_size)
