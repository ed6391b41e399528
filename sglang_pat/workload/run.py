"""Runs a workload on two simulated servers, one with SGLang's default backend, one with pat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sglang_pat.workload.cost import Reads, StepSeconds, StepTime
from sglang_pat.workload.reads import Planner
from sglang_pat.workload.server import (
    Batch,
    Decode,
    Prefill,
    Refused,
    Rules,
    SimulatedServer,
    accepted,
)
from sglang_pat.workload.trace import Progress, Prompt, TokenPrompt, TraceRequest, no_progress
from sglang_pat.workload.tree import RadixTree, Tree

DEFAULT, PAT = "default", "pat"
Backend = str  # DEFAULT or PAT

_PLANS = 1000  # approximate number of plans per server
# A server is saturated if it is starved for less than this fraction of its time.
_STARVED = 0.02
# If, under first come first served, prefill computes more than _REPEATED times as many tokens as
# are distinct, that policy is compared with dfs-weight on the first _ORDERED requests. _ORDERED is
# small, because dfs-weight sorts all waiting requests before each pass.
_REPEATED, _ORDERED = 1.5, 500
_BLOCK_TOKENS = 32  # block size for counting distinct tokens


class BackendClock:
    """Computes the times of a server with one backend."""

    def __init__(self, backend: Backend, planner: Planner) -> None:
        self._backend = backend
        self._planner = planner
        self.prefill = planner.time.prefill
        self.begin: Callable[[Batch, Tree], None] = planner.begin

    def decode(self, requests: int, kv_tokens: float, distinct: float) -> float:
        return self.step(self._backend, requests, kv_tokens, distinct).all

    def step(
        self, backend: Backend, requests: int, kv_tokens: float, distinct: float
    ) -> StepSeconds:
        """Return the time of a step if `backend` decodes the current batch."""
        default = self._default_reads(requests, kv_tokens, distinct)
        ours = self.pat_reads(requests, kv_tokens, distinct) if backend == PAT else default
        return self._planner.time.decode(requests, kv_tokens, ours, default)

    def pat_reads(
        self, requests: int, kv_tokens: float, distinct: float, policy: str | None = None
    ) -> Reads:
        """Return the reads of an accelerated layer with a packing policy. None: pat's policy."""
        planner = self._planner
        plan = planner.ratios.plans[planner.policies[0] if policy is None else policy]
        again = (kv_tokens - distinct) * plan.again
        # `kv_tokens` counts a shared token at least twice, and `distinct` counts it once. So at
        # most kv_tokens - distinct of the distinct tokens are shared.
        in_tiles = min(distinct, kv_tokens - distinct) + again
        return Reads(distinct, cached=again, partials=plan.partials * requests, in_tiles=in_tiles)

    def _default_reads(self, requests: int, kv_tokens: float, distinct: float) -> Reads:
        again = kv_tokens - distinct
        from_memory = again * self._planner.ratios.from_memory
        time = self._planner.time
        return Reads(
            distinct,
            from_memory,
            again - from_memory,
            cache_speed=time.busy_sms(requests),
            by_fa3=time.gpu.capability[0] == 9,
        )


@dataclass(slots=True)
class ServerStats:
    """Results of a server. Times are means over requests or steps.

    Attributes
    ----------
    seconds
        Time from the first arrival to the last answer.
    tpot_ms
        Time from a request's first token to its last, per token. It includes prefills of other
        requests.
    attention, prefill
        Fraction of the decode time that attention takes, and of the busy time that prefill takes.
    prompt_tokens, new_tokens
        Prompt tokens of the requests served, and the tokens that prefill computed.
    repeats
        The fraction of query-centric attention's KV reads that only repeat what another request of
        the step has read.
    kv_tokens
        KV tokens that an accelerated layer reads per KV head in all steps, by packing policy. The
        keys "query-centric" and "distinct" are always there.
    partials
        Partials that an accelerated layer writes per query head in all steps, by packing policy.
    overloaded
        Whether the requests' total waiting time exceeds their total time from admission to end.
    starved
        The fraction of the time in which no request waited although more were to come.
    """

    requests: int = 0
    seconds: float = 0.0
    tpot_ms: float = 0.0
    ttft_ms: float = 0.0
    step_ms: float = 0.0
    steps: int = 0
    batch: float = 0.0
    attention: float = 0.0
    prefill: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    retracted: int = 0
    repeats: float = 0.0
    kv_tokens: dict[str, float] = field(default_factory=dict)
    partials: dict[str, float] = field(default_factory=dict)
    overloaded: bool = False
    starved: float = 0.0

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0


class SimulatedStep(NamedTuple):
    """Decode steps of one batch, for tables and charts.

    step: number of the first of these `steps` steps. read: KV tokens that an accelerated layer
    reads with pat. ms: time of a step, by backend.
    """

    step: int
    time: float
    steps: int
    batch: int
    kv_tokens: float
    distinct: float
    read: float
    ms: dict[str, float]


Watch = Callable[[SimulatedStep, Decode, Tree], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a simulated server.

    Attributes
    ----------
    pool
        Number of tokens in the KV pool of one GPU.
    policies
        Packing policies whose reads are counted. pat uses the first policy.
    new_tree
        Makes the prefix cache, given the number of tokens and the page size.
    """

    time: StepTime
    pool: int
    rules: Rules = field(default_factory=Rules)
    page_size: int = 1
    policies: tuple[str, ...] = ("memory",)
    new_tree: Callable[[int, int], Tree] = RadixTree


def serve(
    stream: Sequence[TraceRequest],
    setup: Setup,
    backend: Backend,
    watch: Watch | None = None,
    progress: Progress = no_progress,
) -> ServerStats:
    """Serve a trace with one backend. watch: called with every step.

    ValueError if no request of the trace fits.
    """
    tree = setup.new_tree(setup.pool, setup.page_size)
    requests, _ = accepted(stream, setup.rules, tree.size, setup.page_size)
    if not requests:
        context = setup.rules.context_length
        limit = "" if context is None else f" and a context of {context:,}"
        raise ValueError(
            f"no request of the trace fits into a KV pool of {tree.size:,} tokens{limit}"
        )
    stride = max(1, 2 * len(requests) // _PLANS)
    planner = Planner(setup.time, setup.policies, stride)
    clock = BackendClock(backend, planner)
    server = SimulatedServer(requests, tree, clock, setup.rules)
    stats = ServerStats(prompt_tokens=sum(each.prompt_length for each in requests))
    decode_seconds = prefill_seconds = attention = waited = 0.0
    totals = dict.fromkeys(("query-centric", "distinct", *setup.policies), 0.0)
    partials = dict.fromkeys(setup.policies, 0.0)
    seen: set[int] = set()
    for event in server.events():
        progress(f"serving with {backend}", len(server.finished), len(requests))
        if isinstance(event, Prefill):
            prefill_seconds += event.seconds
            stats.new_tokens += event.new
            for request, *_ in event.admitted:
                if request.number not in seen:
                    seen.add(request.number)
                    waited += event.begin - request.arrival
            continue
        size, steps = len(event.batch.requests), event.steps
        as_read = (size, event.kv_tokens, event.distinct)
        step = clock.step(backend, *as_read)
        decode_seconds += steps * step.all
        attention += steps * step.attention
        totals["query-centric"] += steps * event.kv_tokens
        totals["distinct"] += steps * event.distinct
        for policy in setup.policies:
            reads = clock.pat_reads(*as_read, policy)
            partials[policy] += steps * reads.partials
            # query-centric has been counted above.
            if policy != "query-centric":
                totals[policy] += steps * reads.tokens
        if watch is not None:
            ms = {name: 1000 * clock.step(name, *as_read).all for name in (DEFAULT, PAT)}
            read = clock.pat_reads(*as_read).tokens
            watch(SimulatedStep(stats.steps, event.begin, steps, *as_read, read, ms), event, tree)
        stats.steps += steps
        stats.batch += steps * size
    _close(stats, server)
    stats.batch /= max(stats.steps, 1)
    stats.step_ms = 1000 * decode_seconds / max(stats.steps, 1)
    stats.attention = attention / max(decode_seconds, 1e-12)
    stats.prefill = prefill_seconds / max(decode_seconds + prefill_seconds, 1e-12)
    read = totals["query-centric"]
    stats.repeats = 1 - totals["distinct"] / read if read else 0.0
    stats.kv_tokens, stats.partials = totals, partials
    served = sum(time - each.arrival for each, time in server.finished) - waited
    stats.overloaded = waited > served
    return stats


def _close(stats: ServerStats, server: SimulatedServer) -> None:
    """Add the times of the requests to the results."""
    finished = server.finished
    first = min(request.arrival for request, _ in finished)
    stats.requests = len(finished)
    stats.seconds = server.now - first
    stats.retracted = server.retracted
    stats.starved = server.starved / max(server.now - first, 1e-12)
    stats.ttft_ms = 1000 * float(np.mean([each.first_token - each.arrival for each, _ in finished]))
    tpot = [
        (time - request.first_token) / (request.answer_length - 1)
        for request, time in finished
        if request.answer_length > 1
    ]
    stats.tpot_ms = 1000 * float(np.mean(tpot)) if tpot else 0.0


# --- both ---


@dataclass(frozen=True, slots=True)
class WorkloadAnswer:
    """The results of both servers for one workload.

    Attributes
    ----------
    default, pat
        Results at the rate of the trace.
    most
        Requests per second if all requests arrive at the beginning, by backend.
    distinct_tokens
        Distinct tokens of all prompts. With an unlimited cache, prefill would compute only these.
    by_weight
        pat's requests per second if only the first requests arrive, all at once: the numbers with
        first come first served and with `dfs-weight`. None if first come first served repeats
        little prefill, or if `dfs-weight` is not better.
    """

    setup: Setup
    default: ServerStats
    pat: ServerStats
    most: dict[Backend, float]
    refused: Refused
    distinct_tokens: int
    by_weight: tuple[float, float] | None = None


def answer(
    stream: Sequence[TraceRequest],
    setup: Setup,
    watch: Watch | None = None,
    progress: Progress = no_progress,
) -> WorkloadAnswer:
    """Serve a workload with both backends.

    With data-parallel attention, the results of a server are those of one group of its GPUs, but
    requests per second are those of all groups. SGLang deals requests to the groups in turn.

    Parameters
    ----------
    watch
        Called with every step of the server with pat, while requests arrive at the trace's rate.

    Raises
    ------
    ValueError
        No request of the trace fits, or fewer than half of the requests fit.
    """
    pool = setup.pool // setup.page_size * setup.page_size
    served, refused = accepted(stream, setup.rules, pool, setup.page_size)
    if served and refused.requests > len(served):
        raise ValueError(
            f"{refused.requests:,} of {len(stream):,} requests are longer than the context of "
            f"{setup.rules.context_length or pool:,} or the KV pool of {pool:,} tokens, so there "
            "is no verdict; raise --context-length or the pool"
        )
    groups = setup.time.dp
    stream = stream[::groups]
    default = serve(stream, setup, DEFAULT, progress=progress)
    pat = serve(stream, setup, PAT, watch, progress)
    at_once = [each._replace(arrival=0.0) for each in stream]
    most = {
        name: groups
        * (
            stats.requests_per_second
            if stats.starved < _STARVED
            else serve(at_once, setup, name, progress=progress).requests_per_second
        )
        for name, stats in ((DEFAULT, default), (PAT, pat))
    }
    distinct = distinct_tokens(each.prompt for each in served[::groups])
    by_weight = None
    if setup.rules.schedule_policy == "fcfs" and pat.new_tokens > _REPEATED * distinct:
        weighted = replace(setup, rules=replace(setup.rules, schedule_policy="dfs-weight"))
        fcfs, dfs = (
            groups * serve(at_once[:_ORDERED], each, PAT).requests_per_second
            for each in (setup, weighted)
        )
        by_weight = (fcfs, dfs) if dfs > fcfs else None
    return WorkloadAnswer(setup, default, pat, most, refused, distinct, by_weight)


def distinct_tokens(prompts: Iterable[Prompt]) -> int:
    """Count the tokens in a prefix tree of all prompts.

    Prompts with known token ids are compared in blocks of 32 tokens.
    """
    seen: set[int] = set()
    tokens = 0
    for prompt in prompts:
        path = 0
        for content, length in _blocks(prompt):
            path = hash((path, content, length))
            if path not in seen:
                seen.add(path)
                tokens += length
    return tokens


def _blocks(prompt: Prompt) -> Iterator[tuple[int | bytes, int]]:
    """Yield the content and the number of tokens of each block."""
    if not isinstance(prompt, TokenPrompt):
        yield from prompt
        return
    content, size = prompt.tokens.tobytes(), prompt.tokens.itemsize
    for begin in range(0, len(content), _BLOCK_TOKENS * size):
        block = content[begin : begin + _BLOCK_TOKENS * size]
        yield block, len(block) // size
