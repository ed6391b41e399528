"""Runs of adjacent slots, which are copied by TMA, give the same bits as scattered slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from handwritten_plans import random_case, random_plan
from pack_decode_cases import (
    BF16,
    FP16,
    MIXED,
    Heads,
    Tensors,
    captured,
    check,
    load,
    make_sinks,
    planned_step,
    run,
)
from sample_forests import ForestCase, make_case
from slot_placements import PLACEMENTS, move, place

from sglang_pat.executors import cuda
from sglang_pat.executors.loaded_kernels import kv_map

pytestmark = pytest.mark.usefixtures("kernel_body")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SPLIT = {"num_workers": 66, "min_item_tokens": 64}
UNSHARED = make_case([], [(-1, length) for length in (1, 31, 32, 33, 64, 500, 800, 2000)] * 2)
Result = tuple[torch.Tensor, torch.Tensor]


def caches(heads: Heads, num_slots: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K and V of a pool; they and the memory around them are NaN."""
    dims = heads.head_dim, heads.v_head_dim or heads.head_dim
    count = heads.num_kv_heads

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device="cuda").to(heads.kv_dtype or heads.dtype)

    if layout == "keys beside values":
        both = nan(num_slots + 3, 2, count, dims[0])
        return both[:num_slots, 0], both[:num_slots, 1]
    if layout == "every second slot":
        k, v = (nan(2 * num_slots, count, dim)[::2] for dim in dims)
    elif layout == "beside other heads":
        k, v = (nan(num_slots + 3, count + 2, dim)[:num_slots, 1:-1] for dim in dims)
    elif layout == "16 bytes on":
        flat = [nan((num_slots + 3) * count * dim) for dim in dims]
        sizes = [num_slots * count * dim for dim in dims]
        first = 16 // flat[0].element_size()
        k, v = (
            buffer[first : first + size].view(num_slots, count, dim)
            for buffer, size, dim in zip(flat, sizes, dims, strict=True)
        )
    else:
        assert layout == "dense"
        k, v = (nan(num_slots + 3, count, dim)[:num_slots] for dim in dims)
    return k, v


def placed(
    case: ForestCase,
    heads: Heads,
    placement: str,
    *,
    layout: str = "dense",
    num_slots: int = 0,
    seed: int = 0,
) -> Tensors:
    """Return the case on the device. A seed gives the same numbers at any placement."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(heads.dtype)

    places = place(case, placement, seed)
    moved, num_slots = move(case, places), num_slots or int(places.max(initial=0)) + 1
    used = np.flatnonzero(places >= 0)
    slots = torch.from_numpy(places[used]).cuda()
    q = random(len(case.seq_lens), heads.num_qo_heads, heads.head_dim)
    k_cache, v_cache = caches(heads, num_slots, layout)
    for cache in (k_cache, v_cache):
        filled = torch.full(cache.shape, torch.nan, dtype=heads.dtype, device="cuda")
        filled[slots] = random(len(used), *cache.shape[1:])
        cache.copy_(filled.to(cache.dtype))
    lens = torch.from_numpy(case.seq_lens).cuda()
    table = torch.from_numpy(moved.tokens).cuda()
    return Tensors(q, k_cache, v_cache, table, torch.arange(len(lens), device="cuda"), lens)


def write(step, case: ForestCase, tensors: Tensors) -> None:
    step.write(case.batch(), **tensors.index)


def results(case: ForestCase, heads: Heads, step, *, plan=None, seed: int = 0, **options):
    """Return the results by placement of the slots."""
    found = {}
    for placement in PLACEMENTS:
        tensors = placed(case, heads, placement, seed=seed)
        if plan is None:
            write(step, case, tensors)
        else:
            load(step, plan, tensors, case.seq_lens)
        found[placement] = run(step, tensors, **options)
        if placement == "ranges" and heads.kv_dtype is None:
            check(*found[placement], tensors, options.get("logit_cap", 0.0), options.get("sinks"))
    return found


def check_same(found: dict[str, Result]) -> None:
    out, lse = found["scattered"]
    assert out.isfinite().all(), "what lies beside the KV reached the output"
    for placement, (other, other_lse) in found.items():
        assert torch.equal(other, out), placement
        assert torch.equal(other_lse, lse), placement


@pytest.mark.parametrize(
    "heads",
    [
        Heads(3, 3, 64),
        Heads(16, 1, 64, FP16),
        Heads(8, 2, 80),
        Heads(8, 2, 96, FP16),
        Heads(2, 2, 128),
        Heads(8, 2, 128, FP16),
        Heads(16, 2, 128),
        Heads(32, 2, 128),
        Heads(8, 2, 192, v_head_dim=128),
        Heads(8, 1, 256),
        Heads(16, 2, 512),
        Heads(8, 2, 64, kv_dtype=E4M3),
        Heads(4, 4, 128, kv_dtype=E4M3),
        Heads(32, 2, 128, FP16, kv_dtype=E4M3),
        Heads(8, 1, 128, kv_dtype=E5M2),
        Heads(4, 1, 192, v_head_dim=128, kv_dtype=E4M3),
        Heads(8, 2, 256, kv_dtype=E4M3),
    ],
    ids=lambda h: f"{h.num_qo_heads}-{h.num_kv_heads}-{h.head_dim}-{h.dtype}-{h.kv_dtype}",
)
@pytest.mark.parametrize("case", [MIXED, UNSHARED], ids=["shared", "unshared"])
def test_the_place_of_kv_does_not_change_the_bits(heads: Heads, case: ForestCase) -> None:
    check_same(results(case, heads, planned_step(heads, **SPLIT)))


@pytest.mark.parametrize("seed", range(8))
def test_random_forests(seed: int) -> None:
    """Plans of the scheduler, and random cuts, which begin stages anywhere in a range."""
    case, heads = random_case(seed), [Heads(8, 2), Heads(5, 1, 64)][seed % 2]
    step = planned_step(heads)
    check_same(results(case, heads, step, seed=seed))
    plan = random_plan(case, heads.num_qo_heads // heads.num_kv_heads, seed)
    check_same(results(case, heads, step, plan=plan, seed=seed))


@pytest.mark.parametrize(
    "heads",
    [Heads(8, 2), Heads(8, 2, 80), Heads(4, 1, 256), Heads(8, 1, 512), Heads(8, 2, kv_dtype=E4M3)],
    ids=lambda h: f"{h.head_dim}-{h.kv_dtype}",
)
def test_hints_for_the_l2_do_not_change_the_bits(heads: Heads) -> None:
    """Right and wrong hints give the same bits."""
    case, step = random_case(3), planned_step(heads)
    plan = random_plan(case, heads.num_qo_heads // heads.num_kv_heads, 3)
    found = results(case, heads, step, plan=plan)
    for value in (False, True):
        said = plan.said_to_be_read_once(value)
        others = results(case, heads, step, plan=said)
        found |= {f"{where}, {value}": each for where, each in others.items()}
    check_same(found)


def test_sinks_and_soft_cap() -> None:
    heads = Heads(8, 2)
    step = planned_step(heads, **SPLIT)
    check_same(results(MIXED, heads, step, sinks=make_sinks(heads)))
    check_same(results(MIXED, heads, step, logit_cap=30.0))


@pytest.mark.parametrize("heads", [Heads(8, 2), Heads(8, 2, 128, kv_dtype=E4M3)], ids=["16", "8"])
def test_batch_invariant_mode(heads: Heads) -> None:
    check_same(results(MIXED, heads, planned_step(heads, batch_invariant=True)))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize(
    "layout", ["keys beside values", "every second slot", "beside other heads", "16 bytes on"]
)
def test_caches_may_be_views(layout: str, kv_dtype: torch.dtype | None) -> None:
    heads = Heads(8, 2, kv_dtype=kv_dtype)
    step = planned_step(heads, **SPLIT)
    found = {}
    for placement, view in (("scattered", "dense"), ("mixed", layout), ("ranges", layout)):
        tensors = placed(MIXED, heads, placement, layout=view)
        assert tensors.k_cache.is_contiguous() is (view in ("dense", "16 bytes on"))
        write(step, MIXED, tensors)
        found[placement] = run(step, tensors)
    check_same(found)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
def test_small_pools(length: int) -> None:
    """Pools have as many slots as tokens, which may be fewer than the 32 slots of a TMA box."""
    case, heads = make_case([], [(-1, length)]), Heads(8, 2)
    step = planned_step(heads)
    found = {}
    for placement in ("scattered", "ranges"):
        tensors = placed(case, heads, placement)
        assert placement == "scattered" or len(tensors.k_cache) == length
        write(step, case, tensors)
        found[placement] = run(step, tensors)
    check_same(found)
    check(*found["ranges"], tensors)


@pytest.mark.usefixtures("memory_is_given_back")
def test_runs_beyond_4_gib() -> None:
    heads = Heads(32, 32)
    case = make_case([(-1, 100)], [(0, 40)] * 4)
    tensors = placed(case, heads, "ranges")
    step = planned_step(heads)
    write(step, case, tensors)
    expected = run(step, tensors)
    shift = (5 << 30) // (32 * 128 * 2)
    for name in ("k_cache", "v_cache"):
        small = getattr(tensors, name)
        large = torch.empty(shift + len(small), 32, 128, device="cuda", dtype=BF16)
        large[shift:] = small
        setattr(tensors, name, large)
    tensors.req_to_token += shift
    write(step, case, tensors)
    for found, right in zip(run(step, tensors), expected, strict=True):
        assert torch.equal(found, right)


def test_a_graph_follows_plans_and_places() -> None:
    """A graph is captured with scattered slots, then replayed with other slots and plans."""
    heads = Heads(8, 2)
    cases = [
        make_case([(-1, 700), (0, 200)], [(1, 90)] * 10 + [(0, 33)] * 6),
        make_case([], [(-1, 64 + 30 * i) for i in range(16)]),
        make_case([(-1, 96)], [(0, 64)] * 15 + [(-1, 0)]),
    ]
    num_slots = max(int(place(case, p).max()) + 1 for case in cases for p in PLACEMENTS)
    width = max(case.tokens.shape[1] for case in cases)
    static = placed(cases[0], heads, "scattered", num_slots=num_slots)
    static.req_to_token = torch.zeros(16, width, dtype=torch.int32, device="cuda")
    step, other = (planned_step(heads, **SPLIT) for _ in range(2))
    for index, case in enumerate(cases + cases[:1]):
        for placement in PLACEMENTS:
            tensors = placed(case, heads, placement, num_slots=num_slots, seed=index)
            for name in ("q", "k_cache", "v_cache", "seq_lens"):
                getattr(static, name).copy_(getattr(tensors, name))
            static.req_to_token[:, : case.tokens.shape[1]] = tensors.req_to_token
            write(step, case, static)
            if (index, placement) == (0, "scattered"):
                run(step, static)
                torch.cuda.synchronize()
                graph, out, lse = captured(step, static)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            graph.replay()
            write(other, case, tensors)
            expected = run(other, tensors)
            assert torch.equal(out, expected[0]), (index, placement)
            assert torch.equal(lse, expected[1]), (index, placement)


def test_every_layer_has_its_own_map() -> None:
    """Layers of a graph have their own tensor maps even if they differ only in the cache."""
    heads = Heads(8, 2)
    layers = [placed(MIXED, heads, "ranges", seed=0) for _ in range(3)]
    for seed, layer in enumerate(layers):
        torch.manual_seed(seed)
        for cache in (layer.k_cache, layer.v_cache):
            cache.copy_(torch.where(cache.isnan(), cache, torch.randn_like(cache)))
    step = planned_step(heads)
    write(step, MIXED, layers[0])
    expected = [run(step, layer) for layer in layers]
    for result, layer in zip(expected, layers, strict=True):
        check(*result, layer)
    outs = [torch.full_like(layer.q, torch.nan) for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, out in zip(layers, outs, strict=True):
            step.decode(layer.q, layer.k_cache, layer.v_cache, out)
    graph.replay()
    for out, result in zip(outs, expected, strict=True):
        assert torch.equal(out, result[0])


@pytest.mark.parametrize("heads", [Heads(8, 2), Heads(8, 2, kv_dtype=E4M3)], ids=["16", "8"])
def test_runs_are_copied_by_maps_and_nothing_else_is(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the maps of other caches, runs read those caches: the tests above depend on the maps."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's kernels have tensor maps")
    case = make_case([(-1, 320)], [(0, 20)] * 5)
    for placement, is_read in (("ranges", True), ("scattered", False), ("descending", False)):
        tensors = placed(case, heads, placement)
        step = planned_step(heads)
        write(step, case, tensors)
        right = run(step, tensors)
        ones = torch.ones(tensors.k_cache.shape, device="cuda").to(tensors.k_cache.dtype)

        def other_map(
            address: int, shape: torch.Size, element_bytes: int, slot_bytes: int, ones=ones
        ) -> int:
            return kv_map(ones.data_ptr(), shape, element_bytes, slot_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(cuda, "kv_map", other_map)
            wrong = run(step, tensors)
        assert torch.equal(wrong[0], right[0]) is not is_read, placement
        again = run(step, tensors)
        assert torch.equal(again[0], right[0])
