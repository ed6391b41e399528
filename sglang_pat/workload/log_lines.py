"""Finds the JSON object in a line of a log, which may have a time and other text before it."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

# Matches a line of text, as a server logs it.
_TEXT_LINE = re.compile(rb"\[?(?:\d{4}-\d\d-\d\d[T ]|(?:DEBUG|INFO|WARN|WARNING|ERROR)\b)")
# Matches the time before the JSON of a line.
_PREFIX_TIME = re.compile(
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    rb"|\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}"
)
_LONGEST_PREFIX = 300  # bytes before the JSON
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode


def decoded(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a log line, which may have a time and other text before it."""
    part, before = json_part(line)
    try:
        found = _decode_object(part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lenient = _lenient(part)
        if lenient is None:
            raise ValueError(str(error)) from None
        found = lenient
    if before and (time := _PREFIX_TIME.search(before)):
        found.setdefault("logtime", time[0].decode().replace(",", "."))
    return found


def _lenient(part: bytes) -> dict[str, Any] | None:
    """Return the object of a line that only Python's JSON parser accepts, for example with NaN."""
    try:
        found = json.loads(part.decode(errors="replace"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def is_text(line: bytes, *, of_server: bool = False) -> bool:
    """Return True for a line of text, as a server logs it between its requests.

    of_server: the file is the output of a server, so every line without a JSON object is text.
    """
    has_json = b'{"' in line[:_LONGEST_PREFIX]
    return not has_json and (of_server or _TEXT_LINE.match(line) is not None)


def json_part(line: bytes) -> tuple[bytes, bytes]:
    """Return (JSON object, text before it) of a line, or (line, b"") if it has no such text."""
    line = line.strip().rstrip(b",")
    begin = line.find(b"{", 0, _LONGEST_PREFIX)
    return (line[begin:], line[:begin]) if begin > 0 else (line, b"")


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a log line, or None if there is none."""
    try:
        return decoded(line)
    except (ValueError, RecursionError):
        return None
