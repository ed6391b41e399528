"""Microbatches: what is kept from step to step of each batch that SGLang runs in turns.

Without pipeline parallelism there is one batch. With it, several batches alternate on a rank, each
with requests of its own: each keeps its paths and its plan, so that its next step finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_pat.attention import PackAttention
from sglang_pat.sglang.hooks import StepRequests
from sglang_pat.sglang.reader import BatchReader


@dataclass(eq=False, slots=True)
class Microbatch:
    """One of the batches: its paths, and its plans for eager steps and for CUDA graphs."""

    reader: BatchReader
    eager: PackAttention
    captured: PackAttention | None = None

    def attentions(self) -> Iterator[PackAttention]:
        """Those that there are."""
        yield self.eager
        if self.captured is not None:
            yield self.captured


class Microbatches:
    """Finds the microbatch of a step by its requests."""

    def __init__(
        self, count: int, new_attention: Callable[..., PackAttention], *, strict: bool
    ) -> None:
        """
        Parameters
        ----------
        count : int
            How many batches take turns.
        new_attention : callable
            Makes a PackAttention; takes `max_requests` and `max_shared_slots`.
        strict : bool
            Whether a path that does not match its request is an error (`BatchReader`).
        """
        self._new_attention = new_attention
        # The one that was used last comes first.
        self._recent = [
            Microbatch(BatchReader(strict=strict), new_attention()) for _ in range(count)
        ]

    @property
    def current(self) -> Microbatch:
        """The microbatch of the last step."""
        return self._recent[0]

    def of(self, step: StepRequests | None) -> Microbatch:
        """The microbatch that a step belongs to.

        Requests stay in their batch while they run, so it is the one that knew the step's first
        request. If none did, the batch is new, and takes the place of the one unused the longest.
        """
        if len(self._recent) == 1 or step is None:
            return self._recent[0]
        index = next(
            (i for i, each in enumerate(self._recent) if each.reader.knows(step)),
            len(self._recent) - 1,
        )
        found = self._recent[index]
        # A new list: another thread may be counting over the old one.
        self._recent = [found, *(each for each in self._recent if each is not found)]
        return found

    def reserve(self, max_requests: int, max_shared_slots: int) -> None:
        """Allocate the buffers that CUDA graphs capture. All microbatches share them: the graphs
        are captured once, so a microbatch sends its plan again when another was there in between.
        """
        first: PackAttention | None = None
        for each in self._recent:
            if first is None:
                captured = first = self._new_attention(
                    max_requests=max_requests, max_shared_slots=max_shared_slots
                )
            else:
                captured = first.sibling()
            if each.captured is not None:
                captured.stats = each.captured.stats
            each.captured = captured

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(tuple(self._recent))
