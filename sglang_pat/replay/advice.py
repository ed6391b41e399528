"""Whether pat pays for a model, a trace and a GPU: a quick estimate that needs no SGLang.

Beside the replay, which serves every step through SGLang's own tree. Here a server is simulated
from one change of the batch to the next, with a tree of whole blocks of prompts. Sampled batches
are planned by the pack scheduler. The server is simulated twice, with SGLang's default backend and
with pat, since a faster server has smaller batches at the same load.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from sglang_pat._scheduler import PackScheduler
from sglang_pat.batch import IntArray, PrefixPaths
from sglang_pat.model_layers import FULL, NO_ATTENTION, STATE, Layer, summary
from sglang_pat.plan import new_scheduler
from sglang_pat.replay.step_time import Reads, StepTime
from sglang_pat.workload.trace import Prompt, TokenPrompt, TraceRequest

MAX_BATCH = 256
_SAMPLES = 400
_BLOCK_TOKENS = 32  # of prompts whose tokens are known
_STEPS_AT_ONCE = 64
_L2_SHARE = 0.8  # of the cache that KV finds free
_PREFILL_TOKENS = 8192

Backend = str  # DEFAULT or PAT
DEFAULT, PAT = "default", "pat"

# How far an estimate may be off: where recorded runs were compared, and where none was.
_CHECKED_ERROR, _UNCHECKED_ERROR = 0.10, 0.25
_CHECKED_GPU = "H100"
# By the part of the time per token that is saved, at least.
_VERDICTS = (
    (0.10, "pays", "pat pays"),
    (0.03, "pays-a-little", "pat pays a little"),
    (-math.inf, "does-not-pay", "pat does not pay"),
)


class AdvisedRequest(NamedTuple):
    """A request as far as it matters here. blocks: (content, tokens) of its prompt, in order."""

    arrival: float
    blocks: tuple[tuple[int, int], ...]
    prompt_length: int
    output_length: int

    @classmethod
    def of(cls, traced: TraceRequest) -> AdvisedRequest:
        blocks = tuple(_blocks(traced.prompt))
        length = sum(tokens for _, tokens in blocks)
        return cls(traced.arrival, blocks, length, traced.output_length)


@dataclass(slots=True)
class ServerEstimate:
    """One simulated server. Times in milliseconds, means over requests or steps.

    common: the part of the KV that all requests together attend to that another request of the
    batch has, too. attention: the part of a step. fewer: KV tokens that query-centric attention
    reads over those that this backend reads, in its accelerated layers. overloaded: requests wait
    longer than they are served.
    """

    requests: int = 0
    refused: int = 0
    steps: int = 0
    batch: float = 0.0
    tpot_ms: float = 0.0
    step_ms: float = 0.0
    attention: float = 0.0
    common: float = 0.0
    fewer: float = 1.0
    overloaded: bool = False


@dataclass(frozen=True, slots=True)
class Advice:
    """What was found, for a model on `tp` GPUs and a trace.

    Attributes
    ----------
    layers
        Rows of (how many, in words, whether pat accelerates them).
    default, pat
        The server with SGLang's default backend and with pat.
    error
        How far both times per token may be off, as a part of them.
    reasons
        Why the error is larger than where the estimate was compared with recorded runs.
    """

    model: str
    gpu: str
    tp: int
    default_backend: str
    trace: str
    layers: tuple[tuple[int, str, bool], ...]
    default: ServerEstimate
    pat: ServerEstimate
    error: float
    reasons: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        return sum(count for count, _, _ in self.layers)

    @property
    def num_accelerated(self) -> int:
        return sum(count for count, _, accelerated in self.layers if accelerated)

    @property
    def saved(self) -> float:
        """The part of the time per token that pat saves, as it is shown."""
        if not self.default.tpot_ms:
            return 0.0
        return round(1 - self.pat.tpot_ms / self.default.tpot_ms, 2)

    @property
    def kind(self) -> str:
        """`pays`, `pays-a-little` or `does-not-pay`."""
        return next(kind for least, kind, _ in _VERDICTS if self.saved >= least)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.num_accelerated:
            return (
                f"pat does not pay: it accelerates no layer of {self.model}, so the server runs as "
                "it does today."
            )
        opening = next(words for least, _, words in _VERDICTS if self.saved >= least)
        common = f"{self.default.common:.0%} of the KV that requests attend to is common"
        if self.kind == "does-not-pay":
            return (
                f"{opening} for this traffic: {common}, and attention is "
                f"{self.default.attention:.0%} of a step, so the time per token would not fall."
            )
        return (
            f"{opening} for this traffic: a token would take about {self.saved:.0%} less time "
            f"({self.pat.tpot_ms:.1f} instead of {self.default.tpot_ms:.1f} ms), since {common}."
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "layers": [
                {"layers": count, "what": words, "accelerated": accelerated}
                for count, words, accelerated in self.layers
            ],
            "saved": self.saved,
            "kind": self.kind,
            "verdict": self.verdict,
        }


def unchecked(time: StepTime) -> tuple[str, ...]:
    """What no recorded run has been compared with."""
    reasons = []
    if time.gpu.name != _CHECKED_GPU:
        reasons.append(f"{time.gpu.name} is scaled from {_CHECKED_GPU} by its data sheet")
    if time.tp > 1:
        reasons.append(f"communication between {time.tp} GPUs was never measured")
    if time.weights.experts:
        reasons.append("no mixture of experts was recorded")
    if time.quantisation:
        reasons.append("no quantised model was recorded")
        if time.weight_bytes == 2:
            reasons.append(f"weights of {time.quantisation} are counted as 2 bytes each")
    if any(layer.kind != FULL for layer in time.layers):
        reasons.append("no hybrid model was recorded")
    return tuple(reasons)


def advise(
    model: str,
    trace: str,
    requests: Sequence[AdvisedRequest],
    time: StepTime,
    *,
    pool: int,
    max_batch: int = MAX_BATCH,
    on_progress: Callable[[], None] = lambda: None,
) -> Advice:
    """Serve a trace with either backend, and compare.

    Parameters
    ----------
    model, trace
        What to call them.
    pool
        Tokens that the KV pool of one GPU holds.
    on_progress
        Called when a request has been answered: twice for each of them.

    Raises
    ------
    ValueError
        The trace has no request that the pool takes.
    """
    default, pat = (
        estimate(requests, time, backend, pool=pool, max_batch=max_batch, on_progress=on_progress)
        for backend in (DEFAULT, PAT)
    )
    reasons = unchecked(time)
    return Advice(
        model=model,
        gpu=time.gpu.name,
        tp=time.tp,
        default_backend=time.gpu.default_backend,
        trace=trace,
        layers=tuple(summary(time.layers)),
        default=default,
        pat=pat,
        error=_UNCHECKED_ERROR if reasons else _CHECKED_ERROR,
        reasons=reasons,
    )


def estimate(
    requests: Sequence[AdvisedRequest],
    time: StepTime,
    backend: Backend,
    *,
    pool: int,
    max_batch: int = MAX_BATCH,
    on_progress: Callable[[], None] = lambda: None,
) -> ServerEstimate:
    """Serve a trace with one backend.

    Parameters
    ----------
    pool
        Tokens that the KV pool holds.
    on_progress
        Called when a request has been answered.

    Raises
    ------
    ValueError
        The trace has no request that the pool takes.
    """
    server = _Server(requests, time, backend, pool, max_batch, on_progress)
    server.serve()
    return server.result()


def read_requests(stream: Iterable[TraceRequest], limit: int | None) -> list[AdvisedRequest]:
    """The first `limit` requests of a trace; None: all."""
    return [AdvisedRequest.of(traced) for traced in islice(stream, limit)]


def _blocks(prompt: Prompt) -> Iterable[tuple[int, int]]:
    if not isinstance(prompt, TokenPrompt):
        yield from prompt
        return
    for begin in range(0, len(prompt.tokens), _BLOCK_TOKENS):
        block = prompt.tokens[begin : begin + _BLOCK_TOKENS]
        digest = hashlib.blake2b(block.tobytes(), digest_size=8).digest()
        yield int.from_bytes(digest, "little"), len(block)


# --- the tree ---


@dataclass(slots=True, eq=False)
class _Node:
    """A block of a prompt. holders: running requests that have it on their path."""

    number: int
    parent: _Node | None
    key: tuple[int, int]
    holders: int = 0
    children: dict[tuple[int, int], _Node] = field(default_factory=dict)


class _Tree:
    """Blocks of prompts, of running requests and of earlier ones as long as the pool has room.

    held: tokens of blocks on the paths of running requests. tokens: of all blocks.
    """

    def __init__(self) -> None:
        self.held = 0
        self.tokens = 0
        self._root = _Node(-1, None, (0, 0))
        self._next_number = 0
        # Leaves and inner nodes without holders, those used longest ago first.
        self._idle: OrderedDict[_Node, None] = OrderedDict()

    def missing(self, blocks: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Tokens of a prompt that the tree lacks, and those that no running request holds."""
        node, new, idle = self._root, 0, 0
        for depth, block in enumerate(blocks):
            child = node.children.get(block)
            if child is None:
                new = sum(tokens for _, tokens in blocks[depth:])
                break
            idle += 0 if child.holders else block[1]
            node = child
        return new, new + idle

    def join(self, blocks: Sequence[tuple[int, int]]) -> list[_Node]:
        """The path of a request that begins to run."""
        node, path = self._root, []
        for block in blocks:
            child = node.children.get(block)
            if child is None:
                child = node.children[block] = _Node(self._next_number, node, block)
                self._next_number += 1
                self.tokens += block[1]
            if child.holders == 0:
                self._idle.pop(child, None)
                self.held += block[1]
            child.holders += 1
            path.append(child)
            node = child
        return path

    def leave(self, path: Sequence[_Node]) -> None:
        """The request has been answered: the deepest of its blocks are evicted first."""
        for node in reversed(path):
            node.holders -= 1
            if node.holders == 0:
                self._idle[node] = None
                self.held -= node.key[1]

    def shrink(self, tokens: int) -> None:
        """Evict until no more than `tokens` are left, as far as no request runs with them."""
        while self.tokens > tokens and self._idle:
            node, _ = self._idle.popitem(last=False)
            self.tokens -= node.key[1]
            assert node.parent is not None
            del node.parent.children[node.key]


# --- what a batch reads ---


@dataclass(slots=True, eq=False)
class _Running:
    request: AdvisedRequest
    path: list[_Node]
    admitted: float
    first_token: float
    length: int
    left: int

    def shared_path(self) -> list[tuple[int, int, int]]:
        """(number, begin, end) of what others hold, too: blocks with the same holders as one."""
        nodes: list[tuple[int, int, int]] = []
        position, holders = 0, 0
        for node in self.path:
            if node.holders == 1:
                break
            end = position + node.key[1]
            if node.holders == holders:
                nodes[-1] = (nodes[-1][0], nodes[-1][1], end)
            else:
                nodes.append((node.number, position, end))
            position, holders = end, node.holders
        return nodes


class _Ratios(NamedTuple):
    """Of the tokens that query-centric attention reads again: the part that each backend reads.

    default_memory: FA3 and its like, from memory instead of the cache. pat: read again by pat.
    partials: of one query row, a request.
    """

    default_memory: float = 0.0
    pat: float = 0.0
    partials: float = 0.0


class _Sampler:
    """Plans a batch as pat would, and finds what a query-centric kernel reads from the cache."""

    def __init__(self, time: StepTime) -> None:
        accelerated = [layer for layer in time.layers if layer.is_accelerated]
        layer = accelerated[0] if accelerated else None
        self._scheduler: PackScheduler | None = None
        self._requests_at_once = self._cached_tokens = 1
        attended = layer or next((each for each in time.layers if each.num_kv_heads), None)
        if attended is None:
            return
        heads = time.kv_heads(attended)
        self._requests_at_once = time.gpu.num_sms
        token_bytes = attended.kv_elements / attended.num_kv_heads * time.kv_bytes
        self._cached_tokens = int(time.gpu.l2_bytes * _L2_SHARE / token_bytes)
        if layer is not None:
            self._scheduler = new_scheduler(
                group_size=max(1, layer.num_qo_heads // layer.num_kv_heads),
                num_workers=time.gpu.workers(heads),
            )

    def __call__(self, batch: Sequence[_Running]) -> _Ratios:
        paths = [running.shared_path() for running in batch]
        lengths = np.array([running.length for running in batch], dtype=np.int32)
        distinct: dict[int, int] = {}
        total = 0
        for path in paths:
            for number, begin, end in path:
                distinct[number] = end - begin
                total += end - begin
        again = total - sum(distinct.values())
        if not again:
            return _Ratios()
        pat, partials = self._planned(paths, lengths, again)
        return _Ratios(self._from_memory(paths, distinct) / again, pat, partials)

    def _planned(
        self, paths: list[list[tuple[int, int, int]]], lengths: IntArray, again: int
    ) -> tuple[float, float]:
        if self._scheduler is None:
            return 1.0, 0.0
        arrays = PrefixPaths.from_lists(paths)
        self._scheduler.plan(
            arrays.path_begin, arrays.node_id, arrays.kv_begin, arrays.kv_end, lengths
        )
        _, planned, lower_bound = self._scheduler.kv_tokens
        partials = self._scheduler.summary["partials"]
        return (planned - lower_bound) / again, partials / len(lengths)

    def _from_memory(
        self, paths: list[list[tuple[int, int, int]]], distinct: dict[int, int]
    ) -> float:
        """Shared tokens that a query-centric kernel reads from memory more than once.

        It goes from KV head to KV head. As many requests as there are SMs read a block of one head
        together, through the cache. Later ones find in it the part of all shared blocks that fits.
        """
        shared = sum(distinct.values())
        read = 0
        for begin in range(0, len(paths), self._requests_at_once):
            some = paths[begin : begin + self._requests_at_once]
            together = {number for path in some for number, _, _ in path}
            read += sum(distinct[number] for number in together)
        return max(0.0, 1 - self._cached_tokens / shared) * (read - shared)


# --- the server ---


class _Server:
    """Continuous batching: prefills first, first come first served. Nothing is retracted: a
    request is admitted when the pool has room for its whole answer."""

    def __init__(
        self,
        requests: Sequence[AdvisedRequest],
        time: StepTime,
        backend: Backend,
        pool: int,
        max_batch: int,
        on_progress: Callable[[], None],
    ) -> None:
        self._time = time
        self._backend = backend
        self._pool = pool
        self._max_batch = max_batch
        self._on_progress = on_progress
        self._arrivals = deque(r for r in requests if r.prompt_length + r.output_length < pool)
        self._result = ServerEstimate(refused=len(requests) - len(self._arrivals))
        if not self._arrivals:
            raise ValueError(f"no request of the trace fits into a KV pool of {pool:,} tokens")
        self._tree = _Tree()
        self._batch: list[_Running] = []
        self._now = 0.0
        self._reserved = 0  # tokens of answers, generated or not
        self._sample = _Sampler(time)
        self._ratios = _Ratios()
        self._changes = 0
        self._stride = max(1, 2 * len(self._arrivals) // _SAMPLES)
        # Layers that are alike cost the same.
        self._alike: dict[Layer, int] = {}
        for layer in time.layers:
            if layer.kind not in (STATE, NO_ATTENTION):
                same = _without_index(layer)
                self._alike[same] = self._alike.get(same, 0) + 1
        self._seconds = self._attention_seconds = 0.0
        self._query_centric = self._lower_bound = self._read = 0.0
        self._tpot = self._waited = self._served = 0.0
        self._with_tpot = 0

    def serve(self) -> None:
        while self._arrivals or self._batch:
            if self._admit():
                continue
            if not self._batch:
                self._now = max(self._now, self._arrivals[0].arrival)
                continue
            self._decode()

    def result(self) -> ServerEstimate:
        result = self._result
        steps = max(result.steps, 1)
        result.batch /= steps
        result.tpot_ms = 1000 * self._tpot / max(self._with_tpot, 1)
        result.step_ms = 1000 * self._seconds / steps
        result.attention = self._attention_seconds / max(self._seconds, 1e-12)
        result.common = 1 - self._lower_bound / max(self._query_centric, 1)
        result.fewer = self._query_centric / max(self._read, 1)
        result.overloaded = self._waited > self._served
        return result

    def _admit(self) -> bool:
        """Prefill the requests that wait, as far as there is room. Whether there was one."""
        admitted: list[_Running] = []
        new_tokens = 0
        while (
            self._arrivals
            and self._arrivals[0].arrival <= self._now
            and len(self._batch) + len(admitted) < self._max_batch
            and new_tokens < _PREFILL_TOKENS
        ):
            request = self._arrivals[0]
            new, held = self._tree.missing(request.blocks)
            needed = self._tree.held + held + self._reserved + request.output_length
            if needed > self._pool:
                break
            self._arrivals.popleft()
            path = self._tree.join(request.blocks)
            self._reserved += request.output_length
            new_tokens += new
            length = request.prompt_length + 1
            left = request.output_length - 1
            admitted.append(_Running(request, path, self._now, 0.0, length, left))
        if not admitted:
            return False
        self._tree.shrink(self._pool - self._reserved)
        self._now += self._time.prefill(new_tokens)
        for running in admitted:
            running.first_token = self._now
            self._waited += running.admitted - running.request.arrival
        self._batch += admitted
        self._finish()
        return True

    def _decode(self) -> None:
        """Steps until a request is answered or arrives."""
        time, batch = self._time, self._batch
        tails = sum(running.length - running.request.prompt_length for running in batch)
        query_centric = sum(running.length for running in batch)
        lower_bound = self._tree.held + tails
        steps = min(_STEPS_AT_ONCE, min(running.left for running in batch))
        growth = len(batch) * (steps - 1) / 2  # of both, in the mean of the steps
        attention, read = self._attention(query_centric + growth, lower_bound + growth)
        step = time.without_attention(len(batch)) + attention
        room = len(batch) < self._max_batch and self._arrivals
        if room and self._arrivals[0].arrival > self._now:
            steps = min(steps, math.ceil((self._arrivals[0].arrival - self._now) / step))
        for running in batch:
            running.length += steps
            running.left -= steps
        self._now += steps * step
        result = self._result
        result.steps += steps
        result.batch += steps * len(batch)
        self._seconds += steps * step
        self._attention_seconds += steps * attention
        self._query_centric += steps * (query_centric + growth)
        self._lower_bound += steps * (lower_bound + growth)
        self._read += steps * read
        self._finish()

    def _attention(self, query_centric: float, lower_bound: float) -> tuple[float, float]:
        """Seconds of all layers in a step, and the tokens that an accelerated layer reads."""
        again, ratios = query_centric - lower_bound, self._ratios
        from_memory = again * ratios.default_memory
        default = Reads(lower_bound, from_memory, again - from_memory)
        pat = Reads(lower_bound, 0, again * ratios.pat, ratios.partials * len(self._batch))
        accelerated = pat if self._backend == PAT else default
        seconds = 0.0
        for layer, count in self._alike.items():
            if layer.is_accelerated:
                each = self._time.attention(layer, accelerated)
            elif layer.kind == FULL:
                each = self._time.attention(layer, default)
            else:
                each = self._time.window(layer, len(self._batch), query_centric)
            seconds += count * each
        return seconds, accelerated.tokens

    def _finish(self) -> None:
        """Requests that are answered leave; what the new batch reads is sampled."""
        staying = []
        for running in self._batch:
            if running.left > 0:
                staying.append(running)
                continue
            self._tree.leave(running.path)
            self._reserved -= running.request.output_length
            self._result.requests += 1
            self._served += self._now - running.admitted
            more = running.request.output_length - 1
            if more > 0:
                self._tpot += (self._now - running.first_token) / more
                self._with_tpot += 1
            self._on_progress()
        self._batch = staying
        if staying:
            if self._changes % self._stride == 0:
                self._ratios = self._sample(staying)
            self._changes += 1


def _without_index(layer: Layer) -> Layer:
    return Layer(
        index=0,
        **{name: getattr(layer, name) for name in Layer.__slots__ if name != "index"},
    )
