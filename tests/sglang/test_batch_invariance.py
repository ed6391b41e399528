"""Batch-invariant mode in SGLang: what turns it on, and that rows do not depend on others."""

from __future__ import annotations

import logging
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
    KVPool,
    decode_batch,
    pat_backend,
    replay_view,
    runner,
    server_arguments,
)

pytestmark = pytest.mark.usefixtures("server_context")

LENGTHS = [700, 1, 512, 513, 3000, 1025]


def deterministic(**change: Any) -> Any:
    return server_arguments(enable_deterministic_inference=True, **change)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("sglang_pat")]


def test_deterministic_inference_turns_it_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        backend = pat_backend(runner(server_args=deterministic()))
    assert "pat decodes 2 of 2 layers, batch-invariant; prefill on triton" in messages(caplog)
    assert inside.planner(backend).layer_support.as_json()["batch_invariant"] is True


def test_its_variable_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not inside.planner(pat_backend(runner())).layer_support.batch_invariant
    monkeypatch.setenv("SGLANG_PAT_BATCH_INVARIANT", "1")
    assert inside.planner(pat_backend(runner())).layer_support.batch_invariant


def test_the_bits_of_a_trainer_are_not_promised(caplog: pytest.LogCaptureFixture) -> None:
    arguments = deterministic(rl_on_policy_target="fsdp")
    pat_backend(runner(server_args=arguments))
    assert any("not the bits of the trainer's forward pass" in each for each in messages(caplog))


class Requests:
    """Requests with the lengths above and a query each."""

    def __init__(self, **arguments: Any) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        table = torch.zeros((len(LENGTHS), max(LENGTHS)), dtype=torch.int32)
        num_slots = 1
        for row, length in enumerate(LENGTHS):
            table[row, :length] = torch.arange(num_slots, num_slots + length)
            num_slots += length
        pool = KVPool()
        pool.keys = [random(num_slots, KV_HEADS, HEAD_DIM)] * 2
        pool.values = [random(num_slots, KV_HEADS, HEAD_DIM)] * 2
        self._q = random(len(LENGTHS), QO_HEADS * HEAD_DIM)
        self._runner = runner(
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            server_args=server_arguments(**arguments),
        )
        self.backend = pat_backend(self._runner)

    def decode(self, rows: list[int], *, graph_rows: int = 0) -> torch.Tensor:
        """Return the last layer's output. graph_rows: size of the graph to replay, or 0."""
        lens, out = [LENGTHS[row] for row in rows], [0] * len(rows)
        if graph_rows:
            batch = replay_view(rows, lens, out, graph_rows)
            self.backend.init_forward_metadata_out_graph(batch)
        else:
            batch = decode_batch(rows, lens, out)
            self.backend.init_forward_metadata(batch)
        q = self._q[rows + [0] * (batch.batch_size - len(rows))]
        layer = self._runner.model[1]
        return self.backend.forward(q, None, None, layer, batch)[: len(rows)]


def test_a_row_is_the_same_in_any_batch_and_graph() -> None:
    requests = Requests(enable_deterministic_inference=True)
    requests.backend.init_cuda_graph_state(8, 8)
    everyone = list(range(len(LENGTHS)))
    together = requests.decode(everyone)
    replayed = requests.decode(everyone[::-1], graph_rows=8).flip(0)
    for row in everyone:
        alone = requests.decode([row])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(alone[0], replayed[row])
        assert torch.equal(alone, requests.decode([row], graph_rows=2))


@pytest.mark.parametrize(("width", "longest"), [(20, 20), (100_000, SLOTS)])
def test_partials_are_reserved_for_requests_that_the_pool_holds(
    width: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of a million tokens would otherwise reserve a gigabyte."""
    table = torch.zeros((4, width), dtype=torch.int32)
    model_runner = runner(
        req_to_token_pool=SimpleNamespace(req_to_token=table), server_args=deterministic()
    )
    backend = pat_backend(model_runner)
    reserved: list[dict[str, int]] = []
    monkeypatch.setattr(
        inside.planner(backend)._microbatches, "reserve", lambda **sizes: reserved.append(sizes)
    )
    backend.init_cuda_graph_state(8, 8)
    assert [each["max_seq_len"] for each in reserved] == [longest]
