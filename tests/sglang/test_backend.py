"""PatAttnBackend without an engine: how it is composed, and that it computes attention."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang_fakes import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    SLOTS,
    decode_batch,
    dense,
    layers,
    runner,
    server_arguments,
)

from sglang_pat.executors.cuda import PlanOverflowError
from sglang_pat.plan import DecodePlan
from sglang_pat.sglang import backend
from sglang_pat.sglang.reader import OVERFLOW

pytestmark = pytest.mark.usefixtures("server_context")

# --- composition ---


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_POLICIES", "paper")
    with pytest.raises(ValueError, match="unknown variable SGLANG_PAT_POLICIES"):
        pat_backend(runner())


def test_graphs_are_refused_where_torch_executes_the_plan() -> None:
    with pytest.raises(ValueError, match="start SGLang with --disable-cuda-graph"):
        pat_backend(runner()).init_cuda_graph_state(max_bs=8, max_num_tokens=8)


@pytest.mark.parametrize("chosen", [("pat", "fa3"), ("fa3", "fa3")])
def test_pat_for_prefill_only_is_refused(chosen: tuple[str, str]) -> None:
    arguments = server_arguments(get_attention_backends=lambda: chosen)
    with pytest.raises(ValueError, match="pat only decodes, but the backend for decode is 'fa3'"):
        create_pat_backend(runner(server_args=arguments))


def test_pat_for_decode_only_is_not_composed() -> None:
    arguments = server_arguments(get_attention_backends=lambda: ("torch_native", "pat"))
    assert type(create_pat_backend(runner(server_args=arguments))) is PatAttnBackend


def test_pat_for_both_is_composed_with_the_default_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The class is SGLang's, and needs an engine; what it is given is ours.
    monkeypatch.setattr(backend, "HybridAttnBackend", SimpleNamespace)
    monkeypatch.setitem(backend.ATTENTION_BACKENDS, "torch_native", lambda r: "native")
    composed = create_pat_backend(runner())
    assert composed.prefill_backend == "native"
    assert type(composed.decode_backend) is PatAttnBackend


def test_a_default_backend_with_other_pages_is_refused() -> None:
    arguments = server_arguments(_get_default_attn_backend=lambda *args: "trtllm_mha")
    with pytest.raises(
        ValueError, match="trtllm_mha, which needs --page-size 16 or 32 or 64 or 128"
    ):
        backend._default_backend(runner(server_args=arguments, device="cuda"))


# --- decoding ---


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_decode_stores_the_new_token_and_attends(flat: bool, cap: float) -> None:
    model_runner = runner(model=layers(logit_cap=cap))
    pool, req_to_token = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token
    req_to_token[1, :5] = torch.tensor([3, 4, 5, 6, 7])
    req_to_token[2, :3] = torch.tensor([3, 4, 30])
    backend = pat_backend(model_runner)
    batch = decode_batch([1, 2], [5, 3], [7, 30])
    backend.init_forward_metadata(batch)
    layer = model_runner.model[1]
    q = torch.randn(2, QO_HEADS, HEAD_DIM)
    k, v = torch.randn(2, KV_HEADS, HEAD_DIM), torch.randn(2, KV_HEADS, HEAD_DIM)
    out = backend.forward(q.flatten(1) if flat else q, k, v, layer, batch)
    assert torch.equal(pool.keys[1][[7, 30]], k)
    assert torch.equal(pool.values[1][[7, 30]], v)
    assert out.shape == (2, QO_HEADS * HEAD_DIM)
    for row, length in ((0, 5), (1, 3)):
        slots = req_to_token[row + 1, :length].long()
        ours = out[row].view(QO_HEADS, HEAD_DIM).double()
        exact = dense(q[row], pool, 1, slots, cap)
        torch.testing.assert_close(ours, exact, atol=2e-6, rtol=2e-6)


def test_scales_of_the_kv_cache_do_not_apply_to_the_models_own_type() -> None:
    # A checkpoint quantised for an fp8 cache has scales, and may be served with a 16-bit one.
    layer, pool = (
        layers()[1],
        MHATokenToKVPool(SLOTS, 1, torch.float32, KV_HEADS, HEAD_DIM, 2, "cpu", False),
    )
    layer.k_scale = layer.v_scale = torch.tensor(0.5)
    layer.k_scale_float = layer.v_scale_float = 0.5
    k, v = torch.randn(1, KV_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    where = KVWriteLoc(torch.tensor([9]))
    pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
    assert torch.equal(pool.get_key_buffer(1)[9], k[0])  # so SGLang's backends store it unscaled
    assert torch.equal(pool.get_value_buffer(1)[9], v[0])

    model_runner = runner(model=layers(k_scale=layer.k_scale, v_scale=layer.v_scale))
    backend, batch = pat_backend(model_runner), decode_batch([1], [1], [9])
    model_runner.req_to_token_pool.req_to_token[1, 0] = 9
    backend.init_forward_metadata(batch)
    q = torch.randn(1, QO_HEADS, HEAD_DIM)
    out = backend.forward(q, k, v, model_runner.model[1], batch)
    group = QO_HEADS // KV_HEADS  # one token: its value is the answer
    torch.testing.assert_close(out.view(QO_HEADS, HEAD_DIM), v[0].repeat_interleave(group, dim=0))


def test_nothing_is_stored_where_the_model_stores_itself() -> None:
    model_runner = runner()
    backend, before = pat_backend(model_runner), model_runner.token_to_kv_pool.keys[0].clone()
    batch = decode_batch([1], [2], [9])
    backend.init_forward_metadata(batch)
    q, kv = torch.randn(1, QO_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    layer = model_runner.model[0]
    backend.forward(q, kv, kv, layer, batch, save_kv_cache=False)
    backend.forward(q, None, None, layer, batch)
    assert torch.equal(model_runner.token_to_kv_pool.keys[0], before)


def test_arguments_that_would_be_ignored_are_refused() -> None:
    model_runner = runner()
    backend, batch = pat_backend(model_runner), decode_batch([1], [2], [9])
    backend.init_forward_metadata(batch)
    q, kv = torch.randn(1, QO_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    layer = model_runner.model[0]
    with pytest.raises(ValueError, match=r"attention = score_mod, sinks \(layer 0\)"):
        backend.forward(q, kv, kv, layer, batch, sinks=torch.ones(4), score_mod=max, q_rope=None)
    backend.forward(q, kv, kv, layer, batch, sinks=None)


def test_an_empty_batch_is_not_planned() -> None:
    pat_backend(runner()).init_forward_metadata(decode_batch([], [], []))


def test_a_plan_that_does_not_fit_a_graph_shares_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = pat_backend(runner())
    planned = []
    original = backend._pat._microbatches.current.eager.plan

    def plan(batch: Any, **tensors: Any) -> DecodePlan:
        planned.append(batch.read_paths())
        if len(planned) == 1:
            raise PlanOverflowError("too large")
        return original(batch, **tensors)

    monkeypatch.setattr(backend._pat._microbatches.current.eager, "plan", plan)
    backend.init_forward_metadata(decode_batch([1], [2], [9]))
    assert len(planned) == 2
    assert planned[1].path_begin.tolist() == [0, 0]
    assert backend._pat._microbatches.current.reader.private_steps[OVERFLOW] == 1
    assert OVERFLOW in caplog.text


# --- registration ---


def test_registration_makes_pat_a_choice_and_imports_nothing_heavy() -> None:
    code = """
import argparse, sys
import sglang.srt.server_args as server_args
from sglang_pat.sglang.plugin import register
before = set(sys.modules)
register()
added = set(sys.modules) - before
assert not [name for name in added if name.startswith("sglang_pat.")], added
assert not [name for name in added if name.startswith("sglang.srt.model_executor.")], added
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
assert "pat" in ATTENTION_BACKENDS
parser = argparse.ArgumentParser()
server_args.ServerArgs.add_cli_args(parser)
for flag in ("--attention-backend", "--decode-attention-backend"):
    parser.parse_args(["--model-path", "x", flag, "pat"])
print("registered")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout.strip().endswith("registered"), child.stderr
