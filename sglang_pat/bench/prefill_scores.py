"""Gets answers from a server, and compares their log-probabilities with those in a prefill.

A prefill of prompt and answer computes the log-probability of each token of the answer again, by
another kernel and from KV that no decode step wrote. The first token of an answer does not count,
because a prefill has generated it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_pat.bench.answers import Answer, Candidate, candidates_of, number, with_candidates
from sglang_pat.bench.check_requests import Asked
from sglang_pat.bench.server import Server

CANDIDATES = 20  # number of most probable tokens that a server returns, to compute KL from
# Lower bound of the total probability of all other tokens. Below it, float32 rounding dominates.
_LEAST_REST = 1e-6

Ask = Callable[[Sequence[dict[str, Any]]], Sequence[Any]]
"""Sends bodies of `/generate` requests, all at once. Returns SGLang's answer to each of them."""
FloatArray = npt.NDArray[np.float64]


class Reply(NamedTuple):
    """One answer. request: index of the request. logprobs: those of its tokens in decode."""

    request: int
    answer: Answer
    logprobs: list[float]


class Distances(NamedTuple):
    """Distances of one answer's tokens, except its first token.

    request: index of the request. distance, kl: float64 `[tokens - 1]`, natural logarithms;
    infinite if a log-probability is not a number.
    """

    request: int
    distance: FloatArray
    kl: FloatArray


class Score(NamedTuple):
    """A prefill's log-probabilities of an answer's tokens. Lists are as long as the answer."""

    logprobs: list[float]
    candidates: list[list[Candidate]]


Scores = Mapping[tuple[int, ...], Score]


def over_http(server: Server) -> Ask:
    """Return a function that sends requests to a server, each on its own connection."""

    def send(body: dict[str, Any]) -> Any:
        more = {name: body[name] for name in body.keys() - {"input_ids", "sampling_params"}}
        return server.answer(body["input_ids"], body["sampling_params"], **more)

    def ask(bodies: Sequence[dict[str, Any]]) -> list[Any]:
        with ThreadPoolExecutor(max(1, min(len(bodies), 256))) as threads:
            return list(threads.map(send, bodies))

    return ask


def serve(ask: Ask, asked: Sequence[Asked]) -> tuple[list[Reply], int]:
    """Send all requests at once. Return the answers, and how often requests were retracted.

    RuntimeError if a request is aborted.
    """
    bodies = [each.body() | with_candidates(CANDIDATES) for each in asked]
    replies, retractions = [], 0
    for request, said in enumerate(ask(bodies)):
        for answer in said if isinstance(said, list) else [said]:
            reason = answer["meta_info"].get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise RuntimeError(f"request {request} was aborted: {reason.get('message')}")
            logprobs = [number(each[0]) for each in answer["meta_info"]["output_token_logprobs"]]
            replies.append(Reply(request, Answer.parse(answer), logprobs))
            retractions += answer["meta_info"].get("num_retractions") or 0
    return replies, retractions


def score(ask: Ask, asked: Sequence[Asked], replies: Sequence[Reply]) -> Scores:
    """Score each distinct answer by a prefill. Return a score for each (*prompt, *answer).

    RuntimeError if the server returns the scores of other tokens.
    """
    wanted = {
        (*asked[reply.request].prompt, *reply.answer.tokens): len(asked[reply.request].prompt)
        for reply in replies
    }
    bodies = [
        {
            "input_ids": [*tokens],
            # The prefill generates the one token, so nothing is decoded.
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "logprob_start_len": prompt - 1,  # SGLang scores only the tokens after this one
            **with_candidates(CANDIDATES),
        }
        for tokens, prompt in wanted.items()
    ]
    scores = {}
    for (tokens, prompt), said in zip(wanted.items(), ask(bodies), strict=True):
        meta = said["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        if (
            len(entries) != len(tokens) - prompt
            or any(
                token not in (given, 0)  # SGLang returns 0 for the last token of the vocabulary
                for (_, token, *_), given in zip(entries, tokens[prompt:], strict=True)
            )
        ):
            raise RuntimeError(
                f"a prefill of {len(tokens)} tokens scored {len(entries)} tokens, not the last "
                f"{len(tokens) - prompt} as they are"
            )
        scores[tokens] = Score(
            [number(logprob) for logprob, *_ in entries],
            [candidates_of(best) for best in meta["input_top_logprobs"][1:]],
        )
    return scores


def distances(asked: Sequence[Asked], replies: Sequence[Reply], scores: Scores) -> list[Distances]:
    """Return the distances between decode and prefill of each answer."""
    found = []
    for request, answer, logprobs in replies:
        scored = scores[(*asked[request].prompt, *answer.tokens)]
        distance = np.abs(np.subtract(logprobs[1:], scored.logprobs[1:]))
        both = zip(scored.candidates[1:], answer.candidates[1:], strict=True)
        kl = np.array([divergence(reference, other) for reference, other in both])
        finite = [np.nan_to_num(each, nan=math.inf) for each in (distance, kl)]
        found.append(Distances(request, *finite))
    return found


def divergence(reference: Sequence[Candidate], other: Sequence[Candidate]) -> float:
    """Return the Kullback-Leibler divergence of `other` from `reference`.

    Tokens that are not candidates of both count as one outcome, so the result is a lower bound. It
    is never negative.
    """
    named = {each.token: each.logprob for each in other}
    pairs = [(each.logprob, named[each.token]) for each in reference if each.token in named]
    total = sum(math.exp(p) * (p - q) for p, q in pairs if p > -math.inf)
    rest_p, rest_q = (
        max(1.0 - sum(math.exp(pair[side]) for pair in pairs), _LEAST_REST) for side in (0, 1)
    )
    return max(total + rest_p * math.log(rest_p / rest_q), 0.0)
