"""Checks answers of servers that verify drafts: accepted drafts, and correct tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_pat.bench.server import Server, sampling_of

DRAFT_TOKENS = 4  # tokens of a verify step, with one that is not a draft
# Largest difference of two backends' acceptance.
ACCEPTANCE_LIMIT = 0.02
# A token is off by the best token's log-probability minus its own. pat's largest such number may be
# OFF_RATIO times FA3's, or OFF_STEP, which is one step of a bfloat16 logit.
OFF_RATIO, OFF_STEP = 2.0, 0.04
_AT_ONCE = 4  # requests


def accepted(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens of the answers per step and request."""
    tokens, steps = _tokens_and_steps(answers)
    return sum(tokens) / sum(steps)


def error_of_accepted(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the standard error of `accepted`, given that the answers are a sample."""
    tokens, steps = _tokens_and_steps(answers)
    ratio = sum(tokens) / sum(steps)
    off = [gained - ratio * taken for gained, taken in zip(tokens, steps, strict=True)]
    return math.hypot(*off) * math.sqrt(len(off) / (len(off) - 1)) / sum(steps)


def _tokens_and_steps(answers: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    tokens = [len(answer["output_ids"]) for answer in answers]
    steps = [answer["meta_info"].get("spec_verify_ct") for answer in answers]
    return tokens, [taken or gained for taken, gained in zip(steps, tokens, strict=True)]


def largest_off(
    server: Server, prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]]
) -> float:
    """Return by how much a token of the answers is at most less probable than the best one.

    It is 0 if all tokens are the model's best ones. The server prefills prompts and answers,
    without drafts.
    """
    found = 0.0
    for first in range(0, len(prompts), _AT_ONCE):
        chosen = slice(first, first + _AT_ONCE)
        texts = [
            [*prompt, *answer["output_ids"]]
            for prompt, answer in zip(prompts[chosen], answers[chosen], strict=False)
        ]
        asked = {
            "return_logprob": True,
            "logprob_start_len": [len(prompt) - 1 for prompt in prompts[chosen]],
            "top_logprobs_num": 1,
        }
        for reply in server.generate(texts, sampling_of(1), **asked):
            info = reply["meta_info"]
            own, best = info["input_token_logprobs"][1:], info["input_top_logprobs"][1:]
            found = max(found, off(own, best))
    return found


def off(own: Sequence[Sequence[Any]], best: Sequence[Sequence[Sequence[Any]]]) -> float:
    """Return by how much the tokens `own` are at most less probable than the best, `best`."""
    if not own:
        raise ValueError("no position to compare")
    return max(b[0][0] - mine[0] for mine, b in zip(own, best, strict=True))
