"""PatAttnBackend without an engine: what it refuses, and that it computes attention."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from sglang_pat import sglang_backend
from sglang_pat.cuda_executor import PlanOverflowError
from sglang_pat.sglang_backend import PatAttnBackend, create_pat_backend
from sglang_pat.sglang_batch import NO_REQUESTS, OVERFLOW
from sglang_pat.sglang_refusals import REFUSED_ARGUMENTS

QO_HEADS, KV_HEADS, HEAD_DIM, SLOTS = 4, 2, 64, 50


class KVPool:
    """Like MHATokenToKVPool, as far as it is used."""

    start_layer = 0

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        shape = (SLOTS, KV_HEADS, HEAD_DIM)
        generator = torch.Generator().manual_seed(0)
        self.keys = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        self.values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[layer.layer_id][location.loc] = k
        self.values[layer.layer_id][location.loc] = v


def layers(count: int = 2, **change: Any) -> torch.nn.ModuleList:
    """Attention layers of a plain Llama; the last one changed."""
    made = [
        RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=i)
        for i in range(count)
    ]
    for name, value in change.items():
        setattr(made[-1], name, value)
    return torch.nn.ModuleList(made)


def server_arguments(**change: Any) -> Any:
    defaults = dict.fromkeys(REFUSED_ARGUMENTS) | {"dcp_size": 1, "page_size": 1}
    backends = {"get_attention_backends": lambda: ("pat", "pat")}
    return SimpleNamespace(**(defaults | backends | change))


def runner(**change: Any) -> Any:
    """Like SGLang's model runner, for a plain Llama."""
    req_to_token = torch.zeros(4, 32, dtype=torch.int32)
    model_config = SimpleNamespace(
        is_encoder_decoder=False,
        has_attention_sinks=False,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    fields = {
        "model": layers(),
        "model_config": model_config,
        "server_args": server_arguments(),
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "attention_chunk_size": None,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "token_to_kv_pool": KVPool(),
        "req_to_token_pool": SimpleNamespace(req_to_token=req_to_token),
        "device": "cpu",
    }
    return SimpleNamespace(**(fields | change))


def config(**change: Any) -> Any:
    return SimpleNamespace(**(vars(runner().model_config) | change))


def decode_batch(rows: list[int], lens: list[int], out: list[int], **more: Any) -> Any:
    seq_lens = torch.tensor(lens)
    return SimpleNamespace(
        batch_size=len(rows),
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor(rows),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        out_cache_loc=torch.tensor(out),
        out_cache_loc_is_physical=True,
        **more,
    )


# --- refusals ---

REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "mla": (lambda: runner(use_mla_backend=True), "multi-head latent attention .Llama"),
    "encoder": (
        lambda: runner(model_config=config(is_encoder_decoder=True)),
        "an encoder-decoder model",
    ),
    "sinks": (lambda: runner(model_config=config(has_attention_sinks=True)), "attention sinks"),
    "hybrid window": (lambda: runner(is_hybrid_swa=True), "sliding window = a hybrid pool"),
    "chunked": (lambda: runner(attention_chunk_size=8192), "attention within chunks"),
    "context parallel": (
        lambda: runner(server_args=server_arguments(dcp_size=2)),
        "server options = --dcp-size 2; supported: all but",
    ),
    "page size": (
        lambda: runner(server_args=server_arguments(page_size=0)),
        "KV pool = page size 0; supported: one pool for all layers, page size 1 or more",
    ),
    "speculation": (
        lambda: runner(server_args=server_arguments(speculative_algorithm="EAGLE")),
        "server options = --speculative-algorithm EAGLE; supported: all but",
    ),
    "two batches": (
        lambda: runner(server_args=server_arguments(enable_two_batch_overlap=True)),
        "--enable-two-batch-overlap True",
    ),
    "fp8 cache": (
        lambda: runner(kv_cache_dtype=torch.float8_e4m3fn),
        "queries and KV cache = torch.float32 and torch.float8_e4m3fn; supported: float16",
    ),
    "dtype": (
        lambda: runner(
            dtype=torch.float64,
            kv_cache_dtype=torch.float64,
            token_to_kv_pool=KVPool(torch.float64),
        ),
        "queries and KV cache = torch.float64; supported: float16",
    ),
    "pool of another dtype": (
        lambda: runner(token_to_kv_pool=KVPool(torch.bfloat16)),
        "KV pool = KVPool of torch.bfloat16",
    ),
    "cross": (lambda: runner(model=layers(is_cross_attention=True)), r"cross attention .layer 1"),
    "window": (
        lambda: runner(model=layers(sliding_window_size=128)),
        r"sliding window = 128 .layer 1",
    ),
    "encoder layer": (
        lambda: runner(model=layers(attn_type=AttentionType.ENCODER_ONLY)),
        "attention of type encoder_only",
    ),
    "other v_head_dim": (
        lambda: runner(model=layers(v_head_dim=32)),
        "head_dim = 64 for keys and 32 for values",
    ),
    "temperature": (
        lambda: runner(model=layers(xai_temperature_len=8)),
        "a temperature by position",
    ),
    "positions": (lambda: runner(model=layers(pos_encoding_mode="ALIBI")), "ALIBI positions"),
    "soft-cap": (
        lambda: runner(model=layers(logit_cap=30.0, logit_capping_method="other")),
        "a soft-cap by other",
    ),
    "layers of two kinds": (
        lambda: runner(model=layers(tp_q_head_num=8)),
        r"\(4, 2, 64\) in layer 0, \(8, 2, 64\) in layer 1",
    ),
    "head_dim": (
        lambda: runner(
            model=layers(1, qk_head_dim=96, v_head_dim=96), token_to_kv_pool=pool_of(96)
        ),
        "head_dim = 96; supported: 64, 128",
    ),
    "heads": (
        lambda: runner(model=layers(1, tp_q_head_num=5)),
        "multiple of num_kv_heads, got 5 and 2",
    ),
    "group": (
        lambda: runner(model=layers(1, tp_q_head_num=64)),
        "query heads per KV head = 32; supported: 1 to 16",
    ),
    "no attention": (lambda: runner(model=torch.nn.Linear(2, 2)), "no attention layer"),
}


def pool_of(head_dim: int) -> KVPool:
    pool = KVPool()
    pool.keys = pool.values = [torch.zeros(SLOTS, KV_HEADS, head_dim)]
    return pool


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str) -> None:
    make_runner, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        PatAttnBackend(make_runner())


def test_refused_arguments_exist_in_this_sglang() -> None:
    known = getattr(ServerArgs, "__dataclass_fields__", None) or ServerArgs.__struct_fields__
    for name in [*REFUSED_ARGUMENTS, "dcp_size", "page_size"]:
        assert name in known


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_POLICIES", "paper")
    with pytest.raises(ValueError, match="unknown variable SGLANG_PAT_POLICIES"):
        PatAttnBackend(runner())


def test_graphs_are_refused_where_torch_executes_the_plan() -> None:
    with pytest.raises(ValueError, match="start SGLang with --disable-cuda-graph"):
        PatAttnBackend(runner()).init_cuda_graph_state(max_bs=8, max_num_tokens=8)


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
    monkeypatch.setattr(sglang_backend, "HybridAttnBackend", SimpleNamespace)
    monkeypatch.setitem(sglang_backend.ATTENTION_BACKENDS, "torch_native", lambda r: "native")
    composed = create_pat_backend(runner())
    assert composed.prefill_backend == "native"
    assert type(composed.decode_backend) is PatAttnBackend


def test_a_default_backend_with_other_pages_is_refused() -> None:
    arguments = server_arguments(_get_default_attn_backend=lambda *args: "trtllm_mha")
    with pytest.raises(
        ValueError, match="trtllm_mha, which needs --page-size 16 or 32 or 64 or 128"
    ):
        sglang_backend._default_backend(runner(server_args=arguments, device="cuda"))


# --- decoding ---


def dense(
    q: torch.Tensor, pool: KVPool, layer_id: int, slots: torch.Tensor, cap: float = 0.0
) -> torch.Tensor:
    """Attention of one query row over these slots, in float64: `[heads, head_dim]`."""
    group = QO_HEADS // KV_HEADS
    keys = pool.keys[layer_id][slots].double().repeat_interleave(group, dim=1)
    values = pool.values[layer_id][slots].double().repeat_interleave(group, dim=1)
    logits = torch.einsum("hd,khd->hk", q.double(), keys) / math.sqrt(HEAD_DIM)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return torch.einsum("hk,khd->hd", logits.softmax(-1), values)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_decode_stores_the_new_token_and_attends(flat: bool, cap: float) -> None:
    model_runner = runner(model=layers(logit_cap=cap))
    pool, req_to_token = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token
    req_to_token[1, :5] = torch.tensor([3, 4, 5, 6, 7])
    req_to_token[2, :3] = torch.tensor([3, 4, 30])
    backend = PatAttnBackend(model_runner)
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


def test_nothing_is_stored_where_the_model_stores_itself() -> None:
    model_runner = runner()
    backend, before = PatAttnBackend(model_runner), model_runner.token_to_kv_pool.keys[0].clone()
    batch = decode_batch([1], [2], [9])
    backend.init_forward_metadata(batch)
    q, kv = torch.randn(1, QO_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    layer = model_runner.model[0]
    backend.forward(q, kv, kv, layer, batch, save_kv_cache=False)
    backend.forward(q, None, None, layer, batch)
    assert torch.equal(model_runner.token_to_kv_pool.keys[0], before)


def test_arguments_that_would_be_ignored_are_refused() -> None:
    model_runner = runner()
    backend, batch = PatAttnBackend(model_runner), decode_batch([1], [2], [9])
    backend.init_forward_metadata(batch)
    q, kv = torch.randn(1, QO_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    layer = model_runner.model[0]
    with pytest.raises(ValueError, match=r"attention = score_mod, sinks \(layer 0\)"):
        backend.forward(q, kv, kv, layer, batch, sinks=torch.ones(4), score_mod=max, q_rope=None)
    backend.forward(q, kv, kv, layer, batch, sinks=None)


def test_padding_rows_of_a_graph_are_zero() -> None:
    model_runner = runner()
    backend = PatAttnBackend(model_runner)
    batch = decode_batch([1, 0, 0], [2, 1, 1], [9, 0, 0], num_padding=2)
    backend.init_forward_metadata(batch)
    q, kv = torch.randn(3, QO_HEADS, HEAD_DIM), torch.randn(3, KV_HEADS, HEAD_DIM)
    out = backend.forward(q, kv, kv, model_runner.model[0], batch)
    assert out[0].abs().sum() > 0
    assert out[1:].abs().sum() == 0


def test_an_empty_batch_is_not_planned() -> None:
    PatAttnBackend(runner()).init_forward_metadata(decode_batch([], [], []))


def test_a_plan_that_does_not_fit_a_graph_shares_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = PatAttnBackend(runner())
    planned = []

    def plan(batch: Any, **tensors: Any) -> None:
        planned.append(batch.read_paths())
        if len(planned) == 1:
            raise PlanOverflowError("too large")

    monkeypatch.setattr(backend._eager, "plan", plan)
    backend.init_forward_metadata(decode_batch([1], [2], [9]))
    assert len(planned) == 2
    assert planned[1].path_begin.tolist() == [0, 0]
    assert backend._reader.private_steps[OVERFLOW] == 1
    assert OVERFLOW in caplog.text


def test_counters_are_in_the_file_after_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(tmp_path / "stats.json"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    backend = PatAttnBackend(runner())
    for step in range(3):
        counted = json.loads((tmp_path / "stats.json").read_text())
        assert counted["plans_built"] + counted["plans_reused"] == step
        assert counted["kv_tokens_query_centric"] == sum(2 + i for i in range(step))
        assert counted["causes"] == ({"first": 1} if step else {})
        assert counted["private_steps"] == ({NO_REQUESTS: step} if step else {})
        backend.init_forward_metadata(decode_batch([1], [2 + step], [9]))
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(tmp_path / "stats.json"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    PatAttnBackend(runner()).init_forward_metadata(decode_batch([1], [2], [9]))
    assert list(tmp_path.iterdir()) == []


# --- registration ---


def test_registration_makes_pat_a_choice_and_imports_nothing_heavy() -> None:
    code = """
import argparse, sys
import sglang.srt.server_args as server_args
from sglang_pat.sglang_plugin import register
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
