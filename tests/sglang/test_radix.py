"""RadixSource on SGLang's real trees: Python nodes, and ids with each core the version has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang_trees import TREE_KINDS, Tree, place, request

from sglang_pat.batch import PrefixPaths
from sglang_pat.sglang.radix import RadixSource, radix_source

SYSTEM, TOOL_A, TOOL_B = [*range(100, 108)], [*range(200, 204)], [*range(300, 306)]
USER_1, USER_2 = [1, 2, 3], [4, 5]


@pytest.fixture(params=TREE_KINDS)
def tree(request: pytest.FixtureRequest) -> Tree:
    return Tree(request.param)


def source_of(tree: Tree) -> RadixSource:
    source = radix_source(tree.cache)
    assert source is not None
    return source


def spans(paths: PrefixPaths) -> list[list[tuple[int, int]]]:
    """(kv_begin, kv_end) of the nodes of each request."""
    begins = paths.path_begin.tolist()
    nodes = list(zip(paths.kv_begin.tolist(), paths.kv_end.tolist(), strict=True))
    return [nodes[first:last] for first, last in pairwise(begins)]


def ids(paths: PrefixPaths) -> list[list[int]]:
    begins = paths.path_begin.tolist()
    nodes = paths.node_id.tolist()
    return [nodes[first:last] for first, last in pairwise(begins)]


def three_levels(tree: Tree) -> list[Any]:
    """Two users of tool A and one of tool B, under one system prompt. Slots: 1000 + position."""
    prompts = [SYSTEM + TOOL_A + USER_1, SYSTEM + TOOL_A + USER_2, SYSTEM + TOOL_B + USER_1]
    for number, prompt in enumerate(prompts):
        tree.insert(prompt, range(1000 * (number + 1), 1000 * (number + 1) + len(prompt)))
    return [tree.request(f"r{i}", p, len(p), row=i + 1) for i, p in enumerate(prompts)]


def test_three_level_paths(tree: Tree) -> None:
    paths = source_of(tree).paths(three_levels(tree), 3)
    assert spans(paths) == [
        [(0, 8), (8, 12), (12, 15)],
        [(0, 8), (8, 12), (12, 14)],
        [(0, 8), (8, 17)],
    ]
    first, second, third = ids(paths)
    assert first[0] == second[0] == third[0]
    assert first[1] == second[1] != third[1]
    assert len({first[2], second[2], third[1]}) == 3
    assert min(first + second + third) >= 0


def test_two_roots_and_a_request_without_cached_prefix(tree: Tree) -> None:
    tree.insert(SYSTEM, range(8))
    tree.insert(TOOL_A, range(10, 14))
    reqs = [tree.request("a", SYSTEM, 8), tree.request("b", TOOL_A, 4), tree.request("c", [9], 0)]
    paths = source_of(tree).paths(reqs, 3)
    assert spans(paths) == [[(0, 8)], [(0, 4)], []]
    assert ids(paths)[0] != ids(paths)[1]


def test_padding_rows_have_empty_paths(tree: Tree) -> None:
    paths = source_of(tree).paths(three_levels(tree), 6)
    assert len(paths) == 6
    assert spans(paths)[3:] == [[], [], []]


def test_a_split_keeps_the_key_and_refines_the_path(tree: Tree) -> None:
    source, long_prompt = source_of(tree), SYSTEM + TOOL_A
    tree.insert(long_prompt, range(50, 62))
    reqs = [tree.request("long", long_prompt, 12)]
    key, before = source.key(reqs), source.paths(reqs, 1)
    tree.insert(SYSTEM + TOOL_B, range(70, 84))  # splits the node between the two prompts
    after = source.paths(reqs, 1)
    assert source.key(reqs) == key
    assert spans(before) == [[(0, 12)]]
    assert spans(after) == [[(0, 8), (8, 12)]]
    assert source.shared_slots(reqs[0]).tolist() == list(range(50, 62))


@pytest.mark.parametrize("change", ["rid", "row", "protected", "node", "order"])
def test_key_changes_with(tree: Tree, change: str) -> None:
    source, reqs = source_of(tree), three_levels(tree)
    key = source.key(reqs)
    assert source.key(three_levels(tree)) == key  # equal for equal requests, whatever the objects
    if change == "rid":
        reqs[1].rid = "other"
    elif change == "row":
        place(reqs[1]).req_pool_idx = 9
    elif change == "protected":
        place(reqs[1]).cache_protected_len = 12
    elif change == "node":
        reqs[1].last_node = tree.last_node(SYSTEM + TOOL_A)
    else:
        reqs.reverse()
    assert source.key(reqs) != key


def test_nodes_made_after_a_reset_have_new_ids(tree: Tree) -> None:
    # What keys rely on: a request may come again under the same name, in the same row.
    source = source_of(tree)
    seen: set[int] = set()
    for _ in range(3):
        tree.cache.reset()
        tree.insert(SYSTEM, range(8))
        (path,) = ids(source.paths([tree.request("same", SYSTEM, 8)], 1))
        assert not seen & set(path)
        seen.update(path)


@pytest.mark.parametrize(("protected", "counted"), [(8, 7), (8, 9), (0, 8)])
def test_a_path_of_another_length_than_sglang_counts_is_an_error(
    tree: Tree, protected: int, counted: int
) -> None:
    tree.insert(SYSTEM, range(8))
    good, bad = tree.request("good", SYSTEM, 8), tree.request("bad", SYSTEM, protected)
    place(bad).cache_protected_len = counted
    message = f"request bad: .* holds {protected} tokens, but its cache_protected_len is {counted}"
    with pytest.raises(RuntimeError, match=message):
        source_of(tree).paths([good, bad], 2)


def test_a_request_of_a_streaming_session_is_private(tree: Tree) -> None:
    from sglang.srt.session.streaming_session import _VirtualNode

    source = source_of(tree)
    shared = three_levels(tree)
    session = request("session", _VirtualNode(), protected=5, row=7)
    reqs = [shared[0], session, shared[1]]
    paths = source.paths(reqs, 3)
    assert spans(paths)[1] == []
    assert ids(paths)[0][:2] == ids(paths)[2][:2]
    assert source.key(reqs) == source.key(reqs)
    assert source.key(reqs) != source.key(shared)


def test_shared_slots_follow_the_path(tree: Tree) -> None:
    source, reqs = source_of(tree), three_levels(tree)
    system, tool = [*range(1000, 1008)], [*range(1008, 1012)]
    assert source.shared_slots(reqs[0]).tolist() == system + tool + [1012, 1013, 1014]
    assert source.shared_slots(reqs[1]).tolist() == system + tool + [2012, 2013]
    assert source.shared_slots(tree.request("none", [9], 0)).tolist() == []


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_pages_of_16(kind: str) -> None:
    tree = Tree(kind, page_size=16)
    first, second = [*range(40)], [*range(20), *range(60, 80)]
    tree.insert(first[:32], range(32))
    tree.insert(second[:32], range(100, 132))
    reqs = [tree.request("a", first, 32), tree.request("b", second, 32)]
    paths = source_of(tree).paths(reqs, 2)
    assert spans(paths) == [[(0, 16), (16, 32)], [(0, 16), (16, 32)]]
    assert ids(paths)[0][0] == ids(paths)[1][0]


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_a_disabled_cache_has_no_source(kind: str) -> None:
    assert radix_source(Tree(kind, disable=True).cache) is None


def test_other_caches_have_no_source() -> None:
    class Heir(RadixCache):
        """Like the caches of LMCache and FlexKV, which may keep other nodes."""

    heir = Tree("python nodes").cache
    assert radix_source(heir) is not None
    heir.__class__ = Heir
    assert radix_source(heir) is None
    assert radix_source(SimpleNamespace(disable=False)) is None
    assert radix_source(None) is None


def test_a_cache_wrapped_for_sessions_is_unwrapped() -> None:
    from sglang.srt.session.streaming_session import StreamingSession

    tree = Tree("python nodes")
    wrapped = StreamingSession(tree.cache)
    if not hasattr(wrapped, "inner"):
        pytest.skip("this SGLang does not wrap the cache")
    source = radix_source(wrapped)
    assert source is not None
    reqs = three_levels(tree)
    assert spans(source.paths(reqs, 3))[2] == [(0, 8), (8, 17)]


def test_reading_changes_no_tree(tree: Tree) -> None:
    source, reqs = source_of(tree), three_levels(tree)
    before = ids(source.paths(reqs, 3))
    for _ in range(3):
        source.key(reqs)
        source.shared_slots(reqs[0])
    assert ids(source.paths(reqs, 3)) == before
