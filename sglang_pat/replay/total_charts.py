"""Charts of the HTML report over a whole replay: bytes, planning time, packs, tiles.

Beside the pipeline: from a `Result` to Plotly figures. A chart that has nothing to show says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import plotly.graph_objects as go
from rich.filesize import pick_unit_and_suffix

from sglang_pat.replay.chart_style import (
    BLUE,
    ORANGE,
    Chart,
    color,
    styled,
    text,
)
from sglang_pat.replay.result import Histogram, Result
from sglang_pat.replay.summary import (
    LOWER_BOUND,
    QUERY_CENTRIC,
    times,
)

_NO_STEPS = "No decode step was replayed."
_BYTE_UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"]


def total_charts(result: Result) -> list[Chart]:
    """Over the whole replay: bytes, packs, tiles, planning time."""
    policies = result["totals"]["policies"]
    return [
        _bytes_moved(result),
        _planning_time(result),
        _histograms(
            "rows-per-pack",
            "Query rows per pack",
            "Share of a policy's packs by their query rows. The more, the more use a read is.",
            "query rows of a pack",
            {name: policy["rows_per_pack"] for name, policy in policies.items()},
            _power_of_two_bin,
        ),
        _histograms(
            "tiles",
            "Tiles",
            "Share of a policy's tiles by the query rows that a tile has room for.",
            "query rows of a tile",
            {name: policy["tiles"] for name, policy in policies.items()},
            str,
        ),
    ]


def _bytes_moved(result: Result) -> Chart:
    key, title = "bytes", "Bytes moved, partials included"
    totals = result["totals"]
    names = {name: name for name in totals["policies"]}
    if QUERY_CENTRIC not in names:
        names = {"query_centric": QUERY_CENTRIC, **names}
    names["lower_bound"] = LOWER_BOUND
    names = {name: label for name, label in names.items() if totals["bytes"].get(name)}
    if not names:
        return Chart(key, title, "", _NO_STEPS, None)
    partials = [totals["partial_bytes"].get(name, {"written": 0, "read": 0}) for name in names]
    moved = [totals["bytes"][name] for name in names]
    kv = [
        total - part["written"] - part["read"] for total, part in zip(moved, partials, strict=True)
    ]
    unit, suffix = pick_unit_and_suffix(max(moved), _BYTE_UNITS, 1000)
    figure = go.Figure()
    for part, values, opacity in (
        ("KV", kv, 1.0),
        ("partials written", [part["written"] for part in partials], 0.6),
        ("partials read", [part["read"] for part in partials], 0.3),
    ):
        figure.add_bar(
            orientation="h",
            name=part,
            y=[text(label) for label in names.values()],
            x=[value / unit for value in values],
            marker={
                "color": [color(label) for label in names.values()],
                "opacity": opacity,
                "line": {"width": 0},
            },
            showlegend=False,
            hovertemplate=f"{part}: %{{x:,.2f}} {suffix}<extra>%{{y}}</extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title=suffix, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    least = totals["bytes"].get("lower_bound", 0)
    shares = ", ".join(
        f"{label} {times(totals['bytes'][name], least)}" for name, label in names.items()
    )
    return Chart(
        key,
        title,
        "All KV heads and layers, over the whole replay; the paler ends of a bar are partial "
        "results, written and read.",
        f"Bytes over the lower bound: {shares}.",
        styled(figure, 300, top=40),
    )


def _planning_time(result: Result) -> Chart:
    key, title = "planning-time", "Planning time"
    planning = result["totals"]["planning_us"]
    histogram = _sorted(planning["histogram"])
    if not histogram:
        return Chart(key, title, "", "No plan was built.", None)
    # A bin begins at a power of two, or at 0: below 1 us.
    exponents = [lower.bit_length() - 1 for lower, _ in histogram]
    figure = go.Figure()
    figure.add_bar(
        x=[exponent + 0.5 for exponent in exponents],
        y=[number for _, number in histogram],
        width=0.94,
        marker={"color": BLUE, "line": {"width": 0}},
        customdata=[f"{lower:,} to {max(2 * lower, 1):,} us" for lower, _ in histogram],
        hovertemplate="%{customdata}: %{y:,} plans<extra></extra>",
    )
    for label, value in (("median", planning["p50"]), ("p99", planning["p99"])):
        place = math.log2(value) if value > 0 else -1.0
        figure.add_vline(place, line={"color": ORANGE, "dash": "dot", "width": 1.5})
        figure.add_annotation(
            x=place,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=f"{label} {value:,.0f}",
            showarrow=False,
            xanchor="right" if label == "median" else "left",
        )
    edges = range(min(exponents), max(exponents) + 2)
    figure.update_xaxes(
        title="microseconds, logarithmic",
        tickvals=list(edges),
        ticktext=[f"{2**edge:,}" if edge >= 0 else "0" for edge in edges],
        showgrid=False,
    )
    figure.update_yaxes(title="plans built")
    return Chart(
        key,
        title,
        "Host time of the plans built; a reused plan takes "
        f"{planning['reused_p50']:,.1f} us in the median.",
        f"Planning takes {planning['p50']:,.1f} us in the median and {planning['p99']:,.1f} us at "
        "the 99th percentile.",
        styled(figure, 300),
    )


def _histograms(
    key: str,
    title: str,
    caption: str,
    axis: str,
    histograms: Mapping[str, Histogram],
    label: Callable[[int], str],
) -> Chart:
    """One group of bars per bin, one bar per policy: shares, for policies differ in their sums."""
    bins = sorted({int(edge) for histogram in histograms.values() for edge in histogram})
    if not bins:
        return Chart(key, title, "", "No plan was built.", None)
    figure = go.Figure()
    modes = []
    for policy, histogram in histograms.items():
        total = sum(histogram.values())
        if not total:
            continue
        numbers = [histogram.get(str(edge), 0) for edge in bins]
        figure.add_bar(
            name=text(policy),
            x=[label(edge) for edge in bins],
            y=[number / total for number in numbers],
            marker={"color": color(policy), "line": {"width": 0}},
            customdata=numbers,
            hovertemplate="%{y:.1%}, %{customdata:,}",
        )
        modes.append(f"{policy} {label(bins[int(np.argmax(numbers))])}")
    figure.update_layout(barmode="group", hovermode="x unified", showlegend=True)
    figure.update_yaxes(title="share", tickformat=".0%")
    figure.update_xaxes(title=axis, type="category", showgrid=False)
    return Chart(
        key,
        title,
        caption,
        f"Most frequent number of rows: {', '.join(modes)}.",
        styled(figure, 320),
    )


def _sorted(histogram: Histogram) -> list[tuple[int, int]]:
    return sorted((int(lower), number) for lower, number in histogram.items())


def _power_of_two_bin(lower: int) -> str:
    return str(lower) if lower < 2 else f"{lower} to {2 * lower - 1}"
