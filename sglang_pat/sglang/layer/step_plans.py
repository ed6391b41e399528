"""StepPlans: the plans of one step, under which its layers attend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_pat.attention import PackAttention
from sglang_pat.batch import DecodeBatch, IntArray
from sglang_pat.plan import DecodePlan, HeadConfig, KvTokens
from sglang_pat.stats import PlanningTime, PlanStats


class StepPlans:
    """The plans of one step: a PackAttention for each shape of layers.

    They are made one after the other from the same batch. The statistics of the step are those of
    the last one, whose time begins with the step's.
    """

    def __init__(self, attentions: Mapping[HeadConfig, PackAttention]):
        self._set(attentions)

    def _set(self, attentions: Mapping[HeadConfig, PackAttention]) -> None:
        self.of_shape = attentions
        self._attentions = tuple(attentions.values())
        self._last = self._attentions[-1]

    def add(self, more: StepPlans) -> None:
        """Plan for more shapes too."""
        self._set({**more.of_shape, **self.of_shape})  # in front: the last one counts the step

    def plan(
        self, batch: DecodeBatch, **tensors: torch.Tensor
    ) -> list[tuple[PackAttention, DecodePlan]]:
        """Prepare the step: see `PackAttention.plan`."""
        return [(attention, attention.plan(batch, **tensors)) for attention in self._attentions]

    def advance(self, seq_lens: torch.Tensor, tokens: int) -> None:
        """Let the plans serve a later step: see `PackAttention.advance`."""
        for attention in self._attentions:
            attention.advance(seq_lens, tokens)

    def steps_left(self) -> int:
        """Return how many further steps all plans serve: see `PackAttention.steps_left`."""
        return min(attention.steps_left() for attention in self._attentions)

    def sharing_buffers(self) -> StepPlans:
        """Return plans for other batches in the same buffers: `PackAttention.sharing_buffers`."""
        return StepPlans({shape: each.sharing_buffers() for shape, each in self.of_shape.items()})

    @property
    def num_rows(self) -> int:
        """The number of rows of the last step, with padding."""
        return len(self._last.seq_lens)

    @property
    def seq_lens(self) -> IntArray:
        """The lengths for which these rows were planned, 0 for padding."""
        return self._last.seq_lens

    @property
    def step_time(self) -> PlanningTime:
        """The host time of the last step."""
        return self._last.step_time

    @property
    def step_tokens(self) -> KvTokens:
        """The KV tokens of the last step."""
        return self._last.step_tokens

    @property
    def stats(self) -> PlanStats:
        """The statistics of all steps."""
        return self._last.stats

    @stats.setter
    def stats(self, stats: PlanStats) -> None:
        self._last.stats = stats
