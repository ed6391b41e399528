"""Simulates SGLang's scheduler, with a prefix cache and a clock.

Prefills run before decode steps. A prefill pass has up to `chunked_prefill_size` tokens, and its
last prompt may be cut. Requests are admitted while the KV pool is expected to suffice. If the pool
does not suffice later, KV is evicted, and if that is not enough, requests are retracted. A prompt
cannot reuse the KV of other prompts in its pass, because all prompts enter the tree after the pass.
The rules are those of SGLang 0.5.23, but without overlap scheduling, with which each batch would
begin one step later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from sglang_pat.batch import IntArray
from sglang_pat.workload.trace import Prompt, Segment, TokenIds, TraceRequest, token_ids
from sglang_pat.workload.tree import RadixTree, Tree

SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight")

# SGLang's defaults. For each running request, the server reserves KV for a fraction of the rest of
# its answer. This fraction, called the ratio, falls with each step, and rises when requests are
# retracted.
_NEW_TOKEN_RATIO = 0.7
_LEAST_NEW_TOKEN_RATIO = 0.7 * 0.14
_RATIO_DECAY = (_NEW_TOKEN_RATIO - _LEAST_NEW_TOKEN_RATIO) / 600
_MOST_NEW_TOKENS = 4096  # most tokens reserved for an answer
_RETRACT_STEPS = 20
_SPARE_FOR_ANSWER = 5  # tokens that a prompt must leave for the answer
_MATCHED_WAITING = 128  # at most this many waiting requests have their prefixes looked up
_REFRESH_PASSES = 32
# lpm: if several requests have the same beginning, and at most this many of its tokens are cached,
# the first request keeps its place, and the others go last.
_SHORT_PREFIX = 32
_ANSWERS = 0x5EED << 48  # the content ids of answers begin here, far from other ids


@dataclass(frozen=True, slots=True)
class Rules:
    """Options of the server, by SGLang's names.

    Attributes
    ----------
    context_length
        Tokens of the longest request. None: only the pool limits requests.
    max_new_tokens
        The limit that clients set for each answer. None: the length that the trace gives.
    ignore_eos
        Whether requests ignore the end-of-sequence token. If so, the server reserves KV for as many
        tokens as the limit allows.
    """

    max_running_requests: int = 256
    chunked_prefill_size: int = 8192
    context_length: int | None = None
    max_new_tokens: int | None = None
    ignore_eos: bool = True
    schedule_policy: str = "fcfs"


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in the server. Times are in simulated seconds.

    Attributes
    ----------
    answer_length, asked
        Number of tokens in the answer, and the request's limit for this number.
    kv_len
        Number of tokens whose KV is in the pool, updated only when the batch changes.
    """

    number: int
    arrival: float
    prompt: Prompt
    prompt_length: int
    answer_length: int
    asked: int
    kv_len: int = 0
    protected: int = 0
    generated: int = 0
    handle: Any = None
    first_token: float = math.nan
    _tokens: TokenIds | None = None

    @property
    def tokens(self) -> TokenIds:
        """The tokens of prompt and answer, made up when they are first needed."""
        if self._tokens is None:
            answer = (Segment(_ANSWERS + self.number, self.answer_length),)
            self._tokens = np.concatenate((token_ids(self.prompt), token_ids(answer)))
        return self._tokens

    @property
    def wanted(self) -> int:
        """Tokens that need KV before decode: the prompt, and what a retracted request generated."""
        return self.prompt_length + self.generated

    def forget_tokens(self) -> None:
        self._tokens = None


@dataclass(slots=True)
class Refused:
    """Numbers of requests that exceed the context, or the pool, and of answers that were cut."""

    context: int = 0
    pool: int = 0
    truncated: int = 0

    @property
    def requests(self) -> int:
        return self.context + self.pool


def accepted(
    stream: Iterable[TraceRequest], rules: Rules, pool: int, page_size: int = 1
) -> tuple[list[SimulatedRequest], Refused]:
    """Return the requests that SGLang would accept, and how many it would refuse or cut.

    A request must fit into the model's context and into the pool. It is refused if its prompt
    leaves too few tokens for an answer. An answer that is too long is cut.

    Parameters
    ----------
    pool
        Number of tokens in the KV pool, which consists of whole pages.
    """
    context = math.inf if rules.context_length is None else rules.context_length
    longest = int(min(context, pool)) - 1
    requests, refused = [], Refused()
    for number, traced in enumerate(stream):
        length = traced.input_length
        # Every request takes one more page than its tokens need.
        in_pool = pool - length - 2 * page_size - 1
        if length >= longest - _SPARE_FOR_ANSWER or in_pool < 1 or length == 0:
            if longest - _SPARE_FOR_ANSWER <= length and context <= pool:
                refused.context += 1
            else:
                refused.pool += 1
            continue
        asked = rules.max_new_tokens or traced.output_length
        allowed = min(longest - length - 1, in_pool)
        refused.truncated += allowed < min(traced.output_length, asked)
        asked = min(asked, allowed)
        answer = min(traced.output_length, asked)
        requests.append(
            SimulatedRequest(number, traced.arrival, traced.prompt, length, answer, asked)
        )
    return requests, refused


class Batch(NamedTuple):
    """Requests that decode together. lengths: their KV tokens, including this step's."""

    requests: Sequence[SimulatedRequest]
    lengths: IntArray


class Clock(Protocol):
    """Computes the seconds of passes and steps."""

    def prefill(self, new: int, pairs: float, requests: int) -> float:
        """Return the seconds of a pass. pairs: number of (new token, token it attends to) pairs."""

    def begin(self, batch: Batch, tree: Tree) -> None:
        """Begin the steps of another batch."""

    def decode(self, requests: int, kv_tokens: float, distinct: float) -> float:
        """Return the seconds of a step. distinct: number of distinct KV tokens."""


class Prefill(NamedTuple):
    """A prefill pass. admitted: (request, tokens to compute, tokens that have KV) triples."""

    begin: float
    seconds: float
    admitted: tuple[tuple[SimulatedRequest, int, int], ...]

    @property
    def new(self) -> int:
        return sum(new for _, new, _ in self.admitted)


class Decode(NamedTuple):
    """Decode steps of one batch. seconds, kv_tokens, distinct: means per step."""

    begin: float
    seconds: float
    steps: int
    batch: Batch
    kv_tokens: float
    distinct: float


@dataclass(slots=True)
class SimulatedServer:
    """A server, from an empty cache until all requests are answered.

    Attributes
    ----------
    steps_at_once
        At most this many steps are simulated together, while the batch stays the same. The number
        does not change the result.
    finished
        (request, time of its end) for each finished request, in order.
    starved
        Seconds in which no request waited although more were to come. Prefill passes do not count.
    retracted
        Number of retractions.
    """

    requests: Sequence[SimulatedRequest]
    tree: Tree
    clock: Clock
    rules: Rules
    steps_at_once: int = 1 << 20
    now: float = 0.0
    retracted: int = 0
    starved: float = 0.0
    finished: list[tuple[SimulatedRequest, float]] = field(default_factory=list)
    _waiting: list[SimulatedRequest] = field(default_factory=list)
    _chunked: SimulatedRequest | None = None
    _batch: list[SimulatedRequest] = field(default_factory=list)
    _lengths: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    _left: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    _asked: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    _has_changed: bool = False  # since the last decode step
    _is_full: bool = False  # if True, no request is admitted until another leaves
    _leaving: int = 0  # number of finished requests that SGLang still counts as running
    _ratio: float = _NEW_TOKEN_RATIO
    _passes: int = 0

    def events(self) -> Iterator[Prefill | Decode]:
        """Yield every pass and every group of decode steps, in order."""
        arrivals = deque(sorted(self.requests, key=lambda request: request.arrival))
        while True:
            while arrivals and arrivals[0].arrival <= self.now:
                self._waiting.append(arrivals.popleft())
            prefill = self._prefill()
            if prefill is not None:
                yield prefill
            elif self._batch:
                yield from self._decode(arrivals[0].arrival if arrivals else math.inf)
            elif self._leaving or (self._is_full and self._waiting):
                self._leaving, self._is_full = 0, False
            elif arrivals:
                self.starved += arrivals[0].arrival - self.now
                self.now = arrivals[0].arrival
            else:
                assert not self._waiting, "a request was accepted that fits into no pool"
                return

    # --- prefill ---

    def _prefill(self) -> Prefill | None:
        """Prefill the rest of a cut prompt, and the waiting prompts for which there is room.

        Returns None if there is nothing to prefill.
        """
        if self._chunked is None and (self._is_full or not self._waiting):
            return None
        tree, rules = self.tree, self.rules
        rows = rules.max_running_requests - len(self._batch) - self._leaving
        if rows <= 0 and self._chunked is None:
            self._is_full = True
            return None
        self._sort_waiting()
        ratio = 1.0 if rules.ignore_eos else self._ratio
        reserved = float(np.minimum(self._asked, _MOST_NEW_TOKENS).sum()) * ratio
        tokens_left = rules.chunked_prefill_size
        admitted: list[tuple[SimulatedRequest, int, int]] = []

        def admit(request: SimulatedRequest, new: int, is_whole: bool) -> None:
            nonlocal reserved, tokens_left
            admitted.append((request, new, request.kv_len))
            in_pages = self._pages(new)
            tokens_left -= in_pages
            reserved += in_pages + tree.page_size
            reserved += min(request.asked, _MOST_NEW_TOKENS) if is_whole else 0

        if self._chunked is not None:
            request, rest = self._chunked, self._chunked.wanted - self._chunked.kv_len
            new = min(rest, tokens_left)  # there is room in the pool for all of `rest`
            admit(request, new, is_whole=new == rest)
            self._chunked = None if new == rest else request
        while self._waiting and tokens_left > 0:
            if len(admitted) >= rows:
                self._is_full = True
                break
            request = self._waiting[0]
            found = tree.match(request, request.wanted)
            rest = request.wanted - found
            answer = min(max(request.asked - request.generated, 0), _MOST_NEW_TOKENS)
            # match() has locked the prefix, so `reachable` no longer counts its tokens.
            if rest + answer + tree.page_size >= tree.reachable - reserved:
                tree.unlock(request)
                self._is_full = bool(admitted or self._batch)
                break
            new = rest
            if self._pages(rest) > tokens_left:
                new = (found + tokens_left) // tree.page_size * tree.page_size - found
                if new <= 0:
                    tree.unlock(request)
                    break
                self._chunked = request
            self._waiting.pop(0)
            request.kv_len = found
            admit(request, new, is_whole=new == rest)
            if tree.reachable <= reserved:
                self._is_full = True
                break
        if not admitted:
            return None
        return self._compute(admitted)

    def _compute(self, admitted: list[tuple[SimulatedRequest, int, int]]) -> Prefill:
        tree, begin = self.tree, self.now
        # Evict only now, when the prefixes of all requests are locked. Like SGLang, make room for
        # one more page per request.
        new_tokens = sum(new for _, new, _ in admitted)
        spare = 0 if tree.page_size == 1 else tree.page_size * len(admitted)
        tree.make_room(new_tokens + spare)
        pairs = 0.0
        for request, new, had in admitted:
            tree.allocate(self._pages(had + new) - self._pages(had))
            request.kv_len = had + new
            pairs += new * (had + new / 2)
        self.now += self.clock.prefill(new_tokens, pairs, len(admitted))
        started = []
        for request, _, _ in admitted:
            if request is self._chunked:
                continue
            request.generated += 1
            if math.isnan(request.first_token):
                request.first_token = self.now
            if request.generated == request.answer_length:
                self._finish(request)
                self._is_full = False
            else:
                tree.checkpoint(request)
                started.append(request)
        if self._chunked is not None:
            tree.checkpoint(self._chunked)
        if started:
            self._add(started)
        return Prefill(begin, self.now - begin, tuple(admitted))

    def _sort_waiting(self) -> None:
        """Sort the waiting requests in the order in which they will be admitted.

        May look up their prefixes in the tree. Each lookup marks a prefix as used.
        """
        tree, waiting = self.tree, self._waiting
        policy = self.rules.schedule_policy
        if policy == "lpm" and len(waiting) > _MATCHED_WAITING:
            policy = "fcfs"
        if policy == "fcfs":
            if tree.refreshes_waiting and waiting and self._passes % _REFRESH_PASSES == 0:
                for request in reversed(waiting[:_MATCHED_WAITING]):
                    tree.find(request, request.wanted)
            self._passes += bool(waiting)
            return
        found = [tree.find(request, request.wanted) for request in waiting]
        if policy == "dfs-weight":
            waiting[:] = [waiting[index] for index in tree.by_weight(waiting)]
            return
        # If several requests have the same beginning, and it is not cached, only one of them keeps
        # its place. The others go last, and will find the KV that the first one has computed.
        seen = RadixTree(sum(request.wanted for request in waiting))
        keys: dict[int, float] = {}
        for request, length in zip(waiting, found, strict=True):
            keys[request.number] = -length
            if length <= _SHORT_PREFIX:
                tokens = request.tokens[: request.wanted]
                if seen.common_prefix(tokens) >= _SHORT_PREFIX:
                    keys[request.number] = math.inf
                else:
                    seen.insert(tokens)
        waiting.sort(key=lambda request: keys[request.number])

    # --- decode ---

    def _decode(self, next_arrival: float) -> Iterator[Decode]:
        if self._leaving:
            self._leaving, self._is_full = 0, False
        tree, page = self.tree, self.tree.page_size
        if not tree.make_room(self._needed(self._lengths, 1)):
            self._retract()
        batch = Batch(self._batch, self._lengths + 1)
        if self._has_changed:
            self.clock.begin(batch, tree)
            self._has_changed = False
        size = len(self._batch)
        # With more steps at once than `in_pool`, the pool might become full before they end.
        in_pool = tree.reachable // (size * page) - 1
        steps = max(1, min(int(self._left.min()), in_pool, self.steps_at_once))
        held = tree.size - tree.reachable - int((-self._lengths % page).sum())
        kv_tokens = int(self._lengths.sum())
        growth = size * (steps + 1) / 2  # of both token counts, averaged over the steps
        seconds = self.clock.decode(size, kv_tokens + growth, held + growth)
        if next_arrival < math.inf and not self._is_full:
            until = math.ceil((next_arrival - self.now) / seconds)
            if until < steps:
                steps = max(1, until)
                growth = size * (steps + 1) / 2
                seconds = self.clock.decode(size, kv_tokens + growth, held + growth)
        if page > 1:  # like SGLang, make room as if each request began a page
            tree.make_room(self._needed(self._lengths, steps - 1) + page * size)
        needed = self._needed(self._lengths, steps)
        tree.make_room(needed)
        tree.allocate(needed)
        begin = self.now
        self.now += steps * seconds
        if next_arrival < math.inf and not self._waiting:
            self.starved += self.now - begin
        self._ratio = max(self._ratio - steps * _RATIO_DECAY, _LEAST_NEW_TOKEN_RATIO)
        yield Decode(begin, seconds, steps, batch, kv_tokens + growth, held + growth)
        self._lengths = self._lengths + np.int32(steps)
        self._left = self._left - np.int32(steps)
        self._asked = self._asked - np.int32(steps)
        if self._left.all():
            return
        staying = []
        for index, left in enumerate(self._left.tolist()):
            if left == 0:
                request = self._batch[index]
                request.kv_len = int(self._lengths[index])
                request.generated = request.answer_length
                self._finish(request)
            else:
                staying.append(index)
        if tree.finished_leave_late:
            self._leaving = size - len(staying)
        else:
            self._is_full = False
        self._is_full &= bool(self._leaving)
        self._keep(staying)

    def _retract(self) -> None:
        """Retract at least one request, and more until the others fit, but never all."""
        generated = [each.answer_length for each in self._batch] - self._left
        prompts = np.array([each.prompt_length for each in self._batch])
        # First retract the request that has generated the fewest tokens; if there are several, the
        # one with the longest prompt.
        order = np.lexsort((np.arange(len(prompts)), -prompts, generated))
        for leaving in range(1, len(order)):
            index = int(order[leaving - 1])
            request = self._batch[index]
            request.kv_len = int(self._lengths[index])
            request.generated = int(generated[index])
            self.tree.release(request)
            request.kv_len = 0
            self._waiting.append(request)
            self.retracted += 1
            staying = np.sort(order[leaving:])
            self.tree.make_room(_RETRACT_STEPS * len(staying))  # frees as much as it can
            if self.tree.make_room(self._needed(self._lengths[staying], 1)):
                break
        decoded = int(generated[staying].sum())
        wanted = decoded + int(self._asked[staying].sum())
        self._ratio = min(1.0, (decoded + _RETRACT_STEPS * len(staying)) / (wanted + 1))
        self._is_full = False
        self._keep(staying.tolist())

    def _finish(self, request: SimulatedRequest) -> None:
        self.tree.finish(request)
        request.forget_tokens()
        request.handle = None
        self.finished.append((request, self.now))

    def _keep(self, indices: list[int]) -> None:
        self._batch = [self._batch[index] for index in indices]
        self._lengths = self._lengths[indices]
        self._left, self._asked = self._left[indices], self._asked[indices]
        self._has_changed = True

    def _add(self, started: list[SimulatedRequest]) -> None:
        """Add requests to the decode batch. The pool has their KV, except the last token's."""
        rows = [
            (each.kv_len, each.answer_length - each.generated, each.asked - each.generated)
            for each in started
        ]
        lengths, left, asked = np.array(rows, dtype=np.int32).T
        self._batch = self._batch + started
        self._lengths = np.concatenate((self._lengths, lengths))
        self._left = np.concatenate((self._left, left))
        self._asked = np.concatenate((self._asked, asked))
        self._has_changed = True

    def _pages(self, num_tokens: int) -> int:
        page = self.tree.page_size
        return -(-num_tokens // page) * page

    def _needed(self, lengths: IntArray, steps: int) -> int:
        """Return how many tokens fit into the pages that the requests begin in `steps` steps.

        lengths: KV tokens of each request before these steps.
        """
        page = self.tree.page_size
        if page == 1:
            return steps * len(lengths)
        return page * int(
            ((lengths + steps + page - 1) // page - (lengths + page - 1) // page).sum()
        )
