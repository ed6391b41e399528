"""Trace: requests in order of arrival, their prompts as segments instead of tokens.

First stage of the replay. `formats.py` and `generate.py` produce it, `simulate.py` consumes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]

_CONTENT_BITS = 62
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


class Segment(NamedTuple):
    """`length` tokens of a text that `content` identifies, from its beginning.

    Segments of the same content hold the same tokens as far as both reach: two prompts share a
    prefix as long as their segments are equal. `content` is any integer: a block's hash, the number
    of a system prompt, an id that occurs once for text that nobody shares.
    """

    content: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """A prompt whose tokens are known. tokens: int64 `[length]`."""

    tokens: TokenIds


Prompt: TypeAlias = tuple[Segment, ...] | TokenPrompt


class TraceRequest(NamedTuple):
    """One request. arrival: seconds since the trace began. output_length: tokens, at least 1."""

    arrival: float
    prompt: Prompt
    output_length: int

    @property
    def input_length(self) -> int:
        return prompt_length(self.prompt)


def prompt_length(prompt: Prompt) -> int:
    """Tokens of a prompt."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    return sum(segment.length for segment in prompt)


def token_ids(prompt: Prompt) -> TokenIds:
    """The tokens of a prompt, int64 `[length]`, non-negative; the same in every run.

    The ids of segments are made up: a hash of the content, counted upwards. They are not those of a
    vocabulary.
    """
    if isinstance(prompt, TokenPrompt):
        return prompt.tokens
    lengths = [segment.length for segment in prompt]
    firsts = np.array([_first_token(segment.content) for segment in prompt], dtype=np.int64)
    begins = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, dtype=np.int64)
    return np.repeat(firsts - begins, lengths) + np.arange(sum(lengths), dtype=np.int64)


def text_tokens(text: str) -> TokenIds:
    """Tokens of a text without its tokenizer: 4 bytes of UTF-8 are one token, int64 `[length]`.

    Texts share a prefix of tokens as far as their bytes are equal. The count is about that of a
    tokenizer for English; the ids are not those of a vocabulary.
    """
    encoded = text.encode(errors="replace")
    padded = encoded + bytes(-len(encoded) % 4)
    return np.frombuffer(padded, dtype="<u4").astype(np.int64)


def _first_token(content: int) -> int:
    """splitmix64's finalizer: contents that differ a little get tokens that differ in all bits."""
    x = (content * _GOLDEN + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (x ^ (x >> 31)) >> (64 - _CONTENT_BITS)


class TraceError(ValueError):
    """A malformed line of a trace: `FILE:LINE: reason`."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}:{line}: {reason}")
        self.file = file
        self.line = line
        self.reason = reason


@dataclass(slots=True)
class TraceErrors:
    """The malformed lines that a reader has skipped so far; the first few of them in full.

    Attributes
    ----------
    strict
        Raise the first malformed line instead.
    failed
        Requests that the trace itself records as failed. They are well-formed, but there is
        nothing to replay, so they are left out too.
    estimated
        Requests whose prompt is text, so that its tokens are `text_tokens`.
    """

    strict: bool = False
    count: int = 0
    failed: int = 0
    estimated: int = 0
    first: list[TraceError] = field(default_factory=list)
    keep: int = 10

    def add(self, file: str, line: int, reason: str) -> None:
        """Count a malformed line. Raises it as TraceError if `strict`."""
        error = TraceError(file, line, reason)
        if self.strict:
            raise error
        self.count += 1
        if len(self.first) < self.keep:
            self.first.append(error)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, read while they are consumed, once.

    name: of the file or generator. format: one of `formats.FORMATS`, or "generated". requests:
    how many there are, for progress; None if only the end will tell. errors: filled while reading.
    """

    name: str
    format: str
    stream: Iterable[TraceRequest]
    errors: TraceErrors
    requests: int | None = None
