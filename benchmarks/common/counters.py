"""Differences of pat's counters between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences of all counters, also nested ones. Other values are the later ones."""
    counted: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            counted[name] = difference(value, before.get(name, {}))
        elif isinstance(value, int) and not isinstance(value, bool):
            counted[name] = value - before.get(name, 0)
        else:  # not a counter, for example a percentile
            counted[name] = value
    return counted


def read_ratio(stats: Mapping[str, Any]) -> float | None:
    """Return KV tokens that pat reads / that query-centric attention reads, or None."""
    own = stats["kv_tokens_query_centric"]
    return stats["kv_tokens_planned"] / own if own else None


def with_ratio(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters with the read ratio added, for a result."""
    return {**counted, "kv_read_ratio": read_ratio(counted)}
