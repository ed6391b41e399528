"""StepPlans: the plans by which the layers of one step attend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_pat.attention import PackAttention, plan_together
from sglang_pat.batch import DecodeBatch
from sglang_pat.plan import DecodePlan, LayerKind
from sglang_pat.window import WindowAttention


class StepPlans:
    """The plans of one step: a PackAttention for each kind of layer.

    All plans are made from the same batch, one after the other. `main`, the last PackAttention, has
    the step's rows, lengths and statistics. Its planning time covers all plans of the step.
    """

    def __init__(self, attentions: Mapping[LayerKind, PackAttention]):
        self.of_kind = attentions
        self.main = [*attentions.values()][-1]

    def add(self, more: StepPlans) -> None:
        """From now on, also plan for the kinds of layers in `more`."""
        self.of_kind = {**more.of_kind, **self.of_kind}  # keeps `main` last

    @property
    def num_rows(self) -> int:
        """The number of rows of the last step, with padding."""
        return len(self.main.seq_lens)

    def plan(
        self, batch: DecodeBatch, **tensors: torch.Tensor
    ) -> list[tuple[PackAttention, DecodePlan]]:
        """Plan the step. See `plan_together`."""
        attentions = [*self.of_kind.values()]
        return [*zip(attentions, plan_together(attentions, batch, **tensors), strict=True)]

    def record_in_graph(self) -> None:
        """Capture the work that a graph does before its layers. See `WindowAttention.refill`."""
        for attention in self.of_kind.values():
            if isinstance(attention, WindowAttention):
                attention.refill()

    def advance(self, seq_lens: torch.Tensor, tokens: int) -> None:
        """Use the plans for a later step. See `PackAttention.advance`."""
        for attention in self.of_kind.values():
            attention.advance(seq_lens, tokens)

    def steps_left(self) -> int:
        """Return for how many more steps all plans are valid. See `PackAttention.steps_left`."""
        return min(attention.steps_left() for attention in self.of_kind.values())

    def sharing_buffers(self) -> StepPlans:
        """Return StepPlans for another batch, in the same buffers.

        See `PackAttention.sharing_buffers`.
        """
        return StepPlans({kind: each.sharing_buffers() for kind, each in self.of_kind.items()})
