"""PrefixForest: paths that are kept give the plans that paths read anew would give."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from forests import ForestCase, forest_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat import PathNode, PrefixPaths
from sglang_pat._scheduler import PackScheduler, PrefixForest, kept_objects, same_objects
from sglang_pat.decode_plan import copy_plan
from sglang_pat.pack_attention import new_scheduler

# As SGLang's trees give it: id, parent, begin, end, tokens, children.
Node = tuple[int, int, int, int, int, int]


def as_read(path: list[PathNode], children: int = 0) -> list[Node]:
    """Children below the last node; what lies on the path has one."""
    last = len(path) - 1
    return [
        (node_id, -1, begin, end, end - begin, children if i == last else 1)
        for i, (node_id, begin, end) in enumerate(path)
    ]


def plan_bytes(scheduler: PackScheduler) -> bytes:
    return copy_plan(scheduler).buffer.tobytes()


def from_scratch(paths: list[list[PathNode]], lens: np.ndarray) -> bytes:
    scheduler = new_scheduler(group_size=4, num_workers=33)
    read = PrefixPaths.from_lists(paths)
    scheduler.plan(read.path_begin, read.node_id, read.kv_begin, read.kv_end, lens)
    return plan_bytes(scheduler)


class Batches:
    """One forest that is taken from batch to batch. Requests are numbers."""

    def __init__(self) -> None:
        self.forest = PrefixForest()
        self.scheduler = new_scheduler(group_size=4, num_workers=33)
        self.requests: list[int] = []

    def go_to(self, requests: list[int], paths: Any, moved: Collection[int] = ()) -> None:
        """paths: of every request, by number."""
        kept = [
            self.requests.index(r) if r in self.requests and r not in moved else -1
            for r in requests
        ]
        self.requests = requests
        # A node with children that is new beside a longer one may come from a split.
        for _ in range(len(requests) + 1):
            new = [as_read(paths[r]) for r, k in zip(requests, kept, strict=True) if k < 0]
            outdated = self.forest.update(np.array(kept, dtype=np.int32), new)
            if not outdated:
                return
            kept = [-1 if i in outdated else i for i in range(len(requests))]
        raise AssertionError("kept paths are outdated again and again")

    def check(self, paths: Any, lens: Any, padding: int = 0) -> None:
        seq_lens = np.array([*(lens[r] for r in self.requests), *[0] * padding], dtype=np.int32)
        in_order = [paths[r] for r in self.requests] + [[]] * padding
        self.scheduler.plan(self.forest, seq_lens)
        assert plan_bytes(self.scheduler) == from_scratch(in_order, seq_lens)
        assert self.forest.paths() == [[*map(tuple, paths[r])] for r in self.requests]


@settings(max_examples=40, deadline=None)
@given(case=forest_cases(max_requests=12), data=st.data())
def test_kept_paths_give_the_plan_of_paths_read_anew(case: ForestCase, data: st.DataObject) -> None:
    batches, everyone = Batches(), range(len(case.paths))
    # Where a request moves to is where another one is.
    paths, lens = dict(enumerate(case.paths)), dict(enumerate(case.seq_lens.tolist()))
    for _ in range(data.draw(st.integers(1, 6))):
        requests = data.draw(st.lists(st.sampled_from(everyone), unique=True))  # leave, reorder
        moved = data.draw(st.sets(st.sampled_from(everyone)))
        for request in moved:
            other = data.draw(st.sampled_from(everyone))
            paths[request], lens[request] = case.paths[other], int(case.seq_lens[other])
        batches.go_to(requests, paths, moved)
        batches.check(paths, lens, padding=data.draw(st.integers(0, 3)))


def test_all_places_of_nodes_are_used_again() -> None:
    batches = Batches()
    for wave in range(50):
        paths = {
            r: [PathNode(1000 * wave, 0, 64), PathNode(1000 * wave + r + 1, 64, 90)]
            for r in range(wave, wave + 20)
        }
        batches.go_to([*paths], paths, moved=paths)
        batches.check(paths, dict.fromkeys(paths, 100))


SYSTEM, LONG = PathNode(1, 0, 100), PathNode(2, 100, 300)
UPPER, LOWER = PathNode(7, 100, 180), PathNode(2, 180, 300)


@pytest.mark.parametrize(
    ("newcomer", "children"),
    [
        pytest.param([SYSTEM, UPPER, LOWER], 0, id="goes through both parts"),
        pytest.param([SYSTEM, UPPER, PathNode(9, 180, 200)], 0, id="leaves at the split"),
        pytest.param([SYSTEM, UPPER], 2, id="ends at the split"),
    ],
)
def test_a_split_is_found_by_the_path_of_a_newcomer(
    newcomer: list[PathNode], children: int
) -> None:
    forest = PrefixForest()
    other = [SYSTEM, PathNode(3, 100, 150)]
    everyone = np.full(3, -1, dtype=np.int32)
    before = [as_read(path) for path in ([SYSTEM, LONG], [SYSTEM, LONG], other)]
    assert forest.update(everyone, before) == []
    joined = np.array([0, 1, 2, -1], dtype=np.int32)
    assert forest.update(joined, [as_read(newcomer, children)]) == [0, 1]
    assert forest.num_kept == 1
    with pytest.raises(ValueError, match="path of request 0 is outdated and was not given anew"):
        new_scheduler(group_size=4, num_workers=33).plan(forest, np.full(4, 400, np.int32))
    again = np.array([-1, -1, 2, 3], dtype=np.int32)
    split = [SYSTEM, UPPER, LOWER]
    assert forest.update(again, [as_read(split), as_read(split)]) == []
    scheduler = new_scheduler(group_size=4, num_workers=33)
    lens = np.full(4, 400, np.int32)
    scheduler.plan(forest, lens)
    assert plan_bytes(scheduler) == from_scratch([split, split, other, newcomer], lens)


def test_a_leaf_beside_longer_ones_outdates_nothing() -> None:
    forest = PrefixForest()
    forest.update(np.array([-1], np.int32), [as_read([SYSTEM, LONG])])
    leaf = as_read([SYSTEM, PathNode(8, 100, 180)])
    assert forest.update(np.array([0, -1], np.int32), [leaf]) == []
    assert forest.num_kept == 1


def test_a_node_that_comes_again_elsewhere_after_all_have_left_it() -> None:
    # As if ids were given out again after an eviction.
    forest = PrefixForest()
    forest.update(np.array([-1], np.int32), [as_read([SYSTEM, LONG])])
    again = [PathNode(2, 0, 30)]
    assert forest.update(np.array([-1], np.int32), [as_read(again)]) == []
    assert forest.paths() == [[tuple(again[0])]]


@pytest.mark.parametrize(
    ("kept", "paths", "message"),
    [
        ([0, 0], [], "kept must not repeat a request, got 0 again for request 1"),
        ([1], [], "kept must be below 1, the number of requests so far, got 1 for request 0"),
        ([0, -1], [], "path_begin must have num_requests . 1 = 2 entries, got 1"),
        ([0, -1], [[(5, -1, 3, 9, 6, 0)]], "request 1 does not start at a root"),
        ([-1, -1], [[(5, -1, 0, 9, 9, 0)], [(5, -1, 0, 8, 8, 0)]], "disagree about node 5"),
        ([0, -1], [[(5, -1, 0)]], r"a node must be a tuple of 6 integers, got \(5, -1, 0\)"),
    ],
)
def test_bad_updates(kept: list[int], paths: Any, message: str) -> None:
    forest = PrefixForest()
    forest.update(np.array([-1], np.int32), [as_read([SYSTEM])])
    with pytest.raises((ValueError, TypeError), match=message):
        forest.update(np.array(kept, np.int32), paths)


def test_a_forest_is_empty_after_bad_paths() -> None:
    forest = PrefixForest()
    forest.update(np.array([-1], np.int32), [as_read([SYSTEM])])
    with pytest.raises(ValueError, match="gap"):
        forest.update(np.array([0, -1], np.int32), [as_read([SYSTEM, PathNode(2, 120, 130)])])
    assert len(forest) == forest.num_kept == 0
    assert forest.update(np.array([-1], np.int32), [as_read([SYSTEM])]) == []


class Same:
    """Equal to all others: only identity tells them apart."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


@given(data=st.data())
def test_kept_objects(data: st.DataObject) -> None:
    everyone = [Same() for _ in range(8)]
    some = st.lists(st.sampled_from(range(8)), unique=True)
    before, now = data.draw(some), data.draw(some)
    moved = data.draw(st.sets(st.sampled_from(range(8))))
    kept, new, num_moved = kept_objects(
        [everyone[i] for i in before],
        [everyone[i] for i in now],
        {id(everyone[i]) for i in moved},
    )
    assert kept.tolist() == [before.index(i) if i in before and i not in moved else -1 for i in now]
    assert new == np.flatnonzero(kept < 0).tolist()
    assert num_moved == len({*before} & {*now} & moved)


def test_same_objects() -> None:
    a, b = Same(), Same()
    assert same_objects([a, b], [a, b])
    assert not same_objects([a, b], [b, a])
    assert not same_objects([a, b], [a])
    assert same_objects([], [])
