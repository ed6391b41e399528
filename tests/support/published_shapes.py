"""Shapes of published models: keys of their `config.json`, layers and numbers of parameters.

`data/published_shapes.jsonl` has a line for each model. Layers and parameters are those of the
class that SGLang 0.5.23 builds from the whole published file. If SGLang builds none, `not_built`
says why, and the numbers are those of `sglang_pat.model_layers`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pat.model_layers import Layer, read_layers

DATA = Path(__file__).parent / "data/published_shapes.jsonl"


@dataclass(frozen=True)
class PublishedShape:
    """One published model.

    Attributes
    ----------
    layers
        (count, query heads, KV heads, head_dim, v_head_dim, why pat does not decode them or None)
        of each group of equal attention layers on one GPU.
    parameters
        Number of parameters in units of 10**9, with encoders of images and audio.
    not_built
        Why SGLang does not build the class from these keys, or an empty string.
    """

    name: str
    config: dict[str, Any]
    layers: tuple[tuple[int, int, int, int, int, str | None], ...]
    parameters: float
    not_built: str = ""

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])


def read_shapes() -> dict[str, PublishedShape]:
    """Return all shapes by the name of the model."""
    found = {}
    for line in DATA.read_text().splitlines():
        entry = json.loads(line)
        entry["config"] = _expanded(entry["config"])
        entry["layers"] = tuple(map(tuple, entry["layers"]))
        shape = PublishedShape(**entry)
        found[shape.name] = shape
    return found


def _expanded(value: Any) -> Any:
    """Expand lists, which are stored as [value, count] of equal neighbours."""
    if isinstance(value, dict):
        if set(value) == {"runs"}:
            return [each for each, times in value["runs"] for _ in range(times)]
        return {key: _expanded(each) for key, each in value.items()}
    return [_expanded(each) for each in value] if isinstance(value, list) else value


def alike(
    layers: Sequence[tuple[Sequence[int], str | None]],
) -> tuple[tuple[int, int, int, int, int, str | None], ...]:
    """Group equal layers, as in `PublishedShape.layers`."""
    counts: Counter[tuple[int, int, int, int, str | None]] = Counter()
    for (heads, kv_heads, head_dim, v_head_dim), reason in layers:
        counts[heads, kv_heads, head_dim, v_head_dim, reason] += 1
    return tuple(sorted(((count, *alike) for alike, count in counts.items()), key=str))


def by_rules(config: dict[str, Any], tp: int = 1) -> tuple[Any, ...]:
    """Return the layers that the rules derive from a configuration."""
    return alike(
        [
            ((each.num_qo_heads, each.num_kv_heads, each.head_dim, each.v_head_dim), reason(each))
            for each in read_layers(config, tp)
            if each.num_qo_heads
        ]
    )


def reason(layer: Layer) -> str | None:
    """Return why pat does not decode a layer; None if it does."""
    return None if layer.refusal is None else told(layer.refusal.topic, layer.refusal.value)


def told(topic: str, value: object) -> str:
    """Return a reason without the length of windows, which SGLang counts in two ways."""
    if topic == "sliding window":
        return topic
    return str(value) if topic == "attention" else f"{topic} {value}"
