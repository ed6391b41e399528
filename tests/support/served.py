"""A simulated server with a time model of round numbers, and its events as lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_pat.workload.server import (
    Batch,
    Decode,
    Prefill,
    Rules,
    SimulatedRequest,
    SimulatedServer,
    accepted,
)
from sglang_pat.workload.trace import TraceRequest
from sglang_pat.workload.tree import RadixTree, Tree


class Cost(NamedTuple):
    """A decode step takes 10 ms, a prefill pass 10 ms and 1 ms per 100 tokens."""

    step: float = 0.01

    def prefill(self, new: int, pairs: float, requests: int) -> float:
        return self.step + new * 1e-5


COST = Cost()


class SlowClock:
    prefill = staticmethod(COST.prefill)

    def begin(self, batch: Batch, tree: Tree) -> None:
        pass

    def decode(self, requests: int, kv_tokens: float, distinct: float) -> float:
        return COST.step


def requests_of(
    stream: Iterable[TraceRequest], pool: int = 100_000, **rules: Any
) -> list[SimulatedRequest]:
    return accepted(stream, Rules(**rules), pool)[0]


def served(
    stream: Iterable[TraceRequest],
    *,
    pool: int = 100_000,
    page: int = 1,
    steps_at_once: int = 1 << 20,
    max_new_tokens: int | None = None,
    **rules: Any,
) -> tuple[list[Prefill | Decode], SimulatedServer]:
    """Run a simulated server; return all events, and the server."""
    asked = Rules(max_new_tokens=max_new_tokens, ignore_eos=max_new_tokens is None, **rules)
    requests, _ = accepted(stream, asked, pool // page * page, page)
    server = SimulatedServer(requests, RadixTree(pool, page), SlowClock(), asked, steps_at_once)
    return list(server.events()), server


def log_of(server: SimulatedServer) -> list[tuple[Any, ...]]:
    """Return the prefill passes and decode steps of a server, with free tokens at each."""
    log: list[tuple[Any, ...]] = []
    for event in server.events():
        if isinstance(event, Prefill):
            admitted = [(request.number, new, had) for request, new, had in event.admitted]
            log.append(("prefill", admitted, server.tree.available))
        else:
            log.append(("decode", event.steps, event.batch.lengths.tolist(), server.tree.available))
    return log
