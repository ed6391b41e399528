"""Time per output token of a batch, over the steps in which all of its requests decode.

Prefill, admission and the end of a batch are left out: the measured window begins when the last
request has its first token, and ends when the first request ends. One request, the observer,
streams each of its tokens. The others report only their first and last token: if all requests
streamed each token, SGLang's tokenizer process would be busier than the GPU. The window is cut into
slices of SLICE tokens. Two servers are compared by slices that begin at the same token, because
steps take longer as the context grows.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_pat.bench.server import Server, sampling_of

SLICE = 8  # tokens
MIN_SLICES = 3


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One pass of a batch.

    Attributes
    ----------
    slices_ms
        Milliseconds per token of each slice. The key is the number of the observer's token at which
        the slice begins.
    first_ms, ttft_ms
        Time until the last request had its first token, and the mean time to first token.
    job_ms
        Time until the last request had its last token.
    cached
        Share of the prompts' tokens that were in the prefix cache.
    answers
        The last chunk of each request's stream.
    held_up_ms
        Milliseconds per token of the pass that this one replaces, or None.
    """

    slices_ms: Mapping[int, float]
    first_ms: float
    cached: float
    answers: Sequence[Mapping[str, Any]]
    held_up_ms: float | None = None
    ttft_ms: float = math.nan
    job_ms: float = math.nan

    @property
    def tpot_ms(self) -> float:
        return statistics.median(self.slices_ms.values())


def decode_run(
    server: Server, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float = 0.0
) -> DecodeRun:
    """Generate `num_tokens` tokens for all prompts, and time it.

    RuntimeError if there were too few steps in which all requests were running.
    """
    sampling = [
        sampling_of(num_tokens, temperature, stream_interval=1 if index == 0 else num_tokens)
        for index in range(len(prompts))
    ]
    begin = time.perf_counter()
    first: dict[int, float] = {}
    last: dict[int, tuple[float, Mapping[str, Any]]] = {}
    observed: list[tuple[float, int]] = []
    for chunk in server.stream(prompts, sampling):
        now, index = time.perf_counter(), chunk["index"]
        first.setdefault(index, now)
        last[index] = now, chunk
        if index == 0:
            observed.append((now, chunk["meta_info"]["completion_tokens"]))
    if len(first) < len(prompts):
        raise RuntimeError(f"{len(first)} of {len(prompts)} requests were answered")
    opens, closes = max(first.values()), min(when for when, _ in last.values())
    slices = slices_of([seen for seen in observed if opens <= seen[0] <= closes])
    if len(slices) < MIN_SLICES:
        raise RuntimeError(
            f"{len(slices)} slices of {SLICE} tokens had all {len(prompts)} requests running, of "
            f"{num_tokens} tokens; {MIN_SLICES} are needed: ask for more tokens, or fewer requests"
        )
    answers = [last[index][1] for index in range(len(prompts))]
    cached = sum(answer["meta_info"].get("cached_tokens", 0) for answer in answers)
    return DecodeRun(
        slices_ms=slices,
        first_ms=1000 * (opens - begin),
        cached=cached / sum(map(len, prompts)),
        answers=answers,
        ttft_ms=1000 * (statistics.fmean(first.values()) - begin),
        job_ms=1000 * (max(when for when, _ in last.values()) - begin),
    )


def ask_again_if_held_up(
    runs: list[DecodeRun], ask: Callable[[], DecodeRun], report: Callable[[str], object]
) -> None:
    """Replace passes whose tokens were held up on the way to the client and came in one burst.

    This happened in batches whose prompts have a million tokens: tokens came 0.13 ms apart, while a
    step took 5 ms. A pass counts as held up if its time per token is less than half of the slowest
    pass's. For each such pass, `ask` runs a new pass, which keeps the old time per token in
    `held_up_ms`. `report` gets a line of text.
    """
    slowest = max(run.tpot_ms for run in runs)
    for index, run in enumerate(runs):
        if run.tpot_ms < slowest / 2:
            report(f"{run.tpot_ms:.2f} ms per token came at once, asked again")
            runs[index] = replace(ask(), held_up_ms=run.tpot_ms)


def held_up_ms(runs: Iterable[DecodeRun]) -> list[float]:
    """Return the milliseconds per token of the passes that were replaced."""
    return [run.held_up_ms for run in runs if run.held_up_ms is not None]


def slices_of(arrivals: Sequence[tuple[float, int]]) -> dict[int, float]:
    """Return the milliseconds per token of each slice of SLICE tokens.

    arrivals: pairs of a time and the number of tokens that the observer's answer then has. If
    several tokens arrive together, a slice begins with the first arrival at or after its first
    token.
    """
    at: dict[int, tuple[float, int]] = {}
    for when, tokens in arrivals:
        at.setdefault(tokens // SLICE, (when, tokens))
    result = {}
    for number, (begin, had) in at.items():
        if number + 1 in at:
            end, has = at[number + 1]
            result[number * SLICE] = 1000 * (end - begin) / (has - had)
    if at:  # drops the first slice, which began before the window
        result.pop(min(at) * SLICE, None)
    return result


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, its quartiles, and its standard error, which is estimated from the quartiles."""

    median: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of `values`, which must not be empty."""
        ordered = sorted(values)
        if len(ordered) == 1:
            return cls(ordered[0], ordered[0], ordered[0], math.inf)
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
        # In a normal distribution, the quartiles are 1.349 sigma apart, and the standard error of
        # the median is 1.253 sigma / sqrt(n).
        return cls(median, low, high, 1.253 * (high - low) / 1.349 / math.sqrt(len(ordered)))

    @property
    def noise(self) -> float:
        """Return the interquartile range divided by the median."""
        return (self.high - self.low) / self.median

    def as_dict(self) -> dict[str, float | None]:
        error = self.error if math.isfinite(self.error) else None
        return {"median": self.median, "low": self.low, "high": self.high, "error": error}


def tpot(runs: Sequence[DecodeRun]) -> Spread:
    """Return the spread of milliseconds per token over all slices of all runs."""
    return Spread.of(value for run in runs for value in run.slices_ms.values())


def ratio(slower: Sequence[DecodeRun], faster: Sequence[DecodeRun]) -> Spread:
    """Return the spread of the `slower` server's time divided by the `faster` server's.

    Compares the n-th run of one server with the n-th run of the other, by slices that begin at the
    same token. RuntimeError if there are no such slices.
    """
    found = [
        milliseconds / other.slices_ms[token]
        for run, other in zip(slower, faster, strict=True)
        for token, milliseconds in run.slices_ms.items()
        if token in other.slices_ms
    ]
    if not found:
        raise RuntimeError("the two servers have no slice at the same token: ask for more tokens")
    return Spread.of(found)
