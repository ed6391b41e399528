"""Which requests a decode step is for: a side channel from SGLang's scheduler to the attention
backend.

The batch that a backend is shown is a copy without its requests (eager: `dataclasses.replace`; CUDA
graph replay: a namespace). So the requests are noted when SGLang makes the batch, and published
while it runs. Two hooks, installed when the backend is built; they turn a step into a DecodeBatch,
with `sglang_radix.py`.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat import support
from sglang_pat.decode_batch import DecodeBatch, IntArray, PrefixPaths
from sglang_pat.sglang_radix import RadixSource, Request, radix_source

logger = logging.getLogger(__name__)

# Reasons why a step shares nothing.
NO_REQUESTS = "no requests are known (warm-up)"
BEAMS = "beam search moves the KV of a request to other rows"
CUT = "the batch was cut into parts"
OVERFLOW = "the plan does not fit into the buffers of the CUDA graphs"

_NOTE = "_sglang_pat_requests"  # attribute of ForwardBatch


@dataclass(frozen=True, slots=True)
class StepRequests:
    """The requests of a batch in row order, and the prefix cache that they are in."""

    reqs: tuple[Request, ...]
    tree: Any
    has_beams: bool


class _Running:
    """What is being run right now in this process, whose scheduler is a single thread."""

    step: StepRequests | None = None
    extends: int = 0  # forwards other than decode so far


def running_step() -> StepRequests | None:
    """The requests of the decode step that is being run; None in a warm-up or a capture."""
    return _Running.step


def _note_requests(result: Any, cls: type, batch: Any, *args: object, **kwargs: object) -> None:
    """AFTER ForwardBatch.init_new."""
    if result.forward_mode.is_decode() and batch.reqs:
        has_beams = getattr(batch, "beam_tail", None) is not None
        setattr(result, _NOTE, StepRequests(tuple(batch.reqs), batch.tree_cache, has_beams))


def _publish_requests(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ModelRunner._forward_raw."""
    if runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    if not forward_batch.forward_mode.is_decode_or_idle():
        _Running.extends += 1
    outer = _Running.step
    _Running.step = getattr(forward_batch, _NOTE, None)
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        _Running.step = outer


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
                f"batch; supported versions of SGLang: {', '.join(support.SGLANG_VERSIONS)}"
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
    """A step whose rows may share KV, and where their paths are read."""

    source: RadixSource
    reqs: tuple[Request, ...]


class BatchReader:
    """Turns the step that is being run into a DecodeBatch.

    private_steps counts, by reason, the steps in which nothing could be shared. last_shared is the
    last step, unless it is one of those.
    """

    def __init__(self) -> None:
        self.private_steps: Counter[str] = Counter()
        self.last_shared: SharedStep | None = None
        self._tree: Any = None
        self._source: RadixSource | None = None

    def read(self, forward_batch: Any) -> DecodeBatch:
        """forward_batch: a decode batch in any of SGLang's shapes (see the module's docstring).

        Rows behind the requests are padding of a graph or of data parallelism: length 0.
        """
        step = running_step()
        num_rows: int = forward_batch.batch_size
        source, reason = self._source_of(step, num_rows)
        lens = _host_seq_lens(forward_batch)
        if source is None or step is None:
            lens[num_rows - getattr(forward_batch, "num_padding", 0) :] = 0
            return self.without_sharing(DecodeBatch(lens, PrefixPaths.private(num_rows)), reason)
        reqs = step.reqs
        self.last_shared = SharedStep(source, reqs)
        lens[len(reqs) :] = 0
        # A request that was put back into the queue may return with all that the source's key looks
        # at unchanged, but loaded from the host into other slots. It returns by way of another
        # extend.
        key = (_Running.extends, source.key(reqs))
        return DecodeBatch(lens, lambda: source.paths(reqs, num_rows), key)

    def without_sharing(self, batch: DecodeBatch, reason: str) -> DecodeBatch:
        """The batch that was just read, as one in which nothing is shared."""
        self.last_shared = None
        self._count_private(reason)
        return DecodeBatch(batch.seq_lens, PrefixPaths.private(len(batch.seq_lens)))

    def _source_of(
        self, step: StepRequests | None, num_rows: int
    ) -> tuple[RadixSource | None, str]:
        """The source for a step; or None and the reason why its rows share nothing."""
        if step is None:
            return None, NO_REQUESTS
        if step.has_beams:
            return None, BEAMS
        if len(step.reqs) > num_rows:
            return None, CUT
        if step.tree is not self._tree:
            self._tree, self._source = step.tree, radix_source(step.tree)
        return self._source, f"no shared paths are known to {type(step.tree).__name__}"

    def _count_private(self, reason: str) -> None:
        if reason not in self.private_steps and reason != NO_REQUESTS:
            logger.warning("pat decodes without sharing KV between requests: %s", reason)
        self.private_steps[reason] += 1


def _host_seq_lens(forward_batch: Any) -> IntArray:
    on_host = forward_batch.seq_lens_cpu
    if on_host is None:  # only where no requests are known either: this waits for the device
        on_host = forward_batch.seq_lens.cpu()
    lens: IntArray = np.zeros(forward_batch.batch_size, dtype=np.int32)
    lens[: len(on_host)] = on_host.numpy()
    return lens
