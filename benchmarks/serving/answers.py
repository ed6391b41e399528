"""Greedy answers of two runs, compared as far as rounding lets them agree.

Where the two most probable tokens are equally probable within rounding, either may be answered, and
from there on the texts differ rightly: a tie. Any other difference is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

WITH_CANDIDATES = {"return_logprob": True, "top_logprobs_num": 2}


class Candidate(NamedTuple):
    """One of the two most probable tokens at a position."""

    logprob: float
    token: int


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: greedy. candidates: at each position the two best, the better one first."""

    tokens: list[int]
    candidates: list[list[Candidate]]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Answer:
        """From SGLang's, which was asked for WITH_CANDIDATES."""
        positions = answer["meta_info"]["output_top_logprobs"]
        candidates = [[Candidate(logprob, token) for logprob, token, *_ in p] for p in positions]
        return cls(answer["output_ids"], candidates)


class Parting(NamedTuple):
    """Where two answers part. None in place of a token: that answer had ended."""

    request: int
    position: int
    tokens: tuple[int | None, int | None]
    is_tie: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two runs of the same requests. positions: tokens that were compared, and equal."""

    requests: int
    positions: int
    partings: list[Parting]

    @property
    def errors(self) -> list[Parting]:
        return [parting for parting in self.partings if not parting.is_tie]

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "positions_equal": self.positions,
            "ties": len(self.partings) - len(self.errors),
            "errors": [parting._asdict() for parting in self.errors],
        }


def agreement(left: Sequence[Answer], right: Sequence[Answer], tie: float) -> Agreement:
    """tie: two tokens tie if their log-probabilities differ by no more than this, in both runs."""
    positions, partings = 0, []
    for request, (a, b) in enumerate(zip(left, right, strict=True)):
        position, tokens = _parting(a.tokens, b.tokens)
        positions += position
        if tokens is not None:
            is_tie = all(_ties(run, position, tokens, tie) for run in (a, b))
            partings.append(Parting(request, position, tokens, is_tie))
    return Agreement(len(left), positions, partings)


def _parting(
    left: Sequence[int], right: Sequence[int]
) -> tuple[int, tuple[int | None, int | None] | None]:
    """How many tokens are equal, and the two that are not; None if all are."""
    for position, tokens in enumerate(zip_longest(left, right)):
        if tokens[0] != tokens[1]:
            return position, tokens
    return len(left), None


def _ties(run: Answer, position: int, tokens: tuple[int | None, int | None], tie: float) -> bool:
    if None in tokens:
        return False
    best, second = run.candidates[position]
    return {best.token, second.token} == set(tokens) and best.logprob - second.logprob <= tie
