"""Replays of published experiments by name: options of the command, before the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sglang_pat.replay.trace import Segment, Trace, TraceErrors, TraceRequest
from sglang_pat.testing.trees import PAT_TREES, PrefixTree

_TREE_ANSWER = 17  # tokens: 16 decode steps with all requests of a tree
_TREE_INTERVAL = 1e6  # seconds, in which the tree before has long been served
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


def figure_10_trace() -> Trace:
    """The trees of PAT's Figure 10 that share something, one after another, each all at once."""
    trees = [PrefixTree.parse(text) for text in PAT_TREES]
    shared = [tree for tree in trees if tree.is_shared]
    return Trace(
        name=FIGURE_10,
        format="generated",
        stream=_tree_requests(shared),
        errors=TraceErrors(),
        requests=sum(tree.num_requests for tree in shared),
    )


def _tree_requests(trees: list[PrefixTree]) -> Iterator[TraceRequest]:
    for number, tree in enumerate(trees):
        for request in range(tree.num_requests):
            prompt = tuple(
                Segment(
                    (number << 32) + (level << 24) + request * nodes // tree.num_requests, tokens
                )
                for level, (nodes, tokens) in enumerate(zip(tree.nodes, tree.tokens, strict=True))
            )
            yield TraceRequest(number * _TREE_INTERVAL, prompt, _TREE_ANSWER)
