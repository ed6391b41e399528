"""StepPlans: the plans of one step, under which its layers attend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_pat.attention import PackAttention
from sglang_pat.batch import DecodeBatch, IntArray
from sglang_pat.plan import DecodePlan, KvTokens, LayerKind
from sglang_pat.stats import PlanningTime, PlanStats
from sglang_pat.window import WindowAttention


class StepPlans:
    """The plans of one step: a PackAttention for each kind of layers.

    They are made one after the other from the same batch. The statistics of the step are those of
    the last one, whose time begins with the step's.
    """

    def __init__(self, attentions: Mapping[LayerKind, PackAttention]):
        self._set(attentions)

    def _set(self, attentions: Mapping[LayerKind, PackAttention]) -> None:
        self.of_kind = attentions
        self._attentions = tuple(attentions.values())
        self._last = self._attentions[-1]

    def add(self, more: StepPlans) -> None:
        """Plan for more kinds too."""
        self._set({**more.of_kind, **self.of_kind})  # in front: the last one counts the step

    def plan(
        self, batch: DecodeBatch, **tensors: torch.Tensor
    ) -> list[tuple[PackAttention, DecodePlan]]:
        """Prepare the step: see `PackAttention.plan`."""
        return [(attention, attention.plan(batch, **tensors)) for attention in self._attentions]

    def record_in_graph(self) -> None:
        """Record what a captured graph does before its layers: see `WindowAttention.refill`."""
        for attention in self._attentions:
            if isinstance(attention, WindowAttention):
                attention.refill()

    def advance(self, seq_lens: torch.Tensor, tokens: int) -> None:
        """Let the plans serve a later step: see `PackAttention.advance`."""
        for attention in self._attentions:
            attention.advance(seq_lens, tokens)

    def steps_left(self) -> int:
        """Return how many further steps all plans serve: see `PackAttention.steps_left`."""
        return min(attention.steps_left() for attention in self._attentions)

    def sharing_buffers(self) -> StepPlans:
        """Return plans for other batches in the same buffers: `PackAttention.sharing_buffers`."""
        return StepPlans({kind: each.sharing_buffers() for kind, each in self.of_kind.items()})

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
