"""SGLANG_PAT_DEBUG=1: every kind of mismatch raises, and valid steps do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang_trees import TREE_KINDS, Tree, place

from sglang_pat._scheduler import PrefixForest
from sglang_pat.batch import DecodeBatch, PrefixPaths
from sglang_pat.sglang.step.debug_checks import (
    DebugChecks,
    StepChecker,
    check_growth,
    check_host_lengths,
    check_windows,
)
from sglang_pat.sglang.tree.radix_paths import PathReader, path_reader
from sglang_pat.window import WindowAttention

PROMPT = [1, 2, 3, 4, 5, 6]


class Step:
    """Two requests with one prompt in a tree, their rows, and a checker."""

    def __init__(self, kind: str) -> None:
        self.tree = Tree(kind)
        self.tree.insert(PROMPT, range(10, 16))
        self.reqs = [self.tree.request(f"r{row}", PROMPT, 6, row=row) for row in (1, 2)]
        self.req_to_token = torch.zeros(4, 32, dtype=torch.int32)
        self.req_to_token[1:3, :6] = torch.arange(10, 16)
        self.rows = torch.tensor([1, 2])
        self.checker = StepChecker()
        reader: PathReader | None = path_reader(self.tree.cache)
        assert reader is not None
        self.reader = reader
        self.forest = PrefixForest()

    def read_paths(self) -> None:
        self.forest.update([], self.reqs, set(), self.reader.read)

    def check(self, *, plan_is_new: bool) -> None:
        """Check a step. A new plan has read the paths again, unless a test kept them."""
        self.checker.check(
            self.reader,
            self.reqs,
            self.forest,
            self.req_to_token,
            self.rows,
            plan_is_new=plan_is_new,
        )


@pytest.fixture(params=TREE_KINDS)
def step(request: pytest.FixtureRequest) -> Step:
    step = Step(request.param)
    step.read_paths()
    step.check(plan_is_new=True)
    return step


def test_a_request_that_the_host_takes_for_longer_than_it_is() -> None:
    """Some drafters publish upper bounds instead of lengths."""
    on_host = np.array([7, 9], dtype=np.int32)
    check_host_lengths(on_host, torch.tensor([7, 30, 1]))  # lengths after acceptance, and padding
    with pytest.raises(RuntimeError, match="request 1 has 8 tokens, and 9 on the host"):
        check_host_lengths(on_host, torch.tensor([7, 8, 1]))


def test_an_unchanged_step_passes(step: Step) -> None:
    step.req_to_token[1, 6:9] = 20  # private KV
    step.check(plan_is_new=False)


def test_a_split_passes(step: Step) -> None:
    step.tree.insert([1, 2, 3, 9], range(20, 24))
    step.check(plan_is_new=False)


def test_padding_rows_pass(step: Step) -> None:
    step.rows = torch.tensor([1, 2, 0, 0])
    step.check(plan_is_new=False)


def test_other_rows(step: Step) -> None:
    step.rows = torch.tensor([2, 1])
    with pytest.raises(RuntimeError, match=r"the batch has rows \[2, 1\], its requests \[1, 2\]"):
        step.check(plan_is_new=True)


@pytest.mark.parametrize("plan_is_new", [True, False])
def test_a_row_that_does_not_hold_the_trees_slots(step: Step, plan_is_new: bool) -> None:
    step.req_to_token[2, 3] = 99
    with pytest.raises(RuntimeError, match="request r2: its row and the radix tree hold other"):
        step.check(plan_is_new=plan_is_new)


def move(step: Step, slots: range) -> None:
    """Flush the cache and admit all requests again, with new nodes of the same lengths."""
    step.tree.cache.reset()
    step.tree.insert(PROMPT, slots)
    for req in step.reqs:
        req.last_node = step.tree.last_node(PROMPT)
    step.req_to_token[1:3, :6] = torch.tensor(slots)


def test_shared_kv_that_moved_under_a_reused_plan(step: Step) -> None:
    move(step, range(30, 36))
    step.read_paths()
    with pytest.raises(RuntimeError, match="request r1: a plan was reused though its shared KV"):
        step.check(plan_is_new=False)
    step.check(plan_is_new=True)


def test_other_nodes_of_the_same_slots_serve_a_reused_plan(step: Step) -> None:
    move(step, range(10, 16))
    step.read_paths()
    step.check(plan_is_new=False)


@pytest.mark.parametrize("plan_is_new", [True, False])
def test_a_path_that_was_kept_though_it_changed(step: Step, plan_is_new: bool) -> None:
    move(step, range(10, 16))
    with pytest.raises(RuntimeError, match="request r1: its path was kept though it changed"):
        step.check(plan_is_new=plan_is_new)


def test_another_number_of_requests(step: Step) -> None:
    step.reqs, step.rows = step.reqs[:1], step.rows[:1]
    with pytest.raises(RuntimeError, match="the paths of 2 requests were kept for 1"):
        step.check(plan_is_new=True)
    step.read_paths()
    with pytest.raises(RuntimeError, match="a plan for 2 requests was reused for 1"):
        step.check(plan_is_new=False)


def test_a_request_that_shares_nothing(step: Step) -> None:
    nothing: Any = step.tree.request("none", [9], 0, row=3)
    assert place(nothing).req_pool_idx == 3
    step.reqs, step.rows = [*step.reqs, nothing], torch.tensor([1, 2, 3])
    step.read_paths()
    step.check(plan_is_new=True)


def test_a_step_that_would_repeat_is_a_token_longer() -> None:
    checks = DebugChecks()
    builder: Any = object()
    planner: Any = SimpleNamespace(seq_lens=np.array([5, 6], dtype=np.int32))
    checks.check_growth(planner, builder, would_repeat=False)
    planner.seq_lens = np.array([9, 6], dtype=np.int32)
    with pytest.raises(RuntimeError, match=r"\[5, 6\] in the last step"):
        checks.check_growth(planner, builder, would_repeat=True)
    planner.seq_lens = np.array([10, 7], dtype=np.int32)
    checks.check_growth(planner, builder, would_repeat=True)


def test_lengths_of_the_same_requests_grow_by_one() -> None:
    before = np.array([5, 9, 0], dtype=np.int32)
    check_growth(before, np.array([6, 10, 0], dtype=np.int32))
    for now in ([6, 9, 0], [6, 11, 0], [6, 10, 1], [7, 11, 0]):
        with pytest.raises(RuntimeError, match=r"\[5, 9, 0\] in the last step"):
            check_growth(before, np.array(now, dtype=np.int32))


def test_a_row_that_is_not_its_window() -> None:
    table = torch.arange(40, dtype=torch.int32).view(2, 20)
    tensors = {
        "req_to_token": table,
        "req_pool_indices": torch.tensor([1, 0]),
        "seq_lens": torch.tensor([5, 17]),
    }
    slots = torch.arange(40).flip(0)
    attention = WindowAttention(4, 2, 64, window=8, dtype=torch.float32, slot_map=slots)
    lens = np.array([5, 17], dtype=np.int32)
    attention.plan(DecodeBatch(lens, PrefixPaths.private(2)), **tensors)
    check_windows(attention, *tensors.values())
    assert attention._executor.window_rows is not None
    attention._executor.window_rows.slots[1, 3] += 1
    with pytest.raises(RuntimeError, match="request 1 does not read the slots of its window"):
        check_windows(attention, *tensors.values())
