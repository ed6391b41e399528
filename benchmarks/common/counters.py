"""pat's counters between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Subtract the counters of two readings, however deep; other values are the later ones."""
    counted: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            counted[name] = difference(value, before.get(name, {}))
        elif isinstance(value, int) and not isinstance(value, bool):
            counted[name] = value - before.get(name, 0)
        else:  # no counter: a percentile, say
            counted[name] = value
    return counted


def read_ratio(stats: Mapping[str, Any]) -> float | None:
    """KV tokens that pat read, per KV token of query-centric attention; None without any."""
    own = stats["kv_tokens_query_centric"]
    return stats["kv_tokens_planned"] / own if own else None


def with_ratio(counted: Mapping[str, Any]) -> dict[str, Any]:
    """Add the ratio to counters, for a result."""
    return {**counted, "kv_read_ratio": read_ratio(counted)}
