"""Brings an object of a log to the keys of the chat API or the completions API.

Tracers, data sets and evaluation tools have requests and answers under keys of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from sglang_pat.workload import request_fields as fields
from sglang_pat.workload.request_prompts import Json, as_list, role_of

_MESSAGES = ("messages", "input", "conversation", "conversations")  # lists, or JSON texts of lists
# Keys of OpenTelemetry's conventions for generative AI, of its older conventions and of
# OpenInference -> keys of the chat API.
_KEYS = {
    "gen_ai.request.model": "model",
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.system_instructions": "system",
    "gen_ai.input.messages": "messages",
    "gen_ai.output.messages": "output",
    "gen_ai.prompt": "messages",
    "gen_ai.completion": "output",
    "llm.input_messages": "messages",
    "llm.output_messages": "output",
}
# Plain names of keys -> keys of the chat API or the completions API, whose keys may be written in
# other cases (maxTokens, Prompt). But N is often the number of a row.
_NAMES = {fields.plain(key): key for key in (*fields.KNOWN - {"n"}, *fields.ANSWER_TEXTS)} | {
    "contents": "messages",
    "systeminstruction": "system",
    "systemprompt": "system",
    "systemmessage": "system",
    "userprompt": "prompt",
    "prompttext": "prompt",
}
# An attribute of a span that belongs to one message: its list, its place in the list, its key.
_OF_MESSAGE = re.compile(
    r"(gen_ai\.(?:prompt|completion)|llm\.(?:input|output)_messages)\.(\d{1,4})\.(.+)"
)
# Keys of a question that a data set has beside its `history`, in their order in the prompt.
_QUESTIONS = ("instruction", "prompt", "query", "input")
_WRAPPERS = frozenset(("message", "tool_call", "message_content"))  # keys of OpenInference
_decode = msgspec.json.Decoder().decode


def in_known_keys(found: Json) -> Json:
    """Return the object with its messages under a known key, and as a list instead of as JSON."""
    if isinstance(found.get("resps"), list) and found.get("arguments"):
        return _of_evaluation(found)
    given = _with_messages(found)
    names = {key: _known_key(key) for key in given}
    found = {name: given[key] for key, name in names.items() if name == key or name not in given}
    if role_of(next(iter(as_list(found.get("query"))), None)) is not None:  # SWE-agent
        found["messages"] = found.pop("query")
    for key in _MESSAGES:
        value = found.get(key)
        found[key] = [value] if role_of(value) else _list_of_messages(value) or value
    if turns := _earlier_turns(found.get("history")):
        texts = [found.get(key) for key in _QUESTIONS]
        if question := "\n".join(each for each in texts if isinstance(each, str) and each):
            found |= dict.fromkeys((*_QUESTIONS, "history"))
            found["messages"] = [*turns, {"role": "user", "content": question}]
    return {key: value for key, value in found.items() if value is not None}


def _earlier_turns(value: object) -> list[Any]:
    """Return the messages of `history`, or [] if it is no list of messages or of their pairs."""
    turns: list[Any] = []
    for each in as_list(value):
        if role_of(each) is not None:
            turns.append(each)
        elif isinstance(each, list) and [*map(type, each)] == [str, str]:
            said = zip(("user", "assistant"), each, strict=True)
            turns += [{"role": role, "content": text} for role, text in said]
        else:
            return []
    return turns


@lru_cache(maxsize=4096)
def _known_key(key: str) -> str:
    if key in _KEYS or key in fields.KNOWN or "." in key:
        return _KEYS.get(key, key)
    return _NAMES.get(fields.plain(key), key)


def attributes(value: object) -> Json | None:
    """Return the attributes of a span, which OTLP writes as a list of keys and values, or None."""
    if not isinstance(value, list) or not value:
        return None
    found = {}
    for each in value:
        if not isinstance(each, Mapping) or each.keys() != {"key", "value"}:
            return None
        inner = each["value"]
        found[str(each["key"])] = (
            next(iter(inner.values()), None) if isinstance(inner, Mapping) else inner
        )
    return found


def parse_json(text: str) -> object:
    """Parse a text that is JSON. Return any other text itself."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text


def _list_of_messages(value: object) -> list[Any] | None:
    """Return the messages that a text holds as JSON, or None if it holds none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    parsed = parse_json(value)
    is_list = isinstance(parsed, list) and bool(parsed) and role_of(parsed[0]) is not None
    return parsed if is_list else None  # type: ignore[return-value]


def _with_messages(found: Json) -> Json:
    """Return the object with lists of messages in place of their single attributes."""
    rest: dict[str, Any] = {}
    lists: dict[str, dict[Any, Any]] = {}
    for key, value in found.items():
        parts = _OF_MESSAGE.fullmatch(key) if key[:4] in ("gen_", "llm.") else None
        if parts is None:
            rest[key] = value
        else:
            message = lists.setdefault(parts[1], {}).setdefault(int(parts[2]), {})
            _put(message, [each for each in parts[3].split(".") if each not in _WRAPPERS], value)
    return {**rest, **{name: _ordered(messages) for name, messages in lists.items()}}


def _put(place: dict[Any, Any], path: list[str], value: object) -> None:
    for key in path[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            return
        place = inner
    if path:
        place[path[-1]] = value


def _ordered(value: Any) -> Any:
    """Return lists in place of dicts whose keys are numbers."""
    if not isinstance(value, dict):
        return value
    if value and all(str(key).isdecimal() for key in value):
        return [_ordered(value[key]) for key in sorted(value, key=int)]
    return {("content" if k == "contents" else k): _ordered(each) for k, each in value.items()}


def _of_evaluation(found: Json) -> Json:
    """Return the request of a sample of EleutherAI's lm-evaluation-harness, and its answers."""
    asked, answers = found["arguments"], found["resps"]
    calls = [*asked.values()] if isinstance(asked, Mapping) else as_list(asked)
    first = calls[0] if calls else None
    values = [*first.values()] if isinstance(first, Mapping) else as_list(first)
    if len(values) < 2:
        return found
    prompt, options = values[:2]
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
    key = "prompt" if _list_of_messages(prompt) is None else "messages"
    request = {key: _list_of_messages(prompt) or prompt}
    if not isinstance(options, Mapping):  # the likelihood of a text
        return {**request, "path": "loglikelihood"}
    texts = answers[0] if answers and isinstance(answers[0], list) else answers
    return {**request, **options, "n": len(texts), "outputs": texts}
