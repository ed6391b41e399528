"""A DecodeBatch is made from the scheduler's requests, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_trees import TREE_KINDS, Tree, place, request

from sglang_pat._scheduler import row_lengths
from sglang_pat.batch import DecodeBatch
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.speculative.rows import DraftBatchBuilder, RowShape, SpeculativeInputs
from sglang_pat.sglang.step.repeated_steps import RepeatRule
from sglang_pat.sglang.tree import batch_builder, request_tracker
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder, StepInputs
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, StepRequests

RUNNER = SimpleNamespace(is_draft_worker=False)


def batch_of(lens: list[int], **more: Any) -> Any:
    """Return a stand-in for SGLang's batch."""
    seq_lens = torch.tensor(lens, dtype=torch.int64)
    fields = {
        "batch_size": len(lens),
        "req_pool_indices": torch.arange(1, len(lens) + 1),
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens,
        "forward_mode": ForwardMode.DECODE,
    }
    return SimpleNamespace(**(fields | more))


def read(
    builder: DecodeBatchBuilder, reqs: list[Any], tree: Any, view: Any, **schedule_batch: Any
) -> DecodeBatch:
    """Return the batch that the builder makes of `view` while SGLang runs `reqs`."""
    launched = batch_of([1] * len(reqs))
    scheduled = SimpleNamespace(reqs=reqs, tree_cache=tree, **schedule_batch)
    inside.batch_made(launched, scheduled, RUNNER)
    result: DecodeBatch = inside.run_forward(
        lambda runner, forward_batch: builder.read(
            StepInputs.read(view, REQUEST_TRACKER.claim_step())
        ),
        RUNNER,
        launched,
    )
    return result


@pytest.fixture
def tree() -> Tree:
    tree = Tree("unified")
    tree.insert([1, 2, 3, 4], range(4))
    return tree


@pytest.fixture
def reqs(tree: Tree) -> list[Any]:
    return [tree.request("a", [1, 2, 3, 4], 4, row=1), tree.request("b", [1, 2], 2, row=2)]


def test_an_eager_step(tree: Tree, reqs: list[Any]) -> None:
    builder = DecodeBatchBuilder()
    batch = read(builder, reqs, tree.cache, batch_of([6, 5]))
    assert batch.seq_lens.tolist() == [6, 5]
    paths = batch.read_paths()
    assert paths.kv_end.tolist() == [2, 4, 2]
    assert batch.key is not None
    assert builder.last_shared is not None
    assert builder.last_shared.reqs == reqs
    assert not builder.steps_without_sharing


def test_a_graph_replay_shows_a_namespace_with_padding(tree: Tree, reqs: list[Any]) -> None:
    # The view of a replay has padded buffers, but no request ids or requests.
    view = batch_of([6, 5, 1, 1], num_padding=2, actual_forward_mode=ForwardMode.DECODE)
    batch = read(DecodeBatchBuilder(), reqs, tree.cache, view)
    assert batch.seq_lens.tolist() == [6, 5, 0, 0]
    assert batch.read_paths().path_begin.tolist() == [0, 2, 3, 3, 3]


# Data parallelism: a graph replay and an eager step.
@pytest.mark.parametrize(
    "view",
    [
        batch_of([1, 1], num_padding=2, actual_forward_mode=ForwardMode.IDLE),
        batch_of([1, 1], num_padding=2, forward_mode=ForwardMode.IDLE),
    ],
)
def test_a_step_of_an_idle_rank_is_not_counted(view: Any) -> None:
    builder = DecodeBatchBuilder()
    batch = builder.read(StepInputs.read(view, None))
    assert batch.seq_lens.tolist() == [0, 0]
    assert not builder.steps_without_sharing
    assert builder.last_shared is None


def test_equal_steps_have_equal_keys_and_read_no_path(
    tree: Tree, reqs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = DecodeBatchBuilder()
    first = read(builder, reqs, tree.cache, batch_of([6, 5])).key
    monkeypatch.setattr(builder._reader, "read", lambda reqs: pytest.fail("read a path"))
    # SGLang may make a new list in each step.
    assert read(builder, [*reqs], tree.cache, batch_of([7, 6])).key == first
    assert +Counter(builder.changes) == {"join": 2}


class Reads:
    """A batch builder with a tree, and the requests whose paths it read since the last call."""

    def __init__(self, kind: str = "unified") -> None:
        self.tree = Tree(kind)
        self.tree.insert([1, 2, 3, 4], range(4))
        self.builder = DecodeBatchBuilder()
        self.read_paths: list[str] = []

    def request(self, rid: str, tokens: list[int]) -> Any:
        return self.tree.request(rid, tokens, len(tokens))

    def step(self, reqs: list[Any], **schedule_batch: Any) -> list[str]:
        """Read a step; return the requests whose paths were read for it."""
        self.read_paths.clear()
        view = batch_of([9] * len(reqs))
        batch = read(self.builder, reqs, self.tree.cache, view, **schedule_batch)
        if (reader := self.builder._reader) is not None and "read" not in vars(reader):
            original = reader.read

            def read_and_note(wanted: list[Any]) -> Any:
                self.read_paths.extend(req.rid for req in wanted)
                return original(wanted)

            reader.read = read_and_note  # type: ignore[method-assign]
        self.batch = batch
        return self.read_paths


@pytest.fixture
def reads() -> Reads:
    return Reads()


def test_only_the_paths_of_who_joins_are_read(reads: Reads) -> None:
    a, b, c = (
        reads.request(rid, tokens) for rid, tokens in zip("abc", ([1], [1, 2], [1]), strict=True)
    )
    reads.step([a, b])
    assert reads.step([a, b, c]) == ["c"]
    assert reads.step([b, c]) == []
    assert +Counter(reads.builder.changes) == {"join": 3, "leave": 1}
    assert reads.batch.read_paths().kv_end.tolist() == [1, 2, 1]


def test_a_reorder_is_a_change_that_reads_nothing(reads: Reads) -> None:
    a, b = reads.request("a", [1, 2, 3]), reads.request("b", [1, 2])
    reads.step([a, b])
    key = reads.batch.key
    assert reads.step([b, a]) == []
    assert reads.batch.key != key
    assert reads.batch.read_paths().kv_end.tolist() == [2, 2, 3]


def moves(reads: Reads, req: Any) -> dict[str, Callable[[], object]]:
    """Return all events after which a running request may have another path, row or slots."""
    extend = SimpleNamespace(reqs=[req], tree_cache=reads.tree.cache, decoding_reqs=None)
    launched = batch_of([3], forward_mode=ForwardMode.EXTEND)
    checkpoint = "checkpoint" if hasattr(reads.tree.cache, "checkpoint") else "cache_unfinished_req"

    def fail_a_checkpoint() -> None:
        with pytest.raises((AttributeError, TypeError)):  # the stand-in is no complete Req
            getattr(reads.tree.cache, checkpoint)(req, up_to=2)

    return {
        "checkpoint": fail_a_checkpoint,
        "extend": lambda: inside.batch_made(launched, extend, RUNNER),
        "retraction": lambda: inside.retract(req),
    }


@pytest.mark.parametrize("move", ["checkpoint", "extend", "retraction"])
def test_a_request_that_moves_is_read_again(reads: Reads, move: str) -> None:
    a, b = reads.request("a", [1, 2, 3]), reads.request("b", [1, 2])
    reads.step([a, b])
    key = reads.batch.key
    moves(reads, b)[move]()
    b.last_node = reads.tree.last_node([1, 2, 3])
    place(b).cache_protected_len = 3
    assert reads.step([a, b]) == ["b"]
    # The path of the moved request is the same, but its slots may differ.
    assert reads.batch.key != key
    assert +Counter(reads.builder.changes) == {"join": 2, "last_node_changed": 1}
    assert reads.batch.read_paths().kv_end.tolist()[-1] == 3
    assert reads.step([a, b]) == []


@pytest.mark.parametrize("move", ["checkpoint", "extend", "retraction"])
def test_what_others_do_changes_nothing(reads: Reads, move: str) -> None:
    a, other = reads.request("a", [1, 2, 3]), reads.request("other", [1])
    reads.step([a])
    key = reads.batch.key
    moves(reads, other)[move]()
    assert reads.step([a]) == []
    assert reads.batch.key == key


def test_rows_that_decode_in_a_mixed_batch_stay(reads: Reads) -> None:
    a, chunk = reads.request("a", [1, 2, 3]), reads.request("chunk", [1])
    reads.step([a])
    mixed = SimpleNamespace(reqs=[chunk, a], tree_cache=reads.tree.cache, decoding_reqs=[a])
    launched = batch_of([3, 4], forward_mode=ForwardMode.MIXED)
    inside.batch_made(launched, mixed, RUNNER)
    assert reads.step([a]) == []


# Steps in which another backend decodes. With data parallelism, while a peer prefills, SGLang may
# run a decode batch as a prefill of one token each, which it decides before it makes the batch
# (0.5.23) or afterwards.
@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.DECODE])
def test_only_a_step_right_after_one_of_the_same_requests_is_unchanged(
    reads: Reads, monkeypatch: pytest.MonkeyPatch, mode: ForwardMode
) -> None:
    a, chunk = reads.request("a", [1, 2, 3]), reads.request("chunk", [1])
    original, rule, reasons = reads.builder.read, RepeatRule(), []
    kind: Any = "decode"
    plans: Any = "of the graphs"

    def note_and_read(view: StepInputs) -> Any:
        assert view.requests is not None
        reasons.append(rule.reason(kind, view.requests.reqs, plans, 1))
        rule.begin_plan(kind, view.requests.reqs, plans, 1, StepReason.PRIVATE)
        batch = original(view)
        rule.plan_after(100, StepReason.DUE)
        return batch

    monkeypatch.setattr(reads.builder, "read", note_and_read)
    for _ in range(2):
        reads.step([a])
    reqs = [chunk, a] if mode.is_mixed() else [a]
    between = SimpleNamespace(reqs=reqs, tree_cache=reads.tree.cache, decoding_reqs=[a])
    launched = batch_of([3] * len(reqs), forward_mode=mode)
    inside.batch_made(launched, between, RUNNER)
    inside.run_forward(lambda runner, forward_batch: None, RUNNER, launched)
    assert reads.step([a]) == reads.step([a]) == []  # it has grown, not moved
    assert reasons == [StepReason.FIRST, None, StepReason.REQUESTS, None]


def test_a_request_that_left_and_came_back_is_read_again(reads: Reads) -> None:
    a, b = reads.request("a", [1, 2, 3]), reads.request("b", [1, 2])
    reads.step([a, b])
    reads.step([a])
    b.last_node, place(b).cache_protected_len = reads.tree.last_node([1, 2, 3]), 3
    assert reads.step([a, b]) == ["b"]


def test_a_flush_forgets_everything(reads: Reads) -> None:
    a = reads.request("a", [1, 2, 3])
    reads.step([a])
    reads.tree.cache.reset()
    reads.tree.insert([1, 2, 3], range(3))
    a.last_node = reads.tree.last_node([1, 2, 3])
    assert reads.step([a]) == ["a"]


def test_another_tree_forgets_everything(reads: Reads) -> None:
    a = reads.request("a", [1, 2, 3])
    reads.step([a])
    reads.tree = Tree("unified")
    reads.tree.insert([1, 9], range(2))
    reads.tree.insert([1, 2, 3], range(3))
    a.last_node = reads.tree.last_node([1, 2, 3])
    reads.step([a])
    assert reads.batch.read_paths().kv_end.tolist() == [1, 3]


def test_a_step_that_shares_nothing_forgets_everything(reads: Reads) -> None:
    a = reads.request("a", [1, 2, 3])
    reads.step([a])
    read(reads.builder, [a, reads.request("b", [1])], reads.tree.cache, batch_of([9]))
    assert reads.step([a]) == ["a"]


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_a_split_by_a_newcomer_reads_those_on_the_split_node(kind: str) -> None:
    reads = Reads(kind)
    reads.tree.insert([7, 8], range(4, 6))
    a, b, other = (
        reads.request(rid, tokens)
        for rid, tokens in (("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 4]), ("other", [7, 8]))
    )
    reads.step([a, other, b])
    reads.tree.insert([1, 2, 9], range(10, 13))
    newcomer = reads.request("newcomer", [1, 2, 9])
    assert reads.step([a, other, b]) == []  # the kept paths are coarser than the tree, but valid
    assert reads.step([a, other, b, newcomer]) == ["newcomer", "a", "b"]
    assert reads.builder.changes["split"] == 2
    paths = reads.batch.read_paths()
    assert paths.kv_end.tolist() == [2, 4, 2, 2, 4, 2, 3]
    assert paths.node_id[0] == paths.node_id[3] == paths.node_id[5]


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_a_newcomer_with_drafts_shares_what_it_has_split(kind: str) -> None:
    """Drafts of the new request branch off where the node was split."""
    tree, builder, chains = Tree(kind), DraftBatchBuilder(), RowShape.of_drafts(2, are_chains=True)
    tree.cache.req_to_token_pool = None  # the slots are not needed
    tree.insert([1, 2, 3, 4], range(4))
    a = tree.request("a", [1, 2, 3, 4], 4)
    step = StepRequests([a], tree.cache, has_beams=False)
    builder.read(SpeculativeInputs.read(batch_of([6]), step, shape=chains))
    b = tree.request("b", [1, 2], 2)
    step = StepRequests([a, b], tree.cache, has_beams=False)
    paths = builder.read(SpeculativeInputs.read(batch_of([6, 5]), step, shape=chains)).read_paths()
    assert paths.kv_end.tolist() == [2, 4, 6] * 2 + [2, 5] * 2
    assert len({paths.node_id[row] for row in paths.path_begin[:-1]}) == 1


def test_ids_that_wait_for_a_decode_step_are_bounded(reads: Reads) -> None:
    a = reads.request("a", [1, 2, 3])
    reads.step([a])
    reads.builder.invalidate(range(batch_builder._MOST_MOVED + 1))
    assert not reads.builder._moved
    assert reads.step([a]) == ["a"]


def test_a_path_that_does_not_match_costs_only_its_request_the_sharing(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = (reads.request(rid, [1, 2]) for rid in "abc")
    reads.step([a, b])
    place(c).cache_protected_len = 9
    assert reads.step([a, c, b]) == ["c"]
    paths = reads.batch.read_paths()
    assert paths.path_begin.tolist() == [0, 1, 1, 2]
    assert paths.node_id[0] == paths.node_id[1]
    assert reads.builder.last_shared is not None
    assert not reads.builder.steps_without_sharing
    assert reads.step([a, c, b]) == []  # and it is not read in every step
    c2 = reads.request("c2", [1])
    place(c2).cache_protected_len = 9
    reads.step([a, b, c2])
    assert reads.builder.changes["mismatch"] == 2
    warnings = [line for line in caplog.messages if "cache_protected_len" in line]
    assert len(warnings) == 1, "logged once"
    assert "request c: its path in the radix tree holds 2 tokens, but" in warnings[0]
    # A request shares as soon as its path is valid.
    reads.step([a, b])
    place(c).cache_protected_len = 2
    reads.step([a, b, c])
    assert reads.batch.read_paths().path_begin.tolist() == [0, 2, 4, 6]  # c2 split the node


def test_in_strict_mode_a_path_that_does_not_match_is_an_error(reads: Reads) -> None:
    reads.builder = DecodeBatchBuilder(strict=True)
    a, b = reads.request("a", [1, 2, 3]), reads.request("b", [1, 2])
    reads.step([a])
    place(b).cache_protected_len = 9
    with pytest.raises(RuntimeError, match="request b: its path"):
        reads.step([a, b])
    place(b).cache_protected_len = 2
    assert reads.step([a, b]) == ["a", "b"]


def test_a_step_made_private_shares_nothing(tree: Tree, reqs: list[Any]) -> None:
    builder = DecodeBatchBuilder()
    batch = read(builder, reqs, tree.cache, batch_of([6, 5]))
    assert builder.last_shared is not None
    private = builder.without_sharing(batch, StepReason.OVERFLOW)
    assert private.read_paths().path_begin.tolist() == [0, 0, 0]
    assert builder.last_shared is None, "nothing is left to check or to repeat"
    assert builder.steps_without_sharing == {StepReason.OVERFLOW: 1}


def test_part_of_a_batch_is_private(tree: Tree, reqs: list[Any]) -> None:
    builder = DecodeBatchBuilder()
    batch = read(builder, reqs, tree.cache, batch_of([6]))
    assert builder.steps_without_sharing == {StepReason.CUT: 1}
    assert batch.seq_lens.tolist() == [6]
    assert batch.read_paths().path_begin.tolist() == [0, 0]


def test_a_warm_up_is_private(caplog: pytest.LogCaptureFixture) -> None:
    builder = DecodeBatchBuilder()
    batch = builder.read(StepInputs.read(batch_of([1, 1, 1]), None))
    assert batch.seq_lens.tolist() == [1, 1, 1]
    assert batch.key is None
    assert builder.steps_without_sharing == {StepReason.NO_REQUESTS: 1}
    assert builder.last_shared is None
    assert not caplog.records


def test_an_unknown_cache_is_private_and_said_once(
    tree: Tree, reqs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    builder = DecodeBatchBuilder()
    for _ in range(3):
        batch = read(builder, reqs, SimpleNamespace(), batch_of([6, 5]))
    assert batch.read_paths().path_begin.tolist() == [0, 0, 0]
    assert list(builder.steps_without_sharing.values()) == [3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "SimpleNamespace" in caplog.text
    assert read(builder, reqs, tree.cache, batch_of([6, 5])).key is not None  # a valid batch again


def test_lengths_that_are_not_on_the_host(tree: Tree, reqs: list[Any]) -> None:
    view = batch_of([6, 5], seq_lens_cpu=None)
    assert read(DecodeBatchBuilder(), reqs, tree.cache, view).seq_lens.tolist() == [6, 5]


def test_lengths_that_are_not_on_the_host_are_those_that_requests_have_committed(
    tree: Tree, reqs: list[Any]
) -> None:
    """In verify steps the host's lengths are late; the device's are not read."""
    view = batch_of([8, 9], seq_lens_cpu=None)
    for req, length in zip(reqs, (6, 5), strict=False):
        place(req).kv_committed_len = length
    step = StepRequests(reqs[:2], tree.cache, has_beams=False)
    chains, ahead = RowShape.of_drafts(2, are_chains=True), RowShape(first=1)

    def lengths(step: StepRequests, shape: RowShape) -> list[int]:
        batch = DraftBatchBuilder().read(SpeculativeInputs.read(view, step, shape=shape))
        lens: list[int] = batch.seq_lens.tolist()
        return lens

    assert lengths(step, chains) == [7, 8, 6, 7]
    assert lengths(step, ahead) == [7, 6]
    # The same holds if nothing can be shared.
    alone = step._replace(tree=SimpleNamespace())
    assert lengths(alone, ahead) == [7, 6]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_of_rows(dtype: type) -> None:
    lengths = np.array([7, 8, 9], dtype=dtype)
    for num_requests, num_rows, expected in (
        (3, 3, [7, 8, 9]),
        (2, 4, [7, 8, 0, 0]),  # two rows of padding
        (3, 2, [7, 8]),
        (5, 4, [7, 8, 9, 0]),
    ):
        lens = row_lengths(lengths, num_requests, num_rows)
        assert lens.dtype == np.int32
        assert lens.tolist() == expected
    lens = row_lengths(lengths[::2], 2, 2)
    lengths[:] = 0  # SGLang may overwrite its tensor
    assert lens.tolist() == [7, 9]


def test_lengths_that_are_none() -> None:
    with pytest.raises(ValueError, match="must fit into int32, got 2147483648"):
        row_lengths(np.array([1 << 31]), 1, 1)
    with pytest.raises(ValueError, match="must have 1 dimension, got 2"):
        row_lengths(np.zeros((1, 1), dtype=np.int64), 1, 1)
    with pytest.raises(TypeError):
        row_lengths(np.zeros(1), 1, 1)  # type: ignore[arg-type]


def test_requests_are_published_only_while_their_batch_runs(tree: Tree, reqs: list[Any]) -> None:
    launched = batch_of([6, 5])
    inside.batch_made(launched, SimpleNamespace(reqs=reqs, tree_cache=tree.cache), RUNNER)

    def fail(runner: Any, forward_batch: Any) -> None:
        assert inside.running_step() is not None
        raise KeyError("from the model")

    with pytest.raises(KeyError, match="from the model"):
        inside.run_forward(fail, RUNNER, launched)
    assert inside.running_step() is None

    draft = SimpleNamespace(is_draft_worker=True)
    seen = inside.run_forward(lambda *args: inside.running_step(), draft, launched)
    assert seen is None


def test_extends_are_not_noted(reqs: list[Any]) -> None:
    launched = batch_of([6, 5], forward_mode=ForwardMode.EXTEND)
    inside.batch_made(launched, SimpleNamespace(reqs=reqs, tree_cache=None), RUNNER)
    assert not hasattr(launched, request_tracker._NOTE)


def test_session_requests_do_not_stop_their_neighbours_from_sharing(
    tree: Tree, reqs: list[Any]
) -> None:
    session = request("s", object(), protected=3, row=5)
    batch = read(DecodeBatchBuilder(), [reqs[0], session, reqs[1]], tree.cache, batch_of([6, 9, 5]))
    paths = batch.read_paths()
    assert paths.path_begin.tolist() == [0, 2, 2, 3]
    assert paths.node_id[0] == paths.node_id[2]
