"""Fewer points for a chart of a long trace, without losing a peak or a trough.

Beside the pipeline: used by the charts of the HTML report.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

# A chart is at most some 1,500 pixels wide; more points than two per pixel cannot be told apart.
MAX_POINTS = 3000


def extremes(
    values: Sequence[float], max_points: int = MAX_POINTS
) -> npt.NDArray[np.int64] | slice:
    """Which of `values` to draw: the least and the greatest of each of `max_points // 2` intervals.

    The intervals hold equally many values; the first and the last value are always drawn. Returns
    indices in ascending order, at most `max_points + 2`; all, as a slice, where they are so few.
    Raises ValueError for max_points below 2.
    """
    if max_points < 2:
        raise ValueError(f"max_points is {max_points}, must be at least 2")
    if len(values) <= max_points:
        return slice(None)
    array = np.asarray(values, dtype=np.float64)
    bounds = np.linspace(0, len(array), max_points // 2 + 1).astype(np.int64)
    kept = {0, len(array) - 1}
    for begin, end in pairwise(bounds):
        kept.add(int(begin + array[begin:end].argmin()))
        kept.add(int(begin + array[begin:end].argmax()))
    return np.array(sorted(kept), dtype=np.int64)
