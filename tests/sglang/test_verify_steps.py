"""Verify steps of speculative decoding, shown to the backend as SGLang's runners show them.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang_fakes import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    config,
    decode_batch,
    dense,
    drafts_to_verify,
    layers,
    mlp_padded,
    num_rows,
    pat_backend,
    replay_view,
    runner,
    server_arguments,
)
from sglang_trees import TREE_KINDS, Tree, late_lengths, place

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.backend import PatMixin
from sglang_pat.sglang.speculative import draft_requests
from sglang_pat.sglang.speculative.rows import MAX_READ_APART, RowShape
from sglang_pat.sglang.speculative.tree_attention import TreeKv, square_masks
from sglang_pat.sglang.start import layer_rules
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, StepRequests
from sglang_pat.support import Unsupported

DRAFTS = 3
WIDTH = 128
PREFIX, PREFIX_SLOTS = list(range(1, 21)), list(range(100, 120))
ROWS = (1, 2)
# A draft token and a branch beside it: the third one does not read the second.
BRANCHES = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


class Pool:
    """A KV pool of 600 slots."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys = [torch.randn(600, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2)]
        self.values = [torch.randn(600, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]


class Server:
    """A backend, and two requests that share a prefix."""

    def __init__(self, algorithm: str, tree_kind: str) -> None:
        table = torch.zeros(4, WIDTH, dtype=torch.int32)
        for row in ROWS:
            table[row] = torch.tensor(PREFIX_SLOTS + list(range(120, 120 + WIDTH - 20))) + 0
            table[row, 20:] += 200 * (row - 1)
        arguments = server_arguments(
            speculative_algorithm=algorithm, speculative_num_draft_tokens=DRAFTS
        )
        self.runner = runner(
            server_args=arguments,
            token_to_kv_pool=Pool(),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
        )
        self.backend: Any = pat_backend(self.runner)
        inside.check_steps(self.backend)
        self.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTS)
        tree = Tree(tree_kind)
        tree.cache.req_to_token_pool = self.runner.req_to_token_pool
        tree.insert(PREFIX, PREFIX_SLOTS)
        self.reqs = [tree.request(f"request {row}", PREFIX, 20, row) for row in ROWS]
        self.step = StepRequests(self.reqs, tree.cache, has_beams=False)
        self.table = table

    @property
    def plans(self) -> Any:
        return inside.microbatch(self.backend).captured

    def view(self, lens: list[int], size: int, mask: torch.Tensor | None = None) -> Any:
        """SGLang's view before it replays the graph of `size` requests; 0: an eager step."""
        slots = [
            int(self.table[row, length + i])
            for row, length in zip(ROWS, lens, strict=True)
            for i in range(DRAFTS)
        ]
        more: dict[str, Any] = {
            "forward_mode": ForwardMode.TARGET_VERIFY,
            "spec_info": drafts_to_verify(DRAFTS, mask),
        }
        if not size:
            view = decode_batch(list(ROWS), lens, slots)
            vars(view).update(more)
            return view
        return replay_view(list(ROWS), lens, slots, size, **more)

    def attend(self, view: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of all rows, and what layer 0 answers."""
        count = num_rows(view, DRAFTS)
        q = torch.randn(count, QO_HEADS, HEAD_DIM)
        slots = torch.zeros(count, dtype=torch.int64)
        slots[: len(view.out_cache_loc)] = view.out_cache_loc
        batch = SimpleNamespace(**(vars(view) | {"out_cache_loc": slots}))
        out = self.backend.forward_extend(q, None, None, self.runner.model[0], batch)
        return q, out.view(count, QO_HEADS, HEAD_DIM)

    def capture(self, size: int) -> None:
        """Capture the graph of `size` requests, as far as that is seen without one."""
        view = decode_batch([0] * size, [1] * size, [0] * (size * DRAFTS))
        view.forward_mode = ForwardMode.TARGET_VERIFY
        REQUEST_TRACKER._step = None
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        self.backend.init_forward_metadata_in_graph(view)
        REQUEST_TRACKER._step = self.step

    def replay(self, view: Any) -> None:
        """Run the steps before the layers: the backend's, then the graph's.

        The graph's kernels read lengths on the device.
        """
        self.backend.init_forward_metadata_out_graph(view)
        self.backend.init_forward_metadata_in_graph(view)
        for attention in inside.attentions(self.plans):
            step = attention._executor._step
            on_device = step.seq_lens.numpy().astype(np.int32)
            attention._executor.reuse_plan(step._replace(host_seq_lens=on_device))

    def counts(self) -> dict[str, int]:
        """Counts of all steps, however they were planned."""
        counters = inside.planner(self.backend).counters()
        tokens = {name: number for name, number in counters.items() if "tokens" in name}
        return tokens | counters["verify"]

    @property
    def num_repeated(self) -> int:
        """Steps without a plan()."""
        repeated: int = inside.num_repeated(self.backend)
        return repeated

    def assert_exact(self, view: Any, lens: list[int], reads: torch.Tensor) -> None:
        """Each draft token reads what its request had, and what `reads` says of the others."""
        q, out = self.attend(view)
        assert out.isfinite().all()
        for i, (row, length) in enumerate(zip(ROWS, lens, strict=True)):
            for j in range(DRAFTS):
                drafts = self.table[row, length : length + DRAFTS][reads[j]]
                slots = torch.cat([self.table[row, :length], drafts]).long()
                exact = dense(q[i * DRAFTS + j], self.runner.token_to_kv_pool, 0, slots)
                found = out[i * DRAFTS + j].double()
                torch.testing.assert_close(found, exact, atol=2e-6, rtol=2e-6)


@pytest.fixture(params=TREE_KINDS)
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server_context: Any
) -> Server:
    """Verifies chains."""
    return _server("EAGLE3", request.param, monkeypatch)


@pytest.fixture
def branching(monkeypatch: pytest.MonkeyPatch, server_context: Any) -> Server:
    """Verifies trees."""
    return _server("NGRAM", TREE_KINDS[0], monkeypatch)


def _server(algorithm: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    server = Server(algorithm, kind)
    monkeypatch.setattr(REQUEST_TRACKER, "_step", server.step)
    return server


CHAIN = torch.ones(DRAFTS, DRAFTS, dtype=torch.bool).tril()


def assert_request_exact(
    server: Server,
    request: int,
    lens: list[int],
    table: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Assert attention of one request's chain of drafts, with its slots in `table`."""
    for j in range(DRAFTS):
        slots = table[ROWS[request], : lens[request] + j + 1].long()
        exact = dense(q[request * DRAFTS + j], server.runner.token_to_kv_pool, 0, slots)
        found = out[request * DRAFTS + j].double()
        torch.testing.assert_close(found, exact, atol=2e-6, rtol=2e-6)


def test_each_draft_token_reads_those_before_it(server: Server) -> None:
    lens = [25, 31]
    # Different numbers of accepted tokens; graphs with and without padding, and an eager step.
    for accepted, size in (([0, 0], 2), ([1, 3], 4), ([2, 1], 0), ([3, 3], 2)):
        lens = [length + more for length, more in zip(lens, accepted, strict=True)]
        view = server.view(lens, size)
        if size:
            server.backend.init_forward_metadata_out_graph(view)
        else:
            server.backend.init_forward_metadata(view)
        server.assert_exact(view, lens, CHAIN)


def test_plans_are_reused_while_requests_grow_by_what_is_accepted(server: Server) -> None:
    lens = [25, 31]
    for accepted in ([0, 0], [1, 3], [3, 1], [2, 2]):
        lens = [length + more for length, more in zip(lens, accepted, strict=True)]
        server.backend.init_forward_metadata_out_graph(server.view(lens, 2))
    stats = server.plans.stats
    assert (stats.plans_built, stats.plans_reused) == (1, 3)
    # Once for all rows of all requests: the prefix, and what each request had of its own.
    planned, alone = server.plans.step_tokens.planned, server.plans.step_tokens.query_centric
    assert planned < 0.5 * alone
    assert inside.planner(server.backend).counters()["verify"] == {
        "steps": 4,
        "rows": 4 * 2 * DRAFTS,
    }


# Tokens of both requests that each step accepts. The sixth finds one outgrown.
ACCEPTED = ([0, 0], [1, 3], [3, 1], [2, 2], [26, 24], [2, 1], [1, 1])


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_steps_are_repeated_without_a_plan(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, server_context: Any
) -> None:
    """They answer and count as those that are planned."""
    counts = []
    for is_checked in (True, False):
        server = _server(algorithm, TREE_KINDS[0], monkeypatch)
        if not is_checked:
            inside.do_not_check_steps(server.backend)
        server.capture(2)
        before, lens = server.counts(), [25, 31]
        for i, accepted in enumerate(ACCEPTED):
            lens = [length + more for length, more in zip(lens, accepted, strict=True)]
            reads = CHAIN if algorithm == "EAGLE3" or i % 2 else BRANCHES
            view = server.view(lens, 2, torch.cat([reads.flatten()] * 2))
            server.replay(view)
            server.assert_exact(view, lens, reads)
        assert server.num_repeated == (0 if is_checked else 5)
        assert server.plans.stats.plans_built == 1 + 2  # one for the capture
        counts.append({name: number - before[name] for name, number in server.counts().items()})
    assert counts[0] == counts[1]
    assert counts[0]["steps"] == len(ACCEPTED)
    assert counts[0]["rows"] == len(ACCEPTED) * 2 * DRAFTS


def new_server(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, is_checked: bool = False
) -> tuple[Server, torch.Tensor, torch.Tensor]:
    """Server, the reads among its draft tokens, and SGLang's mask of two requests."""
    server = _server(algorithm, TREE_KINDS[0], monkeypatch)
    if not is_checked:
        inside.do_not_check_steps(server.backend)
    reads = CHAIN if algorithm == "EAGLE3" else BRANCHES
    return server, reads, torch.cat([reads.flatten()] * 2)


@pytest.mark.parametrize("more_rows", range(1, 8))
@pytest.mark.parametrize("knows", ["lengths", "no lengths", "no tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_rows_that_mlp_synchronisation_adds_are_padding(
    algorithm: str,
    knows: str,
    more_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    server_context: Any,
) -> None:
    """Behind those of the requests: whole requests, which are planned, and a rest."""
    server, reads, mask = new_server(algorithm, monkeypatch, is_checked=True)
    if knows == "no tree":
        monkeypatch.setattr(REQUEST_TRACKER, "_step", server.step._replace(tree=SimpleNamespace()))
    for lens in late_lengths(server.reqs):
        view = server.view(lens, 0, mask)
        if knows != "lengths" and algorithm == "EAGLE3":
            view.seq_lens_cpu = None
        padded = mlp_padded(view, server.backend, 2 * DRAFTS + more_rows, DRAFTS)
        server.backend.init_forward_metadata(padded)
        server.assert_exact(padded, lens, reads)
        _, out = server.attend(padded)
        assert len(out) == 2 * DRAFTS + more_rows
        behind = 2 if algorithm == "EAGLE3" else len(out) // DRAFTS
        assert not out[behind * DRAFTS :].any()
    assert server.counts()["rows"] == 4 * 2 * DRAFTS  # without padding
    view = server.view(lens, 0, mask)
    server.backend.init_forward_metadata(view)
    server.assert_exact(view, lens, reads)


@pytest.mark.parametrize("more_rows", range(1, 8))
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_rows_behind_those_of_a_graph_are_padding(
    algorithm: str, more_rows: int, monkeypatch: pytest.MonkeyPatch, server_context: Any
) -> None:
    """Graphs of as many requests, and of one more; planned, and not."""
    server, reads, mask = new_server(algorithm, monkeypatch)
    size = 2 + more_rows // DRAFTS
    server.capture(size)
    for i, lens in enumerate(([25, 31], [26, 34], [29, 35])):
        view = server.view(lens, size, mask)
        server.replay(view)
        assert server.num_repeated == i
        view.input_ids = torch.zeros(2 * DRAFTS + more_rows)
        server.assert_exact(view, lens, reads)


@pytest.mark.parametrize("num_tokens", range(8))
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_an_idle_rank_that_verifies_padding(
    algorithm: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch, server_context: Any
) -> None:
    """SGLang gives such steps to idle ranks of hybrid models, before and after real ones."""
    server, reads, mask = new_server(algorithm, monkeypatch)
    for lens in ([25, 31], [26, 33]):
        before = (
            server.counts(),
            dict(inside.planner(server.backend).counters()["steps_without_sharing"]),
        )
        with monkeypatch.context() as patch:
            patch.setattr(REQUEST_TRACKER, "_step", None)
            view = decode_batch([], [], [], spec_info=drafts_to_verify(DRAFTS, mask[:0]))
            view.forward_mode = ForwardMode.IDLE
            padded = mlp_padded(view, server.backend, num_tokens, DRAFTS)
            padded._original_forward_mode = ForwardMode.IDLE
            padded.forward_mode = ForwardMode.TARGET_VERIFY
            server.backend.init_forward_metadata(padded)
            _, out = server.attend(padded)
        assert len(out) == num_tokens
        assert out.isfinite().all()
        assert algorithm == "NGRAM" or not out.any()
        assert (
            server.counts(),
            inside.planner(server.backend).counters()["steps_without_sharing"],
        ) == before
        view = server.view(lens, 0, mask)
        server.backend.init_forward_metadata(view)
        server.assert_exact(view, lens, reads)


def test_a_step_that_lacks_requests_is_refused(server: Server) -> None:
    view = server.view([25, 31], 0)
    server.backend.init_forward_metadata(view)
    view.input_ids = torch.zeros(DRAFTS)
    view.out_cache_loc = view.out_cache_loc[:DRAFTS]
    with pytest.raises(ValueError, match=r"q must have shape \[6, 4, 64\], got \[3, 4, 64\]"):
        server.attend(view)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_step_of_another_kind_is_no_repetition(
    algorithm: str, is_checked: bool, monkeypatch: pytest.MonkeyPatch, server_context: Any
) -> None:
    server, reads, mask = new_server(algorithm, monkeypatch, is_checked)
    server.capture(2)
    # Both graphs have the same number of requests, or of rows.
    size = 2 * DRAFTS if is_checked else 2
    for length in (25, 26, 27):
        lens = [length, length + 6]
        view = replay_view(list(ROWS), lens, [1, 2], size)
        server.backend.init_forward_metadata_out_graph(view)
        q = torch.randn(size, QO_HEADS, HEAD_DIM)
        out = server.backend.forward_decode(q, None, None, server.runner.model[0], view)
        for i, row in enumerate(ROWS):
            exact = dense(q[i], server.runner.token_to_kv_pool, 0, server.table[row, : lens[i]])
            torch.testing.assert_close(out.view_as(q)[i].double(), exact, atol=2e-6, rtol=2e-6)
        view = server.view(lens, 2, mask)
        server.replay(view)
        server.assert_exact(view, lens, reads)
    assert server.num_repeated == 0


def test_graphs_that_are_captured_anew_must_write_their_rows_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside.do_not_check_steps(server.backend)
    server.capture(2)
    # Then a runner that does not ask the backend what to capture, as after new weights.
    server.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTS)
    for lens in ([25, 31], [26, 33], [29, 34]):
        view = server.view(lens, 2)
        server.backend.init_forward_metadata_out_graph(view)
        server.assert_exact(view, lens, CHAIN)
    assert server.num_repeated == 0


@pytest.mark.parametrize("what", ["moved", "reset", "graph", "eager", "shorter", "others"])
def test_steps_that_are_no_repetition_are_planned(server: Server, what: str) -> None:
    inside.do_not_check_steps(server.backend)
    server.capture(4)
    server.capture(2)
    lens = [25, 31]
    server.replay(server.view(lens, 2))
    server.replay(server.view(lens, 2))
    assert server.num_repeated == 1
    size = 2
    if what == "moved":
        server.table[1, 20:60] = torch.arange(400, 440)
        REQUEST_TRACKER.invalidate([server.reqs[0]])
    elif what == "reset":  # of the cache
        server.table[:, :60] += 1
        REQUEST_TRACKER.invalidate_all()
    elif what == "graph":
        size = 4
    elif what == "eager":
        server.backend.init_forward_metadata(server.view(lens, 0))
    elif what == "shorter":  # as no request is that stays where it is
        lens = [22, 31]
    elif what == "others":
        REQUEST_TRACKER._step = server.step._replace(reqs=list(server.reqs))
    view = server.view(lens, size)
    server.replay(view)
    assert server.num_repeated == 1
    server.assert_exact(view, lens, CHAIN)


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("is_checked", [True, False])
def test_chains_do_with_lengths_that_the_host_learns_late(
    server: Server, size: int, is_checked: bool
) -> None:
    """After the step behind: SGLang has processed the results of the one before alone."""
    assert not server.backend.needs_cpu_seq_lens
    if not is_checked:
        inside.do_not_check_steps(server.backend)
    server.capture(2)
    built = inside.planner(server.backend).counters()["plans_built"]
    for lens in late_lengths(server.reqs):
        view = server.view(lens, size)
        view.seq_lens_cpu = None
        if size:
            server.replay(view)
        else:
            server.backend.init_forward_metadata(view)
        server.assert_exact(view, lens, CHAIN)
    assert inside.planner(server.backend).counters()["plans_built"] == built + 1
    assert server.num_repeated == (3 if size and not is_checked else 0)


def test_trees_ask_for_no_lengths_on_the_host(branching: Server) -> None:
    assert not branching.backend.needs_cpu_seq_lens


def test_masks_of_trees_are_computed_once_per_step(
    branching: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a step that is planned because the log wants a line."""
    inside.do_not_check_steps(branching.backend)
    inside.log_every(branching.backend, 3)
    branching.capture(2)
    taken: list[int] = []
    update = TreeKv.update
    monkeypatch.setattr(
        TreeKv, "update", lambda self, *args, **more: taken.append(1) or update(self, *args, **more)
    )
    masks = []
    for lens in ([25, 31], [26, 33], [29, 34], [30, 35], [31, 36], [32, 37], [33, 38]):
        taken.clear()
        mask = torch.cat([BRANCHES.flatten(), CHAIN.flatten()])
        branching.replay(branching.view(lens, 2, mask))
        masks.append(len(taken))
    assert masks == [1] * 7
    reasons = inside.planner(branching.backend).counters()["steps_planned"]
    assert reasons[StepReason.DUE] == 2


def test_graphs_that_do_not_write_their_rows_are_never_repeated(server: Server) -> None:
    # A runner that does not ask the backend what to capture has them so.
    inside.do_not_check_steps(server.backend)
    for lens in ([25, 31], [26, 33], [29, 34]):
        view = server.view(lens, 2)
        server.backend.init_forward_metadata_out_graph(view)
        server.assert_exact(view, lens, CHAIN)
    assert server.num_repeated == 0


def test_a_repeated_step_is_exact_when_rows_have_stopped(server: Server) -> None:
    """See test_a_request_that_stopped_takes_no_one_with_it; this step is not planned."""
    inside.do_not_check_steps(server.backend)
    server.capture(2)
    lens = [25, 31]
    server.replay(server.view(lens, 2))
    lens = [28, 33]
    view = server.view(lens, 2)
    server.replay(view)
    assert server.num_repeated == 1
    before = server.table.clone()
    (plan,) = (each._plan for each in inside.attentions(server.plans))
    stopped = next(span[0] for span in plan.gather_spans.tolist() if span[1] == 0) // DRAFTS
    server.table[ROWS[stopped]] = 599
    q, out = server.attend(view)
    assert_request_exact(server, 1 - stopped, lens, before, q, out)


def test_what_has_long_been_committed_is_read_once_again(server: Server) -> None:
    lens = [25, 31]
    server.backend.init_forward_metadata_out_graph(server.view(lens, 2))
    for _ in range(2):
        lens = [lens[0] + MAX_READ_APART, lens[1] + 1]
        view = server.view(lens, 2)
        server.backend.init_forward_metadata_out_graph(view)
        server.assert_exact(view, lens, CHAIN)
    # 32 accepted tokens are still read apart, 64 are not.
    assert (server.plans.stats.plans_built, server.plans.stats.plans_reused) == (2, 1)
    begins = {path[-1][2] for path in inside.microbatch(server.backend).builder._forest.paths()}
    assert begins == {lens[0], lens[1]}


def test_a_request_that_stopped_takes_no_one_with_it(server: Server) -> None:
    # The row of a request that stopped is verified once more, then given to the next prompt while
    # that step may still run; here, before it runs.
    lens = [25, 31]
    view = server.view(lens, 2)
    server.backend.init_forward_metadata_out_graph(view)
    before = server.table.clone()
    (plan,) = (each._plan for each in inside.attentions(server.plans))
    spans = [span for span in plan.gather_spans.tolist() if span[1] == 0]
    assert spans  # the prefix is gathered through the row of one of the requests
    stopped = spans[0][0] // DRAFTS
    server.table[ROWS[stopped]] = 599
    q, out = server.attend(view)
    assert_request_exact(server, 1 - stopped, lens, before, q, out)
    assert out.isfinite().all()  # of the other: thrown away, but computed


def test_a_row_that_moved_is_read_anew(server: Server) -> None:
    lens = [25, 31]
    server.backend.init_forward_metadata_out_graph(server.view(lens, 2))
    # Retracted and back again: the same request, with other slots.
    server.table[1, 20:60] = torch.arange(400, 440)
    REQUEST_TRACKER.invalidate([server.reqs[0]])
    view = server.view(lens, 2)
    server.backend.init_forward_metadata_out_graph(view)
    server.assert_exact(view, lens, CHAIN)
    assert server.plans.stats.plans_built == 2


def test_decode_steps_in_between(server: Server) -> None:
    lens = [25, 31]
    server.backend.init_forward_metadata_out_graph(server.view(lens, 2))
    view = decode_batch(list(ROWS), [26, 32], [1, 2])
    server.backend.init_forward_metadata(view)
    q = torch.randn(2, QO_HEADS, HEAD_DIM)
    out = server.backend.forward_decode(q, None, None, server.runner.model[0], view)
    exact = dense(q[0], server.runner.token_to_kv_pool, 0, server.table[1, :26].long())
    torch.testing.assert_close(out.view_as(q)[0].double(), exact, atol=2e-6, rtol=2e-6)
    view = server.view([27, 33], 2)
    server.backend.init_forward_metadata_out_graph(view)
    server.assert_exact(view, [27, 33], CHAIN)


def test_branches_do_not_read_each_other(branching: Server) -> None:
    lens = [25, 31]
    for size, reads in ((2, BRANCHES), (2, CHAIN), (4, BRANCHES), (0, BRANCHES)):
        lens = [length + 2 for length in lens]
        view = branching.view(lens, size, torch.cat([reads.flatten()] * 2))
        if size:
            branching.backend.init_forward_metadata_out_graph(view)
        else:
            branching.backend.init_forward_metadata(view)
        branching.assert_exact(view, lens, reads)
    assert branching.plans.stats.plans_reused == 1  # eager steps have plans of their own


def test_capture_verifies_requests_that_nobody_knows(
    server: Server, branching: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
    for each in (server, branching):
        view = each.view([1, 1], 2, torch.zeros(0, dtype=torch.bool))
        each.backend.init_forward_metadata_out_graph(view, in_capture=True)
        _, out = each.attend(view)
        assert out.isfinite().all()
        assert inside.planner(each.backend).counters()["verify"]["steps"] == 0


def test_the_default_backend_prepares_no_verify_step(server: Server) -> None:
    # But its tables of graphs are there: SGLang lets drafts write their masks into them.
    assert server.backend.calls == ["graphs of 4 rows"]
    server.backend.init_forward_metadata_out_graph(server.view([25, 31], 2))
    server.backend.init_forward_metadata_in_graph(server.view([25, 31], 2))
    server.backend.init_forward_metadata(server.view([25, 31], 0))
    assert server.backend.calls == ["graphs of 4 rows"]


def test_a_step_of_a_plan_stream_is_prepared_once(server: Server) -> None:
    """SGLang asks the default backend if it has a layer, and that one may refuse."""
    view = server.view([25, 31], 2)
    server.backend.init_forward_metadata_out_graph(view)
    server.backend.update_verify_buffers_to_fill_after_draft(view.spec_info, 2)
    server.assert_exact(view, [25, 31], CHAIN)
    inside.layer_support(server.backend).fall_back(0, Unsupported("attention", "of a test"))
    with pytest.raises(NotImplementedError):
        server.backend.update_verify_buffers_to_fill_after_draft(view.spec_info, 2)


def test_prefill_is_the_default_backends(server: Server) -> None:
    server.backend.calls.clear()
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    q = torch.zeros(1, QO_HEADS * HEAD_DIM)
    server.backend.forward_extend(q, None, None, server.runner.model[0], batch)
    assert server.backend.calls == ["extend"]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_masks_over_the_drafts_alone(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = torch.tensor([2, 4])
    trees = torch.stack([BRANCHES, CHAIN])
    more = torch.zeros(7 if on_cpu else 0, dtype=torch.bool)  # of a buffer
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    assert torch.equal(square_masks(torch.cat([trees.flatten(), more]), lens, DRAFTS), trees)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of SGLang's module."""
    module = SimpleNamespace(USE_FULL_MASK=True)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.ngram_worker", module)
    monkeypatch.setattr("sglang.srt.speculative.ngram_worker", module, raising=False)
    return module


@pytest.mark.parametrize(
    ("arguments", "changes", "is_full"),
    [
        ({"speculative_algorithm": "NGRAM"}, {}, False),
        ({"speculative_algorithm": "EAGLE"}, {}, True),
        ({"speculative_algorithm": "NGRAM"}, {"device": "cpu"}, True),
        # The default backend of a fallback layer may read them.
        ({"speculative_algorithm": "NGRAM"}, {"model": layers(sliding_window_size=128)}, True),
        ({"speculative_algorithm": "NGRAM", "enable_watermark": True}, {}, True),
    ],
)
def test_full_masks_are_made_for_other_readers_alone(
    arguments: dict[str, Any],
    changes: dict[str, Any],
    is_full: bool,
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    server_context: Any,
) -> None:
    monkeypatch.setattr(layer_rules, "_device_reason", lambda *_: None)
    made = server_arguments(speculative_num_draft_tokens=DRAFTS, **arguments)
    backend = pat_backend(runner(server_args=made, **({"device": "cuda"} | changes)))
    assert inside.planner(backend).verifies_trees is (arguments["speculative_algorithm"] == "NGRAM")
    assert worker.USE_FULL_MASK is is_full


def test_full_masks_are_made_for_a_model_that_pat_does_not_decode(
    worker: Any, server_context: Any
) -> None:
    """The model that this process served before may have left the other ones."""
    worker.USE_FULL_MASK = False
    made = server_arguments(speculative_algorithm="NGRAM", speculative_num_draft_tokens=DRAFTS)
    backend = pat_backend(runner(server_args=made, model_config=config(is_encoder_decoder=True)))
    assert not isinstance(backend, PatMixin)
    assert worker.USE_FULL_MASK


def test_sglang_may_write_masks_over_the_drafts_alone(
    branching: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a buffer of as many requests as graphs have; the default backend's if it has a layer."""
    given = branching.backend.verify_mask
    assert given.mode is TreeMaskMode.QLEN_ONLY
    assert (given.fits(4), given.fits(5)) == (True, False)
    assert len(given.buffer) == 4 * DRAFTS**2
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    lens = [25, 31]
    for size, reads in ((2, BRANCHES), (4, CHAIN), (0, BRANCHES)):
        lens = [length + 2 for length in lens]
        given.buffer.fill_(True)
        given.buffer[: 2 * DRAFTS**2] = torch.cat([reads.flatten()] * 2)
        view = branching.view(lens, size, given.buffer)
        if size:
            branching.backend.init_forward_metadata_out_graph(view)
        else:
            branching.backend.init_forward_metadata(view)
        branching.assert_exact(view, lens, reads)
    inside.layer_support(branching.backend).fall_back(0, Unsupported("attention", "of a test"))
    assert branching.backend.verify_mask is None


@pytest.mark.parametrize("when", ["step", "buffer", "own", "padded", "warm-up", "capture"])
def test_full_masks_are_back_with_a_layer_that_is_delegated_late(
    when: str, worker: Any, branching: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its default backend may read them, in this step too."""
    worker.USE_FULL_MASK = when in ("buffer", "own")  # own: a batch that is larger than all graphs
    lens = [25, 31]
    mask, is_known = torch.cat([BRANCHES.flatten(), CHAIN.flatten()]), True
    if when == "buffer":
        buffer = branching.backend.verify_mask.buffer
        buffer[: len(mask)] = mask
        mask = buffer
    if when in ("warm-up", "capture"):
        mask, is_known = torch.ones(100, dtype=torch.bool), False
        monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
    view = branching.view(lens, 2 if when == "capture" else 0, mask)
    if when == "padded":
        view = mlp_padded(view, branching.backend, 10, DRAFTS)
    if when == "capture":
        branching.backend.init_forward_metadata_out_graph(view, in_capture=True)
    else:
        branching.backend.init_forward_metadata(view)
    branching.backend.calls.clear()
    q = torch.zeros(10 if when == "padded" else 6, QO_HEADS * HEAD_DIM)
    branching.backend.forward_extend(q, None, None, branching.runner.model[0], view, rope=1)
    assert worker.USE_FULL_MASK
    assert branching.backend.calls[-1] == "extend"
    assert "out_graph" in branching.backend.calls[0]  # the default backend has been prepared
    assert 0 in inside.planner(branching.backend).layer_support.fallback
    exact = full_mask(lens, [BRANCHES, CHAIN]) if is_known else mask
    assert torch.equal(view.spec_info.custom_mask, exact)


def full_mask(lens: list[int], trees: list[torch.Tensor]) -> torch.Tensor:
    """Mask in the format of SGLang's n-gram worker."""
    rows = [
        torch.cat([torch.ones(DRAFTS, length, dtype=torch.bool), tree], dim=1).flatten()
        for length, tree in zip(lens, trees, strict=True)
    ]
    return torch.cat(rows)


def test_masks_over_all_that_a_request_has(monkeypatch: pytest.MonkeyPatch) -> None:
    lens, trees = [2, 4], [BRANCHES, CHAIN]
    mask = full_mask(lens, trees)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert torch.equal(square_masks(mask, torch.tensor(lens), DRAFTS), torch.stack(trees))


def test_lengths_of_rows() -> None:
    lens = np.array([5, 0, 7], dtype=np.int32)
    assert RowShape.of_drafts(2, are_chains=True).lengths(lens).tolist() == [6, 7, 0, 0, 8, 9]
    assert RowShape.of_drafts(2, are_chains=False).lengths(lens).tolist() == [6, 6, 0, 0, 8, 8]


def test_a_batch_that_is_planned_before_its_forward_is_one_step(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's graph runner loads a verify batch first, and runs it later."""
    monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
    inside.forget_requests()
    target = SimpleNamespace(is_draft_worker=False)
    graphs = SimpleNamespace(model_runner=target)
    scheduled = SimpleNamespace(reqs=server.reqs, tree_cache=server.step.tree)
    seen: list[Any] = []
    for _ in range(2):
        batch = server.view([25, 31], 0)
        request_tracker._after_init_new(batch, object, scheduled, target)
        # A draft model's batch of the same requests, in which they do not move.
        draft = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
        request_tracker._after_init_new(
            draft, object, scheduled, SimpleNamespace(is_draft_worker=True)
        )
        draft_requests._around_load_batch(
            lambda runner, batch: seen.append(REQUEST_TRACKER.claim_step()), graphs, batch
        )
        request_tracker._around_forward(lambda runner, batch: None, target, batch)
    assert seen[0] is not None
    assert seen[0].reqs is seen[1].reqs
    assert place(seen[0].reqs[0]).req_pool_idx == ROWS[0]
