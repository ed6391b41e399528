"""Traces from files: which format a file has, its lines as requests, in order of arrival.

One function per format makes a request of a line. Nothing is held in memory but the lines that may
still have to be put in order, so a trace may have any length. Only SGLang's request dumps, which
are pickles (`request_dump.py`), are held as a whole.

========== ======================================================================================
mooncake   JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`: one id per
           block of 512 prompt tokens. Equal ids mean equal tokens. Files that are written here
           also carry `segments`, pairs of content and length, which keep prefixes that end within
           a block; other programs ignore the key.
tokens     JSON lines: `timestamp` (s), `input_ids`, `output_length`.
openai     JSON lines: requests as OpenAI's API takes them (`messages` or `prompt`), with a time
           and the length of the answer. Text counts one token per 4 bytes.
burstgpt   CSV: `Timestamp` (s), `Request tokens`, `Response tokens`. Prompts share nothing.
azure      CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Prompts share nothing.
========== ======================================================================================

A time is a number or an ISO 8601 text in every format.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import heapq
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from sglang_pat.workload.request_dump import dump_files, read_dump
from sglang_pat.workload.trace import (
    Prompt,
    Segment,
    TokenPrompt,
    Trace,
    TraceError,
    TraceErrors,
    TraceRequest,
    prompt_length,
    text_tokens,
)

# Requests by which a line may come later than its arrival says: more would have to be held in
# memory. A log written by several threads needs some.
REORDER_WINDOW = 1024
BLOCK_TOKENS = 512  # of mooncake

_GZIP_MAGIC, _ZSTD_MAGIC, _PICKLE_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x80"
_DETECTION_LINES = 20
# Lines of larger files are not counted ahead: up to here it takes a second or two.
_COUNT_BYTES = 4 << 30
_CHUNK_BYTES = 1 << 20


class _Record(NamedTuple):
    """A request as it lies in a file. Its arrival is by the file's clock."""

    file: str
    line: int
    request: TraceRequest


def open_trace(path: Path, format: str = "auto", *, strict: bool = False) -> Trace:
    """The trace in a file (plain, gzip or zstd), or in a folder of SGLang's request dumps.

    Arrivals count from the first request. Requests that are out of order by up to `REORDER_WINDOW`
    requests are put in order; later ones are malformed lines. A malformed line is skipped and
    counted. The stream can be read once; it raises TraceError where the trace holds no request at
    all, and where compressed data is damaged.

    Parameters
    ----------
    path
        A file or a folder. A pipe is refused: it cannot be read twice.
    format
        One of `FORMATS`, or "auto": the first lines decide.
    strict
        Raise the first malformed line as TraceError.

    Raises
    ------
    ValueError
        The file is missing, empty, or of no known format. The last case lists what was found.
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
    stream = _stream(path, format, errors)
    return Trace(path.name, format, stream, errors, requests=_count_lines(path, format))


# --- one line, one request: JSON ---


def _seconds(value: object) -> float:
    """Return a time in seconds: a number as it is, an ISO 8601 text since 1970.

    A text that names no zone is in UTC. ValueError for anything else.
    """
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            try:
                moment = datetime.fromisoformat(value.strip())
            except ValueError:
                raise ValueError(f"{value!r} is no time: a number or ISO 8601 is needed") from None
            moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
            number = moment.timestamp()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ValueError(f"{value!r} is no time: a number or ISO 8601 is needed")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r} is no time: a number from 0 or ISO 8601 is needed")
    return number


_Count = Annotated[int, msgspec.Meta(ge=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _MooncakeLine(msgspec.Struct):
    timestamp: float | str
    input_length: _Count
    output_length: _Count
    hash_ids: list[int]
    segments: list[tuple[int, _Count]] | None = None


class _TokensLine(msgspec.Struct):
    timestamp: float | str
    input_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    output_length: _Count


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode
_decode_tokens = msgspec.json.Decoder(_TokensLine).decode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


def _parse_mooncake(line: bytes, _errors: TraceErrors) -> TraceRequest:
    fields = _decode_mooncake(line)
    arrival = _seconds(fields.timestamp)
    if not isinstance(fields.timestamp, str):
        arrival /= 1000
    if fields.segments is None:
        return TraceRequest(arrival, _prompt_of_blocks(fields), fields.output_length)
    prompt = tuple(Segment(content, length) for content, length in fields.segments)
    if prompt_length(prompt) != fields.input_length:
        raise ValueError(
            f"segments of {prompt_length(prompt)} tokens, but input_length is {fields.input_length}"
        )
    return TraceRequest(arrival, prompt, fields.output_length)


def _prompt_of_blocks(fields: _MooncakeLine) -> Prompt:
    num_blocks = -(-fields.input_length // BLOCK_TOKENS)
    if len(fields.hash_ids) != num_blocks:
        raise ValueError(
            f"{len(fields.hash_ids)} hash_ids, but input_length {fields.input_length} is "
            f"{num_blocks} blocks of {BLOCK_TOKENS} tokens"
        )
    last = fields.input_length - (num_blocks - 1) * BLOCK_TOKENS
    whole = (Segment(content, BLOCK_TOKENS) for content in fields.hash_ids[:-1])
    return (*whole, Segment(fields.hash_ids[-1], last))


def _parse_tokens(line: bytes, _errors: TraceErrors) -> TraceRequest:
    fields = _decode_tokens(line)
    prompt = TokenPrompt(np.array(fields.input_ids, dtype=np.int64))
    return TraceRequest(_seconds(fields.timestamp), prompt, fields.output_length)


_OPENAI_TIMES = ("timestamp", "created", "created_at", "time", "start_time")
_OPENAI_LIMITS = ("max_completion_tokens", "max_tokens")


def _parse_openai(line: bytes, errors: TraceErrors) -> TraceRequest:
    """A request to `/v1/chat/completions` or `/v1/completions`, as logs and batch files keep it.

    The request may lie in `request` or `body`, the answer in `response`, itself with a `body`.
    """
    record = _decode_object(line)
    asked = _nested(record, "request", "body")
    answer = _nested(record, "response", "body") if "response" in record else record
    times = (part[key] for part in (record, asked, answer) for key in _OPENAI_TIMES if key in part)
    time = next(times, None)
    if time is None:
        raise ValueError(f"no time: one of {', '.join(_OPENAI_TIMES)} is needed")
    output_length = _openai_output(asked, answer)
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        tokens = np.array(prompt, dtype=np.int64)
    else:
        tokens = text_tokens(_openai_text(asked))
        errors.estimated += 1
    return TraceRequest(_seconds(time), TokenPrompt(tokens), output_length)


def _nested(record: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """The object below these keys, as far as they are there."""
    for key in keys:
        inner = record.get(key)
        record = inner if isinstance(inner, dict) else record
    return record


def _openai_text(asked: Mapping[str, Any]) -> str:
    """The prompt as one text. A chat template looks much the same in the prefix it shares."""
    if isinstance(asked.get("prompt"), str) and asked["prompt"]:
        return str(asked["prompt"])
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("neither messages nor a prompt")
    # Tools come first in every chat template.
    parts = [json.dumps(asked["tools"])] if asked.get("tools") else []
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"a message is no object: {message!r}")
        content = message.get("content")
        if not isinstance(content, str):
            content = "" if content is None else json.dumps(content)
        calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"<|{message.get('role', '')}|>\n{content}{calls}")
    return "\n".join(parts)


def _openai_output(asked: Mapping[str, Any], answer: Mapping[str, Any]) -> int:
    """Tokens of the answer: as counted, else by its text, else as many as were allowed."""
    usage = answer.get("usage")
    length = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if length is None:
        texts = [_choice_text(choice) for choice in answer.get("choices") or ()]
        length = len(text_tokens("".join(texts))) if any(texts) else None
    if length is None:
        length = next((asked[key] for key in _OPENAI_LIMITS if asked.get(key)), None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"the answer has {length!r} tokens; usage.completion_tokens, choices or "
            f"{' or '.join(_OPENAI_LIMITS)} must say at least 1"
        )
    return length


def _choice_text(choice: object) -> str:
    if not isinstance(choice, dict):
        return ""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


# --- one row, one request: CSV with lengths only ---


class _Columns(NamedTuple):
    """The columns that are read, by their names in the header."""

    time: str
    input_length: str
    output_length: str


_CSV_COLUMNS = {
    "burstgpt": _Columns("Timestamp", "Request tokens", "Response tokens"),
    "azure": _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}
_LINE_PARSERS: dict[str, Callable[[bytes, TraceErrors], TraceRequest]] = {
    "mooncake": _parse_mooncake,
    "tokens": _parse_tokens,
    "openai": _parse_openai,
}
FORMATS = (*_LINE_PARSERS, *_CSV_COLUMNS, "sglang-dump")


def _read_rows(
    lines: Iterable[str], file: str, columns: _Columns, errors: TraceErrors
) -> Iterator[_Record]:
    """The rows of a CSV file. ValueError if a column is missing.

    A row without generated tokens is a request that failed: it counts in `errors.failed`.
    """
    rows = csv.DictReader(lines)
    try:
        header = rows.fieldnames or ()
    except csv.Error as error:
        raise ValueError(f"{file}: no CSV: {error}") from None
    missing = [name for name in columns if name not in header]
    if missing:
        raise ValueError(f"{file}: no column {missing[0]!r}; there are: {', '.join(header)}")
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return
            request = _parse_row(row, columns, content=rows.line_num)
        except (ValueError, csv.Error) as error:
            errors.add(file, rows.line_num, str(error))
            continue
        if request is None:
            errors.failed += 1
        else:
            yield _Record(file, rows.line_num, request)


def _parse_row(row: dict[str, str], columns: _Columns, content: int) -> TraceRequest | None:
    """The request of a row. None if it failed."""
    values = [row[name] for name in columns]
    if None in values:
        raise ValueError("fewer values than columns")
    try:
        arrival = _seconds(values[0])
    except ValueError as error:
        raise ValueError(f"{columns.time}: {error}") from None
    lengths = []
    for name, text in zip(columns[1:], values[1:], strict=True):
        try:
            lengths.append(int(text))
        except ValueError:
            raise ValueError(f"{name} is {text!r}; a whole number is needed") from None
    input_length, output_length = lengths
    if output_length == 0:
        return None
    for name, value in zip(columns[1:], (input_length, output_length), strict=True):
        if value < 1:
            raise ValueError(f"{name} is {value}; at least 1 is needed")
    return TraceRequest(arrival, (Segment(content, input_length),), output_length)


# --- a file, one record after another ---


def _stream(path: Path, format: str, errors: TraceErrors) -> Iterator[TraceRequest]:
    if format == "sglang-dump":
        # A dump is in order of completion, and so is a folder of them.
        dump = sorted(_dump_records(path, errors), key=_arrival)
        yield from _from_zero(path, errors, iter(dump))
    else:
        with _open(path) as binary:
            lines = _intact_lines(binary, path.name)
            records = _line_records(lines, path.name, format, errors)
            yield from _from_zero(path, errors, _in_order(records, errors))


def _dump_records(path: Path, errors: TraceErrors) -> Iterator[_Record]:
    for file in dump_files(path) if path.is_dir() else [path]:
        with _open(file) as binary:
            for number, request in read_dump(binary, file.name, errors):
                yield _Record(file.name, number, request)


def _line_records(
    lines: Iterator[bytes], file: str, format: str, errors: TraceErrors
) -> Iterator[_Record]:
    if format in _CSV_COLUMNS:
        # Bytes that are no text make their row malformed, not the file.
        text = (line.decode(errors="replace") for line in lines)
        yield from _read_rows(text, file, _CSV_COLUMNS[format], errors)
        return
    parse = _LINE_PARSERS[format]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = parse(line, errors)
        except (ValueError, msgspec.DecodeError) as error:
            errors.add(file, number, str(error))
        else:
            yield _Record(file, number, request)


def _arrival(record: _Record) -> float:
    return record.request.arrival


def _in_order(records: Iterator[_Record], errors: TraceErrors) -> Iterator[_Record]:
    """Sorts by arrival within `REORDER_WINDOW` requests. Equal arrivals keep the file's order."""
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
    if format == "sglang-dump" or path.stat().st_size > _COUNT_BYTES or _compression(path):
        return None
    with path.open("rb") as file:
        lines = sum(chunk.count(b"\n") for chunk in iter(partial(file.read, _CHUNK_BYTES), b""))
    return max(lines - (format in _CSV_COLUMNS), 1)


# --- which format ---


def _detect(path: Path) -> str:
    """The format of a file, by its first lines. ValueError lists the columns or keys found."""
    with _open(path) as binary:
        lines = _intact_lines(binary, path.name)
        head = [line for line, _ in zip(lines, range(_DETECTION_LINES), strict=False)]
    if not any(line.strip() for line in head):
        raise ValueError(f"{path}: the file is empty")
    if head[0].startswith(_PICKLE_MAGIC):
        return "sglang-dump"
    header = _header(head[0])
    for format, columns in _CSV_COLUMNS.items():
        if set(columns) <= set(header):
            return format
    objects = [found for found in map(_object, head) if found is not None]  # some may be malformed
    for keys in objects:
        if "hash_ids" in keys:
            return "mooncake"
        if "input_ids" in keys:
            return "tokens"
        if {"messages", "prompt"} & _nested(keys, "request", "body").keys():
            return "openai"
    if objects:
        found = f"its first JSON object has the keys {', '.join(objects[0]) or '(none)'}"
    elif len(header) > 1 and head[0].isascii():
        found = f"its columns are {', '.join(header)}"
    else:
        found = f"its first line is {head[0][:60]!r}"
    raise ValueError(
        f"{path}: no known format: {found}. Known: JSON lines with hash_ids (mooncake), input_ids "
        "(tokens), messages or prompt (openai); CSV with the columns "
        + " or ".join(f"{', '.join(columns)} ({name})" for name, columns in _CSV_COLUMNS.items())
        + "; a pickle (sglang-dump)"
    )


def _header(line: bytes) -> list[str]:
    """The columns that a first line names. None of what is no CSV."""
    try:
        return next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error:
        return []


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return _decode_object(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


# --- compression ---


def _compression(path: Path) -> str | None:
    """Compression by the first bytes of a file, whatever its name: "gzip", "zstd"; None: plain."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic.startswith(_GZIP_MAGIC):
        return "gzip"
    return "zstd" if magic == _ZSTD_MAGIC else None


def _open(path: Path) -> BinaryIO:
    compression = _compression(path)
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if compression == "zstd":
        return io.BufferedReader(_ZstdReader(path), _CHUNK_BYTES)
    return path.open("rb")


class _ZstdReader(io.RawIOBase):
    """The frames of a zstd file, decompressed. EOFError if the last one is cut short."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._decompress = _zstandard().ZstdDecompressor().decompressobj
        self._frame = self._decompress()
        self._waiting = b""  # decompressed
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


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("zstd needs the package zstandard: pip install zstandard") from error
    return zstandard


def _intact_lines(binary: BinaryIO, file: str) -> Iterator[bytes]:
    """Lines, without a byte order mark. TraceError where compressed data is damaged."""
    number = 0
    try:
        for number, line in enumerate(binary, start=1):
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(file, number + 1, f"damaged compressed data: {error}") from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # of a package that may not be there
            raise
        raise TraceError(file, number + 1, f"damaged compressed data: {error}") from error


# --- writing ---


def write_mooncake(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write requests as they come, compressed if `path` ends in .gz or .zst. Returns how many.

    Arrivals are rounded to milliseconds. ValueError if a prompt is one of known tokens: this format
    cannot hold them.
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
        return cast(BinaryIO, _zstandard().open(path, "wb"))
    return path.open("wb")


def _block_hashes(prompt: tuple[Segment, ...]) -> Iterator[int]:
    """Ids of a prompt's blocks: hashes of everything up to the end of the block.

    63 bits, so that they are integers in every language. Among 15 million blocks the chance that
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
