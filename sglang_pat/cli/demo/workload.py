"""The demo's workload: requests over a three-level prefix tree, which join and leave over time.

The number of requests and `SEED` determine everything, so both runs, on every machine, serve the
same requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 7
NUM_SYSTEM_PROMPTS = 2
DOCUMENTS_PER_SYSTEM_PROMPT = 3
SYSTEM_PROMPT_TOKENS = (512, 640)
DOCUMENT_TOKENS = (256, 448)
USER_TOKENS = (12, 48)
NEW_TOKENS = (16, 64)
MEAN_GAP_S = 0.05
# Tokenizers keep the ids below for special tokens.
FIRST_TOKEN_ID = 8


@dataclass(frozen=True, slots=True)
class Request:
    """Prompt, number of tokens to generate, and seconds from the start to its arrival."""

    prompt: list[int]
    num_new_tokens: int
    arrival_s: float


def make_requests(num_requests: int, vocab_size: int) -> list[Request]:
    """`num_requests` requests: system prompt + document + user's own text, in order of arrival."""
    rng = random.Random(SEED)

    def text(length_range: tuple[int, int]) -> list[int]:
        length = rng.randint(*length_range)
        return [rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(length)]

    contexts = [
        system_prompt + text(DOCUMENT_TOKENS)
        for system_prompt in (text(SYSTEM_PROMPT_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS))
        for _ in range(DOCUMENTS_PER_SYSTEM_PROMPT)
    ]
    requests, now = [], 0.0
    for _ in range(num_requests):
        prompt = rng.choice(contexts) + text(USER_TOKENS)
        requests.append(Request(prompt, rng.randint(*NEW_TOKENS), now))
        now += rng.expovariate(1 / MEAN_GAP_S)
    return requests
