"""The capacity study of a replay as table rows: for the terminal and the HTML report.

Beside the pipeline: from the `capacity` object of a `Result`, which is `Capacity.as_dict()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_pat.replay.summary import NumberTable, percent, times


class CapacityRow(NamedTuple):
    """One way to hand out a KV pool; every field is ready to print."""

    scheme: str
    page_size: str
    requests: str
    extent: str
    over_contiguous: str
    wasted: str


CAPACITY_COLUMNS = CapacityRow(
    scheme="scheme",
    page_size="page size",
    requests="requests",
    extent="range",
    over_contiguous="vs contiguous",
    wasted="wasted",
)


def capacity_rows(capacity: Mapping[str, Any]) -> list[CapacityRow]:
    """A row per scheme and page size; none without a study."""
    uses = capacity.get("uses", [])
    contiguous = next((use["requests"] for use in uses if use["scheme"] == "contiguous"), 0)
    return [
        CapacityRow(
            use["scheme"],
            page_size(use),
            f"{_at_least(capacity)}{use['requests']:,.1f}",
            f"{use['fewest']:,} to {use['most']:,}",
            times(use["requests"], contiguous),
            percent(use["wasted_bytes"], use["reserved_bytes"]),
        )
        for use in uses
    ]


def capacity_table(capacity: Mapping[str, Any]) -> NumberTable:
    """The rows under their headings."""
    rows: list[tuple[str, ...]] = list(capacity_rows(capacity))
    return NumberTable("Requests that fit into the KV pool at once", CAPACITY_COLUMNS, rows)


def page_size(use: Mapping[str, Any]) -> str:
    """Of a scheme; a contiguous reservation is one whole."""
    return "whole" if use["page_size"] is None else f"{use['page_size']:,}"


def _at_least(capacity: Mapping[str, Any]) -> str:
    return "" if capacity["full"] else "≥ "
