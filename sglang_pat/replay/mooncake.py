"""Mooncake's trace format, read and written: one JSON object a line.

A format of `readers.py`. A line has `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`: one id per 512-token block of the prompt, the last block being as long as what is left.
Equal ids mean equal tokens.

Prefixes that end inside a block are lost that way, so traces that are written here also carry
`segments`, pairs of content and length, which reading prefers; other programs ignore the key.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from sglang_pat.replay.trace import Prompt, Segment, TokenPrompt, TraceRequest, prompt_length

BLOCK_TOKENS = 512

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    output_length: _Count
    hash_ids: list[int]
    segments: list[tuple[int, _Count]] | None = None


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()


def parse_line(line: bytes) -> TraceRequest:
    """The request of one line. ValueError or msgspec.DecodeError says what is wrong with it."""
    fields = _decoder.decode(line)
    if fields.segments is None:
        prompt = _prompt_of_blocks(fields)
    else:
        prompt = tuple(Segment(content, length) for content, length in fields.segments)
        if prompt_length(prompt) != fields.input_length:
            raise ValueError(
                f"segments of {prompt_length(prompt)} tokens, but input_length is "
                f"{fields.input_length}"
            )
    return TraceRequest(fields.timestamp / 1000, prompt, fields.output_length)


def _prompt_of_blocks(fields: _Line) -> Prompt:
    num_blocks = -(-fields.input_length // BLOCK_TOKENS)
    if len(fields.hash_ids) != num_blocks:
        raise ValueError(
            f"{len(fields.hash_ids)} hash_ids, but input_length {fields.input_length} is "
            f"{num_blocks} blocks of {BLOCK_TOKENS} tokens"
        )
    last = fields.input_length - (num_blocks - 1) * BLOCK_TOKENS
    whole = (Segment(content, BLOCK_TOKENS) for content in fields.hash_ids[:-1])
    return (*whole, Segment(fields.hash_ids[-1], last))


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests as they come, compressed if `path` ends in .gz. Returns how many.

    Arrivals are rounded to milliseconds. ValueError if a prompt is one of known tokens: this format
    cannot hold them.
    """
    count = 0
    with path.open("wb") if path.suffix != ".gz" else gzip.open(path, "wb") as file:
        for count, request in enumerate(requests, start=1):
            if isinstance(request.prompt, TokenPrompt):
                raise ValueError(f"request {count} has token ids, which this format cannot hold")
            timestamp = round(request.arrival * 1000)
            line = {
                "timestamp": timestamp,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(_block_hashes(request.prompt)),
                "segments": request.prompt,
            }
            file.write(_encoder.encode(line) + b"\n")
    return count


def _block_hashes(prompt: tuple[Segment, ...]) -> Iterator[int]:
    """Ids of a prompt's blocks: hashes of everything up to the end of the block.

    63 bits, so that they are integers in every language: among 15 million blocks the chance that
    any two collide is 1 in 80,000. Nothing is remembered, so writing needs no memory.
    """
    digest = hashlib.blake2b(digest_size=8)
    room = BLOCK_TOKENS
    for content, length in prompt:
        begin = 0
        while begin < length:
            end = min(length, begin + room)
            digest.update(b"%d:%d:%d;" % (content, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield _hash(digest)
                room = BLOCK_TOKENS
    if room < BLOCK_TOKENS:
        yield _hash(digest)


def _hash(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little") >> 1
