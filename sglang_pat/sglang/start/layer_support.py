"""Which layers of a model pat decodes, and why the others fall back to SGLang's backend.

`layer_rules.py` decides it once, when SGLang builds the backend. A warm-up step may show that one
more layer must fall back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat import support
from sglang_pat.executors.layer import Scale
from sglang_pat.plan import HeadConfig
from sglang_pat.support import Unsupported

PAT, DEFAULT = "pat", "default"  # who decodes a layer
# Arguments that models pass to a layer beside queries, keys and values.
_LATENT_ARGUMENTS = ("q_rope", "k_rope")


class LayerSupport:
    """The route of each attention layer of a model's part on this rank.

    Attributes
    ----------
    default
        The name of SGLang's default backend.
    prefill
        The name of the backend that prefills the model that is served. None: it is not named.
    shapes
        Layer id -> shape of each layer that pat decodes.
    fallback
        Layer id -> reason of each layer that the default backend decodes.
    whole
        The reason why the whole model falls back, even if it has no layers.
    sinks
        Ids of the layers that have attention sinks.
    batch_invariant
        Whether pat computes a request alike in any batch.
    are_scaled
        Whether the pool's KV is divided by the scales of its layer.
    is_converted
        Whether the pool has a type of one byte that pat converts.
    layers
        All attention layers.
    """

    def __init__(self, default: str) -> None:
        self.default = default
        self.prefill: str | None = None
        self.shapes: dict[int, HeadConfig] = {}
        self.fallback: dict[int, Unsupported] = {}
        self.sinks: frozenset[int] = frozenset()
        self.batch_invariant = False
        self.are_scaled = self.is_converted = False
        self.layers: Sequence[RadixAttention] = ()
        self.whole: Unsupported | None = None

    def fallback_reason(
        self, layer: RadixAttention, arguments: dict[str, Any]
    ) -> Unsupported | None:
        """Return why the default backend must attend, for a reason that only a step shows.

        The model passes the layer an argument that pat would ignore, or the layer was not found.
        None: there is no reason, or it is known.
        """
        layer_id = layer.layer_id
        shape = self.shapes.get(layer_id)
        if shape is not None:
            if shape.is_latent and layer.qk_head_dim != shape.head_dim:
                return Unsupported("attention", "latent attention that is not absorbed")
            if not arguments:
                return None
            known = _LATENT_ARGUMENTS if shape.is_latent else ("sinks",)
            given = sorted(name for name, value in arguments.items() if value is not None)
            unknown = [name for name in given if name not in known]
            return (
                Unsupported("attention", f"the argument {', '.join(unknown)}") if unknown else None
            )
        if layer_id in self.fallback:
            return None
        return Unsupported("attention", "a layer that was not found in the model")

    def fall_back(self, layer_id: int, reason: Unsupported) -> None:
        """Leave a layer to the default backend."""
        self.shapes.pop(layer_id, None)
        self.fallback.setdefault(layer_id, reason)

    def fall_back_all(self, reason: Unsupported) -> None:
        """Leave the model to the default backend."""
        self.whole = reason
        self.fallback |= dict.fromkeys(self.shapes, reason)
        self.shapes = {}

    def check_strict(self) -> None:
        """ValueError that names the first thing that is fallback."""
        if self.whole is not None:
            raise self.whole.refusal()
        for layer_id, reason in sorted(self.fallback.items()):
            raise reason.refusal(f" (layer {layer_id})")

    def counts(self) -> dict[tuple[str, str], int]:
        """(route, reason) -> how many layers. The reason of pat's own is empty."""
        reasons = Counter(str(reason) for reason in self.fallback.values())
        if self.whole is not None and not reasons:
            reasons[str(self.whole)] = 0
        counted = {(PAT, ""): len(self.shapes)} if self.shapes else {}
        return counted | {(DEFAULT, reason): count for reason, count in reasons.most_common()}

    def as_json(self) -> dict[str, Any]:
        """For `/server_info`."""
        by_reason = {reason: n for (route, reason), n in self.counts().items() if route == DEFAULT}
        return {
            "default_backend": self.default,
            "pat_layers": len(self.shapes),
            "default_layers": by_reason,
            "batch_invariant": self.batch_invariant,
        }

    def __str__(self) -> str:
        """For the log."""
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
        if self.batch_invariant:
            head += ", batch-invariant"
        tail = [] if self.prefill is None else [f"prefill on {self.prefill}"]
        return "; ".join([head, *groups, *tail])

    def table(self) -> Iterator[tuple[str, str, str]]:
        """(layers, route, reason), for neighbours that have the same."""
        rows: list[tuple[int, int, str, str]] = []
        for layer_id in sorted({*self.shapes, *self.fallback}):
            reason = str(self.fallback.get(layer_id, ""))
            route = self.default if reason else PAT
            if rows and rows[-1][2:] == (route, reason) and rows[-1][1] == layer_id - 1:
                rows[-1] = (rows[-1][0], layer_id, route, reason)
            else:
                rows.append((layer_id, layer_id, route, reason))
        for first, last, route, reason in rows:
            yield (str(first) if first == last else f"{first}-{last}", route, reason)


def read_scales(layer: RadixAttention) -> tuple[Scale, Scale]:
    """Return what the stored keys and values are multiplied with: latent ones with 1.

    A tensor is the one that the pool divides by, not the number that SGLang keeps beside it:
    loading new weights overwrites the tensor alone.
    """
    if support.is_latent(layer.qk_head_dim, layer.v_head_dim):
        return 1.0, 1.0
    return (
        1.0 if layer.k_scale is None else layer.k_scale,
        1.0 if layer.v_scale is None else layer.v_scale,
    )
