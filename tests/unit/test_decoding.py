"""The measurement of decode steps: which steps count, and the noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from sglang_pat.bench import decoding
from sglang_pat.bench.decoding import (
    SLICE,
    DecodeRun,
    Spread,
    ask_again_if_held_up,
    decode_run,
    held_up_ms,
    ratio,
    slices_of,
    tpot,
)


def test_a_slice_is_the_time_between_tokens() -> None:
    arrivals = [(0.01 * token, token) for token in range(1, 4 * SLICE + 1)]
    slices = slices_of(arrivals)
    assert list(slices) == [SLICE, 2 * SLICE, 3 * SLICE]  # the first slice is not complete
    assert slices == pytest.approx(dict.fromkeys(slices, 10.0))


def test_tokens_that_arrive_together_do_not_shorten_a_slice() -> None:
    arrivals = [(0.01 * token, token) for token in range(1, 6 * SLICE, 3)]
    assert list(slices_of(arrivals).values()) == pytest.approx([10.0] * 4)


class FakeServer:
    """A server that admits each request at a given step.

    A step takes 10 ms with all requests and 3 ms with fewer; an admission takes 500 ms.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, admitted: list[int]) -> None:
        self.now, self.admitted = 0.0, admitted
        monkeypatch.setattr(decoding.time, "perf_counter", lambda: self.now)

    def stream(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> Iterator[Any]:
        tokens = [0] * len(prompts)
        step = 0
        total = sampling[0]["max_new_tokens"]
        while min(tokens) < total:
            running = [
                index
                for index, at in enumerate(self.admitted)
                if at <= step and tokens[index] < total
            ]
            self.now += 0.5 * sum(at == step for at in self.admitted)
            self.now += 0.01 if len(running) == len(prompts) else 0.003
            for index in running:
                tokens[index] += 1
                if tokens[index] in (1, total) or sampling[index]["stream_interval"] == 1:
                    info = {"completion_tokens": tokens[index], "cached_tokens": 3}
                    yield {"index": index, "meta_info": info}
            step += 1


def test_only_steps_with_all_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(monkeypatch, [0, 5, 9, 30])
    run = decode_run(server, [[1, 2, 3, 4]] * 4, 100)  # type: ignore[arg-type]
    assert list(run.slices_ms.values()) == pytest.approx([10.0] * len(run.slices_ms))
    assert min(run.slices_ms) >= 30
    assert run.tpot_ms == pytest.approx(10.0)
    assert run.first_ms > 2000
    assert run.cached == 0.75
    assert [answer["index"] for answer in run.answers] == [0, 1, 2, 3]


def test_no_step_counts_after_the_first_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer, which the server admits last, continues alone."""
    server = FakeServer(monkeypatch, [40, 0])
    run = decode_run(server, [[1]] * 2, 100)  # type: ignore[arg-type]
    assert list(run.slices_ms.values()) == pytest.approx([10.0] * len(run.slices_ms))
    assert max(run.slices_ms) < 100 - 40


def test_requests_that_never_run_together_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(monkeypatch, [0, 95])
    with pytest.raises(RuntimeError, match="0 slices of 8 tokens had all 2 requests running"):
        decode_run(server, [[1]] * 2, 100)  # type: ignore[arg-type]


def test_the_error_of_a_median_shrinks_with_the_number_of_slices() -> None:
    few, many = Spread.of([1.0, 2.0, 3.0]), Spread.of([1.0, 2.0, 3.0] * 100)
    assert few.median == many.median == 2
    assert (few.low, few.high) == (1.5, 2.5)
    assert few.noise == 0.5
    assert 0 < many.error < few.error / 5
    assert math.isinf(Spread.of([1.0]).error)
    assert Spread.of([1.0]).as_dict()["error"] is None


def _run(slices: dict[int, float]) -> DecodeRun:
    return DecodeRun(slices, 1.0, 1.0, [])


def test_a_ratio_compares_slices_of_the_same_token() -> None:
    pat = [_run({8: 1.0, 16: 2.0, 24: 3.0}), _run({16: 2.0})]
    fa3 = [_run({16: 3.0, 24: 4.5, 32: 9.0}), _run({16: 3.0, 24: 100.0})]
    found = ratio(fa3, pat)
    assert (found.low, found.median, found.high) == (1.5, 1.5, 1.5)
    assert tpot(pat).median == 2
    with pytest.raises(RuntimeError, match="no slice at the same token"):
        ratio([_run({8: 1.0})], [_run({16: 1.0})])


def test_passes_whose_tokens_came_at_once_are_repeated() -> None:
    steady, slower, held_up = _run({8: 5.0}), _run({8: 9.9}), _run({8: 0.13})
    asked, told = [], []

    def ask() -> DecodeRun:
        asked.append(_run({8: 5.1}))
        return asked[-1]

    runs = [held_up, steady, held_up, slower]
    ask_again_if_held_up(runs, ask, told.append)
    assert len(asked) == 2
    again = replace(asked[0], held_up_ms=0.13)
    assert runs == [again, steady, again, slower]
    assert held_up_ms(runs) == [0.13, 0.13]
    assert told == ["0.13 ms per token came at once, asked again"] * 2
    ask_again_if_held_up(runs, ask, told.append)
    assert len(asked) == len(told) == 2
