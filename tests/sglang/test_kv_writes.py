"""The right kernel stores new tokens' KV: pat's, or that of SGLang's pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.backends import HEAD_DIM, KV_HEADS, QO_HEADS, SLOTS, decode_batch, layers, runner
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import UNSCALED, KvScale
from sglang_pat.sglang.layer import kv_writes
from sglang_pat.sglang.layer.kv_writes import KvWrites, pool_reason
from sglang_pat.sglang.start.layer_rules import are_scaled, is_converted, layers_of_model

pytestmark = pytest.mark.usefixtures("server_context")

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


class Writer:
    """Stands in for KvWriter: writes 7s if it accepts the tensors."""

    agrees = True

    def __init__(self, config: KernelConfig, device: torch.device) -> None:
        self.config = config
        self.takes = True
        self.prepared: list[Any] = []
        self.given: list[tuple[Any, ...]] = []

    def agrees_with_torch(self) -> bool:
        return self.agrees

    def scale(self, divisor: Any) -> KvScale | None:
        self.prepared.append(divisor)
        return None if divisor == math.pi else UNSCALED

    def write(self, k: Any, v: Any, slots: Any, keys: Any, values: Any, *scales: Any) -> bool:
        self.given.append((k, v, slots, keys, values, *scales))
        for cache in (keys, values):
            if self.takes:
                cache.view(torch.uint8)[slots] = 7
        return self.takes


@pytest.fixture(autouse=True)
def _no_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_writes, "KvWriter", Writer)
    monkeypatch.setattr(
        KernelConfig,
        "for_device",
        lambda dtype, head_dim, device, *more: KernelConfig(dtype, head_dim, (9, 0), *more),
    )


def plain_pool(dtype: torch.dtype = E4M3) -> MHATokenToKVPool:
    return MHATokenToKVPool(SLOTS, 1, dtype, KV_HEADS, HEAD_DIM, 2, "cpu", False)


def fp8_runner(**change: Any) -> Any:
    fields = {
        "device": "cuda",
        "dtype": BF16,
        "kv_cache_dtype": E4M3,
        "kv_cache_dtype_str": "fp8_e4m3",
        "token_to_kv_pool": plain_pool(),
    }
    return runner(**(fields | change))


def bf16_runner(**change: Any) -> Any:
    """Return a runner whose pool has the model's dtype."""
    fields = {
        "kv_cache_dtype": BF16,
        "kv_cache_dtype_str": "auto",
        "token_to_kv_pool": plain_pool(BF16),
    }
    return fp8_runner(**(fields | change))


of_both_pools = pytest.mark.parametrize("runner_of", [fp8_runner, bf16_runner], ids=["fp8", "bf16"])


def writes_of(model_runner: Any, default: str = "triton") -> KvWrites:
    layer_support = layers_of_model(model_runner.model, default, None, lambda layer: None)
    layer_support.are_scaled = are_scaled(model_runner, default)
    layer_support.is_converted = is_converted(model_runner)
    return KvWrites(model_runner, layer_support)


def store(writes: KvWrites, model_runner: Any, layer_id: int = 1) -> torch.Tensor:
    """Store a token in slot 9; return its bytes of K and V in the pool."""
    pool = model_runner.token_to_kv_pool
    keys, values = pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id)
    k, v = torch.full((2, 1, KV_HEADS, HEAD_DIM), 3.0, dtype=BF16)
    batch = decode_batch([1], [1], [9])
    writes.store(model_runner.model[layer_id], batch, k, v)
    return torch.stack([keys.view(torch.uint8)[9], values.view(torch.uint8)[9]])


def by_torch(model_runner: Any, number: torch.Tensor | None = None) -> torch.Tensor:
    """Return the bytes that torch stores for this number, or for the test's number."""
    row = torch.full((HEAD_DIM,), 3.0 if number is None else float(number), dtype=BF16)
    return row.to(model_runner.kv_cache_dtype).view(torch.uint8)


@of_both_pools
def test_the_kernel_writes_to_a_plain_pool(
    runner_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model_runner = runner_of()
    with caplog.at_level("INFO"):
        writes = writes_of(model_runner)
    assert (store(writes, model_runner) == 7).all()
    writer = writes._writers[1]
    assert writes._writers == {0: writer, 1: writer}
    kv_dtype = model_runner.kv_cache_dtype
    assert writer.config == KernelConfig(BF16, HEAD_DIM, (9, 0), HEAD_DIM, kv_dtype)
    (given,) = writer.given
    assert given[2].tolist() == [9]
    assert caplog.messages == []


def test_scales_are_those_of_the_layer() -> None:
    scales = {"k_scale": torch.tensor(0.5), "v_scale": 3.0}
    model_runner = fp8_runner(model=layers(**scales))
    writes = writes_of(model_runner)
    writer: Any = writes._writers[1]
    # Scales are prepared before the first step, which may be captured.
    assert writer.prepared == [None, None, scales["k_scale"], 3.0]
    store(writes, model_runner)
    assert writer.prepared[4:] == [scales["k_scale"], 3.0]


@of_both_pools
def test_the_pool_stores_what_the_kernel_does_not_take(runner_of: Callable[..., Any]) -> None:
    model_runner = runner_of()
    writes = writes_of(model_runner)
    writer: Any = writes._writers[1]
    writer.takes = False
    assert (store(writes, model_runner) == by_torch(model_runner)).all()
    assert len(writer.given) == 1


def test_a_pool_of_the_models_dtype_scales_nothing() -> None:
    """Such a pool scales nothing even if the model has scales, as fp8 checkpoints do."""
    model_runner = bf16_runner(model=layers(k_scale=torch.tensor(0.5), v_scale=3.0))
    writes = writes_of(model_runner)
    writer: Any = writes._writers[1]
    for takes in (True, False):
        writer.takes = takes
        expected = 7 if takes else by_torch(model_runner)
        assert (store(writes, model_runner) == expected).all()


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_the_pool_scales_by_what_the_kernel_cannot(name: str) -> None:
    model_runner = fp8_runner(model=layers(**{name: math.pi}))
    writes = writes_of(model_runner)
    stored = store(writes, model_runner)
    plain = by_torch(model_runner)
    scaled = by_torch(model_runner, torch.tensor(3.0, dtype=BF16) / math.pi)
    expected = {"k_scale": (scaled, plain), "v_scale": (plain, scaled)}[name]
    assert (stored[0] == expected[0]).all()
    assert (stored[1] == expected[1]).all()
    assert writes._writers[1].given == []


@pytest.mark.parametrize(
    ("runner_of", "device", "default"),
    [
        (fp8_runner, "cpu", "triton"),
        (bf16_runner, "cpu", "triton"),
        (fp8_runner, "cuda", "torch_native"),
    ],
    ids=["fp8, on a CPU", "bf16, on a CPU", "under a default backend that does not scale"],
)
def test_the_pool_stores_without_a_word(
    runner_of: Callable[..., Any], device: str, default: str, caplog: pytest.LogCaptureFixture
) -> None:
    model_runner = runner_of(device=device)
    with caplog.at_level("INFO"):
        writes = writes_of(model_runner, default)
    assert (store(writes, model_runner) == by_torch(model_runner)).all()
    assert caplog.messages == []


def test_a_copy_needs_no_scales_of_the_default_backend() -> None:
    model_runner = bf16_runner()
    assert (store(writes_of(model_runner, "torch_native"), model_runner) == 7).all()


@of_both_pools
def test_another_arithmetic_than_torchs_is_not_used(
    runner_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Writer, "agrees", False)
    model_runner = runner_of()
    with caplog.at_level("INFO"):
        writes = writes_of(model_runner)
    assert (store(writes, model_runner) == by_torch(model_runner)).all()
    assert caplog.messages == [
        f"SGLang's pool stores new KV itself: torch {torch.__version__} stores torch.bfloat16 in "
        "another way than pat"
    ]


class Special(MHATokenToKVPool):
    """A subclass, which may store KV in another way."""


def around(kind: type, pool: Any, **fields: Any) -> Any:
    """Return a pool that wraps another one, with the attributes that pat reads."""
    made = object.__new__(kind)
    made.__dict__.update(full_kv_pool=pool, **fields)
    return made


def changed(name: str, value: Any) -> Any:
    pool = plain_pool()
    setattr(pool, name, value)
    return pool


OVER_WINDOWS = {"layers_mapping": {0: (0, True), 1: (0, False)}}
POOLS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "plain": (plain_pool, None),
    "beside windows": (lambda: around(SWAKVPool, plain_pool(), **OVER_WINDOWS), None),
    "beside states": (lambda: around(HybridLinearKVPool, plain_pool()), None),
    "a subclass": (
        lambda: Special(SLOTS, 1, E4M3, KV_HEADS, HEAD_DIM, 2, "cpu", False),
        "it is a Special",
    ),
    "a subclass beside states": (
        lambda: around(HybridLinearKVPool, changed("__class__", Special)),
        "it is a Special",
    ),
    "a subclass of hybrids": (
        lambda: around(type("Unified", (SWAKVPool,), {}), plain_pool(), **OVER_WINDOWS),
        "it is a Unified",
    ),
    "quantized": (
        lambda: changed("quant_method", SimpleNamespace(name="nvfp4")),
        "it quantizes by a method of its own",
    ),
    "heads first": (lambda: changed("kv_cache_layout", "hnd"), "its layout is hnd"),
    "pages first": (lambda: changed("kv_cache_layout", "page_major"), "its layout is page_major"),
}


@pytest.mark.parametrize(("make", "reason"), POOLS.values(), ids=POOLS.keys())
def test_pools(make: Callable[[], Any], reason: str | None) -> None:
    assert pool_reason(make(), 1) == reason


def test_the_pool_checks_slots_where_it_is_asked_to() -> None:
    with envs.SGLANG_ENABLE_ASYNC_ASSERT.override(True):
        assert pool_reason(plain_pool(), 1) == (
            "SGLANG_ENABLE_ASYNC_ASSERT, with which it checks slots"
        )


def window_pools(window: Any) -> Any:
    pool = around(SWAKVPool, plain_pool(), **OVER_WINDOWS, layer_transfer_counter=None)
    pool.swa_kv_pool = window
    return pool


def test_layers_with_windows_have_slots_of_their_own() -> None:
    model_runner = fp8_runner(token_to_kv_pool=window_pools(plain_pool()))
    writes = writes_of(model_runner)
    writes._window_slots = torch.arange(SLOTS) + 1
    for step in range(2):
        writes.begin_step()
        for layer_id, slot in ((0, 10 + step), (1, 9)):
            store(writes, model_runner, layer_id)
            writer: Any = writes._writers[layer_id]
            assert writer.given[-1][2].tolist() == [slot]
        writes._window_slots = writes._window_slots + 1  # SGLang has freed window slots


def test_layers_are_asked_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    pool = window_pools(changed("kv_cache_layout", "hnd"))
    model_runner = fp8_runner(token_to_kv_pool=pool)
    with caplog.at_level("INFO"):
        writes = writes_of(model_runner)
    assert list(writes._writers) == [1]
    assert caplog.messages == ["SGLang's pool stores new KV itself: its layout is hnd"]


def test_shapes_have_a_writer_each() -> None:
    model = layers(3, tp_q_head_num=QO_HEADS * 2)
    writes = writes_of(fp8_runner(model=model))
    assert writes._writers[0] is writes._writers[1] is not writes._writers[2]
