"""The CUDA kernels with an fp8 KV cache are compared with float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from handwritten_plans import lengths_of_tails, random_case, random_plan, tails, tails_case
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_decode_cases import (
    BF16,
    COLUMNS,
    FP16,
    LONG,
    MIXED,
    ROPE,
    Heads,
    Tensors,
    all_head_dims,
    captured,
    group_sizes,
    latent,
    load,
    make_sinks,
    needs_latent_kernels,
    planned,
    planned_step,
    run,
)
from sample_forests import ForestCase, forest_cases, make_case, many

from kernel.numerics import compare
from sglang_pat import PackAttention, support
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kv_writer import KvWriter
from sglang_pat.executors.reference import dense_attention

pytestmark = pytest.mark.usefixtures("kernel_body")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
both_types = pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
# Hopper multiplies tiles of more than 16 rows with wgmma, and converts V for it.
CONVERTED_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
converted_head_dims = pytest.mark.parametrize(
    "head_dims", CONVERTED_HEAD_DIMS, ids=lambda pair: f"{pair[0]}-{pair[1]}"
)
SPLIT = {"num_workers": 66, "min_item_tokens": 64}


def converted(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the tensors with caches of another type. Slots that no request may read stay NaN."""
    return with_caches(tensors, tensors.k_cache.to(dtype), tensors.v_cache.to(dtype))


def with_caches(tensors: Tensors, k_cache: torch.Tensor, v_cache: torch.Tensor) -> Tensors:
    """Return the tensors with these caches. In latent attention V stays a view of K."""
    if support.is_latent(k_cache.shape[-1], v_cache.shape[-1]):
        v_cache = k_cache[..., : v_cache.shape[-1]]
    return dataclasses.replace(tensors, k_cache=k_cache, v_cache=v_cache)


def random_bytes(tensors: Tensors, kv_dtype: torch.dtype) -> Tensors:
    """Fill the caches with random finite numbers, and with NaN where no request may read."""
    caches = []
    for seed, cache in enumerate((tensors.k_cache, tensors.v_cache)):
        generator = torch.Generator("cuda").manual_seed(seed)
        numbers = torch.randint(256, cache.shape, generator=generator, device="cuda")
        random = numbers.to(torch.uint8).view(kv_dtype)
        wide = random.float()
        wide[~wide.isfinite()] = 1.0
        wide[cache.isnan()] = torch.nan
        caches.append(wide.to(kv_dtype))
    return with_caches(tensors, *caches)


def run_case(
    case: ForestCase, heads: Heads, tensors: Tensors, *, workers=None, plan=None, **options
):
    step = planned_step(heads, **(workers or SPLIT))
    if plan is None:
        step.write(case.batch(), **tensors.index)
    else:
        load(step, plan, tensors, case.seq_lens)
    return run(step, tensors, **options)


def check_near_exact(
    case: ForestCase,
    heads: Heads,
    tensors: Tensors | None = None,
    *,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    **options: object,
) -> None:
    """Assert the error bound of the output's type, with weights and partials in float16."""
    assert heads.kv_dtype is not None
    if tensors is None:
        tensors = converted(Tensors.make(case, heads), heads.kv_dtype)
    out, lse = run_case(case, heads, tensors, sm_scale=sm_scale, sinks=sinks, **options)
    k, v = tensors.k_cache.double(), tensors.v_cache.double()
    index = tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    exact, exact_lse = dense_attention(tensors.q, k, v, *index, sm_scale=sm_scale, sinks=sinks)
    size, _ = dense_attention(tensors.q, k, v.abs(), *index, sm_scale=sm_scale, sinks=sinks)
    logit_error, instructions = logit_errors(heads, tensors, sm_scale)
    rounding = torch.finfo(heads.dtype).eps / 2 * exact.abs()
    of_logits = 2 * logit_error[..., None] * size
    check_errors(out, exact, 1.01 * rounding + 3 * 2.0**-11 * size + of_logits + 1e-7, instructions)
    check_errors(lse, exact_lse, 1e-6 * exact_lse.abs() + 2e-5 + logit_error, instructions)


def check_errors(
    found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, largest: float
) -> None:
    """Assert that errors are within a multiple of the bound, and their RMS within the bound."""
    error = torch.where(found == exact, 0.0, (found.double() - exact).abs())
    excess = (error / bound).nan_to_num(nan=math.inf)
    assert excess.max() <= largest, f"{excess.max():.3g} of the bound at {excess.argmax()}"
    assert excess.square().mean() <= 1, f"{excess.square().mean().sqrt():.3g} of the bound"


def logit_errors(
    heads: Heads, tensors: Tensors, sm_scale: float | None = None
) -> tuple[torch.Tensor, int]:
    """Return the error of fp8 matrix instructions in a request's logits, and their number.

    fp8 keys are multiplied unconverted, and the instruction's sums keep 13 bits of mantissa.
    """
    dims = heads.head_dim, heads.v_head_dim or heads.head_dim
    config = KernelConfig.for_device(heads.dtype, dims[0], tensors.q.device, dims[1])
    if config.arch != (9, 0) or config.force_mma_sync or dims not in CONVERTED_HEAD_DIMS:
        return torch.zeros((), device=tensors.q.device), 1
    scale = heads.head_dim**-0.5 if sm_scale is None else sm_scale
    terms = 2 if heads.dtype == BF16 else 3
    return 2.0**-13 * scale * largest_products(tensors), heads.head_dim // 32 * terms


def largest_products(tensors: Tensors) -> torch.Tensor:
    """Bound on the sum of |q * k| of a query and any key: `[requests, heads]`."""
    num_requests, num_heads, _ = tensors.q.shape
    keys = tensors.k_cache.float().abs().nan_to_num(nan=0.0)
    grouped = tensors.q.float().abs().view(num_requests, keys.shape[1], -1, keys.shape[2])
    most = torch.zeros(grouped.shape[:3], dtype=torch.float64, device=keys.device)
    for request in range(num_requests):
        length = int(tensors.seq_lens[request])
        if length == 0:
            continue
        row = tensors.req_to_token[int(tensors.req_pool_indices[request]), :length]
        sums = torch.einsum("hgd,thd->hgt", grouped[request], keys[row.long()])
        most[request] = sums.amax(-1).double()
    return most.view(num_requests, num_heads)


@both_types
@pytest.mark.parametrize("dtype", [BF16, FP16])
@group_sizes([1, 4, 5, 8, 16], [1, 5, 8, 16, 20, 33, 64])
def test_groups(heads: Heads, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    heads = dataclasses.replace(heads, dtype=dtype, kv_dtype=kv_dtype)
    check_near_exact(MIXED, heads)
    if not heads.is_latent:
        check_near_exact(LONG, heads)


@both_types
@pytest.mark.parametrize("dtype", [BF16, FP16])
@group_sizes([4], [8])
def test_every_number_is_converted_exactly(
    heads: Heads, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    heads = dataclasses.replace(heads, dtype=dtype, kv_dtype=kv_dtype)
    tensors = random_bytes(Tensors.make(MIXED, heads), kv_dtype)
    check_near_exact(MIXED, heads, tensors, sm_scale=1e-4 if kv_dtype == E4M3 else 1e-9)


@both_types
@converted_head_dims
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_head_dims_that_are_converted_for_wgmma(
    dtype: torch.dtype, head_dims: tuple[int, int], kv_dtype: torch.dtype
) -> None:
    """Caches hold every number; tiles have up to 64 rows, and some segments mask rows."""
    for group_size in (4, 7, 16):
        heads = Heads(2 * group_size, 2, head_dims[0], dtype, head_dims[1], kv_dtype)
        tensors = random_bytes(Tensors.make(MIXED, heads), kv_dtype)
        check_near_exact(MIXED, heads, tensors, sm_scale=1e-4 if kv_dtype == E4M3 else 1e-9)
        for seed in range(2):
            case = random_case(100 * group_size + seed)
            check_near_exact(case, heads, plan=random_plan(case, group_size, seed))


@converted_head_dims
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_bit_of_a_query_counts(dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """Keys are 1 in one column, so all logits are the query's number there, of any exponent."""
    heads = Heads(8, 1, head_dims[0], dtype, head_dims[1], E4M3)
    case = make_case([(-1, 127)], [(0, 1)] * 16)
    tensors = converted(Tensors.make(case, heads), E4M3)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = tensors.q.shape
    exponents = torch.randint(-6, 1, shape, generator=generator, device="cuda")
    numbers = torch.rand(shape, generator=generator, device="cuda") * 0.499 + 0.5
    tensors.q.copy_(torch.ldexp(numbers, exponents))
    for column in range(0, head_dims[0], 9):
        tensors.k_cache.zero_()
        tensors.k_cache[:, :, column] = 1
        _, lse = run_case(case, heads, tensors, sm_scale=64.0)
        expected = 64 * tensors.q[:, :, column].double() + math.log(128)
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=5e-5)


def test_a_query_that_is_infinite_or_nan_gives_nan() -> None:
    """A query with infinity or NaN makes its own output row NaN, and no other."""
    heads = Heads(8, 1, kv_dtype=E4M3)
    case = make_case([(-1, 300)], [(0, 20)] * 16)
    tensors = converted(Tensors.make(case, heads), E4M3)
    tensors.q[3, 2, 5], tensors.q[7, 0, 100] = math.inf, math.nan
    out, lse = run_case(case, heads, tensors)
    expected = torch.zeros(out.shape[:2], dtype=torch.bool, device="cuda")
    expected[3, 2] = expected[7, 0] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected[..., None].expand_as(out))


@group_sizes([4], [8])
def test_queries_that_float16_cannot_hold(heads: Heads) -> None:
    """Some rows of a tile have numbers above, just below, or far below float16's range."""
    heads = dataclasses.replace(heads, kv_dtype=E4M3)
    tensors = converted(Tensors.make(MIXED, heads), E4M3)
    factors = torch.tensor([1.0, 1e30, 3e4, 1e-30], device="cuda").repeat(2)
    tensors.q *= factors.to(BF16)[:, None]
    if heads.is_latent:  # four warps share a row's columns; one of them has only small numbers
        tensors.q[:, 1, 16:48] *= 2.0**-90
    for sm_scale in (1e-31, 1e-5):
        picked = tensors.q.float().abs().amax(-1) * sm_scale < 10
        some = dataclasses.replace(tensors, q=torch.where(picked[..., None], tensors.q, 0))
        check_near_exact(MIXED, heads, some, sm_scale=sm_scale)


@both_types
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values_of_one_token_are_the_output(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """V holds all 256 bytes; the output keeps NaN and infinity."""
    heads = Heads(2, 2, 128, dtype, 0, kv_dtype)
    case = make_case([], [(-1, 1)])
    tensors = converted(Tensors.make(case, heads), kv_dtype)
    numbers = torch.arange(256, device="cuda").to(torch.uint8).view(kv_dtype).view(2, 128)
    slot = int(tensors.req_to_token[tensors.req_pool_indices[0], 0])
    tensors.v_cache.view(torch.uint8)[slot] = numbers.view(torch.uint8)
    out, _ = run_case(case, heads, tensors)
    torch.testing.assert_close(out[0], numbers.to(dtype), rtol=0, atol=0, equal_nan=True)


@all_head_dims
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_head_dims(pair: tuple[int, int], dtype: torch.dtype) -> None:
    for group_size in (1, 4):
        heads = Heads(2 * group_size, 2, pair[0], dtype, pair[1], E4M3)
        check_near_exact(MIXED, heads)
        check_near_exact(LONG, heads, sinks=make_sinks(heads))


@pytest.mark.parametrize("length", [1, 15, 31, 32, 33, 63, 64, 65, 127, 129, 4096, 65536])
@group_sizes([4], [8, 16])
def test_lengths(heads: Heads, length: int) -> None:
    heads = dataclasses.replace(heads, kv_dtype=E4M3)
    check_near_exact(make_case([], [(-1, length)] * 3), heads)
    check_near_exact(make_case([(-1, length)], [(0, 7)] * 3), heads)


@both_types
@group_sizes([1, 4, 7, 16], [1, 5, 8, 16, 20, 64])
def test_segments_that_count_for_some_rows(heads: Heads, kv_dtype: torch.dtype) -> None:
    """Some segments mask rows: in plans of verify steps, and in plans made by hand."""
    heads, group_size = dataclasses.replace(heads, kv_dtype=kv_dtype), heads.group_size
    for seed in range(4):
        case = random_case(100 * group_size + seed)
        check_near_exact(case, heads, plan=random_plan(case, group_size, seed))
    lengths = lengths_of_tails(group_size)
    for reverse in (False, True):
        plan = tails(lengths, group_size, reverse=reverse)
        check_near_exact(tails_case(lengths), heads, plan=plan)


@pytest.mark.parametrize("num_workers", [1, 2, 33, 1000])
@pytest.mark.parametrize("max_block_q", [16, 32, 64])
def test_splits_and_bodies(num_workers: int, max_block_q: int) -> None:
    workers = {"num_workers": num_workers, "max_block_q": max_block_q, "min_item_tokens": 64}
    for group_size in (1, 8):
        check_near_exact(MIXED, Heads(2 * group_size, 2, kv_dtype=E4M3), workers=workers)


def test_more_tickets_than_ctas() -> None:
    """Producers take new tickets while stages of earlier tickets are not yet converted."""
    case = make_case([(-1, 20)] * 40, [(node, 1 + 5 * node) for node in range(40)] * 12)
    for num_kv_heads in (2, 8):
        check_near_exact(case, Heads(4 * num_kv_heads, num_kv_heads, kv_dtype=E4M3))


@pytest.mark.parametrize("logit_cap", [0.0, 30.0])
@both_types
def test_scales_against_float64(logit_cap: float, kv_dtype: torch.dtype) -> None:
    heads = Heads(8, 2, kv_dtype=kv_dtype)
    tensors, sinks = converted(Tensors.make(LONG, heads), kv_dtype), make_sinks(heads)
    out, lse = run_case(
        LONG, heads, tensors, logit_cap=logit_cap, sinks=sinks, k_scale=0.37, v_scale=2.5
    )
    index = tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    options = {"logit_cap": logit_cap, "sinks": sinks}
    caches = tensors.k_cache.double() * 0.37, tensors.v_cache.double() * 2.5
    exact, exact_lse = dense_attention(tensors.q, *caches, *index, **options)
    in_dtype, _ = dense_attention(
        tensors.q, tensors.k_cache.to(BF16), tensors.v_cache.to(BF16), *index,
        sm_scale=0.37 * 128**-0.5, dtype=BF16, **options,
    )  # fmt: skip
    report = compare(out, in_dtype * 2.5, exact)
    assert report.acceptable, str(report)
    logit_error, instructions = logit_errors(heads, tensors, 0.37 * 128**-0.5)
    check_errors(lse, exact_lse, 2e-5 + 1e-3 * logit_cap + logit_error, instructions)


@both_types
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_queries_of_any_size_under_a_soft_cap(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """A tile has rows of zeros, of the smallest and of the largest numbers beside ordinary rows."""
    heads = Heads(8, 1, 128, dtype, 0, kv_dtype)
    case = make_case([(-1, 300)], [(0, 20)] * 16)
    plain = converted(Tensors.make(case, heads), kv_dtype)
    info = torch.finfo(dtype)
    size = plain.q.float().abs().amax()
    factors = [0.0, info.smallest_normal / 64, 1e-6, 1.0, 1.0, 1e-3, info.max / 4, info.max / size]
    tensors = dataclasses.replace(
        plain, q=(plain.q.float() * torch.tensor(factors, device="cuda")[:, None]).to(dtype)
    )
    out, lse = run_case(case, heads, tensors, logit_cap=30.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    index = tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    caches = tensors.k_cache.double(), tensors.v_cache.double()
    exact, exact_lse = dense_attention(tensors.q, *caches, *index, logit_cap=30.0)
    torch.testing.assert_close(out.double()[:, :6], exact[:, :6], atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double()[:, :6], exact_lse[:, :6], atol=4e-2, rtol=0)


@pytest.mark.parametrize("exponent", [-100, 7])
def test_scales_of_any_size(exponent: int) -> None:
    """Scales of K and V, with queries and outputs scaled inversely."""
    heads = Heads(8, 2, kv_dtype=E4M3)
    tensors = converted(Tensors.make(MIXED, heads), E4M3)
    expected, expected_lse = run_case(MIXED, heads, tensors)
    changed = dataclasses.replace(tensors, q=tensors.q * 2.0**-exponent)
    scales = {"k_scale": 2.0**exponent, "v_scale": 2.0**-exponent}
    out, lse = run_case(MIXED, heads, changed, **scales)
    torch.testing.assert_close(out * 2.0**exponent, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-5)


def test_a_nan_reaches_the_requests_that_read_it_and_no_other() -> None:
    heads = Heads(8, 2, kv_dtype=E4M3)
    case = make_case([(-1, 100)], [(0, 40)] * 4 + [(-1, 40)] * 3)
    tensors = converted(Tensors.make(case, heads), E4M3)
    slot = int(tensors.req_to_token[tensors.req_pool_indices[0], 50])
    tensors.k_cache.view(torch.uint8)[slot, 1, 3] = 0x7F
    out, lse = run_case(case, heads, tensors)
    assert out[:4, 4:].isnan().all()
    assert lse[:4, 4:].isnan().all()
    assert not out[:4, :4].isnan().any()
    assert not out[4:].isnan().any()


def test_a_graph_keeps_its_scales() -> None:
    heads = Heads(8, 2, kv_dtype=E4M3)
    tensors, step = planned(MIXED, heads, converted(Tensors.make(MIXED, heads), E4M3))
    scales = [{"k_scale": 0.5, "v_scale": 3.0}, {}]
    expected = [run(step, tensors, **each) for each in scales]
    results = [tuple(torch.zeros_like(x) for x in each) for each in expected]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (out, lse), each in zip(results, scales, strict=True):
            step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse, **each)
    for _ in range(3):
        graph.replay()
        for result, like in zip(results, expected, strict=True):
            assert torch.equal(result[0], like[0])
            assert torch.equal(result[1], like[1])
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_a_graph_reads_scales_that_lie_on_the_device(logit_cap: float) -> None:
    """SGLang's layers have scales on the device, and a weight update overwrites them in place."""
    heads = Heads(8, 2, kv_dtype=E4M3)
    tensors, step = planned(MIXED, heads, converted(Tensors.make(MIXED, heads), E4M3))
    scales = {name: torch.ones((), device="cuda") for name in ("k_scale", "v_scale")}
    graph, out, lse = captured(step, tensors, logit_cap=logit_cap, **scales)
    for k_scale, v_scale in ((1.0, 1.0), (0.37, 2.5), (1.7, 0.04)):
        scales["k_scale"].fill_(k_scale)
        scales["v_scale"].fill_(v_scale)
        out.fill_(torch.nan)
        graph.replay()
        # Equal up to rounding: the host multiplies the scale of the logits in another order.
        like = run(step, tensors, logit_cap=logit_cap, k_scale=k_scale, v_scale=v_scale)
        torch.testing.assert_close(out, like[0], rtol=1e-2, atol=1e-3 * v_scale)
        torch.testing.assert_close(lse, like[1], rtol=1e-5, atol=1e-4)
        again = run(step, tensors, logit_cap=logit_cap, **scales)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])


def test_pack_attention() -> None:
    heads = Heads(8, 2, kv_dtype=E4M3)
    tensors = converted(Tensors.make(MIXED, heads), E4M3)
    attention = PackAttention(8, 2, 128, dtype=BF16, kv_dtype=E4M3, device="cuda")
    assert attention.executor == "cuda"
    attention.plan(MIXED.batch(), **tensors.index)
    caches = tensors.k_cache, tensors.v_cache
    out = attention.run(tensors.q, *caches, k_scale=0.5, v_scale=3.0)
    wide = tensors.k_cache.double() * 0.5, tensors.v_cache.double() * 3.0
    exact, _ = dense_attention(tensors.q, *wide, *tensors.index.values())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=2e-2)


@settings(many, max_examples=200, database=None)
@given(
    case=forest_cases(max_requests=30),
    geometry=st.sampled_from([(1, 1), (4, 2), (16, 1), (8, 8)]),
    num_workers=st.sampled_from([1, 7, 33, 132]),
)
def test_random_forests(case: ForestCase, geometry: tuple[int, int], num_workers: int) -> None:
    check_near_exact(case, Heads(*geometry, kv_dtype=E4M3), workers={"num_workers": num_workers})


# --- latent attention ---


@needs_latent_kernels
def test_every_column_of_latent_keys_counts_once() -> None:
    """Keys are 1 in one column, so that all logits are the query's number in that column."""
    heads = latent(8, kv_dtype=E4M3)
    case = make_case([(-1, 127)], [(0, 1)] * 16)
    tensors = converted(Tensors.make(case, heads), E4M3)
    for column in (*range(0, COLUMNS + ROPE, 37), COLUMNS, COLUMNS + ROPE - 1):
        tensors.k_cache.zero_()
        tensors.k_cache[:, :, column] = 1
        _, lse = run_case(case, heads, tensors, sm_scale=1.0)
        expected = tensors.q[:, :, column].double() + math.log(128)
        torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=5e-5)


@needs_latent_kernels
@both_types
def test_latent_values_of_one_token_are_the_output(kv_dtype: torch.dtype) -> None:
    """V holds all bytes except NaN, which would also be in K and reach the weights."""
    heads = latent(8, BF16, kv_dtype)
    case = make_case([], [(-1, 1)])
    tensors = converted(Tensors.make(case, heads), kv_dtype)
    tensors.q.zero_()
    numbers = torch.arange(2 * 256, device="cuda").remainder(256).to(torch.uint8).view(kv_dtype)
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 3.0).to(kv_dtype)
    slot = int(tensors.req_to_token[tensors.req_pool_indices[0], 0])
    tensors.k_cache.view(torch.uint8)[slot, 0, :COLUMNS] = numbers.view(torch.uint8)
    out, _ = run_case(case, heads, tensors)
    assert torch.equal(out, numbers.to(BF16).expand_as(out))


@needs_latent_kernels
@pytest.mark.parametrize("num_workers", [1, 2, 33, 1000])
def test_latent_splits(num_workers: int) -> None:
    workers = {"num_workers": num_workers, "min_item_tokens": 64}
    for group_size in (5, 16, 32):
        check_near_exact(MIXED, latent(group_size, kv_dtype=E4M3), workers=workers)


@needs_latent_kernels
def test_latent_scales_and_sinks() -> None:
    heads = latent(16, kv_dtype=E4M3)
    tensors, sinks = converted(Tensors.make(LONG, heads), E4M3), make_sinks(heads)
    on_device = {
        "k_scale": torch.tensor(0.37, device="cuda"),
        "v_scale": torch.tensor(2.5, device="cuda"),
    }
    index = tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    caches = tensors.k_cache.double() * 0.37, tensors.v_cache.double() * 2.5
    exact, exact_lse = dense_attention(tensors.q, *caches, *index, sinks=sinks)
    for scales in ({"k_scale": 0.37, "v_scale": 2.5}, on_device):
        out, lse = run_case(LONG, heads, tensors, sinks=sinks, **scales)
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-3)


@needs_latent_kernels
def test_a_latent_nan_reaches_the_requests_that_read_it_and_no_other() -> None:
    lengths = [40, 70, 3, 129, 64, 1, 90, 33]
    case, plan, heads = tails_case(lengths), tails(lengths, 8), latent(8, kv_dtype=E4M3)
    tensors = converted(Tensors.make(case, heads), E4M3)
    expected, expected_lse = run_case(case, heads, tensors, plan=plan)
    row = tensors.req_to_token[tensors.req_pool_indices[1]]
    others = [request for request in range(len(lengths)) if request != 1]
    for column in (3, 300, COLUMNS + 5):
        kept = tensors.k_cache.view(torch.uint8).clone()
        tensors.k_cache.view(torch.uint8)[int(row[117]), 0, column] = 0x7F
        out, lse = run_case(case, heads, tensors, plan=plan)
        torch.testing.assert_close(out[others], expected[others], rtol=1e-2, atol=1e-2)
        assert torch.allclose(lse[others], expected_lse[others], atol=2e-5)
        assert out[1].isnan().any()
        tensors.k_cache.view(torch.uint8).copy_(kept)


@needs_latent_kernels
def test_a_latent_graph_has_the_bits_of_eager_steps() -> None:
    heads = latent(16, kv_dtype=E4M3)
    tensors, step = planned(MIXED, heads, converted(Tensors.make(MIXED, heads), E4M3))
    expected, expected_lse = run(step, tensors)
    nope, rope = (each.contiguous() for each in tensors.q.split([COLUMNS, ROPE], dim=-1))
    graph, out, lse = captured(step, dataclasses.replace(tensors, q=nope), q_rope=rope)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@needs_latent_kernels
@both_types
def test_latent_rows_are_written_as_torch_converts_them(kv_dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    config = KernelConfig.for_device(BF16, COLUMNS + ROPE, device, COLUMNS, kv_dtype)
    writer = KvWriter(config, device)
    assert writer.agrees_with_torch()
    k = torch.randn(300, 1, COLUMNS + ROPE, device="cuda").mul(200).to(BF16)
    slots = torch.randperm(900, device="cuda")[:300]
    expected = torch.zeros(900, 1, COLUMNS + ROPE, dtype=kv_dtype, device="cuda")
    written = expected.clone()
    kept = slots != 0
    expected.view(torch.uint8)[slots[kept]] = k[kept].to(kv_dtype).view(torch.uint8)
    rope = k[..., COLUMNS:].contiguous()
    assert writer.write_latent(k[..., :COLUMNS], rope, slots, written)
    assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
