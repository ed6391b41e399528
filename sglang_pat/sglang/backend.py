"""The mixins that give SGLang's default backend the decode attention of pat.

After SGLang has built a backend, pat replaces the object's class with a subclass of (mixin,
original class). What the mixin does not override, such as prefill, does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.sglang.layer.attention import LayerAttention
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.sglang.step.planner import StepPlanner
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.step.step_type import StepType
from sglang_pat.support import Unsupported


class BackendState:
    """The state that pat keeps on an SGLang backend, in one attribute: `_pat`."""

    def __init__(
        self,
        planner: StepPlanner,
        model_runner: Any,
        layer_support: LayerSupport,
        step_types: Sequence[StepType],
        *,
        report: Callable[[LayerSupport], None],
        is_strict: bool = False,
    ) -> None:
        self.planner = planner
        self.attention = LayerAttention(model_runner, layer_support)
        self.layer_support = layer_support
        self.step_types = {each.mode: each for each in step_types}  # the steps that pat plans
        self.report = report  # called when a layer falls back after start-up
        self.is_strict = is_strict  # whether to raise an error if a layer falls back
        # The plans and the type of the last step, and whether that step runs in a CUDA graph.
        self.plans: StepPlans | None = None
        self.step_type: StepType = step_types[0]
        self.is_captured = False
        # Per mode and batch size: whether pat decodes layers in the captured graph, and whether the
        # default backend does. If a layer falls back after the capture, the graph still runs that
        # layer on pat.
        self.graphs: dict[tuple[ForwardMode, int], tuple[bool, bool]] = {}
        # The entry of `graphs` from an earlier capture of the size that is now captured. The new
        # entry includes it, because SGLang may capture a size twice, with and without LoRA.
        self.earlier = (False, False)
        # True while the default backend prepares an eager step. It may then call methods on itself
        # that the mixin overrides.
        self.in_default = False
        # Arguments with which the default backend's init_cuda_graph_state() must still be called.
        self.graph_sizes: tuple[int, int] | None = None


class DecodeMixin(AttentionBackend):  # type: ignore[misc]  # SGLang is untyped
    """Computes decode attention with pat, or passes the call on to the default backend."""

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
        """Attend to the KV of each row.

        pat understands three extra arguments: `sinks`, `q_rope`, `k_rope`. A layer that gets any
        other extra argument falls back.
        """
        if not self._takes_layer(layer, forward_batch, kwargs):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _takes_layer(
        self, layer: RadixAttention, forward_batch: Any, arguments: dict[str, Any]
    ) -> bool:
        """Return True if pat decodes this layer. Otherwise make the layer fall back."""
        raise NotImplementedError

    def _attend(
        self, q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *rest: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attend with pat. See `LayerAttention.attend`."""
        raise NotImplementedError


class PatMixin(DecodeMixin):
    """Plans decode steps and attends in the layers that pat decodes.

    If no layer falls back, the default backend makes no metadata for decode steps and no tables for
    their CUDA graphs.
    """

    _pat: BackendState

    @property
    def needs_default(self) -> bool:
        """True if the default backend decodes some layers in steps that pat plans."""
        return bool(self._pat.layer_support.fallback)

    # --- once per step ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step."""
        pat = self._pat
        step_type = pat.step_types.get(forward_batch.forward_mode)
        if step_type is None:
            super().init_forward_metadata(forward_batch)
            return
        pat.step_type, pat.is_captured = step_type, False
        if pat.layer_support.fallback:
            self._prepare_default(forward_batch)
        if pat.layer_support.shapes:
            pat.plans = pat.planner.plan_eager(step_type, forward_batch)
            pat.attention.begin_step()

    def _prepare_default(self, forward_batch: Any) -> None:
        self._pat.in_default = True
        try:
            super().init_forward_metadata(forward_batch)
        finally:
            self._pat.in_default = False

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step whose CUDA graph is captured or replayed next."""
        pat = self._pat
        step_type = pat.step_types.get(forward_batch.forward_mode)
        if step_type is None or pat.in_default:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        pat.step_type, pat.is_captured = step_type, True
        has_pat, has_default = bool(pat.layer_support.shapes), bool(pat.layer_support.fallback)
        if in_capture:
            pat.earlier = pat.graphs.get(_graph(forward_batch), (False, False))
            self._note_graph(forward_batch)
        elif has_default:  # a layer may have fallen back after the capture
            has_pat, has_default = pat.graphs.get(_graph(forward_batch), (has_pat, has_default))
        if has_default:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        if has_pat:
            pat.plans = pat.planner.plan_captured(step_type, forward_batch, in_capture)

    def _note_graph(self, forward_batch: Any) -> None:
        """Record which backends decode layers in the graphs of this mode and batch size."""
        pat, (had_pat, had_default) = self._pat, self._pat.earlier
        pat.graphs[_graph(forward_batch)] = (
            had_pat or bool(pat.layer_support.shapes),
            had_default or bool(pat.layer_support.fallback),
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Capture the work that a CUDA graph does before its layers. Planning is not captured."""
        pat = self._pat
        is_pats = forward_batch.forward_mode in pat.step_types and not pat.in_default
        if not is_pats or pat.layer_support.fallback:
            super().init_forward_metadata_in_graph(forward_batch)
        if is_pats and pat.layer_support.shapes and pat.plans is not None:
            pat.plans.record_in_graph()
            pat.attention.begin_step()

    def shared_read_ends(self, mode: ForwardMode) -> Any:
        """Return the point of a step after which the scheduler may overwrite the step's inputs.

        pat also reads inputs after that point. If they are overwritten, this changes only answers
        that SGLang throws away (docs/design/decisions.md#gathered-shared-slots). SGLang 0.5.17
        never calls this method.
        """
        ends = super().shared_read_ends(mode)
        if mode not in self._pat.step_types:
            return ends
        return type(ends).max_of((ends, type(ends).IN_REPLAY))

    # --- CUDA graphs ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of graphs. SGLang calls this before it captures all graphs."""
        self._pat.graphs.clear()
        if self._pat.layer_support.fallback:
            super().init_cuda_graph_state(max_bs, max_num_tokens)
        else:
            self._pat.graph_sizes = (max_bs, max_num_tokens)
        self._pat.planner.reserve(max_bs)

    # --- once per layer ---

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Return buffers to which a model may write a layer's KV itself, or None.

        The default backend finds the buffers in its metadata, which exists only if a layer falls
        back. SGLang 0.5.17 never calls this method.
        """
        pat = self._pat
        if forward_batch.forward_mode in pat.step_types and not pat.layer_support.fallback:
            return None
        return super().get_fused_kv_write_buffers(layer, forward_batch)

    def _attend(
        self, q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *rest: Any, **kwargs: Any
    ) -> torch.Tensor:
        return self._pat.attention.attend(self._pat.plans, q, k, v, layer, *rest, **kwargs)

    def _takes_layer(
        self, layer: RadixAttention, forward_batch: Any, arguments: dict[str, Any]
    ) -> bool:
        layer_support, layer_id = self._pat.layer_support, layer.layer_id
        reason = layer_support.fallback_reason(layer, arguments)
        if reason is not None:
            self._fall_back(layer_id, reason, forward_batch)
        return layer_id in layer_support.shapes

    def _fall_back(self, layer_id: int, reason: Unsupported, forward_batch: Any) -> None:
        """Make a layer fall back for a reason that shows in a step, usually in a warm-up step."""
        pat = self._pat
        if pat.is_strict:
            raise reason.refusal(f" (layer {layer_id})")
        if not pat.layer_support.fallback:  # the default backend has no metadata yet
            self._catch_up(forward_batch)
        pat.layer_support.fall_back(layer_id, reason)
        if pat.is_captured:  # in the warm-up of a capture
            self._note_graph(forward_batch)
        pat.report(pat.layer_support)

    def _catch_up(self, forward_batch: Any) -> None:
        """Prepare the default backend for a step that only pat has prepared."""
        pat = self._pat
        if pat.graph_sizes is not None:
            super().init_cuda_graph_state(*pat.graph_sizes)
            pat.graph_sizes = None
        if pat.is_captured:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=True)
            super().init_forward_metadata_in_graph(forward_batch)
        else:
            self._prepare_default(forward_batch)


def _graph(forward_batch: Any) -> tuple[ForwardMode, int]:
    return forward_batch.forward_mode, forward_batch.batch_size


def mix_in(
    parts: Sequence[tuple[Any, type, Callable[[], Any]]],
    layer_support: LayerSupport,
    *,
    reason: Unsupported | None = None,
    is_strict: bool = False,
) -> None:
    """Give objects of SGLang the methods of pat. Either all objects change, or none.

    Parameters
    ----------
    parts
        Triples (object, mixin, new_state). The object gets the mixin's methods, and the result of
        new_state() as its attribute `_pat`. new_state() is called only if the object changes.
    layer_support
        Which layers pat decodes. If pat decodes no layer, nothing changes.
    reason
        Why all layers fall back, or None.
    is_strict
        Whether to raise ValueError with the reason if a layer falls back.
    """
    classes = [_class_with(mixin, part) for part, mixin, _ in parts]
    if reason is None and None in classes:
        closed = type(parts[classes.index(None)][0]).__name__
        reason = Unsupported("default backend", f"{closed}, which is closed")
    if reason is not None and layer_support.shapes:
        layer_support.fall_back_all(reason)
    if is_strict:
        layer_support.check_strict()
    if layer_support.shapes:
        for (part, _, new_state), new_class in zip(parts, classes, strict=True):
            part.__class__ = new_class
            part._pat = new_state()


def _class_with(mixin: type, part: Any) -> type | None:
    """Return a subclass of (mixin, the object's class), in which the mixin's methods come first.

    Returns None if Python does not allow the object to change its class.
    """
    before = type(part)
    new_class = type(f"Pat{before.__name__}", (mixin, before), {})
    try:
        part.__class__ = new_class
    except TypeError:  # the instance layouts of the classes differ
        return None
    part.__class__ = before
    return new_class
