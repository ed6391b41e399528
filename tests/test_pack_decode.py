"""The CUDA kernels against float64: bodies, geometries, hostile memory, graphs, determinism."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from forests import ForestCase, forest_cases, make_case, three_level_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_pat.reference import dense_attention
from sglang_pat.testing.numerics import compare
from sglang_pat.testing.trees import PrefixTree

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BF16, FP16 = torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Heads:
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    dtype: torch.dtype = BF16


@dataclasses.dataclass
class Tensors:
    """A case on the device. What no request may read is NaN, or a slot far outside the pool."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def make(cls, case: ForestCase, heads: Heads, *, seed: int = 0, index_dtype=torch.int64):
        generator = torch.Generator("cuda").manual_seed(seed)
        num_requests, width = case.tokens.shape

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(heads.dtype)

        poisoned = torch.full(
            (2 * case.num_slots + 7, heads.num_kv_heads, heads.head_dim), torch.nan, device="cuda"
        ).to(heads.dtype)
        k_cache, v_cache = poisoned.clone(), poisoned
        # The case's slots, at the pool's end.
        shift = len(k_cache) - case.num_slots
        used = np.unique(
            np.concatenate([row[:n] for row, n in zip(case.tokens, case.seq_lens, strict=True)])
        )
        slots = torch.from_numpy(used).cuda().long() + shift
        k_cache[slots] = random(len(slots), heads.num_kv_heads, heads.head_dim)
        v_cache[slots] = random(len(slots), heads.num_kv_heads, heads.head_dim)

        rows = np.random.default_rng(seed).permutation(2 * num_requests + 1)[:num_requests]
        table = np.full((2 * num_requests + 1, width + 3), 2147480000, dtype=np.int32)
        for row, tokens, length in zip(rows, case.tokens, case.seq_lens, strict=True):
            table[row, :length] = tokens[:length] + shift
        return cls(
            random(num_requests, heads.num_qo_heads, heads.head_dim),
            k_cache,
            v_cache,
            torch.from_numpy(table).cuda(),
            torch.from_numpy(rows).to("cuda", index_dtype),
            torch.from_numpy(case.seq_lens).to("cuda", index_dtype),
        )

    def reference(self, dtype: torch.dtype, logit_cap: float = 0.0):
        return dense_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.req_to_token,
            self.req_pool_indices,
            self.seq_lens,
            logit_cap=logit_cap,
            dtype=dtype,
        )


def planned_step(heads: Heads, **options):
    from sglang_pat.kernel_config import KernelConfig
    from sglang_pat.kernel_loader import load_kernels
    from sglang_pat.testing.planned_step import PlannedStep

    config = KernelConfig.for_device(heads.dtype, heads.head_dim, torch.device("cuda"))
    return PlannedStep(load_kernels(config), heads.num_qo_heads, heads.num_kv_heads, **options)


def run(step, tensors: Tensors, **options) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(tensors.q, torch.nan)
    lse = torch.full(tensors.q.shape[:2], torch.nan, device="cuda")
    step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse, **options)
    return out, lse


def check(out: torch.Tensor, lse: torch.Tensor, tensors: Tensors, logit_cap: float = 0.0) -> None:
    exact, exact_lse = tensors.reference(torch.float64, logit_cap)
    in_dtype, _ = tensors.reference(tensors.q.dtype, logit_cap)
    report = compare(out, in_dtype, exact)
    assert report.acceptable, str(report)
    finite = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), finite), "LSE is -inf exactly where a request is empty"
    assert torch.isneginf(lse[~finite]).all()
    if finite.any():
        # tanh.approx of the soft-cap is good to 2^-11 of the cap.
        bound = 2e-5 + 1e-3 * logit_cap
        error = (lse.double() - exact_lse)[finite].abs().max().item()
        assert error <= bound, f"LSE error {error:.3g}"


def check_case(case: ForestCase, heads: Heads, *, logit_cap: float = 0.0, **options) -> None:
    tensors = Tensors.make(case, heads)
    step = planned_step(heads, **options)
    step.write(case.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    check(*run(step, tensors, logit_cap=logit_cap), tensors, logit_cap)


MIXED = make_case(
    [(-1, 700), (0, 130), (0, 64), (1, 33), (-1, 257)],
    [(0, 5)] * 3
    + [(1, 200)] * 9
    + [(2, 1)] * 4
    + [(3, 70)] * 20
    + [(4, 0)] * 6
    + [(-1, 900), (-1, 0)],
)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_group_sizes(dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    check_case(MIXED, Heads(3 * group_size, 3, head_dim, dtype))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 5, 8, 32])
@pytest.mark.parametrize("policy", ["memory", "paper", "per-node", "query-centric"])
def test_kv_heads_and_policies(num_kv_heads: int, policy: str) -> None:
    check_case(MIXED, Heads(4 * num_kv_heads, num_kv_heads), policy=policy)


@pytest.mark.parametrize("num_workers", [1, 2, 33, 264, 1000])
@pytest.mark.parametrize("max_block_q", [16, 32, 64])
def test_splits_and_bodies(num_workers: int, max_block_q: int) -> None:
    for group_size in (1, 4, 8):
        heads = Heads(2 * group_size, 2)
        options = {"num_workers": num_workers, "max_block_q": max_block_q, "min_piece_tokens": 64}
        check_case(MIXED, heads, **options)


@pytest.mark.parametrize("logit_cap", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_logit_cap(logit_cap: float, dtype: torch.dtype) -> None:
    check_case(MIXED, Heads(8, 2, dtype=dtype), logit_cap=logit_cap)


@pytest.mark.parametrize("num_requests", [1, 2, 31, 256, 1024])
def test_batch_sizes(num_requests: int) -> None:
    check_case(three_level_case(num_requests), Heads(8, 2))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 127, 4096, 65536])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_lengths(length: int, num_requests: int) -> None:
    check_case(make_case([], [(-1, length)] * num_requests), Heads(8, 2))
    check_case(make_case([(-1, length)], [(0, 7)] * num_requests), Heads(8, 2))


def test_only_padding_rows() -> None:
    check_case(make_case([], [(-1, 0)] * 5), Heads(8, 2))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_types(index_dtype: torch.dtype) -> None:
    heads = Heads(8, 2)
    tensors = Tensors.make(MIXED, heads, index_dtype=index_dtype)
    step = planned_step(heads)
    step.write(MIXED.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    check(*run(step, tensors), tensors)


def test_queries_may_be_a_slice_of_a_wider_projection() -> None:
    heads = Heads(8, 2)
    tensors = Tensors.make(MIXED, heads)
    wide = torch.full((len(tensors.q), 12, 128), torch.nan, device="cuda", dtype=BF16)
    wide[:, 2:10] = tensors.q
    tensors.q = wide[:, 2:10]
    step = planned_step(heads)
    step.write(MIXED.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    out = torch.full((len(wide), 8, 128), torch.nan, device="cuda", dtype=BF16)
    lse = torch.full((len(wide), 8), torch.nan, device="cuda")
    step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse)
    check(out, lse, tensors)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(page_size: int) -> None:
    tree = PrefixTree.parse("1,4,32_300,77,45")
    batch = tree.batch()
    table = tree.token_table(page_size=page_size, seed=1)
    case = ForestCase(tree.paths(), batch.seq_lens, table)
    check_case(case, Heads(8, 2))


def test_slots_beyond_4_gib() -> None:
    heads = Heads(32, 32)
    tensors = Tensors.make(make_case([(-1, 100)], [(0, 40)] * 4), heads)
    small = tensors.k_cache, tensors.v_cache
    num_slots = (5 << 30) // (32 * 128 * 2)
    shift = num_slots - len(small[0])
    large = [torch.empty(num_slots, 32, 128, device="cuda", dtype=BF16) for _ in small]
    for source, target in zip(small, large, strict=True):
        target[shift:] = source
    tensors.k_cache, tensors.v_cache = large
    table = tensors.req_to_token
    tensors.req_to_token = torch.where(table < 2147480000, table + shift, table)
    step = planned_step(heads)
    batch = make_case([(-1, 100)], [(0, 40)] * 4).batch()
    step.write(batch, tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    check(*run(step, tensors), tensors)


@settings(
    max_examples=1000,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    case=forest_cases(max_requests=40),
    geometry=st.sampled_from([(1, 1), (4, 2), (16, 1), (5, 1), (8, 8), (14, 2)]),
    num_workers=st.sampled_from([1, 7, 33, 132]),
)
def test_random_forests(case: ForestCase, geometry: tuple[int, int], num_workers: int) -> None:
    check_case(case, Heads(*geometry), num_workers=num_workers)


def test_more_tickets_than_ctas() -> None:
    """CTAs draw from a counter then; it is back at 0 after every step."""
    heads = Heads(64, 64, 64)
    case = make_case([(-1, 700)], [(0, 1900 + 31 * r) for r in range(48)])
    tensors = Tensors.make(case, heads)
    step = planned_step(heads, num_workers=4)
    plan = step.write(
        case.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
    )
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert plan.header.num_tickets * heads.num_kv_heads > 2 * num_sms
    first = run(step, tensors)
    check(*first, tensors)
    for _ in range(20):
        out, lse = run(step, tensors)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
    assert step.num_draws.item() == 0


def test_bitwise_equal_from_run_to_run() -> None:
    heads = Heads(32, 8)
    tensors = Tensors.make(MIXED, heads)
    step = planned_step(heads)
    step.write(MIXED.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    first = run(step, tensors)
    for _ in range(50):
        again = run(step, tensors)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_graph_replay_follows_plans_and_lengths() -> None:
    """Capture once; then replay with other forests, other lengths and grown tails."""
    heads = Heads(8, 2)
    num_requests, grown_by = 24, 40
    cases = [
        make_case([(-1, 200)], [(0, 17)] * num_requests, spare_tokens=grown_by),
        make_case(
            [(-1, 90), (0, 300), (0, 65)],
            [(1, 50)] * 10 + [(2, 3)] * 13 + [(-1, 400)],
            spare_tokens=grown_by,
            seed=1,
        ),
        make_case(
            [], [(-1, 1 + 37 * i) for i in range(num_requests)], spare_tokens=grown_by, seed=2
        ),
        make_case([(-1, 64)], [(0, 1)] * 12 + [(-1, 0)] * 12, spare_tokens=grown_by, seed=3),
    ]

    # Everything at its final length: grown tokens are laid out from the beginning.
    grown_cases = [
        dataclasses.replace(case, seq_lens=case.seq_lens + grown_by * (case.seq_lens > 0))
        for case in cases
    ]
    tensors = [Tensors.make(case, heads) for case in grown_cases]
    rows = max(len(t.req_to_token) for t in tensors)
    width = max(t.req_to_token.shape[1] for t in tensors)
    slots = max(len(t.k_cache) for t in tensors)
    static = Tensors(
        torch.empty_like(tensors[0].q),
        torch.empty(slots, 2, 128, device="cuda", dtype=BF16),
        torch.empty(slots, 2, 128, device="cuda", dtype=BF16),
        torch.zeros(rows, width, device="cuda", dtype=torch.int32),
        torch.empty_like(tensors[0].req_pool_indices),
        torch.empty_like(tensors[0].seq_lens),
    )
    step = planned_step(heads)
    out = torch.empty_like(static.q)
    lse = torch.empty(out.shape[:2], device="cuda")

    def load(index: int, seq_lens: np.ndarray) -> None:
        source = tensors[index]
        for field in ("q", "req_pool_indices"):
            getattr(static, field).copy_(getattr(source, field))
        static.k_cache[: len(source.k_cache)].copy_(source.k_cache)
        static.v_cache[: len(source.v_cache)].copy_(source.v_cache)
        table = source.req_to_token
        static.req_to_token[: table.shape[0], : table.shape[1]].copy_(table)
        static.seq_lens.copy_(torch.from_numpy(seq_lens))

    def plan(index: int) -> None:
        batch = cases[index].batch()
        step.write(batch, static.req_to_token, static.req_pool_indices, static.seq_lens)

    load(0, cases[0].seq_lens)
    plan(0)
    step.decode(static.q, static.k_cache, static.v_cache, out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.decode(static.q, static.k_cache, static.v_cache, out, lse)

    for index in (0, 1, 2, 3, 1, 0):
        for growth in (0, 1, grown_by):
            lens = cases[index].seq_lens
            lens = lens + growth * (lens > 0)
            load(index, lens.astype(np.int32))
            if growth == 0:
                plan(index)
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            graph.replay()
            check(out, lse, static)
            replayed = out.clone()
            graph.replay()
            assert torch.equal(replayed, out)


class TestBadInput:
    """An error that names the value, before any launch."""

    heads = Heads(8, 2)

    def decode(self, **changes) -> None:
        tensors = Tensors.make(MIXED, self.heads)
        step = planned_step(self.heads)
        step.write(MIXED.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
        arguments = {
            "q": tensors.q,
            "k_cache": tensors.k_cache,
            "v_cache": tensors.v_cache,
            "out": torch.zeros_like(tensors.q),
        }
        fields = {f.name for f in dataclasses.fields(step.step)}
        step.step = dataclasses.replace(
            step.step, **{k: v(step.step) for k, v in changes.items() if k in fields}
        )
        for name, change in changes.items():
            if name not in fields:
                arguments[name] = change(arguments[name])
        step.decode(**arguments)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"q": lambda q: q.half()}, "q must be 3-D BFloat16, got 3-D Half"),
            ({"q": lambda q: q[:, :7]}, "7 and 2"),
            ({"k_cache": lambda k: k.cpu()}, "k_cache must be on cuda:0 like the plan, got cpu"),
            ({"k_cache": lambda k: k[:, :, ::2]}, r"shape \[n, 2, 128\]"),
            (
                {"v_cache": lambda v: v.flatten()[1 : 1 + 256 * 9].view(9, 2, 128)},
                "v_cache must be aligned to 16 bytes",
            ),
            ({"out": lambda out: out[1:]}, r"out must have shape \[\d+, 8, 128\]"),
            ({"partial_out": lambda s: s.partial_out.half()}, "partial_out must be 3-D Float"),
            ({"plan": lambda s: s.plan[:64]}, "plan must hold"),
            ({"seq_lens": lambda s: s.seq_lens.float()}, "seq_lens must be 1-D int32 or int64"),
            ({"seq_lens": lambda s: s.seq_lens[:3]}, "entry for each"),
            ({"req_to_token": lambda s: s.req_to_token.long()}, "req_to_token must be 2-D Int"),
        ],
    )
    def test_is_refused(self, changes, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            self.decode(**changes)
