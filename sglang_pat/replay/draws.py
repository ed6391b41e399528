"""Seeded draws that are the same in every version of Python.

Beside `generators.py`. Of `random.Random` only seeding with an integer and `random()` are promised
to stay as they are, so everything else is computed from `random()` here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import TypeVar

T = TypeVar("T")

_NORMAL = NormalDist()


class Draws:
    """A stream of independent draws. ValueError if the seed is negative."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed {seed}; 0 or more is allowed")
        self._uniform = random.Random(seed).random

    def below(self, end: int) -> int:
        """An integer from 0 to end - 1, all equally probable."""
        return int(self._uniform() * end)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._uniform())

    def length(self, mean: float, sigma: float, longest: int) -> int:
        """A log-normal length of about this mean (before it is cut to 1..longest).

        sigma: of its logarithm; the median is mean / exp(sigma^2 / 2).
        """
        # inv_cdf is open at 0, random() is not.
        normal = _NORMAL.inv_cdf(max(self._uniform(), 1e-12))
        exponent = sigma * normal - sigma * sigma / 2
        return min(max(round(mean * math.exp(exponent)), 1), longest)

    def ranked(self, cumulated: Sequence[float]) -> int:
        """An index, by the cumulated weights that `zipf` gives."""
        wanted = self._uniform() * cumulated[-1]
        return next(i for i, weight in enumerate(cumulated) if wanted < weight)

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """The values in a random order."""
        order = list(values)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def zipf(count: int) -> list[float]:
    """Cumulated weights of `count` ranks, rank k being 1/k as probable as the first."""
    cumulated = [0.0]
    for rank in range(1, count + 1):
        cumulated.append(cumulated[-1] + 1.0 / rank)
    return cumulated[1:]
