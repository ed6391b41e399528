"""The prefix trees of PAT's Figure 10 as a trace.

First stage of the replay, beside `generators.py`: for the preset of PAT's ablation.
"""

from __future__ import annotations

from collections.abc import Iterator

from sglang_pat.replay.presets import FIGURE_10
from sglang_pat.replay.trace import Segment, Trace, TraceErrors, TraceRequest
from sglang_pat.testing.trees import PAT_TREES, PrefixTree

_ANSWER = 17  # tokens: 16 decode steps with all requests of a tree
_INTERVAL = 1e6  # seconds, in which the tree before has long been served


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
            yield TraceRequest(number * _INTERVAL, prompt, _ANSWER)
