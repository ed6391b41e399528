"""Serves a trace as SGLang's scheduler does, on a clock that is computed: no model runs.

Second stage of the replay: prefills before decodes, admission while the KV pool is expected to
suffice, eviction when it is short, retraction when that does not help. The prefix cache is SGLang's
own, and the backend's reader keeps the paths (`sglang/replay_tree.py`). Every decode step goes to
`account.py`. Chunks of a long prompt are prefilled back to back, as SGLang does without mixed
chunks, so they count as one prefill.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sglang_pat.batch import DecodeBatch, IntArray
from sglang_pat.replay.account import Account, Durations, Planned
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.workload.trace import Segment, Trace, TraceRequest, token_ids

if TYPE_CHECKING:
    from sglang_pat.sglang.replay_tree import ReplayReader, ReplayRequest, ReplayTree

# SGLang's defaults. The share of its remaining answer that a running request is expected to need
# of the pool falls from step to step, and rises again when requests had to be retracted.
_NEW_TOKEN_RATIO_INIT = 0.7
_NEW_TOKEN_RATIO_MIN = 0.7 * 0.14
_NEW_TOKEN_RATIO_DECAY = (_NEW_TOKEN_RATIO_INIT - _NEW_TOKEN_RATIO_MIN) / 600
_CLIP_NEW_TOKENS = 4096
_RETRACT_STEPS = 20
_ANSWERS = 0x5EED << 48  # contents of the answers' segments: out of the way of small numbers


# Tokens that a prompt must leave for the answer.
_SPARE_FOR_ANSWER = 5


class RunningBatch(NamedTuple):
    """The batch of one decode step, planned. Borrowed until the next one."""

    number: int
    time: float  # simulated seconds, at the beginning of the step
    reqs: list[ReplayRequest]
    batch: DecodeBatch
    planned: Planned
    held_tokens: int  # of the pool


@dataclass(slots=True)
class Served:
    """What has been served so far."""

    steps: int = 0
    arrived: int = 0
    finished: int = 0
    refused_context: int = 0
    refused_pool: int = 0
    truncated: int = 0
    retracted: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_found: int = 0  # in the tree
    input_tokens: int = 0  # of the trace, refused requests included
    output_tokens: int = 0
    queue: Durations = field(default_factory=Durations)  # simulated, as are all of these
    ttft: Durations = field(default_factory=Durations)
    tpot: Durations = field(default_factory=Durations)
    service: Durations = field(default_factory=Durations)


class _Waiting(NamedTuple):
    """A request in the queue: since when, and how many of its tokens were generated before."""

    since: float
    request: ReplayRequest
    generated: int


class Simulator:
    """One server, from an empty cache until all requests are answered or `stop` is set."""

    def __init__(
        self,
        trace: Trace,
        tree: ReplayTree,
        reader: ReplayReader,
        account: Account,
        options: ReplayOptions,
        new_request: Callable[[int, array[int], int, int], ReplayRequest],
    ) -> None:
        """
        Parameters
        ----------
        tree, reader
            The prefix cache, empty, and what reads the paths of running requests from it.
        account
            Plans each decode step.
        new_request
            Makes a request of its number, its tokens, the length of its prompt, and a row.
        """
        self.served = Served()
        self.now = 0.0
        self.stop = False
        self._tree = tree
        self._reader = reader
        self._account = account
        self._options = options
        self._new_request = new_request
        self._arrivals = self._numbered(iter(trace.stream))
        self._next_arrival: _Waiting | None = None
        self._retracted: deque[_Waiting] = deque()
        self._free_rows = list(range(options.max_batch, 0, -1))
        self._batch: list[ReplayRequest] = []
        self._seq_lens: IntArray = np.zeros(0, dtype=np.int32)
        self._steps_left: IntArray = np.zeros(0, dtype=np.int32)
        self._until_finish = 0  # steps until a request of the batch finishes
        self._is_full = False  # no request is admitted before one leaves
        self._leaving = 0  # finished, but still in the batch as SGLang sees it
        # When each running request was admitted and had its first token.
        self._started: dict[int, tuple[float, float]] = {}
        self._new_token_ratio = _NEW_TOKEN_RATIO_INIT
        model, time = options.model, options.time
        self._decode_base, self._decode_per_token = time.decode_seconds(model)
        self._prefill_base, self._prefill_per_token = time.prefill_seconds(model)

    def steps(self) -> Iterator[RunningBatch]:
        """Every decode step, in order. Ends when the trace is served, or soon after `stop`."""
        while not self.stop:
            if self._prefill():
                continue
            if self._batch:
                yield self._decode()
                self._after_decode()
                continue
            self._forget_leaving()
            waiting = self._head()
            if waiting is None:
                return
            self.now = max(self.now, waiting.since)

    # --- the queue: requests in order of arrival; the trace is read no further than needed ---

    def _numbered(self, stream: Iterator[TraceRequest]) -> Iterator[_Waiting]:
        options, served = self._options, self.served
        for number, traced in enumerate(stream):
            if options.limit is not None and number >= options.limit:
                return
            served.arrived += 1
            length = traced.input_length
            served.input_tokens += length
            served.output_tokens += traced.output_length
            answer_length = self._answer_length(length, traced.output_length)
            if answer_length == 0:
                continue
            tokens = array("q", token_ids(traced.prompt).tobytes())
            answer = (Segment(_ANSWERS + number, answer_length),)
            tokens.frombytes(token_ids(answer).tobytes())
            request = self._new_request(number, tokens, length, 0)
            yield _Waiting(traced.arrival / options.time_scale, request, 0)

    def _answer_length(self, input_length: int, output_length: int) -> int:
        """Tokens of the answer that a request gets; 0, and counted, if it is refused.

        As in SGLang: the model's context and the pool limit a request. A prompt that leaves hardly
        a token for the answer is refused, a longer answer is cut.
        """
        pool, context, served = self._tree.pool, self._options.model.context_length, self.served
        longest = min(context, pool.size) - 1
        if input_length >= longest - _SPARE_FOR_ANSWER:
            if context <= pool.size:
                served.refused_context += 1
            else:
                served.refused_pool += 1
            return 0
        # The pool holds a page more for every request than its tokens.
        in_pool = pool.size - input_length - 2 * pool.page_size - 1
        if input_length == 0 or in_pool < 1:
            served.refused_pool += 1
            return 0
        allowed = min(longest - input_length - 1, in_pool)
        served.truncated += allowed < output_length
        return min(output_length, allowed)

    def _head(self) -> _Waiting | None:
        """The request that has waited longest."""
        if self._next_arrival is None:
            self._next_arrival = next(self._arrivals, None)
        arrival = self._next_arrival
        if self._retracted and (arrival is None or self._retracted[0].since < arrival.since):
            return self._retracted[0]
        return arrival

    def _pop_head(self, head: _Waiting) -> None:
        if head is self._next_arrival:
            self._next_arrival = None
        else:
            self._retracted.popleft()

    # --- prefill ---

    def _prefill(self) -> bool:
        """Admit waiting requests and compute their prompts. Whether there was anything to do."""
        if self._is_full:
            return False
        pool = self._tree.pool
        heads: list[_Waiting] = []
        new_tokens = 0
        allocated = 0  # of the pool, for these requests
        reserved = float(np.minimum(self._steps_left, _CLIP_NEW_TOKENS).sum())
        reserved *= self._new_token_ratio
        while new_tokens < self._options.prefill_tokens:
            head = self._head()
            if head is None or head.since > self.now:
                break
            if len(self._batch) + self._leaving + len(heads) >= self._options.max_batch:
                self._is_full = True
                break
            found = self._try_admit(head, allocated + reserved)
            if found is None:
                self._is_full = True
                break
            self._pop_head(head)
            request = head.request
            heads.append(head)
            new_tokens += request.kv_len - found
            allocated += pool.pages(request.kv_len - found)
            reserved += min(len(request.tokens) - request.kv_len, _CLIP_NEW_TOKENS)
            reserved += pool.page_size
            if head.generated == 0:
                self.served.prompt_tokens += request.kv_len
                self.served.prompt_tokens_found += found
        if not heads:
            return False
        admitted = [head.request for head in heads]
        # Only now, when all their prefixes are locked. As in SGLang, a page more for each request.
        spare = 0 if pool.page_size == 1 else pool.page_size * len(admitted)
        self._tree.make_room(allocated + spare)
        pool.take(allocated)
        begun = self.now
        self.now += self._prefill_base + new_tokens * self._prefill_per_token
        for head in heads:
            if head.generated == 0:
                self._started[head.request.rid] = begun, self.now
                self.served.queue.add(_nanoseconds(begun - head.since))
                self.served.ttft.add(_nanoseconds(self.now - head.since))
        self._reader.prefilled(admitted)
        self._start_decoding(admitted)
        return True

    def _try_admit(self, head: _Waiting, reserved: float) -> int | None:
        """Lock a request's cached prefix, if there is room for the rest. The cached tokens.

        reserved: tokens that others will need. None: no room.
        """
        tree, request = self._tree, head.request
        length = request.prompt_length + head.generated
        wanted = min(len(request.tokens) - length, _CLIP_NEW_TOKENS) + tree.pool.page_size
        request.req_pool_idx = self._free_rows[-1]
        found = tree.match(request, length)
        # Locking the prefix has made it unreachable.
        if length - found + wanted + reserved >= tree.reachable:
            tree.unlock(request)
            return None
        self._free_rows.pop()
        request.kv_len = length
        return found

    def _start_decoding(self, admitted: list[ReplayRequest]) -> None:
        """The prefill has given each request one token; what it computed goes into the tree."""
        started, lens, left = [], [], []
        for request in admitted:
            steps_left = len(request.tokens) - request.kv_len - 1
            if steps_left == 0:
                self._finish(request)
                self._is_full = False
                continue
            self._tree.cache_prompt(request)
            started.append(request)
            lens.append(request.kv_len)
            left.append(steps_left)
        self._batch += started
        self._seq_lens = np.concatenate((self._seq_lens, np.array(lens, dtype=np.int32)))
        self._steps_left = np.concatenate((self._steps_left, np.array(left, dtype=np.int32)))
        self._batch_changed()

    # --- decode ---

    def _decode(self) -> RunningBatch:
        self._forget_leaving()
        tree, pool = self._tree, self._tree.pool
        needed = _tokens_needed(self._seq_lens, pool.page_size)
        if pool.available < needed and not tree.make_room(needed):
            self._retract()
            needed = _tokens_needed(self._seq_lens, pool.page_size)
        if pool.page_size > 1:  # as in SGLang, as if each request began a page
            tree.make_room(pool.page_size * len(self._batch))
        pool.take(needed)
        self._seq_lens += 1
        served = self.served
        batch = self._reader.read(self._batch, self._seq_lens)
        planned = self._account.step(batch)
        running = RunningBatch(
            number=served.steps,
            time=self.now,
            reqs=self._batch,
            batch=batch,
            planned=planned,
            held_tokens=pool.size - pool.available,
        )
        served.steps += 1
        served.decode_tokens += len(self._batch)
        self.now += self._decode_base + planned.kv_tokens * self._decode_per_token
        return running

    def _after_decode(self) -> None:
        """Each request has got one more token."""
        self._steps_left -= 1
        self._until_finish -= 1
        ratio = self._new_token_ratio - _NEW_TOKEN_RATIO_DECAY
        self._new_token_ratio = max(ratio, _NEW_TOKEN_RATIO_MIN)
        if self._until_finish > 0:
            return
        finished = np.flatnonzero(self._steps_left == 0).tolist()
        for index in finished:
            request = self._batch[index]
            request.kv_len = int(self._seq_lens[index])
            self._finish(request)
        self._leaving = len(finished)
        self._keep(np.flatnonzero(self._steps_left > 0))
        if not self._tree.FINISHED_LEAVE_WITH_NEXT_DECODE:
            self._forget_leaving()

    def _forget_leaving(self) -> None:
        """Finished requests leave the batch; there may be room for others."""
        if self._leaving:
            self._leaving = 0
            self._is_full = False

    def _retract(self) -> None:
        """Put requests back into the queue until the others fit: at least one, never all."""
        prompts = np.array([request.prompt_length for request in self._batch])
        answers = self._seq_lens - prompts + 1
        # As in SGLang: the shortest answer first, of equal ones that with the longest prompt.
        order = np.lexsort((np.arange(len(prompts)), -prompts, answers))
        for leaving in range(1, len(order)):
            index = int(order[leaving - 1])
            request = self._batch[index]
            request.kv_len = int(self._seq_lens[index])
            self._tree.release(request)
            self._reader.retracted(request)
            self._free_rows.append(request.req_pool_idx)
            self._retracted.append(_Waiting(self.now, request, int(answers[index])))
            self.served.retracted += 1
            staying = np.sort(order[leaving:])
            self._tree.make_room(_RETRACT_STEPS * len(staying))  # as much as can be had
            if self._tree.make_room(
                _tokens_needed(self._seq_lens[staying], self._tree.pool.page_size)
            ):
                break
        self._keep(staying)
        self._is_full = False
        decoded = int(answers[staying].sum()) + _RETRACT_STEPS * len(staying)
        wanted = int(answers[staying].sum() + self._steps_left.sum())
        self._new_token_ratio = min(1.0, decoded / (wanted + 1))

    def _finish(self, request: ReplayRequest) -> None:
        self._tree.cache_finished(request)
        self._free_rows.append(request.req_pool_idx)
        served = self.served
        served.finished += 1
        admitted, first_token = self._started.pop(request.rid)
        served.service.add(_nanoseconds(self.now - admitted))
        if request.num_output_tokens > 1:
            more = request.num_output_tokens - 1
            served.tpot.add(_nanoseconds((self.now - first_token) / more))

    def _keep(self, indices: np.ndarray) -> None:
        """Leave only these requests in the batch, in order."""
        self._batch = [self._batch[index] for index in indices.tolist()]
        self._seq_lens = self._seq_lens[indices]
        self._steps_left = self._steps_left[indices]
        self._batch_changed()

    def _batch_changed(self) -> None:
        self._until_finish = int(self._steps_left.min()) if self._batch else 0


def _tokens_needed(seq_lens: IntArray, page_size: int) -> int:
    """Tokens of the pages that the next step of requests of these lengths begins."""
    if page_size == 1:
        return len(seq_lens)
    return page_size * int(np.count_nonzero(seq_lens % page_size == 0))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
