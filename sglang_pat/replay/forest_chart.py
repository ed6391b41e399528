"""The prefix forest of one decode step as a picture: where the running requests share KV.

A chart of the HTML report. Every request of the batch is one row, every node a rectangle: as wide
as it is long, as high as it has sharers, coloured by their number. An area is KV that query-centric
attention reads. The lower bound reads each rectangle's width once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from sglang_pat.replay.charts import GREY, OUTLINE, Chart, styled
from sglang_pat.replay.report_text import NumberTable
from sglang_pat.replay.result import Forest, ForestNode

# More rectangles make a browser slow, and are thinner than a pixel anyway.
MAX_NODES = 1500
_MAX_OUTLINED_ROWS = 150
_ROOT = -1
_PRIVATE = "rgba(139, 147, 156, 0.45)"
# The more sharers, the stronger; lightness alone tells them apart, on a light and on a dark page.
_COLORSCALE = [[0, "#f6d98b"], [0.35, "#eda04d"], [0.7, "#d4553c"], [1, "#93193a"]]


class Block(NamedTuple):
    """A rectangle: KV positions [begin, end) of the requests in rows [top, top + holders).

    nodes: how many forest nodes it stands for; more than one where small nodes are summed up.
    """

    begin: int
    end: int
    top: int
    holders: int
    nodes: int = 1


class NodeRow(NamedTuple):
    """A shared node as text."""

    node: str
    positions: str
    tokens: str
    sharers: str
    saved: str


NODE_COLUMNS = NodeRow("node", "KV positions", "tokens", "sharers", "KV tokens saved")


@dataclass(frozen=True)
class Layout:
    """Blocks that cover a forest, parents before children. hidden: nodes drawn only as sums."""

    blocks: list[Block]
    hidden: int


def lay_out(nodes: Sequence[ForestNode], max_nodes: int = MAX_NODES) -> Layout:
    """Give every node its rows: within its parent's, below its larger siblings.

    Of more than max_nodes nodes, those with the most holders are kept; of the others, the children
    of each kept node are summed into one block, as long as the longest of their branches. Raises
    ValueError for a node whose parent does not exist, or whose chain of parents is a circle.
    """
    children: dict[int, list[ForestNode]] = defaultdict(list)
    known = {_ROOT, *(node["id"] for node in nodes)}
    for node in nodes:
        if node["parent"] not in known:
            raise ValueError(f"forest node {node['id']} has an unknown parent: {node['parent']}")
        children[node["parent"]].append(node)
    for siblings in children.values():
        siblings.sort(key=lambda node: (-node["holders"], node["begin"] - node["end"], node["id"]))
    top_down = list(_top_down(children))
    if len(top_down) != len(nodes):
        raise ValueError(f"{len(nodes) - len(top_down)} forest nodes do not descend from a root")

    # Stable, and a parent has at least as many holders as its child: the kept nodes are a forest.
    kept = {node["id"] for node in sorted(top_down, key=_by_holders)[:max_nodes]}
    blocks = []
    first_row = {_ROOT: 0}
    for parent in (_ROOT, *(node["id"] for node in top_down if node["id"] in kept)):
        row = first_row[parent]
        hidden = []
        for child in children[parent]:
            if child["id"] in kept:
                blocks.append(Block(child["begin"], child["end"], row, child["holders"]))
                first_row[child["id"]] = row
                row += child["holders"]
            else:
                hidden.append(child)
        if hidden:
            below = [*hidden, *(n for node in hidden for n in _top_down(children, node["id"]))]
            blocks.append(
                Block(
                    begin=min(node["begin"] for node in hidden),
                    end=max(node["end"] for node in below),
                    top=row,
                    holders=sum(node["holders"] for node in hidden),
                    nodes=len(below),
                )
            )
    return Layout(blocks, len(nodes) - len(kept))


def forest_chart(forest: Forest | None) -> Chart:
    """The chart of a step's forest; without one, a chart that says so."""
    title = "Prefix forest"
    if forest is None or not forest["nodes"]:
        return Chart("forest", title, "", "No step's prefix forest was recorded.", None, wide=True)
    layout = lay_out(forest["nodes"])
    shared = [block for block in layout.blocks if block.nodes == 1 and block.holders > 1]
    private = [block for block in layout.blocks if block.nodes == 1 and block.holders == 1]
    summed = [block for block in layout.blocks if block.nodes > 1]
    figure = go.Figure()
    if shared:
        figure.add_bar(**_bars(shared, "shared"), marker=_shared_marker(shared))
    if private:
        figure.add_bar(**_bars(private, "private"), marker=_marker(_PRIVATE))
    if summed:
        figure.add_bar(
            **_bars(summed, "several nodes"),
            marker={**_marker(GREY), "pattern": {"shape": "/", "size": 5, "solidity": 0.25}},
        )
    # Rows of less than some three pixels would be all outline.
    figure.update_traces(marker_line_width=0.5 if forest["batch"] <= _MAX_OUTLINED_ROWS else 0)
    figure.update_layout(barmode="overlay", xaxis_title="KV position, tokens")
    figure.update_yaxes(
        title="requests", range=[max(forest["batch"], 1), 0], autorange=False, tickformat=",d"
    )
    figure.update_xaxes(rangemode="tozero", showgrid=False)
    figure.update_yaxes(showgrid=False)
    return Chart(
        "forest",
        f"{title} at step {forest['step']:,}",
        "Each row is a request, each rectangle a node of the tree: its width is its length, its "
        "height and colour the number of requests that share it. Query-centric attention reads "
        "the whole area; the lower bound reads every rectangle's width once. Drag to zoom.",
        _alt(forest),
        styled(figure, 560),
        list(_notes(layout, len(forest["nodes"]))),
        wide=True,
    )


def largest_shared(forest: Forest | None, limit: int = 10) -> list[NodeRow]:
    """The nodes whose sharing saves most in the step, most first."""
    nodes = forest["nodes"] if forest else []
    shared = [node for node in nodes if node["holders"] > 1]
    return [
        NodeRow(
            f"{node['id']}",
            f"{node['begin']:,} to {node['end']:,}",
            f"{node['end'] - node['begin']:,}",
            f"{node['holders']:,}",
            f"{_saved_tokens(node):,}",
        )
        for node in sorted(shared, key=lambda node: (-_saved_tokens(node), node["id"]))[:limit]
    ]


def largest_table(forest: Forest | None) -> NumberTable:
    """The rows of `largest_shared` under their headings."""
    rows: list[tuple[str, ...]] = list(largest_shared(forest))
    return NumberTable("Nodes whose sharing saves most", NODE_COLUMNS, rows)


def _saved_tokens(node: ForestNode) -> int:
    """KV tokens that reading a node once saves in one step."""
    return (node["end"] - node["begin"]) * (node["holders"] - 1)


def _by_holders(node: ForestNode) -> int:
    return -node["holders"]


def _top_down(children: dict[int, list[ForestNode]], root: int = _ROOT) -> Iterator[ForestNode]:
    """All nodes below `root`, each after its parent; without recursion, for chains are long."""
    waiting = list(reversed(children.get(root, [])))
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(children.get(node["id"], [])))


def _bars(blocks: Sequence[Block], name: str) -> dict[str, object]:
    return {
        "orientation": "h",
        "name": name,
        "base": [block.begin for block in blocks],
        "x": [block.end - block.begin for block in blocks],
        "y": [block.top + block.holders / 2 for block in blocks],
        "width": [block.holders for block in blocks],
        "customdata": [_hover(block) for block in blocks],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _hover(block: Block) -> str:
    requests = "1 request" if block.holders == 1 else f"{block.holders:,} requests"
    extent = f"positions {block.begin:,} to {block.end:,}"
    if block.nodes > 1:
        return f"<b>{block.nodes:,} nodes</b><br>{extent} at most<br>{requests}"
    return f"<b>{requests}</b><br>{block.end - block.begin:,} tokens<br>{extent}"


def _marker(fill: object) -> dict[str, object]:
    return {"color": fill, "line": {"color": OUTLINE}}


def _shared_marker(shared: Sequence[Block]) -> dict[str, object]:
    """Coloured on a logarithmic scale, whose bar is labelled in requests."""
    most = max(block.holders for block in shared)
    ticks = [2**exponent for exponent in range(1, most.bit_length())]
    if most > ticks[-1] * 1.4:
        ticks.append(most)
    return {
        **_marker([float(np.log2(block.holders)) for block in shared]),
        "colorscale": _COLORSCALE,
        "cmin": 1,
        "cmax": max(float(np.log2(most)), 1.01),
        "colorbar": {
            "title": {"text": "sharers", "side": "right", "font": {"size": 13}},
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": [float(np.log2(tick)) for tick in ticks],
            "ticktext": [f"{tick:,}" for tick in ticks],
        },
    }


def _alt(forest: Forest) -> str:
    nodes = forest["nodes"]
    shared = [node for node in nodes if node["holders"] > 1]
    text = (
        f"Prefix forest of step {forest['step']:,}: {forest['batch']:,} requests, "
        f"{len(shared):,} shared nodes and {len(nodes) - len(shared):,} private ones."
    )
    if shared:
        widest = max(shared, key=_saved_tokens)
        text += (
            f" The node that saves most holds {widest['end'] - widest['begin']:,} tokens of "
            f"{widest['holders']:,} requests."
        )
    return text


def _notes(layout: Layout, num_nodes: int) -> Iterator[str]:
    if layout.hidden:
        yield (
            f"{num_nodes - layout.hidden:,} of {num_nodes:,} nodes are drawn, those with the most "
            f"sharers. The other {layout.hidden:,} are summed into the hatched blocks, each as "
            "long as its longest branch."
        )
