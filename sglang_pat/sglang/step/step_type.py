"""StepType: how a type of step differs from a plain decode step.

In a plain decode step, each request has one row, and is one token longer than in the last step.
Steps of speculative decoding override these defaults (`speculative/steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.batch import DecodeBatch
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, StepRequests


class ExecutionMode(Enum):
    """A step runs without a CUDA graph, while a graph is captured, or in a replay."""

    EAGER = "eager"
    CAPTURE = "capture"
    REPLAY = "replay"


class StepType:
    """A type of step. The defaults describe a plain decode step.

    Attributes
    ----------
    mode
        SGLang's forward mode of such steps.
    requests
        Returns the requests of a batch, or None if they are not known (warm-up, capture).
    repeat
        Given the batch and its requests, returns how many KV tokens its rows read in addition to
        those of the planned step, or None if a request has outgrown the plan. The attribute itself
        is None if each request grows by one token per step.
    """

    mode: ClassVar[ForwardMode] = ForwardMode.DECODE
    repeat: Callable[[Any, StepRequests], int | None] | None = None
    requests: Callable[[Any], StepRequests | None] = REQUEST_TRACKER.claim_step

    @property
    def graphs_are_complete(self) -> bool:
        """True if graphs write the rows' tensors themselves. If not, every step is planned."""
        return True

    def read_inputs(self, forward_batch: Any, requests: StepRequests | None) -> StepInputs:
        """Return the inputs of a step."""
        return StepInputs.read(forward_batch, requests)

    def prepare_rows(
        self, inputs: StepInputs, forward_batch: Any, execution: ExecutionMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' `req_pool_indices` and `seq_lens` on the device."""
        return inputs.req_pool_indices, inputs.seq_lens

    def steps_to_repeat(self, builder: DecodeBatchBuilder, growth: int) -> int:
        """Return how many steps may repeat the step that was just planned.

        growth: by how many tokens each request may grow before it outgrows the plan.
        """
        return growth

    def count_planned(self, forward_batch: Any, batch: DecodeBatch, plans: StepPlans) -> None:
        """Count a planned step of known requests."""


class DecodeStep(StepType):
    """A plain decode step, whose `req_pool_indices` and `seq_lens` are SGLang's."""
