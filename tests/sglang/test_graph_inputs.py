"""A captured graph keeps tensor addresses and the host numbers of its capture.

SGLang's update calls (`update_weights_from_tensor`, `_from_disk`, `_from_distributed`) and LoRA
swaps overwrite weights, scales and sinks in place. `resume_memory_occupation` maps the pool's
memory again at the same addresses. The tests do these writes between capture and replay. Without a
GPU, a graph is the list of executor calls at the capture: tensors by address, numbers by value.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from fakes.backends import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    SLOTS,
    decode_batch,
    layers,
    pat_backend,
    replay_view,
    runner,
)
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.reference import ReferenceExecutor, dense_attention

E4M3 = torch.float8_e4m3fn
ROWS = 4
SLOTS_OF_REQUESTS = [[3, 4, 5], [6, 7]]


class Graph:
    """The layers of a step, executed again with the current plan at each replay."""

    def __init__(self) -> None:
        self.layers: list[tuple[ReferenceExecutor, LayerInputs]] = []

    def replay(self) -> None:
        for executor, layer in self.layers:
            executor.run(layer)


class Served:
    """A model of two layers with one graph; an fp8 KV pool has scales."""

    def __init__(self, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ReferenceExecutor, "name", "cuda")
        self.pool = MHATokenToKVPool(SLOTS, 1, kv_dtype, KV_HEADS, HEAD_DIM, 2, "cpu", False)
        self.model = layers()
        self.is_scaled = kv_dtype == E4M3
        if self.is_scaled:
            for layer in self.model:  # as set by BaseKVCacheMethod
                layer.k_scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
                layer.v_scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
                layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
        self.sinks = torch.nn.Parameter(torch.linspace(-1.0, 1.0, QO_HEADS), requires_grad=False)
        self.runner = runner(
            model=self.model,
            kv_cache_dtype=kv_dtype,
            kv_cache_dtype_str="fp8_e4m3" if self.is_scaled else "auto",
            token_to_kv_pool=self.pool,
        )
        self.table = self.runner.req_to_token_pool.req_to_token
        self.backend = pat_backend(self.runner)
        self.backend.init_cuda_graph_state(max_bs=ROWS, max_num_tokens=ROWS)
        assert [*inside.planner(self.backend).layer_support.shapes] == [0, 1]
        # The graph's buffers of queries and outputs.
        self.q = torch.randn(ROWS, QO_HEADS, HEAD_DIM)
        self.out: list[torch.Tensor] = []
        self.fill_pool()

    def fill_pool(self) -> None:
        """Store new K and V like a prefill, with the pool's method and current scales."""
        loc = KVWriteLoc(torch.arange(SLOTS))
        for layer in self.model:
            k, v = torch.randn(2, SLOTS, KV_HEADS, HEAD_DIM).unbind()
            scales = (layer.k_scale, layer.v_scale) if self.is_scaled else ()
            self.pool.set_kv_buffer(layer, loc, k, v, *scales)

    def capture(self, monkeypatch: pytest.MonkeyPatch) -> Graph:
        view = decode_batch([0] * ROWS, [1] * ROWS, [0] * ROWS, rids=None)
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        self.backend.init_forward_metadata_in_graph(view)
        graph, run = Graph(), ReferenceExecutor.run

        def recorded(executor: ReferenceExecutor, layer: LayerInputs) -> None:
            graph.layers.append((executor, layer))
            run(executor, layer)

        with monkeypatch.context() as patched:
            patched.setattr(ReferenceExecutor, "run", recorded)
            for layer in self.model:
                out = self.backend.forward_decode(self.q, None, None, layer, view, sinks=self.sinks)
                self.out.append(out.view(-1, QO_HEADS, HEAD_DIM))
        return graph

    def check(self, graph: Graph) -> None:
        """Assert that a replay for two requests equals attention over the current pool."""
        view = replay_view([1, 2], [3, 2], [5, 7], ROWS)
        for row, slots in zip((1, 2), SLOTS_OF_REQUESTS, strict=True):
            self.table[row, : len(slots)] = torch.tensor(slots)
        self.backend.init_forward_metadata_out_graph(view)
        graph.replay()
        for layer, out in zip(self.model, self.out, strict=True):
            caches = [
                self.pool.get_key_buffer(layer.layer_id).double(),
                self.pool.get_value_buffer(layer.layer_id).double(),
            ]
            if self.is_scaled:
                caches = [caches[0] * layer.k_scale, caches[1] * layer.v_scale]
            exact, _ = dense_attention(
                self.q[:2].double(),
                *caches,
                self.table,
                torch.tensor([1, 2]),
                torch.tensor([3, 2]),
                sinks=self.sinks,
            )
            torch.testing.assert_close(out[:2].double(), exact, atol=1e-5, rtol=1e-5)


def new_scales(served: Served) -> None:
    """Write scales like load_weights(): `k_scale_float` stays as it was."""
    for index, layer in enumerate(served.model):
        layer.k_scale.data.copy_(torch.tensor(0.05 * (index + 1)))
        layer.v_scale.data.copy_(torch.tensor(8.0 - index))
    served.fill_pool()  # the tree has been flushed


def new_sinks(served: Served) -> None:
    served.sinks.data.copy_(torch.linspace(2.0, -3.0, QO_HEADS))


def new_queries(served: Served) -> None:
    """Write other queries, as new weights or another adapter would compute."""
    served.q.copy_(torch.randn_like(served.q))


def resumed_pool(served: Served) -> None:
    """Overwrite the pool, as if its memory was released and mapped again."""
    for layer in served.model:
        for buffer in (
            served.pool.get_key_buffer(layer.layer_id),
            served.pool.get_value_buffer(layer.layer_id),
        ):
            buffer.fill_(torch.nan)
    served.fill_pool()


@pytest.fixture
def served(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace
) -> Served:
    server_context.observability.decode_log_interval = 1
    return Served(request.param, monkeypatch)


in_both_pools = pytest.mark.parametrize(
    "served", [torch.float32, E4M3], indirect=True, ids=["float32", "fp8"]
)


@in_both_pools
@pytest.mark.parametrize(
    "update", [new_sinks, new_queries, resumed_pool], ids=lambda each: each.__name__
)
def test_a_replay_sees_what_was_written_after_the_capture(
    update: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = served.capture(monkeypatch)
    served.check(graph)
    before = [out.clone() for out in served.out]
    update(served)
    served.check(graph)
    for old, new in zip(before, served.out, strict=True):
        assert not torch.allclose(old[:2], new[:2]), "the update changes nothing"


@pytest.mark.parametrize("served", [E4M3], indirect=True)
def test_a_replay_reads_the_scales_that_the_pool_divides_by(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = served.capture(monkeypatch)
    served.check(graph)
    new_scales(served)
    served.check(graph)


@in_both_pools
def test_no_number_in_a_graph_belongs_to_the_weights(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers in a graph come from the configuration, which no update changes."""
    held = [layer for _, layer in served.capture(monkeypatch).layers]
    numbers = [
        {name: value for name, value in layer._asdict().items() if isinstance(value, float)}
        for layer in held
    ]
    scaling = {"sm_scale": HEAD_DIM**-0.5, "logit_cap": 0.0}
    unscaled = scaling | {"k_scale": 1.0, "v_scale": 1.0}
    assert numbers == [scaling if served.is_scaled else unscaled] * 2
    if served.is_scaled:
        for layer, held_layer in zip(served.model, held, strict=True):
            assert held_layer.k_scale is layer.k_scale
            assert held_layer.v_scale is layer.v_scale
