"""Tells which layers of a model pat decodes, and why the others fall back to SGLang's backend.

`layer_rules.py` decides this when SGLang builds the backend. Later, a warm-up step may show that
one more layer must fall back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat import support
from sglang_pat.executors.layer import Scale
from sglang_pat.plan import HeadConfig, LayerKind
from sglang_pat.support import Unsupported

PAT, DEFAULT = "pat", "default"  # the routes: who decodes a layer
# Arguments that models pass to latent attention in addition to queries, keys and values.
_LATENT_ARGUMENTS = ("q_rope", "k_rope")


class LayerSupport:
    """Tells which backend decodes each attention layer in this rank's part of a model."""

    def __init__(self, default: str) -> None:
        self.default = default  # name of SGLang's default backend
        self.prefill: str | None = None  # name of the backend that prefills, if known
        self.layers: Sequence[RadixAttention] = ()
        self.shapes: dict[int, HeadConfig] = {}  # by id of a layer that pat decodes
        self.windows: dict[int, int] = {}  # tokens by layer id; other layers read all KV
        self.chunked: frozenset[int] = frozenset()  # ids of the layers that attend within chunks
        # Maps slots to slots in the window pool. None: there is no separate window pool.
        self.window_slots: torch.Tensor | None = None
        self.drafts_ahead = 0  # a request may be this many tokens longer than the host knows
        self.fallback: dict[int, Unsupported] = {}  # why layers fall back, by layer id
        self.whole: Unsupported | None = None  # why the whole model falls back, or None
        self.sinks: frozenset[int] = frozenset()  # ids of the layers with attention sinks
        self.batch_invariant = False  # results have the same bits in any batch
        self.are_scaled = False  # the pool divides KV by the layer's scales
        self.is_converted = False  # the pool has a one-byte dtype that pat converts

    def kind(self, layer_id: int) -> LayerKind:
        """Return the kind of a layer that pat decodes. Layers of the same kind share a plan."""
        window = self.windows.get(layer_id, 0)
        return LayerKind(self.shapes[layer_id], window, window > 0 and layer_id in self.chunked)

    def kinds(self) -> set[LayerKind]:
        """Return the kinds of all layers that pat decodes."""
        return {self.kind(layer_id) for layer_id in self.shapes}

    def fallback_reason(
        self, layer: RadixAttention, arguments: dict[str, Any]
    ) -> Unsupported | None:
        """Return a reason to fall back that shows only in a step, or None.

        Reasons are that the layer was not found at start-up, that latent attention is not absorbed,
        or that the model passes an argument that pat would ignore. If the layer has already fallen
        back, returns None.
        """
        what, shape = None, self.shapes.get(layer.layer_id)
        if shape is None:
            if layer.layer_id not in self.fallback:
                what = "a layer that was not found in the model"
        elif shape.is_latent and layer.qk_head_dim != shape.head_dim:
            what = "latent attention that is not absorbed"
        elif arguments:
            known = _LATENT_ARGUMENTS if shape.is_latent else ("sinks",)
            given = {name for name, value in arguments.items() if value is not None}
            if unknown := given.difference(known):
                what = f"the argument {', '.join(sorted(unknown))}"
        return None if what is None else Unsupported("attention", what)

    def fall_back(self, layer_id: int, reason: Unsupported) -> None:
        """Make a layer fall back to the default backend."""
        self.shapes.pop(layer_id, None)
        self.fallback.setdefault(layer_id, reason)

    def fall_back_all(self, reason: Unsupported) -> None:
        """Make all layers fall back to the default backend."""
        self.whole = reason
        self.fallback |= dict.fromkeys(self.shapes, reason)
        self.shapes = {}

    def check_strict(self) -> None:
        """Raise ValueError with the first reason if a layer falls back."""
        if self.whole is not None:
            raise self.whole.refusal()
        for layer_id, reason in sorted(self.fallback.items()):
            raise reason.refusal(f" (layer {layer_id})")

    def counts(self) -> dict[tuple[str, str], int]:
        """Return the number of layers by route and reason. The reason is "" for pat."""
        reasons = Counter(str(reason) for reason in self.fallback.values())
        if self.whole is not None and not reasons:
            reasons[str(self.whole)] = 0
        counted = {(PAT, ""): len(self.shapes)} if self.shapes else {}
        return counted | {(DEFAULT, reason): count for reason, count in reasons.most_common()}

    def as_json(self) -> dict[str, Any]:
        """Return what `/server_info` shows."""
        by_reason = {reason: n for (route, reason), n in self.counts().items() if route == DEFAULT}
        return {
            "default_backend": self.default,
            "pat_layers": len(self.shapes),
            "default_layers": by_reason,
            "batch_invariant": self.batch_invariant,
        }

    def __str__(self) -> str:
        """Return the line for the log."""
        total = len(self.shapes) + len(self.fallback)
        groups = [
            f"{count} on {self.default}: {reason}"
            for (route, reason), count in self.counts().items()
            if route == DEFAULT
        ]
        if not self.shapes:
            reasons = ", ".join(reason for _, reason in self.counts())
            return f"pat decodes nothing, {self.default} decodes all {total} layers: {reasons}"
        head = f"pat decodes {len(self.shapes)} of {total} layers"
        with_sinks = len(self.sinks & self.shapes.keys())
        if with_sinks:
            head += f", {with_sinks} of them with attention sinks"
        with_windows = self.windows.keys() & self.shapes.keys()
        if sliding := len(with_windows - self.chunked):
            head += f", {sliding} of them with sliding windows"
        if chunked := len(with_windows & self.chunked):
            head += f", {chunked} of them within chunks"
        if self.batch_invariant:
            head += ", batch-invariant"
        tail = [] if self.prefill is None else [f"prefill on {self.prefill}"]
        return "; ".join([head, *groups, *tail])


def read_scales(layer: RadixAttention) -> tuple[Scale, Scale]:
    """Return the scales of a layer's stored keys and values. For latent KV, both scales are 1.

    A scale may be the tensor by which the pool divides. SGLang also keeps the tensor's value as a
    number, but an update of the weights changes only the tensor.
    """
    if support.is_latent(layer.qk_head_dim, layer.v_head_dim):
        return 1.0, 1.0
    return (
        1.0 if layer.k_scale is None else layer.k_scale,
        1.0 if layer.v_scale is None else layer.v_scale,
    )
