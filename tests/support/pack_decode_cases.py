"""Cases of the CUDA kernel tests on the device, and their float64 results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from handwritten_plans import HandPlan
from sample_forests import ForestCase, make_case

from kernel.numerics import compare
from sglang_pat import support
from sglang_pat.batch import Step
from sglang_pat.executors.reference import dense_attention

needs_latent_kernels = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() not in support.LATENT_CAPABILITIES,
    reason="has no kernels of latent attention on this GPU",
)
all_head_dims = pytest.mark.parametrize(
    "pair", support.GQA_HEAD_DIMS, ids=lambda pair: f"{pair[0]}-{pair[1]}"
)

BF16, FP16 = torch.bfloat16, torch.float16
COLUMNS, ROPE = 512, 64  # latent attention: columns of V and of rope


@dataclasses.dataclass(frozen=True)
class Heads:
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    dtype: torch.dtype = BF16
    v_head_dim: int = 0  # 0: head_dim
    kv_dtype: torch.dtype | None = None  # None: dtype

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def is_latent(self) -> bool:
        return support.is_latent(self.head_dim, self.v_head_dim)


def latent(num_heads: int, dtype: torch.dtype = BF16, kv_dtype: torch.dtype | None = None) -> Heads:
    return Heads(num_heads, 1, COLUMNS + ROPE, dtype, COLUMNS, kv_dtype)


def group_sizes(of_gqa: list[int], of_latent: list[int]) -> pytest.MarkDecorator:
    """Parametrise a test by `heads`: two KV heads of 128 or 512 columns, and latent ones."""
    heads = [pytest.param(Heads(2 * size, 2), id=str(size)) for size in of_gqa]
    heads += [pytest.param(Heads(2 * size, 2, 512), id=f"wide-{size}") for size in of_gqa]
    heads += [
        pytest.param(latent(size), id=f"latent-{size}", marks=needs_latent_kernels)
        for size in of_latent
    ]
    return pytest.mark.parametrize("heads", heads)


@dataclasses.dataclass
class Tensors:
    """A case on the device. Unused KV is NaN; unused table entries are far outside the pool."""

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

        k_cache, v_cache = (
            torch.full(
                (2 * case.num_slots + 7, heads.num_kv_heads, head_dim),
                torch.nan,
                dtype=heads.dtype,
                device="cuda",
            )
            for head_dim in (heads.head_dim, heads.v_head_dim or heads.head_dim)
        )
        # The case's slots are at the pool's end.
        shift = len(k_cache) - case.num_slots
        used = np.unique(
            np.concatenate([row[:n] for row, n in zip(case.tokens, case.seq_lens, strict=True)])
        )
        slots = torch.from_numpy(used).cuda().long() + shift
        if heads.is_latent:
            v_cache = k_cache[..., : heads.v_head_dim]
        for cache in (v_cache, k_cache):
            cache[slots] = random(len(slots), *cache.shape[1:])

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

    @property
    def index(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a plan reads on the device."""
        names = ("req_to_token", "req_pool_indices", "seq_lens")
        return {name: getattr(self, name) for name in names}

    def reference(
        self, dtype: torch.dtype, logit_cap: float = 0.0, sinks: torch.Tensor | None = None
    ):
        return dense_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.req_to_token,
            self.req_pool_indices,
            self.seq_lens,
            logit_cap=logit_cap,
            sinks=sinks,
            dtype=dtype,
        )


def has_body(heads: Heads) -> bool:
    """Return whether the tested kernel body supports these heads on this GPU."""
    from sglang_pat.executors.jit import KernelConfig

    tested = KernelConfig.for_device(heads.dtype, 128, torch.device("cuda"))
    pair = heads.head_dim, heads.v_head_dim or heads.head_dim
    if tested.force_mma_sync and support.is_wide(*pair):
        return False
    return support.has_kernels(*pair, tested.arch, one_byte=heads.kv_dtype is not None)


def config_of(heads: Heads):
    from sglang_pat.executors.jit import KernelConfig

    if not has_body(heads):
        pytest.skip(f"has no such kernels: {heads}")
    device = torch.device("cuda")
    return KernelConfig.for_device(
        heads.dtype, heads.head_dim, device, heads.v_head_dim, heads.kv_dtype
    )


def planned_step(heads: Heads, **options):
    from kernel.planned_step import PlannedStep

    options = {"by_time": False, **options}  # small cases must share, too
    return PlannedStep(config_of(heads), heads.num_qo_heads, heads.num_kv_heads, **options)


def planned(case: ForestCase, heads: Heads, tensors: Tensors | None = None, **options):
    """Return the case on the device, and a step with its plan."""
    tensors, step = tensors or Tensors.make(case, heads), planned_step(heads, **options)
    step.write(case.batch(), **tensors.index)
    return tensors, step


def load(step, plan: HandPlan, tensors: Tensors, seq_lens: np.ndarray) -> None:
    """Load a handmade plan into the step."""
    is_latent = support.is_latent(tensors.q.shape[-1], tensors.v_cache.shape[-1])
    step.executor.load_plan(
        plan.as_latent() if is_latent else plan, Step(*tensors.index.values(), seq_lens)
    )


def check_plan(case: ForestCase, plan: HandPlan, heads: Heads, **options) -> None:
    """Run a plan twice, with poisoned memory after it; the first run must reset the counters."""
    tensors, step = Tensors.make(case, heads), planned_step(heads, num_workers=8)
    load(step, plan, tensors, case.seq_lens)
    first = run(step, tensors, **options)
    check(*first, tensors, **options)
    second = run(step, tensors, **options)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "same bits"


def _outputs(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    out = tensors.q.new_full((*tensors.q.shape[:2], tensors.v_cache.shape[2]), torch.nan)
    return out, torch.full(tensors.q.shape[:2], torch.nan, device="cuda")


def run(step, tensors: Tensors, **options) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _outputs(tensors)
    step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse, **options)
    return out, lse


def captured(
    step, tensors: Tensors, layers: int = 1, **options
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """Return a CUDA graph of equal layers, and their outputs, which are NaN until a replay."""
    out, lse = _outputs(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(layers):
            step.decode(tensors.q, tensors.k_cache, tensors.v_cache, out, lse, **options)
    return graph, out, lse


def check(
    out: torch.Tensor,
    lse: torch.Tensor,
    tensors: Tensors,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    exact, exact_lse = tensors.reference(torch.float64, logit_cap, sinks)
    in_dtype, _ = tensors.reference(tensors.q.dtype, logit_cap, sinks)
    report = compare(out, in_dtype, exact)
    assert report.acceptable, str(report)
    finite = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), finite), "LSE is -inf exactly where a request is empty"
    assert torch.isneginf(lse[~finite]).all()
    if finite.any():
        # tanh.approx has an error of 2^-11 of the cap.
        bound = 2e-5 + 1e-3 * logit_cap
        if tensors.q.shape[-1] == 512:  # wgmma truncates sums in each of 32 steps
            bound += 6e-5
        error = (lse.double() - exact_lse)[finite].abs().max().item()
        assert error <= bound, f"LSE error {error:.3g}"


def make_sinks(heads: Heads, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a sink per head, of the size of LSEs of a few to some thousand keys."""
    return torch.linspace(-3.0, 10.0, heads.num_qo_heads, device="cuda").to(dtype)


def check_case(
    case: ForestCase,
    heads: Heads,
    tensors: Tensors | None = None,
    *,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    **options,
) -> None:
    tensors, step = planned(case, heads, tensors, **options)
    check(*run(step, tensors, logit_cap=logit_cap, sinks=sinks), tensors, logit_cap, sinks)


MIXED = make_case(
    [(-1, 700), (0, 130), (0, 64), (1, 33), (-1, 257)],
    [(0, 5)] * 3
    + [(1, 200)] * 9
    + [(2, 1)] * 4
    + [(3, 70)] * 20
    + [(4, 0)] * 6
    + [(-1, 900), (-1, 0)],
)
LONG = make_case([(-1, 300)], [(-1, 9000)] + [(0, 90)] * 7 + [(-1, 5000), (-1, 30), (-1, 0)])
