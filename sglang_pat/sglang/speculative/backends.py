"""Mixins for SGLang's backends in speculative decoding.

`PatSpeculativeMixin` is for the backend of a target model that verifies drafts, and for a draft
model's backends for draft extend and for blocks. `PatDraftSteps` is for the container of a draft
model's decode steps, and `PatDraftStep` for the backend of each of these steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_pat.sglang.backend import DecodeMixin, PatMixin
from sglang_pat.sglang.layer.attention import LayerAttention
from sglang_pat.sglang.report.layer_report import report_draft_support
from sglang_pat.sglang.speculative.planners import SpeculativePlanner
from sglang_pat.sglang.speculative.steps import DraftSteps, SpeculativeStep
from sglang_pat.sglang.speculative.tree_attention import TreeKv, undo_square_masks
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

_VERIFY = ForwardMode.TARGET_VERIFY


class PatSpeculativeMixin(PatMixin):
    """Also plans verify steps, or steps of a draft model, and attends in them."""

    # --- once per step ---

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Capture what a CUDA graph does before its layers.

        In speculative steps that pat plans, calls `SpeculativeStep.record_in_graph` first.
        """
        step_type = self._pat.step_types.get(forward_batch.forward_mode)
        is_pats = not self._pat.in_default and self._pat.layer_support.shapes
        if isinstance(step_type, SpeculativeStep) and is_pats:
            step_type.record_in_graph(forward_batch)
        # Comes second, because window plans are refilled from the tensors of the rows.
        super().init_forward_metadata_in_graph(forward_batch)

    @property
    def _trees(self) -> TreeKv | None:
        """The KV of verify steps' trees, or None if drafts do not branch."""
        extra_kv = getattr(self._pat.step_types.get(_VERIFY), "extra_kv", None)
        return extra_kv if isinstance(extra_kv, TreeKv) else None

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Return the buffer for SGLang's masks of drafts, or None if SGLang must allocate it.

        If no layer falls back, masks cover only the draft tokens. The default backend needs full
        masks.
        """
        trees = self._trees
        if trees is None or trees.masks is None or self._pat.layer_support.fallback:
            return super().verify_mask
        return VerifyMask(trees.masks.view(-1), TreeMaskMode.QLEN_ONLY, len(trees.masks))

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Complete the metadata of a step that SGLang has prepared before drafting.

        pat prepares no step that early. Some default backends do not have this method.
        """
        if self._pat.layer_support.fallback:
            super().update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def shared_read_ends(self, mode: ForwardMode) -> Any:
        """Return the point after which the scheduler may overwrite a step's inputs.

        Draft extend reads only what the verify step before it has already read.
        """
        ends = super().shared_read_ends(mode)
        follows = mode is ForwardMode.DRAFT_EXTEND_V2 and mode in self._pat.step_types
        return type(ends).PRE_REPLAY if follows and not self.needs_default else ends

    # --- CUDA graphs ---

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """True if SGLang may replay draft extend without `init_forward_metadata_out_graph`.

        pat needs that call, to check whether the last plan is usable.
        """
        return not self._extends() and super().draft_extend_metadata_captured_in_graph()

    @property
    def supports_draft_extend_metadata_staging(self) -> bool:
        """True if SGLang may stage draft extend's metadata: only if pat does not plan that step."""
        return not self._extends() and super().supports_draft_extend_metadata_staging

    def _extends(self) -> bool:
        """Return True if pat plans draft extend, or did so when SGLang captured draft extend."""
        pat = self._pat
        has_layers = pat.layer_support.shapes or any(has for has, _ in pat.graphs.values())
        return ForwardMode.DRAFT_EXTEND_V2 in pat.step_types and bool(has_layers)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of graphs. SGLang calls this before it captures all graphs.

        The default backend always allocates its buffers too, because SGLang writes to the default
        backend's buffers even if no layer falls back.
        """
        self._pat.graphs.clear()
        super(PatMixin, self).init_cuda_graph_state(max_bs, max_num_tokens)
        step_types = self._pat.step_types
        if ForwardMode.DRAFT_EXTEND_V2 not in step_types:
            # Draft extend needs no reservation: its graphs have the sizes of verify steps' graphs.
            assert isinstance(self._pat.planner, SpeculativePlanner)
            self._pat.planner.reserve(max_bs, step_types.values())

    # --- once per layer ---

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
        """In steps that pat plans, attend like `forward_decode`. Else use the default backend."""
        is_pats = forward_batch.forward_mode in self._pat.step_types
        if not is_pats or not self._takes_layer(layer, forward_batch, kwargs):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _attend(
        self, q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *rest: Any, **kwargs: Any
    ) -> torch.Tensor:
        step_type = self._pat.step_type
        extra_kv = step_type.extra_kv_of(layer) if isinstance(step_type, SpeculativeStep) else None
        return super()._attend(q, k, v, layer, *rest, extra_kv=extra_kv, **kwargs)

    def _catch_up(self, forward_batch: Any) -> None:
        trees = self._trees
        if trees is not None:
            has_mask = forward_batch.forward_mode is _VERIFY and not self._pat.is_captured
            # In a warm-up, custom_mask is a large buffer, not a mask.
            has_mask = has_mask and REQUEST_TRACKER.is_within_step
            undo_square_masks(forward_batch if has_mask else None, trees.masks)
        super()._catch_up(forward_batch)


@dataclass
class DraftStepsState:
    """The state that pat keeps on the container of a draft model's steps."""

    planner: SpeculativePlanner
    round: DraftSteps
    attention: LayerAttention
    layer_support: LayerSupport
    plans: StepPlans | None = None  # plans of the last round
    seen: set[int] = field(default_factory=set)  # ids of the layers that have run
    has_default: bool = False  # whether the default backend is prepared for this round
    in_capture: bool = False  # whether a graph captures this round
    has_graphs: bool = False  # whether pat decodes layers in any graph


class DraftStepState(NamedTuple):
    """The state of one step's backend: the container, and the step, counted from 0."""

    steps: PatDraftSteps
    step: int


class PatDraftSteps:
    """Mixin for the container of a draft model's decode steps. It plans the model's rounds.

    If no layer falls back, the default backend is not prepared for the steps.
    """

    _pat: DraftStepsState

    def _takes_default(self) -> bool:
        """Return True if the default backend must be prepared for the next round.

        It must be if a layer falls back, or until each layer has run once, because a layer may fall
        back in its first run.
        """
        pat, support = self._pat, self._pat.layer_support
        pat.has_default = bool(support.fallback) or not pat.seen >= support.shapes.keys()
        return pat.has_default

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a round that runs without a CUDA graph."""
        if self._takes_default():
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        pat = self._pat
        if pat.layer_support.shapes:
            pat.plans = pat.planner.plan_eager(pat.round, forward_batch)
        pat.in_capture = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a round whose CUDA graph is captured or replayed next."""
        if self._takes_default():
            super().init_forward_metadata_out_graph(  # type: ignore[misc]
                forward_batch, in_capture=in_capture
            )
        pat = self._pat
        pat.in_capture = in_capture
        if pat.layer_support.shapes or pat.has_graphs:
            pat.plans = pat.planner.plan_captured(pat.round, forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Capture what a graph does before its layers."""
        if self._takes_default():
            super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        self._pat.round.record_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of graphs, before the first capture."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        self._pat.has_graphs = False
        self._pat.planner.reserve(max_bs)


class PatDraftStep(DecodeMixin):
    """Attends in one step of a draft model's rounds."""

    _pat: DraftStepState

    @property
    def _container(self) -> DraftStepsState:
        return self._pat.steps._pat

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Return buffers to which a model may write a layer's KV itself, or None."""
        if layer.layer_id in self._container.layer_support.shapes:
            return None
        return super().get_fused_kv_write_buffers(layer, forward_batch)

    def _takes_layer(
        self, layer: RadixAttention, forward_batch: Any, arguments: dict[str, Any]
    ) -> bool:
        # The default backend is prepared for every round until each layer has run once, because a
        # layer may fall back in its first run (`_takes_default`).
        layer_support, layer_id = self._container.layer_support, layer.layer_id
        reason = layer_support.fallback_reason(layer, arguments)
        if reason is not None:
            if not self._container.has_default:
                raise RuntimeError(
                    f"layer {layer_id} of the draft model came too late: {reason}; use "
                    "--speculative-draft-attention-backend to leave the draft model to another "
                    "backend"
                )
            layer_support.fall_back(layer_id, reason)
            report_draft_support(layer_support)
        return layer_id in layer_support.shapes

    def _attend(
        self, q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *rest: Any, **kwargs: Any
    ) -> torch.Tensor:
        pat = self._container
        pat.seen.add(layer.layer_id)
        pat.has_graphs |= pat.in_capture
        if pat.plans is not None:
            pat.round.go_to(self._pat.step, pat.plans)
        extra_kv = pat.round.extra_kv
        return pat.attention.attend(pat.plans, q, k, v, layer, *rest, extra_kv=extra_kv, **kwargs)
