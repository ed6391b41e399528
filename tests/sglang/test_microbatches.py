"""Pipeline parallelism: batches that take turns keep their paths and plans."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from sglang_trees import Tree

from sglang_pat import PackAttention
from sglang_pat.plan import HeadConfig
from sglang_pat.sglang.step.microbatches import Microbatches
from sglang_pat.sglang.step.step_plans import StepPlans
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.request_tracker import StepRequests

SHAPE = HeadConfig(4, 2, 64, 64)


def new_plans(**reservation: int) -> StepPlans:
    attention = PackAttention(4, 2, 64, dtype=torch.float32, **reservation)
    return StepPlans({SHAPE: attention})


@pytest.fixture
def tree() -> Tree:
    tree = Tree("unified")
    tree.insert([1, 2, 3, 4], range(4))
    return tree


def step_of(tree: Tree, reqs: list[Any]) -> StepRequests:
    return StepRequests(reqs, tree.cache, has_beams=False)


def requests(tree: Tree, *rids: str) -> list[Any]:
    return [tree.request(rid, [1, 2, 3, 4], 4, row=i + 1) for i, rid in enumerate(rids)]


def view_of(reqs: list[Any]) -> Any:
    from fakes.backends import decode_batch

    return decode_batch([*range(1, len(reqs) + 1)], [6] * len(reqs), [0] * len(reqs))


def test_batches_that_take_turns_find_what_they_left(tree: Tree) -> None:
    microbatches = Microbatches(2, new_plans, partial(DecodeBatchBuilder, strict=True))
    odd, even = requests(tree, "a", "b", "c"), requests(tree, "d", "e")
    used = []
    for reqs in (odd, even, odd, even, odd[1:], even[:1], odd[1:]):
        step = step_of(tree, [*reqs])
        microbatch = microbatches.find(step)
        microbatch.builder.read(StepInputs.read(view_of(reqs), step))
        used.append(microbatch)
    assert len(set(map(id, used))) == 2
    assert used[0] is used[2] is used[4] is used[6]
    assert used[1] is used[3] is used[5]
    assert +Counter(used[0].builder.changes) == {"join": 3, "leave": 1}
    assert +Counter(used[1].builder.changes) == {"join": 2, "leave": 1}


def test_a_new_batch_takes_the_place_of_the_one_unused_the_longest(tree: Tree) -> None:
    microbatches = Microbatches(2, new_plans, partial(DecodeBatchBuilder, strict=True))
    batches = [requests(tree, name) for name in "abc"]
    used = []
    for reqs in batches:
        step = step_of(tree, reqs)
        used.append(microbatches.find(step))
        used[-1].builder.read(StepInputs.read(view_of(reqs), step))
    assert used[2] is used[0]
    assert microbatches.find(step_of(tree, batches[1])) is used[1]
    assert microbatches.current is used[1]


def test_another_thread_counts_all_of_them_at_any_time(tree: Tree) -> None:
    microbatches = Microbatches(2, new_plans, partial(DecodeBatchBuilder, strict=True))
    seen = [iter(microbatches), microbatches._recent]
    before = list(microbatches)
    for name in "ab":
        step = step_of(tree, requests(tree, name))
        microbatches.find(step).builder.read(StepInputs.read(view_of(step.reqs), step))
    assert list(seen[0]) == seen[1] == before, "what another thread holds is never changed"
    assert {*microbatches} == {*before}


def test_graphs_are_captured_once_for_all() -> None:
    microbatches = Microbatches(2, new_plans, partial(DecodeBatchBuilder, strict=True))
    microbatches.reserve(max_requests=4, max_shared_slots=100)
    first, second = (each.captured for each in microbatches)
    assert first is not None
    assert second is not None
    first.main.stats.plans_built = 7
    microbatches.reserve(max_requests=4, max_shared_slots=100)
    # Other graphs may have captured these buffers.
    assert [each.captured for each in microbatches] == [first, second]
    microbatches.reserve(max_requests=5, max_shared_slots=100)
    again = [each.captured for each in microbatches]
    assert [each.main.stats.plans_built for each in again if each is not None] == [7, 0]
    assert first not in again
