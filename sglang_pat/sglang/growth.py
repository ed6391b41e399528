"""Growth: by how much the requests of speculative decoding may grow until their plan is outgrown.

From round to round each request is longer by what was accepted. Between these bounds a step needs
no plan(): the host reads the lengths, and compares them.
"""

from __future__ import annotations

import numpy as np

from sglang_pat.batch import IntArray


class Growth:
    """Of the requests of a step that has been planned.

    least: their lengths then. most: the longest that its plan serves.
    """

    def __init__(self, least: IntArray, most: IntArray) -> None:
        self._least = least
        self._room = np.maximum(most - least, 0).view(np.uint32)

    def of(self, lens: IntArray) -> int | None:
        """Tokens that requests of these lengths have more; None if one of them has outgrown the
        plan, or has become shorter."""
        grown = lens - self._least
        # Unsigned, so that what is negative is too much.
        if (grown.view(np.uint32) > self._room).any():
            return None
        return int(grown.sum())
