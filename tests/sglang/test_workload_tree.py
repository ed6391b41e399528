"""The simulated server's tree against SGLang's UnifiedRadixCache, operation by operation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from sglang_pat.offline.simulated_cache import IdTree, new_tree
from sglang_pat.workload.tree import Node, RadixTree

pytestmark = pytest.mark.skipif(
    not isinstance(new_tree(8), IdTree), reason="RadixCache of 0.5.17 has other rules"
)
OPERATIONS = 300


class Request:
    def __init__(self, number: int, tokens: list[int], prompt_length: int) -> None:
        self.number = number
        self.tokens = np.array(tokens, dtype=np.int64)
        self.prompt_length = self.wanted = prompt_length
        self.kv_len = self.protected = 0
        self.handle: Any = None


class Both:
    """One operation on both trees. What they return is equal, and so is what they hold then."""

    def __init__(self, num_tokens: int, page: int) -> None:
        self.ours, self.theirs = RadixTree(num_tokens, page), new_tree(num_tokens, page)
        self.page = page
        self.live: list[tuple[Request, Request]] = []
        self._ids: dict[int, int] = {}

    def each(self, name: str, pair: tuple[Request, Request], *rest: int) -> Any:
        found = [
            getattr(tree, name)(request, *rest)
            for tree, request in zip((self.ours, self.theirs), pair, strict=True)
        ]
        assert found[0] == found[1], name
        return found[0]

    def make_room(self, num_tokens: int) -> bool:
        enough = self.ours.make_room(num_tokens)
        assert enough == self.theirs.make_room(num_tokens)
        return enough

    def extend(self, pair: tuple[Request, Request], kv_len: int) -> bool:
        """Compute the KV of more tokens, if there is room."""
        pages = -(-kv_len // self.page) - -(-pair[0].kv_len // self.page)
        if not self.make_room(pages * self.page):
            return False
        for tree, request in zip((self.ours, self.theirs), pair, strict=True):
            tree.allocate(pages * self.page)
            request.kv_len = kv_len
        return True

    def check(self, choose: random.Random) -> None:
        assert self.ours.available == self.theirs.available
        assert self.ours.evictable == self.theirs.evictable
        for ours, theirs in self.live:
            assert ours.protected == theirs.protected
        if self.live and choose.random() < 0.3:
            mine, others = (list(each) for each in zip(*self.live, strict=True))
            paths, expected = self.ours.paths(mine), self.theirs.paths(others)
            for name in ("path_begin", "kv_begin", "kv_end"):
                assert (getattr(paths, name) == getattr(expected, name)).all(), name
            for ours, theirs in zip(paths.node_id.tolist(), expected.node_id.tolist(), strict=True):
                assert self._ids.setdefault(theirs, ours) == ours
        core = self.theirs.tree.tree_core
        if not hasattr(core, "_binding"):  # written in Python: nothing is hidden
            assert nodes_of(self.ours._root) == nodes_of(core.root_node)
            assert [tuple(node.tokens.tolist()) for node in by_time(self.ours._leaves)] == [
                tuple(node.key.token_ids)
                for node in sorted(core.evictable_device_leaves, key=lambda n: n.last_access_time)
            ]


def by_time(leaves: set[Node]) -> list[Node]:
    return sorted(leaves, key=lambda node: node.time)


def nodes_of(node: Any, depth: int = 0) -> list[tuple[int, tuple[int, ...], int]]:
    """(depth, tokens, locks) of all nodes below one."""
    found = []
    for child in node.children.values():
        if isinstance(child, Node):
            found.append((depth, tuple(child.tokens.tolist()), child.lock))
        else:
            locks = child.component_data
            lock = next(iter(locks.values())) if isinstance(locks, dict) else locks[0]
            found.append((depth, tuple(child.key.token_ids), lock.lock_ref))
        found += nodes_of(child, depth + 1)
    return sorted(found)


def new_pair(number: int, tokens: list[int], prompt_length: int) -> tuple[Request, Request]:
    return Request(number, tokens, prompt_length), Request(number, tokens, prompt_length)


def run(seed: int, page: int) -> None:
    choose = random.Random(seed)
    num_tokens = choose.choice((64, 200, 600)) * max(1, page // 2)
    both = Both(num_tokens, page)
    length = 60 * max(1, page // 4)
    texts = [choose.choices(range(3), k=length) for _ in range(4)]
    waiting: list[tuple[Request, Request]] = []
    for number in range(OPERATIONS):
        kind = choose.random()
        if kind < 0.4:
            if waiting and choose.random() < 0.5:
                pair = waiting.pop(choose.randrange(len(waiting)))
            else:
                text = choose.choice(texts)
                prompt = text[: choose.randrange(1, length)]
                prompt += choose.choices(range(3), k=choose.randrange(12))
                tokens = prompt + choose.choices(range(3), k=choose.randrange(1, 30))
                pair = new_pair(number, tokens, len(prompt))
            wanted = pair[0].wanted
            found = both.each("match", pair, wanted)
            pair[0].kv_len = pair[1].kv_len = found
            # Some prompts are cut into chunks, at whole pages.
            chunk = (found + (wanted - found) // 2) // page * page
            is_cut = choose.random() < 0.5 and chunk > found
            for end in (chunk, wanted) if is_cut else (wanted,):
                if not both.extend(pair, end):
                    both.each("release" if pair[0].kv_len > found else "unlock", pair)
                    break
                both.each("checkpoint", pair)
            else:
                both.live.append(pair)
        elif kind < 0.7 and both.live:
            pair = choose.choice(both.live)
            if pair[0].kv_len < len(pair[0].tokens):
                both.extend(pair, pair[0].kv_len + 1)
        elif kind < 0.85 and both.live:
            pair = both.live.pop(choose.randrange(len(both.live)))
            if choose.random() < 0.7:
                both.each("finish", pair)
            else:  # retracted: with what it has generated it waits again
                both.each("release", pair)
                for each in pair:
                    each.wanted, each.kv_len = each.kv_len, 0
                waiting.append(pair)
        elif kind < 0.93:
            for other in range(len(waiting), 6):
                prompt = choose.choice(texts)[: choose.randrange(1, length)]
                waiting.append(new_pair(1000 * number + other, [*prompt, 1], len(prompt)))
            for pair in waiting:
                both.each("find", pair, pair[0].wanted)
            mine, others = zip(*waiting, strict=True)
            assert both.ours.by_weight(mine) == both.theirs.by_weight(others)
        else:
            both.make_room(choose.randrange(num_tokens // 2))
        both.check(choose)


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_every_operation_is_sglangs(page: int, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", core)
    assert hasattr(new_tree(8).tree.tree_core, "_binding") == (core == "rust")
    for seed in range(8):
        run(seed, page)
