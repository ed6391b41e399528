"""PlanningTimes: the histogram, and the kind of step that a time is counted for."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from sglang_pat import DecodeBatch, PackAttention
from sglang_pat._scheduler import PrefixForest
from sglang_pat.stats import PlanningTimes


@pytest.mark.parametrize("time", [0, 1, 7, 8, 999, 1000, 4096, 123_456, 10**9])
def test_a_time_lies_below_its_bound_by_a_16th_at_most(time: int) -> None:
    times = PlanningTimes()
    times.record("cold", time)
    ((bound, count),) = times["cold"].items()
    assert count == 1
    assert time < bound <= max(time * 17 / 16, time + 1)


def test_percentiles() -> None:
    times = PlanningTimes()
    for _ in range(99):
        times.record("unchanged", 5_000)
    times.record("unchanged", 80_000)
    assert 5 < times.percentile_us("unchanged", 50) <= 5.3125
    assert times.percentile_us("unchanged", 50) == times.percentile_us("unchanged", 99)
    assert 80 < times.percentile_us("unchanged", 100) <= 85
    assert math.isnan(times.percentile_us("cold", 50))
    with pytest.raises(ValueError, match="percent must be above 0 and at most 100, got 0"):
        times.percentile_us("cold", 0)


def test_times_add_up_and_are_json() -> None:
    a, b = PlanningTimes(), PlanningTimes()
    a.record("cold", 100)
    b.record("cold", 100)
    b.record("unchanged", 3)
    assert json.loads(json.dumps(a + b)) == {"cold": {"104": 2}, "unchanged": {"4": 1}}
    assert a == {"cold": {104: 1}}


def test_times_since_an_earlier_reading() -> None:
    times = PlanningTimes()
    times.record("cold", 100)
    before = times + PlanningTimes()
    times.record("cold", 100)
    times.record("unchanged", 3)
    assert times.since(before) == {"cold": {104: 1}, "unchanged": {4: 1}}
    assert times.since(times) == {"cold": {}, "unchanged": {}}


def test_which_steps_are_counted_as_what() -> None:
    forest = PrefixForest()
    attention = PackAttention(8, 2, 64, dtype=torch.float32, growth_tokens=1)
    node = (1, 0, 0, 4, 4, 0)
    a, b, c = ("a", "b", "c")

    def step(before: list[str], now: list[str], key: int, length: int = 6) -> None:
        if key != attention._key:
            forest.update(before, now, set(), lambda requests: [[node]] * len(requests))
        lens = np.full(len(now), length, dtype=np.int32)
        attention.plan(
            DecodeBatch(lens, forest, key),
            req_to_token=torch.zeros((4, 8), dtype=torch.int32),
            req_pool_indices=torch.arange(len(now)),
            seq_lens=torch.from_numpy(lens),
        )

    step([], [a, b], 0)
    step([a, b], [a, b], 0)
    step([a, b], [a, b, c], 1)
    step([], [a], 2)
    step([a], [a], 2, length=8)  # outgrown, but its path is kept
    counted = {kind: each.total() for kind, each in attention.stats.planning_ns.items()}
    assert counted == {"cold": 2, "unchanged": 1, "changed": 2}
