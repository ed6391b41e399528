"""Draft models that branch (`--speculative-eagle-topk` above 1).

They are shown to the backend as SGLang's runners show them.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_draft_models import ROWS, DraftScene, kv_pool
from sglang_fakes import (
    HEAD_DIM,
    QO_HEADS,
    DefaultBackend,
    decode_batch,
    dense,
    drafts_to_verify,
    pat_backend,
    replay_view,
)
from sglang_trees import TREE_KINDS, late_lengths

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.reasons import StepReason
from sglang_pat.sglang import backend
from sglang_pat.sglang.speculative import attach as speculative_attach
from sglang_pat.sglang.speculative import backends
from sglang_pat.sglang.speculative.steps import DraftTreeSteps
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

STEPS, TOPK, DRAFTS = 3, 2, 5
WIDTH = STEPS + 1  # slots of a branch: the last draft has one, which no step reads
# The second and the third token are children of the first; then one below each.
TREE = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]],
    dtype=torch.bool,
)
PATH = torch.ones(DRAFTS, DRAFTS, dtype=torch.bool).tril()


class Steps:
    """In place of a default backend's container of the steps of a round."""

    def __init__(self) -> None:
        self.attn_backends = [DefaultBackend() for _ in range(STEPS)]

    def init_forward_metadata(self, forward_batch: Any) -> None: ...

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...


class Branching(DraftScene):
    """A served model, and a draft model with rounds and with steps that read what was verified."""

    def __init__(self, tree_kind: str = TREE_KINDS[0], *, is_checked: bool = True) -> None:
        arguments = {"speculative_eagle_topk": TOPK}
        super().__init__(tree_kind, num_drafts=DRAFTS, arguments=arguments)
        self.target = self.new_runner(token_to_kv_pool=kv_pool(2), is_draft_worker=False)
        self.served = pat_backend(self.target)
        self.served.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTS)
        self.runner = self.new_runner(token_to_kv_pool=kv_pool(1), is_draft_worker=True)
        self.steps: Any = Steps()
        self.extend: Any = DefaultBackend()
        factory = SimpleNamespace(draft_model_runner=self.runner)
        speculative_attach._after_create_decode_backend(self.steps, factory)
        speculative_attach._after_create_extend_backend(self.extend, factory)
        assert isinstance(self.steps, backends.PatDraftSteps)
        assert isinstance(self.extend, backend.PatMixin)
        if is_checked:
            for each in (inside.planner(self.served), inside.planner(self.steps)):
                inside.check_steps(each)
        self.steps.init_cuda_graph_state(4, 4 * TOPK)
        # SGLang's buffer for the slots of a round: [requests, branches, drafts].
        self.slots = torch.zeros(4 * TOPK * WIDTH, dtype=torch.int64)

    @property
    def reasons(self) -> Any:
        return inside.reasons(self.steps)

    def view(self, lens: list[int], size: int = 0) -> Any:
        """SGLang's view of a round: eager, or before it replays the graph of `size` requests.

        The branches of a request have slots far behind its own.
        """
        own = 700 + torch.randperm(100)[: len(lens) * TOPK * WIDTH]
        if size:
            self.slots.zero_()
            self.slots[: len(own)] = own
            view = replay_view(list(ROWS), lens, [0] * len(lens), size, out_cache_loc=own)
        else:
            view = decode_batch(list(ROWS), lens, [0] * len(lens))
            view.out_cache_loc = own
        request_tracker._after_init_new(view, object, self.scheduled, self.runner)
        return view

    def capture(self, size: int) -> None:
        """Capture the graph of `size` requests, as far as that is seen without one."""
        view = decode_batch([0] * size, [1] * size, [0] * size)
        view.out_cache_loc = self.slots[: size * TOPK * WIDTH]
        self.steps.init_forward_metadata_out_graph(view, in_capture=True)
        self.steps.init_forward_metadata_in_graph(view)
        self.attend(view, 0)

    def prepare(self, view: Any, size: int) -> None:
        if size:
            self.steps.init_forward_metadata_out_graph(view)
            self.steps.init_forward_metadata_in_graph(view)  # the graph does
            self.graph_reads(size)
            for attention in inside.attentions(
                inside.plans(self.steps)
            ):  # kernels read it in each replay
                attention._executor.reuse_plan(attention._executor._step)
        else:
            self.steps.init_forward_metadata(view)

    def graph_reads(self, size: int) -> None:
        """Let rows read the slots that the graph of `size` requests has captured, and no others."""
        round_of(self.steps).extra_kv.set_slots(self.slots[: size * TOPK * WIDTH], size * TOPK)

    def attend(self, view: Any, step: int, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.randn(view.batch_size * TOPK, QO_HEADS, HEAD_DIM)
        out = self.steps.attn_backends[step].forward_decode(
            q, None, None, self.runner.model[layer], view
        )
        return q, out.view(q.shape)

    def assert_round(self, view: Any, lens: list[int]) -> None:
        """Each row reads its request, and its own branch up to the step."""
        branches = view.out_cache_loc.view(-1, WIDTH)
        for step in range(STEPS):
            for layer in range(2):
                q, out = self.attend(view, step, layer)
                for row in range(len(lens) * TOPK):
                    request = row // TOPK
                    before = self.table[ROWS[request], : lens[request]].long()
                    slots = torch.cat([before, branches[row, : step + 1]])
                    exact = dense(q[row], self.runner.token_to_kv_pool, layer, slots)
                    torch.testing.assert_close(out[row].double(), exact, atol=2e-6, rtol=2e-6)
                assert out.isfinite().all()  # padding, too


def round_of(steps: Any) -> DraftTreeSteps:
    (kind,) = inside.planner(steps).kinds
    assert isinstance(kind, DraftTreeSteps)
    return kind


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace) -> None:
    """Torch passes for something that can be captured; nothing is left of other tests."""
    server_context.observability.decode_log_interval = 1000
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    inside.forget_requests()
    monkeypatch.setattr(speculative_attach._TargetModel, "planner", None)


@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("tree_kind", TREE_KINDS)
def test_each_branch_reads_its_own_drafts(tree_kind: str, size: int) -> None:
    scene = Branching(tree_kind)
    if size:
        scene.capture(size)
    for lens in ([25, 31], [26, 33], [20, 34], [67, 74]):
        view = scene.view(lens, size)
        scene.prepare(view, size)
        scene.assert_round(view, lens)


@pytest.mark.parametrize("size", [0, 2])
def test_a_round_does_with_lengths_that_the_host_learns_late(size: int) -> None:
    scene = Branching()
    if size:
        scene.capture(size)
    for lens in late_lengths(scene.reqs):
        view = scene.view(lens, size)
        view.seq_lens_cpu = None
        scene.prepare(view, size)
        scene.assert_round(view, lens)


def test_a_larger_round_without_a_graph_leaves_graphs_what_they_read() -> None:
    scene = Branching()
    scene.steps.init_cuda_graph_state(1, TOPK)
    scene.capture(1)
    _, captured = round_of(scene.steps).extra_kv.keys(None, TOPK)
    view = scene.view([25, 31])
    scene.prepare(view, 0)
    scene.assert_round(view, [25, 31])
    scene.capture(1)
    _, biases = round_of(scene.steps).extra_kv.keys(None, TOPK)
    assert biases.data_ptr() == captured.data_ptr()


def test_graphs_of_all_sizes_read_biases_that_stay() -> None:
    scene = Branching()
    places = []
    for size in (1, 2, 4):  # those of 1 stay those of 4, in whatever order they are captured
        scene.capture(size)
        places.append(round_of(scene.steps).extra_kv.keys(None, size * TOPK)[1].data_ptr())
    assert len({*places}) == 1


def test_rounds_are_repeated_without_a_plan() -> None:
    """They answer and count as those that are planned."""
    counts = []
    for is_checked in (True, False):
        inside.forget_requests()
        scene = Branching(is_checked=is_checked)
        scene.capture(2)
        for lens in ([25, 31], [26, 33], [29, 34], [55, 58], [56, 60]):
            view = scene.view(lens, 2)
            scene.prepare(view, 2)
            scene.assert_round(view, lens)
        repeated = inside.num_repeated(scene.steps)
        assert repeated == (0 if is_checked else 4)
        counts.append({k: v for k, v in scene.counters["draft"].items() if "plans" not in k})
        counts[-1] |= scene.counters["draft_kv_tokens"]
    assert counts[0] == counts[1]
    assert counts[0]["rows"] == 5 * STEPS * 2 * TOPK


def test_a_round_whose_request_outgrows_the_plan_is_planned() -> None:
    scene = Branching(is_checked=False)
    scene.capture(2)
    for lens in ([25, 31], [26, 33], [26 + 40, 33]):
        view = scene.view(lens, 2)
        scene.prepare(view, 2)
        scene.assert_round(view, lens)
    assert scene.reasons == {StepReason.FIRST: 1, StepReason.LENGTHS: 1}


@pytest.mark.parametrize("size", [0, 2, 4])
def test_verified_trees_are_read_as_paths_by_the_draft_model(size: int) -> None:
    scene = Branching()
    for lens in ([25, 31], [27, 34]):
        slots = [
            int(scene.table[r, n + i])
            for r, n in zip(ROWS, lens, strict=True)
            for i in range(DRAFTS)
        ]
        mask = TREE.flatten().repeat(2)
        more: dict[str, Any] = {"spec_info": drafts_to_verify(DRAFTS, mask)}
        if size:
            padded = slots + [0] * (size * DRAFTS - len(slots))
            view = replay_view(list(ROWS), lens, padded, size, **more)
        else:
            view = decode_batch(list(ROWS), lens, slots, **more)
        view.forward_mode = ForwardMode.TARGET_VERIFY
        request_tracker._after_init_new(view, object, scene.scheduled, scene.target)
        with REQUEST_TRACKER.running(view):
            prepare = (
                scene.served.init_forward_metadata_out_graph
                if size
                else scene.served.init_forward_metadata
            )
            prepare(view)
            if size:
                scene.served.init_forward_metadata_in_graph(view)
            assert_drafts(scene, scene.served, scene.target, view, lens, TREE)

        ends = [length + DRAFTS for length in lens]
        more["input_ids"] = torch.zeros(len(slots))
        made = decode_batch(list(ROWS), ends, slots, **more)
        made.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        request_tracker._after_init_new(made, object, scene.scheduled, scene.runner)
        scene.extend.init_forward_metadata(made)
        assert_drafts(scene, scene.extend, scene.runner, made, lens, PATH)
    assert scene.counters["draft_extend"]["steps"] == 2
    assert scene.counters["plans_built"] == 1, "the verify step's plan serves both"


def assert_drafts(
    scene: Branching, attending: Any, runner: Any, view: Any, lens: list[int], reads: torch.Tensor
) -> None:
    """Each draft token reads its request, and those of its step that `reads` says."""
    q = torch.randn(view.batch_size * DRAFTS, QO_HEADS, HEAD_DIM)
    out = attending.forward_extend(q, None, None, runner.model[0], view).view(q.shape)
    for row in range(len(lens) * DRAFTS):
        request, draft = divmod(row, DRAFTS)
        table, length = scene.table[ROWS[request]].long(), lens[request]
        slots = torch.cat([table[:length], table[length : length + DRAFTS][reads[draft]]])
        exact = dense(q[row], runner.token_to_kv_pool, 0, slots)
        torch.testing.assert_close(out[row].double(), exact, atol=2e-6, rtol=2e-6)
    assert out.isfinite().all()
