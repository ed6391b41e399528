"""The report of a replay: an HTML file that needs no network.

Shapes are SVG, which stretches with the page. Texts are HTML, so that they keep their size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from sglang_pat.workload.record import Forest, Recorder
from sglang_pat.workload.report import ReplayReport, reads, server_rows
from sglang_pat.workload.run import DEFAULT, PAT, SimulatedStep

_POINTS = 240  # points of the chart over time
_MOST_BLOCKS = 1500
_LEAST_ROWS = 1 / 800  # fraction of the forest's height; thinner blocks are left out


class Block(NamedTuple):
    """A rectangle of the forest, in percent of the forest's width and height."""

    x: float
    y: float
    width: float
    height: float
    holders: int
    label: str


class Bar(NamedTuple):
    """A bar that shows a number. width: in percent."""

    name: str
    value: str
    width: float
    is_pat: bool


class TimeChart(NamedTuple):
    """Points of each backend's line, in a square of 100 by 100; y grows downwards.

    between: outline of the area between the two lines. ticks: (position, text) pairs.
    """

    default: str
    pat: str
    between: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def write_report(report: ReplayReport, recorder: Recorder, command: str, path: Path) -> None:
    """Write the report. OSError if the file cannot be written."""
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    verdict = report.verdict
    name = report.answer.setup.time.gpu.default_backend
    page = environment.get_template("report.html.jinja").render(
        report=report,
        verdict=verdict,
        css=(folder / "report.css").read_text(encoding="utf-8"),
        backend=name,
        kind=verdict.says.replace(" ", "-"),
        tpot=bars(verdict.tpot_ms, name, ".1f"),
        rate=bars(verdict.requests_per_second, name, ".3g"),
        chart=time_chart(recorder.rows),
        forest=recorder.forest,
        blocks=list(blocks(recorder.forest)) if recorder.forest else [],
        longest=_longest(recorder.forest),
        servers=server_rows(report.answer),
        reads=reads(report.answer),
        notes=list(report.notes()),
        command=command,
    )
    path.write_text(page, encoding="utf-8")


def bars(values: dict[str, float], backend: str, form: str) -> list[Bar]:
    """Return the bars of both backends. The longer bar has the full width."""
    most = max(values.values()) or 1.0
    return [
        Bar(shown, format(values[key], form), 100 * values[key] / most, key == PAT)
        for key, shown in ((DEFAULT, backend), (PAT, "pat"))
    ]


# --- the gain over time ---


def time_chart(rows: Sequence[SimulatedStep]) -> TimeChart | None:
    """Return the chart of a decode step's milliseconds over time, or None without steps."""
    if not rows:
        return None
    points = list(_binned(rows))
    first, last = points[0][0], points[-1][0]
    most = 1.05 * max(max(point[1:]) for point in points) or 1.0
    span = (last - first) or 1.0

    def line(index: int) -> list[str]:
        return [f"{100 * (p[0] - first) / span:.2f},{100 - 100 * p[index] / most:.2f}"
                for p in points]  # fmt: skip

    default, pat = line(1), line(2)
    return TimeChart(
        " ".join(default),
        " ".join(pat),
        " ".join([*default, *reversed(pat)]),
        [(100 * (at - first) / span, f"{at:,.3g} s") for at in (first, (first + last) / 2, last)],
        [(100 - 100 * at / most, f"{at:,.3g}") for at in _round_numbers(most)],
    )


def _binned(rows: Sequence[SimulatedStep]) -> Iterator[tuple[float, float, float]]:
    """Yield means over equal numbers of steps: (time, ms with the default backend, ms with pat)."""
    size = -(-len(rows) // _POINTS)
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        steps = sum(row.steps for row in some)
        default, pat = (
            sum(row.steps * row.ms[name] for row in some) / steps for name in (DEFAULT, PAT)
        )
        yield some[0].time, default, pat
    if len(rows) == 1:
        yield rows[0].time + 1e-9, rows[0].ms[DEFAULT], rows[0].ms[PAT]


def _round_numbers(most: float) -> list[float]:
    """Return three to five ticks from 0 on: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** (len(str(int(most))) - 2)
    step = next(power * m for m in (0.5, 1, 2, 5, 10, 20, 50, 100) if most / (power * m) < 5)
    return [step * i for i in range(int(most / step) + 1)]


# --- the forest ---


def blocks(forest: Forest) -> Iterator[Block]:
    """Yield a rectangle for each node. Its width shows the node's tokens, its height the holders.

    A child lies within the rows of its parent, below larger siblings. Invisibly thin blocks are
    left out.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(forest.nodes):
        children[node.parent].append(index)
    longest, count = _longest(forest), 0
    stack = [(-1, 0)]
    while stack and count < _MOST_BLOCKS:
        parent, row = stack.pop()
        below = sorted(children[parent], key=lambda index: -forest.nodes[index].holders)
        for index in below:
            node = forest.nodes[index]
            if node.holders / forest.batch >= _LEAST_ROWS and node.end > node.begin:
                count += 1
                who = "1 request" if node.holders == 1 else f"{node.holders:,} requests"
                yield Block(
                    100 * node.begin / longest,
                    100 * row / forest.batch,
                    100 * (node.end - node.begin) / longest,
                    100 * node.holders / forest.batch,
                    node.holders,
                    f"{who}: {node.end - node.begin:,} tokens from {node.begin:,}",
                )
            stack.append((index, row))
            row += node.holders


def _longest(forest: Forest | None) -> int:
    return max((node.end for node in forest.nodes), default=1) if forest else 1
