"""Mixins over the classes of SGLang's backends: what these do otherwise with pat.

`attach.py` puts these classes before the class of a backend, in the order of methods: `PatMixin`
over the backend of the served model and over the one with which a draft model reads verified
drafts or gives blocks, `PatDraftSteps` over the container of a draft model's steps, and
`PatDraftStep` over each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_pat.sglang.layer.attention import LayerAttention
from sglang_pat.sglang.layer.step_plans import StepPlans
from sglang_pat.sglang.speculative.tree_attention import undo_square_masks
from sglang_pat.sglang.start.layer_support import Routes
from sglang_pat.sglang.step.planner import Decoder
from sglang_pat.sglang.step.step_type import StepKind
from sglang_pat.sglang.tree.request_tracker import CHANNEL
from sglang_pat.support import Unsupported

_VERIFY = ForwardMode.TARGET_VERIFY


class PatMixin(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """A default backend's steps by pat. Before its class in the order of methods.

    Where the default backend decodes no layer, it is not prepared for decode steps: neither its
    metadata nor its tables for CUDA graphs are made.
    """

    _pat: Decoder  # plans
    _pat_layers: LayerAttention  # attends
    _pat_routes: Routes  # of these layers
    _pat_kinds: dict[ForwardMode, StepKind]  # the steps that pat plans
    _pat_plans: StepPlans | None  # of the last step
    _pat_kind: StepKind  # of the last step
    _pat_report: Callable[[Routes], None]
    _pat_is_strict: bool
    # True if steps speculate: SGLang then writes into the default backend's CUDA graph tables, even
    # if pat has all layers.
    _pat_speculates: bool
    # True while the default backend prepares an eager step. It may call the methods below then.
    _pat_in_default: bool
    # Arguments of init_cuda_graph_state(), if the default backend has not been given them.
    _pat_graph_sizes: tuple[int, int] | None
    _pat_is_captured: bool  # whether the last step was prepared for a CUDA graph

    def take(
        self,
        decoder: Decoder,
        layers: LayerAttention,
        kinds: Sequence[StepKind],
        *,
        report: Callable[[Routes], None],
        strict: bool,
    ) -> None:
        """Decode by pat from now on.

        Parameters
        ----------
        decoder
            Plans the steps.
        layers
            The layers that this backend attends in.
        kinds
            The steps of pat.
        report
            Called with the routes each time that a layer goes to the default backend.
        strict
            Whether that is an error instead.
        """
        self._pat = decoder
        self._pat_layers = layers
        self._pat_routes = layers.routes
        self._pat_kinds = {kind.mode: kind for kind in kinds}
        self._pat_plans = None
        self._pat_kind = kinds[0]
        self._pat_report = report
        self._pat_is_strict = strict
        self._pat_speculates = any(kind.shape.speculates for kind in kinds)
        self._pat_in_default = False
        self._pat_graph_sizes = None
        self._pat_is_captured = False

    @property
    def needs_default(self) -> bool:
        """True if the default backend has layers to do in steps that pat plans."""
        return bool(self._pat_routes.delegated)

    # --- once per step ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step."""
        kind = self._pat_kinds.get(forward_batch.forward_mode)
        if kind is None:
            super().init_forward_metadata(forward_batch)
            return
        self._pat_kind = kind
        self._pat_is_captured = False
        routes = self._pat_routes
        if routes.delegated:
            self._prepare_default(forward_batch)
        if routes.shapes:
            self._pat_plans = self._pat.plan_eager(kind, forward_batch)

    def _prepare_default(self, forward_batch: Any) -> None:
        self._pat_in_default = True
        try:
            super().init_forward_metadata(forward_batch)
        finally:
            self._pat_in_default = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step whose CUDA graph is captured or replayed next."""
        kind = self._pat_kinds.get(forward_batch.forward_mode)
        if kind is None or self._pat_in_default:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        self._pat_kind = kind
        self._pat_is_captured = True
        routes = self._pat_routes
        if routes.delegated:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if routes.shapes:
            self._pat_plans = self._pat.plan_captured(kind, forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record what a CUDA graph does before its layers. pat has planned before its replay."""
        kind = self._pat_kinds.get(forward_batch.forward_mode)
        is_pats = kind is not None and not self._pat_in_default
        if not is_pats or self._pat_routes.delegated:
            super().init_forward_metadata_in_graph(forward_batch)
        if kind is not None and is_pats and self._pat_routes.shapes:
            kind.record_in_graph(forward_batch)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Return where SGLang writes what drafts read of each other. None: it allocates that.

        Masks are over the drafts alone where the default backend has no layer that reads them.
        """
        kind = self._pat_kinds.get(_VERIFY)
        if kind is None or kind.masks is None or self._pat_routes.delegated:
            return super().verify_mask
        count = len(kind.masks) // kind.shape.per_request**2
        return VerifyMask(kind.masks, TreeMaskMode.QLEN_ONLY, count)

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Prepare again what depends on drafts, in a step that was prepared on a plan stream.

        All that pat prepares was after the drafts. Some default backends cannot.
        """
        if self._pat_routes.delegated:
            super().update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def shared_read_ends(self, mode: ForwardMode) -> Any:
        """Return when a step has read what the scheduler may write next.

        Later reads of pat do not matter (docs/design/decisions/0008-gathered-slots.md). 0.5.17 does
        not ask: it may write after `init_forward_metadata_out_graph`.
        """
        ends = super().shared_read_ends(mode)
        if mode not in self._pat_kinds:
            return ends
        if mode is ForwardMode.DRAFT_EXTEND_V2 and not self.needs_default:
            return type(ends).PRE_REPLAY
        return type(ends).max_of((ends, type(ends).IN_REPLAY))

    # --- CUDA graphs ---

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """Return whether draft extend is replayed without `init_forward_metadata_out_graph`.

        pat looks there whether the last plan serves.
        """
        is_pats = ForwardMode.DRAFT_EXTEND_V2 in self._pat_kinds and self._pat_routes.shapes
        return False if is_pats else super().draft_extend_metadata_captured_in_graph()

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        """Same answer as `draft_extend_metadata_captured_in_graph`."""
        is_pats = ForwardMode.DRAFT_EXTEND_V2 in self._pat_kinds and self._pat_routes.shapes
        return False if is_pats else super().supports_draft_extend_metadata_staging

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs capture: before the first one, and before all are captured again."""
        if self._pat_routes.delegated or self._pat_speculates:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
        else:
            self._pat_graph_sizes = (max_bs, max_num_tokens)
        if all(kind.follows is None for kind in self._pat_kinds.values()):
            # Otherwise graphs are as large as those that they follow.
            self._pat.reserve(max_bs, self._pat_kinds.values())

    # --- once per layer ---

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Return where a model may store a layer's KV itself; None: nowhere.

        The default backend looks it up in its metadata, which a step may do without. 0.5.17 does
        not ask.
        """
        if forward_batch.forward_mode in self._pat_kinds and not self._pat_routes.delegated:
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
        if self._pat_attends(layer, forward_batch, kwargs):
            return self._pat_layers.attend(
                self._pat_plans,
                self._pat_kind.apart_of(layer),
                q,
                k,
                v,
                layer,
                forward_batch,
                save_kv_cache,
                **kwargs,
            )
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
        """Run a prefill by the default backend, or a verify step: as `forward_decode`."""
        if forward_batch.forward_mode in self._pat_kinds and self._pat_attends(
            layer, forward_batch, kwargs
        ):
            return self._pat_layers.attend(
                self._pat_plans,
                self._pat_kind.apart_of(layer),
                q,
                k,
                v,
                layer,
                forward_batch,
                save_kv_cache,
                **kwargs,
            )
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _pat_attends(
        self, layer: RadixAttention, forward_batch: Any, arguments: dict[str, Any]
    ) -> bool:
        """Return True if pat attends in a layer of this step."""
        routes, layer_id = self._pat_routes, layer.layer_id
        reason = routes.reason_to_leave(layer, arguments)
        if reason is not None:
            self._leave(layer_id, reason, forward_batch)
        return layer_id in routes.shapes

    def _leave(self, layer_id: int, reason: Unsupported, forward_batch: Any) -> None:
        """Delegate a layer for a reason that only a step shows: the first, a warm-up."""
        if self._pat_is_strict:
            raise reason.refusal(f" (layer {layer_id})")
        routes = self._pat_routes
        if not routes.delegated:  # the default backend is not prepared for this step
            kind = self._pat_kinds.get(_VERIFY)  # None: of what a draft model reads of such a step
            if kind is not None and self._pat.verifies_trees:
                has_mask = forward_batch.forward_mode is _VERIFY and not self._pat_is_captured
                # In a warm-up it is a large buffer.
                has_mask = has_mask and CHANNEL.is_within_step
                undo_square_masks(forward_batch if has_mask else None, kind.masks)
            self._catch_up(forward_batch)
        routes.delegate(layer_id, reason)
        self._pat_report(routes)

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


def with_mixin(mixin: type, kind: type) -> type:
    """Return the class `kind` with the methods of a mixin before its own."""
    return type(f"Pat{kind.__name__}", (mixin, kind), {})


def can_become(instance: Any, kind: type) -> bool:
    """Return True if Python lets the object change to a subclass of its class."""
    before = type(instance)
    try:
        instance.__class__ = kind
    except TypeError:  # the layouts of the objects differ
        return False
    instance.__class__ = before
    return True
