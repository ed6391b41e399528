"""Replays of published experiments by name: options of the command, before the user's own."""

from __future__ import annotations

from typing import Any, NamedTuple

FIGURE_10 = "pat-figure-10"


class Preset(NamedTuple):
    """options: by their names on the command line, with underscores."""

    description: str
    options: dict[str, Any]


PRESETS = {
    "pat-figure-12": Preset(
        "PAT's ablation: its shared synthetic trees with the heads of Llama-3-8B, by policy",
        {
            "generate": FIGURE_10,
            "policies": "memory,paper,compute,per-node",
            "kv_tokens": 4_000_000,
            "max_batch": 1024,
            "prefill_tokens": 1 << 30,
            "max_rows": 0,
            "forest_step": 0,
        },
    ),
    "pat-figure-14": Preset(
        "PAT's scheduling overhead: conversation at 5 requests/s, or --generate toolagent at 8",
        {
            "generate": "conversation",
            "limit": 3000,
            "policies": "memory",
            "max_batch": 256,
            "max_rows": 0,
        },
    ),
}
