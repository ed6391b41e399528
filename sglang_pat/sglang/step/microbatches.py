"""Microbatches: the batches that SGLang runs in turn, each with its own paths and plans.

With pipeline parallelism, several batches of different requests alternate on a rank. Each batch
keeps its paths and its plan for its next step. Without pipeline parallelism there is one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder
from sglang_pat.sglang.tree.request_tracker import StepRequests


@dataclass(eq=False, slots=True)
class Microbatch:
    """One of the batches, with its paths and its plans for eager steps and for CUDA graphs."""

    builder: DecodeBatchBuilder
    eager: StepPlans
    captured: StepPlans | None = None

    def plans(self) -> list[StepPlans]:
        """Return the plans for eager steps and, after `reserve()`, those for CUDA graphs."""
        return [self.eager] if self.captured is None else [self.eager, self.captured]


class Microbatches:
    """Finds the microbatch of a step by its requests."""

    def __init__(
        self,
        count: int,
        new_plans: Callable[..., StepPlans],
        new_builder: Callable[[], DecodeBatchBuilder] = DecodeBatchBuilder,
    ) -> None:
        """Make `count` microbatches. new_plans takes the arguments of `reserve()`."""
        self._plan_makers = [new_plans]
        self._reservation: dict[str, int] | None = None
        # Ordered by last use, the latest first.
        self._recent = [Microbatch(new_builder(), new_plans()) for _ in range(count)]

    @property
    def current(self) -> Microbatch:
        """The microbatch of the last step."""
        return self._recent[0]

    def find(self, step: StepRequests | None) -> Microbatch:
        """Return the microbatch of a step.

        Requests stay in their batch while they run, so the first request identifies the batch. If
        no microbatch knows that request, the step gets the microbatch whose last use is longest
        ago.
        """
        if len(self._recent) == 1 or step is None:
            return self._recent[0]
        index = next(
            (i for i, each in enumerate(self._recent) if each.builder.knows(step)),
            len(self._recent) - 1,
        )
        found = self._recent[index]
        # A new list, because another thread may be reading the old one.
        self._recent = [found, *(each for each in self._recent if each is not found)]
        return found

    def add(self, new_plans: Callable[..., StepPlans]) -> None:
        """Also plan for more kinds of layers. new_plans takes the arguments of `reserve()`."""
        self._plan_makers.append(new_plans)
        for each in self._recent:
            each.eager.add(new_plans())
        if self._reservation is not None:
            more = new_plans(**self._reservation)
            for i, each in enumerate(self._recent):
                assert each.captured is not None
                each.captured.add(more if i == 0 else more.sharing_buffers())

    def _new_captured(self) -> StepPlans:
        assert self._reservation is not None
        first, *others = (new_plans(**self._reservation) for new_plans in self._plan_makers)
        for more in others:
            first.add(more)
        return first

    def reserve(self, **reservation: int) -> None:
        """Allocate the buffers that CUDA graphs capture. reservation: arguments of PackAttention.

        All microbatches share the buffers, because SGLang captures the graphs once. A microbatch
        sends its plan again if another microbatch has used the buffers in between. An equal
        reservation keeps the buffers: a draft model's graphs may hold their addresses, and SGLang
        does not recapture those graphs together with the target model's.
        """
        if reservation == self._reservation:
            return
        self._reservation = reservation
        first = self._new_captured()
        for i, each in enumerate(self._recent):
            captured = first if i == 0 else first.sharing_buffers()
            if each.captured is not None:
                captured.main.stats = each.captured.main.stats
            each.captured = captured

    def __iter__(self) -> Iterator[Microbatch]:
        return iter(tuple(self._recent))
