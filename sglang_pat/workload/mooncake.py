"""Reads and writes traces in the format of Mooncake: one JSON object per request.

A line has the ids of its prompt's blocks (`hash_ids`). Equal ids mean equal tokens. The size of a
block (512, 16, ...) and the unit of the times (ms or s) are inferred from the lines. Files that
this module writes also have `segments`, pairs of content and length, by which a shared prefix may
end within a block. Other programs ignore this key.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from sglang_pat.workload.files import zstandard_package
from sglang_pat.workload.log_lines import json_object, json_part
from sglang_pat.workload.request_prompts import whole_number
from sglang_pat.workload.times import number_of, seconds
from sglang_pat.workload.trace import (
    FAILED,
    NotReplayed,
    Prompt,
    Segment,
    TokenPrompt,
    TraceErrors,
    TraceRequest,
    prompt_length,
)

BLOCK_TOKENS = 512  # the default, if the lines show no other size
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _MooncakeLine(msgspec.Struct):
    timestamp: float | str
    input_length: _Count
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]
    segments: list[tuple[int, _Count]] | None = None


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine, strict=False).decode  # accepts 600.0 for 600
_encode = msgspec.json.Encoder().encode
_SECONDS_KEYS = {"chat_id", "parent_chat_id", "turn"}  # if these occur, times are in seconds


@dataclass(slots=True)
class MooncakeReader:
    """Reads lines whose prompts are blocks. unit: unit of the times."""

    block: int = BLOCK_TOKENS
    unit: str = "ms"

    @classmethod
    def of_lines(cls, lines: Iterable[bytes], errors: TraceErrors) -> MooncakeReader:
        """Return the reader for a file that begins with these lines."""
        found = [each for line in lines if (each := json_object(line)) is not None]
        reader = cls(_block_tokens(found))
        times = [each.get("timestamp") for each in found]
        numbers = [number for each in times if (number := number_of(each)) is not None]
        is_seconds = any(_SECONDS_KEYS & each.keys() for each in found) or any(
            each % 1 for each in numbers if math.isfinite(each)
        )
        if numbers and (is_seconds or 9e8 <= numbers[0] <= 4.2e9):
            reader.unit = "s"
        if (reader.block, reader.unit) != (BLOCK_TOKENS, "ms"):
            errors.assumed = f"blocks of {reader.block:,} tokens, times in {reader.unit}"
        return reader

    def read(self, line: bytes) -> list[TraceRequest]:
        """Return the request of a line."""
        fields = _decode_mooncake(json_part(line)[0])
        arrival = seconds(fields.timestamp, default=self.unit)
        if fields.segments is None:
            prompt = self._of_blocks(fields)
        else:
            prompt = tuple(Segment(content, length) for content, length in fields.segments)
            if prompt_length(prompt) != fields.input_length:
                raise ValueError(
                    f"segments of {prompt_length(prompt)} tokens, but input_length is "
                    f"{fields.input_length}"
                )
        if fields.output_length == 0:
            raise NotReplayed(FAILED)
        return [TraceRequest(arrival, prompt, fields.output_length)]

    def _of_blocks(self, fields: _MooncakeLine) -> Prompt:
        num_blocks = -(-fields.input_length // self.block)
        if len(fields.hash_ids) != num_blocks:
            raise ValueError(
                f"{len(fields.hash_ids)} hash_ids, but input_length {fields.input_length} is "
                f"{num_blocks} blocks of {self.block} tokens"
            )
        last = fields.input_length - (num_blocks - 1) * self.block
        whole = (Segment(content, self.block) for content in fields.hash_ids[:-1])
        return (*whole, Segment(fields.hash_ids[-1], last))


def _block_tokens(lines: Iterable[Mapping[str, Any]]) -> int:
    """Return the block size that agrees with most lines; 512 if no line shows a size."""
    sizes = [
        (length, len(each["hash_ids"]))
        for each in lines
        if (length := whole_number(each.get("input_length")))
        and isinstance(each.get("hash_ids"), list)
        and each["hash_ids"]
        and "segments" not in each
    ]
    powers = (BLOCK_TOKENS, *(1 << power for power in range(17)))

    def agreeing(block: int) -> int:
        return sum(-(-length // block) == count for length, count in sizes)

    best = max(powers, key=agreeing)  # the first of equally good sizes
    if agreeing(best) * 2 > len(sizes):
        return best
    bounds = {-(-length // count) for length, count in sizes}
    bounds |= {(length - 1) // (count - 1) for length, count in sizes if count > 1}
    return max((best, *sorted(bounds - {0})), key=agreeing)


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests to a file, and return how many there were.

    The file is compressed if `path` ends in .gz or .zst. Arrivals are rounded to milliseconds.
    ValueError if a prompt consists of token ids, because this format has no place for them.
    """
    count = 0
    with _create(path) as file:
        for count, request in enumerate(requests, start=1):
            if isinstance(request.prompt, TokenPrompt):
                raise ValueError(f"request {count} has token ids, which this format cannot hold")
            line = {
                "timestamp": round(request.arrival * 1000),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(_block_hashes(request.prompt)),
                "segments": request.prompt,
            }
            file.write(_encode(line) + b"\n")
    return count


def _create(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "wb"))
    if path.suffix == ".zst":
        return cast(BinaryIO, zstandard_package().open(path, "wb"))
    return path.open("wb")


def _block_hashes(prompt: tuple[Segment, ...]) -> Iterator[int]:
    """Yield ids of a prompt's blocks, each a hash of all tokens up to the end of the block.

    The hashes have 63 bits, so that they fit into a signed 64-bit integer. Among 15 million blocks,
    the probability of a collision is 1 in 80,000. No id is kept, so memory does not limit the file.
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
