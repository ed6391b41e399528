"""Charts of the HTML report over the decode steps: KV reads, plans, load, kernel times.

Beside the pipeline: from a `Result` to Plotly figures. Whatever was not replayed is left out; a
chart that has nothing to show says so instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from typing import TypeAlias

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

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
from sglang_pat.replay.result import Result, StepRow
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

# What a line shows of a step; None leaves the step out.
_Value: TypeAlias = Callable[[StepRow], float | None]


def time_charts(result: Result) -> list[Chart]:
    """Over the decode steps: KV reads, plans, the state of the server, kernel times if measured."""
    charts = [_kv_reads(result), _plan_reuse(result), _load(result)]
    if any("gpu" in step for step in result["steps"]):
        charts.append(_kernel_times(result))
    return charts


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
