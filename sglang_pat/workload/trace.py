"""Traces: requests in order of arrival. A prompt consists of segments, or of token ids.

`formats.py` and `generate.py` make traces, and `run.py` simulates a server that answers them.
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
_CACHED_TEXT = 1024  # bytes; the tokens of shorter texts are not cached


class Segment(NamedTuple):
    """The first `length` tokens of the text that `content` identifies.

    Segments with equal content have the same tokens up to the shorter length. The shared prefix of
    two prompts consists of their leading equal segments, and of the common part of the next two if
    these have equal content. `content` is any integer: the hash of a block, the number of a system
    prompt, or, for text that no other prompt has, an id that is used only once.
    """

    content: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """A prompt with known token ids. tokens: int64 `[length]`."""

    tokens: TokenIds


Prompt: TypeAlias = tuple[Segment, ...] | TokenPrompt


class TraceRequest(NamedTuple):
    """A request. arrival: seconds since the trace began. output_length: tokens, at least 1."""

    arrival: float
    prompt: Prompt
    output_length: int

    @property
    def input_length(self) -> int:
        return prompt_length(self.prompt)


def prompt_length(prompt: Prompt) -> int:
    """Return the number of tokens of a prompt."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    return sum(segment.length for segment in prompt)


def token_ids(prompt: Prompt) -> TokenIds:
    """Return the token ids of a prompt, int64 `[length]`, the same in every run.

    The ids of a segment are made up: they count upwards from a hash of its content. They are not
    negative, and belong to no vocabulary.
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
    """Return made-up token ids of a text, int64 `[length]`, one per `ratio` bytes of UTF-8.

    Texts that begin with the same bytes get ids that begin alike. The ids belong to no vocabulary.
    ratio: from 1 to 8; in English, a tokenizer's token has about 4 bytes.
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


# Cached, because every request repeats its system prompt.
_text_tokens_cached = lru_cache(maxsize=64)(_text_tokens)


def _first_token(content: int) -> int:
    """Return the id of a content's first token, which is a hash by splitmix64's finaliser."""
    x = (content * _GOLDEN + _GOLDEN) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (x ^ (x >> 31)) >> (64 - _CONTENT_BITS)


class TraceError(ValueError):
    """A malformed line of a trace: `FILE:LINE: reason`. Line 0 stands for the whole file."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}:{line}: {reason}" if line else f"{file}: {reason}")
        self.file = file
        self.line = line
        self.reason = reason


# Called with the current activity, the number of finished requests, and their total.
Progress: TypeAlias = Callable[[str, int, int], None]


def no_progress(what: str, done: int, of: int) -> None:
    """Report no progress."""


class NotReplayed(Exception):
    """Raised for a record that is understood but has nothing to replay. The message says why."""


FAILED = "requests that failed"


# If more than this fraction of the lines is malformed, the rest does not represent the workload.
MOST_MALFORMED = 0.05
_HOPELESS = 1000  # after this many malformed lines, reading stops if fewer requests were read


@dataclass(slots=True)
class TraceErrors:
    """Counts what a reader has skipped and estimated so far.

    Attributes
    ----------
    strict
        Whether to raise an error for the first malformed line.
    longest_answer
        The length of an answer whose length and limit the log does not give. None: such a request
        is malformed.
    count, used
        Numbers of malformed lines, and of requests that were read.
    first
        The first few malformed lines, for messages.
    left_out
        Numbers of records that were understood but not replayed, by reason.
    is_cut
        Whether the file ends within a line, like a log that is still being written.
    estimated
        Number of requests whose prompt is a text without `usage`.
    counted, by_text
        Tokens of all prompts with `usage`: counted by `usage`, and estimated at 4 bytes per token.
    bytes_per_token
        Bytes of text that are estimated to make one token.
    miscounted
        Number of requests whose list of token ids is shorter or longer than `usage` says.
    media
        Number of images whose tokens are a guess.
    limited
        Number of answers whose length the log does not give. The request's limit is used instead.
    unanswered
        Hashes of the requests that were logged without an answer.
    models
        Number of requests by model.
    unknown
        Number of requests that have an unknown key, by key.
    choices
        Number of records that can be read in two ways, by the way that was chosen.
    assumed
        A text that says what was inferred from the lines, because the format does not define it.
    """

    strict: bool = False
    longest_answer: int | None = None
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
    unanswered: set[int] = field(default_factory=set)
    left_out: dict[str, int] = field(default_factory=dict)
    models: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    choices: dict[str, int] = field(default_factory=dict)
    first: list[TraceError] = field(default_factory=list)
    keep: int = 10

    def add(self, file: str, line: int, reason: str) -> None:
        """Count a malformed line.

        Raises TraceError if `strict`. After `_HOPELESS` malformed lines, also raises the TraceError
        of `check` if fewer requests than malformed lines were read.
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

    def choose(self, what: str) -> None:
        """Count a record that can also be read in another way."""
        self.choices[what] = self.choices.get(what, 0) + 1

    def check(self, file: str) -> None:
        """Raise TraceError if more than `MOST_MALFORMED` of the lines are malformed."""
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
    """Requests in order of arrival. `stream` reads them one by one, and works only once.

    name: name of the file or generator. format: one of `formats.FORMATS`, or "generated". errors:
    filled while `stream` reads. requests: number of requests, to show progress; None if unknown.
    """

    name: str
    format: str
    stream: Iterable[TraceRequest]
    errors: TraceErrors
    requests: int | None = None

    def first(
        self, most: int | None = None, progress: Progress = no_progress
    ) -> list[TraceRequest]:
        """Return the first `most` requests in order of arrival. None: return all.

        Raises TraceError if more than `MOST_MALFORMED` of the lines are malformed.
        """
        found: list[TraceRequest] = []
        for request in islice(self.stream, most):
            found.append(request)
            progress("reading", len(found), most or self.requests or len(found))
        self.errors.check(self.name)
        return found
