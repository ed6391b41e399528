"""StepKind: how a kind of step differs from others. Decode: a plain decode step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.batch import DecodeBatch
from sglang_pat.sglang.layer.step_plans import ReadApart, StepPlans
from sglang_pat.sglang.tree.batch_builder import StepView
from sglang_pat.sglang.tree.request_tracker import CHANNEL, StepRequests
from sglang_pat.sglang.tree.row_groups import DECODE_ROWS, RowShape


class Place(Enum):
    """Place in which a step runs: without a graph, while one is captured, or in its replay."""

    EAGER = "eager"
    CAPTURE = "capture"
    REPLAY = "replay"


class StepKind:
    """A kind of step: what it has beside other kinds. The methods' defaults are of decode steps.

    Attributes
    ----------
    mode
        SGLang's name of such steps.
    shape
        The rows of each request.
    follows
        The kind of step whose plan serves this one too, if that was the last step.
    graphs_are_complete
        Whether captured graphs write by themselves what their rows read. Otherwise no step repeats
        another.
    apart
        What the rows of the last step read beside their plan: drafts that branch.
    lengths_are_bounds
        Whether the lengths that SGLang gives on the host may be longer than the requests are.
    has_masks
        Whether SGLang makes masks that say what the rows read of each other.
    masks
        Where it may write them, over the drafts alone, of so many requests as graphs have.
    """

    mode: ClassVar[ForwardMode]
    shape: RowShape = DECODE_ROWS
    follows: StepKind | None = None
    graphs_are_complete = True
    apart: ReadApart | None = None
    lengths_are_bounds = False
    has_masks = False
    masks: torch.Tensor | None = None

    # --- what SGLang shows ---

    # Returns the requests of a batch. None: they are not known (warm-up, capture).
    requests: Callable[[Any], StepRequests | None] = CHANNEL.acknowledge

    def view(self, forward_batch: Any, requests: StepRequests | None) -> StepView:
        """Read a step."""
        view = StepView.of(forward_batch, requests, self.shape)
        return view._replace(seq_lens_cpu=None) if self.lengths_are_bounds else view

    # --- what its rows read on the device ---

    def apart_of(self, layer: RadixAttention) -> ReadApart | None:
        """Return what the rows of the last step read beside their plan in a layer."""
        return self.apart

    def rows(self, view: StepView, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `req_pool_indices` and `seq_lens` of the rows."""
        return view.req_pool_indices, view.seq_lens

    def take_apart(self, forward_batch: Any, num_known: int, place: Place) -> None:
        """Let `apart` be that of a step, of so many requests and padding."""

    def record_in_graph(self, forward_batch: Any) -> None:
        """Let a graph that is being captured write what its rows read.

        It writes them from the lengths that SGLang puts in place before each replay.
        """

    def reserve(self, max_requests: int) -> int:
        """Allocate what graphs of up to so many requests capture. Returns their rows."""
        return max_requests * self.shape.per_request

    # --- statistics ---

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        """Count a step that was planned, of known requests."""

    def follow(self, forward_batch: Any) -> None:
        """Count a step that the plan of the step before serves."""

    def repeat(self, forward_batch: Any, requests: StepRequests, growth: int) -> int:
        """Go to a step that repeats the last one, if requests speculate.

        growth: tokens by which they have grown. Returns those by which the rows read more.
        """
        return growth

    def counters(self) -> dict[str, Counter[str]]:
        """Return the numbers for log, metrics and stats file, by name."""
        return {}


class Decode(StepKind):
    """A decode step: SGLang has its rows and lengths on the device."""

    mode = ForwardMode.DECODE
