"""A plug-in of SGLang for tests that simulates CUDA graphs on a CPU.

A CUDA graph reads a step from fixed buffers. The plug-in lets pat prepare each step as for the
replay of a random graph, or of none, and repeats the reads that the graph has recorded. Then the
layers run eagerly. The KV of free slots is overwritten before each step, so answers are wrong if a
reused plan does not fit its step.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakes.plugins import install_plugin

MAX_REQUESTS = 8
SIZES = (1, 2, 4, 6, 8)  # requests of each graph
STAYS = 0.7  # probability that a step uses the graph of the step before it


def act_out_graphs(folder: Path, environment: pytest.MonkeyPatch) -> None:
    """Install the plug-in for engines that start later."""
    install_plugin(folder, "fakes.cuda_graphs")
    environment.syspath_prepend(folder)  # inherited by the engine's processes


class Place:
    """SGLang's graph buffers for the steps of a backend, and the current graph."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._choice = 0
        self._rows = torch.zeros(MAX_REQUESTS, dtype=torch.int64)
        self._lens = torch.ones(MAX_REQUESTS, dtype=torch.int64)
        self._slots = torch.zeros(0, dtype=torch.int64)

    def size(self, count: int) -> int:
        """Return the size of a graph for `count` requests, padded or not; 0 for no graph."""
        if self._random.random() > STAYS:
            self._choice = self._random.randrange(8)
        if not 0 < count <= MAX_REQUESTS or self._choice == 0:
            return 0
        fits = [size for size in SIZES if size >= count]
        return fits[0] if self._choice < 6 else fits[-1]

    def view(self, batch: Any, size: int) -> Any:
        """Return the view that SGLang passes before it replays a graph for a batch."""
        count = batch.batch_size
        self._rows.zero_()
        self._lens.fill_(1)
        self._rows[:count] = batch.req_pool_indices[:count]
        self._lens[:count] = batch.seq_lens[:count]
        on_host = batch.seq_lens_cpu
        if on_host is not None:
            on_host = torch.cat((on_host[:count], on_host.new_ones(size - count)))
        noted = {name: value for name, value in vars(batch).items() if name.startswith("_sglang")}
        return SimpleNamespace(
            batch_size=size,
            forward_mode=batch.forward_mode,
            req_pool_indices=self._rows[:size],
            seq_lens=self._lens[:size],
            seq_lens_cpu=on_host,
            num_padding=size - count,
            out_cache_loc=batch.out_cache_loc,
            spec_info=batch.spec_info,
            input_ids=batch.input_ids,
            **noted,
        )

    def slots(self, batch: Any, size: int) -> torch.Tensor:
        """Return the slots of a batch in the buffer of the graphs."""
        slots = batch.out_cache_loc
        per_request = len(slots) // batch.batch_size
        if not len(self._slots):
            self._slots = torch.zeros(MAX_REQUESTS * per_request, dtype=torch.int64)
        self._slots.zero_()
        self._slots[: len(slots)] = slots
        return self._slots[: size * per_request]


class Spoiler:
    """Overwrites the KV of free slots, in the pools of a model and of its draft model."""

    def __init__(self) -> None:
        self._pools: list[tuple[Any, Any]] = []  # with the allocators of their slots

    def watch(self, model_runner: Any) -> None:
        """Add this model's pool, or both parts of a hybrid pool."""
        allocator, pool = model_runner.token_to_kv_pool_allocator, model_runner.token_to_kv_pool
        if hasattr(pool, "swa_kv_pool"):
            self._pools.append((allocator.full_attn_allocator, pool.full_kv_pool))
            self._pools.append((allocator.swa_attn_allocator, pool.swa_kv_pool))
        else:
            self._pools.append((allocator, pool))

    def spoil(self) -> None:
        """Overwrite the slots that are free now."""
        for allocator, pool in self._pools:
            for pages in (allocator.free_pages, allocator.release_pages):
                if pages is None or not len(pages):
                    continue
                size = allocator.page_size
                slots = (pages[:, None] * size + torch.arange(size)).view(-1)
                for name in ("k_buffer", "v_buffer", "kv_buffer"):
                    for buffer in getattr(pool, name, ()):
                        buffer[slots] = 9


def register() -> None:
    """Simulate graphs in this process and its forks."""
    from sglang_pat.sglang.backend import PatMixin
    from sglang_pat.sglang.layer.attention import LayerAttention
    from sglang_pat.sglang.speculative.backends import PatDraftSteps
    from sglang_pat.sglang.speculative.planners import SpeculativePlanner
    from sglang_pat.sglang.speculative.steps import DraftExtendStep, DraftTreeSteps, SpeculativeStep
    from sglang_pat.sglang.speculative.tree_attention import TreeKv
    from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, requests_of

    spoiler = Spoiler()
    init_layers = LayerAttention.__init__
    eager, keys = PatMixin.init_forward_metadata, TreeKv.keys
    eager_round = PatDraftSteps.init_forward_metadata
    places: dict[int, Place] = {}

    def place_of(owner: Any) -> tuple[Place, bool]:
        is_new = id(owner) not in places
        return places.setdefault(id(owner), Place()), is_new

    def watch(layers: Any, model_runner: Any, layer_support: Any) -> None:
        init_layers(layers, model_runner, layer_support)
        spoiler.watch(model_runner)

    def prepare(backend: Any, batch: Any) -> None:
        spoiler.spoil()
        pat = backend._pat
        step_type = pat.step_types.get(batch.forward_mode)
        if step_type is None or not pat.layer_support.shapes:
            eager(backend, batch)
            return
        place, is_new = place_of(backend)
        if is_new and isinstance(pat.planner, SpeculativePlanner):
            if not isinstance(step_type, DraftExtendStep):
                pat.planner.reserve(MAX_REQUESTS, pat.step_types.values())
        elif is_new:
            pat.planner.reserve(MAX_REQUESTS)
        size = place.size(batch.batch_size)
        if size == 0:
            eager(backend, batch)
            return
        if pat.layer_support.fallback:
            backend._prepare_default(batch)
        view = place.view(batch, size)
        # SGLang loads verify steps into graphs before their forward.
        is_first = not REQUEST_TRACKER.is_within_step and requests_of(batch) is not None
        with REQUEST_TRACKER.running(batch) if is_first else nullcontext():
            pat.step_type, pat.is_captured = step_type, False
            pat.plans = pat.planner.plan_captured(step_type, view)
            if isinstance(step_type, SpeculativeStep):
                step_type.record_in_graph(view)
            if pat.plans is not None:
                pat.plans.record_in_graph()
            pat.attention.begin_step()
            read_again(pat.plans)

    def prepare_round(steps: Any, batch: Any) -> None:
        spoiler.spoil()
        place, is_new = place_of(steps)
        if is_new:
            steps._pat.planner.reserve(MAX_REQUESTS)
        size = place.size(batch.batch_size) if steps._pat.layer_support.shapes else 0
        if size == 0:
            eager_round(steps, batch)
            return
        if steps._takes_default():
            super(PatDraftSteps, steps).init_forward_metadata(batch)
        view, step_type = place.view(batch, size), steps._pat.round
        steps._pat.plans = steps._pat.planner.plan_captured(step_type, view)
        step_type.record_in_graph(view)
        if isinstance(step_type, DraftTreeSteps):
            step_type.extra_kv.set_slots(
                place.slots(batch, size), size * step_type.shape.per_request
            )
        else:
            step_type._at = -1  # each step of a round captures its own lengths
        read_again(steps._pat.plans)

    def read_again(plans: Any) -> None:
        """Let plans read lengths and slots again, as kernels do in each replay."""
        for attention in plans.of_kind.values():
            attention._executor.reuse_plan(attention._executor._step)

    def padded_keys(
        trees: Any, forward_batch: Any, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, biases = keys(trees, forward_batch, num_rows)
        return torch.cat((slots, slots.new_zeros(num_rows - len(slots)))), biases

    LayerAttention.__init__ = watch  # type: ignore[method-assign]
    PatMixin.init_forward_metadata = prepare  # type: ignore[method-assign]
    PatDraftSteps.init_forward_metadata = prepare_round  # type: ignore[method-assign]
    TreeKv.keys = padded_keys  # type: ignore[method-assign]
