"""What PatAttnBackend refuses at start-up, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.server_args import ServerArgs
from sglang_fakes import KV_HEADS, SLOTS, KVPool, config, layers, runner, server_arguments

from sglang_pat.sglang.backend import PatAttnBackend
from sglang_pat.sglang.refusals import GLUE_GRAPH, REFUSED_ARGUMENTS

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
            model=layers(1, qk_head_dim=72, v_head_dim=72), token_to_kv_pool=pool_of(72)
        ),
        "head_dim = 72; supported: 64, 80, 96, 128",
    ),
    "heads": (
        lambda: runner(model=layers(1, tp_q_head_num=5)),
        "multiple of num_kv_heads, got 5 and 2",
    ),
    "group": (
        lambda: runner(model=layers(1, tp_q_head_num=64)),
        "query heads per KV head = 32; supported: 1 to 16",
    ),
    "strided pool": (
        lambda: runner(token_to_kv_pool=strided_pool()),
        "KV pool = KVPool of torch.float32",
    ),
    "no attention": (lambda: runner(model=torch.nn.Linear(2, 2)), "no attention layer"),
}


def pool_of(head_dim: int) -> KVPool:
    pool = KVPool()
    pool.keys = pool.values = [torch.zeros(SLOTS, KV_HEADS, head_dim)]
    return pool


def strided_pool() -> KVPool:
    """Keys and values of a slot beside each other: right shapes, other strides."""
    pool = KVPool()
    both = torch.zeros(SLOTS, 2 * KV_HEADS, pool.keys[0].shape[2])
    pool.keys, pool.values = [both[:, :KV_HEADS]] * 2, [both[:, KV_HEADS:]] * 2
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


@pytest.mark.skipif(not hasattr(envs, GLUE_GRAPH), reason="this SGLang has no glue graphs")
def test_a_graph_in_place_of_planning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its replays would read the plan of the step that it was captured in.
    monkeypatch.setenv(GLUE_GRAPH, "1")
    with pytest.raises(ValueError, match=f"server options = {GLUE_GRAPH}=1"):
        PatAttnBackend(runner())
