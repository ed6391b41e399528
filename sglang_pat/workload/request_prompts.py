"""Makes prompts of requests to APIs, from messages and texts, much like a chat template.

The tokens of a text are estimated. If the log has `usage.prompt_tokens`, this count determines the
bytes per token and the length of each prompt (`to_request`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sglang_pat.messages import listed, quoted
from sglang_pat.workload import request_fields as fields
from sglang_pat.workload.trace import (
    NotReplayed,
    TokenIds,
    TokenPrompt,
    TraceErrors,
    TraceRequest,
    text_tokens,
)

Json: TypeAlias = Mapping[str, Any]

IMAGE_TOKENS = 1024  # of an image; a guess, used without `usage`
# Fewest and most bytes per token. Texts in English, code and most other scripts are in between.
_BYTES_PER_TOKEN = (1.0, 8.0)
# If a text has fewer or more bytes per token than these limits, it is not the prompt that `usage`
# has counted. But a short text may have more bytes per token, and a template may add tokens, for
# example its own system prompt.
_LEAST_BYTES, _MOST_BYTES, _SHORT_TEXT, _TEMPLATE_TOKENS = 1.5, 16, 1024, 256
_MARK = re.compile(r"<\|?(?:image|video|audio|vision)[^<>\s]{0,24}>", re.I)
_MASK = (1 << 62) - 1


class Media(NamedTuple):
    """An image or other medium in a prompt. tokens: how many it takes, None if unknown."""

    kind: str
    identity: int
    tokens: int | None = None


Part: TypeAlias = bytes | Media


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request of a log, before its texts are turned into tokens.

    Attributes
    ----------
    prompt
        Token ids if the log has them, else texts and media in order.
    prompt_tokens
        Tokens of the prompt as `usage` counts them. None if `usage` is missing or counts several
        prompts together.
    namespace
        A hash of model, adapter and salt. Requests in different namespaces share no KV.
    """

    arrival: float
    prompt: TokenIds | tuple[Part, ...]
    output_length: int
    prompt_tokens: int | None = None
    namespace: int = 0


# --- the prompts of a request ---


def is_prompt(key: str, value: object) -> bool:
    """Return True if `value` is one or more prompts. key: one of `fields.PROMPTS`."""
    if isinstance(value, str):
        return bool(value) and key in ("prompt", "input", "text", "instruction")
    is_list = isinstance(value, (list, tuple)) or hasattr(value, "typecode")
    return is_list and (key == "messages" or bool(len(value)))  # type: ignore[arg-type]


def prompts_of(asked: Json, ids: list[Any] | None) -> list[Any]:
    """Return the prompts of a request as lists of token ids, or as tuples of parts.

    ids: token ids of the only prompt if the answer has these, else None. ValueError if a prompt
    cannot be read.
    """
    if ids is not None:
        return [ids]
    for key in ("input_ids", "prompt_token_ids"):  # SGLang made these ids from the messages
        if is_prompt(key, asked.get(key)):
            return _id_lists(key, asked[key])
    key = next(key for key in fields.PROMPTS if is_prompt(key, asked.get(key)))
    value = asked[key]
    if key in ("messages", "conversations", "conversation") or (
        key == "prompt" and role_of(value[0]) is not None
    ):
        several = bool(value) and all(_is_conversation(each) for each in value)
        return [
            _Rendered().conversation(asked, one).parts for one in (value if several else [value])
        ]
    if key == "input":
        return [_Rendered().responses_input(asked, value).parts]
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(each, str) for each in texts):
        return _id_lists(key, value)
    cut = next((each for each in texts if each[1024:1027] == "..." and len(each) == 2051), None)
    if cut is not None:
        raise ValueError(f"{key} was cut when it was logged; --log-requests-level 3 keeps it whole")
    media = [[*_media_of(asked, index, len(texts))] for index in range(len(texts))]
    return [
        _Rendered().completion(asked, text, each).parts
        for text, each in zip(texts, media, strict=True)
    ]


def _id_lists(key: str, value: Any) -> list[Any]:
    value = list(value) if isinstance(value, tuple) else value
    lists = value if isinstance(value[0], list) else [value]
    if any(isinstance(each, list) and "..." in each for each in (value, *lists)):
        raise ValueError(f"{key} was cut when it was logged; --log-requests-level 3 keeps it whole")
    return lists


def _is_conversation(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _media_of(asked: Json, index: int, count: int) -> Iterator[Media]:
    """Yield the media that accompany the text of prompt `index` of `count`."""
    for key in fields.MEDIA:
        value = asked.get(key)
        if not is_set(value) or value == [None]:
            continue
        items = value if isinstance(value, list) else [value]
        if count > 1 and len(items) == count:
            items = items[index] if isinstance(items[index], list) else [items[index]]
        for each in items:
            if each is not None:
                yield _media(key, each)


def _media(kind: str, value: object) -> Media:
    """Return a medium. Two media are equal if their kinds, and their addresses or contents, are."""
    kind = kind.removeprefix("input_").split("_")[0]
    return Media(kind.removesuffix("s"), _identity([kind, value]))


class _Rendered:
    """Renders a prompt much like a chat template. If prompts begin alike, so do the renderings."""

    def __init__(self) -> None:
        self.parts: tuple[Part, ...] = ()
        self._found: list[Part] = []
        self._text: list[str] = []

    def conversation(self, asked: Json, messages: object) -> _Rendered:
        """Add the messages of a request to the chat API or the messages API."""
        if not isinstance(messages, list) or not messages:
            raise ValueError("neither messages nor a prompt")
        self._head(asked)
        self._system(asked.get("system"))
        for message in messages:
            self._message(message)
        return self._closed()

    def responses_input(self, asked: Json, value: Any) -> _Rendered:
        """Add the input of a request to the responses API."""
        if isinstance(asked.get("prompt"), Mapping):
            raise ValueError("prompt: it names a prompt that the server keeps")
        if isinstance(value, list) and value and not isinstance(value[0], Mapping):
            raise NotReplayed("requests for embeddings, which generate nothing")
        self._head(asked)
        self._system(asked.get("instructions") or asked.get("instruction"))
        items = [{"role": "user", "content": value}] if isinstance(value, str) else value
        if not items:
            raise ValueError("input is empty")
        for item in items:
            self._message(item)
        return self._closed()

    def completion(self, asked: Json, text: str, media: list[Media]) -> _Rendered:
        """Add a text. Media go to the marks in it; media without a mark go before the text."""
        self._system(asked.get("system"))
        if isinstance(context := asked.get("context"), str):  # data sets have a document there
            self._text.append(f"{context}\n")
        marks = [*_MARK.finditer(text)]
        step = max(1, len(marks) // max(1, len(media)))  # some models also mark a medium's end
        places = [mark.end() for mark in marks[step - 1 :: step]] if media else []
        for each in media[: max(0, len(media) - len(places))]:
            self._add(each)
        begin = 0
        for place, each in zip(places, media[max(0, len(media) - len(places)) :], strict=False):
            self._text.append(text[begin:place])
            self._add(each)
            begin = place
        self._text.append(text[begin:])
        if isinstance(suffix := asked.get("suffix"), str):
            self._text.append(suffix)
        return self._closed()

    def _add(self, part: Media) -> None:
        self._flush()
        self._found.append(part)

    def _flush(self) -> None:
        if text := "".join(self._text):
            self._found.append(text.encode(errors="replace"))
        self._text = []

    def _closed(self) -> _Rendered:
        self._flush()
        self.parts = tuple(self._found)
        return self

    def _head(self, asked: Json) -> None:
        """Add tools, which come first in every template, and documents."""
        choice = asked.get("tool_choice")
        is_off = choice == "none" or (isinstance(choice, Mapping) and choice.get("type") == "none")
        for key in () if is_off else ("tools", "functions"):
            if is_set(asked.get(key)):
                self._text.append(json.dumps(asked[key], ensure_ascii=False) + "\n")
        kwargs = asked.get("chat_template_kwargs")
        values = (asked.get("documents"), *(kwargs.values() if isinstance(kwargs, Mapping) else ()))
        for value in values:
            if isinstance(value, (list, Mapping)) and value:
                self._text.append(json.dumps(value, ensure_ascii=False) + "\n")
        self._flush()

    def _system(self, value: object) -> None:
        if is_set(value):
            self._message({"role": "system", "content": value})

    def _message(self, message: object) -> None:
        if isinstance(message, str):
            message = {"role": "user", "content": message}
        if not isinstance(message, Mapping):
            raise ValueError(f"a message is not an object: {quoted(message)}")
        for key in ("kwargs", "data"):  # LangChain has the message in one of these
            if isinstance(inner := message.get(key), Mapping) and "content" in inner:
                message = {**message, **inner}
        kind = message.get("type")
        if kind == "item_reference":
            raise ValueError("item_reference: it names an item that the server keeps")
        speaker = message.get("role") or message.get("from")
        if speaker and _CONTENTS.isdisjoint(message):
            raise ValueError(f"a message without content; its keys are {listed(message)}")
        role = speaker or kind or ""
        self._text.append(f"<|{role}|>\n")
        if is_set(message.get("tools")):
            self._text.append(json.dumps(message["tools"], ensure_ascii=False))
        if isinstance(name := message.get("name"), str):
            self._text.append(name)
        thoughts = map(message.get, _THOUGHTS)
        self._content(next(filter(is_set, thoughts), None))
        # Some clients repeat the text under a second key.
        self._content(next(filter(is_set, map(message.get, _TEXTS)), None))
        for key in _MORE_TEXTS:
            self._content(message.get(key))
        for image in as_list(message.get("images")):  # Ollama's API
            self._add(_media("image", image))
        calls = (*as_list(message.get("tool_calls")), message.get("function_call"))
        for call in filter(is_set, calls):
            self._tool_call(call)
        self._text.append("\n")
        self._flush()

    def _tool_call(self, call: object) -> None:
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if isinstance(function, Mapping):
            given = (function[key] for key in ("arguments", "input", "args") if key in function)
            arguments = next(given, None)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            self._text.append(f"{function.get('name', '')}{text}")
        else:
            self._text.append(json.dumps(function, ensure_ascii=False))

    def _content(self, value: object) -> None:
        if isinstance(value, str):
            self._text.append(value)
        elif isinstance(value, list):
            for each in value:
                self._content(each)
        elif isinstance(value, Mapping):
            self._block(value)
        elif value is not None:
            raise ValueError(f"a message's content is {quoted(value)}; a text or parts are needed")

    def _block(self, block: Json) -> None:
        """Add a part of a message's content."""
        kind = str(block.get("type") or block.get("content_type") or "")
        if not kind and len(block) == 1:  # as in Bedrock's Converse API: {"image": {...}}
            ((kind, inner),) = block.items()
            block = inner if isinstance(inner, Mapping) and "text" not in inner else block
        source = block.get("source")
        if kind in ("tool_use", "toolUse", "tool_call", "functionCall"):
            self._tool_call(block)
        elif kind in ("tool_result", "toolResult", "search_result"):
            self._content([block.get("title"), block.get("content")])
        elif kind == "tool_reference":
            self._content(block.get("name") or block.get("tool_name"))
        elif kind in ("tool_call_response", "functionResponse"):
            found = block.get("response") or block.get("result")
            self._content(json.dumps(found) if isinstance(found, Mapping) else found)
        elif kind in ("redacted_thinking", "cachePoint"):
            pass  # servers do not pass it to the model
        elif kind == "document" and _text_of(source) is not None:
            self._text.append(str(_text_of(source)))
        elif any(
            word in kind for word in ("image", "video", "audio", "file", "document", "inlineData")
        ):
            content = next((block[key] for key in block if key.endswith(_MEDIA_VALUES)), block)
            self._add(_media(kind, _address(content)))
        else:
            values = [block[key] for key in _BLOCK_TEXTS if key in block]
            values = [each.get("value") if isinstance(each, Mapping) else each for each in values]
            texts = [each for each in values if isinstance(each, str)]
            if not texts and (not values or any(map(is_set, values))):
                if not isinstance(block.get("parts"), list):
                    raise ValueError(
                        f"a part of a message has the type {quoted(kind)}, which is unknown"
                    )
                self._content(block["parts"])
            self._text += texts[:1]


_TEXTS = ("content", "value", "text", "message", "parts")  # keys of a message's text or parts
_MORE_TEXTS = ("arguments", "output", "summary", "refusal")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# A message that has a role and none of these keys is not understood.
_CONTENTS = frozenset(
    (
        *(*_TEXTS, *_MORE_TEXTS, *_THOUGHTS),
        *("tool_calls", "function_call", "images", "audio", "tools"),
    )
)
_BLOCK_TEXTS = ("text", "thinking", "reasoning", "refusal", "content")
_MEDIA_VALUES = ("_url", "source", "data", "image", "audio", "video", "file", "_id", "document")


def _text_of(source: object) -> object:
    """Return the text of a document, or None if the document is not given as text."""
    if isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        return source.get("data") if source["type"] == "text" else json.dumps(source.get("content"))
    return None


def _address(value: object) -> object:
    """Return what identifies a medium: its address or data, without options such as detail."""
    if isinstance(value, Mapping):
        for key in ("url", "data", "bytes", "file_data", "file_id", "id"):
            if isinstance(value.get(key), str):
                return value[key]
    return value


def checked(
    prompt: Any, counted: int | None, media_tokens: int | None, errors: TraceErrors
) -> tuple[Any, int | None]:
    """Check a prompt. Return the prompt, and its number of tokens by `usage`.

    In the returned prompt, all media have a number of tokens. The second value is None if the
    prompt is a list of token ids, or if `usage` does not count it. ValueError if the prompt is
    malformed or contradicts `usage`.
    """
    if not isinstance(prompt, tuple):
        tokens = _ids(prompt)
        if counted is not None and counted != len(tokens):
            errors.miscounted += 1
        return tokens, None
    media = [part for part in prompt if isinstance(part, Media)]
    size = sum(len(part) for part in prompt if isinstance(part, bytes))
    if not size and not media:
        raise ValueError("the prompt is empty")
    if media:
        if media_tokens is None and counted is not None:
            media_tokens = max(len(media), counted - -(-size // 4))
        if media_tokens is None:
            unknown = next((part.kind for part in media if part.kind != "image"), None)
            if unknown is not None:
                raise ValueError(
                    f"a prompt with a part of the type {quoted(unknown)}, whose length only "
                    "usage.prompt_tokens could give"
                )
            errors.media += len(media)
            media_tokens = IMAGE_TOKENS * len(media)
        each, more = divmod(media_tokens, len(media))
        sizes = iter([each + (index < more) for index in range(len(media))])
        prompt = tuple(
            part._replace(tokens=next(sizes)) if isinstance(part, Media) else part
            for part in prompt
        )
    if counted is None:
        errors.estimated += 1
        return prompt, None
    of_text = counted - (media_tokens or 0)
    if of_text - _TEMPLATE_TOKENS > size / _LEAST_BYTES:
        raise ValueError(
            f"usage counts {counted:,} prompt tokens, but the log has {size:,} bytes of text: "
            "it does not hold the whole prompt"
        )
    if size > _SHORT_TEXT and size > _MOST_BYTES * max(of_text, 1):
        raise ValueError(
            f"usage counts {counted:,} prompt tokens, but the log has {size:,} bytes of text: "
            "more than one prompt has"
        )
    return prompt, counted


def _ids(value: Any) -> TokenIds:
    try:
        ids = np.asarray(value)
    except (ValueError, OverflowError):
        ids = np.zeros(0)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise ValueError("the prompt is not a list of token ids from 0")
    if int(ids.max()) > _MASK:
        raise ValueError("a token id is 2**62 or more")
    return ids.astype(np.int64)


# --- tokens ---


def bytes_per_token(found: Sequence[LoggedRequest]) -> float | None:
    """Return the bytes of text per token, by `usage`. None if no text prompt has `usage`."""
    size = tokens = 0
    for each in found:
        if each.prompt_tokens is not None and isinstance(each.prompt, tuple):
            has_media = any(isinstance(part, Media) for part in each.prompt)
            if not has_media:
                size += sum(map(len, each.prompt))
                tokens += each.prompt_tokens
    if not tokens:
        return None
    least, most = _BYTES_PER_TOKEN
    return min(max(size / tokens, least), most)


def to_request(logged: LoggedRequest, errors: TraceErrors) -> TraceRequest:
    """Return a request whose prompt has tokens.

    A text has a token per `errors.bytes_per_token` bytes. If `usage` counts more tokens, made-up
    tokens are appended; two requests share these only if their prompts are equal. If `usage` counts
    fewer tokens, the last tokens are dropped.
    """
    if not isinstance(logged.prompt, tuple):
        tokens = logged.prompt
    else:
        pieces = [
            text_tokens(part, errors.bytes_per_token)
            if isinstance(part, bytes)
            else _media_tokens(part)
            for part in logged.prompt
        ]
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if logged.prompt_tokens is not None:
            errors.counted += logged.prompt_tokens
            errors.by_text += sum(
                -(-len(part) // 4) if isinstance(part, bytes) else part.tokens or 0
                for part in logged.prompt
            )
            missing = logged.prompt_tokens - len(tokens)
            if missing > 0:
                rest = Media(
                    "rest", _identity(hashlib.blake2b(tokens.tobytes()).hexdigest()), missing
                )
                tokens = np.concatenate((tokens, _media_tokens(rest)))
            elif missing < 0:
                tokens = tokens[: logged.prompt_tokens]
    if logged.namespace:
        tokens = (tokens + (logged.namespace >> 32 << 32)) & _MASK
    return TraceRequest(logged.arrival, TokenPrompt(tokens), logged.output_length)


def _media_tokens(media: Media) -> TokenIds:
    return (media.identity + np.arange(media.tokens or 0, dtype=np.int64)) & _MASK


# --- values ---


def role_of(value: object) -> object:
    """Return the role of a message, or None."""
    return value.get("role") if isinstance(value, Mapping) else None


def is_set(value: object) -> bool:
    """Return False if the value means the same as a missing key."""
    return value is not None and value is not False and value not in ("", [], {}, ())


def whole_number(value: object) -> int | None:
    """Return `value` as an int if it is a whole number (600, 600.0, "600") from 0 on, else None."""
    if isinstance(value, str):
        try:
            value = float(value) if not value.isdecimal() else int(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if 0 <= value < 1 << 40 and value == int(value) else None


def as_list(value: object) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def _identity(value: object) -> int:
    """Return a hash of 62 bits that is equal for equal values."""
    text = (
        value if isinstance(value, str) else json.dumps(value, default=_attributes, sort_keys=True)
    )
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK


def _attributes(value: object) -> object:
    return getattr(value, "__dict__", None) or type(value).__name__


def namespace_of(asked: Json, model: str, errors: TraceErrors) -> int:
    """Return the namespace of a request. Also count the request's model."""
    errors.models[model] = errors.models.get(model, 0) + 1
    apart = [asked.get(key) for key in fields.APART]
    is_first = next(iter(errors.models)) == model
    if is_first and not any(map(is_set, apart)):
        return 0
    return _identity([None if is_first else model, *apart])
