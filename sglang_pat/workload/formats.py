"""Reads traces from files: finds the format, and returns requests in order of arrival.

A function for each format turns records into requests. Only lines that may still have to be
reordered are in memory, so a trace of JSON lines or CSV may have any length. SGLang's request
dumps, which are pickles (`request_dump.py`), and JSON other than JSON lines are read into memory as
a whole.

========== ======================================================================================
mooncake   JSON: `timestamp`, `input_length`, `output_length`, `hash_ids`: one id per block of
           prompt tokens (`mooncake.py`).
tokens     JSON: `timestamp`, `input_ids`, `output_length`.
openai     JSON: requests to the chat, completions, messages and responses APIs, to SGLang's
           /generate and to Ollama's API, as clients, gateways and SGLang log them
           (`request_log.py`). Also CSV, with the keys of a record as columns.
burstgpt   CSV: `Timestamp`, `Request tokens`, `Response tokens`. Prompts share nothing.
azure      CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Prompts share nothing.
========== ======================================================================================

In every format, a time is a number or an ISO 8601 text (`times.py`). JSON may be lines, an array,
or objects over several lines.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec

from sglang_pat.messages import listed, quoted
from sglang_pat.workload.csv_rows import CSV_COLUMNS, header_of, read_rows, row_objects
from sglang_pat.workload.files import compression, intact_lines, json_objects, open_file
from sglang_pat.workload.log_lines import decoded, is_text, json_object
from sglang_pat.workload.mooncake import MooncakeReader
from sglang_pat.workload.request_dump import dump_files, read_dump
from sglang_pat.workload.request_log import has_time, is_request, read_record, records_of
from sglang_pat.workload.request_prompts import LoggedRequest, bytes_per_token, to_request
from sglang_pat.workload.trace import NotReplayed, Trace, TraceError, TraceErrors, TraceRequest

# Up to this many requests are kept in memory to sort them by arrival, because a log that several
# threads write is a little out of order.
REORDER_WINDOW = 1024
FORMATS = ("mooncake", "tokens", "openai", *CSV_COLUMNS, "sglang-dump")

# First bytes of files that hold no text -> what they are.
_NO_TEXT = (
    (b"PK\x03\x04", "a zip archive"),
    (b"BZh", "compressed by bzip2"),
    (b"\xfd7zXZ", "compressed by xz"),
    (b"\x04\x22M\x18", "compressed by lz4"),
    (b"Obj\x01", "an Avro file"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\x89PNG", "a picture"),
    (b"%PDF", "a PDF"),
)
_PICKLE_MAGIC = b"\x80"
# Docker and Kubernetes' runtimes write 16 KB per line. The log of a whole line ends with \n or F.
_SPLIT_LINE = re.compile(rb'\S+ std(?:out|err) P |\{"log": ?"[^\n]*(?<!\\n)", ?"stream"')
_PYTHON_DICT = re.compile(rb"[\s\[]*\{\s*'")
_DETECTION_LINES = 20
_OUTPUT_LINES = 100_000  # of a server's output, searched for the first request
_LONGEST_BEGIN = 300  # bytes of a line until the event of SGLang's request log
# Block size, unit of times and bytes per token are inferred from the first _SAMPLE records.
_SAMPLE = 256
# Size of the largest file whose lines are counted in advance, which takes up to two seconds.
_COUNT_BYTES = 4 << 30
_CHUNK_BYTES = 1 << 20
# Matches a record with an id. Shippers of logs may deliver such a record twice.
_WITH_ID = re.compile(rb'"(?:\w*_)?r?id" ?:', re.IGNORECASE)
_NO_RECORD = (b"", b"[", b"]", b",")  # lines of an array that are not records
_LONGEST = 10 * 366 * 86_400.0  # seconds that a trace may last


class _Record(NamedTuple):
    """A request and its place in a file. The request's arrival is the time in the file."""

    file: str
    line: int
    request: TraceRequest | LoggedRequest


def open_trace(
    path: Path,
    format: str = "auto",
    *,
    strict: bool = False,
    untimed: bool = False,
    longest_answer: int | None = None,
) -> Trace:
    """Read the trace in a file (plain, gzip, zstd) or in a folder of SGLang's request dumps.

    Arrivals count from the first request. Requests that are out of order by up to `REORDER_WINDOW`
    requests are sorted. A request that is further out of order counts as a malformed line.
    Malformed lines are skipped and counted. The trace's `stream` can be read once. While it is
    read, it raises TraceError if there is no request at all, or if compressed data is damaged.

    Parameters
    ----------
    path
        A file or a folder. A pipe is refused, because it cannot be read twice.
    format
        One of `FORMATS`, or "auto": the first lines decide.
    strict
        Raise TraceError for the first malformed line.
    untimed
        Accept records of API requests without times. If the first record has no time, one record
        is assumed to arrive each second.
    longest_answer
        Length of an answer if the log gives neither its length nor a limit.

    Raises
    ------
    ValueError
        The file is missing, empty, or in an unknown format. If the format is unknown, the message
        lists the keys or columns found.
    """
    if format not in ("auto", *FORMATS):
        raise ValueError(f"format {quoted(format)}; allowed: auto, {', '.join(FORMATS)}")
    if path == Path("-"):
        raise ValueError("-: standard input cannot be read twice; name a file")
    try:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file")
    except OSError as error:  # for example if the name is too long
        raise ValueError(f"{path}: {error.strerror}") from None
    if not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path}: neither a file nor a folder; a pipe cannot be read twice")
    errors = TraceErrors(strict=strict, longest_answer=longest_answer)
    if path.is_dir():
        if format not in ("auto", "sglang-dump"):
            raise ValueError(f"{path}: a folder; only the format sglang-dump is read from folders")
        source = _Source(path, "sglang-dump")
    else:
        source = _detected(path, format)
    source.untimed = untimed
    return Trace(path.name, source.format, source.stream(errors), errors, source.count())


@dataclass(slots=True)
class _Source:
    """A file and its format.

    Attributes
    ----------
    layout
        How records are separated: "lines", "rows" of a CSV file, or "objects" of JSON in any
        layout.
    of_server
        Whether the file is the output of a server, which logs requests among other lines.
    untimed
        Whether records may lack a time.
    """

    path: Path
    format: str
    layout: Literal["lines", "rows", "objects"] = "lines"
    of_server: bool = False
    untimed: bool = False

    def stream(self, errors: TraceErrors) -> Iterator[TraceRequest]:
        if self.format == "sglang-dump":
            # A dump, like a folder of dumps, has the requests in order of completion.
            records = sorted(_with_tokens(self._dumped(errors), errors), key=_arrival)
            yield from _from_zero(self.path, errors, iter(records))
        else:
            found = _with_tokens(_in_order(self._records(errors), errors), errors)
            yield from _from_zero(self.path, errors, found)

    def count(self) -> int | None:
        """Return about how many requests there are, or None if it would take long to count them."""
        path = self.path
        is_other = self.layout == "objects" or self.of_server
        if self.format == "sglang-dump" or is_other or compression(path):
            return None
        if path.stat().st_size > _COUNT_BYTES:
            return None
        with path.open("rb") as file:
            lines = sum(chunk.count(b"\n") for chunk in iter(partial(file.read, _CHUNK_BYTES), b""))
        return max(lines - (self.format in CSV_COLUMNS), 1)

    def pieces(self) -> Iterator[bytes]:
        """Yield the lines of the file, or the JSON of its objects or rows."""
        match self.layout:
            case "lines":
                return intact_lines(self.path)
            case "rows":
                return row_objects(self.path)
            case "objects":
                return json_objects(self.path, _is_record, records_of)

    def _dumped(self, errors: TraceErrors) -> Iterator[_Record]:
        for file in dump_files(self.path) if self.path.is_dir() else [self.path]:
            with open_file(file) as binary:
                for number, request in read_dump(binary, file.name, errors):
                    yield _Record(file.name, number, request)

    def _records(self, errors: TraceErrors) -> Iterator[_Record]:
        if self.format in CSV_COLUMNS:
            # Bytes that are not UTF-8 make only their row malformed.
            text = (line.decode(errors="replace") for line in self.pieces())
            rows = read_rows(text, self.path.name, CSV_COLUMNS[self.format], errors)
            yield from (_Record(self.path.name, number, request) for number, request in rows)
            return
        parse = self._parser(errors)
        number, last = 0, b""
        failure: tuple[int, str] | None = None
        for number, last in enumerate(self.pieces(), start=2 if self.layout == "rows" else 1):
            if failure is not None:
                errors.add(self.path.name, *failure)
                failure = None
            if last.strip() in _NO_RECORD:
                continue
            if is_text(last, of_server=self.of_server):
                errors.leave_out("lines of text, as a server logs them")
                continue
            try:
                requests = parse(last)
            except NotReplayed as what:
                errors.leave_out(str(what))
            except (ValueError, msgspec.DecodeError, RecursionError) as error:
                failure = number, str(error)
            else:
                errors.used += 1
                for request in requests:
                    yield _Record(self.path.name, number, request)
        if failure is None:
            return
        if errors.strict or last.endswith(b"\n") or last.rstrip().endswith(b"}"):
            errors.add(self.path.name, *failure)
        else:
            errors.is_cut = True

    def _parser(
        self, errors: TraceErrors
    ) -> Callable[[bytes], Iterable[TraceRequest | LoggedRequest]]:
        """Return the function that turns a line into requests."""
        if self.format == "mooncake":
            return MooncakeReader.of_lines(islice(self.pieces(), _SAMPLE), errors).read
        found = map(json_object, self.pieces())
        first = next((each for each in found if each is not None and is_request(each)), {})
        arrivals = itertools.count() if self.untimed and not has_time(first) else None
        seen: set[int] = set()

        def read(line: bytes) -> list[LoggedRequest]:
            if _WITH_ID.search(line):
                number = len(seen)
                seen.add(hash(line.strip()))
                if len(seen) == number:
                    raise NotReplayed("records that repeat another one")
            untimed = None if arrivals is None else float(next(arrivals))
            return read_record(decoded(line), errors, untimed=untimed)

        return read


# --- a file, one record after another ---


def _with_tokens(records: Iterator[_Record], errors: TraceErrors) -> Iterator[_Record]:
    """Turn the records' texts into tokens. The first records give the bytes per token."""
    head = list(islice(records, _SAMPLE))
    logged = [each.request for each in head if isinstance(each.request, LoggedRequest)]
    errors.bytes_per_token = bytes_per_token(logged) or errors.bytes_per_token
    for record in chain(head, records):
        request = record.request
        if isinstance(request, LoggedRequest):
            request = to_request(request, errors)
        yield record._replace(request=request)


def _arrival(record: _Record) -> float:
    return record.request.arrival


def _in_order(records: Iterator[_Record], errors: TraceErrors) -> Iterator[_Record]:
    """Sort by arrival, within `REORDER_WINDOW` requests. Equal arrivals keep the file's order.

    A file that begins with its latest requests, as databases export them, is sorted as a whole.
    """
    head = list(islice(records, REORDER_WINDOW + 1))
    records = chain(head, records)
    if len(head) > REORDER_WINDOW and head[0].request.arrival > head[-1].request.arrival:
        yield from sorted(records, key=_arrival)
        return
    waiting: list[tuple[float, int, _Record]] = []
    latest = 0.0
    for number, record in enumerate(records):
        arrival = record.request.arrival
        if arrival < latest:
            errors.used -= 1
            errors.add(
                record.file,
                record.line,
                f"arrived {latest - arrival:,.3g} s before a request that is more than "
                f"{REORDER_WINDOW} requests ahead of it; sort the trace by time",
            )
            continue
        heapq.heappush(waiting, (arrival, number, record))
        if len(waiting) > REORDER_WINDOW:
            latest, _, first = heapq.heappop(waiting)
            yield first
    while waiting:
        yield heapq.heappop(waiting)[2]


def _from_zero(
    path: Path, errors: TraceErrors, records: Iterator[_Record]
) -> Iterator[TraceRequest]:
    """Count arrivals from the first one, in whole us. TraceError if there is no request."""
    first = next(records, None)
    if first is None:
        left_out = [f"{count:,} {what}" for what, count in errors.left_out.items()]
        found = ", ".join([f"{errors.count:,} malformed lines", *left_out])
        why = f"; first: {errors.first[0]}" if errors.first else ""
        raise TraceError(path.name, 0, f"not a single request ({found}){why}")
    begin = first.request.arrival
    for file, line, request in chain([first], records):
        arrival = round(request.arrival - begin, 6)
        if arrival > _LONGEST:
            errors.used -= 1
            years = arrival / 366 / 86_400
            errors.add(file, line, f"arrived {years:,.0f} years after the first request")
            continue
        yield cast(TraceRequest, request)._replace(arrival=arrival)


# --- which format ---


def _detected(path: Path, format: str) -> _Source:
    """Find the format by a file's first lines. ValueError lists the columns or keys found."""
    head = list(islice(intact_lines(path), _DETECTION_LINES))
    first = next((line for line in head if line.strip()), None)
    if first is None:
        if format == "auto":
            raise ValueError(f"{path}: the file is empty")
        return _Source(path, format)
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path}: the text is UTF-16; write it as UTF-8")
    if first.startswith(_PICKLE_MAGIC) and format in ("auto", "sglang-dump"):
        return _Source(path, "sglang-dump")
    if format == "sglang-dump" or format in CSV_COLUMNS:
        return _Source(path, format)
    what = next((name for magic, name in _NO_TEXT if head[0].startswith(magic)), None)
    if what or head[0][257:262] == b"ustar":
        raise ValueError(f"{path}: {what or 'a tar archive'}; text, gzip and zstd are read")
    objects = [found for found in map(json_object, head) if found is not None]
    known = next((kind for found in objects if (kind := _format_of(found))), None)
    starts = first.lstrip()[:1]
    if (
        known is None
        and not _PYTHON_DICT.match(first)
        and (starts == b"{" or re.match(rb"\s*\[\s*([\[{\]]|$)", first))
    ):
        source = _Source(path, format, layout="objects")
        pieces = map(json_object, islice(source.pieces(), _DETECTION_LINES))
        inner = [found for found in pieces if found is not None]
        objects = inner if first.strip() in (b"{", b"[") else objects or inner
        known = next((kind for found in inner if (kind := _format_of(found))), None)
        if known is not None:
            return _Source(path, known if format == "auto" else format, layout="objects")
    if format != "auto":
        is_openai = format == "openai"
        of_server = is_openai and (any(map(is_text, head)) or _logs_requests(path))
        return _Source(path, format, of_server=of_server)
    header = header_of(head[0])
    for name, columns in CSV_COLUMNS.items():
        if set(columns) <= set(header):
            return _Source(path, name)
    if known is not None:
        return _Source(path, known, of_server=any(map(is_text, head)))
    if _logs_requests(path):
        return _Source(path, "openai", of_server=True)
    if len(header) > 1 and starts not in (b"{", b"["):
        source = _Source(path, "openai", layout="rows")
        rows = map(json_object, islice(source.pieces(), _DETECTION_LINES))
        if any(is_request(row) for row in rows if row):
            return source
    raise ValueError(
        f"{path}: no known format: {_description(path, head, header, objects)}. Known: JSON with "
        "hash_ids (mooncake), input_ids (tokens), messages, prompt, input or text (openai); CSV "
        "with the columns "
        + " or ".join(f"{', '.join(columns)} ({name})" for name, columns in CSV_COLUMNS.items())
        + "; a pickle (sglang-dump)"
    )


def _logs_requests(path: Path) -> bool:
    """Return True if a server's output has a line of SGLang's request log after its first lines."""
    for line in islice(intact_lines(path), _OUTPUT_LINES):
        if b'"event": "request.' in line[:_LONGEST_BEGIN] and json_object(line) is not None:
            return True
    return False


def _description(
    path: Path, head: Sequence[bytes], header: Sequence[str], objects: Sequence[dict[str, Any]]
) -> str:
    """Describe a file in no known format by its first lines, columns and JSON objects."""
    first = next(line for line in head if line.strip())
    if any(b"GenerateReqInput(" in line for line in islice(intact_lines(path), _OUTPUT_LINES)):
        return "it is SGLang's log as text: --log-requests-format json writes one that is read"
    if any(b": prompt: " in line and b"SamplingParams(" in line for line in head):
        return "it is vLLM's log as text, which has no answers: take the log of a gateway"
    if any(map(_SPLIT_LINE.match, head)):
        return "a container's runtime has split its lines: take `docker logs` or `kubectl logs`"
    if _PYTHON_DICT.match(first):
        return "its keys are in single quotes, so it is not JSON: write it by json.dumps"
    if objects:
        return f"its first JSON object has no prompt; its keys are {listed(objects[0])}"
    if len(header) > 1 and head[0].isascii() and first.lstrip()[:1] not in (b"{", b"["):
        return f"its columns are {listed(header)}"
    return f"its first line is {quoted(head[0][:60].decode(errors='replace'))}"


def _format_of(found: dict[str, Any]) -> str | None:
    """Return the format of a JSON object, or None if it is not a request in any format."""
    if "hash_ids" in found:
        return "mooncake"
    if "input_ids" in found and "sampling_params" not in found:
        return "tokens"
    if records_of(found):
        return None
    return "openai" if is_request(found) else None


def _is_record(found: Mapping[str, Any]) -> bool:
    return _format_of(dict(found)) is not None
