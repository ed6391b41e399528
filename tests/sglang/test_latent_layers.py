"""Latent attention (MLA) on pat: how models call its layers, and which layers fall back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import inspect_backend as inside
import pytest
import torch
from fakes.backends import (
    SLOTS,
    config,
    decode_batch,
    pat_backend,
    queries_of_runs,
    runner,
    server_arguments,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat import support
from sglang_pat.executors.kv_writer import UNSCALED, KvWriter
from sglang_pat.executors.reference import dense_attention
from sglang_pat.plan import HeadConfig
from sglang_pat.sglang.layer import kv_writes
from sglang_pat.sglang.layer.kv_writes import KvWrites
from sglang_pat.sglang.start.layer_rules import layers_of_runner
from sglang_pat.sglang.start.server_options import TREES

pytestmark = pytest.mark.usefixtures("server_context")

HEADS = 8
KEYS, VALUES = support.LATENT_HEAD_DIMS
SCALE = 192**-0.5


class Pool(MLATokenToKVPool):
    """SGLang's pool of two layers; torch replaces its Triton kernels."""


def make_pool(
    dtype: torch.dtype = torch.float32, rank: int = VALUES, page_size: int = 1, slots: int = SLOTS
) -> MLATokenToKVPool:
    size = slots - page_size
    pool = Pool(size, page_size, dtype, rank, KEYS - VALUES, 2, "cpu", enable_memory_saver=False)
    generator = torch.Generator().manual_seed(0)
    for each in pool.kv_buffer:
        each.view(dtype).copy_(torch.randn(each.shape, generator=generator))
    pool.__class__ = MLATokenToKVPool
    return pool


class Attention(torch.nn.Module):
    """An attention module like DeepSeek's: absorbed and other layers under one id."""

    def __init__(self, layer_id: int, heads: int = HEADS, rank: int = VALUES) -> None:
        super().__init__()
        self.attn_mqa = RadixAttention(
            heads, rank + 64, SCALE, num_kv_heads=1, layer_id=layer_id, v_head_dim=rank
        )
        self.attn_mha = RadixAttention(
            heads, 192, SCALE, num_kv_heads=heads, layer_id=layer_id, v_head_dim=128
        )
        self.kv_b_proj = torch.nn.Identity()


def make_model(**change: Any) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(Attention(layer_id, **change) for layer_id in range(2))


def latent_runner(**change: Any) -> Any:
    return runner(**{"model": make_model(), "token_to_kv_pool": make_pool(), **change})


def fp8_runner(*, scale: float | None = None, **change: Any) -> Any:
    """Return a runner with an fp8 pool. scale: scale of the layers' K."""
    model = make_model()
    for attention in model:
        attention.attn_mqa.k_scale = None if scale is None else torch.tensor(scale)
    fp8 = torch.float8_e4m3fn
    return latent_runner(
        **{
            "model": model,
            "kv_cache_dtype": fp8,
            "kv_cache_dtype_str": "fp8_e4m3",
            "token_to_kv_pool": make_pool(fp8),
            **change,
        }
    )


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the called write methods of the pool."""
    told: list[str] = []
    takes_location = "loc_info" in inspect.signature(Pool.set_mla_kv_buffer).parameters

    def set_parts(self: Any, layer: Any, where: Any, nope: Any, rope: Any) -> None:
        told.append("parts")
        assert isinstance(where, KVWriteLoc) == takes_location
        slots = where.loc if takes_location else where
        assert slots.is_contiguous()  # the replaced kernel ignores strides
        self.kv_buffer[layer.layer_id][slots] = torch.cat((nope, rope), dim=-1)

    def set_whole(self: Any, layer: Any, where: Any, k: Any, v: Any) -> None:
        told.append("whole")
        self.kv_buffer[layer.layer_id][where.loc] = k

    monkeypatch.setattr(MLATokenToKVPool, "set_mla_kv_buffer", set_parts)
    monkeypatch.setattr(MLATokenToKVPool, "set_kv_buffer", set_whole)
    return told


class Step:
    """Three requests, of which two share their first tokens. Their last tokens are not stored."""

    def __init__(self, model_runner: Any = None, *default: str) -> None:
        self.runner = latent_runner() if model_runner is None else model_runner
        table = self.runner.req_to_token_pool.req_to_token
        table[1, :5] = torch.tensor([3, 4, 5, 6, 20])
        table[2, :5] = torch.tensor([3, 4, 5, 7, 21])
        table[3, :2] = torch.tensor([8, 22])
        self.backend = pat_backend(self.runner, *default)
        self.lens = torch.tensor([5, 5, 2])
        self.batch = decode_batch([1, 2, 3], self.lens.tolist(), [20, 21, 22])
        self.backend.init_forward_metadata(self.batch)
        self.q, self.k = torch.randn(3, HEADS, KEYS), torch.randn(3, 1, KEYS)

    def layer(self, layer_id: int = 0) -> RadixAttention:
        layer: RadixAttention = self.runner.model[layer_id].attn_mqa
        return layer

    def exact(self, layer_id: int = 0) -> torch.Tensor:
        cache = self.runner.token_to_kv_pool.get_key_buffer(layer_id).float()
        table, rows = self.runner.req_to_token_pool.req_to_token, torch.tensor([1, 2, 3])
        values = cache[..., :VALUES]
        out, _ = dense_attention(self.q, cache, values, table, rows, self.lens, sm_scale=SCALE)
        return out

    def check(self, out: torch.Tensor, layer_id: int = 0) -> None:
        slots = self.batch.out_cache_loc
        assert torch.equal(self.runner.token_to_kv_pool.kv_buffer[layer_id][slots], self.k)
        assert out.shape == (3, HEADS * VALUES)
        exact = self.exact(layer_id)
        torch.testing.assert_close(out.view(exact.shape).double(), exact, atol=1e-5, rtol=1e-5)
        assert self.backend.calls == []

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return queries, keys and arguments of calls to fa3 and flashinfer: queries by head."""
        nope = self.q[..., :VALUES].transpose(0, 1).contiguous().transpose(0, 1)
        assert nope.stride() == (VALUES, 3 * VALUES, 1)
        rope = {"q_rope": self.q[..., VALUES:], "k_rope": self.k[..., VALUES:]}
        return nope, self.k[..., :VALUES], rope


def test_queries_and_keys_in_one_piece(writes: list[str]) -> None:
    """Models call triton, torch_native and flashmla so."""
    step = Step()
    flat = step.q.view(3, -1)
    out = step.backend.forward(flat, step.k, step.k[..., :VALUES], step.layer(), step.batch)
    step.check(out)
    assert writes == ["whole"]


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
def test_on_a_gpu_the_kernel_writes_rows(
    in_parts: bool, takes: bool, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Mock(spec=KvWriter, config=SimpleNamespace(is_latent=True))
    writer.scale.return_value, writer.write_latent.return_value = UNSCALED, takes
    monkeypatch.setattr(kv_writes, "_writer", lambda model_runner, shape: writer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    model_runner = latent_runner(**GPU, token_to_kv_pool=make_pool(torch.bfloat16))
    store = KvWrites(model_runner, layers_of_runner(model_runner, "fa3"))
    k = torch.randn(3, 1, KEYS, dtype=torch.bfloat16)
    layer, batch = model_runner.model[1].attn_mqa, decode_batch([1, 2, 3], [5, 5, 2], [20, 21, 22])
    if in_parts:
        store.store(layer, batch, k[..., :VALUES], k[..., :VALUES], k[..., VALUES:])
    else:
        store.store(layer, batch, k, k[..., :VALUES])
    ((row, rope, slots, cache), _) = writer.write_latent.call_args
    assert torch.equal(torch.cat((row, rope), dim=-1) if in_parts else row, k)
    assert slots.tolist() == [20, 21, 22]
    assert cache.shape == (SLOTS, 1, KEYS)
    assert writes == ([] if takes else ["parts" if in_parts else "whole"])


def test_slots_of_a_draft_round_lie_one_after_another(writes: list[str]) -> None:
    """SGLang gives each step a column of its slots."""
    step = Step()
    step.batch.out_cache_loc = torch.tensor([[20, 9], [21, 10], [22, 11]])[:, 0]
    q, k, rope = step.parts()
    step.check(step.backend.forward(q, k, k, step.layer(), step.batch, **rope))
    assert step.batch.out_cache_loc.tolist() == [20, 21, 22]
    assert writes == ["parts"]


@pytest.mark.parametrize("layer_id", [0, 1])
def test_queries_and_keys_in_two_parts(layer_id: int, writes: list[str]) -> None:
    """Models call fa3 and flashinfer so."""
    step = Step()
    q, k, rope = step.parts()
    arguments = rope | {"topk_indices": None}
    out = step.backend.forward(q, k, k, step.layer(layer_id), step.batch, **arguments)
    step.check(out, layer_id)
    assert writes == ["parts"]


def test_queries_of_heads_that_lie_apart_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batched matrix product of the heads has this layout."""
    given = queries_of_runs(monkeypatch)
    step = Step()
    q, k, rope = step.parts()
    step.backend.forward(q, k, k, step.layer(0), step.batch, **rope)
    assert [each.data_ptr() for each in given] == [q.data_ptr()]


def test_keys_that_are_in_the_pool_already(writes: list[str]) -> None:
    step = Step()
    step.runner.token_to_kv_pool.kv_buffer[0][step.batch.out_cache_loc] = step.k
    q, k, rope = step.parts()
    options = {"save_kv_cache": False, **rope}
    step.check(step.backend.forward(q, k, k, step.layer(), step.batch, **options))
    assert writes == []


def test_rows_that_are_padded_for_the_ranks() -> None:
    """MLP synchronisation appends rows to the plan's; they read nothing."""
    step = Step()
    q, k, rope = step.parts()
    step.runner.token_to_kv_pool.kv_buffer[0][step.batch.out_cache_loc] = step.k
    more = torch.full((2, HEADS, KEYS), 7.0)
    out = step.backend.forward(
        torch.cat((q, more[..., :VALUES])),
        k,
        k,
        step.layer(),
        step.batch,
        save_kv_cache=False,
        q_rope=torch.cat((rope["q_rope"], more[..., VALUES:])),
    )
    step.check(out[:3])
    assert not out[3:].any()


def test_an_idle_rank_has_no_rows() -> None:
    step = Step()
    empty = torch.zeros(0, HEADS, VALUES)
    batch = decode_batch([], [], [])
    step.backend.init_forward_metadata(batch)
    out = step.backend.forward(
        empty, None, None, step.layer(), batch, q_rope=torch.zeros(0, HEADS, KEYS - VALUES)
    )
    assert out.shape == (0, HEADS * VALUES)


def test_the_twin_of_an_absorbed_layer_attends_in_prompts() -> None:
    step = Step()
    assert inside.planner(step.backend).layer_support.shapes == dict.fromkeys(
        (0, 1), HeadConfig(HEADS, 1, KEYS, VALUES)
    )
    step.batch.forward_mode = ForwardMode.EXTEND
    q = torch.randn(3, HEADS, 192)
    twin = step.runner.model[0].attn_mha
    assert step.backend.forward(q, None, None, twin, step.batch) is q
    assert step.backend.calls == ["extend"]


def test_a_twin_that_decodes_is_left_to_the_default_backend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = Step()
    q, twin = torch.randn(3, HEADS, 192), step.runner.model[0].attn_mha
    with caplog.at_level("INFO"):
        assert step.backend.forward(q, None, None, twin, step.batch).isinf().all()
    assert "latent attention that is not absorbed" in caplog.text
    assert [*inside.planner(step.backend).layer_support.shapes] == [1]


@pytest.mark.parametrize("name", ["attn_sink", "topk_indices", "cos_sin_cache", "sinks"])
def test_arguments_that_pat_does_not_know(name: str) -> None:
    step = Step()
    q, k, rope = step.parts()
    given = rope | {name: torch.zeros(HEADS)}
    assert step.backend.forward(q, k, k, step.layer(), step.batch, **given).isinf().all()
    reason = inside.planner(step.backend).layer_support.fallback[0]
    assert str(reason) == f"the argument {name}"


class OtherPool(MLATokenToKVPool):
    pass


def other_pool() -> MLATokenToKVPool:
    pool = make_pool()
    pool.__class__ = OtherPool
    return pool


def sparse_pool() -> MLATokenToKVPool:
    pool = make_pool()
    pool.use_dsa = True
    return pool


def adapted_model() -> torch.nn.ModuleList:
    model = make_model()
    for each in model:
        each.kv_b_proj.set_lora = False  # as in SGLang's layers with LoRA
    return model


def capped_model() -> torch.nn.ModuleList:
    model = make_model()
    for each in model:
        each.attn_mqa.logit_cap = 30.0
    return model


def speculating(algorithm: str, drafts: int, **change: Any) -> Any:
    arguments = server_arguments(
        speculative_algorithm=algorithm, speculative_num_draft_tokens=drafts
    )
    return latent_runner(server_args=arguments, **change)


GPU = {"device": "cuda", "dtype": torch.bfloat16, "kv_cache_dtype": torch.bfloat16}
NO_GAIN = "latent attention with nothing to gain"
DELEGATED: dict[str, Callable[[], Any]] = {
    f"{NO_GAIN}: 64 heads fill a tile": lambda: latent_runner(model=make_model(heads=64)),
    f"{NO_GAIN}: 8 heads x 6 draft tokens fill a tile": lambda: speculating("EAGLE", 6),
    f"{NO_GAIN}: 8 heads x 8 draft tokens fill a tile": lambda: speculating("EAGLE", 8),
    "latent attention with a soft-cap": lambda: latent_runner(model=capped_model()),
    f"{NO_GAIN}: 128 heads fill a tile": lambda: latent_runner(model=make_model(heads=128)),
    "trees of drafts over latent attention on a GPU": lambda: speculating(
        TREES[0], 4, **GPU, token_to_kv_pool=make_pool(torch.bfloat16)
    ),
    "latent attention with LoRA on kv_b_proj": lambda: latent_runner(model=adapted_model()),
    "dtype of queries and KV cache torch.float32 and torch.float16": lambda: latent_runner(
        kv_cache_dtype=torch.float16
    ),
    "dtype of queries and KV cache mxfp8": lambda: fp8_runner(kv_cache_dtype_str="mxfp8"),
    "KV pool OtherPool": lambda: latent_runner(token_to_kv_pool=other_pool()),
    "KV pool MLATokenToKVPool": lambda: latent_runner(token_to_kv_pool=sparse_pool()),
    "head_dim 128/64": lambda: latent_runner(
        model=make_model(rank=64), token_to_kv_pool=make_pool(rank=64)
    ),
    "latent attention on compute capability 10.0": lambda: latent_runner(
        **GPU, token_to_kv_pool=make_pool(torch.bfloat16)
    ),
    "sparse attention (DeepseekV32ForCausalLM)": lambda: latent_runner(
        model_config=config(
            hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048)
        )
    ),
}


@pytest.mark.parametrize("reason", DELEGATED)
def test_models_that_are_left_to_the_default_backend(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    layer_support = layers_of_runner(DELEGATED[reason](), "fa3")
    assert {str(each) for each in layer_support.fallback.values()} == {reason}
    assert {each.topic for each in layer_support.fallback.values()} <= {
        row.topic for row in support.support_matrix()
    }


@pytest.mark.parametrize("default", ["fa3", "flashinfer", "triton", "flashmla", "torch_native"])
@pytest.mark.parametrize(
    "model_runner",
    [
        latent_runner,
        lambda: latent_runner(token_to_kv_pool=make_pool(page_size=2)),
        lambda: fp8_runner(scale=1.0),  # SGLang stores it without scales, so pat reads it without
    ],
    ids=["tokens", "pages", "fp8"],
)
def test_models_that_pat_decodes(model_runner: Callable[[], Any], default: str) -> None:
    backend = pat_backend(model_runner(), default)
    assert [*inside.planner(backend).layer_support.shapes] == [0, 1]


def hybrid_pool(dtype: torch.dtype = torch.float32) -> HybridLinearKVPool:
    """Return SGLang's pool for KV of layers 1 and 3. The other layers keep a state."""
    pool = HybridLinearKVPool.__new__(HybridLinearKVPool)
    pool.full_kv_pool, pool.use_mla = make_pool(dtype), True
    pool.full_attention_layer_id_mapping = {1: 0, 3: 1}
    pool.layer_transfer_counter = None
    return pool


class Hybrid(torch.nn.Module):
    """Latent attention in layers 1 and 3; layer 0 has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(linear_layer_ids=[0, 2], full_attention_layer_ids=[1, 3])
        linear = RadixAttention(8, 128, 128**-0.5, num_kv_heads=8, layer_id=0)
        self.layers = torch.nn.ModuleList([linear, Attention(1), Attention(3)])


def test_latent_layers_among_layers_with_a_state() -> None:
    hybrid = {"model": Hybrid(), "token_to_kv_pool": hybrid_pool()}
    layer_support = layers_of_runner(latent_runner(**hybrid), "fa3")
    assert [*layer_support.shapes] == [1, 3]
    assert layer_support.fallback == {}
    hybrid["token_to_kv_pool"].full_kv_pool.use_dsa = True
    layer_support = layers_of_runner(latent_runner(**hybrid), "fa3")
    assert {str(each) for each in layer_support.fallback.values()} == {"KV pool MLATokenToKVPool"}


@pytest.mark.parametrize("default", ["triton", "flashmla"])
def test_backends_that_scale_latent_kv_keep_it(default: str) -> None:
    layer_support = layers_of_runner(fp8_runner(scale=0.5), default)
    reason = f"KV pool latent KV scaled by 0.5, under {default}"
    assert {str(each) for each in layer_support.fallback.values()} == {reason}


@pytest.mark.parametrize("default", ["fa3", "flashinfer"])
def test_scales_of_a_layer_do_not_count_over_an_fp8_cache(default: str) -> None:
    step = Step(fp8_runner(scale=0.5), default)
    layer = step.layer()
    nope, k, rope = step.parts()
    out = step.backend.forward(nope, k, k, layer, step.batch, save_kv_cache=False, **rope)
    exact = step.exact()
    torch.testing.assert_close(out.view(exact.shape).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafts", [2, 4, 5])
def test_chains_of_drafts_that_leave_room_in_a_tile(drafts: int) -> None:
    assert [*layers_of_runner(speculating("NEXTN", drafts), "fa3").shapes] == [0, 1]


@pytest.mark.parametrize(
    ("heads", "drafts", "default", "told"),
    [
        (8, 4, "fa3", ""),
        (32, 1, "fa3", ""),
        (16, 1, "flashmla", ""),
        (8, 2, "flashmla", ""),
        (8, 3, "flashmla", "8 heads x 3 draft tokens fill a tile too far beside flashmla over fp8"),
        (20, 1, "flashmla", "20 heads fill a tile too far beside flashmla over fp8"),
        (64, 1, "torch_native", "64 heads fill a tile"),
        (16, 4, "torch_native", "16 heads x 4 draft tokens fill a tile"),
        # fa3 converts the whole pool.
        (64, 1, "fa3", ""),
        (16, 4, "fa3", ""),
        (65, 1, "fa3", "65 heads fill a tile"),
    ],
)
def test_room_in_a_tile_over_an_fp8_cache(heads: int, drafts: int, default: str, told: str) -> None:
    arguments = server_arguments(speculative_algorithm="NEXTN", speculative_num_draft_tokens=drafts)
    change = {"server_args": arguments} if drafts > 1 else {}
    few = SimpleNamespace(req_to_token=torch.zeros(1, SLOTS, dtype=torch.int32), size=0)
    change["req_to_token_pool"] = few
    layer_support = layers_of_runner(fp8_runner(model=make_model(heads=heads), **change), default)
    reasons = {str(each) for each in layer_support.fallback.values()}
    assert reasons == ({f"{NO_GAIN}: {told}"} if told else set())


@pytest.mark.parametrize("requests", [1, 2])
def test_a_pool_must_be_large_for_all_rows_of_a_step(requests: int) -> None:
    """fa3 converts it in each layer; pat takes longer for each row."""
    pool = make_pool(torch.float8_e4m3fn, slots=256 * 16 * 4)
    table = SimpleNamespace(req_to_token=torch.zeros(2, 8, dtype=torch.int32), size=requests)
    arguments = server_arguments(speculative_algorithm="NEXTN", speculative_num_draft_tokens=4)
    change = {"server_args": arguments, "token_to_kv_pool": pool, "req_to_token_pool": table}
    layer_support = layers_of_runner(fp8_runner(model=make_model(heads=16), **change), "fa3")
    reason = (
        f"{NO_GAIN}: 16 heads x 4 draft tokens fill a tile, and fa3 converts 16,384 tokens soon "
        "(pat: from 32,768 on)"
    )
    found = {str(each) for each in layer_support.fallback.values()}
    assert found == ({reason} if requests == 2 else set())


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_with_kernels(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    pool = make_pool(torch.bfloat16)
    layer_support = layers_of_runner(latent_runner(**GPU, token_to_kv_pool=pool), "fa3")
    assert [*layer_support.shapes] == [0, 1]
