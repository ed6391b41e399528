"""Packing policies on forests small enough to work out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from exact_packing import packing_gaps
from plan_segments import plan_segments
from sample_forests import ForestCase, make_case, make_scheduler, plan_case

from sglang_pat._scheduler import SHARED_KV, CostModel

DECISIONS = Path(__file__).parents[2] / "docs" / "design" / "decisions.md"
PAGE = " ".join(DECISIONS.read_text().split())


def shared_packs(case: ForestCase, policy: str, group_size: int = 4) -> list[tuple[int, int, int]]:
    """(first position, tokens, requests) of every shared pack. One worker: no KV is cut."""
    plan = plan_case(make_scheduler(group_size, num_workers=1, policy=policy), case)
    span_of = {span[3]: span for span in plan.gather_spans.tolist()}
    packs: dict[int, tuple[int, int, int]] = {}
    for _, kv_request, kv_begin, _, entries, _ in plan_segments(plan):
        if kv_request == SHARED_KV:
            _, position, tokens, _ = span_of[kv_begin]
            packs[kv_begin] = (position, tokens, packs.get(kv_begin, (0, 0, 0))[2] + len(entries))
    return list(packs.values())


def siblings(root: int, child: int, per_child: int) -> ForestCase:
    """A root with two children of `per_child` requests each, long private tails."""
    return make_case(
        [(-1, root), (0, child), (0, child)], [(1 + r % 2, 5000) for r in range(2 * per_child)]
    )


def test_per_node_makes_one_pack_per_node() -> None:
    assert shared_packs(siblings(10, 400, 3), "per-node") == [
        (0, 10, 6),
        (10, 400, 3),
        (10, 400, 3),
    ]


def test_query_centric_shares_nothing() -> None:
    assert shared_packs(siblings(1000, 400, 3), "query-centric") == []


def test_paper_merges_at_four_requests_per_token() -> None:
    """Algorithm 1: split iff 4 * c.size < root.len. Three requests: merged up to 12 tokens."""
    assert shared_packs(siblings(12, 400, 3), "paper") == [(0, 412, 3), (0, 412, 3)]
    assert shared_packs(siblings(13, 400, 3), "paper")[0] == (0, 13, 6)


def test_compute_merges_where_tiles_are_padded_no_more() -> None:
    """Group size 4, tiles of 64 rows: a child merges if that pads tiles no more.

    16 requests of one child leave a root of 19 with 3 of a pack of 16 rows. Apart, the root's 76
    rows need two tiles of 64, 52 rows of them padding.
    """
    tail = (1, 1000)
    aligned = make_case([(-1, 500), (0, 200)], [tail] * 16 + [(0, 1000)] * 3)
    assert shared_packs(aligned, "compute") == [(0, 500, 3), (0, 700, 16)]
    assert shared_packs(aligned, "per-node") == [(0, 500, 19), (500, 200, 16)]
    # 8 more requests stay behind: 11 of them fill most of the second tile, so nothing is gained.
    filled = make_case([(-1, 500), (0, 200)], [tail] * 10 + [(0, 1000)] * 6)
    assert shared_packs(filled, "compute") == [(0, 500, 16), (500, 200, 10)]


def packs(case: ForestCase, group_size: int = 4) -> list[list[int]]:
    """The requests of every pack of `memory`, in tree order. One worker: no KV is cut."""
    scheduler = make_scheduler(group_size, num_workers=1, min_item_tokens=1 << 24)
    plan = plan_case(scheduler, case)
    assert plan.header.num_partials == 0
    requests = plan.item_requests[:, 0].tolist()
    return [requests[first : first + count] for _, count, first, *_ in plan.work_items.tolist()]


def test_memory_divides_requests_of_one_node_into_as_few_tiles_of_equal_size() -> None:
    case = make_case([(-1, 1000)], [(0, 100)] * 40)
    assert [len(pack) for pack in packs(case)] == [13, 13, 14]
    assert [len(pack) for pack in packs(case, group_size=16)] == [4] * 10


def test_memory_cuts_where_neighbours_share_least() -> None:
    """Three children of 10 requests: a tile of 16 never holds parts of two, if they are long."""

    def children(tokens: int) -> ForestCase:
        nodes = [(-1, 100), *[(0, tokens)] * 3]
        return make_case(nodes, [(1 + r // 10, 50) for r in range(30)])

    assert [len(pack) for pack in packs(children(500))] == [10, 10, 10]
    # Two tiles read the root once less: worth more than a short child.
    assert [len(pack) for pack in packs(children(20))] == [14, 16]


def test_memory_reads_the_levels_of_a_tree_in_one_work_item() -> None:
    case = make_case([(-1, 300), (0, 400), (0, 280)], [(1, 9), (2, 9), (1, 9), (0, 9)])
    plan = plan_case(make_scheduler(num_workers=1), case)
    assert len(plan.work_items) == 1
    assert plan.header.num_partials == 0
    assert [
        (kv_request, [plan.item_requests[entry, 0] for entry in entries])
        for _, kv_request, _, _, entries, _ in plan_segments(plan)
    ] == [
        (SHARED_KV, [0, 2, 1, 3]),
        (SHARED_KV, [0, 2]),
        (0, [0]),
        (2, [2]),
        (1, [1]),  # the other child has one holder only
        (3, [3]),
    ]


def test_memory_leaves_unshared_requests_alone() -> None:
    case = make_case([(-1, 30)], [(-1, 5), (-1, 5), (0, 5), (0, 5), (-1, 5)])
    assert sorted(packs(case)) == [[0], [1], [2, 3], [4]]


def test_memory_is_as_close_to_the_cheapest_packing_as_its_page_says() -> None:
    gaps = 100 * np.array(packing_gaps(2000))
    assert gaps.min() > -1e-7
    assert np.quantile(gaps, 0.99) < 1e-7, "nothing at the 99th percentile"
    assert f"costs {gaps.mean():.3f}% more in the mean, {gaps.max():.1f}% at worst" in PAGE


def test_the_page_on_packing_has_the_costs_of_the_code() -> None:
    costs = {name: f"{cost:.2f}".rstrip("0") for name, cost in CostModel().values().items()}
    reread, partial, item = (costs[n] for n in ("reread_token", "partial_row", "packed_item"))
    assert f"a token that is read again costs {reread}," in PAGE
    assert f"a partial row {partial}, a work item {item}." in PAGE


def test_nodes_with_the_same_holders_are_one_range() -> None:
    case = make_case([(-1, 100), (0, 50), (1, 25)], [(2, 10), (2, 20)])
    for policy in ("memory", "paper", "per-node"):
        assert shared_packs(case, policy) == [(0, 175, 2)]


def test_a_node_of_one_request_is_private() -> None:
    case = make_case([(-1, 100), (0, 50)], [(1, 10), (0, 20)])
    assert shared_packs(case, "per-node") == [(0, 100, 2)]


def test_two_roots_are_two_packs() -> None:
    case = make_case([(-1, 300), (-1, 400)], [(0, 9), (1, 9), (0, 9), (1, 9)])
    assert shared_packs(case, "memory") == [(0, 300, 2), (0, 400, 2)]
