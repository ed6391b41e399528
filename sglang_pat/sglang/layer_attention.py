"""LayerAttention: the attention of one layer under the plans of a step, and who makes such plans.

`PatDecoder` has it for the model that is served, `DraftDecoder` for a model that drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat.attention import PackAttention
from sglang_pat.batch import DecodeBatch
from sglang_pat.executors.cuda import PlanOverflowError
from sglang_pat.sglang.debug import DebugChecks
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.kv_scales import read_scales
from sglang_pat.sglang.kv_writes import KvWrites
from sglang_pat.sglang.microbatches import Microbatches, StepPlans
from sglang_pat.sglang.options import batch_invariant
from sglang_pat.sglang.reader import OVERFLOW, BatchReader
from sglang_pat.sglang.routes import Routes


class LayerAttention:
    """Stores the KV of a layer's new tokens, and attends under the plans in use."""

    def __init__(self, model_runner: Any, environment: Environment, routes: Routes) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.routes = routes
        self._layer_id = min(routes.shapes)
        self._kv_writes = KvWrites(model_runner, routes)
        self._microbatches = Microbatches(
            _num_microbatches(model_runner.server_args),
            partial(_new_plans, routes, model_runner, environment),
            strict=environment.debug,
        )
        self._checks = DebugChecks.of_sglang() if environment.debug else None
        self._plans = self._microbatches.current.eager  # of this step

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
            max_seq_len=self.req_to_token_pool.req_to_token.shape[1],
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store the new tokens' KV, then attend.

        Parameters
        ----------
        q : torch.Tensor
            `[rows, heads * head_dim]` or `[rows, heads, head_dim]`.
        k, v : torch.Tensor or None
            The new tokens' keys and values. None: they are in the pool already.
        layer : RadixAttention
            One that pat decodes.
        forward_batch : ForwardBatch
        save_kv_cache : bool
            Whether to write `k` and `v` to the pool.
        sinks : torch.Tensor or None
            Attention sinks: see `PackAttention.run`.

        Returns
        -------
        torch.Tensor
            `[rows, heads * v_head_dim]`.
        """
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            self._kv_writes.store(layer, forward_batch, k, v)
        # Asked for in every layer: a hierarchical cache waits here until the layer has been loaded.
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scales = self._scales(layer)
        run: Callable[..., Any] = partial(
            self._plans.of_layer[layer.layer_id].run,
            k_cache=keys,
            v_cache=values,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=sinks,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        out = self._run(run, q, (keys, values), layer, forward_batch)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _run(
        self,
        run: Callable[..., Any],
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        layer: RadixAttention,
        forward_batch: Any,
    ) -> torch.Tensor:
        """Attention of all rows. run: `PackAttention.run`, of queries and of the caches."""
        out: torch.Tensor = run(q)
        return out

    def _scales(self, layer: RadixAttention) -> tuple[float, float]:
        """What the numbers in the caches are multiplied with."""
        return read_scales(layer) if self.routes.are_scaled else (1.0, 1.0)


def _new_plans(
    routes: Routes, model_runner: Any, environment: Environment, **reservation: Any
) -> StepPlans:
    """A PackAttention for each shape of layers that pat decodes."""
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
        for shape in sorted(set(routes.shapes.values()))
    }
    return StepPlans(attentions, routes.shapes)


def _num_microbatches(server_args: Any) -> int:
    """How many batches take turns: pipeline parallelism runs several at once."""
    return int(server_args.pp_size) + int(server_args.pp_async_batch_depth)
