"""Compares the greedy answers of two runs, up to the first tie of each answer.

In a tie, two tokens are equally probable within rounding. Either may be the answer, and the texts
may differ afterwards. Any other difference is an error. The probabilities come from one of the
runs, the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple


def with_candidates(count: int) -> dict[str, Any]:
    """Return request fields that ask SGLang for the `count` most probable tokens per position."""
    return {"return_logprob": True, "top_logprobs_num": count}


class Candidate(NamedTuple):
    """One of the most probable tokens at a position. logprob: NaN if the server returned null."""

    logprob: float
    token: int


def number(logprob: float | None) -> float:
    """Return a log-probability, with NaN for JSON's null."""
    return math.nan if logprob is None else logprob


def candidates_of(position: Sequence[Sequence[Any]]) -> list[Candidate]:
    """Return the candidates at a position, from SGLang's entries."""
    return [Candidate(number(logprob), token) for logprob, token, *_ in position]


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: the greedy answer. candidates: the best tokens at each position."""

    tokens: list[int]
    candidates: list[list[Candidate]]

    @classmethod
    def parse(cls, answer: dict[str, Any]) -> Answer:
        """Parse SGLang's reply to a request that has the fields of `with_candidates()`."""
        positions = answer["meta_info"]["output_top_logprobs"]
        return cls(answer["output_ids"], [candidates_of(each) for each in positions])


class Parting(NamedTuple):
    """The position at which two answers first differ.

    tokens: the token of each answer at the position, or None if that answer has ended before.

    gap: the reference's log-probability of its own token minus its log-probability of the other
    token. None if the other token is not among the reference's candidates, if one token is None, or
    if a log-probability is not a number.
    """

    request: int
    position: int
    tokens: tuple[int | None, int | None]
    gap: float | None
    is_tie: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tells how far two runs of the same requests agree. positions: equal leading tokens."""

    requests: int
    positions: int
    partings: list[Parting]

    @property
    def errors(self) -> list[Parting]:
        return [parting for parting in self.partings if not parting.is_tie]

    def as_dict(self) -> dict[str, Any]:
        gaps = [each.gap for each in self.partings if each.is_tie and each.gap is not None]
        return {
            "requests": self.requests,
            "positions_equal": self.positions,
            "ties": len(gaps),
            "largest_gap_of_a_tie": max(gaps, default=None),
            "errors": [parting._asdict() for parting in self.errors],
        }


def agreement(answers: Sequence[Answer], reference: Sequence[Answer], tie: float) -> Agreement:
    """Compare the answers to all requests.

    tie: largest gap of two tokens that tie. If logits may differ by d between the runs, tie is 2 d,
    because one token may have gained d, and the other lost d. Other tokens do not change the gap.
    """
    positions, partings = 0, []
    for request, (a, b) in enumerate(zip(answers, reference, strict=True)):
        position, tokens = _parting(a.tokens, b.tokens)
        positions += position
        if tokens is not None:
            gap = _gap(b, position, tokens)
            partings.append(Parting(request, position, tokens, gap, gap is not None and gap <= tie))
    return Agreement(len(answers), positions, partings)


def _parting(
    left: Sequence[int], right: Sequence[int]
) -> tuple[int, tuple[int | None, int | None] | None]:
    """Return how many leading tokens are equal, and the first pair of unequal ones, or None."""
    for position, tokens in enumerate(zip_longest(left, right)):
        if tokens[0] != tokens[1]:
            return position, tokens
    return len(left), None


def _gap(reference: Answer, position: int, tokens: tuple[int | None, int | None]) -> float | None:
    if tokens[0] is None or tokens[1] is None:
        return None
    logprobs = {each.token: each.logprob for each in reference.candidates[position]}
    gap = logprobs.get(tokens[1], math.nan) - logprobs.get(tokens[0], math.nan)
    return None if math.isnan(gap) else gap
