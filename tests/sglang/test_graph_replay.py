"""Contract of SGLang's CUDA graph runner with the backend, called as the runner calls it.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_fakes import (
    HEAD_DIM,
    QO_HEADS,
    decode_batch,
    dense,
    mlp_padded,
    pat_backend,
    replay_view,
    runner,
)
from sglang_trees import TREE_KINDS, Tree

from sglang_pat.executors.reference import ReferenceExecutor, gather_slots
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.step.debug_checks import DebugChecks, RankChecker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, StepRequests

GRAPH_ROWS = 4


@pytest.fixture
def model_runner() -> Any:
    return runner()


@pytest.fixture
def backend(
    model_runner: Any, monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace
) -> Any:
    """A backend that takes torch for something that can be captured."""
    server_context.observability.decode_log_interval = 1
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    backend = pat_backend(model_runner)
    backend.init_cuda_graph_state(max_bs=GRAPH_ROWS, max_num_tokens=GRAPH_ROWS)
    return backend


def attend(backend: Any, model_runner: Any, view: Any) -> tuple[torch.Tensor, ...]:
    """Queries of all rows, and what the backend answers for layer 0: what a graph would replay."""
    q = torch.randn(view.batch_size, QO_HEADS, HEAD_DIM)
    layer = model_runner.model[0]
    out = backend.forward_decode(q, None, None, layer, view)
    return q, out.view(-1, QO_HEADS, HEAD_DIM)


def assert_attends(
    model_runner: Any, q: torch.Tensor, out: torch.Tensor, slots: list[list[int]]
) -> None:
    """Row i of `out` is attention over slots[i]; all rows behind are padding."""
    pool = model_runner.token_to_kv_pool
    for row, own in enumerate(slots):
        exact = dense(q[row], pool, 0, torch.tensor(own))
        torch.testing.assert_close(out[row].double(), exact, atol=2e-6, rtol=2e-6)
    assert torch.equal(out[len(slots) :], torch.zeros_like(out[len(slots) :]))


def test_the_fill_value_is_a_length_that_can_be_planned(backend: Any) -> None:
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_capture_plans_rows_without_requests(
    backend: Any, model_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglang_pat")
    for rows in (GRAPH_ROWS, 2, 1):  # from large to small
        fill = backend.get_cuda_graph_seq_len_fill_value()
        view = decode_batch([0] * rows, [fill] * rows, [0] * rows, rids=None)
        backend.init_forward_metadata_out_graph(view, in_capture=True)
        attend(backend, model_runner, view)  # the warm-up before a capture
        backend.on_after_cuda_graph_warmup()
        backend.init_forward_metadata_in_graph(view)
        q, out = attend(backend, model_runner, view)
        assert_attends(model_runner, q, out, [[0]] * rows)
    assert "Pat decode" not in caplog.text  # no decode steps


def test_padded_rows_are_zero_and_the_others_attend(backend: Any, model_runner: Any) -> None:
    req_to_token = model_runner.req_to_token_pool.req_to_token
    req_to_token[1, :3], req_to_token[2, :2] = torch.tensor([3, 4, 5]), torch.tensor([6, 7])
    for _ in range(2):  # a plan, and its reuse
        view = replay_view([1, 2], [3, 2], [5, 7], GRAPH_ROWS)
        backend.init_forward_metadata_out_graph(view)
        q, out = attend(backend, model_runner, view)
        assert_attends(model_runner, q, out, [[3, 4, 5], [6, 7]])
    assert inside.microbatch(backend).captured is not None
    assert inside.microbatch(backend).captured.stats.plans_reused == 1


@pytest.mark.parametrize("more_rows", range(1, 8))
@pytest.mark.parametrize("is_captured", [False, True])
def test_requests_share_beside_any_padding(
    is_captured: bool,
    more_rows: int,
    backend: Any,
    model_runner: Any,
    running: list[list[int]],
) -> None:
    """Padding rows of a graph, or of MLP synchronisation."""
    backend.init_cuda_graph_state(max_bs=10, max_num_tokens=10)
    for _ in range(2):
        batch = [1, 2, 3], [32, 32, 32], [41, 43, 45]
        if is_captured:
            view = replay_view(*batch, 3 + more_rows)
            backend.init_forward_metadata_out_graph(view)
        else:
            view = mlp_padded(decode_batch(*batch), backend, 3 + more_rows)
            backend.init_forward_metadata(view)
        q, out = attend(backend, model_runner, view)
        assert_attends(model_runner, q, out, running)


def test_an_idle_rank_replays_nothing_but_padding(backend: Any, model_runner: Any) -> None:
    view = replay_view([], [], [], GRAPH_ROWS)
    assert view.actual_forward_mode is ForwardMode.IDLE
    assert view.num_padding == view.batch_size
    backend.init_forward_metadata_out_graph(view)
    q, out = attend(backend, model_runner, view)
    assert_attends(model_runner, q, out, [])


def test_lengths_that_are_only_on_the_device_are_read_there(
    backend: Any, model_runner: Any
) -> None:
    model_runner.req_to_token_pool.req_to_token[1, :2] = torch.tensor([8, 9])
    view = replay_view([1], [2], [9], GRAPH_ROWS, seq_lens_cpu=None)
    backend.init_forward_metadata_out_graph(view)
    q, out = attend(backend, model_runner, view)
    assert_attends(model_runner, q, out, [[8, 9]])


def test_graphs_of_all_sizes_and_eager_steps_take_turns(backend: Any, model_runner: Any) -> None:
    model_runner.req_to_token_pool.req_to_token[1, :6] = torch.arange(10, 16)
    for length, size in ((2, 1), (3, 4), (4, 0), (5, 2), (6, 1)):
        slots = [list(range(10, 10 + length))]
        if size:
            view = replay_view([1], [length], [9 + length], size)
            backend.init_forward_metadata_out_graph(view)
        else:
            view = decode_batch([1], [length], [9 + length])
            backend.init_forward_metadata(view)
        q, out = attend(backend, model_runner, view)
        assert_attends(model_runner, q, out, slots)


def test_reads_of_shared_rows_end_where_sglang_assumes(backend: Any) -> None:
    # Nothing that a graph replays reads rows of other requests: 0.5.17 does not ask, and takes such
    # reads to end before a replay.
    backend.calls.clear()
    backend.init_forward_metadata_in_graph(decode_batch([1], [2], [9]))
    assert backend.calls == []
    if hasattr(AttentionBackend, "shared_read_ends"):
        assert backend.shared_read_ends(ForwardMode.DECODE).name == "IN_REPLAY"


# --- with requests ---

# Long enough to be worth sharing; the row is then full.
PREFIX, PREFIX_SLOTS = list(range(1, 31)), list(range(10, 40))


@pytest.fixture(params=TREE_KINDS)
def running(request: pytest.FixtureRequest, model_runner: Any) -> Iterator[list[list[int]]]:
    """Three requests in rows 1 to 3 that share 30 tokens and have two of their own: their slots.

    They are the step that is being run.
    """
    tree = Tree(request.param)
    tree.insert(PREFIX, PREFIX_SLOTS)
    reqs = [tree.request(f"request {row}", PREFIX, 30, row) for row in (1, 2, 3)]
    slots = [[*PREFIX_SLOTS, 40 + 2 * i, 41 + 2 * i] for i in range(3)]
    for row, own in enumerate(slots, start=1):
        model_runner.req_to_token_pool.req_to_token[row] = torch.tensor(own)
    step = StepRequests(reqs, tree.cache, has_beams=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REQUEST_TRACKER, "_step", step)
        yield slots


def test_requests_share_in_a_replay_that_does_not_name_them(
    backend: Any, model_runner: Any, running: list[list[int]]
) -> None:
    view = replay_view([1, 2, 3], [32, 32, 32], [41, 43, 45], GRAPH_ROWS)
    backend.init_forward_metadata_out_graph(view)
    q, out = attend(backend, model_runner, view)
    assert_attends(model_runner, q, out, running)
    assert inside.microbatch(backend).captured is not None
    stats = inside.microbatch(backend).captured.stats
    assert (stats.kv_tokens_query_centric, stats.kv_tokens_planned) == (96, 36)
    assert StepReason.NO_REQUESTS not in inside.microbatch(backend).builder.steps_without_sharing


def test_a_request_that_stopped_takes_no_one_with_it(
    backend: Any, model_runner: Any, running: list[list[int]]
) -> None:
    # SGLang notices a stop token one step late. The row of a request that stopped is planned once
    # more, then given to the next prompt while that step may still run; here, before it runs.
    view = replay_view([1, 2, 3], [32, 32, 32], [41, 43, 45], GRAPH_ROWS)
    backend.init_forward_metadata_out_graph(view)
    assert inside.microbatch(backend).captured is not None
    (plan,) = (each._plan for each in inside.attentions(inside.microbatch(backend).captured))
    assert plan is not None
    ((stopped, kv_begin, num_tokens, _),) = plan.gather_spans.tolist()
    assert (kv_begin, num_tokens) == (0, 30)
    req_to_token = model_runner.req_to_token_pool.req_to_token
    req_to_token[view.req_pool_indices[stopped]] = torch.arange(1, 33)
    # Reading the shared range through that row would now find something else.
    assert gather_slots(plan, req_to_token, view.req_pool_indices).tolist() != PREFIX_SLOTS
    q, out = attend(backend, model_runner, view)
    staying = [row for row in range(3) if row != stopped]
    assert_attends(model_runner, q[staying], out[staying], [running[row] for row in staying])
    assert out[stopped].isfinite().all()  # thrown away, but computed


# --- steps that repeat the last one ---


@pytest.fixture
def repeating(
    backend: Any, model_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., bool]:
    """Replays a step of the running requests, and says whether it was planned."""
    inside.log_every(backend, 100)
    table = torch.zeros(4, 40, dtype=torch.int32)
    table[:, :30] = torch.tensor(PREFIX_SLOTS)
    model_runner.req_to_token_pool.req_to_token = table
    read: list[Any] = []
    original = inside.microbatch(backend).builder.read

    def reads(view: Any) -> Any:
        read.append(view)
        return original(view)

    monkeypatch.setattr(inside.microbatch(backend).builder, "read", reads)

    def replay(length: int, size: int = GRAPH_ROWS) -> bool:
        read.clear()
        view = replay_view([1, 2, 3], [length] * 3, [41, 43, 45], size)
        backend.init_forward_metadata_out_graph(view)
        return bool(read)

    return replay


@pytest.mark.usefixtures("running")
def test_the_same_requests_are_planned_once(backend: Any, repeating: Callable[..., bool]) -> None:
    assert [repeating(length) for length in (38, 39, 40)] == [True, False, False]
    with pytest.raises(ValueError, match="at most req_to_token's width 40, got 41"):
        repeating(41)  # is planned again


@pytest.mark.usefixtures("running")
def test_what_was_not_planned_is_counted(backend: Any, repeating: Callable[..., bool]) -> None:
    for length in (31, 32, 33):
        repeating(length)
    counted = inside.planner(backend).counters()
    assert (counted["plans_built"], counted["plans_reused"]) == (1, 2)
    assert counted["kv_tokens_query_centric"] == 3 * (31 + 32 + 33)
    assert counted["kv_tokens_planned"] == 3 * 30 + 3 * (1 + 2 + 3)
    assert counted["planning_ns"]["unchanged"].total() == 2


@pytest.mark.usefixtures("running")
def test_a_step_is_planned_if_anything_may_have_changed(
    backend: Any, repeating: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = REQUEST_TRACKER._step
    assert step is not None
    assert repeating(32)
    assert not repeating(33)
    REQUEST_TRACKER.invalidate([step.reqs[1]])
    assert repeating(34)
    assert not repeating(35)
    REQUEST_TRACKER.invalidate_all()  # the tree was reset
    assert repeating(36)
    assert repeating(37, size=3)  # another graph
    monkeypatch.setattr(REQUEST_TRACKER, "_step", step._replace(reqs=list(step.reqs)))
    assert repeating(38, size=3)  # another batch
    monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
    assert repeating(38, size=3)  # a warm-up


@pytest.mark.usefixtures("running")
def test_an_eager_step_ends_repetition(backend: Any, repeating: Callable[..., bool]) -> None:
    assert repeating(34)
    backend.init_forward_metadata(decode_batch([1, 2, 3], [35] * 3, [41, 43, 45]))
    assert repeating(36)
    assert not repeating(37)


@pytest.mark.usefixtures("running")
def test_graphs_that_are_captured_anew_are_planned_and_forget_no_count(
    backend: Any, repeating: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An update of the weights may ask for it, and pause requests that run.
    assert repeating(34)
    assert not repeating(35)
    before = inside.planner(backend).counters()
    with monkeypatch.context() as patch:
        patch.setattr(REQUEST_TRACKER, "_step", None)
        backend.init_cuda_graph_state(max_bs=GRAPH_ROWS, max_num_tokens=GRAPH_ROWS)
        view = decode_batch([0] * GRAPH_ROWS, [1] * GRAPH_ROWS, [0] * GRAPH_ROWS)
        backend.init_forward_metadata_out_graph(view, in_capture=True)
    assert repeating(36)
    now = inside.planner(backend).counters()
    assert now["plans_built"] == before["plans_built"] + 2  # of the capture, and of this step
    assert now["plans_reused"] == before["plans_reused"]


@pytest.mark.usefixtures("running")
def test_a_step_in_which_the_log_wants_a_line_is_planned(
    backend: Any, repeating: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    inside.log_every(backend, 3)
    with caplog.at_level("INFO"):
        planned = [repeating(length) for length in range(31, 38)]
    assert planned == [True, False, False, True, False, False, True]
    lines = [line for line in caplog.messages if line.startswith("Pat decode")]
    assert [line[:32] for line in lines] == ["Pat decode, #plan: 0, #reuse: 3,"] * 2


@pytest.mark.usefixtures("running")
def test_in_debug_mode_every_step_is_planned_and_must_grow_by_one(
    backend: Any, repeating: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside.planner(backend), "_checks", DebugChecks(RankChecker(None)))
    assert repeating(36)
    assert repeating(37)
    with pytest.raises(RuntimeError, match="the same requests had lengths"):
        repeating(37)
