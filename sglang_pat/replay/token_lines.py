"""The simplest trace format: one JSON object a line, with the prompt's token ids.

A format of `readers.py`. A line has `timestamp` (seconds), `input_ids` and `output_length`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from sglang_pat.replay.trace import TokenPrompt, TraceRequest

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]


_decoder = msgspec.json.Decoder(_Line)


def parse_line(line: bytes) -> TraceRequest:
    """The request of one line. msgspec.DecodeError says what is wrong with it."""
    fields = _decoder.decode(line)
    prompt = TokenPrompt(np.array(fields.input_ids, dtype=np.int64))
    return TraceRequest(fields.timestamp, prompt, fields.output_length)
