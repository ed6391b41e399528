"""The segments of a plan as the tests look at them: one after the other, with their requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sglang_pat._scheduler import OPEN_END, READ_ONCE
from sglang_pat.plan import DecodePlan, segment_interval


class Segment(NamedTuple):
    """kv_request, kv_begin and kv_end as in the plan; `entries` are rows of its item_requests.

    is_read_once: the plan says that no other work item reads it.
    """

    item: int
    kv_request: int
    kv_begin: int
    kv_end: int
    entries: range
    is_read_once: bool


def plan_segments(plan: DecodePlan) -> list[Segment]:
    """The segments of every work item, in the order of the items."""
    result = []
    for item, (_, count, first, begin, num_segments, *_) in enumerate(plan.work_items.tolist()):
        assert begin == len(result), "the segments of the items follow one another"
        assert num_segments >= 1
        for fields in plan.kv_segments[begin : begin + num_segments].tolist():
            kv_request, kv_begin, kv_end, requests = fields
            row, end = segment_interval(requests)
            assert 0 <= row < end <= count
            entries = range(first + row, first + end)
            is_once = bool(requests & READ_ONCE)
            result.append(Segment(item, kv_request, kv_begin, kv_end, entries, is_once))
    assert len(result) == plan.header.num_kv_segments
    return result


def segment_tokens(plan: DecodePlan, seq_lens: np.ndarray) -> np.ndarray:
    """KV tokens of every segment at these lengths."""
    segments = plan.kv_segments
    ends = np.where(segments[:, 2] == OPEN_END, seq_lens[segments[:, 0]], segments[:, 2])
    return ends - segments[:, 1]
