"""Draft models that give a block of drafts at once (DFLASH, DSPARK), and their verify steps.

They are shown to the backends as SGLang's runners show them.

Without a GPU and so without graphs: torch executes the plans, in the same order of calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_draft_models import ROWS, DraftScene, kv_pool
from sglang_fakes import (
    HEAD_DIM,
    QO_HEADS,
    DefaultBackend,
    decode_batch,
    dense,
    drafts_to_verify,
    layers,
    pat_backend,
    replay_view,
)
from sglang_trees import TREE_KINDS, late_lengths, place

from sglang_pat.executors.reference import ReferenceExecutor
from sglang_pat.reasons import StepReason
from sglang_pat.sglang import backend
from sglang_pat.sglang.report import layer_report
from sglang_pat.sglang.speculative import attach as speculative_attach
from sglang_pat.sglang.speculative import draft_requests
from sglang_pat.sglang.speculative.draft_requests import block_hook
from sglang_pat.sglang.start import argument_rewrite
from sglang_pat.sglang.start.hooks import check_hooks
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

BLOCK, GRAPH = 4, 4
# The draft model's first layer reads whole blocks, the second one is causal.
READS = (torch.ones(BLOCK, BLOCK).bool(), torch.ones(BLOCK, BLOCK).tril().bool())


class Blocks(DraftScene):
    """A served model, and a draft model whose steps give blocks. Graphs hold `GRAPH` requests."""

    def __init__(
        self,
        tree_kind: str = TREE_KINDS[0],
        *,
        algorithm: str = "DFLASH",
        is_checked: bool = True,
        named: str | None = None,
        has_window: bool = False,
        default: Any = None,
    ) -> None:
        arguments = {
            "speculative_algorithm": algorithm,
            "speculative_draft_attention_backend": "triton",  # resolved
            "speculative_draft_window_size": 64 if has_window else None,
        }
        DraftScene.__init__(self, tree_kind, num_drafts=BLOCK, arguments=arguments)
        self.arguments._sglang_pat_draft_backend = named
        self.target = self.new_runner(token_to_kv_pool=kv_pool(2), is_draft_worker=False)
        self.served = pat_backend(self.target)
        self.served.init_cuda_graph_state(GRAPH, GRAPH * BLOCK)
        model = layers()
        model[0].attn_type = AttentionType.ENCODER_ONLY
        self.backend: Any = DefaultBackend() if default is None else default
        self.runner = self.new_runner(
            model=model,
            token_to_kv_pool=kv_pool(1),
            is_draft_worker=True,
            attn_backend=self.backend,
        )
        self.worker = SimpleNamespace(
            draft_model_runner=self.runner,
            use_compact_draft_cache=has_window,
            _draft_block_spec_info=drafts_to_verify(BLOCK),
        )
        speculative_attach._after_block_backend(None, self.worker)
        if isinstance(self.backend, backend.PatMixin):
            self.backend.init_cuda_graph_state(GRAPH, GRAPH * BLOCK)
            if is_checked:
                for each in (inside.planner(self.served), inside.planner(self.backend)):
                    inside.check_steps(each)
        # SGLang's buffers of graphs, and what the graph of `size` requests was captured with.
        self.slots = torch.zeros(GRAPH * BLOCK, dtype=torch.int64)
        self.rows = torch.zeros(GRAPH, dtype=torch.int64)
        self.lens = torch.ones(GRAPH, dtype=torch.int64)

    def slots_of(self, lens: list[int]) -> list[int]:
        rows = zip(ROWS, lens, strict=True)
        return [int(self.table[row, n + i]) for row, n in rows for i in range(BLOCK)]

    def captured(self, size: int) -> Any:
        """The batch of which SGLang captures a graph: it lies in its buffers."""
        view = decode_batch([0] * size, [1] * size, [])
        view.out_cache_loc = self.slots[: size * BLOCK]
        view.req_pool_indices, view.seq_lens = self.rows[:size], self.lens[:size]
        view.forward_mode = ForwardMode.TARGET_VERIFY
        view.spec_info = drafts_to_verify(BLOCK)
        return view

    def capture(self, attending: Any, size: int) -> Any:
        view = self.captured(size)
        attending.init_forward_metadata_out_graph(view, in_capture=True)
        attending.init_forward_metadata_in_graph(view)
        return view

    def view(self, lens: list[int], size: int, bound: int | None = BLOCK) -> Any:
        """An eager batch, or what SGLang shows before it replays the graph of `size` requests.

        bound: by how much the lengths on the host are too long. None: there are none.
        """
        slots, more = self.slots_of(lens), {"forward_mode": ForwardMode.TARGET_VERIFY}
        if size:
            self.slots[: len(slots)] = torch.tensor(slots)
            self.slots[len(slots) :] = 0
            view = replay_view(list(ROWS), lens, slots, size, **more)
            self.rows[:size], self.lens[:size] = view.req_pool_indices, view.seq_lens
            view.req_pool_indices, view.seq_lens = self.rows[:size], self.lens[:size]
        else:
            view = decode_batch(list(ROWS), lens, slots)
            vars(view).update(more)
        view.spec_info = drafts_to_verify(BLOCK)
        view.seq_lens_cpu = None if bound is None else view.seq_lens + bound
        return view

    def prepare(self, attending: Any, view: Any, size: int) -> None:
        if not size:
            attending.init_forward_metadata(view)
            return
        attending.init_forward_metadata_out_graph(view)
        attending.init_forward_metadata_in_graph(view)  # the graph does
        for attention in inside.attentions(
            inside.plans(attending)
        ):  # kernels read it in each replay
            attention._executor.reuse_plan(attention._executor._step)

    def draft(self, view: Any, size: int) -> None:
        """Prepare the step of the draft model, as its worker does within its own method."""
        draft_requests._around_blocks(
            lambda worker, batch: self.prepare(self.backend, view, size),
            self.worker,
            self.scheduled,
        )

    def assert_block(
        self, view: Any, lens: list[int], attending: Any, runner: Any, reads: tuple[Any, Any]
    ) -> None:
        """Check that each token of a block reads its request, and tokens of the block by `reads`.

        In both layers. view: of the capture if there is a graph, whose kernels run again.
        """
        for layer in range(2):
            q = torch.randn(view.batch_size * BLOCK, QO_HEADS, HEAD_DIM)
            out = attending.forward_extend(q, None, None, runner.model[layer], view)
            out = out.view(q.shape)
            for row in range(len(lens) * BLOCK):
                request, token = divmod(row, BLOCK)
                table, length = self.table[ROWS[request]].long(), lens[request]
                block = table[length : length + BLOCK][reads[layer][token]]
                slots = torch.cat([table[:length], block])
                exact = dense(q[row], runner.token_to_kv_pool, layer, slots)
                torch.testing.assert_close(out[row].double(), exact, atol=2e-6, rtol=2e-6)
            assert out.isfinite().all()  # padding, too


def commit(scene: Blocks, lens: list[int]) -> None:
    """SGLang has processed the results up to these lengths."""
    for req, length in zip(scene.reqs, lens, strict=True):
        place(req).kv_committed_len = length


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace) -> None:
    """Torch passes for something that can be captured; nothing is left of other tests."""
    server_context.observability.decode_log_interval = 1000
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
    inside.forget_requests()
    monkeypatch.setattr(REQUEST_TRACKER, "_step", None)
    monkeypatch.setattr(speculative_attach._TargetModel, "planner", None)


@pytest.mark.parametrize("bound", [0, 3, 20, None])
@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("tree_kind", TREE_KINDS)
def test_each_token_of_a_block_reads_its_block(
    tree_kind: str, size: int, bound: int | None
) -> None:
    """Lengths on the host are upper bounds, and late."""
    scene = Blocks(tree_kind)
    captured = scene.capture(scene.backend, size) if size else None
    for lens in late_lengths(scene.reqs):
        view = scene.view(lens, size, bound)
        scene.draft(view, size)
        scene.assert_block(captured or view, lens, scene.backend, scene.runner, READS)
    assert scene.counters["draft"]["rows"] == 4 * 2 * BLOCK
    builder = inside.microbatch(scene.backend).builder
    assert sum(builder.steps_without_sharing.values()) == bool(size), "the capture alone"
    assert builder.changes["join"] == 2 * BLOCK, "the requests stay the same"


@pytest.mark.parametrize("bound", [0, 3, 20, None])
@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_blocks_are_verified_as_chains(algorithm: str, size: int, bound: int | None) -> None:
    """Late lengths included. Eager steps are planned before their forward."""
    scene = Blocks(algorithm=algorithm)
    captured = scene.capture(scene.served, size) if size else None
    for lens in late_lengths(scene.reqs):
        view = scene.view(lens, size, bound)
        request_tracker._after_init_new(view, object, scene.scheduled, scene.target)
        if size:
            graphs = SimpleNamespace(model_runner=scene.target)
            draft_requests._around_load_batch(
                lambda _, batch: scene.prepare(scene.served, batch, size),
                graphs,
                view,
            )
        else:
            scene.prepare(scene.served, view, 0)
            # 0.5.23 has it planned when it runs, too.
            request_tracker._around_forward(
                lambda _, batch: scene.prepare(scene.served, batch, 0), scene.target, view
            )
        chain = (READS[1], READS[1])
        scene.assert_block(captured or view, lens, scene.served, scene.target, chain)
    assert scene.counters["verify"] == {"steps": 4, "rows": 4 * 2 * BLOCK}
    assert sum(scene.counters["steps_without_sharing"].values()) == bool(size), "the capture alone"
    assert scene.counters["batch_changes"]["join"] == 2 * BLOCK, "the requests stay the same"


def test_blocks_are_repeated_without_a_plan() -> None:
    """They answer and count as those that are planned."""
    counts = []
    for is_checked in (True, False):
        inside.forget_requests()
        scene = Blocks(is_checked=is_checked)
        captured = scene.capture(scene.backend, 2)
        for lens in late_lengths(scene.reqs):
            view = scene.view(lens, 2)
            scene.draft(view, 2)
            scene.assert_block(captured, lens, scene.backend, scene.runner, READS)
        repeated = inside.num_repeated(scene.backend)
        assert repeated == (0 if is_checked else 3)
        counts.append({k: v for k, v in scene.counters["draft"].items() if "plans" not in k})
    assert counts[0] == counts[1] == {"steps": 4, "rows": 4 * 2 * BLOCK}


def test_a_block_of_a_request_that_outgrows_the_plan_is_planned() -> None:
    scene = Blocks(is_checked=False)
    captured = scene.capture(scene.backend, 2)
    for lens in ([25, 31], [27, 33], [67, 33]):
        commit(scene, lens)
        view = scene.view(lens, 2)
        scene.draft(view, 2)
        scene.assert_block(captured, lens, scene.backend, scene.runner, READS)
    assert inside.reasons(scene.backend) == {StepReason.FIRST: 1, StepReason.LENGTHS: 1}


def test_a_graph_reads_a_block_where_it_was_captured() -> None:
    """Slots in SGLang's buffer, and what is read of them in memory that stays."""
    scene = Blocks()
    captured = scene.capture(scene.backend, 4)
    before = [
        each.extra_kv_of(layer)
        for each in inside.planner(scene.backend).kinds
        for layer in scene.runner.model
    ]
    held = [apart.keys(captured, 4 * BLOCK) for apart in before]
    for lens in late_lengths(scene.reqs):
        scene.draft(scene.view(lens, 4), 4)
    for apart, (slots, biases) in zip(before, held, strict=True):
        now = apart.keys(captured, 4 * BLOCK)
        assert [each.data_ptr() for each in now] == [slots.data_ptr(), biases.data_ptr()]
        assert slots.data_ptr() == scene.slots.data_ptr()
        assert biases.is_contiguous()


def test_outside_of_its_worker_a_draft_model_knows_no_requests() -> None:
    scene = Blocks()
    view = scene.view([25, 31], 0)
    scene.backend.init_forward_metadata(view)
    scene.assert_block(view, [25, 31], scene.backend, scene.runner, READS)
    assert scene.counters["draft"]["steps"] == 0
    idle = SimpleNamespace(reqs=[], tree_cache=scene.scheduled.tree_cache)
    draft_requests._around_blocks(
        lambda worker, batch: scene.backend.init_forward_metadata(view), scene.worker, idle
    )
    assert scene.counters["draft"]["steps"] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"named": "fa3"}, "--speculative-draft-attention-backend fa3"),
        ({"has_window": True}, "--speculative-draft-window-size 64"),
        (
            {"default": SimpleNamespace(init_forward_metadata=None)},
            "SimpleNamespace, which is closed",
        ),
    ],
    ids=["named", "a table of its own", "closed"],
)
def test_draft_models_that_are_left_to_the_default_backend(
    change: dict[str, Any], reason: str
) -> None:
    scene = Blocks(**change)
    assert not isinstance(scene.backend, backend.PatMixin)
    told = layer_report._after_get_init_info({})["pat"]
    assert told["pat_layers"] == 2
    assert told["draft_model"]["default_layers"] == {reason: 2}
    assert told["draft_model"]["default_backend"] == "triton"


def test_a_layer_that_is_passed_more_is_left_to_the_default_backend() -> None:
    scene = Blocks()
    commit(scene, [25, 31])
    view = scene.view([25, 31], 0)
    scene.draft(view, 0)
    q = torch.randn(2 * BLOCK, QO_HEADS, HEAD_DIM)
    scene.backend.forward_extend(q, None, None, scene.runner.model[0], view, rope=1)
    assert scene.backend.calls[-1] == "extend"
    told = layer_report._after_get_init_info({})["pat"]
    assert told["draft_model"]["default_layers"] == {"the argument rope": 1}


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_the_workers_are_hooked(algorithm: str) -> None:
    """The hooks fit the installed SGLang."""
    Blocks(algorithm=algorithm)
    check_hooks([block_hook(algorithm)])


def test_the_backend_that_was_named_for_the_draft_model_is_kept() -> None:
    """SGLang writes the resolved one where it was named."""
    for named in (None, "fa3"):
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        arguments = SimpleNamespace(
            **dict.fromkeys(names), speculative_draft_attention_backend=named
        )
        arguments.attention_backend = "pat"
        argument_rewrite._substitute(arguments)
        assert argument_rewrite.named_draft_backend(arguments) == named
