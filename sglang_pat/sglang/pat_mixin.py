"""PatMixin: what a default backend of SGLang does otherwise with pat."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.sglang.decoder import PatDecoder
from sglang_pat.sglang.draft_extend import DraftExtend
from sglang_pat.sglang.draft_trees import undo_square_masks
from sglang_pat.sglang.hooks import CHANNEL
from sglang_pat.sglang.options import Reason

_VERIFY = ForwardMode.TARGET_VERIFY


class PatMixin(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """What a default backend does otherwise with pat. Before its class in the order of methods.

    Where the default backend decodes no layer, it is not prepared for decode steps: neither its
    metadata nor its tables for CUDA graphs are made.
    """

    _pat: PatDecoder | DraftExtend
    _pat_is_strict: bool
    # Whether the default backend prepares an eager step, in which it may call the methods below.
    _pat_in_default: bool
    # Arguments of init_cuda_graph_state(), if the default backend has not been given them.
    _pat_graph_sizes: tuple[int, int] | None
    _pat_is_captured: bool  # whether the last step was prepared for a CUDA graph

    def take(self, decoder: PatDecoder | DraftExtend, *, strict: bool) -> None:
        """Decode with `decoder` from now on."""
        self._pat = decoder
        self._pat_is_strict = strict
        self._pat_in_default = False
        self._pat_graph_sizes = None
        self._pat_is_captured = False
        if decoder.needs_lengths:  # of the object: some classes set it
            self.needs_cpu_seq_lens = True

    @property
    def needs_default(self) -> bool:
        """Whether the default backend has layers to do in steps that are pat's."""
        return bool(self._pat.routes.delegated)

    def _pat_does(self, mode: ForwardMode) -> bool:
        """Whether steps are pat's."""
        return mode in self._pat.modes

    # --- once per step ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager steps."""
        if not self._pat_does(forward_batch.forward_mode):
            super().init_forward_metadata(forward_batch)
            return
        self._pat_is_captured = False
        routes = self._pat.routes
        if routes.delegated:
            self._prepare_default(forward_batch)
        if routes.shapes:
            self._pat.plan_eager(forward_batch)

    def _prepare_default(self, forward_batch: Any) -> None:
        self._pat_in_default = True
        try:
            super().init_forward_metadata(forward_batch)
        finally:
            self._pat_in_default = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a CUDA graph is captured or replayed."""
        if not self._pat_does(forward_batch.forward_mode) or self._pat_in_default:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        self._pat_is_captured = True
        routes = self._pat.routes
        if routes.delegated:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if routes.shapes:
            self._pat.plan_captured(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What a CUDA graph does before its layers. pat has planned all before its replay."""
        is_pats = self._pat_does(forward_batch.forward_mode) and not self._pat_in_default
        if not is_pats or self._pat.routes.delegated:
            super().init_forward_metadata_in_graph(forward_batch)
        if is_pats and self._pat.routes.shapes:
            self._pat.record_in_graph(forward_batch)

    def shared_read_ends(self, mode: ForwardMode) -> Any:
        """When a step has read what the scheduler may write next. What pat reads later does not
        matter (docs/design/decisions/0008-gathered-slots.md). Not asked for in 0.5.17, which lets
        it write after `init_forward_metadata_out_graph`."""
        ends = super().shared_read_ends(mode)
        if not self._pat_does(mode):
            return ends
        if mode is ForwardMode.DRAFT_EXTEND_V2 and not self.needs_default:
            return type(ends).PRE_REPLAY
        return type(ends).max_of((ends, type(ends).IN_REPLAY))

    # --- CUDA graphs ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before the first capture, and each time that all graphs are captured anew."""
        if self._pat.routes.delegated or self._pat.default_has_tables:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
        else:
            self._pat_graph_sizes = (max_bs, max_num_tokens)
        self._pat.reserve(max_bs)

    # --- once per layer ---

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Where a model may store a layer's KV itself; None: nowhere. The default backend looks it
        up in its metadata, which a step may do without. Not asked for in 0.5.17."""
        if self._pat_does(forward_batch.forward_mode) and not self._pat.routes.delegated:
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
        """By pat or by the default backend. Of the arguments in `kwargs` pat knows `sinks`."""
        if self._pat_attends(layer, forward_batch, kwargs):
            sinks = kwargs.get("sinks")
            return self._pat.attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Prefill, by the default backend, or a verify step: as `forward_decode`."""
        if self._pat_does(forward_batch.forward_mode) and self._pat_attends(
            layer, forward_batch, kwargs
        ):
            sinks = kwargs.get("sinks")
            return self._pat.attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _pat_attends(
        self, layer: RadixAttention, forward_batch: Any, arguments: dict[str, Any]
    ) -> bool:
        """Whether a layer is pat's in this step."""
        routes, layer_id = self._pat.routes, layer.layer_id
        reason = routes.reason_to_leave(layer_id, arguments)
        if reason is not None:
            self._leave(layer_id, reason, forward_batch)
        return layer_id in routes.shapes

    def _leave(self, layer_id: int, reason: Reason, forward_batch: Any) -> None:
        """Leave to the default backend what only a step shows. The first step does, which is a
        warm-up."""
        if self._pat_is_strict:
            raise reason.refusal(f" (layer {layer_id})")
        routes = self._pat.routes
        if not routes.delegated:  # the default backend is not prepared for this step
            if self._pat.verifies_trees:
                has_mask = forward_batch.forward_mode is _VERIFY and not self._pat_is_captured
                # In a warm-up it is a large buffer.
                has_mask = has_mask and CHANNEL.is_within_step
                undo_square_masks(forward_batch if has_mask else None)
            self._catch_up(forward_batch)
        routes.delegate(layer_id, reason)
        self._pat.report_routes()

    def _catch_up(self, forward_batch: Any) -> None:
        """Prepare the default backend for a step that pat has been prepared for."""
        if self._pat_graph_sizes is not None:
            super().init_cuda_graph_state(*self._pat_graph_sizes)
            self._pat_graph_sizes = None
        if self._pat_is_captured:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=True)
            super().init_forward_metadata_in_graph(forward_batch)
        else:
            self._prepare_default(forward_batch)
