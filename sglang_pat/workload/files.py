"""Reads trace files, plain or compressed by gzip or zstd, as lines or as JSON in any layout."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from sglang_pat.workload.trace import TraceError

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 20
_MOST_BYTES = 2 << 30  # limit for JSON other than JSON lines, because all of it is in memory
# Keys of a message or of a part of one. A list of such objects is not a list of records.
_PART_KEYS = frozenset(("role", "content", "type", "text", "parts", "name", "cache_control"))
_BETWEEN = re.compile(r"[\s,\[\]]*")
_raw_decode = json.JSONDecoder().raw_decode


def compression(path: Path) -> str | None:
    """Return how a file is compressed, by its first bytes: "gzip", "zstd" or None."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic.startswith(_GZIP_MAGIC):
        return "gzip"
    return "zstd" if magic == _ZSTD_MAGIC else None


def open_file(path: Path) -> BinaryIO:
    """Open a file to read its decompressed bytes."""
    found = compression(path)
    if found == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if found == "zstd":
        return io.BufferedReader(_ZstdReader(path), _CHUNK_BYTES)
    return path.open("rb")


class _ZstdReader(io.RawIOBase):
    """Reads a zstd file and decompresses its frames. EOFError if the last one is incomplete."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._decompress = zstandard_package().ZstdDecompressor().decompressobj
        self._frame = self._decompress()
        self._waiting = b""  # decompressed, but not read yet
        self._is_between_frames = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            compressed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._decompress()
                self._is_between_frames = True
            compressed = compressed or self._file.read(_CHUNK_BYTES)
            if not compressed:
                if self._is_between_frames:
                    return 0
                raise EOFError("the file ends within a frame")
            self._is_between_frames = False
            self._waiting = self._frame.decompress(compressed)
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count


def zstandard_package() -> Any:
    """Return the package zstandard. If it is missing, a ValueError says how to install it."""
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("zstd needs the package zstandard: pip install zstandard") from error
    return zstandard


def intact_lines(path: Path) -> Iterator[bytes]:
    """Yield lines, without a byte order mark. TraceError if compressed data is damaged."""
    number = 0
    try:
        with open_file(path) as binary:
            for number, line in enumerate(binary, start=1):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(path.name, number + 1, f"damaged compressed data: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # by name, because zstandard may be missing
            raise
        raise TraceError(path.name, number + 1, f"damaged compressed data: {error}") from error


def json_objects(
    path: Path,
    is_record: Callable[[Mapping[str, Any]], bool],
    records_of: Callable[[Mapping[str, Any]], list[Mapping[str, Any]]],
) -> Iterator[bytes]:
    """Yield the JSON of each object in a file: an array of objects, or one object after another.

    Line breaks make no difference. Superfluous commas are skipped. If an object is not a record but
    has a list of records, or records under their ids (`records_of`), yields these records instead.
    If the file ends within an object, yields the incomplete object last.

    Raises
    ------
    TraceError
        The file is not JSON (the message has the number of the wrong object), or it is too large.
    """
    lines, size = [], 0
    for line in intact_lines(path):
        size += len(line)
        if size > _MOST_BYTES:
            raise TraceError(path.name, 1, "JSON of over 2 GB; write one object per line")
        lines.append(line)
    text = b"".join(lines).decode(errors="replace")
    place, number = _next(text, 0), 0
    while place < len(text):
        number += 1
        try:
            found, end = _raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:
            reason, at = getattr(error, "msg", "it is nested too deeply"), getattr(error, "pos", 0)
            if at >= len(text.rstrip()) - 1 or reason.startswith("Unterminated"):
                yield text[place:].encode()
                return
            raise TraceError(
                path.name, number, f"object {number:,} is not JSON: {reason}"
            ) from None
        held = (isinstance(found, Mapping) and records_of(found)) or _held(found, is_record)
        if held is None:
            yield text[place:end].encode()
        else:
            yield from (json.dumps(each).encode() for each in held)
        place = _next(text, end)


def _next(text: str, place: int) -> int:
    """Return where the next object begins. Skips spaces, commas and brackets of arrays."""
    found = _BETWEEN.match(text, place)
    return found.end() if found else place


def _held(found: object, is_record: Callable[[Mapping[str, Any]], bool]) -> list[Any] | None:
    """Return the records that an object holds in lists, or None if it is a record or has no list.

    If no object in a list is a record, returns the first list, whose objects an error can name.
    """
    if not isinstance(found, Mapping) or is_record(found):
        return None
    first: list[Any] | None = next(_lists(found), None)
    return _records_in(found, is_record) or first


def _records_in(found: Mapping[str, Any], is_record: Callable[[Any], bool]) -> list[Any]:
    """Return the first list that has a record, or the records in such lists of its objects."""
    lists = [*_lists(found)]
    for each in lists:
        if any(map(is_record, each)):
            return each
    inner = (_records_in(one, is_record) for each in lists for one in each)
    return [one for held in inner for one in held if is_record(one)]


def _lists(found: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Yield the lists of objects in an object, except those of messages or of their parts."""
    for value in found.values():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, Mapping) and not first.keys() <= _PART_KEYS:
            yield [each for each in value if isinstance(each, Mapping)]
        elif isinstance(value, Mapping):
            yield from _lists(value)
