"""The charts of the HTML report, but for the forest: KV reads, plans, packs, tiles, planning time.

Beside the pipeline: from a `Result` to Plotly figures. Whatever was not replayed is left out; a
chart that has nothing to show says so instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from typing import TypeAlias

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.filesize import pick_unit_and_suffix

from sglang_pat.replay.chart_style import (
    BLUE,
    CAUSE_COLORS,
    GREY,
    ORANGE,
    Chart,
    color,
    line,
    styled,
    text,
)
from sglang_pat.replay.downsample import MAX_POINTS, extremes
from sglang_pat.replay.result import Histogram, Result, StepRow
from sglang_pat.replay.summary import (
    LOWER_BOUND,
    QUERY_CENTRIC,
    main_policy,
    over_bound,
    times,
    words,
)

_NO_STEPS = "No decode step was replayed."
# Bars over time: no more than can be told apart, and none of less steps than make a share.
_MAX_INTERVALS = 60
_STEPS_PER_INTERVAL = 10
_BYTE_UNITS = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"]

# What a line shows of a step; None leaves the step out.
_Value: TypeAlias = Callable[[StepRow], float | None]


def time_charts(result: Result) -> list[Chart]:
    """Over the decode steps: KV reads, plans, the state of the server, kernel times if measured."""
    charts = [_kv_reads(result), _plan_reuse(result), _load(result)]
    if any("gpu" in step for step in result["steps"]):
        charts.append(_kernel_times(result))
    return charts


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


# --- over the decode steps ---


def _kv_reads(result: Result) -> Chart:
    key, title = "kv-reads", "KV tokens read per decode step"
    steps = result["steps"]
    if not steps:
        return Chart(key, title, "", _NO_STEPS, None, wide=True)
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.62, 0.38], vertical_spacing=0.06
    )
    names, foremost = _policies(steps), main_policy(result)

    if QUERY_CENTRIC not in names:
        figure.add_trace(
            _line(steps, QUERY_CENTRIC, lambda step: step["kv_tokens"]["query_centric"]), 1, 1
        )
    for name in names:
        tokens = _line(steps, name, _tokens(name))
        ratio = _line(steps, name, _over_bound(name))
        ratio.update(showlegend=False, hovertemplate="%{y:.4f}x")
        for row, trace in enumerate((tokens, ratio), start=1):
            # Lines that coincide hide each other; the one that the replay is about stays visible.
            figure.add_trace(trace.update(zorder=int(name == foremost)), row, 1)
    figure.add_trace(_line(steps, LOWER_BOUND, lambda step: step["kv_tokens"]["lower_bound"]), 1, 1)
    figure.add_hline(1, row=2, col=1, line={**line(LOWER_BOUND)})
    figure.update_yaxes(title="tokens", row=1, col=1)
    figure.update_yaxes(title="over the bound", rangemode="normal", row=2, col=1)
    figure.update_xaxes(title="decode step", row=2, col=1)
    figure.update_layout(hovermode="x unified")
    kv_tokens = result["totals"]["kv_tokens"]
    reads = ", ".join(
        f"{name} {over_bound(tokens, kv_tokens['lower_bound'])}"
        for name, tokens in kv_tokens["policies"].items()
    )
    return Chart(
        key,
        title,
        "Above: tokens of one KV head and layer. Below: the same over the lower bound, which reads "
        "every node of the tree once. Click a name to hide it, drag to zoom, double-click to "
        "return.",
        f"KV tokens over decode steps. In total, query-centric attention reads "
        f"{times(kv_tokens['query_centric'], kv_tokens['lower_bound'])} the lower bound"
        + (f"; {reads}." if reads else "."),
        styled(figure, 560),
        _sampling_notes(result, drawn=True),
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
    edges = [steps[part[0]]["step"] for part in intervals] + [steps[-1]["step"] + 1]
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
    figure.update_xaxes(title="decode step")
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
    batch = _line(steps, "batch", lambda step: step["batch"])
    held = _line(steps, "KV tokens held", lambda step: step["held_tokens"])
    for row, (trace, stroke) in enumerate(((batch, BLUE), (held, ORANGE)), start=1):
        trace.update(line={"color": stroke, "dash": "solid"}, showlegend=False)
        figure.add_trace(trace, row, 1)
    figure.update_yaxes(title="requests", row=1, col=1)
    figure.update_yaxes(title="KV tokens held", row=2, col=1)
    figure.update_xaxes(title="decode step", row=2, col=1)
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
    figure = go.Figure()
    means = []
    for name, stroke in zip(contenders, cycle((BLUE, GREY, ORANGE)), strict=False):
        trace = _line(steps, name, _kernel_ms(name))
        trace.update(line={"color": stroke, "dash": "solid"}, hovertemplate="%{y:.4f} ms")
        figure.add_trace(trace)
        values = [step["gpu"][name] for step in steps if name in step["gpu"]]
        means.append(f"{name} {sum(values) / len(values):.4f} ms")
    figure.update_layout(hovermode="x unified", showlegend=True)
    figure.update_yaxes(title="ms, one layer")
    figure.update_xaxes(title="decode step")
    return Chart(
        "kernel-times",
        "Attention on the GPU",
        f"Measured on the {len(steps):,} steps that were run on the device.",
        f"Milliseconds of one layer's attention, mean: {', '.join(means)}.",
        styled(figure, 360),
    )


# --- over the whole replay ---


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


def _line(steps: Sequence[StepRow], name: str, value: _Value) -> go.Scatter:
    """A line over the steps that have the value, with its extremes kept if they are too many."""
    points = [(step["step"], at) for step in steps if (at := value(step)) is not None]
    chosen = extremes([at for _, at in points])
    points = points[chosen] if isinstance(chosen, slice) else [points[i] for i in chosen]
    return go.Scatter(
        name=text(name),
        x=[step for step, _ in points],
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


def _sorted(histogram: Histogram) -> list[tuple[int, int]]:
    return sorted((int(lower), number) for lower, number in histogram.items())


def _power_of_two_bin(lower: int) -> str:
    return str(lower) if lower < 2 else f"{lower} to {2 * lower - 1}"
