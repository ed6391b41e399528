"""Mixins over SGLang's backends of a draft model's decode steps."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat.sglang.layer.attention import LayerAttention
from sglang_pat.sglang.layer.step_plans import StepPlans
from sglang_pat.sglang.report.layer_report import report_draft_routes
from sglang_pat.sglang.speculative.steps import DraftRound
from sglang_pat.sglang.step.planner import Decoder


class PatDraftSteps:
    """All steps of a draft model by pat.

    Stands before the class of their container in the order of methods.

    Where pat attends in all layers, the default backend is not prepared for the steps.
    """

    _pat: Decoder
    _pat_round: DraftRound
    _pat_layers: LayerAttention
    _pat_plans: StepPlans | None  # of the last round
    _pat_seen: set[int]  # layers that have run
    _pat_has_default: bool  # whether the default backend has been prepared for this round

    def take(self, decoder: Decoder, kind: DraftRound, layers: LayerAttention) -> None:
        """Decode by pat from now on.

        Parameters
        ----------
        decoder
            Plans the rounds.
        kind
            The rounds.
        layers
            The draft model's.
        """
        self._pat = decoder
        self._pat_round = kind
        self._pat_layers = layers
        self._pat_plans = None
        self._pat_seen = set()
        self._pat_has_default = False

    def _takes_default(self) -> bool:
        """Return True if the default backend is prepared for the next round too.

        It is prepared for its layers, and as long as a layer may turn out to be one of them.
        """
        routes = self._pat_layers.routes
        self._pat_has_default = bool(routes.delegated) or not self._pat_seen >= routes.shapes.keys()
        return self._pat_has_default

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a round without a graph."""
        if self._takes_default():
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        if self._pat_layers.routes.shapes:
            self._pat_plans = self._pat.plan_eager(self._pat_round, forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a round whose CUDA graph is captured or replayed next."""
        if self._takes_default():
            super().init_forward_metadata_out_graph(  # type: ignore[misc]
                forward_batch, in_capture=in_capture
            )
        if self._pat_layers.routes.shapes:
            self._pat_plans = self._pat.plan_captured(self._pat_round, forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record what the graph does before its layers."""
        if self._takes_default():
            super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        self._pat_round.record_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs capture, before the first one."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        self._pat.reserve(max_bs)

    def attends(self, layer: RadixAttention, arguments: dict[str, Any]) -> bool:
        """Return True if pat attends in a layer.

        A layer that it cannot decode goes to the default backend, which is prepared for the round
        in which each layer runs first.
        """
        routes, layer_id = self._pat_layers.routes, layer.layer_id
        reason = routes.reason_to_leave(layer, arguments)
        if reason is not None:
            if not self._pat_has_default:
                raise RuntimeError(
                    f"layer {layer_id} of the draft model came too late: {reason}; use "
                    "--speculative-draft-attention-backend to leave the draft model to another "
                    "backend"
                )
            routes.delegate(layer_id, reason)
            report_draft_routes(routes)
        return layer_id in routes.shapes

    def attend(
        self,
        step: int,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: RadixAttention,
        *rest: Any,
        **arguments: Any,
    ) -> torch.Tensor:
        """Attend in a step of the round. See `LayerAttention.attend`."""
        self._pat_seen.add(layer.layer_id)
        if self._pat_plans is not None:
            self._pat_round.go_to(step, self._pat_plans)
        apart = self._pat_round.apart
        return self._pat_layers.attend(self._pat_plans, apart, q, k, v, layer, *rest, **arguments)


class PatDraftStep(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """One step of a draft model by pat."""

    _pat_steps: PatDraftSteps
    _pat_step: int

    def take(self, steps: PatDraftSteps, step: int) -> None:
        """Decode by pat from now on. step: counted from 0."""
        self._pat_steps = steps
        self._pat_step = step

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Return where a model may store a layer's KV itself; None: nowhere. Not in 0.5.17."""
        if layer.layer_id in self._pat_steps._pat_layers.routes.shapes:
            return None
        return super().get_fused_kv_write_buffers(layer, forward_batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attend by pat or by the default backend.

        Of the arguments in `kwargs` pat knows `sinks`, `q_rope` and `k_rope`.
        """
        steps = self._pat_steps
        if not steps.attends(layer, kwargs):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return steps.attend(self._pat_step, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
