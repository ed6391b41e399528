"""Time per output token, time to first token and inter-token latency of one case on one server.

All prompts are in the radix tree before the clock starts, so that what is timed is decoding. Two
passes, because each disturbs the other:

- Time per output token: sglang_pat/bench/decoding.py, of the steps in which all requests decode.
- Latencies as a client sees them: the batch streamed, but with every token only to OBSERVERS of the
  requests; the others report their first token and their end. 256 streams would keep SGLang's
  tokenizer process busier than the GPU, and all backends would look alike.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import (
    DecodeRun,
    ask_again_if_held_up,
    decode_run,
    held_up_ms,
    tpot,
)
from sglang_pat.bench.server import Server, sampling_of

REPEATS = 3
OBSERVERS = 8


def measure(server: Server, case: Case, vocab_size: int) -> dict[str, Any]:
    """All numbers of `case`, in ms; the answers as digests, where they can be compared; for pat
    what it has counted over the timed answers."""
    prompts = case.prompts(vocab_size)
    server.flush()
    if case.prefix:  # first alone, so that the prompts find it in the tree
        server.generate(
            [prompt[: case.prefix] for prompt in prompts[:: case.batch // case.groups]],
            sampling_of(1),
        )
    # Compiles what is compiled at first use.
    server.generate(prompts, sampling_of(4, case.temperature))
    before = server.stats()

    def ask() -> DecodeRun:
        return decode_run(server, prompts, case.generated, case.temperature)

    runs = [ask() for _ in range(REPEATS)]
    counted = difference(server.stats(), before)
    ask_again_if_held_up(runs, ask, print)
    spread = tpot(runs)
    result = {
        "tpot_ms": spread.median,
        "tpot_quartiles_ms": [spread.low, spread.high],
        "held_up_ms": held_up_ms(runs),
        **_latencies(server, case, prompts),
    }
    if case.temperature == 0:
        result["answers"] = [_digest(answer["output_ids"]) for answer in runs[0].answers]
    if counted:
        result["stats"] = counted | {"kv_read_ratio": read_ratio(counted)}
    return result


def _latencies(server: Server, case: Case, prompts: list[list[int]]) -> dict[str, Any]:
    """`ttft_ms` over all requests, `itl_ms` over the observers', each as mean, p50 and p99."""
    observers = set(range(0, case.batch, -(-case.batch // OBSERVERS)))
    sampling = [
        sampling_of(
            case.generated,
            case.temperature,
            stream_interval=1 if index in observers else case.generated,
        )
        for index in range(case.batch)
    ]
    begin = time.perf_counter()
    arrivals: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for chunk in server.stream(prompts, sampling):
        tokens = chunk["meta_info"]["completion_tokens"]
        arrivals[chunk["index"]].append((time.perf_counter(), tokens))
    gaps = [gap for index in observers for gap in gaps_between(arrivals[index])]
    return {
        "ttft_ms": summary(1000 * (arrived[0][0] - begin) for arrived in arrivals.values()),
        "itl_ms": summary(1000 * gap for gap in gaps),
    }


def gaps_between(arrivals: list[tuple[float, int]]) -> list[float]:
    """Seconds between the tokens of one answer. arrivals: when it was seen, and how many tokens it
    had by then. Tokens that arrive together share the time since the last."""
    gaps = []
    for (before, had), (now, has) in pairwise(arrivals):
        if has > had:
            gaps += [(now - before) / (has - had)] * (has - had)
    return gaps


def summary(values: Iterable[float]) -> dict[str, float]:
    """Mean, median and 99th percentile. At least one value."""
    array = np.fromiter(values, dtype=float)
    return {
        "mean": float(array.mean()),
        "p50": float(np.percentile(array, 50)),
        "p99": float(np.percentile(array, 99)),
    }


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What was counted between two readings of pat's counters, which may be nested."""
    counted: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            counted[name] = difference(value, before.get(name, {}))
        elif isinstance(value, int) and not isinstance(value, bool):
            counted[name] = value - before.get(name, 0)
        else:  # no counter: a percentile, say
            counted[name] = value
    return counted


def read_ratio(stats: Mapping[str, Any]) -> float | None:
    """KV tokens that pat read, per KV token of query-centric attention; None without any."""
    own = stats["kv_tokens_query_centric"]
    return stats["kv_tokens_planned"] / own if own else None


def _digest(tokens: list[int]) -> str:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=6).hexdigest()
