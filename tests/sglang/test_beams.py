"""Beams share their prompt: their rows have no Req and follow the requests of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_trees import TREE_KINDS, Tree

from sglang_pat.reasons import StepReason
from sglang_pat.sglang.step.debug_checks import StepChecker
from sglang_pat.sglang.step.repeated_steps import RepeatRule
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.radix_paths import path_reader
from sglang_pat.sglang.tree.request_tracker import RequestTracker
from sglang_pat.sglang.tree.row_groups import RowPaths, batch_with_beams

SYSTEM, PROMPT = [*range(100, 108)], [*range(100, 108), 1, 2, 3, 4]


class Batch:
    """Two requests in rows 1 and 2; one has beams in rows 5 and 6.

    The tree holds the first eight tokens of both prompts; the prompt with beams has twelve.
    """

    def __init__(self, kind: str = "unified", *, cached: int = 8) -> None:
        self.tree = Tree(kind)
        self.tree.insert(SYSTEM, range(10, 18))
        self.leader = self._request("leader", PROMPT[:cached], row=1)
        self.other = self._request("other", SYSTEM, row=2)
        self.group = SimpleNamespace(prompt_len=12, member_rows_cpu=torch.tensor([5, 6]))
        self.leader.beam_group = self.group
        self.reqs = [self.leader, self.other]
        self.req_to_token = torch.zeros(8, 64, dtype=torch.int32)
        self.req_to_token[[1, 2, 5, 6], :8] = torch.arange(10, 18, dtype=torch.int32)
        self.req_to_token[[1, 5, 6], 8:12] = torch.arange(20, 24, dtype=torch.int32)
        self.tree.cache.req_to_token_pool = SimpleNamespace(req_to_token=self.req_to_token)
        self.tracker = RequestTracker()
        self.builder = DecodeBatchBuilder(self.tracker, strict=True)
        self.rule = RepeatRule(self.tracker)
        self.why: StepReason | None = None  # why the last step was planned
        self.checker = StepChecker()

    def _request(self, rid: str, cached: list[int], row: int) -> Any:
        # Beams need the Req of 0.5.23, whichever version is installed.
        place = SimpleNamespace(req_pool_idx=row, cache_protected_len=len(cached))
        last_node = self.tree.last_node(cached)
        return SimpleNamespace(rid=rid, last_node=last_node, kv=place, beam_group=None)

    @property
    def tail(self) -> Any:
        entry = SimpleNamespace(group=self.group, leader_idx=0, start=0, end=2)
        return SimpleNamespace(num_base_rows=2, entries=[entry])

    def step(self, lens: list[int], *, has_beams: bool = True) -> list[list[tuple[int, int]]]:
        """Run a step with all checks; return (kv_begin, kv_end) of the nodes of each row's path."""
        seq_lens = torch.tensor(lens)
        forward = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lens),
            req_pool_indices=seq_lens,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
        )
        batch = SimpleNamespace(
            reqs=list(self.reqs),
            tree_cache=self.tree.cache,
            beam_tail=self.tail if has_beams else None,
        )
        self.tracker.on_target_batch(forward, batch)
        with self.tracker.running(forward):
            view = StepInputs.read(forward, self.tracker.claim_step())
            assert view.requests is not None
            kind: Any = "decode"
            plans: Any = "of the graphs"
            self.why = self.rule.reason(kind, view.requests.reqs, plans, len(lens))
            self.rule.begin_plan(kind, view.requests.reqs, plans, len(lens), StepReason.PRIVATE)
            self.batch = self.builder.read(view)
            self.rule.plan_after(100, StepReason.DUE)
        shared = self.builder.last_shared
        assert shared is not None
        rows = torch.tensor([1, 2, 5, 6][: len(lens)])
        self.checker.check(*shared, self.req_to_token, rows, plan_is_new=True)
        return [[(begin, end) for _, begin, end in path] for path in shared.forest.paths()]


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_beams_share_their_prompt_and_others_the_tree(kind: str) -> None:
    batch = Batch(kind)
    assert batch.step([13, 20, 13, 13]) == [
        [(0, 8), (8, 12)],
        [(0, 8)],
        [(0, 8), (8, 12)],
        [(0, 8), (8, 12)],
    ]
    paths = batch.batch.read_paths().node_id.tolist()
    leader, other, first, second = paths[:2], paths[2:3], paths[3:5], paths[5:]
    assert leader == first == second
    assert other == leader[:1]
    assert batch.batch.seq_lens.tolist() == [13, 20, 13, 13]
    assert not batch.builder.steps_without_sharing


def test_a_prompt_that_the_tree_does_not_hold_is_shared_as_a_whole() -> None:
    batch = Batch(cached=0)
    assert batch.step([13, 20, 13, 13]) == [[(0, 12)], [(0, 8)], [(0, 12)], [(0, 12)]]


def test_a_prompt_that_the_tree_holds_as_a_whole() -> None:
    batch = Batch()
    batch.group.prompt_len = 8
    assert batch.step([9, 20, 9, 9]) == [[(0, 8)]] * 4


def test_two_searches_of_one_prompt_share_what_the_tree_holds() -> None:
    batch = Batch()
    batch.other.beam_group = SimpleNamespace(prompt_len=11, member_rows_cpu=torch.tensor([7]))
    entries = [
        SimpleNamespace(group=batch.group, leader_idx=0, start=0, end=2),
        SimpleNamespace(group=batch.other.beam_group, leader_idx=1, start=2, end=3),
    ]
    rows = batch_with_beams(batch.reqs, SimpleNamespace(entries=entries), lambda reqs: None)
    assert [req.kv.req_pool_idx for req in rows] == [1, 2, 5, 6, 7]
    reader = path_reader(batch.tree.cache)
    assert reader is not None
    paths = RowPaths(reader, SimpleNamespace(req_to_token=batch.req_to_token)).read(rows)
    assert paths[0] == paths[2] == paths[3]
    assert paths[1] == paths[4]
    assert paths[0][-1][0] != paths[1][-1][0]
    assert [path[-1][2:4] for path in paths] == [(8, 12), (8, 11), (8, 12), (8, 12), (8, 11)]


def test_steps_of_the_same_beams_are_the_same_step() -> None:
    # SGLang permutes the slots after the prompt in each step. No plan depends on them.
    batch = Batch()
    batch.step([13, 20, 13, 13])
    key = batch.batch.key
    assert batch.why is StepReason.FIRST
    batch.req_to_token[5, 12] = 40
    batch.req_to_token[6, 12] = 41
    for step in (1, 2):
        batch.step([13 + step, 20 + step, 13 + step, 13 + step])
        assert batch.why is None
        assert batch.batch.key == key
        batch.req_to_token[6, 12] = 40


def test_a_leader_decodes_on_alone_when_its_beams_have_ended() -> None:
    # SGLang notices the end one step late.
    batch = Batch()
    batch.step([13, 20, 13, 13])
    assert batch.step([14, 21], has_beams=False) == [[(0, 8), (8, 12)], [(0, 8)]]
    assert batch.builder.changes["leave"] == 2
    assert batch.builder.changes["last_node_changed"] == 0


def test_a_leader_that_decoded_before_its_beams_is_read_again() -> None:
    batch = Batch()
    assert batch.step([13, 20], has_beams=False) == [[(0, 8)], [(0, 8)]]
    assert batch.step([14, 21, 14, 14])[0] == [(0, 8), (8, 12)]
    assert batch.builder.changes["last_node_changed"] == 1


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_a_split_of_the_tree_beside_beams(kind: str) -> None:
    batch = Batch(kind)
    batch.step([13, 20, 13, 13])
    batch.tree.insert([*SYSTEM[:4], 9, 9], range(30, 36))
    newcomer = batch._request("newcomer", [*SYSTEM[:4], 9, 9], row=3)
    batch.req_to_token[3, :6] = torch.tensor([30, 31, 32, 33, 34, 35])
    slots = torch.cat([torch.arange(10, 14), torch.arange(34, 36)])
    batch.req_to_token[3, :6] = slots.to(torch.int32)
    batch.reqs.append(newcomer)
    rows = batch_with_beams(batch.reqs, batch.tail, lambda reqs: None)
    reader = path_reader(batch.tree.cache)
    assert reader is not None
    before = batch.builder.last_shared
    assert before is not None
    before.forest.update(
        before.reqs,
        rows,
        set(),
        RowPaths(reader, SimpleNamespace(req_to_token=batch.req_to_token)).read,
    )
    paths = [[(begin, end) for _, begin, end in path] for path in before.forest.paths()]
    assert paths[0] == paths[3] == paths[4] == [(0, 4), (4, 8), (8, 12)]
    assert paths[2] == [(0, 4), (4, 6)]


def test_the_rest_of_the_prompt_is_checked() -> None:
    batch = Batch()
    batch.step([13, 20, 13, 13])
    batch.req_to_token[6, 10] = 50  # not the leader's slot
    with pytest.raises(RuntimeError, match="request leader, beam 3: its row and the radix tree"):
        batch.step([14, 21, 14, 14])


def test_a_prompt_whose_part_in_the_tree_changes_is_another_node() -> None:
    batch = Batch()
    reader = path_reader(batch.tree.cache)
    assert reader is not None
    rows = batch_with_beams(batch.reqs, batch.tail, lambda reqs: None)
    beams = RowPaths(reader, SimpleNamespace(req_to_token=batch.req_to_token))
    (before,) = beams.read([rows[2]])
    batch.leader.last_node = batch.tree.last_node(SYSTEM[:4])
    batch.leader.kv.cache_protected_len = 4
    (after,) = beams.read([rows[2]])
    assert after[-1][2:4] == (4, 12)
    assert before[-1][0] != after[-1][0]
