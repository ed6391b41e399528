"""Trace files: every format, malformed input, order of arrival, and writing."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import time
import types
from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard

from sglang_pat.cli import workload_options
from sglang_pat.workload.formats import FORMATS, REORDER_WINDOW, open_trace
from sglang_pat.workload.generate import WORKLOADS, generate
from sglang_pat.workload.mooncake import write_mooncake
from sglang_pat.workload.trace import (
    FAILED,
    Segment,
    TokenPrompt,
    Trace,
    TraceError,
    TraceRequest,
    token_ids,
)

DATA = Path(__file__).parents[1] / "support" / "data"
BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_each_format_is_named_wherever_users_look() -> None:
    page = (DATA.parents[2] / "docs/advise.md").read_text()
    help_text = Path(workload_options.__file__).read_text().partition('"--format"')[2]
    for name in FORMATS:
        assert f"\n| `{name}` | " in page
        assert name in help_text.partition("(default")[0]


def mooncake_line(timestamp: float = 0, **changes: object) -> str:
    fields = {"input_length": 700, "output_length": 5, "hash_ids": [7, 8]}
    return json.dumps({"timestamp": timestamp, **fields, **changes})


def write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read(path: Path, **options: object) -> tuple[list[TraceRequest], Trace]:
    trace = open_trace(path, **options)
    return list(trace.stream), trace


def test_mooncake_blocks_become_segments_and_the_last_one_is_partial(tmp_path):
    path = write(tmp_path / "trace.jsonl", [mooncake_line(1500), mooncake_line(2750)])
    requests, trace = read(path)
    assert (trace.format, trace.requests) == ("mooncake", 2)
    assert requests[0] == TraceRequest(0.0, (Segment(7, 512), Segment(8, 188)), 5)
    assert requests[1].arrival == 1.25


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Input data was truncated"),
        (mooncake_line(input_length=1025), "2 hash_ids, but input_length 1025 is 3 blocks"),
        (mooncake_line(input_length=512), "2 hash_ids, but input_length 512 is 1 blocks"),
        (mooncake_line(input_length=0, hash_ids=[]), "input_length"),
        (mooncake_line(output_length=-1), "output_length"),
        (mooncake_line(timestamp=-1), "-1.0 is not a time: a number from 0 or ISO 8601 is needed"),
        (mooncake_line(hash_ids=["a", "b"]), "hash_ids"),
        (mooncake_line(segments=[[1, 699]]), "segments of 699 tokens, but input_length is 700"),
        (mooncake_line(segments=[[1, 700], [2, 0]]), "segments"),
    ],
)
def test_malformed_line_is_counted_or_raised_with_file_line_and_reason(tmp_path, line, reason):
    path = write(tmp_path / "trace.jsonl", [mooncake_line(), "", line, mooncake_line(5)])
    requests, trace = read(path)
    assert len(requests) == 2
    assert trace.errors.count == 1
    assert str(trace.errors.first[0]).startswith("trace.jsonl:3: ")
    assert reason in trace.errors.first[0].reason

    strict = open_trace(path, strict=True)
    with pytest.raises(TraceError, match=r"^trace\.jsonl:3: "):
        list(strict.stream)


def test_only_the_first_errors_are_kept_but_all_are_counted(tmp_path):
    path = write(tmp_path / "trace.jsonl", [mooncake_line()] + ["[]"] * 30)
    _, trace = read(path)
    assert trace.errors.count == 30
    assert [error.line for error in trace.errors.first] == list(range(2, 12))


def test_burstgpt_rows_are_private_and_failed_requests_are_left_out(tmp_path):
    rows = [
        "1000,ChatGPT,472,18,490,Conversation log",
        "1001,GPT-4,300,0,300,API log",
        "1002,ChatGPT,472,20,492,Conversation log",
    ]
    requests, trace = read(write(tmp_path / "trace.csv", [BURSTGPT_HEADER, *rows]))
    assert (trace.format, trace.requests) == ("burstgpt", 3)
    found = [(r.arrival, r.input_length, r.output_length) for r in requests]
    assert found == [(0.0, 472, 18), (2.0, 472, 20)]
    assert (token_ids(requests[0].prompt) != token_ids(requests[1].prompt)).all()
    assert (trace.errors.left_out, trace.errors.count) == ({FAILED: 1}, 0)
    # Columns are found by name.
    header = "\ufeffTimestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type"
    row = "5,3f2a,1.5,GPT-4,417,276,Conversation log"
    assert read(write(tmp_path / "trace.csv", [header, row]))[0][0].output_length == 276


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,ChatGPT,472,18,490,log", "Timestamp: 'x' is not a time: a number or ISO 8601"),
        ("nan,ChatGPT,472,18,490,log", "Timestamp: 'nan' is not a time: a number from 0"),
        ("5,ChatGPT,472.5,18,490,log", "Request tokens is '472.5'; a whole number from 0"),
        ("5,ChatGPT,0,18,18,log", "Request tokens is 0"),
        ("5,ChatGPT,472,-1,471,log", "Response tokens is '-1'"),
        ("5,ChatGPT,472", "fewer values than columns"),
    ],
)
def test_malformed_burstgpt_row(tmp_path, row, reason):
    rows = [BURSTGPT_HEADER, "1,ChatGPT,472,18,490,log", row]
    requests, trace = read(write(tmp_path / "trace.csv", rows))
    assert len(requests) == 1
    assert str(trace.errors.first[0]).startswith("trace.csv:3: ")
    assert reason in trace.errors.first[0].reason


def test_a_segment_has_the_same_tokens_wherever_it_lies():
    once, longer = token_ids((Segment(5, 3),)), token_ids((Segment(5, 6),))
    assert longer[:3].tolist() == once.tolist()
    assert token_ids((Segment(5, 3), Segment(5, 3))).tolist() == [*once, *once]
    assert token_ids((Segment(6, 2), Segment(5, 3)))[2:].tolist() == once.tolist()


def test_lines_with_token_ids(tmp_path):
    line = {"timestamp": 3.5, "input_ids": [5, 6, 7], "output_length": 2}
    bad = {"timestamp": 3.5, "input_ids": [5, -6], "output_length": 2}
    empty = {"timestamp": 3.5, "input_ids": [], "output_length": 2}
    lines = map(json.dumps, [line, bad, empty])
    requests, trace = read(write(tmp_path / "trace.jsonl", lines))
    assert trace.format == "tokens"
    assert requests[0].input_length == 3
    assert token_ids(requests[0].prompt).tolist() == [5, 6, 7]
    assert trace.errors.count == 2


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("header", ["", BURSTGPT_HEADER + "\n"])
def test_compressed_files_are_read_and_damage_is_reported(tmp_path, frames, compress, header):
    line = "{},m,5,6,11,log".format if header else mooncake_line
    content = [
        "".join(f"{line(1000 * frame + i)}\n" for i in range(500)).encode()
        + os.urandom(50_000).hex().encode() + b"\n"
        for frame in range(frames)
    ]  # fmt: skip
    content[0] = header.encode() + content[0]
    path = tmp_path / "trace"  # a name without a format
    path.write_bytes(b"".join(map(compress, content)))
    requests, trace = read(path)
    assert (trace.format, trace.requests) == ("burstgpt" if header else "mooncake", None)
    assert (len(requests), trace.errors.count) == (500 * frames, frames)
    assert [r.arrival for r in requests] == sorted(r.arrival for r in requests)
    whole = path.read_bytes()
    for damaged in (whole[:-20_000], whole[:-30_000] + bytes(30_000)):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"trace:\d+: damaged compressed data"):
            read(path)


def test_requests_are_put_in_order_of_arrival_and_equal_ones_keep_the_files(tmp_path):
    order = [(30, 1), (10, 2), (20, 3), (10, 4)]
    lines = [mooncake_line(ms, output_length=length) for ms, length in order]
    requests, _ = read(write(tmp_path / "trace.jsonl", lines))
    found = [(r.arrival, r.output_length) for r in requests]
    assert found == [(0.0, 2), (0.0, 4), (0.01, 3), (0.02, 1)]


def test_request_that_comes_far_too_late_is_malformed(tmp_path):
    lines = [mooncake_line(ms + 1000) for ms in range(REORDER_WINDOW + 2)]
    late, trace = read(write(tmp_path / "trace.jsonl", [*lines, mooncake_line(999)]))
    assert len(late) == REORDER_WINDOW + 2
    assert trace.errors.first[0].line == REORDER_WINDOW + 3
    assert "sort the trace by time" in trace.errors.first[0].reason

    for kept in ([*lines[2:], mooncake_line(999)], lines[::-1]):  # a database may export in reverse
        requests, trace = read(write(tmp_path / "trace.jsonl", kept))
        assert trace.errors.count == 0
        assert len(requests) == len(kept)


def test_reading_holds_only_the_reorder_window(tmp_path):
    path = write(tmp_path / "trace.jsonl", map(mooncake_line, range(3 * REORDER_WINDOW)))
    trace = open_trace(path)
    assert isinstance(trace.stream, types.GeneratorType)
    for _ in range(5):
        next(trace.stream)
    # The parser has read only as far as the window, so it does not see the change.
    path.write_bytes(b"")
    assert sum(1 for _ in trace.stream) < 3 * REORDER_WINDOW - 5


@pytest.mark.parametrize(
    ("content", "format", "reason"),
    [
        ("", "auto", "empty"),
        ("\n \n", "auto", "empty"),
        (
            "question,b\n1,2\n",
            "auto",
            r"columns are question, b\. .*tokens.*openai.*burstgpt.*azure",
        ),
        ('{"question": 1, "answer": 2}\n', "auto", "has no prompt; its keys are question, answer"),
        ("[\n1]\n", "auto", r"its first line is '\[\\n'"),
        ("a\rb,c\n", "auto", r"its first line is 'a\\rb,c\\n'"),
        ("a\rb,c\n", "burstgpt", "trace: not CSV: new-line character seen"),
        ("prompt,b\n1,2\rx", "auto", "trace:1: not CSV: new-line"),
        ("prompt,answer\n1,2\n", "burstgpt", "no column 'Timestamp'; there are: prompt, answer"),
        (mooncake_line(), "csv", "format 'csv'; allowed: auto, mooncake"),
        (mooncake_line(), "sglang-dump", "not a pickle"),
    ],
)
def test_unusable_file_is_refused(tmp_path, content, format, reason):
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason):
        read(path, format=format)


def test_missing_file_and_folder_without_dumps_are_refused(tmp_path):
    deeper = tmp_path / "disk" / "of" / "others"
    deeper.mkdir(parents=True)
    (deeper / "data.pkl").touch()  # SGLang writes dumps at most one folder deep
    with pytest.raises(ValueError, match="there is no such file"):
        open_trace(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no request dump"):
        read(tmp_path)
    with pytest.raises(ValueError, match="only the format sglang-dump"):
        open_trace(tmp_path, "mooncake")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a pipe cannot be read twice"):
        open_trace(tmp_path / "pipe")


@pytest.mark.parametrize("lines", [["{}"], ["[1]", "2"]])
def test_trace_without_a_single_request_is_an_error(tmp_path, lines):
    path = write(tmp_path / "trace.jsonl", lines)
    with pytest.raises(TraceError, match=rf"not a single request \({len(lines)} malformed lines"):
        read(path, format="mooncake")
    path = write(tmp_path / "trace.csv", [BURSTGPT_HEADER, "1,m,5,0,5,log"])
    with pytest.raises(TraceError, match="1 requests that failed"):
        read(path)


def test_detection_passes_over_malformed_first_lines(tmp_path):
    _, trace = read(write(tmp_path / "trace.jsonl", ["not json", "[3]", mooncake_line()]))
    assert (trace.format, trace.errors.count) == ("mooncake", 2)


# --- Azure, ISO times, OpenAI's API, zstd. ---


def test_azure_rows_have_iso_times(tmp_path):
    """Headers and first rows of Azure's traces of 2023 and 2024."""
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
        "2023-11-16 18:16:46.680590+00:00,879,55",
        "noon,1,1",
    ]
    requests, trace = read(write(tmp_path / "azure.csv", rows))
    assert trace.format == "azure"
    assert [(r.arrival, r.input_length, r.output_length) for r in requests] == [
        (0.0, 374, 44),
        (pytest.approx(4.314579, abs=2e-6), 396, 109),
        (pytest.approx(60.0, abs=2e-6), 879, 55),
    ]
    assert "TIMESTAMP: 'noon' is not a time" in trace.errors.first[0].reason


def test_a_time_without_a_zone_is_utc(tmp_path, monkeypatch):
    """In local time an hour would be missing at the change to summer time."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        moments = ("2024-03-31T01:30:00", "2024-03-31T03:30:00", "2024-03-31T04:00:00Z")
        lines = [mooncake_line(moment) for moment in moments]
        requests, _ = read(write(tmp_path / "trace.jsonl", lines), strict=True)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [request.arrival for request in requests] == [0.0, 7200.0, 9000.0]


SYSTEM = {"role": "system", "content": "You answer in one word, always."}


def chat(text: str, **more: object) -> dict[str, object]:
    return {"messages": [SYSTEM, {"role": "user", "content": text}], **more}


def test_malformed_lines_of_an_openai_log(tmp_path):
    usage = {"usage": {"completion_tokens": 7}}
    lines = [
        {"created": 10, **chat("what is it?"), **usage},
        {"time": 16, **chat("how?")},
        {**chat("why?"), **usage},
        {"time": 17, "messages": [], **usage},
    ]
    requests, trace = read(write(tmp_path / "log.jsonl", map(json.dumps, lines)))
    assert (trace.format, len(requests)) == ("openai", 1)
    reasons = [error.reason for error in trace.errors.first]
    assert "the answer has no length" in reasons[0]
    assert "no time: one of timestamp, created" in reasons[1]
    assert "neither messages nor a prompt" in reasons[2]


# --- SGLang's request dump ---


class GenerateReqInput:
    """Pickles like SGLang's class: by name, with a dict of attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def dump(path: Path, records: object) -> Path:
    path.write_bytes(pickle.dumps({"server_args": GenerateReqInput(), "requests": records}))
    return path


def answered(tokens: object, arrival: object = 1.0, new_tokens: object = 4, **asked: object):
    answer = {"text": "", "meta_info": {"completion_tokens": new_tokens}}
    return GenerateReqInput(input_ids=tokens, **asked), answer, arrival, 9.0


def test_dump_is_read_in_order_of_arrival(tmp_path):
    records = [answered([1, 2], 107.5), answered(array("q", [3, 4, 5]), 105.0)]
    requests, trace = read(dump(tmp_path / "one.pkl", records))
    assert trace.format == "sglang-dump"
    assert [token_ids(r.prompt).tolist() for r in requests] == [[3, 4, 5], [1, 2]]
    assert [(r.arrival, r.output_length) for r in requests] == [(0.0, 4), (2.5, 4)]
    (tmp_path / "host").mkdir()
    dump(tmp_path / "host" / "b.pkl", [answered([2], 3.0)])  # a folder of dumps is one trace
    assert [token_ids(r.prompt).tolist() for r in read(tmp_path)[0]] == [[2], [3, 4, 5], [1, 2]]


def test_malformed_record_of_a_dump(tmp_path):
    times = (answered([1], arrival="noon"), answered([1], new_tokens=0), (1, 2))
    records = [*map(answered, ([1, 2], [[1], [2, 3]], [1.5], None)), *times, answered([3, -1])]
    requests, trace = read(dump(tmp_path / "one.pkl", records))
    assert len(requests) == 1
    assert [error.line for error in trace.errors.first] == [2, 3, 4, 5, 7, 8]
    assert trace.errors.left_out == {FAILED: 1}
    assert "neither input_ids nor text" in trace.errors.first[2].reason


def test_dumped_text_counts_a_token_per_four_bytes(tmp_path):
    records = [answered(None, text=text) for text in ("abcdefgh", "abcdXYZ")]
    requests, trace = read(dump(tmp_path / "one.pkl", records))
    first, second = (token_ids(request.prompt).tolist() for request in requests)
    assert (len(first), len(second)) == (2, 2)
    assert first[0] == second[0] != second[1]
    assert trace.errors.estimated == 2
    # A request without an answer counts with the tokens that it had.
    record = (GenerateReqInput(input_ids=[1]), {"output_ids": [7, 8]}, 1.0, 2.0)
    assert read(dump(tmp_path / "one.pkl", [record]))[0][0].output_length == 2


class Attack:
    """An object that creates a file if pickle unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_dump_is_executed(tmp_path):
    made = tmp_path / "made"
    attack = Attack(made)
    path = dump(tmp_path / "one.pkl", [answered([1, 2], trap=attack, traps={attack: [attack]})])
    requests, _ = read(path)
    assert len(requests) == 1
    assert not made.exists()
    pickle.loads(pickle.dumps(attack))
    assert made.exists(), "the trap must work, or this test shows nothing"


# --- Writing. ---


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_written_trace_reads_back_exactly(tmp_path, name, suffix):
    path = tmp_path / f"trace{suffix}"
    requests = list(generate(name, requests=40, seed=3).stream)
    assert write_mooncake(path, requests) == 40
    assert read(path, strict=True)[0] == requests


def test_written_hash_ids_are_equal_as_far_as_blocks_are(tmp_path):
    path = tmp_path / "trace.jsonl"
    common = Segment(1, 1000)
    prompts = [
        (common, Segment(2, 100)),
        (common, Segment(3, 100)),
        (Segment(1, 512), Segment(4, 512)),
        (Segment(4, 512), Segment(4, 512)),
        (Segment(1, 1024),),
        (Segment(1, 512), Segment(1, 512)),  # the same segment twice
    ]
    write_mooncake(path, (TraceRequest(0.0, prompt, 1) for prompt in prompts))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ids = [line["hash_ids"] for line in lines]
    assert [len(blocks) for blocks in ids] == [3, 3, 2, 2, 2, 2]
    assert len({blocks[0] for blocks in (*ids[:3], *ids[4:])}) == 1
    assert len({block for blocks in ids for block in blocks}) == 10

    # Programs that ignore segments read whole blocks.
    for line in lines:
        del line["segments"]
    requests, _ = read(write(path, map(json.dumps, lines)), strict=True)
    assert [request.input_length for request in requests] == [1100, 1100] + [1024] * 4


def test_token_ids_cannot_be_written(tmp_path):
    request = TraceRequest(0.0, TokenPrompt(token_ids((Segment(1, 3),))), 1)
    with pytest.raises(ValueError, match="request 1 has token ids"):
        write_mooncake(tmp_path / "trace.jsonl", [request])


def test_shipped_trace_is_what_its_generator_makes():
    requests, trace = read(DATA / "conversation.jsonl", strict=True)
    assert trace.format == "mooncake"
    assert requests == list(generate("conversation", requests=150, seed=0).stream)
