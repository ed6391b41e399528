"""Tests and benchmarks put KV in a pool where they say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from forests import ForestCase, make_case
from slot_placements import PLACEMENTS, STAGE_TOKENS, move, place

CASE = make_case([(-1, 200), (0, 70)], [(1, 40)] * 3 + [(0, 100), (-1, 500), (-1, 0)])
RANGES = [  # requests, and from where to where in their KV
    (0, 0, 200),
    (0, 200, 270),
    *((row, 270, 310) for row in range(3)),
    (3, 200, 300),
    (4, 0, 500),
]


def runs(case: ForestCase) -> list[bool]:
    """By whole stages of all ranges, whether their slots follow one another."""
    return [
        bool((np.diff(case.tokens[row, at : at + STAGE_TOKENS]) == 1).all())
        for row, begin, end in RANGES
        for at in range(begin, end - STAGE_TOKENS + 1, STAGE_TOKENS)
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_token_has_a_slot_and_shared_ones_have_one(placement: str) -> None:
    places = place(CASE, placement, seed=1)
    moved = move(CASE, places)
    used = places[places >= 0]
    count = sum(end - begin for _, begin, end in RANGES)
    assert len(set(used.tolist())) == len(used) == count
    assert places.max() < 2 * count
    for row, length in enumerate(CASE.seq_lens):
        slots = places[CASE.tokens[row, :length]]
        assert (slots >= 0).all()
        assert (moved.tokens[row, :length] == slots).all()
    assert (place(CASE, placement, seed=1) == places).all()
    assert (place(CASE, placement, seed=2) != places).any()


@pytest.mark.parametrize(
    ("placement", "least", "most"),
    [
        ("scattered", 0.0, 0.0),
        ("ranges", 1.0, 1.0),
        ("mixed", 0.1, 0.9),
        ("descending", 0.0, 0.0),
        ("swapped", 0.1, 0.9),
    ],
)
def test_runs_are_where_they_should_be(placement: str, least: float, most: float) -> None:
    found = runs(move(CASE, place(CASE, placement)))
    assert least <= sum(found) / len(found) <= most


def test_a_run_ends_with_the_pool_and_none_touches_another() -> None:
    moved = move(CASE, place(CASE, "ranges"))
    ends = {(int(moved.tokens[row, a]), int(moved.tokens[row, b - 1]) + 1) for row, a, b in RANGES}
    ordered = sorted(ends)
    assert ordered[0][0] == 0
    assert all(end < begin for (_, end), (begin, _) in pairwise(ordered))
