"""Traces from files: which format it is, line by line into requests, in order of arrival.

First stage of the replay, beside `generators.py`. Nothing is held but the lines that may still have
to be put in order, so a trace may be of any length; only SGLang's request dumps, being pickles, are
held in memory as a whole.
"""

from __future__ import annotations

import gzip
import heapq
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec

from sglang_pat.replay import burstgpt, mooncake, token_lines
from sglang_pat.replay.request_dump import Tokenize, dump_files, read_dump
from sglang_pat.replay.trace import Trace, TraceError, TraceErrors, TraceRequest

FORMATS = ("mooncake", "burstgpt", "sglang-dump", "tokens")

# How many requests later a line may come than its arrival says. More would have to be held in
# memory; whoever logs from several threads needs some.
REORDER_WINDOW = 1024

_GZIP_MAGIC = b"\x1f\x8b"
_PICKLE_MAGIC = b"\x80"
_DETECTION_LINES = 20
# Lines of larger files are not counted ahead; up to here it takes a second or two.
_COUNT_BYTES = 4 << 30


class _Record(NamedTuple):
    """A request as it lies in a file; its arrival by the file's clock."""

    file: str
    line: int
    request: TraceRequest


def open_trace(
    path: Path,
    format: str = "auto",
    *,
    strict: bool = False,
    tokenize: Tokenize | None = None,
) -> Trace:
    """The trace in a file, plain or gzip, or in a folder of SGLang's request dumps.

    format: one of `FORMATS`, or "auto" to look at the first lines. tokenize: for request dumps that
    hold text. ValueError if the file is missing, empty or of no format known.

    The stream is read once. Arrivals count from the first request. Requests that are out of order
    by up to `REORDER_WINDOW` requests are put in order, later ones are malformed lines. A malformed
    line is skipped and counted, or raised if `strict`; a trace without a single request, and a file
    that ends within gzip data, raise TraceError. The number of requests is that of lines.
    """
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format {format!r}; allowed: auto, {', '.join(FORMATS)}")
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: neither a file nor a folder; a pipe cannot be read twice")
    if format == "auto":
        format = "sglang-dump" if path.is_dir() else _detect(path)
    elif path.is_dir() and format != "sglang-dump":
        raise ValueError(f"{path}: a folder; only the format sglang-dump is read from folders")
    errors = TraceErrors(strict=strict)
    stream = _stream(path, format, errors, tokenize)
    return Trace(path.name, format, stream, errors, requests=_count_lines(path, format))


def _stream(
    path: Path, format: str, errors: TraceErrors, tokenize: Tokenize | None
) -> Iterator[TraceRequest]:
    if format == "sglang-dump":
        # A dump is in order of completion, and so is a folder of them.
        dump = sorted(_dump_records(path, errors, tokenize), key=_arrival)
        yield from _from_zero(path, errors, iter(dump))
    else:
        with _open(path) as binary:
            lines = _intact_lines(binary, path.name)
            records = _line_records(lines, path.name, format, errors)
            yield from _from_zero(path, errors, _in_order(records, errors))


def _dump_records(path: Path, errors: TraceErrors, tokenize: Tokenize | None) -> Iterator[_Record]:
    for file in dump_files(path) if path.is_dir() else [path]:
        with _open(file) as binary:
            for number, request in read_dump(binary, file.name, errors, tokenize):
                yield _Record(file.name, number, request)


def _line_records(
    lines: Iterator[bytes], file: str, format: str, errors: TraceErrors
) -> Iterator[_Record]:
    if format == "burstgpt":
        # Bytes that are no text make their row malformed, not the file.
        text = (line.decode(errors="replace") for line in lines)
        for number, request in burstgpt.read_rows(text, file, errors):
            yield _Record(file, number, request)
        return
    parse = mooncake.parse_line if format == "mooncake" else token_lines.parse_line
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = parse(line)
        except (ValueError, msgspec.DecodeError) as error:
            errors.add(file, number, str(error))
        else:
            yield _Record(file, number, request)


def _intact_lines(binary: BinaryIO, file: str) -> Iterator[bytes]:
    """Lines, without a byte order mark. TraceError where compressed data is damaged."""
    number = 0
    try:
        for number, line in enumerate(binary, start=1):
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(file, number + 1, f"damaged gzip data: {error}") from error


def _arrival(record: _Record) -> float:
    return record.request.arrival


def _in_order(records: Iterator[_Record], errors: TraceErrors) -> Iterator[_Record]:
    """Sorts by arrival within `REORDER_WINDOW` requests; equal arrivals keep the file's order."""
    waiting: list[tuple[float, int, _Record]] = []
    latest = 0.0
    for record in records:
        arrival = record.request.arrival
        if arrival < latest:
            errors.add(
                record.file,
                record.line,
                f"arrived at {arrival:g} s, but requests of {latest:g} s came more than "
                f"{REORDER_WINDOW} requests before; sort the trace by time",
            )
            continue
        heapq.heappush(waiting, (arrival, record.line, record))
        if len(waiting) > REORDER_WINDOW:
            latest, _, first = heapq.heappop(waiting)
            yield first
    while waiting:
        yield heapq.heappop(waiting)[2]


def _from_zero(
    path: Path, errors: TraceErrors, records: Iterator[_Record]
) -> Iterator[TraceRequest]:
    """Counts arrivals from the first, to the microsecond. TraceError if there is none."""
    first = next(records, None)
    if first is None:
        found = f"{errors.count} malformed lines, {errors.failed} failed requests"
        why = f"; first: {errors.first[0]}" if errors.first else ""
        raise TraceError(path.name, 0, f"not a single request ({found}){why}")
    begin = first.request.arrival
    yield first.request._replace(arrival=0.0)
    for _, _, request in records:
        yield request._replace(arrival=round(request.arrival - begin, 6))


def _count_lines(path: Path, format: str) -> int | None:
    """About how many requests a file has, for progress. None where that would take long."""
    if format == "sglang-dump" or path.stat().st_size > _COUNT_BYTES or _is_gzip(path):
        return None
    with path.open("rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(partial(file.read, 1 << 20), b""))
    return max(lines - (format == "burstgpt"), 1)


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == _GZIP_MAGIC


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if _is_gzip(path) else path.open("rb")


def _detect(path: Path) -> str:
    """The format of a file, by its first lines."""
    with _open(path) as binary:
        lines = _intact_lines(binary, path.name)
        head = [line for line, _ in zip(lines, range(_DETECTION_LINES), strict=False)]
    if not any(line.strip() for line in head):
        raise ValueError(f"{path}: the file is empty")
    if head[0].startswith(_PICKLE_MAGIC):
        return "sglang-dump"
    if all(name.encode() in head[0] for name in burstgpt.COLUMNS):
        return "burstgpt"
    for line in head:  # the first ones may be malformed
        try:
            keys = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(keys, dict) and "hash_ids" in keys:
            return "mooncake"
        if isinstance(keys, dict) and "input_ids" in keys:
            return "tokens"
    raise ValueError(
        f"{path}: no format known: neither JSON lines with hash_ids (mooncake) or input_ids "
        "(tokens), nor CSV with a column 'Request tokens' (burstgpt), nor a pickle (sglang-dump)"
    )
