"""Quantiles of many durations in little memory. Beside the replay, which measures planning."""

from __future__ import annotations

import math
from collections import Counter

_BINS_PER_OCTAVE = 32


class TimeHistogram:
    """Durations in bins of 1/32 octave: quantiles to 2%, in memory that does not grow."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, nanoseconds: int) -> None:
        self._bins[int(math.log2(max(nanoseconds, 1)) * _BINS_PER_OCTAVE)] += 1

    def quantile(self, fraction: float) -> float:
        """In microseconds; 0 without durations."""
        rank = math.ceil(fraction * self._bins.total())
        for index, count in sorted(self._bins.items()):
            rank -= count
            if rank <= 0:
                return round(2 ** ((index + 0.5) / _BINS_PER_OCTAVE) / 1000, 2)
        return 0.0

    def by_microseconds(self) -> dict[str, int]:
        """Counts by powers of two of a microsecond. Keys: lower ends of the bins, "0" the first."""
        octaves: Counter[int] = Counter()
        for index, count in self._bins.items():
            microseconds = int(2 ** (index / _BINS_PER_OCTAVE) / 1000)
            octaves[1 << microseconds.bit_length() >> 1] += count
        return {str(key): octaves[key] for key in sorted(octaves)}
