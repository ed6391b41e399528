"""Requests of `sglang-pat check`: they share prefixes, and join and leave while others decode.

Generated requests share up to three levels (root, document, thread) and have tails of different
lengths. Some requests branch within a level, so that SGLang splits a node of its radix tree. Some
repeat or continue another request, some share nothing, and some are longer than a prefill chunk.
Answers differ in length. The server runs fewer requests at once than it gets, so that requests join
while others leave. The KV pool is large enough for only half of the running requests, so that nodes
are evicted and requests are retracted.
"""

from __future__ import annotations

import json
import random
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_pat.bench.cases import FIRST_TOKEN

LEAST_PROMPTS = 8  # with fewer prompts, resamples hardly differ
SAMPLED_EVERY = 4  # every fourth prompt also gets sampled answers
TAIL_TOKENS = (1, 48)
KINDS = (
    *("thread", "fork", "thread", "continue", "thread", "alone", "thread", "repeat"),
    *("fork", "thread", "long", "thread"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes
    ----------
    prompt : list of int
        Token ids.
    tokens : int
        Length of each answer in tokens.
    samples : int
        Number of answers sampled at temperature 1. 0: one greedy answer.
    """

    prompt: list[int]
    tokens: int
    samples: int = 0

    def body(self) -> dict[str, Any]:
        """Return the request as `/generate` or `Engine.generate` takes it."""
        sampling: dict[str, Any] = {"max_new_tokens": self.tokens, "ignore_eos": True}
        if self.samples:
            # All parameters are set, because a model's own defaults would change the probabilities.
            sampling |= {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
            sampling["n"] = self.samples
        else:
            sampling["temperature"] = 0.0
        return {"input_ids": self.prompt, "sampling_params": sampling}


def generate(
    number: int, *, prefix: int, tokens: int, samples: int, chunk: int, vocab_size: int, seed: int
) -> list[Asked]:
    """Generate requests of random tokens. The same arguments always give the same requests.

    Parameters
    ----------
    number : int
        Number of prompts. With `len(KINDS)` or more, all kinds occur.
    prefix : int
        Approximate number of tokens of the longest shared prefix.
    tokens : int
        Tokens of the longest answer.
    samples : int
        Number of sampled answers to every fourth prompt.
    chunk : int
        Tokens of a prefill chunk.
    vocab_size : int
    seed : int
    """
    rng = random.Random(seed)

    def text(least: int, most: int) -> list[int]:
        length = rng.randint(max(1, least), max(1, most))
        return rng.choices(range(FIRST_TOKEN, vocab_size - FIRST_TOKEN), k=length)

    roots = [text(prefix // 3, prefix // 2) for _ in range(2)]
    documents = [root + text(prefix // 6, prefix // 4) for root in roots for _ in range(2)]
    threads = [document + text(prefix // 8, prefix // 4) for document in documents for _ in "ab"]
    prompts: list[list[int]] = []
    for index in range(number):
        kind, thread = KINDS[index % len(KINDS)], rng.choice(threads)
        earlier = prompts[-4:]
        if kind == "fork":
            prompt = thread[: rng.randint(len(thread) // 3, len(thread))] + text(*TAIL_TOKENS)
        elif kind == "continue":
            prompt = rng.choice(earlier) + text(*TAIL_TOKENS)
        elif kind == "repeat":
            prompt = list(rng.choice(earlier))
        elif kind == "alone":
            prompt = text(prefix // 8, prefix // 2)
        elif kind == "long":
            prompt = roots[0] + text(2 * chunk, 2 * chunk + 40)
        else:
            prompt = thread + text(*TAIL_TOKENS)
        prompts.append(prompt)
    return ask(prompts, tokens=tokens, samples=samples, seed=seed)


def ask(prompts: Sequence[Sequence[int]], *, tokens: int, samples: int, seed: int) -> list[Asked]:
    """Return a greedy request for every prompt, and for every fourth prompt also a sampled one.

    Answers have from `tokens` / 4 to `tokens` tokens.
    """
    rng = random.Random(seed)
    asked = []
    for index, prompt in enumerate(prompts):
        length = rng.randint(max(2, tokens // 4), tokens)
        asked.append(Asked([*prompt], length))
        if samples and index % SAMPLED_EVERY == 0:
            asked.append(Asked([*prompt], length, samples))
    return asked


def pool_tokens(asked: Sequence[Asked], running: int) -> int:
    """Return the size of a KV pool for half of `running` average requests, in tokens.

    Prefixes that requests share are counted once. The pool holds at least the longest request.
    """
    ordered = sorted((each.prompt for each in asked), key=tuple)
    shared = (_common(left, right) for left, right in pairwise(ordered))
    distinct = sum(map(len, ordered)) - sum(shared)
    answers = [each.tokens for each in asked for _ in range(each.samples or 1)]
    at_once = min(running, len(answers)) / len(answers)
    longest = max(len(each.prompt) + each.tokens for each in asked)
    return max(longest * 5 // 4, int(at_once * (distinct + sum(answers))) // 2) + 64


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    for length, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return length
    return min(len(left), len(right))


def read_prompts(path: Path, model: Path, *, vocab_size: int, most: int) -> list[list[int]]:
    """Read prompts from a file of JSON lines.

    A line is `{"prompt": TEXT}` or `{"input_ids": [TOKEN, ...]}`.

    Parameters
    ----------
    path : Path
    model : Path
        The folder of the model. Its `tokenizer.json` converts texts to tokens.
    vocab_size : int
    most : int
        Tokens of the longest prompt.

    Raises
    ------
    ValueError
        A line has neither form, or its prompt is too long. The message names the line.
    OSError
        The file cannot be read.
    """
    prompts: list[list[int]] = []
    tokenizer = None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no text in UTF-8: {error.reason}") from None
    # splitlines() would also split at other characters, which may be in a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        given = entry if isinstance(entry, dict) else {}
        tokens: Any = given.get("input_ids")
        if isinstance(given.get("prompt"), str):
            tokenizer = tokenizer or _tokenizer(model)
            tokens = tokenizer.encode(given["prompt"]).ids
        if not _are_tokens(tokens, vocab_size):
            raise ValueError(
                f'{where}: {reprlib.repr(line)}; allowed: {{"prompt": TEXT}} or '
                f'{{"input_ids": [TOKEN, ...]}} with tokens from 0 to {vocab_size - 1}'
            )
        if len(tokens) > most:
            raise ValueError(f"{where}: {len(tokens)} tokens; allowed: at most {most}")
        prompts.append(tokens)
    return prompts


def _are_tokens(tokens: Any, vocab_size: int) -> bool:
    """Return True for a non-empty list of token ids."""
    is_list = isinstance(tokens, list) and bool(tokens)
    return is_list and all(type(token) is int and 0 <= token < vocab_size for token in tokens)


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file; allowed without it: lines of input_ids")
    return Tokenizer.from_file(str(file))
