"""How many requests of a trace a KV pool holds at once, by the way its memory is handed out.

Beside the replay: no clock, no tree of SGLang's. Requests are admitted in the order of the trace
until one does not fit, each at its full length, prompt and answer. As in the study of paged
flash-decoding (section VII.D), a contiguous pool reserves the longest length for every request and
a paged one whole pages; a shared one holds whole pages of a prefix once, as a radix tree does.

One fill says little about a long trace, so there are many: each begins, for all schemes alike, with
the first request that the last one, shared with pages of one token, could not take.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_pat.workload.models import ModelShape
from sglang_pat.workload.trace import TokenIds, TraceRequest, token_ids

PAGE_SIZES = (1, 16, 32, 64, 128, 256, 512)
MAX_FILLS = 64

_Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A full pool: requests and bytes are means over all fills.

    scheme: "contiguous", "paged" or "shared". page_size: None if contiguous. fewest, most: requests
    of any fill. reserved_bytes: what was handed out. wasted_bytes: the part of it that no token
    will use. free_bytes: what is left, too little for the next request. shared_bytes: what the
    requests would hold in addition if each had its own copy of the pages that it shares.
    """

    scheme: str
    page_size: int | None
    requests: float
    fewest: int
    most: int
    reserved_bytes: int
    wasted_bytes: int
    free_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The study of one trace.

    max_length: tokens of a contiguous reservation. fills: how often the pool was filled. full:
    False if the trace ended before the pool was full once, then more might fit. refused: requests
    that are longer than the pool, left out. uses: contiguous, then paged, then shared by page size.
    """

    model: str
    pool_bytes: int
    bytes_per_token: int
    max_length: int
    fills: int
    full: bool
    refused: int
    uses: tuple[PoolUse, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def capacity(
    requests: Iterable[TraceRequest],
    model: ModelShape,
    pool_bytes: int,
    *,
    max_length: int | None = None,
    page_sizes: Sequence[int] = PAGE_SIZES,
    max_fills: int = MAX_FILLS,
) -> Capacity:
    """Fill a KV pool of `pool_bytes` with a trace, again and again, by every scheme and page size.

    max_length: what a contiguous reservation holds, in tokens; None for the longest request of the
    trace that fits at all, the least that serves them. ValueError names a pool, page size, number
    of fills or max_length that is not allowed.

    The whole trace is read, for its longest request; of the last fill, which the end of the trace
    cut short, nothing is used unless it is the only one. Memory is 16 bytes for every request of
    `max_fills` fills, and 8 bytes for every token of the pool.
    """
    bytes_per_token = model.kv_bytes_per_token
    pool_tokens = pool_bytes // bytes_per_token
    if pool_tokens < 1:
        raise ValueError(f"pool_bytes={pool_bytes}; one token of {model.name} is {bytes_per_token}")
    for name, value in (("max_fills", max_fills), *(("page size", size) for size in page_sizes)):
        if value < 1:
            raise ValueError(f"{name} {value}; 1 or more is allowed")
    filler = _Filler(pool_tokens, max_fills)
    for request in requests:
        filler.add(request)
    full = filler.finish()
    if max_length is None:
        max_length = filler.longest
    elif max_length < filler.longest:
        raise ValueError(f"max_length={max_length}; a request has {filler.longest} tokens")

    schemes: list[tuple[str, int | None]] = [("contiguous", None)]
    schemes += [(scheme, size) for scheme in ("paged", "shared") for size in page_sizes]
    uses = []
    for scheme, page_size in schemes:
        admissions = []
        for fill in filler.fills:
            reserved, shared = _demand(fill, scheme, page_size, max_length)
            admissions.append(_admit(fill, reserved, shared, pool_tokens))
        uses.append(_summary(scheme, page_size, admissions, pool_bytes, bytes_per_token))
    return Capacity(
        model=model.name,
        pool_bytes=pool_bytes,
        bytes_per_token=bytes_per_token,
        max_length=max_length,
        fills=len(filler.fills),
        full=full,
        refused=filler.refused,
        uses=tuple(uses),
    )


class _Fill(NamedTuple):
    """Consecutive requests: their full lengths, and how many tokens of each came before in it."""

    lengths: _Tokens
    matched: _Tokens


class _Filler:
    """Cuts a trace into fills, as many requests as fit when every shared token is held once.

    No scheme takes more: pages and private copies only add. longest: of all requests that fit.
    """

    def __init__(self, pool_tokens: int, max_fills: int) -> None:
        self.fills: list[_Fill] = []
        self.longest = 0
        self.refused = 0
        self._pool_tokens = pool_tokens
        self._max_fills = max_fills
        self._begin_fill()

    def add(self, request: TraceRequest) -> None:
        length = request.input_length + request.output_length
        if length > self._pool_tokens:
            self.refused += 1
            return
        self.longest = max(self.longest, length)
        if len(self.fills) == self._max_fills:
            return
        tokens = token_ids(request.prompt)
        match = self._tree.insert(tokens)
        if self._used + length - match > self._pool_tokens:
            self._end_fill()
            match = self._tree.insert(tokens)
        self._used += length - match
        self._lengths.append(length)
        self._matched.append(match)

    def finish(self) -> bool:
        """Whether the pool was full once. ValueError if no request fits."""
        if self.fills:
            return True
        if not self._lengths:
            raise ValueError(f"no request fits a pool of {self._pool_tokens} tokens")
        self._end_fill()
        return False

    def _begin_fill(self) -> None:
        self._tree = TokenTree()
        self._used = 0
        self._lengths = array("q")
        self._matched = array("q")

    def _end_fill(self) -> None:
        lengths = np.array(self._lengths, dtype=np.int64)
        self.fills.append(_Fill(lengths, np.array(self._matched, dtype=np.int64)))
        self._begin_fill()


def _demand(
    fill: _Fill, scheme: str, page_size: int | None, max_length: int
) -> tuple[_Tokens, _Tokens]:
    """Tokens to reserve for each request, and those it shares instead, `[requests]`."""
    nothing = np.zeros_like(fill.lengths)
    if page_size is None:
        return np.full_like(fill.lengths, max_length), nothing
    pages = -(-fill.lengths // page_size) * page_size
    shared = fill.matched // page_size * page_size if scheme == "shared" else nothing
    return pages - shared, shared


class _Admission(NamedTuple):
    """What one fill puts into the pool, in requests and tokens."""

    requests: int
    reserved: int
    wasted: int
    shared: int


def _admit(fill: _Fill, reserved: _Tokens, shared: _Tokens, pool_tokens: int) -> _Admission:
    count = int(np.searchsorted(np.cumsum(reserved), pool_tokens, side="right"))
    taken, saved = int(reserved[:count].sum()), int(shared[:count].sum())
    return _Admission(count, taken, taken + saved - int(fill.lengths[:count].sum()), saved)


def _summary(
    scheme: str,
    page_size: int | None,
    admissions: list[_Admission],
    pool_bytes: int,
    bytes_per_token: int,
) -> PoolUse:
    requests, *tokens = np.mean(admissions, axis=0)
    reserved, wasted, shared = (round(mean * bytes_per_token) for mean in tokens)
    return PoolUse(
        scheme=scheme,
        page_size=page_size,
        requests=float(requests),
        fewest=min(admission.requests for admission in admissions),
        most=max(admission.requests for admission in admissions),
        reserved_bytes=reserved,
        wasted_bytes=wasted,
        free_bytes=pool_bytes - reserved,
        shared_bytes=shared,
    )


@dataclass(slots=True, eq=False)
class _Node:
    """The edge into a node: its tokens, at least one, and the children by their first token."""

    tokens: TokenIds
    children: dict[int, _Node] = field(default_factory=dict)


class TokenTree:
    """A radix tree over tokens that forgets nothing: what could be shared at best.

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

    def match(self, tokens: TokenIds) -> int:
        """How many tokens of a sequence, from its beginning, the tree has. Changes nothing."""
        node, matched = self._root, 0
        while matched < len(tokens):
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            common = _common_length(child.tokens, tokens[matched:])
            matched += common
            if common < len(child.tokens):
                break
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
