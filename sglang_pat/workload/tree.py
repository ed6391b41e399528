"""The prefix cache of the simulated server: a radix tree, and a KV pool that counts tokens.

It follows the rules of SGLang's UnifiedRadixCache for full attention and LRU eviction, and a test
compares every operation with that class. `offline/simulated_cache.py` gives SGLang's own classes
the same interface, `Tree`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sglang_pat.batch import PrefixPaths
from sglang_pat.workload.trace import TokenIds


class CachedRequest(Protocol):
    """The part of a request that a tree reads.

    Attributes
    ----------
    tokens
        Prompt and answer, int64.
    kv_len
        Tokens whose KV is in the pool.
    protected
        Number of the request's tokens that are in the tree, which locks them while the request
        runs. Only the tree sets this number.
    handle
        What the tree remembers of the request; None before the tree has seen the request.
    """

    prompt_length: int
    kv_len: int
    protected: int
    handle: Any

    @property
    def tokens(self) -> TokenIds: ...


class Tree(Protocol):
    """A prefix cache over a KV pool.

    Attributes
    ----------
    size, page_size
        Number of tokens in the pool, and in a page. The pool consists of whole pages.
    available
        Number of free tokens.
    finished_leave_late
        Whether a finished request keeps its place in the batch until SGLang prepares the next
        decode step. Until then, no new request can get the place. SGLang did so up to 0.5.17.
    refreshes_waiting
        Whether the scheduler regularly marks the prefixes of waiting requests as used.
    """

    size: int
    page_size: int
    finished_leave_late: bool
    refreshes_waiting: bool

    @property
    def available(self) -> int: ...

    @property
    def reachable(self) -> int:
        """Return the number of tokens that are free or that could be evicted."""

    def match(self, request: CachedRequest, length: int) -> int:
        """Lock the cached prefix of the first `length` tokens. Return the prefix's length.

        The prefix is shorter than `length`: prefill must compute at least one token to generate the
        next one.
        """

    def find(self, request: CachedRequest, length: int) -> int:
        """Find the cached prefix of the first `length` tokens of a waiting request.

        Returns the prefix's length. Marks the prefix as used, and sets the request's handle to the
        node at which the prefix ends.
        """

    def unlock(self, request: CachedRequest) -> None:
        """Unlock the prefix of a request that is not admitted after all."""

    def make_room(self, num_tokens: int) -> bool:
        """Evict unused KV until `num_tokens` tokens are free. Return False if impossible."""

    def allocate(self, num_tokens: int) -> None:
        """Take `num_tokens` tokens, which are whole pages, from the pool. They must be free."""

    def checkpoint(self, request: CachedRequest) -> None:
        """Insert a running request's KV into the tree. The request's path then covers this KV."""

    def finish(self, request: CachedRequest) -> None:
        """Insert all KV of a finished request into the tree, and unlock this KV."""

    def release(self, request: CachedRequest) -> None:
        """Free a retracted request's KV that is not in the tree, and unlock the rest."""

    def paths(self, requests: Sequence[CachedRequest]) -> PrefixPaths:
        """Return the path of each request, including the nodes that no other request shares."""

    def by_weight(self, requests: Sequence[CachedRequest]) -> list[int]:
        """Return the indices of the requests in the order of `dfs-weight`.

        Call find() for each request first.
        """


class Node:
    """A node of the tree. children: the key of a child is the first page of its tokens."""

    __slots__ = ("children", "lock", "number", "parent", "time", "tokens")

    def __init__(self, tokens: TokenIds, parent: Node | None, time: float, number: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.time = time
        self.number = number
        self.lock = 0
        self.children: dict[int | bytes, Node] = {}


class RadixTree:
    """Implements `Tree` with numpy. Takes 8 bytes of memory per token."""

    finished_leave_late = False
    refreshes_waiting = True

    def __init__(self, num_tokens: int, page_size: int = 1) -> None:
        self.page_size = page_size
        self.size = self.available = num_tokens // page_size * page_size
        self.evictable = 0
        self._now = 0.0
        self._next_number = 0
        self._root = self._new(np.empty(0, dtype=np.int64), None)
        self._root.lock = 1
        self._leaves: set[Node] = set()  # leaves that no request has locked
        # A heap, sorted by time of last use. It has all of `_leaves`, but the time of some is
        # outdated. It also has nodes that are no longer in `_leaves`.
        self._oldest: list[tuple[float, int, Node]] = []

    @property
    def reachable(self) -> int:
        return self.available + self.evictable

    def match(self, request: CachedRequest, length: int) -> int:
        found = self.find(request, length - 1)
        self._lock(request.handle)
        return found

    def find(self, request: CachedRequest, length: int) -> int:
        length = length // self.page_size * self.page_size
        node, found = request.handle, request.protected
        if node is None or node.parent is None or found > length:  # not found yet, or evicted
            node, found = self._root, 0
        request.protected, request.handle = self._match(request.tokens[:length], node, found)
        return request.protected

    def common_prefix(self, tokens: TokenIds) -> int:
        """Return the length of the longest prefix of `tokens` that is in the tree. Lock nothing."""
        return self._match(tokens, self._root, 0)[0]

    def insert(self, tokens: TokenIds) -> None:
        """Insert tokens without taking slots of the pool."""
        self._insert(tokens, len(tokens))

    def unlock(self, request: CachedRequest) -> None:
        node = request.handle
        while node is not self._root:
            node.lock -= 1
            if node.lock == 0:
                self.evictable += len(node.tokens)
            self._note_leaf(node)
            node = node.parent

    def make_room(self, num_tokens: int) -> bool:
        oldest = self._oldest
        while num_tokens > self.available and oldest:
            time, _, node = heapq.heappop(oldest)
            if node not in self._leaves:
                continue
            if time < node.time:  # the node was used after it was pushed
                heapq.heappush(oldest, (node.time, node.number, node))
                continue
            self._leaves.discard(node)
            parent = node.parent
            assert parent is not None
            del parent.children[self._key(node.tokens, 0)]
            node.parent = None
            self.evictable -= len(node.tokens)
            self.available += len(node.tokens)
            self._note_leaf(parent)
        return num_tokens <= self.available

    def allocate(self, num_tokens: int) -> None:
        if num_tokens > self.available:
            raise RuntimeError(f"{num_tokens} tokens wanted of a KV pool with {self.available}")
        self.available -= num_tokens

    def checkpoint(self, request: CachedRequest) -> None:
        if request.kv_len == 0:
            return
        aligned = request.kv_len // self.page_size * self.page_size
        tokens, held = request.tokens, request.protected
        node = self._insert(tokens[:aligned], held, request.handle)
        prompt = request.prompt_length // self.page_size * self.page_size
        if 0 < prompt < aligned:  # split, so that the answer can be evicted alone
            self._insert(tokens[:prompt], prompt, request.handle if held <= prompt else None)
        self.unlock(request)
        request.handle, request.protected = node, aligned
        self._lock(node)

    def finish(self, request: CachedRequest) -> None:
        self.checkpoint(request)
        self.release(request)

    def release(self, request: CachedRequest) -> None:
        self.available += self._pages(request.kv_len - request.protected)
        self.unlock(request)

    def paths(self, requests: Sequence[CachedRequest]) -> PrefixPaths:
        paths = []
        for request in requests:
            nodes: list[Node] = []
            node = request.handle
            while node is not self._root:
                nodes.append(node)
                node = node.parent
            path, end = [], 0
            for node in reversed(nodes):
                begin, end = end, end + len(node.tokens)
                path.append((node.number, begin, end))
            paths.append(path)
        return PrefixPaths.from_lists(paths)

    def by_weight(self, requests: Sequence[CachedRequest]) -> list[int]:
        ending: dict[Node, list[int]] = {}
        for index, request in enumerate(requests):
            ending.setdefault(request.handle, []).append(index)
        weights: dict[Node, int] = {}
        for node, indices in ending.items():
            above: Node | None = node
            while above is not None:
                weights[above] = weights.get(above, 0) + len(indices)
                above = above.parent
        order: list[int] = []
        stack: list[tuple[Node, bool]] = [(self._root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.extend(ending.get(node, ()))
                continue
            stack.append((node, True))
            children = [child for child in node.children.values() if child in weights]
            children.sort(key=lambda child: -weights[child])
            stack.extend((child, False) for child in reversed(children))
        return order

    # --- nodes ---

    def _tick(self) -> float:
        self._now += 1.0
        return self._now

    def _new(self, tokens: TokenIds, parent: Node | None) -> Node:
        self._next_number += 1
        return Node(tokens, parent, self._tick(), self._next_number)

    def _key(self, tokens: TokenIds, at: int) -> int | bytes:
        if self.page_size == 1:
            return int(tokens[at])
        return tokens[at : at + self.page_size].tobytes()

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def _common(self, a: TokenIds, b: TokenIds) -> int:
        length = min(len(a), len(b))
        different = a[:length] != b[:length]
        first = int(different.argmax()) if length else 0
        common = first if length and different[first] else length
        return common // self.page_size * self.page_size

    def _note_leaf(self, node: Node) -> None:
        if node.lock == 0 and not node.children:
            if node not in self._leaves:
                self._leaves.add(node)
                heapq.heappush(self._oldest, (node.time, node.number, node))
        else:
            self._leaves.discard(node)

    def _lock(self, node: Node) -> None:
        while node is not self._root:
            if node.lock == 0:
                self.evictable -= len(node.tokens)
                self._leaves.discard(node)
            node.lock += 1
            assert node.parent is not None
            node = node.parent

    def _split(self, child: Node, length: int) -> Node:
        """Split a node after `length` tokens. Return the upper part, which is a new node."""
        parent = child.parent
        assert parent is not None
        upper = self._new(child.tokens[:length], parent)
        upper.lock = child.lock
        parent.children[self._key(upper.tokens, 0)] = upper
        child.tokens, child.parent = child.tokens[length:], upper
        upper.children[self._key(child.tokens, 0)] = child
        child.time = self._tick()
        return upper

    def _match(self, tokens: TokenIds, node: Node, found: int) -> tuple[int, Node]:
        """Go down the tree from `node`, at which the first `found` of the tokens end.

        The tokens are whole pages. Returns how many of the tokens are in the tree, and the node at
        which these end. Marks all nodes on this path as used.
        """
        if not len(tokens):
            return 0, self._root
        while found < len(tokens):
            child = node.children.get(self._key(tokens, found))
            if child is None:
                break
            common = self._common(child.tokens, tokens[found:])
            found += common
            if common < len(child.tokens):
                node = self._split(child, common)
                break
            node = child
        time = self._tick()
        above: Node | None = node
        while above is not None:
            above.time = time
            above = above.parent
        return found, node

    def _insert(self, tokens: TokenIds, protected: int, held: Node | None = None) -> Node:
        """Insert tokens, which are whole pages. Return the node at which they end.

        If the tree already has some of the tokens after the first `protected`, the request's copies
        of these are freed. held: a locked node at which the first tokens end. These tokens need not
        be compared.
        """
        path: list[Node] = []
        while held is not None and held is not self._root:
            path.append(held)
            held = held.parent
        self._root.time = self._tick()
        node, at = self._root, 0
        for node in reversed(path):
            node.time = self._tick()
            at += len(node.tokens)
        while at < len(tokens):
            child = node.children.get(self._key(tokens, at))
            if child is None:
                child = self._new(tokens[at:].copy(), node)
                node.children[self._key(tokens, at)] = child
                self.evictable += len(child.tokens)
                self._note_leaf(child)
                self._note_leaf(node)
                return child
            child.time = self._tick()
            common = self._common(child.tokens, tokens[at:])
            if common < len(child.tokens):
                child = self._split(child, common)
            self.available += self._pages(max(0, common - max(0, protected - at)))
            node, at = child, at + common
        return node
