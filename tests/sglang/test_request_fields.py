"""Every key of a request to SGLang is read, refused, or known to change nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import chain

import msgspec
import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.workload import request_fields as fields


@pytest.mark.parametrize(
    "request_class",
    [
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
        AnthropicMessagesRequest,
        OllamaChatRequest,
        OllamaGenerateRequest,
        GenerateReqInput,
        SamplingParams,
    ],
    ids=lambda each: each.__name__,
)
def test_every_field_of_sglang_has_a_place(request_class: type) -> None:
    if dataclasses.is_dataclass(request_class):
        names = {field.name for field in dataclasses.fields(request_class)}
    elif issubclass(request_class, msgspec.Struct):
        names = set(request_class.__struct_fields__)
    else:
        names = set(request_class.model_fields)
    assert len(names) > 5
    assert not names - fields.KNOWN


def test_the_tables_do_not_overlap() -> None:
    tables = (
        *(fields.PROMPTS, fields.LIMITS, fields.COPIES, fields.NESTED, fields.MEDIA),
        *(fields.APART, tuple(fields.REFUSED), fields.NO_EFFECT),
    )
    twice = {name for name, count in Counter(chain(*tables)).items() if count > 1}
    # `conversation` is the prompt of data sets, and a server-side id in the responses API.
    assert twice == {"conversation"}
