"""LayerAttention: the attention of one layer, by the plans of a step (`step/planner.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat.executors.layer import Scale
from sglang_pat.sglang.layer.kv_writes import KvWrites
from sglang_pat.sglang.start.layer_support import LayerSupport, read_scales
from sglang_pat.sglang.step.step_plans import StepPlans


class ExtraKv(Protocol):
    """KV that rows read in addition to the KV in the plan."""

    def merge(
        self,
        forward_batch: Any,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        layer: RadixAttention,
        planned: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[Scale, Scale],
    ) -> torch.Tensor:
        """Attend to this KV, and merge the result with `planned` (the plan's output and LSE)."""


class LayerAttention:
    """Stores the KV of a layer's new tokens, then attends."""

    def __init__(self, model_runner: Any, layer_support: LayerSupport) -> None:
        self._pool = model_runner.token_to_kv_pool
        self.layer_support = layer_support
        self._kv_writes = KvWrites(model_runner, layer_support)

    def begin_step(self) -> None:
        """Begin an eager step, or the capture of a graph."""
        self._kv_writes.begin_step()

    def attend(
        self,
        plans: StepPlans | None,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool,
        *,
        extra_kv: ExtraKv | None = None,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **unset: None,
    ) -> torch.Tensor:
        """Store the KV of the new tokens in a layer that pat decodes, then attend.

        Parameters
        ----------
        plans
            The plans of the step. None: the rank is idle and has no rows.
        q
            Queries: `[rows, heads * head_dim]` or `[rows, heads, head_dim]`.
        k, v
            Keys and values of the new tokens. None: they are already in the pool.
        extra_kv
            KV that rows read in addition to the KV in the plans.
        q_rope, k_rope
            The last columns of latent queries and keys, `[rows, heads, columns]` or flat, if the
            model passes them separately. `q` and `k` then have the other columns, and `v` is not
            read.
        unset
            Arguments that pat does not use. All are None.

        Returns
        -------
        torch.Tensor
            `[rows, heads * v_head_dim]`.
        """
        pool = self._pool
        if save_kv_cache and k is not None and v is not None:
            self._kv_writes.store(layer, forward_batch, k, v, k_rope)
        # Every layer must make these calls: in them, a hierarchical cache waits until it has loaded
        # the layer's KV.
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q_dim = layer.qk_head_dim if q_rope is None else layer.v_head_dim
        q = q.reshape(-1, layer.tp_q_head_num, q_dim)
        if plans is None:
            return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)
        shape = self.layer_support.shapes[layer.layer_id]
        if not shape.is_latent:  # kernels of latent attention read any stride
            q = _dense(q)
        scales = read_scales(layer) if self.layer_support.are_scaled else (1.0, 1.0)
        run: Callable[..., Any] = partial(
            plans.of_kind[self.layer_support.kind(layer.layer_id)].run,
            k_cache=keys,
            v_cache=values,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=sinks,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        if extra_kv is not None:
            planned, caches, merge = run, (keys, values), partial(extra_kv.merge, forward_batch)

            def run_and_merge(q: torch.Tensor) -> torch.Tensor:
                return merge(q, caches, layer, planned(q, return_lse=True), scales)

            run = run_and_merge
        if q_rope is not None:
            q_rope = q_rope.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim - q_dim)
            if extra_kv is None and len(q) == plans.num_rows:
                run = partial(run, q_rope=q_rope)
            else:
                q = torch.cat((q, q_rope), dim=-1)
        return _run_planned(run, q, plans, layer).view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _dense(q: torch.Tensor) -> torch.Tensor:
    """Return queries as kernels can read them: dense heads, and rows aligned to 16 bytes."""
    row, head, column = q.stride()
    is_dense = column == 1 and head == q.shape[2]
    return q if is_dense and row * q.itemsize % 16 == 0 else q.contiguous()


def _run_planned(
    run: Callable[..., torch.Tensor], q: torch.Tensor, plans: StepPlans, layer: RadixAttention
) -> torch.Tensor:
    """Attend for the rows in `q`, which may be more or fewer than the planned rows.

    MLP synchronisation pads the rows to a multiple of the number of ranks that share the step's
    attention, or to the number of rows of the busiest rank. In a verify step, part of the padding
    may be planned. A draft model's step is padded after it was planned. Rows that were not planned
    get an output of 0.
    """
    count = len(q)
    if count == plans.num_rows:
        return run(q)
    lacking = plans.num_rows - count
    if lacking > 0 and not plans.main.seq_lens[count:].any():
        # Only padding is missing in `q`. If rows of requests are missing, run() raises.
        q = torch.cat((q, q.new_zeros(lacking, *q.shape[1:])))
    out = q.new_zeros(count, layer.tp_q_head_num, layer.v_head_dim)
    planned = run(q[: plans.num_rows])
    out[: len(planned)] = planned[:count]
    return out
