"""Reads CSV files: traces that have only lengths, and rows as JSON objects.

A trace that has only lengths is described by the names of its three columns (`CSV_COLUMNS`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from sglang_pat.messages import listed, quoted
from sglang_pat.workload.files import intact_lines
from sglang_pat.workload.request_prompts import whole_number
from sglang_pat.workload.times import seconds
from sglang_pat.workload.trace import (
    FAILED,
    NotReplayed,
    Segment,
    TraceError,
    TraceErrors,
    TraceRequest,
)

_LONGEST_FIELD = 1 << 30  # characters of a field
_encode = msgspec.json.Encoder().encode


class Columns(NamedTuple):
    """Names of the columns that are read."""

    time: str
    input_length: str
    output_length: str


CSV_COLUMNS = {
    "burstgpt": Columns("Timestamp", "Request tokens", "Response tokens"),
    "azure": Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}


def read_rows(
    lines: Iterable[str], file: str, columns: Columns, errors: TraceErrors
) -> Iterator[tuple[int, TraceRequest]]:
    """Yield the requests of a CSV file and their lines. ValueError if a column is missing.

    A row without generated tokens is a failed request.
    """
    rows = _rows(lines)
    try:
        header = rows.fieldnames or ()
    except csv.Error as error:
        raise ValueError(f"{file}: not CSV: {error}") from None
    missing = [name for name in columns if name not in header]
    if missing:
        raise ValueError(f"{file}: no column {missing[0]!r}; there are: {listed(header)}")
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return
            request = _parse_row(row, columns, content=rows.line_num)
        except NotReplayed as what:
            errors.leave_out(str(what))
        except TraceError:  # the file is damaged
            raise
        except (ValueError, csv.Error) as error:
            errors.add(file, rows.line_num, str(error))
        else:
            errors.used += 1
            yield rows.line_num, request


def row_objects(path: Path) -> Iterator[bytes]:
    """Yield the rows of a CSV file as JSON objects."""
    rows = _rows(line.decode(errors="replace") for line in intact_lines(path))
    try:
        yield from map(_encode, rows)
    except csv.Error as error:
        raise TraceError(path.name, rows.line_num, f"not CSV: {error}") from None


def _rows(lines: Iterable[str]) -> csv.DictReader[str]:
    """Return a reader of the rows of a CSV file, whose header shows the delimiter."""
    lines = iter(lines)
    header = next(lines, "")
    csv.field_size_limit(_LONGEST_FIELD)
    return csv.DictReader(chain((header,), lines), delimiter=_delimiter(header), restkey="more")


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def _parse_row(row: dict[str, str], columns: Columns, content: int) -> TraceRequest:
    """Return the request of a row. NotReplayed if the request failed."""
    values = [row[name] for name in columns]
    if None in values:
        raise ValueError("fewer values than columns")
    try:
        arrival = seconds(values[0])
    except ValueError as error:
        raise ValueError(f"{columns.time}: {error}") from None
    lengths = []
    for name, text in zip(columns[1:], values[1:], strict=True):
        length = whole_number(text)
        if length is None:
            raise ValueError(f"{name} is {quoted(text)}; a whole number from 0 is needed")
        lengths.append(length)
    input_length, output_length = lengths
    if output_length == 0:
        raise NotReplayed(FAILED)
    if input_length == 0:
        raise ValueError(f"{columns.input_length} is 0; at least 1 is needed")
    return TraceRequest(arrival, (Segment(content, input_length),), output_length)


def header_of(line: bytes) -> list[str]:
    """Return the columns that a first line names, or [] if it is not CSV."""
    try:
        text = line.decode(errors="replace")
        return next(csv.reader([text], delimiter=_delimiter(text)), [])
    except csv.Error:
        return []
