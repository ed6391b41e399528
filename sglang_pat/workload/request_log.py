"""Reads requests from logs of APIs: the formats `openai` and `tokens`, and SGLang's logs.

A record is one JSON object: a request of the chat, completions, messages or responses API, of
SGLang's /generate or of Ollama's API, with its answer and a time. The request may be the object
itself, or part of a gateway's record (`request`, `request.body`, JSON in a text). The answer may be
a stream of events. `request_fields.py` defines the keys, and `request_prompts.py` makes the
prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sglang_pat.messages import listed, quoted
from sglang_pat.workload import request_fields as fields
from sglang_pat.workload.request_layouts import attributes, in_known_keys, parse_json
from sglang_pat.workload.request_prompts import (
    Json,
    LoggedRequest,
    as_list,
    checked,
    is_prompt,
    is_set,
    namespace_of,
    prompts_of,
    role_of,
    whole_number,
)
from sglang_pat.workload.times import is_time, number_of, seconds
from sglang_pat.workload.trace import FAILED, NotReplayed, TraceErrors

_Placed: TypeAlias = tuple[tuple[str, ...], Json]  # the keys that lead to an object, and the object

_DEPTH = 6  # most levels of objects in a record
_LONG_VALUE = 200
_MOST_ANSWERS = 1 << 16  # to one prompt
_LONGEST_ANSWER = 1e5  # seconds; larger numbers are not durations
_LABEL = "have `n` above 1, but one answer: they count as one request each"
_TEXTS = ("prompt", "text")  # these are prompts, even if the text is JSON
_REQUEST_LINE = re.compile(r"[A-Z]{3,7} (\S+) HTTP/")
_ASKING = ("system", "human", "user", "tool", "observation")  # speakers of a prompt
_EVENT_LINE = re.compile(r"(?:data|event|id|retry)?:")
_DATA_LINE = re.compile(r"data: *(\{.*\}) *$")
# Keys of a server's answer; text of JSON without them is what a model wrote.
_ANSWER_KEYS = frozenset(("choices", "usage", "meta_info", "object", "error", "message", "type"))
_CUT_ANSWER = re.compile(r"\s*\{[^{}]*\"(?:choices|usage|meta_info)\"\s*:")


class _Answer(NamedTuple):
    """An answer in a log. lengths: number of tokens of each choice, or [] if unknown."""

    prompt_tokens: int | None
    output_tokens: int | None
    media_tokens: int | None
    lengths: list[int]
    prompt_ids: list[Any] | None


# --- a record ---


def read_record(
    record: Json, errors: TraceErrors, *, untimed: float | None = None
) -> list[LoggedRequest]:
    """Return the requests of a record: `n` requests for each of its prompts.

    Parameters
    ----------
    untimed
        The arrival to use instead of the record's time. None: a record without a time is refused.

    Raises
    ------
    NotReplayed
        The record is understood but has nothing to replay.
    ValueError
        The record is not understood, or cannot be replayed. The message names the key.
    """
    objects = [*_objects(record)]
    event = _event(objects)
    if event is not None and event != "request.finished":
        raise NotReplayed(f"lines of the event {event[:40]}")
    step = _step(objects)
    if step is not None:
        raise NotReplayed(f"steps of the kind {step}, which call no model")
    asked = _asked(objects)
    path = _path(objects)
    if path is not None and (asked is None or fields.GENERATES_NOTHING.search(path)):
        raise NotReplayed(f"requests to {path[:60]}, which generate nothing")
    if asked is None and event is not None:
        raise ValueError("no prompt: SGLang logs it with --log-requests-level 3")
    if asked is None:
        raise ValueError(f"neither messages nor a prompt; its keys are {listed(record)}")
    # SGLang's own logs have n records for a request with `n` answers, and each repeats the key `n`.
    is_own = event is not None or "request_parameters" in record
    arrival = untimed if untimed is not None else _arrival(objects)
    return requests_of(
        asked, objects, arrival, errors, is_flat=asked is objects[0][1], expands=not is_own
    )


def requests_of(
    asked: Json,
    found: Json | Sequence[_Placed],
    arrival: float,
    errors: TraceErrors,
    *,
    is_flat: bool = False,
    expands: bool = True,
) -> list[LoggedRequest]:
    """Return the generation requests of one API request. Raises the errors of `read_record`.

    Parameters
    ----------
    found
        The answer, or the objects of the record that has the answer.
    is_flat
        Whether the keys of request and record are in the same object.
    expands
        Whether to return `n` requests for `n` answers. False if the log has one record per answer.
    """
    if str(asked.get("rid")).startswith("HEALTH_CHECK"):
        raise NotReplayed("health checks of SGLang")
    extra = asked.get("extra_body")
    asked = {**asked, **extra} if isinstance(extra, Mapping) else asked
    if not isinstance(found, Mapping):
        asked = {**_tools_beside(asked, found), **asked}
    nested = [in_known_keys(one) for key in fields.NESTED for one in _mappings(asked.get(key))]
    for source in (asked, *nested):
        for key in fields.REFUSED.keys() & source.keys():
            value = source[key]
            is_label = key == "conversation" and "input" not in source
            is_label |= key == "context" and isinstance(value, str)
            if is_set(value) and not is_label and not (key == "beam_width" and value == 1):
                raise ValueError(f"{key}: {fields.REFUSED[key]}, so it cannot be replayed")
    for source in (asked, *nested):
        _note_unknown(source, errors, is_flat and source is asked)
    objects = (
        [((fields.ANSWER, *path), each) for path, each in _objects(found)]
        if isinstance(found, Mapping)
        else found
    )
    answer = _answer(objects)
    if answer.output_tokens == 0 and any(map(_asks_for_none, (each for _, each in objects))):
        raise NotReplayed("prefills of prompts with several answers")
    if answer.output_tokens == 0 or (not answer.output_tokens and _has_failed(objects)):
        raise NotReplayed(FAILED)
    if any(_is_embedding(path, each) for path, each in objects):
        raise NotReplayed("requests for embeddings, which generate nothing")
    if not any(is_prompt(key, asked.get(key)) for key in fields.PROMPTS):
        raise ValueError("it holds neither input_ids nor text")
    if not answer.lengths:
        asked, answer = _with_answer_in_prompt(asked, answer, errors)
    prompts = prompts_of(asked, answer.prompt_ids)
    _check_repeats(objects, prompts, answer, errors)
    copies = max(
        whole_number(source.get(key)) or 1 for source in (asked, *nested) for key in fields.COPIES
    )
    copies = copies if expands else 1
    if is_flat and copies > 1 and len(answer.lengths) != len(prompts) * copies:
        is_label = len(answer.lengths) == len(prompts)  # for example the number of an attempt
        errors.choose(_LABEL if is_label else "count as several requests each, as `n` says")
        copies = 1 if is_label else copies
    if copies > _MOST_ANSWERS:
        raise ValueError(f"n: {copies:,} answers to a prompt; allowed: up to {_MOST_ANSWERS:,}")
    lengths = _output_lengths(asked, nested, answer, len(prompts) * copies, errors)
    counted = answer.prompt_tokens if len(prompts) == 1 else None
    models = (each.get("model") for path, each in objects if fields.ANSWERS.isdisjoint(path))
    model = next((each for each in (asked.get("model"), *models) if isinstance(each, str)), "")
    namespace = namespace_of(asked, model[:200], errors)
    requests = []
    for index, prompt in enumerate(prompts):
        prompt, counted = checked(prompt, counted, answer.media_tokens, errors)
        of_prompt = lengths[index * copies : (index + 1) * copies]
        requests += [
            LoggedRequest(arrival, prompt, length, counted, namespace) for length in of_prompt
        ]
    return requests


def _asks_for_none(found: Json) -> bool:
    """Return True for the prefill that SGLang logs before the `n` answers to a prompt."""
    reason = found.get("finish_reason")
    return isinstance(reason, Mapping) and reason.get("type") == "length"


def _tools_beside(asked: Json, objects: Sequence[_Placed]) -> Json:
    """Return the tools that a record has beside its request, as LiteLLM's and LangSmith's have."""
    if is_set(asked.get("tools")):
        return {}
    for path, each in objects:
        if fields.ANSWERS.isdisjoint(path) and as_list(each.get("tools")):
            return {"tools": each["tools"]}
    return {}


def _check_repeats(
    objects: Sequence[_Placed], prompts: list[Any], answer: _Answer, errors: TraceErrors
) -> None:
    """Raise ValueError if a request with this id and prompt was logged before it had an answer."""
    is_answered = answer.output_tokens is not None or bool(answer.lengths)
    if is_answered and not errors.unanswered:
        return
    ids = (
        value
        for path, found in objects if fields.ANSWERS.isdisjoint(path)
        for key, value in found.items() if fields.plain(key) in fields.REQUEST_IDS
    )  # fmt: skip
    name = next((each for each in ids if isinstance(each, (str, int))), None)
    if name is None:
        return
    request = hash((name, *(each if isinstance(each, tuple) else str(each) for each in prompts)))
    if not is_answered:
        errors.unanswered.add(request)
    elif request in errors.unanswered:
        raise ValueError(
            f"request {quoted(name)} was also logged before its answer; keep the lines with answers"
        )


def _is_embedding(path: tuple[str, ...], found: Json) -> bool:
    return not fields.ANSWERS.isdisjoint(path) and (
        "embedding" in found or found.get("object") in ("list", "embedding")
    )


def _with_answer_in_prompt(
    asked: Json, answer: _Answer, errors: TraceErrors
) -> tuple[Json, _Answer]:
    """Move the answer out of the conversation, in which data sets and some logs have it last."""
    names = ("conversations", "messages", "conversation")
    turns = next((found for name in names if (found := as_list(asked.get(name)))), [])
    is_data_set = answer.output_tokens is None
    answers = [i for i, turn in enumerate(turns) if i and _speaker(turn) not in _ASKING]
    keeps_first = is_data_set and "conversations" in asked
    if keeps_first:  # keep the first question and answer, as SGLang's benchmark does
        turns = turns[: answers[0] + 1 if answers else 2]
    elif not turns or role_of(turns[-1]) != "assistant":
        return asked, answer
    if len(turns) < 2:
        if not is_data_set:
            return asked, answer
        raise ValueError("the conversation holds no answer")
    if is_data_set and len(answers) > 1:
        kept = "first" if keeps_first else "last"
        errors.choose(f"have several answers, of which the {kept} counts")
    last = turns[-1]
    size = _answer_bytes(last.get("value") or last) if isinstance(last, Mapping) else 0
    rest = {key: value for key, value in asked.items() if key not in names}
    return {**rest, "messages": turns[:-1]}, answer._replace(
        lengths=[-(-size // 4)] if size else []
    )


def _speaker(turn: object) -> object:
    return (turn.get("from") or turn.get("role")) if isinstance(turn, Mapping) else None


def _objects(record: Json) -> Iterator[_Placed]:
    """Yield (path, object) for all objects of a record, outer ones first. Parses JSON in texts."""
    level: list[_Placed] = [((), record)]
    for _ in range(_DEPTH):
        deeper: list[_Placed] = []
        for path, given in level:
            found = in_known_keys(given)
            yield path, found
            for key, value in found.items():
                name = fields.plain(key)
                is_text = name in fields.OPAQUE or (isinstance(value, str) and name in _TEXTS)
                if is_text and (*path[-1:], name) not in fields.BODIES:
                    continue
                deeper += [((*path, name), inner) for inner in _inner(name, value)]
        level = deeper
    yield from level


def _inner(name: str, value: object) -> Iterator[Json]:
    if name == "attributes" and (found := attributes(value)) is not None:
        value = found
    lines = _lines(value) if name in fields.ANSWERS else []
    if isinstance(value, str) or lines:
        value = _parsed("\n".join(lines) or str(value))
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, list) and name in fields.ANSWERS:  # events of a stream, or answers
        yield from (each for each in value if isinstance(each, Mapping) and "role" not in each)


def _parsed(text: str) -> object:
    """Parse a text that is JSON (an object, a list of objects, JSON lines) or server-sent events.

    Return any other text itself.
    """
    stripped = text.strip()
    found: object = text
    if stripped[:1] in ("{", "[") and stripped[-1:] in ("}", "]"):
        found = parse_json(stripped)
        if isinstance(found, str) and "\n" in stripped:
            found = [parse_json(line) for line in stripped.split("\n") if line.strip()]
    elif _EVENT_LINE.match(stripped):
        # Not splitlines(), which also splits at other characters that may be in a text.
        lines = [line for line in re.split(r"\r\n|\r|\n", stripped) if line]
        if all(map(_EVENT_LINE.match, lines[:-1])):  # a log may cut the last line
            data = (_DATA_LINE.match(line) for line in lines)
            events = [parse_json(each[1]) for each in data if each]
            found = [each for each in events if isinstance(each, Mapping)] or text
    is_list = isinstance(found, list) and found and all(isinstance(e, Mapping) for e in found)
    return found if is_list or isinstance(found, Mapping) else text


def _asked(objects: Sequence[_Placed]) -> Json | None:
    """Return the outermost object that has a prompt, or None if no object has one."""
    for key in fields.PROMPTS:
        for path, found in objects:
            if fields.ANSWERS.isdisjoint(path) and is_prompt(key, found.get(key)):
                return found
    return None


def is_request(record: Json) -> bool:
    """Return True if a record has an API request, or is a line of SGLang's request log."""
    objects = [*_objects(record)]
    return _asked(objects) is not None or _event(objects) is not None


def records_of(found: Json) -> list[Json]:
    """Return the requests in an object of many: under their ids, or as calls of a trace."""
    calls = [*_calls(found)]
    if calls:
        return calls
    values = [*found.values()]
    names = set(map(fields.plain, found))
    if len(values) < 2 or not all(isinstance(each, Mapping) for each in values):
        return []
    if names & (fields.ANSWERS | fields.OPAQUE | {"request", "requestbody", "input", "inputs"}):
        return []
    return values if all(map(is_request, values)) else []


def _calls(found: Json, depth: int = 20) -> Iterator[Json]:
    """Yield the calls of a model that a tracer lists in a trace, or in its steps to this depth."""
    lists = (value for value in found.values() if isinstance(value, list))
    for each in (each for value in lists for each in value if isinstance(each, Mapping)):
        if each.get("type") == "GENERATION" or each.get("run_type") == "llm":
            yield each
        elif depth:
            yield from _calls(each, depth - 1)


def _event(objects: Iterable[_Placed]) -> str | None:
    """Return the event of a line of SGLang's request log, which may be in a container's record."""
    for _, found in objects:
        event = found.get("event")
        if isinstance(event, str) and event.startswith("request."):
            return event
    return None


def _step(objects: Sequence[_Placed]) -> str | None:
    """Return a record's kind if a tracer recorded a step that called no model, else None."""
    kind = objects[0][1].get("type")
    if isinstance(kind, str) and kind.isupper() and kind.lower() in fields.STEPS:
        # A record with an answer is a call of a model, even if its type is one of these words.
        return kind if _answer(objects).output_tokens is None else None
    for path, found in objects:
        for key, value in found.items():
            name = fields.plain(key)
            if not isinstance(value, str) or not fields.ANSWERS.isdisjoint(path):
                continue
            is_step = name == "runtype" or value.lower() in fields.STEPS
            if name in ("runtype", "spankind", "openinferencespankind") and is_step:
                return None if value.lower() == "llm" else value[:40]
    return None


def _path(objects: Iterable[_Placed]) -> str | None:
    for path, found in objects:
        if fields.ANSWERS.isdisjoint(path):
            for key, value in found.items():
                if isinstance(value, str) and value:
                    line = _REQUEST_LINE.match(value) if key == "request" else None
                    if line or fields.plain(key) in fields.PATHS:
                        return line[1] if line else value
    return None


def _has_failed(objects: Iterable[_Placed]) -> bool:
    for _, found in objects:
        for key, value in found.items():
            name = fields.plain(key)
            if name == "error" and isinstance(value, (str, Mapping)) and value:
                return True
            if name in fields.STATUSES and (
                value in ("failed", "cancelled", "error") or _code(value) >= 400
            ):
                return True
    return False


def _code(value: object) -> int:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) == 3 else 0


def has_time(record: Json) -> bool:
    """Return True if a record has a time of arrival."""
    try:
        _arrival([*_objects(record)])
    except ValueError:
        return False
    return True


def _times(objects: Iterable[Json]) -> dict[str, tuple[object, str | None]]:
    """Return the values and units of all times in the objects, by their names in `fields.TIMES`."""
    times: dict[str, tuple[object, str | None]] = {}
    for found in objects:
        for key, value in found.items():
            if is_time(value) or (is_set(value) and not isinstance(value, (list, Mapping))):
                name, unit = fields.time_name(fields.plain(key))
                if name in fields.TIMES:
                    times.setdefault(name, (value, unit))
    return times


def _arrival(objects: Sequence[_Placed]) -> float:
    of_sglang = _arrival_at_sglang(objects)
    if of_sglang is not None:
        return of_sglang
    # A time in an answer is often that of its end, so it counts only if there is no other time.
    asked = (found for path, found in objects if fields.ANSWERS.isdisjoint(path))
    times = _times(asked) or _times(found for _, found in objects)
    took = {name: number_of(times[name][0]) for name in fields.DURATIONS if name in times}
    took = {
        name: found for name, found in took.items() if found is not None and found < _LONGEST_ANSWER
    }
    names = [name for name in fields.TIMES if name in times]
    if not names:
        raise ValueError(
            "no time: one of timestamp, created, created_at, time, start_time is needed, or --rate"
        )
    name = next((each for each in names if each not in took), names[0])
    # nginx logs the time at which the answer was complete, so subtract the duration.
    duration = (took.get("requesttime") or 0.0) * (name in fields.OF_NGINX)
    return seconds(*times[name]) - duration


def _arrival_at_sglang(objects: Sequence[_Placed]) -> float | None:
    """Return the arrival in SGLang's log or in its metrics of requests, None for other records.

    `received_time` in both counts from the start of the machine. Only --enable-metrics adds the
    time of arrival, `request_received_ts`.
    """
    is_log = _event(objects) == "request.finished"
    if not is_log and "request_parameters" not in objects[0][1]:
        return None
    values = {key: value for _, found in reversed(objects) for key, value in found.items()}
    if is_set(received := values.get("request_received_ts")):
        return seconds(received)
    answered = values.get("timestamp" if is_log else "response_sent_to_client_ts")
    if answered is None:
        raise ValueError("no time: SGLang gives it with --enable-metrics; else --rate is needed")
    return seconds(answered) - (number_of(values.get("e2e_latency")) or 0.0)


def _note_unknown(asked: Json, errors: TraceErrors, is_flat: bool) -> None:
    """Count the keys that no table has. In a flat record, count only those with large values."""
    for key in asked.keys() - fields.KNOWN:
        value, name = asked[key], fields.plain(key)
        is_large = isinstance(value, (list, Mapping)) or len(str(value)) > _LONG_VALUE
        is_unknown = name not in fields.OF_RECORDS and not fields.OF_SPANS.match(key)
        if is_set(value) and is_unknown and (is_large or not is_flat):
            errors.unknown[str(key)[:40]] = errors.unknown.get(str(key)[:40], 0) + 1


# --- the answer ---


def _answer(objects: Sequence[_Placed]) -> _Answer:
    """Collect the answer from the objects of a record."""
    prompt: list[int] = []
    output: dict[object, int] = {}  # tokens of each answer; /generate may give several
    media: list[int] = []
    for found in _usages(objects):
        names = {fields.plain(key): value for key, value in found.items()}
        # Tracers count under the keys input and output.
        if None not in (whole_number(names.get("input")), whole_number(names.get("output"))):
            names.setdefault("inputtokens", names.get("input"))
            names.setdefault("outputtokens", names.get("output"))
        read = [(name, whole_number(names[name])) for name in fields.INPUT_TOKENS & names.keys()]
        for name, count in read:
            if count is not None:
                cached = sum(whole_number(names.get(each)) or 0 for each in fields.CACHED_TOKENS)
                prompt.append(count + (cached if name == "inputtokens" else 0))
        for name in fields.OUTPUT_TOKENS & names.keys():
            if (count := whole_number(names[name])) is not None:
                key = str(names.get("id")) if "finishreason" in names else None
                output[key] = max(count, output.get(key, 0))
        details = (value for value in found.values() if isinstance(value, Mapping))
        for each in (found, *details):
            counts = [
                whole_number(each[key]) for key in each if fields.plain(key) in fields.MEDIA_TOKENS
            ]
            if any(counts):
                media.append(sum(filter(None, counts)))
    lengths, prompt_ids = _texts(objects)
    # Each event of a stream counts all tokens until then, so the largest count is correct. Some
    # gateways write a count of 0 for streams. Then the length of the text is used instead.
    counted = sum(output.values()) if output else None
    return _Answer(
        max(prompt, default=0) or None,
        counted or (None if lengths else counted),
        max(media, default=None),
        lengths,
        prompt_ids,
    )


def _usages(objects: Sequence[_Placed]) -> list[Json]:
    """Return the objects that count tokens. Such an object has a known name, or else known keys."""
    named = [found for path, found in objects if path and path[-1] in fields.USAGES]
    counts = [
        each for each in named if any(fields.plain(key) in fields.OUTPUT_TOKENS for key in each)
    ]
    if counts or any("output" in each for each in named):
        return named
    for keys in (fields.OUTPUT_TOKENS, fields.INPUT_TOKENS):
        flat = [found for _, found in objects if not keys.isdisjoint(map(fields.plain, found))]
        if flat:
            break
    return named + flat[:1]


def _texts(objects: Sequence[_Placed]) -> tuple[list[int], list[Any] | None]:
    """Return the number of tokens of each choice, and the prompt's ids or None.

    The numbers are those of the choices' ids or, without ids, estimates by the choices' texts.
    """
    # A log may have the same answers as choices, as events of a stream, and as texts.
    choices: dict[object, int] = {}
    events: dict[object, int] = {}
    texts: dict[object, int] = {}
    structured: dict[object, int] = {}
    prompt_ids: list[Any] | None = None

    def add(sizes: dict[object, int], index: object, *values: object) -> None:
        sizes[index] = sizes.get(index, 0) + sum(map(_answer_bytes, values))

    ids: dict[object, int] = {}
    for number, (path, found) in enumerate(objects):
        is_answer = not fields.ANSWERS.isdisjoint(path)
        for choice in as_list(found.get("choices")) or as_list(found.get("candidates")):
            if not isinstance(choice, Mapping):
                continue
            index = choice.get("index")
            index = index if isinstance(index, int) else len(choices)
            message = choice.get("message") or choice.get("delta") or choice.get("content")
            add(choices, index, choice.get("text"), message)
            for key in ("response_token_ids", "token_ids"):
                if isinstance(choice.get(key), list):
                    ids[index] = ids.get(index, 0) + len(choice[key])
            given = choice.get("prompt_token_ids")
            prompt_ids = given if isinstance(given, list) and given else prompt_ids
        if isinstance(given := found.get("input_ids"), list) and path[-1:] == ("sglext",):
            prompt_ids = given
        for key in ("output_ids", "output_token_ids"):
            given = found.get(key)
            if isinstance(given, list) and given:
                nested = [each for each in given if isinstance(each, list)] or [given]
                ids.update({(number, i): len(each) for i, each in enumerate(nested)})
        if found.get("role") == "assistant" or (is_answer and found.get("type") == "message"):
            add(texts, "message", found)
        kind = found.get("type")
        if kind in ("content_block_delta", "content_block_start"):
            add(events, "message", found.get("delta"), found.get("content_block"))
        elif isinstance(kind, str) and kind.endswith(".delta"):
            add(events, "message", found.get("delta"))
        elif is_answer and kind in ("function_call", "reasoning"):
            add(texts, "message", found)
        if is_answer and kind is None and found.get("role") is None:
            for key in ("text", "content"):
                if isinstance(found.get(key), str):
                    add(texts, number, found[key])
                    break
        for key in filter(found.get, fields.ANSWER_TEXTS):
            value = found[key]
            lines = _lines(value)
            if isinstance(value, str):
                parsed = _parsed(value)
                if isinstance(parsed, str):
                    if _CUT_ANSWER.match(value):
                        raise ValueError(f"{key} was cut when it was logged: its JSON has no end")
                    add(texts, "message", value)
                elif not any(_ANSWER_KEYS & each.keys() for each in _mappings(parsed)):
                    structured["message"] = -(-_answer_bytes(value) // 4)
            elif lines and isinstance(_parsed("\n".join(lines)), str):
                for index, line in enumerate(lines):
                    add(texts, (number, index), line)
            elif isinstance(value, list):
                add(texts, "message", [each for each in value if role_of(each) == "assistant"])
            if not isinstance(value, Mapping):
                break  # the next key would repeat the text
    answers = max((choices, events, texts), key=lambda sizes: sum(sizes.values()))
    estimated = [-(-length // 4) for length in answers.values() if length]
    # A text that is JSON, but not a server's answer, is what the model wrote.
    return [*ids.values()] or estimated or [*structured.values()], prompt_ids


def _lines(value: object) -> list[str]:
    """Return the value if it is a list of texts, else an empty list."""
    found = as_list(value)
    return found if all(isinstance(each, str) for each in found) else []


def _answer_bytes(value: object) -> int:
    """Return the bytes of all text that a model generated.

    value: an answer or a part of one, in the format of any API.
    """
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if isinstance(value, list):
        return sum(map(_answer_bytes, value))
    if not isinstance(value, Mapping):
        return 0
    found = sum(
        _answer_bytes(value.get(key))
        for key in (
            "content",
            "text",
            "parts",
            "refusal",
            "summary",
            "partial_json",
            "arguments",
            "name",
        )
    )
    # Servers return the reasoning under one of these keys, or repeat it under two.
    thoughts = ("reasoning_content", "reasoning", "thinking")
    found += max(_answer_bytes(value.get(key)) for key in thoughts)
    for call in (*as_list(value.get("tool_calls")), value.get("function_call")):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        found += _answer_bytes(function)
    given = value.get("input")  # the input of a tool
    return found + (len(json.dumps(given)) if isinstance(given, Mapping) and given else 0)


def _mappings(value: object) -> list[Json]:
    """Return [value] if `value` is an object. If it is a list, return only its first object.

    For a batch, `value` is a list with the parameters of each prompt, which are all the same.
    """
    found = value[:1] if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, Mapping)]


def _output_lengths(
    asked: Json, nested: Sequence[Json], answer: _Answer, count: int, errors: TraceErrors
) -> list[int]:
    """Return the number of tokens of each of `count` answers.

    The numbers come from `usage`, else from the answers' ids or texts, else from the request's
    limit.
    """
    weights = answer.lengths if len(answer.lengths) == count else [1] * count
    if answer.output_tokens is not None:
        total = answer.output_tokens
    elif answer.lengths and asked.get("echo"):
        raise ValueError("echo: the answer repeats the prompt, and usage does not count it")
    elif answer.lengths:
        total = sum(answer.lengths)
    else:
        limits = (source.get(key) for key in fields.LIMITS for source in (asked, *nested))
        limit = next((found for each in limits if (found := whole_number(each))), None)
        limit = errors.longest_answer if limit is None else limit
        if limit is None:
            raise ValueError(
                "the answer has no length: usage.completion_tokens, its text, "
                f"{' or '.join(fields.LIMITS[:3])} must give it, or --max-new-tokens"
            )
        errors.limited += count
        return [limit] * count
    if count == 1:
        return [max(1, total)]
    shares = np.cumsum([0, *weights]) / sum(weights)
    ends = np.round(shares * total).astype(int)
    return [max(1, int(end - begin)) for begin, end in pairwise(ends)]
