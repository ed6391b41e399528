"""The capacity study on traces small enough to work out by hand, and its prefix tree."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from sglang_pat.replay.capacity import Capacity, PoolUse, TokenTree, capacity
from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.generate import generate
from sglang_pat.workload.models import ModelShape, model_shape
from sglang_pat.workload.trace import Segment, TraceRequest

DATA = Path(__file__).parents[1] / "support" / "data"

# Two bytes a token, one of K and one of V.
UNIT = ModelShape(
    name="unit",
    num_layers=1,
    num_qo_heads=1,
    num_kv_heads=1,
    head_dim=1,
    dtype_bytes=1,
    weight_bytes=0,
    context_length=4096,
)
assert UNIT.kv_bytes_per_token == 2


def study(requests: Iterable[TraceRequest], pool_tokens: int, **options: object) -> Capacity:
    return capacity(requests, UNIT, 2 * pool_tokens, **options)


def use_of(result: Capacity, scheme: str, page_size: int | None = None) -> PoolUse:
    return next(use for use in result.uses if (use.scheme, use.page_size) == (scheme, page_size))


def private(*lengths: int) -> list[TraceRequest]:
    """Requests that share nothing, of these full lengths."""
    return [TraceRequest(0.0, (Segment(i, n - 1),), 1) for i, n in enumerate(lengths)]


def test_paper_setting_paged_holds_four_times_as_many():
    """Section VII.D: 4 GB, 512 of 2048 tokens used, float32 and head_dim 128: 8192 sequences."""
    model = ModelShape(
        name="paper",
        num_layers=1,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=128,
        dtype_bytes=4,
        weight_bytes=0,
        context_length=2048,
    )
    result = capacity(private(*[512] * 9000), model, 4 << 30, max_length=2048)
    contiguous, paged = use_of(result, "contiguous"), use_of(result, "paged", 16)
    assert (contiguous.requests, paged.requests) == (2048, 8192)
    assert (contiguous.reserved_bytes, paged.reserved_bytes) == (4 << 30, 4 << 30)
    assert (contiguous.wasted_bytes, paged.wasted_bytes) == (3 << 30, 0)


def test_pages_waste_the_rest_of_the_last_one():
    result = study(private(10, 20, 31, 40), 64, page_sizes=[1, 16], max_fills=1)
    # Shared with pages of 1, the fill ends with the third request: 10 + 20 + 31 = 61.
    assert use_of(result, "paged", 1).requests == 3
    paged = use_of(result, "paged", 16)  # 16 + 32, then 32 do not fit
    assert (paged.requests, paged.reserved_bytes, paged.wasted_bytes) == (2, 2 * 48, 2 * 18)
    assert paged.free_bytes == 2 * 16
    contiguous = use_of(result, "contiguous")
    assert (result.max_length, contiguous.requests) == (40, 1)
    assert contiguous.wasted_bytes == 2 * 30


def test_shared_holds_whole_pages_of_a_prefix_once():
    prompts = [(Segment(1, 40), Segment(2 + i, 10)) for i in range(6)]
    requests = [TraceRequest(0.0, prompt, 10) for prompt in prompts]
    result = study(requests, 120, page_sizes=[1, 16], max_fills=1)
    # 60 tokens, then 20 more each.
    exact = use_of(result, "shared", 1)
    assert (exact.requests, exact.reserved_bytes, exact.wasted_bytes) == (4, 2 * 120, 0)
    assert exact.shared_bytes == 2 * 3 * 40
    # 4 pages, then 4 less the 2 whole ones of the prefix.
    paged = use_of(result, "shared", 16)
    assert (paged.requests, paged.reserved_bytes) == (2, 2 * 96)
    assert paged.wasted_bytes == 2 * (96 - 60 - 28)
    assert use_of(result, "paged", 16).requests == 1


def test_prefix_sharing_ends_where_prompts_differ_even_if_they_join_again():
    prompts = [(Segment(1, 8), Segment(2, 8)), (Segment(3, 8), Segment(2, 8))]
    requests = [TraceRequest(0.0, prompt, 1) for prompt in prompts]
    assert use_of(study(requests, 100), "shared", 1).shared_bytes == 0


def test_fills_follow_each_other_and_are_averaged():
    result = study(private(50, 50, 30, 30, 30, 90, 70, 5), 100, page_sizes=[1])
    # 50 50 | 30 30 30 | 90 | 70 5, the last of which never became full.
    paged = use_of(result, "paged", 1)
    assert (result.fills, result.full) == (3, True)
    assert (paged.requests, paged.fewest, paged.most) == (2, 1, 3)
    assert paged.reserved_bytes == round(2 * (100 + 90 + 90) / 3)
    assert study(private(50, 50, 30, 30, 30, 90), 100, max_fills=1).fills == 1


def test_sharing_does_not_reach_into_the_next_fill():
    same = TraceRequest(0.0, (Segment(1, 50),), 30)
    other = TraceRequest(0.0, (Segment(2, 20),), 10)
    result = study([same, same, same, other, same], 110, page_sizes=[1])
    # 80 + 30 | 80 + 30 | 80: only the second request finds anything.
    assert result.fills == 2
    assert use_of(result, "shared", 1).shared_bytes == 2 * 50 / 2


def test_pool_that_never_gets_full_says_so():
    result = study(private(10, 10), 1000)
    assert (result.full, result.fills) == (False, 1)
    assert use_of(result, "contiguous").requests == 2


def test_longest_request_counts_even_after_the_last_fill():
    result = study(private(60, 60, 60, 10, 95), 100, max_fills=1)
    assert (result.fills, result.max_length) == (1, 95)


def test_request_longer_than_the_pool_is_refused_and_counted():
    result = study(private(40, 101, 40, 100), 100)
    assert (result.refused, result.max_length) == (1, 100)
    assert use_of(result, "paged", 1).requests == 2
    with pytest.raises(ValueError, match="no request fits a pool of 100 tokens"):
        study(private(101), 100)


@pytest.mark.parametrize(
    ("pool_tokens", "options", "reason"),
    [
        (0, {}, "pool_bytes=0; one token of unit is 2"),
        (100, {"page_sizes": [16, 0]}, "page size 0"),
        (100, {"max_fills": 0}, "max_fills 0"),
        (100, {"max_length": 39}, "max_length=39; a request has 40 tokens"),
    ],
)
def test_bad_options_are_refused(pool_tokens, options, reason):
    with pytest.raises(ValueError, match=reason):
        study(private(40), pool_tokens, **options)


def test_shipped_trace():
    trace = open_trace(DATA / "conversation.jsonl")
    result = capacity(trace.stream, model_shape("llama-3-8b"), 8 << 30)
    by_scheme = [use_of(result, "contiguous"), use_of(result, "paged", 16)]
    by_scheme += [use_of(result, "shared", 64), use_of(result, "shared", 1)]
    assert result.full
    assert [use.requests for use in by_scheme] == sorted(use.requests for use in by_scheme)
    assert by_scheme[-1].requests > 1.4 * by_scheme[1].requests
    for use in result.uses:
        assert use.reserved_bytes + use.free_bytes == result.pool_bytes
        assert 0 <= use.wasted_bytes <= use.reserved_bytes
    document = json.loads(json.dumps(result.as_dict()))
    assert len(document["uses"]) == 15


def test_without_sharing_shared_is_paged():
    trace = generate("no-sharing", requests=300)
    result = capacity(trace.stream, model_shape("qwen3-8b"), 8 << 30)
    for size in (1, 16, 512):
        paged, shared = use_of(result, "paged", size), use_of(result, "shared", size)
        assert (shared.requests, shared.wasted_bytes) == (paged.requests, paged.wasted_bytes)


def test_prefix_tree_equals_comparing_with_every_earlier_sequence():
    rng = random.Random(1)
    tree, before = TokenTree(), []
    for _ in range(300):
        tokens = np.array(rng.choices([1, 2], weights=[4, 1], k=rng.randrange(1, 12)))
        same = [np.flatnonzero(a[: len(tokens)] != tokens[: len(a)]) for a in before]
        lengths = [
            int(d[0]) if len(d) else min(len(a), len(tokens))
            for a, d in zip(before, same, strict=True)
        ]
        assert tree.insert(tokens) == max(lengths, default=0)
        before.append(tokens)
    distinct = {tuple(a[:n]) for a in before for n in range(1, len(a) + 1)}
    assert tree.tokens == len(distinct)
