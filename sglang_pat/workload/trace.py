"""Trace: requests in order of arrival, with prompts as segments instead of tokens.

First stage of the simulation. `formats.py` and `generate.py` produce it, `run.py` consumes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int64]

_CONTENT_BITS = 62
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1
_TOKEN_MASK = (1 << _CONTENT_BITS) - 1
_CACHED_TEXT = 1024  # bytes: shorter texts are not worth keeping


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
    if len(prompt) == 1:
        first = _first_token(prompt[0].content)
        return np.arange(first, first + prompt[0].length, dtype=np.int64)
    lengths = [segment.length for segment in prompt]
    firsts = np.array([_first_token(segment.content) for segment in prompt], dtype=np.int64)
    begins = np.cumsum([0, *lengths[:-1]]) if lengths else np.zeros(0, dtype=np.int64)
    return np.repeat(firsts - begins, lengths) + np.arange(sum(lengths), dtype=np.int64)


def text_tokens(text: str | bytes, ratio: float = 4.0) -> TokenIds:
    """Return made-up tokens of a text, int64 `[length]`: one for `ratio` bytes of UTF-8.

    Texts share a prefix of tokens as far as their bytes are equal. The ids are not those of a
    vocabulary. ratio: from 1 to 8; 4 is about that of a tokenizer for English.
    """
    encoded = text.encode(errors="replace") if isinstance(text, str) else text
    if len(encoded) < _CACHED_TEXT:
        return _text_tokens(encoded, ratio)
    return _text_tokens_cached(encoded, ratio)


def _text_tokens(encoded: bytes, ratio: float) -> TokenIds:
    if ratio == 4:
        padded = encoded + bytes(-len(encoded) % 4)
        return np.frombuffer(padded, dtype="<u4").astype(np.int64)
    count = int(np.ceil(len(encoded) / ratio))
    ends = (np.arange(1, count + 1) * ratio).astype(np.int64)
    begins = np.concatenate(([0], ends[:-1])).astype(np.int64)
    padded_bytes = np.frombuffer(encoded + bytes(16), dtype=np.uint8)
    found = np.zeros(count, dtype=np.int64)
    for index in range(8):
        places = begins + index
        inside = (places < ends) & (places < len(encoded))
        found += np.where(inside, padded_bytes[np.minimum(places, len(encoded))], 0).astype(
            np.int64
        ) << (8 * index)
    return found & _TOKEN_MASK


# A system prompt comes with every request.
_text_tokens_cached = lru_cache(maxsize=64)(_text_tokens)


def _first_token(content: int) -> int:
    """splitmix64's finalizer: contents that differ a little get tokens that differ in all bits."""
    x = (content * _GOLDEN + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (x ^ (x >> 31)) >> (64 - _CONTENT_BITS)


class TraceError(ValueError):
    """A malformed line of a trace: `FILE:LINE: reason`; line 0 is the whole file."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}:{line}: {reason}" if line else f"{file}: {reason}")
        self.file = file
        self.line = line
        self.reason = reason


# Called with the current activity, the number of requests done, and their total.
Progress: TypeAlias = Callable[[str, int, int], None]


def no_progress(what: str, done: int, of: int) -> None:
    """Report no progress."""


class NotReplayed(Exception):
    """A record that is understood but has nothing to replay. The message says what it is."""


FAILED = "requests that failed"


# If more than this part of the lines is not understood, the rest does not stand for the workload.
MOST_MALFORMED = 0.05
_HOPELESS = 1000  # malformed lines after which a file that holds little else is not read on


@dataclass(slots=True)
class TraceErrors:
    """What a reader has skipped or estimated so far.

    Attributes
    ----------
    strict
        Raise the first malformed line instead.
    count, used
        Lines that were not understood, and requests that were read.
    first
        The first few malformed lines.
    left_out
        Records that are understood but not replayed, by what they are: requests that failed, say.
    is_cut
        The file ends within a line, as a log does that is still written.
    estimated
        Requests whose prompt is text that `usage` does not count.
    counted, by_text
        Tokens of the prompts that `usage` counts, and their estimate at 4 bytes a token.
    bytes_per_token
        Bytes of text per token.
    miscounted
        Requests whose token ids are fewer or more than `usage` counts.
    media
        Images whose tokens are a guess.
    limited
        Answers whose length is taken from the request's limit, because the log has no other.
    models
        Requests by the model that they name.
    unknown
        Requests by a key that no table of `request_log.py` has.
    assumed
        What was inferred from the lines because the format does not define it.
    """

    strict: bool = False
    count: int = 0
    used: int = 0
    is_cut: bool = False
    estimated: int = 0
    counted: int = 0
    by_text: int = 0
    bytes_per_token: float = 4.0
    miscounted: int = 0
    media: int = 0
    limited: int = 0
    assumed: str = ""
    left_out: dict[str, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    first: list[TraceError] = field(default_factory=list)
    keep: int = 10

    def add(self, file: str, line: int, reason: str) -> None:
        """Count a malformed line.

        TraceError if `strict`, or if there are `_HOPELESS` such lines and fewer requests.
        """
        error = TraceError(file, line, reason)
        if self.strict:
            raise error
        self.count += 1
        if len(self.first) < self.keep:
            self.first.append(error)
        if self.count >= _HOPELESS and self.count > self.used:
            self.check(file)

    def leave_out(self, what: str) -> None:
        """Count a record that is not replayed."""
        self.left_out[what] = self.left_out.get(what, 0) + 1

    def check(self, file: str) -> None:
        """TraceError if more than `MOST_MALFORMED` of the lines are malformed."""
        lines = self.count + self.used + sum(self.left_out.values())
        if self.count > MOST_MALFORMED * lines:
            first = self.first[0]
            raise TraceError(
                file,
                first.line,
                f"{self.count:,} of {lines:,} lines were not understood, so there is no verdict; "
                f"the first: {first.reason}",
            )


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

    def first(
        self, most: int | None = None, progress: Progress = no_progress
    ) -> list[TraceRequest]:
        """The first requests, in order of arrival; None: all.

        TraceError if so many lines are malformed that the others do not stand for the workload.
        """
        found: list[TraceRequest] = []
        for request in islice(self.stream, most):
            found.append(request)
            progress("reading", len(found), most or self.requests or len(found))
        self.errors.check(self.name)
        return found
