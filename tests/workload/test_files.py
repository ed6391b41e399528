"""Traces in files of every shape, and files too unclear for a verdict."""

from __future__ import annotations

import bz2
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sglang_pat.workload import files
from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.trace import Trace, TraceError, TraceRequest

SECRET = "private words of a user "


def chat(i: int) -> dict[str, object]:
    messages = [{"role": "user", "content": f"{SECRET * 9}{i}"}]
    return {"timestamp": i, "messages": messages, "usage": {"completion_tokens": 5}}


def blocks(i: int, size: int, **more: object) -> dict[str, object]:
    length = size * 9 - i % size
    return {"timestamp": i * 1000, "input_length": length, "output_length": 7,
            "hash_ids": [1, 2, 3, 4, *range(100 * i + 10, 100 * i + 15)], **more}  # fmt: skip


RECORDS = [chat(i) for i in range(40)]
LINES = "".join(json.dumps(each) + "\n" for each in RECORDS)
ROWS = [(i, json.dumps(each["messages"]).replace('"', '""'), 5) for i, each in enumerate(RECORDS)]


def read(path: Path, **options: object) -> tuple[list[TraceRequest], Trace]:
    trace = open_trace(path, **options)
    return trace.first(), trace


SHAPES = {
    "array in one line": json.dumps(RECORDS),
    "array of lines": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n",
    "pretty array": json.dumps(RECORDS, indent=2),
    "pretty objects": "\n".join(json.dumps(each, indent=2) for each in RECORDS),
    "objects in one line": "".join(map(json.dumps, RECORDS)),
    "comma at the end of an array": json.dumps(RECORDS)[:-1] + ",]",
    "lines that end with commas": LINES.replace("\n", ",\n"),
    "an object that holds the list": json.dumps({"version": 1, "data": {"requests": RECORDS}}),
    "objects under their ids": json.dumps({f"r{i}": each for i, each in enumerate(RECORDS)}),
    "empty lines": "\n\n" + LINES.replace("\n", "\n\n"),
    "CRLF": LINES.replace("\n", "\r\n"),
    "byte order mark": "\ufeff" + LINES,
    "array with byte order mark": "\ufeff" + json.dumps(RECORDS),
    "times before the lines": LINES.replace('{"timestamp"', '[2026-03-01 00:00:00] {"timestamp"'),
    "no end of line": LINES.rstrip(),
    "rows": "time,messages,output_tokens\r\n" + "".join(map('%d,"%s",%d\r\n'.__mod__, ROWS)),
    "rows with tabs": "time\tmessages\toutput_tokens\n"
    + "\n".join(map('%d\t"%s"\t%d'.__mod__, ROWS)),
    "numbers and characters that only Python writes": LINES.replace(
        '"usage"', '"logprob": NaN, "least": -Infinity, "text": "\\ud83d", "usage"'
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_json_in_every_shape(tmp_path: Path, name: str, compress: object) -> None:
    path = tmp_path / "trace"
    path.write_bytes(compress(SHAPES[name].encode()))  # type: ignore[operator]
    requests, trace = read(path, strict=True)
    assert trace.format == "openai"
    assert [each.arrival for each in requests] == list(range(40))
    assert {each.output_length for each in requests} == {5}


def test_a_last_line_that_is_cut_is_named_and_no_more(tmp_path: Path, advise: Any) -> None:
    for content in (LINES[:-60], json.dumps(RECORDS)[:-60]):
        (tmp_path / "trace").write_text(content)
        requests, trace = read(tmp_path / "trace")
        assert (len(requests), trace.errors.count, trace.errors.is_cut) == (39, 0, True)
        told = advise("--trace", tmp_path / "trace")
        assert told.status == 0
        assert told.out.startswith("Not replayed: the last line, which is cut short.\n")


BROKEN = {
    "single quotes": (str(RECORDS), "its keys are in single quotes, so it is not JSON"),
    "single quotes, lines": ("\n".join(map(str, RECORDS)), "its keys are in single quotes"),
    "commas at the end of objects": (LINES.replace("}}", "},}"), "format|object 1 is not JSON"),
    "comma at the end of an object in an array": (
        json.dumps(RECORDS).replace("}}, ", "},}, "), "object 1 is not JSON: ",
    ),
    "damage in the middle": (
        json.dumps(RECORDS).replace('"timestamp": 20', '"timestamp" 20'), "object 21 is not JSON: ",
    ),
    "one object": (json.dumps({"text " + SECRET * 50: SECRET}), "its keys are text private"),
    "answers alone": (
        "\n".join(json.dumps({"custom_id": i, "response": {"body": {"choices": [{"index": 0}]}}})
                  for i in range(9)), "no prompt; its keys are custom_id, response",
    ),
    "compressed by another program": (bz2.compress(LINES.encode()), "trace: compressed by bzip2; "),
    "archive": (gzip.compress(b"log".ljust(257, b"\0") + b"ustar\n" + b"{}" * 9), "a tar archive"),
    "parts of a prompt": (json.dumps({"blocks": [{"parts": [{"text": SECRET}]}]}), "no prompt"),
    "a list of texts": (json.dumps([SECRET * 99] * 9), "no known format: its first line is"),
    "UTF-16": (LINES.encode("utf-16"), "the text is UTF-16"),
    "columns": (",".join([SECRET.strip()] * 999) + "\n1,2\n", r"and 99\d more"),
    "vLLM's log as text": ("INFO 05-01: prompt: 'a', params: SamplingParams(n=1)\n", "no answers"),
    "lines that Docker has split": ('{"log": "{' + SECRET + '", "stream": "x"}', "`docker logs`"),
    "SGLang's log as text": ("a\n" * 30 + "obj=GenerateReqInput(x)\n", "--log-requests-format"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_json_is_said_in_one_short_line(tmp_path: Path, advise: Any, name: str) -> None:
    content, reason = BROKEN[name]
    path = tmp_path / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=reason):
        read(path)
    told = advise("--trace", path)
    told.check_refusal("trace", most=500 + len(str(path)))
    assert told.err.count(SECRET.strip()) <= 200 / len(SECRET)


def test_a_trace_that_was_read_whole_is_not_called_a_part(tmp_path: Path, advise: Any) -> None:
    for name in ("array of lines", "empty lines"):
        (tmp_path / "trace").write_text(SHAPES[name])
        assert "trace: 40 requests" in advise("--trace", tmp_path / "trace").out
    assert "the first 30 of " in advise("--trace", tmp_path / "trace", "--limit", 30).out


def test_json_that_would_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_BYTES", 1000)
    (tmp_path / "trace").write_text(json.dumps(RECORDS))
    with pytest.raises(TraceError, match="write one object per line"):
        read(tmp_path / "trace")


# --- the size of a block and the unit of times ---


@pytest.mark.parametrize("size", [1, 16, 24, 64, 100, 256, 512])
def test_the_size_of_a_block_follows_from_the_lines(tmp_path: Path, size: int) -> None:
    (tmp_path / "trace").write_text("".join(json.dumps(blocks(i, size)) + "\n" for i in range(60)))
    requests, trace = read(tmp_path / "trace", strict=True)
    assert [each.input_length for each in requests] == [9 * size - i % size for i in range(60)]
    assert requests[1].prompt[0].length == size
    assert requests[1].arrival == 1.0
    assert bool(trace.errors.assumed) == (size != 512)


@pytest.mark.parametrize(
    ("times", "more"),
    [
        ([0.5 + i for i in range(9)], {}),
        (list(range(9)), {"chat_id": 1, "turn": 1}),
        ([1_767_225_600 + i for i in range(9)], {}),
    ],
)
def test_times_of_blocks_in_seconds(
    tmp_path: Path, times: list[float], more: dict[str, object]
) -> None:
    lines = [
        json.dumps({**blocks(i, 16, **more), "timestamp": time}) for i, time in enumerate(times)
    ]
    (tmp_path / "trace").write_text("\n".join(lines))
    requests, trace = read(tmp_path / "trace", strict=True)
    assert [each.arrival for each in requests] == list(range(9))
    assert trace.errors.assumed == "blocks of 16 tokens, times in s"


def test_lengths_may_be_written_with_a_point(tmp_path: Path) -> None:
    for name, line in {
        "mooncake": '{"timestamp": 0, "input_length": 600.0, "output_length": 5.0, '
        '"hash_ids": [1, 2]}',
        "tokens": '{"timestamp": 0, "input_ids": [1, 2], "output_length": 5.0}',
        "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n0,600.0,5.0",
        "burstgpt": "Timestamp,Request tokens,Response tokens\n0,600.0,5.0",
    }.items():
        (tmp_path / "trace").write_text(line + "\n")
        requests, trace = read(tmp_path / "trace", strict=True)
        assert trace.format == name
        assert requests[0].output_length == 5
        assert requests[0].input_length in (600, 2)


# --- no verdict from the few lines that could be read ---

GOOD = {
    "mooncake": [json.dumps(blocks(i, 512)) for i in range(100)],
    "tokens": [
        json.dumps({"timestamp": i, "input_ids": [i, 2], "output_length": 3}) for i in range(100)
    ],
    "openai": [json.dumps(chat(i)) for i in range(100)],
    "azure": ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{i},60,5" for i in range(100))],
    "burstgpt": ["Timestamp,Request tokens,Response tokens", *(f"{i},60,5" for i in range(100))],
}


@pytest.mark.parametrize("format", GOOD)
@pytest.mark.parametrize("bad", [5, 6, 60, 3000])
def test_a_share_of_lines_that_are_not_understood_is_too_much(
    tmp_path: Path, advise: Any, format: str, bad: int
) -> None:
    garbage = [f"{{{SECRET * 40}{i}," for i in range(bad)]
    lines = [*GOOD[format], *garbage]
    draws = random.Random(1)
    lines[1:] = draws.sample(lines[1:], len(lines) - 1)
    if format not in ("azure", "burstgpt"):
        draws.shuffle(lines)
    (tmp_path / "trace").write_text("\n".join(lines) + "\n")
    # The option names the format if the first lines are garbage.
    more = ["--format", format] if bad == 3000 else []
    found = advise("--trace", tmp_path / "trace", *more)
    assert found.err.count(SECRET.strip()) + found.out.count(SECRET.strip()) <= 200 / len(SECRET)
    if bad == 5:
        assert found.status == 0
        assert found.out.startswith("Not replayed: 5 malformed lines (trace:")
    else:
        found.check_refusal("lines were not understood, so there is no verdict; the first: ")


def test_requests_that_failed_are_named_first(tmp_path: Path, advise: Any) -> None:
    failed = [json.dumps({**chat(i), "usage": {"completion_tokens": 0}}) for i in range(30)]
    (tmp_path / "trace").write_text(LINES + "\n".join(failed) + "\n")
    told = advise("--trace", tmp_path / "trace")
    assert told.status == 0
    assert told.out.startswith("Not replayed: 30 requests that failed.\npat ")
