"""The picture of a prefix forest: every node in its place, thousands of them summed up."""

from __future__ import annotations

import pytest
import replay_results

from sglang_pat.replay.forest_chart import MAX_NODES, forest_chart, largest_shared, lay_out
from sglang_pat.replay.result import Forest, ForestNode


def node(id: int, parent: int, begin: int, end: int, holders: int) -> ForestNode:
    return {"id": id, "parent": parent, "begin": begin, "end": end, "holders": holders}


def test_children_lie_in_the_rows_of_their_parent() -> None:
    nodes = [
        node(0, -1, 0, 100, 3),
        node(7, 0, 100, 130, 1),
        node(3, 0, 100, 150, 2),
        node(4, 3, 150, 160, 1),
        node(9, -1, 0, 500, 4),
    ]
    layout = lay_out(nodes)
    assert layout.hidden == 0
    assert set(layout.blocks) == {
        (0, 500, 0, 4, 1),
        (0, 100, 4, 3, 1),
        (100, 150, 4, 2, 1),
        (150, 160, 4, 1, 1),
        (100, 130, 6, 1, 1),
    }


@pytest.mark.parametrize("max_nodes", [1, 5, 40, 10_000])
def test_blocks_account_for_every_node(max_nodes: int) -> None:
    nodes = replay_results.forest(batch=100)["nodes"]
    layout = lay_out(nodes, max_nodes)
    assert sum(block.nodes for block in layout.blocks) == len(nodes)
    assert layout.hidden == max(len(nodes) - max_nodes, 0)
    for index, first in enumerate(layout.blocks):
        for second in layout.blocks[index + 1 :]:
            rows = min(first.top + first.holders, second.top + second.holders)
            apart = max(first.top, second.top) >= rows
            beside = max(first.begin, second.begin) >= min(first.end, second.end)
            assert apart or beside, (first, second)


def test_hidden_branch_is_as_long_as_its_longest() -> None:
    nodes = [node(0, -1, 0, 10, 4), node(1, 0, 10, 20, 2), node(2, 1, 20, 90, 1)]
    layout = lay_out([*nodes, node(3, 0, 10, 40, 1)], max_nodes=1)
    assert layout.blocks == [(0, 10, 0, 4, 1), (10, 90, 0, 3, 3)]


def test_long_chains_need_no_recursion() -> None:
    chain = [node(i, i - 1, i, i + 1, 2) for i in range(5_000)]
    assert len(lay_out(chain, max_nodes=10_000).blocks) == 5_000


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(0, 5, 0, 1, 1)], "node 0 has an unknown parent: 5"),
        ([node(0, 1, 0, 1, 1), node(1, 0, 1, 2, 1)], "2 forest nodes do not descend from a root"),
    ],
)
def test_no_forest_is_an_error(nodes: list[ForestNode], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lay_out(nodes)


def test_thousands_of_nodes_are_summed_and_that_is_said() -> None:
    forest = replay_results.forest(batch=4_000)
    assert len(forest["nodes"]) > 4_000
    chart = forest_chart(forest)
    assert sum(len(trace.x) for trace in chart.figure.data) < 2 * MAX_NODES
    (note,) = chart.notes
    assert f"{MAX_NODES:,} of {len(forest['nodes']):,} nodes are drawn" in note
    assert not forest_chart(replay_results.forest(batch=40)).notes


def test_colour_is_the_number_of_sharers() -> None:
    forest: Forest = {
        "step": 3,
        "batch": 9,
        "nodes": [node(0, -1, 0, 64, 8), node(1, 0, 64, 80, 2), node(2, -1, 0, 5, 1)],
    }
    shared, private = forest_chart(forest).figure.data
    assert list(shared.marker.color) == [3, 1]  # powers of two
    assert list(shared.marker.colorbar.ticktext) == ["2", "4", "8"]
    assert (list(private.x), list(private.base), list(private.width)) == ([5], [0], [1])


def test_largest_by_what_sharing_saves() -> None:
    nodes = [node(0, -1, 0, 100, 3), node(1, 0, 100, 1_100, 2), node(2, 1, 1_100, 9_000, 1)]
    rows = largest_shared({"step": 0, "batch": 3, "nodes": nodes})
    assert [(row.node, row.sharers, row.saved) for row in rows] == [
        ("1", "2", "1,000"),
        ("0", "3", "200"),
    ]
    assert largest_shared(None) == []
