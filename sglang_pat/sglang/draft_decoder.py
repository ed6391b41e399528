"""DraftDecoder: the decode attention of a model that drafts, through PackAttention.

In each round of speculative decoding a draft model decodes a few steps, one token of each request
after the other (`--speculative-eagle-topk 1`), before the model verifies them. Its KV lies in the
same slots as the model's, behind the same paths. SGLang prepares all steps of a round at once, and
captures them in one graph: so one plan serves the round, and each step has lengths of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat.plan import KvTokens
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.hooks import StepRequests, requests_of
from sglang_pat.sglang.microbatches import StepPlans
from sglang_pat.sglang.planned_attention import PlannedAttention
from sglang_pat.sglang.reader import BatchReader
from sglang_pat.sglang.routes import Routes


class DraftDecoder(PlannedAttention):
    """Plans a round of drafting, and computes the attention of its steps.

    Attributes
    ----------
    counts
        Draft steps, and rows in them.
    kv_tokens
        As `KvTokens`, of all steps.
    has_default
        Whether the default backend has been prepared for this round.
    """

    def __init__(
        self, model_runner: Any, environment: Environment, routes: Routes, num_steps: int
    ) -> None:
        """
        Parameters
        ----------
        model_runner
            SGLang's, of the draft model.
        environment
            The variables.
        routes
            Of the draft model.
        num_steps
            In which it decodes, of each round.
        """
        super().__init__(model_runner, environment, routes)
        device = self.req_to_token_pool.req_to_token.device
        self._num_steps = num_steps
        self._offsets = torch.arange(1, num_steps + 1, dtype=torch.int64, device=device)[:, None]
        self._reserved = self._offsets[:, :0]  # lengths that captured graphs read
        self._graphs_write = False  # whether a captured graph writes them itself
        self._lens = self._reserved  # of the round, [steps, rows]
        self._at = 0  # the step whose lengths the layers read
        self._num_rows = 0  # of known requests, in the last round that was planned
        self._num_repeated = 0  # rounds without a plan()
        self._seen: set[int] = set()  # layers that have run
        self.has_default = False
        self.counts: Counter[str] = Counter({"steps": 0, "rows": 0})
        self.kv_tokens: Counter[str] = Counter({"query_centric": 0, "planned": 0, "lower_bound": 0})

    # --- once per round ---

    @property
    def needs_default(self) -> bool:
        """Whether the default backend must be prepared too: for its layers, and as long as a layer
        may turn out to be one of them."""
        return bool(self.routes.delegated) or not self._seen >= self.routes.shapes.keys()

    def plan_eager(self, forward_batch: Any) -> None:
        """Plan a round without a graph."""
        if not forward_batch.batch_size or not self.routes.shapes:
            return
        step = requests_of(forward_batch)
        microbatch = self._microbatches.of(step)
        lens = forward_batch.seq_lens + self._offsets
        self._plan(microbatch.reader, microbatch.eager, step, forward_batch, lens)

    def plan_captured(self, forward_batch: Any, in_capture: bool) -> None:
        """Before a CUDA graph is captured or replayed: write the plan that the graph reads."""
        if not forward_batch.batch_size or not self.routes.shapes:
            return
        step = requests_of(forward_batch)
        microbatch = self._microbatches.of(step)
        reader, plans = microbatch.reader, microbatch.captured
        assert plans is not None
        if not in_capture and self._repeats(reader, plans, step, forward_batch):
            return  # what the graph reads is in place
        if in_capture or not self._graphs_write:
            self._write_lens(forward_batch)
        lens = self._reserved[:, : forward_batch.batch_size]
        self._plan(reader, plans, step, forward_batch, lens)
        if self._checks is None:  # otherwise each round is checked
            reader.expect_growth(plans.steps_left())

    def record_in_graph(self, forward_batch: Any) -> None:
        """While a graph is captured: let it write the lengths of its steps, of those that SGLang
        has put in place for its replay."""
        self._write_lens(forward_batch)
        self._graphs_write = True

    def _write_lens(self, forward_batch: Any) -> None:
        lens = self._reserved[:, : forward_batch.batch_size]
        torch.add(forward_batch.seq_lens, self._offsets, out=lens)

    def _plan(
        self,
        reader: BatchReader,
        plans: StepPlans,
        step: StepRequests | None,
        forward_batch: Any,
        lens: torch.Tensor,
    ) -> None:
        """lens: of each step, on the device. The plan is that of the first one: the others are a
        few tokens longer, of which no pack depends."""
        batch = reader.read(step, forward_batch, ahead=1)
        self._plan_batch(reader, plans, batch, forward_batch.req_pool_indices, lens[0])
        self._lens, self._at = lens, 0
        self._num_rows = 0 if step is None else int(np.count_nonzero(batch.seq_lens))
        self._count(plans.step_tokens)

    def _repeats(
        self,
        reader: BatchReader,
        plans: StepPlans,
        step: StepRequests | None,
        forward_batch: Any,
    ) -> bool:
        """Whether a round needs no plan(): the last plan serves it, with what was accepted since,
        and lies where the round's graph reads it."""
        is_in_place = self._plans is plans and plans.num_rows == forward_batch.batch_size
        if not is_in_place or not self._graphs_write:
            return False
        growth = reader.growth(step, forward_batch)
        if growth is None:
            return False
        self._num_repeated += 1
        self._count(plans.step_tokens, growth)
        return True

    def _count(self, planned: KvTokens, growth: int = 0) -> None:
        """A round. planned: of the first step of the last round that was planned. growth: KV tokens
        that there are more now."""
        steps, num_rows = self._num_steps, self._num_rows
        if num_rows == 0:
            return
        self.counts["steps"] += steps
        self.counts["rows"] += steps * num_rows
        more = steps * growth + num_rows * steps * (steps - 1) // 2
        for name, tokens in zip(KvTokens._fields, planned, strict=True):
            self.kv_tokens[name] += steps * tokens + more

    def plan_counts(self) -> Counter[str]:
        """How many rounds were planned, and in how many the last plan was reused."""
        stats = [plans.stats for each in self._microbatches for plans in each.plans()]
        return Counter(
            plans_built=sum(each.plans_built for each in stats),
            plans_reused=self._num_repeated + sum(each.plans_reused for each in stats),
        )

    # --- CUDA graphs ---

    def reserve(self, max_requests: int) -> None:
        """Before the first capture, and each time that all graphs are captured anew. max_requests:
        of the largest graph."""
        self._reserved = self._offsets.expand(-1, max_requests).clone()
        self._graphs_write = False
        self._reserve(max_requests)

    # --- once per step and layer ---

    def go_to(self, step: int, layer: RadixAttention) -> None:
        """A layer of this step, counted from 0, comes next."""
        self._seen.add(layer.layer_id)
        if step != self._at:
            self._plans.advance(self._lens[step], step)
            self._at = step
