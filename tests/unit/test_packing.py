"""Packing policies on forests small enough to work out by hand."""

from __future__ import annotations

import pytest
from forests import ForestCase, make_case, make_scheduler, plan_case
from plan_segments import plan_segments

from sglang_pat._scheduler import SHARED_KV, TILE_TABLE


def shared_packs(case: ForestCase, policy: str, group_size: int = 4) -> list[tuple[int, int, int]]:
    """(first position, tokens, requests) of every shared pack. One worker: no KV is cut."""
    plan = plan_case(make_scheduler(group_size, num_workers=1, policy=policy), case)
    span_of = {span[3]: span for span in plan.gather_spans.tolist()}
    packs: dict[int, tuple[int, int, int]] = {}
    for _, kv_request, kv_begin, _, entries in plan_segments(plan):
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
    """Group size 4, tiles of 64 rows: 16 requests of one child leave a root of 19 with 3 of a pack
    of 16 rows. Apart, the root's 76 rows need two tiles of 64, 52 rows of them padding.
    """
    tail = (1, 1000)
    aligned = make_case([(-1, 500), (0, 200)], [tail] * 16 + [(0, 1000)] * 3)
    assert shared_packs(aligned, "compute") == [(0, 500, 3), (0, 700, 16)]
    assert shared_packs(aligned, "per-node") == [(0, 500, 19), (500, 200, 16)]
    # 8 more requests stay behind: 11 of them fill most of the second tile, so nothing is gained.
    filled = make_case([(-1, 500), (0, 200)], [tail] * 10 + [(0, 1000)] * 6)
    assert shared_packs(filled, "compute") == [(0, 500, 16), (500, 200, 10)]


@pytest.mark.parametrize(("group_size", "longest_merged"), [(1, 6), (4, 24), (8, 48)])
def test_memory_counts_the_partials_of_the_whole_group(
    group_size: int, longest_merged: int
) -> None:
    """Three requests that leave save 2 tokens per row: 6 * group_size for one more pass over the
    root.
    """
    at_most = siblings(longest_merged, 400, 3)
    beyond = siblings(longest_merged + 1, 400, 3)
    assert (0, longest_merged + 400, 3) in shared_packs(at_most, "memory", group_size)
    assert shared_packs(beyond, "memory", group_size)[0] == (0, longest_merged + 1, 6)


def test_memory_stores_directly_where_that_saves_two_partials() -> None:
    """A request that takes the root along has one partial left: worth 4 tokens per row, not 2."""
    two_requests = [(0, 5000), (0, 5000)]
    assert shared_packs(make_case([(-1, 16)], two_requests), "memory") == []
    assert shared_packs(make_case([(-1, 17)], two_requests), "memory") == [(0, 17, 2)]


def test_memory_counts_one_partial_where_an_ancestor_leaves_another() -> None:
    """A request that takes along a child of the root still has the root's partial: 2 per row."""
    below = [(1, 5000)] * 2
    for tokens, merges in ((8, True), (9, False), (16, False)):
        case = make_case([(-1, 3000), (0, tokens)], [*below, *[(0, 5000)] * 4])
        packs = shared_packs(case, "memory")
        assert packs == [(0, 3000, 6), *([] if merges else [(3000, tokens, 2)])]


def test_memory_counts_passes_per_tile() -> None:
    """Children that fill tiles of their own add no pass over the root, so they take it along."""
    per_tile = TILE_TABLE[-1][0] // 4
    assert shared_packs(siblings(4096, 400, per_tile), "memory") == [(0, 4496, per_tile)] * 2
    halves = siblings(4096, 400, per_tile // 2)
    assert shared_packs(halves, "memory")[0] == (0, 4096, 2 * (per_tile // 2))


def test_nodes_with_the_same_holders_are_one_range() -> None:
    case = make_case([(-1, 100), (0, 50), (1, 25)], [(2, 10), (2, 20)])
    for policy in ("memory", "paper", "per-node"):
        assert shared_packs(case, policy) == [(0, 175, 2)]


def test_a_node_of_one_request_is_private() -> None:
    case = make_case([(-1, 100), (0, 50)], [(1, 10), (0, 20)])
    assert shared_packs(case, "per-node") == [(0, 100, 2)]


def test_private_packs_are_in_tree_order() -> None:
    """Requests that share more lie closer together: their private ranges too."""
    case = make_case([(-1, 300), (-1, 400)], [(0, 9), (1, 9), (0, 9), (1, 9), (-1, 7), (0, 9)])
    plan = plan_case(make_scheduler(num_workers=1), case)
    private = plan.kv_segments[plan.kv_segments[:, 0] != SHARED_KV, 0].tolist()
    assert private == [0, 2, 5, 1, 3, 4]


def test_two_roots_are_two_packs() -> None:
    case = make_case([(-1, 300), (-1, 400)], [(0, 9), (1, 9), (0, 9), (1, 9)])
    assert shared_packs(case, "memory") == [(0, 300, 2), (0, 400, 2)]
