"""PathReader reads SGLang's real trees of Python nodes, and of ids in each core of the version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang_trees import TREE_KINDS, Tree, place, request

from sglang_pat._scheduler import PrefixForest
from sglang_pat.sglang.tree.radix_paths import (
    NodeIdPaths,
    Path,
    PathMismatchError,
    PathReader,
    path_reader,
    raise_mismatch,
)

SYSTEM, TOOL_A, TOOL_B = [*range(100, 108)], [*range(200, 204)], [*range(300, 306)]
USER_1, USER_2 = [1, 2, 3], [4, 5]


@pytest.fixture(params=TREE_KINDS)
def tree(request: pytest.FixtureRequest) -> Tree:
    return Tree(request.param)


def reader_of(tree: Tree) -> PathReader:
    reader = path_reader(tree.cache)
    assert reader is not None
    return reader


def spans(paths: list[Path]) -> list[list[tuple[int, int]]]:
    """Return (kv_begin, kv_end) of the nodes of each request."""
    return [[(node[2], node[3]) for node in path] for path in paths]


def ids(paths: list[Path]) -> list[list[int]]:
    return [[node[0] for node in path] for path in paths]


def three_levels(tree: Tree) -> list[Any]:
    """Insert two users of tool A and one of tool B, under one system prompt."""
    prompts = [SYSTEM + TOOL_A + USER_1, SYSTEM + TOOL_A + USER_2, SYSTEM + TOOL_B + USER_1]
    for number, prompt in enumerate(prompts):
        tree.insert(prompt, range(1000 * (number + 1), 1000 * (number + 1) + len(prompt)))
    return [tree.request(f"r{i}", p, len(p), row=i + 1) for i, p in enumerate(prompts)]


def test_three_level_paths(tree: Tree) -> None:
    paths = reader_of(tree).read(three_levels(tree))
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
    paths = reader_of(tree).read(reqs)
    assert spans(paths) == [[(0, 8)], [(0, 4)], []]
    assert ids(paths)[0] != ids(paths)[1]


def test_a_split_refines_the_path_and_keeps_its_slots(tree: Tree) -> None:
    reader, long_prompt = reader_of(tree), SYSTEM + TOOL_A
    tree.insert(long_prompt, range(50, 62))
    reqs = [tree.request("long", long_prompt, 12)]
    before = reader.read(reqs)
    tree.insert(SYSTEM + TOOL_B, range(70, 84))  # splits the node between the two prompts
    after = reader.read(reqs)
    assert spans(before) == [[(0, 12)]]
    assert spans(after) == [[(0, 8), (8, 12)]]
    assert reader.shared_slots(reqs[0]).tolist() == list(range(50, 62))


class OlderCore:
    """Stands in for the Rust core of 0.5.22 or 0.5.21, which cannot collect paths."""

    def __init__(self, paths: list[Any], *, collects: bool) -> None:
        self.nodes = {node[0]: node for path in paths for node in path}
        self.has_kv = True
        self._binding = self
        if collects:
            collected = {path[-1][0]: [node[:5] for node in path] for path in paths}
            self.collect_path_info = lambda ids: [collected[each] for each in ids]

    def is_root(self, node: int) -> bool:
        return node not in self.nodes

    def get_node_key_lengths(self, nodes: list[int]) -> list[int]:
        return [self.nodes[each][3] - self.nodes[each][2] for each in nodes]

    def validate_buffer_backup(self, node: int, length: int) -> Any:
        assert [length] == self.get_node_key_lengths([node])
        return SimpleNamespace(parent_node_id=self.nodes[node][1]) if self.has_kv else None


def older_reader(tree: Tree, reqs: list[Any], *, collects: bool) -> NodeIdPaths:
    core = OlderCore([*reader_of(tree).read(reqs)], collects=collects)
    return NodeIdPaths(SimpleNamespace(tree_core=core), raise_mismatch)


@pytest.mark.parametrize("collects", [True, False])
def test_older_cores_in_rust_show_the_same_paths(collects: bool) -> None:
    tree = Tree("unified")
    reqs = three_levels(tree)
    paths = older_reader(tree, reqs, collects=collects).read(reqs)
    expected = reader_of(tree).read(reqs)
    assert (spans(paths), ids(paths)) == (spans(expected), ids(expected))


@pytest.mark.parametrize("collects", [True, False])
def test_a_split_is_found_without_counts_of_children(collects: bool) -> None:
    tree, forest, long_prompt = Tree("unified"), PrefixForest(), SYSTEM + TOOL_A

    def read(reqs: list[Any]) -> list[Any]:
        return older_reader(tree, reqs, collects=collects).read(reqs)

    tree.insert(long_prompt, range(50, 62))
    kept = [tree.request("kept", long_prompt, 12)]
    forest.update([], kept, set(), read)
    tree.insert(SYSTEM + TOOL_B, range(70, 84))
    now = [*kept, tree.request("new", SYSTEM + TOOL_B, 14)]
    forest.update(kept, now, set(), read)
    assert [[node[1:] for node in path] for path in forest.paths()] == [
        [(0, 8), (8, 12)],
        [(0, 8), (8, 14)],
    ]


def test_a_node_without_kv_is_a_mismatch() -> None:
    tree = Tree("unified")
    reqs = three_levels(tree)
    reader = older_reader(tree, reqs, collects=False)
    reader._core.has_kv = False
    with pytest.raises(PathMismatchError, match=r"request r0: .* holds 0 tokens"):
        reader.read(reqs)


def test_the_first_cores_in_rust_show_no_paths() -> None:
    tree = Tree("unified")
    core = SimpleNamespace(_binding=object(), validate_buffer_backup=None)  # 0.5.20
    tree.cache.tree_core = core
    assert path_reader(tree.cache) is None


def test_nodes_made_after_a_reset_have_new_ids(tree: Tree) -> None:
    # Kept paths rely on new node ids: a request may return with the same id and row.
    reader = reader_of(tree)
    seen: set[int] = set()
    for _ in range(3):
        tree.cache.reset()
        tree.insert(SYSTEM, range(8))
        (path,) = ids(reader.read([tree.request("same", SYSTEM, 8)]))
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
        reader_of(tree).read([good, bad])


def test_a_request_of_a_streaming_session_is_private(tree: Tree) -> None:
    from sglang.srt.session.streaming_session import _VirtualNode

    reader = reader_of(tree)
    shared = three_levels(tree)
    session = request("session", _VirtualNode(), protected=5, row=7)
    reqs = [shared[0], session, shared[1]]
    paths = reader.read(reqs)
    assert spans(paths)[1] == []
    assert reader.shared_slots(session).tolist() == []
    assert ids(paths)[0][:2] == ids(paths)[2][:2]


def test_shared_slots_follow_the_path(tree: Tree) -> None:
    reader, reqs = reader_of(tree), three_levels(tree)
    system, tool = [*range(1000, 1008)], [*range(1008, 1012)]
    assert reader.shared_slots(reqs[0]).tolist() == system + tool + [1012, 1013, 1014]
    assert reader.shared_slots(reqs[1]).tolist() == system + tool + [2012, 2013]
    assert reader.shared_slots(tree.request("none", [9], 0)).tolist() == []


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_pages_of_16(kind: str) -> None:
    tree = Tree(kind, page_size=16)
    first, second = [*range(40)], [*range(20), *range(60, 80)]
    tree.insert(first[:32], range(32))
    tree.insert(second[:32], range(100, 132))
    reqs = [tree.request("a", first, 32), tree.request("b", second, 32)]
    paths = reader_of(tree).read(reqs)
    assert spans(paths) == [[(0, 16), (16, 32)], [(0, 16), (16, 32)]]
    assert ids(paths)[0][0] == ids(paths)[1][0]


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_a_disabled_cache_has_no_reader(kind: str) -> None:
    assert path_reader(Tree(kind, disable=True).cache) is None


def test_other_caches_have_no_reader() -> None:
    class Heir(RadixCache):
        """A subclass like those of LMCache and FlexKV, which may have other nodes."""

    heir = Tree("python nodes").cache
    assert path_reader(heir) is not None
    heir.__class__ = Heir
    assert path_reader(heir) is None
    assert path_reader(SimpleNamespace(disable=False)) is None
    assert path_reader(None) is None


def test_a_tree_of_components_that_we_do_not_know_has_no_reader() -> None:
    """Unknown components may hold other slots. pat knows windows and states."""
    cache = Tree("unified").cache
    ((kind, full),) = cache.components.items()
    for name, is_known in (("SWA", True), ("MAMBA", True), ("C128", False)):
        cache.components = {kind: full, type("Kind", (), {"name": name}): object()}
        assert (path_reader(cache) is not None) == is_known
    full.__class__ = type("Heir", (type(full),), {})
    cache.components = {kind: full}
    assert path_reader(cache) is None


def test_a_cache_wrapped_for_sessions_is_unwrapped() -> None:
    from sglang.srt.session.streaming_session import StreamingSession

    tree = Tree("python nodes")
    wrapped = StreamingSession(tree.cache)
    if not hasattr(wrapped, "inner"):
        pytest.skip("this SGLang does not wrap the cache")
    reader = path_reader(wrapped)
    assert reader is not None
    reqs = three_levels(tree)
    assert spans(reader.read(reqs))[2] == [(0, 8), (8, 17)]
