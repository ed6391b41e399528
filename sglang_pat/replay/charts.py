"""The charts of the HTML report: over the decode steps, over the whole replay, and of the capacity.

From a `Result` to Plotly figures. Whatever was not replayed is left out. A chart that has nothing
to show says so instead. Colours of text and grid are the page's (`report.css`), so that they follow
its light or dark scheme; those here are legible on both.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.filesize import pick_unit_and_suffix

from sglang_pat.replay.report_text import (
    LOWER_BOUND,
    QUERY_CENTRIC,
    main_policy,
    over_bound,
    page_size,
    times,
    words,
)
from sglang_pat.replay.result import Histogram, Result, StepRow

# --- how charts look ---

GREY = "#8b939c"
BLUE = "#2f86d6"
ORANGE = "#d9772b"
GREEN = "#2a9d78"
PINK = "#c465a5"
OUTLINE = "rgba(128, 128, 128, 0.55)"

# The dashes tell lines apart for those who cannot tell the colours.
_LINES = {
    QUERY_CENTRIC: (GREY, "solid"),
    LOWER_BOUND: (GREY, "dot"),
    "memory": (BLUE, "solid"),
    "paper": (ORANGE, "dash"),
    "compute": (GREEN, "dashdot"),
    "per-node": (PINK, "10px,3px,2px,3px,2px,3px"),
}
_OTHER_LINE = ("#a58b2f", "longdashdot")

CAUSE_COLORS = {
    "reused": "#aab2bb",
    "first": GREEN,
    "batch_changed": BLUE,
    "tail_growth": ORANGE,
}


@dataclass(frozen=True)
class Chart:
    """One figure of the report.

    key: its id in the page. caption: how to read it. alt: what it shows, for those who do not see
    it. notes: what was left out. figure: None if there is nothing to draw, `alt` says why.
    """

    key: str
    title: str
    caption: str
    alt: str
    figure: go.Figure | None
    notes: list[str] = field(default_factory=list)
    wide: bool = False


def color(policy: str) -> str:
    """Of a policy, of query-centric attention, of the lower bound."""
    return _LINES.get(policy, _OTHER_LINE)[0]


def line(policy: str) -> dict[str, object]:
    """Colour and dash of a line over time."""
    stroke, dash = _LINES.get(policy, _OTHER_LINE)
    return {"color": stroke, "dash": dash, "width": 1.6}


def text(value: str) -> str:
    """For every string that Plotly shows: it reads a subset of HTML."""
    return html.escape(value)


def styled(figure: go.Figure, height: int, *, top: int = 64) -> go.Figure:
    """The figure with the report's template.

    height, top: of all and of the margin above, in pixels; there is the tool bar, and below it the
    legend if there is one. The width is the window's.
    """
    return figure.update_layout(template=_TEMPLATE, height=height, margin={"t": top})


_AXIS = {
    "automargin": True,
    "showgrid": True,
    "showline": True,
    "ticks": "outside",
    "ticklen": 4,
    "title": {"standoff": 8, "font": {"size": 13}},
    "zeroline": False,
}

_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, 'Segoe UI', 'Liberation Sans', sans-serif", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 64, "r": 16, "b": 48},
        "legend": {"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": "#20262d", "bordercolor": "#20262d", "align": "left"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": BLUE},
        "xaxis": _AXIS,
        "yaxis": {**_AXIS, "rangemode": "tozero"},
        "bargap": 0.12,
    }
)


# --- fewer points, without losing a peak ---

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


# --- over the decode steps ---

_NO_STEPS = "No decode step was replayed."
# Bars over time: no more than can be told apart, and none of less steps than make a share.
_MAX_INTERVALS = 60
_STEPS_PER_INTERVAL = 10

# Lines that nobody could tell apart: in tokens, by a part of their value; ratios have a scale of
# their own.
_SAME_LINE, _SAME_RATIO = 0.01, 1e-4

# What a line shows of a step; None leaves the step out.
_Value: TypeAlias = Callable[[StepRow], float | None]


def time_charts(result: Result) -> list[Chart]:
    """Over time: KV reads, plans, the state of the server, kernel times if they were measured."""
    charts = [_kv_reads(result), _over_the_bound(result), _plan_reuse(result), _load(result)]
    if any("gpu" in step for step in result["steps"]):
        charts.append(_kernel_times(result))
    return charts


def _kv_reads(result: Result) -> Chart:
    key, title = "kv-reads", "KV tokens read per decode step"
    steps = result["steps"]
    if not steps:
        return Chart(key, title, "", _NO_STEPS, None, wide=True)
    axis = _time_axis(steps)
    values: dict[str, _Value] = {name: _tokens(name) for name in _policies(steps)}
    if QUERY_CENTRIC not in values:
        values = {QUERY_CENTRIC: lambda step: step["kv_tokens"]["query_centric"], **values}
    values[LOWER_BOUND] = lambda step: step["kv_tokens"]["lower_bound"]
    figure = go.Figure(_merged_lines(result, axis, values, _SAME_LINE))
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(title="KV tokens")
    figure.update_xaxes(title=axis.title)
    figure.update_layout(hovermode="x unified", showlegend=True)
    kv_tokens = result["totals"]["kv_tokens"]
    reads = ", ".join(
        f"{name} {over_bound(tokens, kv_tokens['lower_bound'])}"
        for name, tokens in kv_tokens["policies"].items()
    )
    return Chart(
        key,
        title,
        "Tokens of one KV head and layer. Lines that differ by less than 1% are drawn as one. "
        "Click a name to hide it, drag to zoom, double-click to return.",
        f"KV tokens over time. In total, query-centric attention reads "
        f"{times(kv_tokens['query_centric'], kv_tokens['lower_bound'])} the lower bound"
        + (f"; {reads}." if reads else "."),
        styled(figure, 400),
        _sampling_notes(result, drawn=True),
        wide=True,
    )


def _over_the_bound(result: Result) -> Chart:
    key, title = "over-bound", "KV tokens over the lower bound"
    steps = result["steps"]
    names = _policies(steps)
    if not names:
        return Chart(key, title, "", "No packing policy was replayed.", None, wide=True)
    axis = _time_axis(steps)
    values = {name: _over_bound(name) for name in names}
    figure = go.Figure(_merged_lines(result, axis, values, _SAME_RATIO))
    figure.update_traces(hovertemplate="%{y:.4f}x")
    figure.add_hline(1, line={**line(LOWER_BOUND)})
    figure.update_yaxes(title="times the bound", rangemode="normal")
    figure.update_xaxes(title=axis.title)
    figure.update_layout(hovermode="x unified", showlegend=True)
    kv_tokens = result["totals"]["kv_tokens"]
    ratios = ", ".join(
        f"{name} {over_bound(tokens, kv_tokens['lower_bound'])}"
        for name, tokens in kv_tokens["policies"].items()
    )
    return Chart(
        key,
        title,
        "The lower bound reads every node of the tree once per step. Equal lines are drawn as one.",
        f"KV tokens over the lower bound, in total: {ratios}.",
        styled(figure, 300),
        wide=True,
    )


def _plan_reuse(result: Result) -> Chart:
    key, title = "plan-reuse", "Plans built and reused"
    steps = result["steps"]
    if not steps:
        return Chart(key, title, "", _NO_STEPS, None)
    num_intervals = min(_MAX_INTERVALS, -(-len(steps) // _STEPS_PER_INTERVAL))
    intervals = np.array_split(np.arange(len(steps)), num_intervals)
    causes = list(dict.fromkeys([*CAUSE_COLORS, *(step["cause"] for step in steps)]))
    axis = _time_axis(steps)
    places = [axis.place(step) for step in steps]
    # The last sample counts for as long as the one before it.
    last = places[-1] + (places[-1] - places[-2] if len(places) > 1 else 1.0)
    edges = [places[part[0]] for part in intervals] + [last]
    middles = [(begin + end) / 2 for begin, end in pairwise(edges)]
    widths = [end - begin for begin, end in pairwise(edges)]
    figure = go.Figure()
    for cause in causes:
        numbers = [sum(steps[i]["cause"] == cause for i in part) for part in intervals]
        if any(numbers):
            figure.add_bar(
                name=text(words(cause)),
                x=middles,
                y=[number / len(part) for number, part in zip(numbers, intervals, strict=True)],
                width=widths,
                marker={"color": CAUSE_COLORS.get(cause, GREY), "line": {"width": 0}},
                customdata=numbers,
                hovertemplate="%{y:.1%}, %{customdata:,} sampled steps",
            )
    figure.update_layout(barmode="stack", bargap=0, hovermode="x unified", showlegend=True)
    figure.update_yaxes(title="share of steps", tickformat=".0%", range=[0, 1])
    figure.update_xaxes(title=axis.title)
    plans = result["totals"]["plans"]
    built = ", ".join(f"{number:,} {words(cause)}" for cause, number in plans["built"].items())
    return Chart(
        key,
        title,
        "Of the sampled steps: those that reused the last plan, and those that built one, by "
        "cause.",
        f"Over all steps, {plans['reused']:,} plans were reused; built: {built or 'none'}.",
        styled(figure, 360),
        _sampling_notes(result, drawn=False),
    )


def _load(result: Result) -> Chart:
    key, title = "load", "Batch and KV pool"
    steps = result["steps"]
    if not steps:
        return Chart(key, title, "", _NO_STEPS, None)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1)
    axis = _time_axis(steps)
    batch = _line(steps, axis, "batch", lambda step: step["batch"])
    held = _line(steps, axis, "KV tokens held", lambda step: step["held_tokens"])
    for row, (trace, stroke) in enumerate(((batch, BLUE), (held, ORANGE)), start=1):
        trace.update(line={"color": stroke, "dash": "solid"}, showlegend=False)
        figure.add_trace(trace, row, 1)
    figure.update_yaxes(title="requests", row=1, col=1)
    figure.update_yaxes(title="KV tokens held", row=2, col=1)
    figure.update_xaxes(title=axis.title, row=2, col=1)
    figure.update_layout(hovermode="x unified")
    return Chart(
        key,
        title,
        "Above: requests in the decode batch. Below: tokens in the KV pool, those that the tree "
        "keeps for later requests included.",
        f"The batch holds {result['totals']['batch_mean']:,.1f} requests in the mean, "
        f"{max(step['batch'] for step in steps):,} at most in a sampled step; the pool at most "
        f"{max(step['held_tokens'] for step in steps):,} KV tokens.",
        styled(figure, 360, top=40),
    )


def _kernel_times(result: Result) -> Chart:
    steps = [step for step in result["steps"] if "gpu" in step]
    contenders = list(dict.fromkeys(name for step in steps for name in step["gpu"]))
    axis = _time_axis(steps)
    figure = go.Figure()
    means = []
    for name, stroke in zip(contenders, cycle((BLUE, GREY, ORANGE)), strict=False):
        trace = _line(steps, axis, name, _kernel_ms(name))
        trace.update(line={"color": stroke, "dash": "solid"}, hovertemplate="%{y:.4f} ms")
        figure.add_trace(trace)
        values = [step["gpu"][name] for step in steps if name in step["gpu"]]
        means.append(f"{name} {sum(values) / len(values):.4f} ms")
    figure.update_layout(hovermode="x unified", showlegend=True)
    figure.update_yaxes(title="ms, one layer")
    figure.update_xaxes(title=axis.title)
    return Chart(
        "kernel-times",
        "Attention on the GPU",
        f"Measured on the {len(steps):,} steps that were run on the device.",
        f"Milliseconds of one layer's attention, mean: {', '.join(means)}.",
        styled(figure, 360),
    )


class _Axis(NamedTuple):
    """Where a step lies on the x-axis of a chart."""

    title: str
    place: Callable[[StepRow], float]


def _time_axis(steps: Sequence[StepRow]) -> _Axis:
    """Simulated time, in the unit that fits; steps where the server was idle most of the time."""
    gaps = np.diff([step["time"] for step in steps])
    idle = gaps[gaps > 100 * np.median(gaps)].sum() if len(gaps) else 0.0
    if idle > 0.5 * gaps.sum() or len(steps) == 1:
        return _Axis("decode step", lambda step: step["step"])
    span = steps[-1]["time"]
    unit, seconds = next(entry for entry in _TIME_UNITS if span >= 3 * entry[1] or entry[1] == 1)
    return _Axis(f"simulated time, {unit}", lambda step: round(step["time"] / seconds, 6))


_TIME_UNITS = (("hours", 3600), ("minutes", 60), ("seconds", 1))


def _merged_lines(
    result: Result, axis: _Axis, values: Mapping[str, _Value], tolerance: float
) -> list[go.Scatter]:
    """A line for each value; those that differ by less than `tolerance` everywhere are one.

    A merged line looks as the policy that the replay is about, if it is one of them, and lies
    above the others.
    """
    steps, foremost = result["steps"], main_policy(result)
    # The main policy first: it is what the others are merged with.
    order = sorted(values, key=lambda name: name != foremost)
    drawn = {name: np.array([_number(values[name](step)) for step in steps]) for name in order}
    groups: list[list[str]] = []
    for name in order:
        for group in groups:
            if _are_same(drawn[group[0]], drawn[name], tolerance):
                group.append(name)
                break
        else:
            groups.append([name])
    lines = []
    for group in groups:
        trace = _line(steps, axis, group[0], values[group[0]])
        trace.update(name=text(", ".join(group)), zorder=int(group[0] == foremost))
        lines.append(trace)
    return lines


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _are_same(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], tolerance: float) -> bool:
    return bool(np.allclose(a, b, rtol=tolerance, atol=0, equal_nan=True))


def _line(steps: Sequence[StepRow], axis: _Axis, name: str, value: _Value) -> go.Scatter:
    """A line over the steps that have the value, with its extremes kept if they are too many."""
    points = [(axis.place(step), at) for step in steps if (at := value(step)) is not None]
    chosen = extremes([at for _, at in points])
    points = points[chosen] if isinstance(chosen, slice) else [points[i] for i in chosen]
    return go.Scatter(
        name=text(name),
        x=[place for place, _ in points],
        y=[at for _, at in points],
        mode="lines" if len(points) > 1 else "markers",
        line=line(name),
        marker={"color": color(name), "size": 9},
        showlegend=True,
        hovertemplate="%{y:,}",
    )


def _tokens(policy: str) -> _Value:
    return lambda step: step["kv_tokens"]["policies"].get(policy)


def _over_bound(policy: str) -> _Value:
    def value(step: StepRow) -> float | None:
        kv_tokens = step["kv_tokens"]
        tokens = kv_tokens["policies"].get(policy)
        return tokens / kv_tokens["lower_bound"] if tokens and kv_tokens["lower_bound"] else None

    return value


def _kernel_ms(contender: str) -> _Value:
    return lambda step: step.get("gpu", {}).get(contender)


def _policies(steps: Sequence[StepRow]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step["kv_tokens"]["policies"]))


def _sampling_notes(result: Result, *, drawn: bool) -> list[str]:
    sampled, total = len(result["steps"]), result["totals"]["steps"]
    notes = []
    if sampled < total:
        notes.append(f"{sampled:,} of {total:,} decode steps were sampled.")
    if drawn and sampled > MAX_POINTS:
        notes.append(
            f"Of the {sampled:,} sampled steps, each line shows the least and the greatest value "
            f"of {MAX_POINTS // 2:,} intervals."
        )
    return notes


# --- over the whole replay ---

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
        "All KV heads and layers of one GPU. The paler ends of a bar are partial results, written "
        "and read.",
        f"Bytes, times the lower bound: {shares}.",
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


# --- the capacity study ---

_SCHEME_COLORS = {"contiguous": GREY, "paged": ORANGE, "shared": BLUE}


def capacity_charts(capacity: Mapping[str, Any]) -> list[Chart]:
    """Requests at once and waste, by scheme and page size. None without a study."""
    uses = capacity.get("uses", [])
    if not uses:
        return []
    requests, waste = go.Figure(), go.Figure()
    for scheme, fill in _SCHEME_COLORS.items():
        chosen = [use for use in uses if use["scheme"] == scheme]
        look: dict[str, Any] = {
            "name": scheme,
            "marker": {"color": fill, "line": {"width": 0}},
            "x": [page_size(use) for use in chosen],
        }
        if scheme == "contiguous":  # alone at its place, so in the middle of it
            look |= {"offset": -0.2, "width": 0.4}
        means = [use["requests"] for use in chosen]
        requests.add_bar(
            **look,
            y=means,
            error_y={
                "array": [use["most"] - use["requests"] for use in chosen],
                "arrayminus": [use["requests"] - use["fewest"] for use in chosen],
                "color": GREY,
                "thickness": 1,
                "width": 3,
            },
            hovertemplate="%{y:,.1f} requests",
        )
        wasted = [
            use["wasted_bytes"] / use["reserved_bytes"] if use["reserved_bytes"] else 0.0
            for use in chosen
        ]
        waste.add_bar(**look, y=wasted, hovertemplate="%{y:.1%} wasted")
    for figure in (requests, waste):
        figure.update_layout(barmode="group", hovermode="x unified", showlegend=True)
        figure.update_xaxes(title="page size, tokens", type="category", showgrid=False)
    requests.update_yaxes(title="requests at once")
    waste.update_yaxes(title="wasted", tickformat=".0%")
    best = max(uses, key=lambda use: (use["requests"], use["scheme"]))
    worst = max(uses, key=lambda use: use["wasted_bytes"])
    return [
        Chart(
            "capacity",
            f"Requests in a pool of {capacity['pool_bytes'] / 2**30:,.1f} GiB for "
            f"{capacity['model']}",
            "Requests that fit at once: the mean of several fills of the pool, and the range. A "
            "contiguous pool reserves the longest length for each request, a paged one whole "
            "pages. A shared one holds the pages of a prefix once.",
            f"Most requests fit {best['scheme']}, page size {page_size(best)}: "
            f"{best['requests']:,.1f} in the mean.",
            styled(requests, 340),
            _capacity_notes(capacity),
        ),
        Chart(
            "capacity-waste",
            "Memory that is wasted",
            "The part of the memory handed out that no token will use.",
            f"Most memory is wasted {worst['scheme']}, page size {page_size(worst)}.",
            styled(waste, 340),
        ),
    ]


def _capacity_notes(capacity: Mapping[str, Any]) -> list[str]:
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
