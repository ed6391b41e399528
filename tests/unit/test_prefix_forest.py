"""PrefixForest's Python interface. `scheduler/tests` test its plans."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from sglang_pat import PathNode, PrefixPaths
from sglang_pat._scheduler import PackScheduler, PrefixForest, same_objects
from sglang_pat.plan import copy_plan, new_scheduler


class Request:
    """A request that equals all others; only identity distinguishes them."""

    def __init__(self, path: list[PathNode]) -> None:
        self.path = path

    def read(self) -> list[tuple[int, int, int, int, int, int]]:
        """Return nodes in SGLang's format: id, parent, begin, end, tokens, children."""
        last = len(self.path) - 1
        return [
            (node_id, -1, begin, end, end - begin, int(i < last))
            for i, (node_id, begin, end) in enumerate(self.path)
        ]

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def plan_bytes(scheduler: PackScheduler) -> bytes:
    return copy_plan(scheduler).buffer.tobytes()


def from_scratch(paths: list[list[PathNode]], lens: np.ndarray) -> bytes:
    scheduler = new_scheduler(group_size=4, num_workers=33)
    read = PrefixPaths.from_lists(paths)
    scheduler.plan(read.path_begin, read.node_id, read.kv_begin, read.kv_end, lens)
    return plan_bytes(scheduler)


class Batches:
    """A forest that is updated from batch to batch."""

    def __init__(self, *requests: Request) -> None:
        self.forest = PrefixForest()
        self.scheduler = new_scheduler(group_size=4, num_workers=33)
        self.requests: list[Any] = []
        self.reads: list[list[int]] = []  # id() of the requests of each read by the last go_to()
        if requests:
            self.go_to([*requests])

    def go_to(
        self, requests: list[Any], moved: Collection[Request] = ()
    ) -> tuple[int, int, int, int] | None:
        self.reads = []
        before, self.requests = self.requests, []
        counts = self.forest.update(before, requests, set(map(id, moved)), self._read)
        self.requests = requests
        return counts

    def _read(self, requests: list[Request]) -> list[Any]:
        self.reads.append([*map(id, requests)])
        return [request.read() for request in requests]

    def check(self) -> None:
        seq_lens = np.full(len(self.requests), 400, dtype=np.int32)
        paths = [request.path for request in self.requests]
        self.scheduler.plan(self.forest, seq_lens)
        assert plan_bytes(self.scheduler) == from_scratch(paths, seq_lens)
        assert self.forest.paths() == [[*map(tuple, path)] for path in paths]


def test_batches_that_are_alike() -> None:
    a, b, other = Request([SYSTEM]), Request([SYSTEM]), Request([SYSTEM])
    batches = Batches(a, b)
    assert batches.go_to([a, b], moved=[other]) is None  # an equal, but new list
    assert batches.go_to([b, a]) == (0, 0, 0, 0)
    assert not batches.reads
    batches.check()
    assert batches.go_to([b, a], moved=[a]) == (0, 0, 1, 0)
    assert batches.go_to([b, b]) == (1, 1, 0, 0)  # SGLang has no such batch, but it must not crash
    batches.check()


SYSTEM, LONG = PathNode(1, 0, 100), PathNode(2, 100, 300)
UPPER, LOWER = PathNode(7, 100, 180), PathNode(2, 180, 300)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "path_begin must have num_requests . 1 = 3 entries, got 1"),
        ([[(5, -1, 3, 9, 6, 0)], []], "request 1 does not start at a root"),
        ([[(5, -1, 0, 9, 9, 0)], [(5, -1, 0, 8, 8, 0)]], "disagree about node 5"),
        ([[(1, -1, 0, 100, 9, 0), (2, -1, 120, 130, 9, 0)], []], "gap"),
        ([[(5, -1, 0)], []], r"a node must be a tuple of 6 integers, got \(5, -1, 0\)"),
        ([[(5, -1, 0, 2**32 + 4, 4, 0)], []], "positions must fit into int32, got 4294967300"),
        (7, "Object of type 'int' is not an instance of 'sequence'"),
        ([[(True, -1, 0, 4, 4, 0)], []], r"a tuple of 6 integers, got \(True, -1, 0, 4"),
        ([[(5, -1, 0, 2.0, 4, 0)], []], r"a tuple of 6 integers, got \(5, -1, 0, 2.0"),
        ([[(1 << 63, -1, 0, 2, 4, 0)], []], "int too big to convert"),
    ],
)
def test_bad_paths_leave_a_forest_without_a_batch(paths: Any, message: str) -> None:
    batches = Batches(Request([SYSTEM]))
    now = [*batches.requests, Request([]), Request([])]
    with pytest.raises((ValueError, TypeError, OverflowError), match=message):
        batches.forest.update(batches.requests, now, set(), lambda requests: paths)
    batches.requests = []
    assert batches.go_to(now) == (3, 0, 0, 0)
    batches.check()


def test_a_forest_is_empty_after_paths_that_disagree_with_it() -> None:
    batches = Batches(Request([SYSTEM]))
    gap = Request([SYSTEM, PathNode(2, 120, 130)])
    with pytest.raises(ValueError, match="gap"):
        batches.go_to([*batches.requests, gap])
    assert len(batches.forest) == batches.forest.num_kept == 0
    assert batches.go_to([Request([SYSTEM])]) == (1, 0, 0, 0)
    batches.check()


def test_outdated_paths_that_could_not_be_read_again_are_not_planned() -> None:
    a, newcomer = Request([SYSTEM, LONG]), Request([SYSTEM, UPPER, LOWER])
    batches = Batches(a)

    def read_newcomers_only(requests: list[Request]) -> list[Any]:
        if requests[0] is not newcomer:
            raise KeyError("the tree")
        return [newcomer.read()]

    with pytest.raises(KeyError, match="the tree"):
        batches.forest.update([a], [a, newcomer], set(), read_newcomers_only)
    with pytest.raises(ValueError, match="path of request 0 is outdated and was not given again"):
        batches.scheduler.plan(batches.forest, np.full(2, 400, np.int32))
    batches.requests, a.path = [], [SYSTEM, UPPER, LOWER]
    assert batches.go_to([a, newcomer]) == (2, 0, 0, 0)
    batches.check()


def test_a_batch_that_the_forest_does_not_have() -> None:
    a, b = Request([SYSTEM]), Request([SYSTEM])
    with pytest.raises(ValueError, match="kept must be below 1, the number of requests so far"):
        Batches(a).forest.update([b, a], [a], set(), list)
    batches = Batches(a)
    assert batches.forest.update([], [], set(), list) == (0, 0, 0, 0)
    assert len(batches.forest) == 0


def test_same_objects() -> None:
    a, b = Request([]), Request([])
    assert same_objects([a, b], [a, b])
    assert not same_objects([a, b], [b, a])
    assert not same_objects([a, b], [a])
    assert same_objects([], [])
