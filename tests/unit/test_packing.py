"""The page on packing has the cost of `memory`. `scheduler/tests` test packing itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from exact_packing import packing_gaps

from sglang_pat._scheduler import CostModel

DECISIONS = Path(__file__).parents[2] / "docs" / "design" / "decisions.md"
PAGE = " ".join(DECISIONS.read_text().split())


def test_memory_is_as_close_to_the_cheapest_packing_as_its_page_says() -> None:
    gaps = 100 * np.array(packing_gaps(2000))
    assert gaps.min() > -1e-7
    assert np.quantile(gaps, 0.99) < 1e-7, "nothing at the 99th percentile"
    assert f"costs {gaps.mean():.3f}% more in the mean, {gaps.max():.1f}% at worst" in PAGE


def test_the_page_on_packing_has_the_costs_of_the_code() -> None:
    costs = {name: f"{cost:.2f}".rstrip("0") for name, cost in CostModel().values().items()}
    reread, partial, item = (costs[n] for n in ("reread_token", "partial_row", "packed_item"))
    assert f"a token that is read again costs {reread}," in PAGE
    assert f"a partial row {partial}, a work item {item}." in PAGE
