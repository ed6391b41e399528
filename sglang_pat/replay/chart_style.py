"""How the charts of the HTML report look: one Plotly template, one colour per policy.

Beside the pipeline: below all charts. Colours of text and grid are the page's
(report.css), so that they follow its light or dark scheme; those here are legible on both.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field

import plotly.graph_objects as go

from sglang_pat.replay.summary import LOWER_BOUND, QUERY_CENTRIC

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
