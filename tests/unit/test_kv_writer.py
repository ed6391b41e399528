"""KvWriter on a fake device: which tensors it accepts, and the kernel's arguments."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_parameters import parameters

from sglang_pat._launch_params import ScaleUse
from sglang_pat.executors import kv_writer
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import UNSCALED, KvScale, KvWriter

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
TOKENS, HEADS, DIM, V_DIM, SLOTS = 5, 2, 192, 128, 20


Params: Any = parameters("WriteParams")


def strided(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype):
    """Return a tensor at an address."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def as_on_a_gpu(numbers: torch.Tensor, use: ScaleUse, scale: torch.Tensor) -> torch.Tensor:
    """Divide as on a GPU by a device tensor or a host number, which differs from torch on a CPU."""
    if use == ScaleUse.DIVIDE:
        return (numbers.float() / scale.to(numbers.dtype).float()).to(numbers.dtype)
    assert use == ScaleUse.MULTIPLY
    return (numbers.float() * scale).to(numbers.dtype)


class Device:
    """Executes write_kv on the host in torch, from the kernel's argument."""

    def __init__(self, config: KernelConfig) -> None:
        self.launches: list[tuple[int, int]] = []
        self.params: list[Any] = []
        self._config = config
        self.write_kv = self._launch
        self.facts = SimpleNamespace(write_threads=128)
        self.scaled = as_on_a_gpu

    def _launch(self, argument: int, stream: int, grid: tuple[int, int]) -> None:
        self.launches.append(grid)
        (address,) = (ctypes.c_void_p * 1).from_address(argument)
        params = Params.from_buffer_copy(Params.from_address(address))
        self.params.append(params)
        index_dtype = torch.int64 if params.slots.is_int64 else torch.int32
        num_tokens, _ = grid
        slots = strided(params.slots.data.value, (num_tokens,), (1,), index_dtype).long()
        config = self._config
        columns_of = config.head_dim, config.v_head_dim
        if config.is_latent:
            columns_of = config.v_head_dim, config.head_dim - config.v_head_dim
        for rows, columns in zip(params.rows, columns_of, strict=True):
            shape = num_tokens, params.num_kv_heads, columns
            strides = rows.token_stride, rows.head_stride, 1
            numbers = strided(rows.source.value, shape, strides, config.dtype)
            if rows.scale_use:
                scale = strided(rows.scale.value, (1,), (1,), torch.float32)
                numbers = self.scaled(numbers, ScaleUse(rows.scale_use), scale)
            stored = numbers.to(config.cache_dtype).contiguous().view(torch.uint8).flatten(1)
            shape = params.num_slots, stored.shape[1]
            cache = strided(rows.cache.value, shape, (rows.slot_bytes, 1), torch.uint8)
            kept = slots != 0
            cache[slots[kept]] = stored[kept]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device(KernelConfig(BF16, DIM, (9, 0), V_DIM, E4M3))
    for owner, name, value in (
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0)),
        (torch.cuda, "current_device", lambda: 0),
        (kv_writer, "load_kernels", lambda config, index: fake),
    ):
        monkeypatch.setattr(owner, name, value)
    return fake


@pytest.fixture
def writer(device: Device) -> KvWriter:
    return KvWriter(device._config, CPU)


@pytest.fixture
def plain_writer(device: Device) -> KvWriter:
    """Return a writer for a cache of the model's dtype."""
    device._config = KernelConfig(BF16, DIM, (9, 0), V_DIM)
    return KvWriter(device._config, CPU)


def tensors(cache_dtype: torch.dtype = E4M3, heads: int = HEADS) -> dict[str, torch.Tensor]:
    """Return the tensors of a write, as slices of a fused qkv."""
    widths = [4 * heads * DIM, heads * DIM, heads * V_DIM]
    _, k, v = torch.randn(TOKENS, sum(widths)).to(BF16).split(widths, dim=1)
    return {
        "k": k.view(TOKENS, heads, DIM),
        "v": v.view(TOKENS, heads, V_DIM),
        "slots": torch.tensor([3, 19, 0, 7, 1]),
        "k_cache": torch.zeros(SLOTS, heads, DIM, dtype=cache_dtype),
        "v_cache": torch.zeros(SLOTS, heads, V_DIM, dtype=cache_dtype),
    }


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_what_is_written(writer: KvWriter, device: Device, index_dtype: torch.dtype) -> None:
    given = tensors()
    given["slots"] = given["slots"].to(index_dtype)
    divisor = torch.tensor(0.217)
    on_device, number = writer.scale(divisor), writer.scale(1.7)
    assert on_device is not None
    assert number is not None
    assert writer.write(**given, k_scale=on_device, v_scale=number)
    factor = torch.tensor(1 / 1.7)
    for name, scaled in (
        ("k", as_on_a_gpu(given["k"], ScaleUse.DIVIDE, divisor)),
        ("v", as_on_a_gpu(given["v"], ScaleUse.MULTIPLY, factor)),
    ):
        cache = given[f"{name}_cache"].view(torch.uint8)
        expected = torch.zeros_like(cache)
        expected[[3, 19, 7, 1]] = scaled[[0, 1, 3, 4]].to(E4M3).view(torch.uint8)
        assert cache.equal(expected)
    assert device.launches == [(TOKENS, 1)]
    infinity = torch.tensor([torch.inf], dtype=BF16).to(E4M3).view(torch.uint8)
    assert device.params[0].overflow == int(infinity)


@pytest.mark.parametrize("heads", [1, 2, 13])
def test_numbers_of_the_models_dtype_are_stored_as_they_are(
    plain_writer: KvWriter, device: Device, heads: int
) -> None:
    """Scales do not matter: SGLang's pools divide only numbers that they convert."""
    for divisor in (None, 0.5, torch.tensor(0.5), torch.tensor([0.5, 2.0])):
        assert plain_writer.scale(divisor) == UNSCALED
    given = tensors(BF16, heads)
    given["k"][1, 0, 0] = torch.nan
    assert plain_writer.write(**given)
    for name in ("k", "v"):
        cache = given[f"{name}_cache"].view(torch.int16)
        expected = torch.zeros_like(cache)
        expected[[3, 19, 7, 1]] = given[name].view(torch.int16)[[0, 1, 3, 4]]
        assert cache.equal(expected)
    # A column of CTAs per token, a thread per 8 numbers.
    assert device.launches == [(TOKENS, -(-heads * (DIM + V_DIM) // 8 // 128))]


def misaligned(rows: torch.Tensor) -> torch.Tensor:
    shifted = torch.zeros(rows.numel() + 8, dtype=rows.dtype)
    first = next(i for i in range(8) if (shifted.data_ptr() + 2 * i) % 16 == 2)
    return shifted[first : first + rows.numel()].view(rows.shape)


MISFITS = {
    "k of another type": lambda t: {"k": t["k"].half()},
    "v in fp8 already": lambda t: {"v": t["v"].to(E4M3)},
    "a cache of another type": lambda t: {"k_cache": t["k_cache"].to(E5M2)},
    "a cache of another model": lambda t: {"k_cache": t["k_cache"].half()},
    "a cache of bytes": lambda t: {"v_cache": t["v_cache"].to(torch.uint8)},
    "k in rows": lambda t: {"k": t["k"].reshape(TOKENS, -1)},
    "more heads than the cache": lambda t: {
        "k": t["k"].repeat(1, 2, 1),
        "v": t["v"].repeat(1, 2, 1),
    },
    "other columns": lambda t: {"k": t["k"][..., :128], "k_cache": t["k_cache"][..., :128]},
    "columns that lie apart": lambda t: {"v": torch.zeros(TOKENS, HEADS, 256).to(BF16)[..., ::2]},
    "k that is not aligned": lambda t: {"k": misaligned(t["k"])},
    "rows that are not aligned": lambda t: {
        "v": torch.zeros(TOKENS, HEADS * V_DIM + 4).to(BF16)[:, :-4].unflatten(1, (HEADS, V_DIM))
    },
    "heads of the cache that lie apart": lambda t: {
        "k_cache": torch.zeros(SLOTS, HEADS, 256, dtype=t["k_cache"].dtype)[..., :DIM]
    },
    "caches of different sizes": lambda t: {"v_cache": t["v_cache"][:-1]},
    "fewer slots than tokens": lambda t: {"slots": t["slots"][:-1]},
    "slots that lie apart": lambda t: {"slots": torch.arange(2 * TOKENS)[::2]},
    "slots of another type": lambda t: {"slots": t["slots"].to(torch.int16)},
    "fewer values than keys": lambda t: {"v": t["v"][:-1]},
}


@pytest.mark.parametrize("kind", ["writer", "plain_writer"])
@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS.keys())
def test_what_it_does_not_take(
    request: pytest.FixtureRequest, device: Device, kind: str, change: Any
) -> None:
    writer: KvWriter = request.getfixturevalue(kind)
    given = tensors(writer.config.cache_dtype)
    assert writer.write(**(given | change(given))) is False
    assert device.launches == []
    for name in ("k_cache", "v_cache"):
        assert not given[name].view(torch.uint8).any()


def test_values_that_are_the_keys_are_scaled_twice_by_torch(device: Device) -> None:
    device._config = KernelConfig(BF16, V_DIM, (9, 0), 0, E4M3)
    writer, given = KvWriter(device._config, CPU), tensors()
    given |= {"k": given["v"], "k_cache": torch.zeros_like(given["v_cache"])}
    scale = writer.scale(0.5)
    assert scale is not None
    assert writer.write(**given, k_scale=scale) is False
    assert writer.write(**given, v_scale=scale) is False
    assert device.launches == []
    assert writer.write(**given)


def test_no_tokens_are_no_launch(writer: KvWriter, device: Device) -> None:
    given = tensors()
    assert writer.write(**(given | {name: given[name][:0] for name in ("k", "v", "slots")}))
    assert device.launches == []


def test_scales(writer: KvWriter) -> None:
    assert writer.scale(None) == UNSCALED
    parameter = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    assert writer.scale(parameter) == KvScale(parameter.data_ptr(), ScaleUse.DIVIDE)
    number = writer.scale(0.3)
    assert number is not None
    assert number.use == ScaleUse.MULTIPLY
    assert strided(number.address, (1,), (1,), torch.float32).item() == torch.tensor(1 / 0.3).item()
    assert writer.scale(0.3) == number != writer.scale(0.4)


@pytest.mark.parametrize(
    "divisor",
    [torch.tensor([0.5]), torch.tensor(0.5, dtype=BF16), torch.empty((), device="meta")],
    ids=["of one dimension", "of another type", "elsewhere"],
)
def test_tensors_that_torch_does_not_round(writer: KvWriter, divisor: torch.Tensor) -> None:
    assert writer.scale(divisor) is None


def test_kernel_and_torch_are_compared(writer: KvWriter, device: Device) -> None:
    divisor = torch.tensor(0.3137)

    def as_on_this_cpu(numbers: torch.Tensor, use: ScaleUse, _: torch.Tensor) -> torch.Tensor:
        return numbers / (divisor if use == ScaleUse.DIVIDE else float(divisor))

    device.scaled = as_on_this_cpu
    assert writer.agrees_with_torch()
    # K and V are unscaled, scaled by a number, or scaled by a tensor.
    assert [params.rows[0].scale_use for params in device.params] == [0, 1, 2]
    assert all(num_tokens * V_DIM >= 2**16 for num_tokens, _ in device.launches)
    for wrong in (ScaleUse.MULTIPLY, ScaleUse.DIVIDE):
        device.scaled = lambda numbers, use, scale, wrong=wrong: (
            -numbers if use == wrong else as_on_this_cpu(numbers, use, scale)
        )
        assert not writer.agrees_with_torch()


def test_a_copy_is_compared_once(
    plain_writer: KvWriter, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plain_writer.agrees_with_torch()
    ((num_tokens, _),) = device.launches
    assert num_tokens * V_DIM >= 2**16
    real = device._launch

    def another_bit(argument: int, stream: int, grid: tuple[int, int]) -> None:
        real(argument, stream, grid)
        values = device.params[-1].rows[1]
        ctypes.c_uint8.from_address(values.cache.value + values.slot_bytes).value ^= 1

    monkeypatch.setattr(device, "write_kv", another_bit)
    assert not plain_writer.agrees_with_torch()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_of_latent_attention_has_two_sources(device: Device, parts: int) -> None:
    """The sources are one tensor of all columns, or one of V and one of rope."""
    device._config = KernelConfig(BF16, 576, (9, 0), 512)
    writer = KvWriter(device._config, CPU)
    k = torch.randn(TOKENS, 1, 576).to(BF16)
    slots, cache = torch.tensor([3, 19, 0, 7, 1]), torch.zeros(SLOTS, 1, 576, dtype=BF16)
    given = (k, None) if parts == 1 else (k[..., :512].contiguous(), k[..., 512:])
    assert writer.write_latent(*given, slots, cache)
    expected = torch.zeros_like(cache)
    expected[[3, 19, 7, 1]] = k[[0, 1, 3, 4]]
    assert cache.equal(expected)
    assert device.launches == [(TOKENS, 1)]
    assert not writer.write_latent(k[..., :500], k[..., 512:], slots, cache)
    assert not writer.write_latent(k[..., 1:], None, slots, cache)
    assert writer.agrees_with_torch()
