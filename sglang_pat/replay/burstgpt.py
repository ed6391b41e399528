"""BurstGPT's trace format: CSV, one request a row, lengths only.

A format of `readers.py`. Columns are found by name, since the releases differ: `Timestamp` (in
seconds), `Request tokens` and `Response tokens` are used; `Model`, `Total tokens`, `Log Type`,
`Session ID` and `Elapsed time` are not. Nothing is known of the prompts, so they share nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator

from sglang_pat.replay.trace import Segment, TraceErrors, TraceRequest

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_rows(
    lines: Iterable[str], file: str, errors: TraceErrors
) -> Iterator[tuple[int, TraceRequest]]:
    """The line number and request of every row. ValueError if a column is missing.

    A row without response tokens is a request that failed: it counts in `errors.failed`.
    """
    rows = csv.DictReader(lines)
    header = rows.fieldnames or ()
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ValueError(f"{file}: no column {missing[0]!r}; there are: {', '.join(header)}")
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return
            request = _parse_row(row, content=rows.line_num)
        except (ValueError, csv.Error) as error:
            errors.add(file, rows.line_num, str(error))
            continue
        if request is None:
            errors.failed += 1
        else:
            yield rows.line_num, request


def _parse_row(row: dict[str, str], content: int) -> TraceRequest | None:
    """The request of a row, None if it failed."""
    values = [row[name] for name in COLUMNS]
    if None in values:
        raise ValueError("fewer values than columns")
    arrival = float(values[0])
    input_length, output_length = int(values[1]), int(values[2])
    if not (math.isfinite(arrival) and arrival >= 0):
        raise ValueError(f"Timestamp is {values[0]!r}; a number of seconds from 0 is needed")
    if output_length == 0:
        return None
    for name, value in zip(COLUMNS[1:], (input_length, output_length), strict=True):
        if value < 1:
            raise ValueError(f"{name} is {value}; at least 1 is needed")
    return TraceRequest(arrival, (Segment(content, input_length),), output_length)
