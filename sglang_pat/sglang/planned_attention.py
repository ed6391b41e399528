"""PlannedAttention: the attention of layers under plans that it makes for each step.

`PatDecoder` has it for the model that is served, `DraftDecoder` for a model that drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from sglang_pat.attention import PackAttention
from sglang_pat.batch import DecodeBatch
from sglang_pat.executors.cuda import PlanOverflowError
from sglang_pat.sglang.debug import DebugChecks
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.layer_attention import LayerAttention
from sglang_pat.sglang.microbatches import Microbatches, StepPlans
from sglang_pat.sglang.options import batch_invariant
from sglang_pat.sglang.reader import OVERFLOW, BatchReader
from sglang_pat.sglang.routes import Routes, Shape


class PlannedAttention(LayerAttention):
    """Plans steps, each for all layers of a model."""

    def __init__(self, model_runner: Any, environment: Environment, routes: Routes) -> None:
        super().__init__(model_runner, routes)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.dtypes = (model_runner.dtype, model_runner.kv_cache_dtype)
        self._layer_id = min(routes.shapes)
        self._new_plans = partial(_new_plans, model_runner=model_runner, environment=environment)
        self._microbatches = Microbatches(
            _num_microbatches(model_runner.server_args),
            partial(self._new_plans, {*routes.shapes.values()}),
            strict=environment.debug,
        )
        self._checks = DebugChecks.of_sglang() if environment.debug else None
        self._plans = self._microbatches.current.eager

    def _plan_batch(
        self,
        reader: BatchReader,
        plans: StepPlans,
        batch: DecodeBatch,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> None:
        """Plan a step that has been read, for the layers to run."""
        self._plans = plans
        table = self.req_to_token_pool.req_to_token
        tensors = {
            "req_to_token": table,
            "req_pool_indices": req_pool_indices,
            "seq_lens": seq_lens,
        }
        try:
            made = plans.plan(batch, **tensors)
        except PlanOverflowError:
            made = plans.plan(reader.without_sharing(batch, OVERFLOW), **tensors)
        if self._checks is not None:
            for attention, plan in made:
                self._checks.check(attention, plan, reader, table, req_pool_indices)

    def _reserve(self, max_rows: int) -> None:
        """Allocate what CUDA graphs of up to so many rows capture."""
        num_slots = len(self.token_to_kv_pool.get_key_buffer(self._layer_id))
        # A slot may be in several shared ranges, where packs read their parents' ranges themselves.
        self._microbatches.reserve(
            max_requests=max_rows,
            max_shared_slots=2 * num_slots,
            # No request is longer than the pool: a model's context may be.
            max_seq_len=min(self.req_to_token_pool.req_to_token.shape[1], num_slots),
        )


def _new_plans(
    shapes: Iterable[Shape], model_runner: Any, environment: Environment, **reservation: Any
) -> StepPlans:
    """A PackAttention for each shape of layers."""
    attentions = {
        shape: PackAttention(
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            v_head_dim=shape.v_head_dim,
            dtype=model_runner.dtype,
            kv_dtype=model_runner.kv_cache_dtype,
            device=model_runner.req_to_token_pool.req_to_token.device,
            policy=environment.policy,
            growth_tokens=environment.growth_tokens,
            batch_invariant=batch_invariant(model_runner.server_args, environment),
            **reservation,
        )
        for shape in sorted(set(shapes))
    }
    return StepPlans(attentions)


def _num_microbatches(server_args: Any) -> int:
    """How many batches take turns: pipeline parallelism runs several at once."""
    return int(server_args.pp_size) + int(server_args.pp_async_batch_depth)
