"""API logs: every format of a log gives the same requests, or names the key that it refuses."""

from __future__ import annotations

import base64
import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.request_log import read_record
from sglang_pat.workload.request_prompts import to_request
from sglang_pat.workload.trace import (
    FAILED,
    NotReplayed,
    Trace,
    TraceError,
    TraceErrors,
    TraceRequest,
    token_ids,
)

REQUESTS, EPOCH = 12, 1_767_225_600
DRAWS = random.Random(4)
SYSTEM = "".join(DRAWS.choices("abcdefghij klmnop", k=4000))
QUESTIONS = ["".join(DRAWS.choices("qrstuv wxyz", k=400)) for _ in range(REQUESTS)]
PHOTO = base64.b64encode(DRAWS.randbytes(60_000)).decode()
PROMPT_TOKENS, OUTPUT_TOKENS = 1100, 120
USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": OUTPUT_TOKENS, "total_tokens": 1220}
OUTPUT_USAGE = {"input_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
CHOICES = [{"message": {"role": "assistant", "content": "a" * 480}}]
ANSWER = {"usage": USAGE, "choices": CHOICES}

Record = dict[str, Any]
SGLANG = "SGLang's log with times of each request"
SHAPES: dict[str, Record] = yaml.safe_load(
    (Path(__file__).parents[1] / "support/data/request_shapes.yaml").read_text()
)


def messages(i: int) -> list[Record]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[i]}]


def chat(i: int, **more: object) -> Record:
    return {"model": "m", "messages": messages(i), **more}


def iso(i: int) -> str:
    return datetime.fromtimestamp(EPOCH + i / 4, UTC).isoformat()


def exact_ids(i: int) -> list[int]:
    own = np.random.default_rng(i).integers(1, 1000, 100)
    return [*range(1000, 2000), *own.tolist()]


def shape_of(name: str, i: int) -> Record:
    """Return the record of request i in a format of `request_shapes.yaml`."""
    values = {
        "t": i / 4,
        "epoch": EPOCH + i / 4,
        "answered": EPOCH + i / 4 + 2.5,
        "iso": iso(i),
        "later": iso(i + 9),
        "sent": iso(i + 8),
        "chat": chat(i),
        "messages": messages(i),
        "asked": messages(i)[1:],
        "question": QUESTIONS[i],
        "system": SYSTEM,
        "text": SYSTEM + QUESTIONS[i],
        "answer": ANSWER,
        "choices": CHOICES,
        "usage": USAGE,
        "output_usage": OUTPUT_USAGE,
        "ids": exact_ids(i),
        "answer_ids": [*range(1, OUTPUT_TOKENS + 1)],
        "end": datetime.fromtimestamp(EPOCH + i, UTC).strftime("%d/%b/%Y:%H:%M:%S +0000"),
        "took": f"{2 + i * 0.75:.3f}",
        "duration": i % 3,
        "second": EPOCH + i // 4,
        "nanosecond": i % 4 * 250_000_000,
        "kibana": datetime.fromtimestamp(EPOCH + i / 4, UTC).strftime("%b %d, %Y @ %H:%M:%S.%f"),
        "microsecond": str(EPOCH * 1_000_000 + i * 250_000),
        "nanoseconds": str(EPOCH * 10**9 + i * 250_000_000),
        "meta": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": OUTPUT_TOKENS},
        "chunks": [{"choices": [{"index": 0, "delta": {"content": "abcd"}}]}] * OUTPUT_TOKENS,
    }

    def filled(value: Any) -> Any:
        match value:
            case {"$json": inner}:
                return json.dumps(filled(inner))
            case {"$line": inner}:
                return json.dumps(filled(inner)) + "\n"
            case {"$events": several}:
                lines = (f"event: x\ndata: {json.dumps(filled(each))}\n\n" for each in several)
                return "".join(lines) + "data: [DONE]\n"
            case dict():
                return {key: filled(inner) for key, inner in value.items()}
            case list():
                return [filled(inner) for inner in value]
            case str() if value.startswith("$"):
                letter, _, count = value[1:].partition("*")
                return letter * int(count) if count else values[letter]
        return value

    record: Record = filled(SHAPES[name])
    return record


def written(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def read(path: Path, **options: Any) -> tuple[list[TraceRequest], Trace]:
    trace = open_trace(path, **options)
    return trace.first(), trace


def read_shape(
    tmp_path: Path, shape: Callable[[int], Record], **options: Any
) -> tuple[list[TraceRequest], Trace]:
    return read(written(tmp_path / "log", [shape(i) for i in range(REQUESTS)]), **options)


def shared(left: TraceRequest, right: TraceRequest) -> int:
    """Return the number of common tokens at the beginning of both prompts."""
    ours, theirs = (token_ids(each.prompt) for each in (left, right))
    size = min(len(ours), len(theirs))
    differs = np.flatnonzero(ours[:size] != theirs[:size])
    return int(differs[0]) if len(differs) else size


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_the_same_workload(tmp_path: Path, name: str) -> None:
    requests, trace = read_shape(tmp_path, partial(shape_of, name), strict=True)
    assert len(requests) == REQUESTS
    assert {each.input_length for each in requests} == {PROMPT_TOKENS}
    assert {each.output_length for each in requests} == {OUTPUT_TOKENS}
    assert [each.arrival for each in requests] == [i / 4 for i in range(REQUESTS)]
    assert 990 <= shared(requests[0], requests[1]) <= 1010
    assert not trace.errors.unknown
    assert not trace.errors.limited


def test_a_stream_whose_texts_hold_other_ends_of_lines(tmp_path: Path) -> None:
    """Servers write U+2028 unescaped; Python's splitlines() would split there."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "a\u2028"}}]}  # four bytes
    stream = f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" * OUTPUT_TOKENS
    requests, _ = read_shape(
        tmp_path, lambda i: {"time": i, "request": chat(i), "response": stream}
    )
    assert {each.output_length for each in requests} == {OUTPUT_TOKENS}


@pytest.mark.parametrize("unit", [1, 1000, 1_000_000, 1_000_000_000])
@pytest.mark.parametrize("kind", ["number", "text", "iso"])
def test_epochs_in_every_unit(tmp_path: Path, unit: int, kind: str) -> None:
    def time(i: int) -> object:
        number = EPOCH * unit + i * unit // 4 if unit > 1 else EPOCH + i / 4
        return {"number": number, "text": str(number), "iso": iso(i)}[kind]

    for record in (
        lambda i: {"timestamp": time(i), **chat(i), **ANSWER},
        lambda i: {"timestamp": time(i), "input_ids": [1, 2], "output_length": 3},
        lambda i: {"timestamp": time(i), "input_length": 5, "output_length": 3, "hash_ids": [i]},
    ):
        requests, _ = read_shape(tmp_path, record, strict=True)
        assert [round(each.arrival, 3) for each in requests] == [i / 4 for i in range(REQUESTS)]


@pytest.mark.parametrize(
    ("key", "scale"),
    [("timestamp_ms", 1e3), ("startTimeUnixNano", 1e9), ("ts_us", 1e6), ("time_sec", 1)],
)
def test_a_unit_in_the_name_of_a_time_decides(tmp_path: Path, key: str, scale: float) -> None:
    requests, _ = read_shape(
        tmp_path,
        lambda i: {key: str(int((i + 5) * scale)), "result": {key: "1"}, **chat(i), **ANSWER},
        strict=True,
    )
    assert [each.arrival for each in requests] == list(range(REQUESTS))


@pytest.mark.parametrize(
    "time", [1e23, 5e10, -1, float("1e400"), True, "noon", "9999-01-01T00:00:00Z", "x" * 5000]
)
def test_a_time_that_cannot_be_is_refused(tmp_path: Path, time: object) -> None:
    records = [{"timestamp": time, **chat(i), **ANSWER} for i in range(REQUESTS)]
    lines = "".join(json.dumps(each).replace("Infinity", "1e400") + "\n" for each in records)
    (tmp_path / "log").write_text(lines)
    with pytest.raises(ValueError, match=r"is not a time|no known format: its first line") as found:
        read(tmp_path / "log")
    assert len(str(found.value)) < 500


def test_times_of_two_kinds_in_one_log_are_refused(tmp_path: Path) -> None:
    """Relative times mixed with epochs would make a trace of decades."""
    with pytest.raises(TraceError, match="years after the first request"):
        read_shape(tmp_path, lambda i: {"ts": i if i < 2 else EPOCH + i, **chat(i), **ANSWER})


# --- usage ---


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.7])
def test_usage_decides_how_long_prompts_and_what_they_share_are(
    tmp_path: Path, factor: float
) -> None:
    usage = {"prompt_tokens": round(PROMPT_TOKENS * factor), "completion_tokens": 5}
    requests, trace = read_shape(tmp_path, lambda i: chat(i, time=i, usage=usage), strict=True)
    assert {each.input_length for each in requests} == {usage["prompt_tokens"]}
    assert shared(requests[0], requests[1]) == pytest.approx(1000 * factor, rel=0.02)
    assert trace.errors.counted == REQUESTS * usage["prompt_tokens"]
    assert trace.errors.by_text == pytest.approx(REQUESTS * PROMPT_TOKENS, rel=0.02)


def test_equal_prompts_stay_equal_where_usage_counts_more(tmp_path: Path) -> None:
    """usage may count template tokens; eight samples of a prompt still share all of it."""
    usage = {"prompt_tokens": 1300, "completion_tokens": 5}
    requests, _ = read_shape(tmp_path, lambda i: {"time": i, **chat(0), "usage": usage})
    assert shared(requests[0], requests[7]) == 1300


@pytest.mark.parametrize(
    ("count", "reason"), [(50_000, "does not hold the whole prompt"), (20, "more than one prompt")]
)
def test_usage_that_cannot_be_of_this_text_gives_no_verdict(
    tmp_path: Path, count: int, reason: str
) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": 5}
    with pytest.raises(TraceError, match=reason):
        read_shape(tmp_path, lambda i: {"time": i, **chat(i), "usage": usage})


def test_mismatches_are_said(tmp_path: Path, advise: Any) -> None:
    usage = {"prompt_tokens": 1900, "completion_tokens": 5}
    path = written(tmp_path / "log", [{"time": i, **chat(i), "usage": usage} for i in range(9)])
    out = " ".join(advise("--trace", path).out.split())
    assert "The prompts have 17,100 tokens by `usage`, which decides; 4 bytes a token would" in out
    assert "(-42%)" in out
    ids = {"input_ids": [1, 2, 3], "output_length": 3, "input_length": 5}
    path = written(tmp_path / "ids", [{"time": i, **ids} for i in range(9)])
    out = " ".join(advise("--trace", path).out.split())
    assert "usage counts other prompt tokens than 9 lists of ids hold" in out


# --- media ---


def with_part(i: int, part: Record, tokens: int | None) -> Record:
    """Return a request whose message has a text and another part."""
    usage = {"completion_tokens": 9, **({"prompt_tokens": tokens} if tokens else {})}
    user = {"role": "user", "content": [{"type": "text", "text": QUESTIONS[i]}, part]}
    return {"time": i, "messages": [messages(i)[0], user], "usage": usage}


def with_image(i: int, photo: str, tokens: int | None) -> Record:
    return with_part(i, {"type": "image_url", "image_url": {"url": photo}}, tokens)


@pytest.mark.parametrize("url", [f"data:image/jpeg;base64,{PHOTO}", "https://x.example/a.jpg"])
def test_an_image_is_no_text(tmp_path: Path, url: str) -> None:
    requests, trace = read_shape(tmp_path, lambda i: with_image(i, url, 2100), strict=True)
    assert {each.input_length for each in requests} == {2100}
    assert 990 <= shared(requests[0], requests[1]) <= 1010
    same, _ = read_shape(tmp_path, lambda i: with_image(0, url, 2100))
    assert shared(same[0], same[1]) == 2100
    other, _ = read_shape(tmp_path, lambda i: with_image(0, f"{url}{i}", 2100))
    assert 1090 <= shared(other[0], other[1]) <= 1120

    guessed, trace = read_shape(tmp_path, lambda i: with_image(i, url, None))
    assert guessed[0].input_length == pytest.approx(1024 + 1103, abs=5)
    assert trace.errors.media == REQUESTS


IMAGES: dict[str, Record] = {
    "source": {"type": "image", "source": {"type": "base64", "data": PHOTO}},
    "input_image": {"type": "input_image", "image_url": f"data:image/png;base64,{PHOTO}"},
    "file": {"type": "input_file", "file_data": PHOTO, "filename": "a.pdf"},
    "audio": {"type": "input_audio", "input_audio": {"data": PHOTO, "format": "wav"}},
    "video": {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{PHOTO}"}},
    "document": {"type": "document", "source": {"type": "base64", "data": PHOTO}},
    "no type": {"image": {"format": "png", "source": {"bytes": PHOTO}}},
}


@pytest.mark.parametrize("name", IMAGES)
def test_media_count_as_usage_says(tmp_path: Path, name: str) -> None:
    requests, _ = read_shape(tmp_path, lambda i: with_part(i, IMAGES[name], 2100), strict=True)
    assert {each.input_length for each in requests} == {2100}
    assert 990 <= shared(requests[0], requests[1]) <= 1010


def test_audio_of_unknown_length_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="'audio', whose length only"):
        read_shape(tmp_path, lambda i: with_part(i, IMAGES["audio"], None))


def test_images_beside_a_text_stand_where_it_marks_them(tmp_path: Path) -> None:
    def record(i: int) -> Record:
        asked = {"text": f"{SYSTEM}<image>{QUESTIONS[i]}", "image_data": [PHOTO]}
        counts = {"prompt_tokens": 2100, "completion_tokens": 9}
        return {"time": i, **asked, "response": {"meta_info": counts}}

    requests, _ = read_shape(tmp_path, record, strict=True)
    assert 1990 <= shared(requests[0], requests[1]) <= 2010


# --- how many requests ---


def test_n_and_prompts_are_as_many_requests(tmp_path: Path) -> None:
    choices = [{"index": i, "message": {"content": "a" * n}} for i, n in enumerate((100, 300))]
    one = {"time": 0, **chat(0, n=2), "choices": choices, "usage": {"completion_tokens": 80}}
    requests, _ = read(written(tmp_path / "log", [one]))
    assert [each.output_length for each in requests] == [20, 60]
    assert shared(*requests) == requests[0].input_length

    for many in (
        {"time": 0, "prompt": ["abcd" * 9, "efgh"], "best_of": 3, "completion_tokens": 60},
        {"time": 0, "prompt": [[1] * 9, [2]], "n": 3, "usage": {"completion_tokens": 60}},
        {"time": 0, "text": ["abcd" * 9, "efgh"], "sampling_params": {"n": 3},
         "response": [{"meta_info": {"id": str(i), "finish_reason": {}, "completion_tokens": 10}}
                      for i in range(6)]},
    ):  # fmt: skip
        requests, _ = read(written(tmp_path / "log", [many]))
        assert [each.input_length for each in requests] == [9, 9, 9, 1, 1, 1]
        assert {each.output_length for each in requests} == {10}


# --- what shares nothing ---


@pytest.mark.parametrize("key", ["model", "lora_path", "cache_salt", "extra_key"])
def test_requests_of_different_adapters_and_salts_share_nothing(tmp_path: Path, key: str) -> None:
    requests, _ = read_shape(
        tmp_path, lambda i: {"time": i, **chat(0), key: f"name {i % 2}", **ANSWER}
    )
    assert shared(requests[0], requests[1]) == 0
    assert shared(requests[0], requests[2]) == shared(requests[1], requests[3]) == PROMPT_TOKENS


NOTES: dict[str, Callable[[int], Record]] = {
    "The log names 2 models (model-0, model-1)": lambda i: chat(i, model=f"model-{i % 2}") | ANSWER,
    "no length of 9 answers": lambda i: chat(i, max_tokens=300),
    "not known, and not read: cheese": lambda i: {"request": chat(i, cheese="x"), **ANSWER},
    "9 records have `n` above 1, but one answer": lambda i: chat(i, n=3, output="a" * 40),
    "9 records count as several requests each": lambda i: chat(i, n=3, usage=USAGE),
    "of which the last counts": lambda i: {"messages": [*messages(i), CHOICES[0]["message"]] * 2},
}


@pytest.mark.parametrize("note", NOTES)
def test_what_was_assumed_is_said(tmp_path: Path, advise: Any, note: str) -> None:
    records = [{"time": i, **NOTES[note](i)} for i in range(9)]
    told = advise("--trace", written(tmp_path / "log", records))
    assert told.status == 0
    assert note in " ".join(told.out.split())


# --- what a template puts before the messages ---


def test_tools_are_part_of_the_prompt_unless_they_are_off(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 2000}}
    lengths = []
    off = {"tools": [tool], "tool_choice": "none"}
    for more in ({}, {"tools": [tool]}, {"functions": [tool]}, off):
        record = {"time": 0, **chat(0, **more), "usage": {"completion_tokens": 9}}
        lengths.append(read(written(tmp_path / "log", [record]))[0][0].input_length)
    assert lengths[1] == pytest.approx(lengths[0] + 520, abs=5)
    assert lengths[2] == lengths[1]
    assert lengths[3] == lengths[0]


def test_calls_and_results_of_tools_are_part_of_the_prompt(tmp_path: Path) -> None:
    text = {"type": "text", "text": "r" * 400}
    turns: list[list[Record]] = [
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "a" * 400}}]},
         {"role": "tool", "content": "r" * 400}],
        [{"role": "assistant", "content": [{"type": "tool_use", "input": {"a": "a" * 392}}]},
         {"role": "user", "content": [{"type": "tool_result", "content": [text]}]}],
        [{"type": "function_call", "name": "f", "arguments": "a" * 400},
         {"type": "function_call_output", "output": "r" * 400}],
        [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": "a" * 392}}}]},
         {"parts": [{"functionResponse": {"name": "f", "response": {"result": "r" * 386}}}]}],
    ]  # fmt: skip
    for number, turn in enumerate(turns):
        key = "input" if number == 2 else "messages"
        usage = {"completion_tokens": 9}
        record = {"time": 0, "request": {key: [*messages(0), *turn]}, "usage": usage}
        requests, _ = read(written(tmp_path / "log", [record]))
        assert requests[0].input_length == pytest.approx(1100 + 200 + 12, abs=15)


# --- refused, left out, noted ---


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"session_params": {"id": "s"}}, "session_params: the prompt continues a session"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: the prompt continues"),
        ({"conversation": "conv_1", "input": "x"}, "conversation: the prompt continues"),
        ({"input_embeds": [[0.5]]}, "input_embeds: the prompt is not text"),
        ({"sampling_params": {"beam_width": 4}}, "beam_width: beam search is not simulated"),
        ({"n": 10**9}, "n: 1,000,000,000 answers to a prompt; allowed: up to 65,536"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search: beam search"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "type 'hologram'"),
        ({"messages": [{"role": "user", "content": 7}]}, "content is 7"),
        ({"messages": ["x" * 9000, 7]}, "a message is not an object: 7"),
        ({"messages": [{"role": "user", "body": "x"}]}, "without content; its keys are role, body"),
        ({"response": '{"choices": [{"message": {"con'}, "response was cut when it was logged"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(
    tmp_path: Path, more: Record, reason: str
) -> None:
    with pytest.raises(TraceError, match=reason) as found:
        read_shape(tmp_path, lambda i: {"time": i, "request": chat(i, **more), **ANSWER})
    assert len(str(found.value)) < 500


def test_a_request_that_is_logged_before_its_answer_too_gives_no_verdict(tmp_path: Path) -> None:
    begun = [{"time": i, "request_id": f"r{i}", "request": chat(i, max_tokens=9)} for i in range(9)]
    records = [each for one in begun for each in (one, {**one, "response": ANSWER})]
    with pytest.raises(TraceError, match=r"9 of 18 lines .* 'r0' was also logged before"):
        read(written(tmp_path / "log", records))


def test_what_generates_nothing_is_left_out_and_named(tmp_path: Path) -> None:
    others: list[Record] = [
        {"time": 1, "path": "/v1/embeddings", "request": {"input": "text"}, "response": {}},
        {"time": 1, "url": "/v1/models", "response": {"status": 200}},
        {"time": 1, "request": "GET /health HTTP/1.1", "status": 200, "request_body": ""},
        {"time": 1, "request": {"input": ["a", "b"]}, "usage": {"completion_tokens": 1}},
        {"time": 1, "request": {"input": "a"}, "response": {"object": "list", "data": []}},
        {"time": 1, "event": "request.received", "obj": {"text": "abc"}},
        {"time": 1, "rid": "HEALTH_CHECK_1", "input_ids": [0], "usage": {"completion_tokens": 1}},
        {"time": 1, **chat(0), "completion_tokens": 0, "finish_reason": {"type": "length"}},
        {"arguments": [["abc", " d"]], "resps": [["-0.5", "False"]]},
        {"time": 1, "request": chat(0), "response": {"status_code": 500, "error": "x"}},
        {"time": 1, **chat(0), "usage": {"prompt_tokens": 1100, "completion_tokens": 0}},
        *[{"time": 9, "request_id": "r", "request": chat(0), "response": ANSWER}] * 2,
    ]  # fmt: skip
    path = written(tmp_path / "log", [shape_of("plain", i) for i in range(4)] + others)
    requests, trace = read(path)
    assert len(requests) == 5
    assert trace.errors.count == 0
    assert trace.errors.left_out == {
        "records that repeat another one": 1,
        "requests to /v1/embeddings, which generate nothing": 1,
        "requests to /v1/models, which generate nothing": 1,
        "requests to /health, which generate nothing": 1,
        "requests for embeddings, which generate nothing": 2,
        "lines of the event request.received": 1,
        "health checks of SGLang": 1,
        "prefills of prompts with several answers": 1,
        "requests to loglikelihood, which generate nothing": 1,
        FAILED: 2,
    }


STEPS: dict[str, tuple[Record, Record]] = {  # a record around a model call, and the call
    "langfuse": ({"type": "SPAN"}, {"type": "GENERATION"}),
    "langsmith": ({"run_type": "chain", "completion_tokens": 120}, {"run_type": "llm"}),
    "openinference": (
        {"attributes": {"openinference.span.kind": "AGENT"}},
        {"attributes": {"openinference.span.kind": "LLM"}},
    ),
    "datadog": ({"span_kind": "workflow"}, {"span_kind": "llm"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_prompt_that_a_tracer_repeats_is_asked_once(tmp_path: Path, name: str) -> None:
    step, call = STEPS[name]
    records = []
    for i in range(REQUESTS):
        asked = {"start_time": iso(i), "input": messages(i)}
        records += [asked | step, asked | {"output": ANSWER} | call]
    records.append({"start_time": iso(REQUESTS), "input": {"question": "x"}} | step)
    requests, trace = read(written(tmp_path / "log", records))
    assert len(requests) == REQUESTS
    assert {each.output_length for each in requests} == {OUTPUT_TOKENS}
    assert trace.errors.count == 0
    ((reason, count),) = trace.errors.left_out.items()
    assert reason.startswith("steps of the kind ")
    assert count == REQUESTS + 1


@pytest.mark.parametrize("kind", [{"type": "EVENT"}, {"span_kind": "SPAN_KIND_CLIENT"}])
def test_other_kinds_of_records_are_requests(tmp_path: Path, kind: Record) -> None:
    requests, _ = read_shape(tmp_path, lambda i: shape_of("plain", i) | kind)
    assert len(requests) == REQUESTS


def test_lines_of_text_between_requests_are_left_out(tmp_path: Path) -> None:
    lines = (
        "[2026-05-01 12:00:00] Decode batch, #running-req: 8",
        'INFO:     127.0.0.1:80 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        "2026-05-01 12:00:00,123 - WARNING - slow",
    )
    path = tmp_path / "log"
    both = (f"{lines[i % 3]}\n{json.dumps(shape_of('plain', i))}\n" for i in range(REQUESTS))
    path.write_text("".join(both))
    requests, trace = read(path)
    assert len(requests) == REQUESTS
    assert trace.errors.count == 0
    assert trace.errors.left_out == {"lines of text, as a server logs them": REQUESTS}


def test_the_output_of_a_server_is_a_log(tmp_path: Path) -> None:
    """Warnings and many lines of the start come first."""
    begin = [
        "lib/x.py:7: UserWarning: old",
        "  warnings.warn(",
        "[2026-05-01 12:00:00] args={'a': 1}",
    ]
    lines = [f"[2026-05-01 12:00:00] {json.dumps(shape_of(SGLANG, i))}" for i in range(REQUESTS)]
    for texts, format in ((begin * 20, "auto"), ([begin[2]], "auto"), (begin * 20, "openai")):
        (tmp_path / "log").write_text("\n".join([*texts, *lines, begin[1], ""]))
        requests, trace = read(tmp_path / "log", format=format)
        assert [each.arrival for each in requests] == [i / 4 for i in range(REQUESTS)]
        assert trace.errors.count == 0
        assert sum(trace.errors.left_out.values()) == len(texts) + 1


def test_text_that_the_log_has_cut_is_refused(tmp_path: Path) -> None:
    """SGLang's log level 2 keeps 1,024 characters at each end of a text."""
    cut = SYSTEM[:1024] + "..." + SYSTEM[-1024:]
    for obj in ({"text": cut}, {"input_ids": [1, 2, "...", 3]}):
        out = {"meta_info": {"completion_tokens": 9}}
        record = {"event": "request.finished", "obj": obj, "out": out}
        with pytest.raises(TraceError, match="cut when it was logged; --log-requests"):
            read_shape(tmp_path, lambda i, record=record: {"timestamp": i, **record})


WRONG = (
    *(None, True, -1, 1.5, math.nan, math.inf, 10**30, "", "x", "[", "{}", "[1]", '{"a": 1}'),
    *([], {}, [None], [[]], [{}], {"role": 1}, [1, "a"], "\ud800", {"$date": None}, [[1], [2]]),
    *({"seconds": "x", "nanos": []}, {"type": "image_url"}, {"type": 3}, "data: {}", 2**63),
)


def test_a_value_of_any_type_anywhere_is_read_or_refused() -> None:
    """Only a refusal may be raised, since one line must not end the reading of a log."""
    draws, refused = random.Random(5), 0
    for _ in range(3000):
        record = json.loads(json.dumps(shape_of(draws.choice([*SHAPES]), 1)))
        for _ in range(draws.choice((1, 1, 3))):
            places = [*inner_places(record)]
            if places:
                place, key = draws.choice(places)
                place[key] = copy.deepcopy(draws.choice(WRONG))
        try:
            found = read_record(record, TraceErrors(), untimed=draws.choice((None, 1.0)))
        except (ValueError, NotReplayed):
            refused += 1
        else:
            assert all(to_request(each, TraceErrors()).output_length > 0 for each in found)
    assert 500 < refused < 2500


def inner_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every place within a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value) if type(value) is list else 0)
    for key in keys:
        yield value, key
        yield from inner_places(value[key])


# --- data sets, which have no times ---


@pytest.mark.parametrize(
    "turns", ["conversations", "conversation", "messages", "instruction", "context", "arguments"]
)
def test_a_data_set_is_replayed_at_a_rate(tmp_path: Path, turns: str) -> None:
    def record(i: int) -> Record:
        if turns in ("messages", "conversation"):
            return {turns: [*messages(i), {"role": "assistant", "content": "a" * 480}]}
        if turns in ("instruction", "context"):
            asked = {turns: SYSTEM, "input" if turns == "instruction" else "prompt": QUESTIONS[i]}
            return {**asked, "output": "a" * 480}
        if turns == "arguments":  # a sample of lm-evaluation-harness
            asked = {"arg_0": json.dumps(messages(i)), "arg_1": {"max_gen_toks": 900}}
            return {"doc": {"text": "x"}, turns: {"gen_args_0": asked}, "resps": [["a" * 480]]}
        asked = {"from": "human", "value": QUESTIONS[i]}
        rest = [asked, {"from": "gpt", "value": "a" * 480}, asked]
        return {"id": f"c{i}", "conversations": [{"from": "system", "value": SYSTEM}, *rest]}

    path = tmp_path / "set.json"
    path.write_text(json.dumps([record(i) for i in range(REQUESTS)]))  # an array in one line
    requests, _ = read(path, untimed=True)
    assert len(requests) == REQUESTS
    assert requests[0].input_length == pytest.approx(1100, abs=10)
    assert {each.output_length for each in requests} == {120}
    assert shared(requests[0], requests[1]) == pytest.approx(1000, abs=10)
    with pytest.raises(TraceError, match=r"no time: .* or --rate"):
        read(path)


def test_at_a_rate_a_time_that_cannot_be_read_does_not_matter(tmp_path: Path) -> None:
    def record(i: int) -> Record:
        return {"time": f"00:00:{i:02}", **chat(i), **ANSWER}

    requests, _ = read_shape(tmp_path, record, untimed=True)
    assert [each.arrival for each in requests] == list(range(REQUESTS))
    records = [
        {"request": "GET /health HTTP/1.1"},  # a line without a time
        *({"ts": 5 * i, **chat(i), **ANSWER} for i in range(2)),
    ]
    timed, _ = read(written(tmp_path / "timed", records), untimed=True)
    assert [each.arrival for each in timed] == [0, 5]
    with pytest.raises(TraceError, match="is not a time"):
        read_shape(tmp_path, record)
