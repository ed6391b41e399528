"""KvWriter on a GPU stores the same bytes as torch in SGLang's pool."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from pack_decode_cases import BF16, FP16, Heads, Tensors, planned
from sample_forests import make_case
from slot_placements import move, place

from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import UNSCALED, KvWriter
from sglang_pat.support import GQA_HEAD_DIMS, has_kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KV_DTYPES = [E4M3, E5M2, None]  # of the pool. None: the model's type
KV_NAMES = ["e4m3", "e5m2", "as they are"]
all_types = pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=KV_NAMES)
both_pools = pytest.mark.parametrize("kv_dtype", [E4M3, None], ids=["e4m3", "as they are"])
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
# Division by 1 changes only the sign of NaN. float16 rounds 1e-9 to 0 and 1e30 to infinity.
DIVISORS = [1.0, 0.3137, 3.0, 0.00217, 448.0, 1e-9, 1e30, 1e-42, -0.5]


def writer_of(
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = E4M3,
    pair: tuple[int, int] = (128, 128),
) -> KvWriter:
    device = torch.device("cuda", torch.cuda.current_device())
    if not has_kernels(*pair, torch.cuda.get_device_capability()):
        pytest.skip(f"has no kernels of head_dim {pair[0]} on this GPU")
    return KvWriter(KernelConfig.for_device(dtype, pair[0], device, pair[1], kv_dtype), device)


def caches(num_slots: int, num_heads: int, config: KernelConfig) -> list[torch.Tensor]:
    """Return caches of bytes that differ from most converted numbers."""
    num_bytes = config.cache_dtype.itemsize
    return [
        torch.full((num_slots, num_heads, n * num_bytes), 0xA5, dtype=torch.uint8, device="cuda")
        for n in (config.head_dim, config.v_head_dim)
    ]


def in_torch(
    rows: torch.Tensor, divisor: torch.Tensor | float | None, kv_dtype: torch.dtype
) -> torch.Tensor:
    """Convert as MHATokenToKVPool.set_kv_buffer() does before it stores."""
    rows = rows.clone()
    if divisor is not None and rows.dtype != kv_dtype:
        rows.div_(divisor)
    return rows.to(kv_dtype).view(torch.uint8)


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Return every bit pattern, as 64 tokens of 8 heads."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda")
    return patterns.view(dtype).view(64, 8, 128)


def check_write(
    writer: KvWriter,
    k: torch.Tensor,
    v: torch.Tensor,
    k_divisor: torch.Tensor | float | None = None,
    v_divisor: torch.Tensor | float | None = None,
    index_dtype: torch.dtype = torch.int64,
) -> None:
    """Compare the whole pool with a copy to which torch writes."""
    config = writer.config
    num_slots = 3 * len(k) + 5
    slots = (torch.randperm(num_slots - 1, device="cuda")[: len(k)] + 1).to(index_dtype)
    written, expected = (caches(num_slots, k.shape[1], config) for _ in range(2))
    scales = writer.scale(k_divisor), writer.scale(v_divisor)
    assert None not in scales
    before = k.clone(), v.clone()
    views = [cache.view(config.cache_dtype) for cache in written]
    assert writer.write(k, v, slots, *views, *scales)
    for cache, rows, divisor in zip(expected, before, (k_divisor, v_divisor), strict=True):
        cache[slots.long()] = in_torch(rows, divisor, config.cache_dtype)
    for cache, reference in zip(written, expected, strict=True):
        different = (cache != reference).nonzero()
        assert len(different) == 0, f"{len(different)} bytes differ, the first at {different[0]}"
    for rows, was in zip((k, v), before, strict=True):
        assert rows.view(torch.int16).equal(was.view(torch.int16))


@all_types
@both_dtypes
def test_every_number_by_every_scale(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """All 65,536 bit patterns are stored, with NaN, infinity, overflow and subnormal numbers."""
    writer = writer_of(dtype, kv_dtype)
    numbers = all_numbers(dtype)
    check_write(writer, numbers, numbers.flip(0))
    for divisor in DIVISORS + (torch.rand(20) * 0.2 + 1e-4).tolist():
        on_device = torch.tensor(divisor, dtype=torch.float32, device="cuda")
        check_write(writer, numbers, numbers.flip(0), divisor, on_device)
        check_write(writer, numbers, numbers.flip(0), on_device, divisor)


@both_dtypes
@pytest.mark.parametrize(
    ("pair", "kv_dtype"),
    [
        *(
            (pair, kv_dtype)
            for pair, kv_dtype in product(GQA_HEAD_DIMS, (E4M3, None))
            if has_kernels(*pair, (9, 0), one_byte=kv_dtype is not None)
        ),
        ((128, 128), E5M2),
    ],
    ids=str,
)
def test_shapes(pair: tuple[int, int], kv_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """K and V are strided parts of a fused qkv; slots have both index types."""
    writer = writer_of(dtype, kv_dtype, pair)
    scale = torch.tensor(0.217, device="cuda")
    for num_tokens, num_heads in product((1, 8, 333), (1, 2, 8, 13)):
        widths = [4 * num_heads * pair[0], num_heads * pair[0], num_heads * pair[1]]
        qkv = torch.randn(num_tokens, sum(widths), device="cuda").to(dtype) * 30
        _, k, v = qkv.split(widths, dim=1)
        k, v = k.view(num_tokens, num_heads, pair[0]), v.view(num_tokens, num_heads, pair[1])
        check_write(writer, k, v, None, None, torch.int32)
        check_write(writer, k, v, scale, 1.7)
        apart = torch.randn(num_heads, num_tokens, pair[0], device="cuda").to(dtype).transpose(0, 1)
        check_write(writer, apart, v, 0.2, None)
        check_write(writer, k[:, :1].expand(k.shape), v)
        if pair[0] == pair[1]:
            check_write(writer, k, k)


@both_pools
def test_padding_is_not_written(kv_dtype: torch.dtype | None) -> None:
    """Tokens without a slot write nothing."""
    writer = writer_of(kv_dtype=kv_dtype)
    cache_dtype = writer.config.cache_dtype
    k = torch.randn(5, 2, 128, device="cuda", dtype=BF16)
    slots = torch.tensor([0, 3, 0, 1, 0], device="cuda")
    written = caches(6, 2, writer.config)
    assert writer.write(k, -k, slots, *(cache.view(cache_dtype) for cache in written))
    for cache, rows in zip(written, (k, -k), strict=True):
        expected = torch.full_like(cache, 0xA5)
        expected[[3, 1]] = in_torch(rows[[1, 3]], None, cache_dtype)
        assert cache.equal(expected)


def test_no_tokens() -> None:
    writer = writer_of()
    k = torch.empty(0, 2, 128, device="cuda", dtype=BF16)
    slots = torch.empty(0, device="cuda", dtype=torch.int64)
    assert writer.write(k, k, slots, *(each.view(E4M3) for each in caches(6, 2, writer.config)))
    torch.cuda.synchronize()


def test_kernel_and_torch_agree() -> None:
    for dtype, kv_dtype in product((BF16, FP16), KV_DTYPES):
        assert writer_of(dtype, kv_dtype).agrees_with_torch()
    assert writer_of(BF16, E4M3, (192, 128)).agrees_with_torch()
    assert writer_of(BF16, None, (192, 128)).agrees_with_torch()
    other = writer_of()
    other._overflow ^= 1
    assert not other.agrees_with_torch()


@both_pools
def test_a_graph_reads_slots_numbers_and_scales_anew(kv_dtype: torch.dtype | None) -> None:
    writer = writer_of(kv_dtype=kv_dtype)
    cache_dtype = writer.config.cache_dtype
    k, v = torch.randn(2, 8, 2, 128, device="cuda", dtype=BF16)
    slots = torch.arange(1, 9, device="cuda")
    divisor = torch.tensor(0.3, device="cuda")
    on_device, number = writer.scale(divisor), writer.scale(0.7)
    assert on_device is not None
    assert number is not None
    written = caches(40, 2, writer.config)
    views = [cache.view(cache_dtype) for cache in written]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert writer.scale(0.7) == number
        # A scale as a number would be constant in a graph. A copy without conversion needs none.
        assert writer.scale(0.8) == (None if kv_dtype else UNSCALED)
        assert writer.write(k, v, slots, *views, on_device, number)
    for _ in range(3):
        k.normal_()
        v.normal_()
        slots.copy_(torch.randperm(39, device="cuda")[:8] + 1)
        divisor.uniform_(0.1, 0.9)
        for cache in written:
            cache.fill_(0xA5)
        graph.replay()
        expected = caches(40, 2, writer.config)
        expected[0][slots] = in_torch(k, divisor, cache_dtype)
        expected[1][slots] = in_torch(v, 0.7, cache_dtype)
        assert all(map(torch.equal, written, expected))


@both_pools
@pytest.mark.parametrize(
    ("lengths", "placement"),
    [
        ([(0, 90)] * 5, "scattered"),
        ([(-1, 500)] * 132, "scattered"),
        # The new token is the last of a full stage, which is copied as one run.
        ([(0, 96)] * 5, "ranges"),
        ([(-1, 512)] * 132, "ranges"),
    ],
    ids=["shared", "alone", "shared, runs", "alone, runs"],
)
def test_attention_reads_what_was_just_written(
    lengths: list[tuple[int, int]], placement: str, kv_dtype: torch.dtype | None
) -> None:
    """Layers that overlap have the same bits as layers that wait for the device.

    Each kernel starts before the kernel in front of it ends. A layer's K and V are computed by
    torch from the output of the layer before, and all layers write to the same slots.
    """
    case = make_case([(-1, 700)], lengths)
    case = move(case, place(case, placement))
    heads = Heads(8, 2, kv_dtype=kv_dtype)
    cache_dtype = kv_dtype or heads.dtype
    tensors = Tensors.make(case, heads)
    num_tokens = len(case.seq_lens)
    written = [
        cache.nan_to_num(0.0).to(cache_dtype).contiguous()
        for cache in (tensors.k_cache, tensors.v_cache)
    ]
    rows = tensors.req_to_token[tensors.req_pool_indices]
    slots = rows.gather(1, tensors.seq_lens[:, None] - 1).squeeze(1).long()
    _, step = planned(case, heads, tensors)
    writer = writer_of(kv_dtype=kv_dtype)
    divisor = torch.tensor(0.37, device="cuda")
    k_scale, scale = float(divisor) if kv_dtype else 1.0, writer.scale(divisor)
    assert scale is not None
    outputs = tensors.q.new_empty((21, *tensors.q.shape))
    weights = torch.randn(8 * 128, 2 * 2 * 128, device="cuda", dtype=BF16)

    def layers(*, by_kernel: bool) -> torch.Tensor:
        outputs.fill_(torch.nan)
        outputs[0] = tensors.q
        for before, after in pairwise(outputs):
            # Such large numbers give a new token all of a head's weight, or none.
            kv = 100 * (before.view(num_tokens, -1) @ weights).tanh()
            k, v = kv.view(num_tokens, 2, 2, 128).unbind(1)
            if by_kernel:
                assert writer.write(k, v, slots, *written, scale, UNSCALED)
            else:
                for cache, new, by in zip(written, (k, v), (divisor, None), strict=True):
                    cache.view(torch.uint8)[slots] = in_torch(new, by, cache_dtype)
                torch.cuda.synchronize()
            step.decode(before, *written, after, k_scale=k_scale)
            if not by_kernel:
                torch.cuda.synchronize()
        return outputs

    expected = layers(by_kernel=False).clone()
    assert not expected.isnan().any()
    assert layers(by_kernel=True).equal(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(by_kernel=True)
    for _ in range(5):
        outputs.zero_()
        graph.replay()
        assert outputs.equal(expected)
