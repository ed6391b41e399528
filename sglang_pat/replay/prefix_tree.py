"""A token-exact prefix tree that forgets nothing: what could be shared at best.

Beside the replay, whose own tree is SGLang's and evicts: `capacity.py` asks this one how much of a
prompt earlier prompts hold already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_pat.replay.trace import TokenIds


@dataclass(slots=True, eq=False)
class _Node:
    """The edge into a node: its tokens, at least one, and the children by their first token."""

    tokens: TokenIds
    children: dict[int, _Node] = field(default_factory=dict)


class PrefixTree:
    """A radix tree over tokens.

    tokens: how many it holds. They are copied, so the tree's memory is 8 bytes for each of them.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._root = _Node(np.empty(0, dtype=np.int64))

    def insert(self, tokens: TokenIds) -> int:
        """Add a sequence, int64 `[length]`. Returns how many of its tokens were there before."""
        node, matched = self._root, 0
        while matched < len(tokens):
            rest = tokens[matched:]
            child = node.children.get(int(rest[0]))
            if child is None:
                node.children[int(rest[0])] = _Node(rest.copy())
                self.tokens += len(rest)
                break
            common = _common_length(child.tokens, rest)
            matched += common
            if common < len(child.tokens):
                child = _split(node, child, common)
            node = child
        return matched


def _common_length(a: TokenIds, b: TokenIds) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _split(parent: _Node, child: _Node, length: int) -> _Node:
    """Cut an edge after `length` tokens. Returns the new node in its middle."""
    middle = _Node(child.tokens[:length])
    child.tokens = child.tokens[length:]
    middle.children[int(child.tokens[0])] = child
    parent.children[int(middle.tokens[0])] = middle
    return middle
