"""The capacity study of a replay as a chart: how many requests fit, and what each scheme wastes.

Beside the pipeline: a chart of the HTML report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plotly.subplots import make_subplots

from sglang_pat.replay.capacity_rows import page_size
from sglang_pat.replay.chart_style import BLUE, GREY, ORANGE, Chart, styled

_COLORS = {"contiguous": GREY, "paged": ORANGE, "shared": BLUE}
_CAPTION = (
    "Left: requests that fit at once, the mean of several fills of the pool, and the range. Right: "
    "the part of the memory handed out that no token will use. A contiguous pool reserves the "
    "longest length for each request, a paged one whole pages; a shared one holds the pages of a "
    "prefix once."
)


def capacity_chart(capacity: Mapping[str, Any]) -> Chart | None:
    """Requests at once and waste, by scheme and page size; None without a study."""
    uses = capacity.get("uses", [])
    if not uses:
        return None
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    for scheme, fill in _COLORS.items():
        chosen = [use for use in uses if use["scheme"] == scheme]
        sizes = [page_size(use) for use in chosen]
        look: dict[str, Any] = {
            "name": scheme,
            "marker": {"color": fill, "line": {"width": 0}},
            "x": sizes,
        }
        if scheme == "contiguous":  # alone at its place, so in the middle of it
            look |= {"offset": -0.2, "width": 0.4}
        requests = [use["requests"] for use in chosen]
        figure.add_bar(
            **look,
            y=requests,
            error_y={
                "array": [use["most"] - use["requests"] for use in chosen],
                "arrayminus": [use["requests"] - use["fewest"] for use in chosen],
                "color": GREY,
                "thickness": 1,
                "width": 3,
            },
            hovertemplate="%{y:,.1f} requests",
            row=1,
            col=1,
        )
        wasted = [
            use["wasted_bytes"] / use["reserved_bytes"] if use["reserved_bytes"] else 0.0
            for use in chosen
        ]
        figure.add_bar(
            **look, y=wasted, showlegend=False, hovertemplate="%{y:.1%} wasted", row=1, col=2
        )
    figure.update_layout(barmode="group", hovermode="x unified")
    figure.update_xaxes(title="page size, tokens", type="category", showgrid=False)
    figure.update_yaxes(title="requests at once", row=1, col=1)
    figure.update_yaxes(title="wasted", tickformat=".0%", row=1, col=2)
    best = max(uses, key=lambda use: (use["requests"], use["scheme"]))
    return Chart(
        "capacity",
        f"Capacity of a pool of {capacity['pool_bytes'] / 2**30:,.1f} GiB for {capacity['model']}",
        _CAPTION,
        f"Most requests fit {best['scheme']}, page size {page_size(best)}: "
        f"{best['requests']:,.1f} in the mean.",
        styled(figure, 360),
        _notes(capacity),
        wide=True,
    )


def _notes(capacity: Mapping[str, Any]) -> list[str]:
    fills, refused = capacity["fills"], capacity["refused"]
    notes = [
        f"{fills:,} {'fill' if fills == 1 else 'fills'}; contiguous reservations of "
        f"{capacity['max_length']:,} tokens."
    ]
    if not capacity["full"]:
        notes.append("The trace ended before the pool was full: more requests might fit.")
    if refused:
        notes.append(f"{refused:,} requests were left out: longer than the pool.")
    return notes
