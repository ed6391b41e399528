"""Shapes of published models: the keys of their `config.json` that matter, and what is so of them.

`data/published_shapes.jsonl` has a line for each. Its layers and parameters are those of the class
that SGLang 0.5.23 builds from the whole published file. Where it builds none, `not_built` says why,
and they are those of the rules.
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
        (how many, query heads, KV heads, head_dim, v_head_dim, why pat does not decode them or
        None) of the attention layers on one GPU that are alike.
    parameters
        How many, in units of 10**9; encoders of images and sounds included.
    not_built
        Why SGLang does not build the class from these keys; empty if it does.
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
    """Every shape, by the name of its model."""
    found = {}
    for line in DATA.read_text().splitlines():
        entry = json.loads(line)
        entry["config"] = _expanded(entry["config"])
        entry["layers"] = tuple(map(tuple, entry["layers"]))
        shape = PublishedShape(**entry)
        found[shape.name] = shape
    return found


def _expanded(value: Any) -> Any:
    """Lists are kept as [value, how often] where neighbours are alike."""
    if isinstance(value, dict):
        if set(value) == {"runs"}:
            return [each for each, times in value["runs"] for _ in range(times)]
        return {key: _expanded(each) for key, each in value.items()}
    return [_expanded(each) for each in value] if isinstance(value, list) else value


def alike(
    layers: Sequence[tuple[Sequence[int], str | None]],
) -> tuple[tuple[int, int, int, int, int, str | None], ...]:
    """(shape, reason) of each layer, as `PublishedShape.layers` has them."""
    counts: Counter[tuple[int, int, int, int, str | None]] = Counter()
    for (heads, kv_heads, head_dim, v_head_dim), reason in layers:
        counts[heads, kv_heads, head_dim, v_head_dim, reason] += 1
    return tuple(sorted(((count, *alike) for alike, count in counts.items()), key=str))


def by_rules(config: dict[str, Any], tp: int = 1) -> tuple[Any, ...]:
    """The same of a configuration, by the rules."""
    return alike(
        [
            ((each.num_qo_heads, each.num_kv_heads, each.head_dim, each.v_head_dim), reason(each))
            for each in read_layers(config, tp)
            if each.num_qo_heads
        ]
    )


def reason(layer: Layer) -> str | None:
    """Why pat does not decode a layer; None if it does."""
    return None if layer.refusal is None else told(layer.refusal.topic, layer.refusal.value)


def told(topic: str, value: object) -> str:
    """A reason without the length of windows, which SGLang counts in two ways."""
    if topic == "sliding window":
        return topic
    return str(value) if topic == "attention" else f"{topic} {value}"
