"""Models and two requests with a common prefix, for tests of decode steps with and without drafts.

SGLang's own prefix caches hold the requests. The scene calls backends as SGLang's workers and
runners do. There is no GPU and so no graph: torch executes the plans, in the same order of calls.

    scene = Scene(drafts=3)
    scene.served.capture(2)
    view = scene.served.step([25, 31], graph=2)  # a verify step, in the graph of two requests
    scene.served.assert_exact(view, [25, 31])  # each row read its slots, each of them once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import torch
from fakes.backends import (
    HEAD_DIM,
    KV_HEADS,
    DefaultBackend,
    KVPool,
    decode_batch,
    dense_rows,
    drafts_to_verify,
    layers,
    mlp_padded,
    num_rows,
    pat_backend,
    replay_view,
    runner,
    server_arguments,
)
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_trees import TREE_KINDS, Tree, place

from sglang_pat.sglang.speculative import attach
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER

WIDTH, SLOTS = 300, 900  # columns of the table, and slots of a pool; the last 200 are free
PREFIX, PREFIX_SLOTS = list(range(1, 21)), list(range(100, 120))
ROWS = (1, 2)
GRAPH = 4  # requests of the largest graph
# A token with two branches: the third token does not read the second.
BRANCHES = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
# The forward of the last step. It is global, since a scene that is collected late would end another
# scene's forward.
_RUNNING = ExitStack()


def kv_pool(seed: int) -> KVPool:
    """Return a KV pool of two layers."""
    made, generator = KVPool(), torch.Generator().manual_seed(seed)
    shape = (SLOTS, KV_HEADS, HEAD_DIM)
    made.keys = [torch.randn(shape, generator=generator) for _ in range(2)]
    made.values = [torch.randn(shape, generator=generator) for _ in range(2)]
    return made


def grown(lens: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Return the lengths after a step with these numbers of accepted tokens."""
    return [length + more for length, more in zip(lens, accepted, strict=True)]


def chain(count: int) -> torch.Tensor:
    """Return the mask in which each draft token reads those before it, and itself."""
    return torch.ones(count, count, dtype=torch.bool).tril()


def assert_left(key: str, reason: str) -> None:
    """Assert that `/server_info` reports at `key` that a draft model's steps fall back."""
    told = inside.server_info()
    assert told["pat_layers"] == 2, "of the model that is served"
    assert (told[key]["pat_layers"], told[key]["default_layers"]) == (0, {reason: 2})


class DefaultSteps:
    """Stands in for a default backend's container of the steps of a round."""

    def __init__(self, num_steps: int) -> None:
        self.attn_backends = [DefaultBackend() for _ in range(num_steps)]
        self.calls: list[str] = []
        self.needs_cpu_seq_lens = False
        self.draft_window_size = 0

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append("eager")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "replay")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append("in graph")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(f"graphs of {max_bs} rows")


class Scene:
    """A served model that verifies drafts; a draft model is added by one of the methods.

    drafts: draft tokens of each request; 0: the model decodes. is_checked: plan and check each step
    as with SGLANG_PAT_DEBUG=1. arguments: server arguments.
    """

    def __init__(
        self,
        tree_kind: str = TREE_KINDS[0],
        *,
        drafts: int = 3,
        is_checked: bool = True,
        has_graphs: bool = True,
        **arguments: Any,
    ) -> None:
        self.leave()
        inside.forget_requests()
        self.table = torch.zeros(4, WIDTH, dtype=torch.int32)
        for row in ROWS:
            self.table[row, :20] = torch.tensor(PREFIX_SLOTS)
            self.table[row, 20:] = torch.arange(20, WIDTH) + 100 + 280 * (row - 1)
        if drafts:
            given = {"speculative_algorithm": "STANDALONE", "speculative_num_draft_tokens": drafts}
            arguments = given | arguments
        self.arguments = server_arguments(**arguments)
        self.arguments._sglang_pat_decodes = True
        self._pool = SimpleNamespace(req_to_token=self.table)
        tree = Tree(tree_kind)
        tree.cache.req_to_token_pool = self._pool
        tree.insert(PREFIX, PREFIX_SLOTS)
        self.rows = ROWS
        self.reqs = [tree.request(f"request {row}", PREFIX, 20, row) for row in ROWS]
        self.scheduled = SimpleNamespace(reqs=self.reqs, tree_cache=tree.cache)
        self.is_checked, self.plans_ahead = is_checked, False
        self.target = self.new_runner(token_to_kv_pool=kv_pool(2), is_draft_worker=False)
        self.served = self.new_served(drafts)
        if has_graphs:
            self.served.reserve()

    def new_runner(self, **fields: Any) -> Any:
        return runner(**{"server_args": self.arguments, "req_to_token_pool": self._pool} | fields)

    def draft_runner(self, **change: Any) -> Any:
        return self.new_runner(**{"token_to_kv_pool": kv_pool(1), "is_draft_worker": True} | change)

    def new_served(self, drafts: int) -> Steps:
        backend = pat_backend(self.target)
        if not drafts:
            return Decodes(self, backend, self.target, ForwardMode.DECODE)
        return Steps(self, backend, self.target, ForwardMode.TARGET_VERIFY, drafts)

    def decoding(self) -> Decodes:
        """Plain decode steps of the served model with the same backend."""
        return Decodes(self, self.served.backend, self.target, ForwardMode.DECODE)

    def rounds(self, steps: Any = 3, *, model_runner: Any = None, **change: Any) -> Rounds:
        """Add a draft model that decodes. steps: a container of backends, or their number."""
        container = DefaultSteps(steps) if isinstance(steps, int) else steps
        model_runner = model_runner or self.draft_runner(**change)
        factory = SimpleNamespace(draft_model_runner=model_runner)
        assert attach._after_create_decode_backend(container, factory) is container
        topk = self.arguments.speculative_eagle_topk
        return (Rounds if topk == 1 else Branches)(self, container, model_runner, topk)

    def extends(
        self, default: Any = None, *, model_runner: Any = None, drafts: int = 0, **change: Any
    ) -> Extends:
        """Add a draft model with draft-extend steps, over this default backend."""
        backend = DefaultBackend() if default is None else default
        model_runner = model_runner or self.draft_runner(**change)
        factory = SimpleNamespace(draft_model_runner=model_runner)
        assert attach._after_create_extend_backend(backend, factory) is backend
        mode, count = ForwardMode.DRAFT_EXTEND_V2, drafts or self.served.count
        return Extends(self, backend, model_runner, mode, count)

    def blocks(self, default: Any = None, *, has_table: bool = False) -> Blocks:
        """Add a draft model that drafts blocks. has_table: it has its own table of slots."""
        backend, model = DefaultBackend() if default is None else default, layers()
        model[0].attn_type = AttentionType.ENCODER_ONLY
        model_runner = self.draft_runner(model=model, attn_backend=backend)
        return Blocks(self, backend, model_runner, has_table=has_table)

    @property
    def counters(self) -> dict[str, Any]:
        """The counters of the served model's planner, which include draft models."""
        counted: dict[str, Any] = self.served.planner.counters()
        return counted

    def commit(self, lens: Sequence[int]) -> None:
        """Let SGLang have processed the results up to these lengths."""
        for req, length in zip(self.reqs, lens, strict=True):
            place(req).kv_committed_len = length

    def move(self) -> None:
        """Retract the first request, and admit it again with other slots."""
        self.table[ROWS[0], 20:60] = torch.arange(700, 740)
        REQUEST_TRACKER.invalidate([self.reqs[0]])

    def stop(self, steps: Steps) -> tuple[int, torch.Tensor]:
        """Give the row that a plan reads the prefix through to the next prompt.

        Returns the request that continues, and a copy of the table before.
        """
        before = self.table.clone()
        plan = inside.plan_of(steps.plans)
        stopped = next(span[0] for span in plan.gather_spans.tolist() if span[1] == 0)
        self.table[ROWS[stopped // steps.count]] = SLOTS - 1
        return 1 - stopped // steps.count, before

    def publish(self, view: Any, model_runner: Any) -> None:
        """Call the hooks for a new batch, and start its forward if the served model runs it.

        If the scene `plans_ahead`, the forward starts only after the batch is planned.
        """
        self.leave()
        inside.batch_made(view, self.scheduled, model_runner)
        if model_runner is self.target and not self.plans_ahead:
            _RUNNING.enter_context(REQUEST_TRACKER.running(view))

    def leave(self) -> None:
        """End the forward of the last step."""
        _RUNNING.close()


class Steps:
    """Drives a backend through steps of one mode; this class through those of a served model.

    count: rows of each request. reads: mask of the draft tokens that each token reads, by layer.
    """

    num_steps = 1
    width = 1  # slots per row

    def __init__(
        self, scene: Scene, backend: Any, model_runner: Any, mode: ForwardMode, count: int = 1
    ) -> None:
        self.scene, self.backend, self.runner = scene, backend, model_runner
        self.mode, self.count = mode, count
        self.layers = range(len(model_runner.model))
        self.reads = [chain(count)] * len(self.layers)
        # SGLang's buffers for graphs.
        self.rows = torch.zeros(3 * GRAPH, dtype=torch.int64)
        self.lens = torch.ones(3 * GRAPH, dtype=torch.int64)
        self.slots = torch.zeros(3 * GRAPH * count * self.width, dtype=torch.int64)
        if scene.is_checked and hasattr(backend, "_pat"):
            inside.check_steps(backend)

    def reserve(self, requests: int = GRAPH) -> None:
        self.backend.init_cuda_graph_state(requests, requests * self.count)

    @property
    def planner(self) -> Any:
        return inside.planner(self.backend)

    @property
    def plans(self) -> Any:
        return inside.plans(self.backend)

    @property
    def num_repeated(self) -> int:
        """The number of steps that reused a plan."""
        return inside.num_repeated(self.backend)

    # --- what SGLang passes ---

    def slots_of(self, lens: Sequence[int]) -> list[int]:
        """Return the slots that a step writes."""
        pairs = zip(self.scene.rows, lens, strict=True)
        return [int(self.scene.table[row, n + i]) for row, n in pairs for i in range(self.count)]

    def describe(self, mask: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the batch fields that mark steps of this mode."""
        drafts = None if self.mode.is_decode() else drafts_to_verify(self.count, mask)
        return {"forward_mode": self.mode, "spec_info": drafts}

    def view(
        self, lens: Sequence[int], graph: int = 0, mask: torch.Tensor | None = None, **fields: Any
    ) -> Any:
        """Return an eager batch, or the view before a replay of the graph of `graph` requests."""
        slots = self.slots_of(lens)
        if graph:
            view = replay_view(list(self.scene.rows), list(lens), slots, graph)
            self._fill(view, graph)
        else:
            view = decode_batch(list(self.scene.rows), list(lens), slots)
        vars(view).update(self.describe(mask) | {"graph": graph} | fields)
        self.scene.publish(view, self.runner)
        return view

    def _fill(self, view: Any, graph: int) -> None:
        """Copy a batch into the buffers of the graph of `graph` requests."""
        self.rows[:graph], self.lens[:graph] = view.req_pool_indices, view.seq_lens
        view.req_pool_indices, view.seq_lens = self.rows[:graph], self.lens[:graph]
        self.slots.zero_()
        self.slots[: len(view.out_cache_loc)] = view.out_cache_loc

    def padded(self, lens: Sequence[int], more_rows: int, **fields: Any) -> Any:
        """Return an eager batch with rows that MLP synchronisation adds."""
        view = self.view(lens, **fields)
        rows = len(lens) * self.count + more_rows
        return mlp_padded(view, self.scene.served.backend, rows, self.count)

    def captured(self, graph: int) -> Any:
        """Return the batch of which SGLang captures the graph of `graph` requests."""
        view = decode_batch([0] * graph, [1] * graph, [])
        view.out_cache_loc = self.slots[: graph * self.count * self.width]
        view.req_pool_indices, view.seq_lens = self.rows[:graph], self.lens[:graph]
        vars(view).update(self.describe() | {"graph": graph})
        return view

    # --- what SGLang does ---

    def capture(self, graph: int) -> Any:
        """Make the calls of a graph's capture. Returns its batch."""
        self.scene.leave()
        view = self.captured(graph)
        view.req_pool_indices.zero_(), view.seq_lens.fill_(1)
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        for _ in range(2):  # the warm-up, and the capture
            self.backend.init_forward_metadata_in_graph(view)
            for step in range(self.num_steps):
                for layer in self.layers:
                    self.attend(view, layer, step)
        return view

    def prepare(self, view: Any, *, writes: bool = True) -> None:
        """Run a step up to its layers. writes: also run the metadata code inside the graph."""
        if not getattr(view, "graph", 0):
            self.backend.init_forward_metadata(view)
            return
        self.backend.init_forward_metadata_out_graph(view)
        if writes:
            self.backend.init_forward_metadata_in_graph(view)
        if self.plans:
            inside.rerun(self.plans)

    def step(self, lens: Sequence[int], graph: int = 0, **shown: Any) -> Any:
        """Make the view of a step, and run the step up to its layers."""
        view = self.view(lens, graph, **shown)
        self.prepare(view)
        return view

    def forward(self, step: int) -> Callable[..., torch.Tensor]:
        """Return the function that a layer calls."""
        is_decode = self.mode.is_decode()
        return self.backend.forward_decode if is_decode else self.backend.forward_extend

    def num_rows(self, view: Any) -> int:
        return num_rows(view, self.count)

    def attend(
        self,
        view: Any,
        layer: int = 0,
        step: int = 0,
        kv: tuple[Any, Any] = (None, None),
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and a layer's output. kv: the keys and values to store."""
        module, count = self.runner.model[layer], self.num_rows(view)
        q = torch.randn(count, module.tp_q_head_num, HEAD_DIM)
        if getattr(view, "graph", 0):  # layers use the captured batch
            slots = self.slots[: count * self.width]
            view = SimpleNamespace(**vars(view) | {"out_cache_loc": slots})
        out = self.forward(step)(q, *kv, module, view, **arguments)
        return q, out.view(q.shape)

    # --- what must be true ---

    def slots_read(
        self, view: Any, row: int, length: int, step: int, reads: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Return the slots that a row reads; assert that it reads each only once."""
        request, token = divmod(row, self.count)
        own = table[self.scene.rows[request]]
        drafts = own[length : length + self.count][reads[token]]
        return torch.cat([own[:length], drafts]).long()

    def assert_exact(
        self,
        view: Any,
        lens: Sequence[int],
        reads: torch.Tensor | None = None,
        *,
        requests: Sequence[int] = (0, 1),
        layers: Iterable[int] | None = None,
        steps: Iterable[int] | None = None,
        table: torch.Tensor | None = None,
        **arguments: Any,
    ) -> None:
        """Assert that rows equal dense attention over their slots, and that padding is finite."""
        table = self.scene.table if table is None else table
        for step in range(self.num_steps) if steps is None else steps:
            for layer in self.layers if layers is None else layers:
                q, out = self.attend(view, layer, step, **arguments)
                assert out.isfinite().all()
                read = self.reads[layer] if reads is None else reads
                rows = [
                    row for row in range(len(lens) * self.count) if row // self.count in requests
                ]
                slots = [
                    self.slots_read(view, row, lens[row // self.count], step, read, table)
                    for row in rows
                ]
                exact = dense_rows(q[rows], self.runner.token_to_kv_pool, layer, slots)
                torch.testing.assert_close(out[rows].double(), exact, atol=2e-6, rtol=2e-6)

    def assert_padding_is_zero(self, view: Any, num_known: int) -> None:
        """Assert that rows after the first `num_known` are 0."""
        for step in range(self.num_steps):
            assert not self.attend(view, 0, step)[1][num_known:].any()


class Decodes(Steps):
    """Plain decode steps, whose lengths include the new token."""

    def slots_of(self, lens: Sequence[int]) -> list[int]:
        return super().slots_of([length - 1 for length in lens])

    def slots_read(
        self, view: Any, row: int, length: int, step: int, reads: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        return table[self.scene.rows[row], :length].long()


class Rounds(Steps):
    """The decode steps of a draft model's round, each with one token of each request."""

    def __init__(self, scene: Scene, container: Any, model_runner: Any, topk: int) -> None:
        self.num_steps = len(container.attn_backends)
        super().__init__(scene, container, model_runner, ForwardMode.DECODE, topk)

    def forward(self, step: int) -> Callable[..., torch.Tensor]:
        call: Callable[..., torch.Tensor] = self.backend.attn_backends[step].forward_decode
        return call

    def slots_read(
        self, view: Any, row: int, length: int, step: int, reads: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        return table[self.scene.rows[row], : length + step + 1].long()


class Branches(Rounds):
    """Rounds of a draft model with branches: `count` rows of each request."""

    def __init__(self, scene: Scene, container: Any, model_runner: Any, topk: int) -> None:
        self.width = len(container.attn_backends) + 1  # no step reads the last draft's slot
        super().__init__(scene, container, model_runner, topk)

    @property
    def step_type(self) -> Any:
        return inside.draft_round(self.backend)

    def slots_of(self, lens: Sequence[int]) -> list[int]:
        """Return slots that no request has."""
        own: list[int] = (700 + torch.randperm(100)[: len(lens) * self.count * self.width]).tolist()
        return own

    def prepare(self, view: Any, *, writes: bool = True) -> None:
        super().prepare(view, writes=writes)
        if view.graph:  # a graph reads the captured buffer
            rows = view.graph * self.count
            self.step_type.extra_kv.set_slots(self.slots[: rows * self.width], rows)

    def slots_read(
        self, view: Any, row: int, length: int, step: int, reads: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        branch = view.out_cache_loc.view(-1, self.width)[row, : step + 1]
        return torch.cat([table[self.scene.rows[row // self.count], :length].long(), branch])


class Extends(Steps):
    """The draft-extend steps of a draft model."""

    def view(
        self, lens: Sequence[int], graph: int = 0, mask: torch.Tensor | None = None, **fields: Any
    ) -> Any:
        """Requests have all draft tokens. A replay's view has the size of the largest graph."""
        ends, slots = [length + self.count for length in lens], self.slots_of(lens)
        made = decode_batch(list(self.scene.rows), ends, slots)
        tokens = torch.zeros(len(slots))
        vars(made).update(self.describe() | {"input_ids": tokens, "graph": graph} | fields)
        self.scene.publish(made, self.runner)
        if not graph:
            return made
        shown = replay_view(list(self.scene.rows), ends, slots, GRAPH)
        self._fill(shown, GRAPH)
        shown.batch_size, shown.graph, shown.input_ids = graph, graph, tokens
        shown.forward_mode, shown.spec_info = self.mode, made.spec_info
        return shown

    def captured(self, graph: int) -> Any:
        view = super().captured(graph)
        view.input_ids = torch.zeros(graph * self.count)
        return view

    def num_rows(self, view: Any) -> int:
        graph: int = getattr(view, "graph", 0)
        return graph * self.count or super().num_rows(view)


class Blocks(Steps):
    """The steps of a block drafter, whose requests only its worker knows."""

    def __init__(self, scene: Scene, backend: Any, model_runner: Any, *, has_table: bool) -> None:
        count = scene.served.count
        self.worker = SimpleNamespace(
            draft_model_runner=model_runner,
            use_compact_draft_cache=has_table,
            _draft_block_spec_info=drafts_to_verify(count),
        )
        attach._after_block_backend(None, self.worker)
        super().__init__(scene, backend, model_runner, ForwardMode.TARGET_VERIFY, count)
        self.reads[0] = torch.ones(count, count, dtype=torch.bool)
        if hasattr(backend, "_pat"):
            self.reserve()

    def prepare(self, view: Any, *, writes: bool = True) -> None:
        inside.draft_blocks(
            lambda worker, batch: super(Blocks, self).prepare(view, writes=writes),
            self.worker,
            self.scene.scheduled,
        )
