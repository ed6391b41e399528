"""The suites of the kernel benchmark, and the floor and tensors of a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kernel.pat_trees import PAT_TREES
from kernel.request_forests import Forest, lognormal_lengths, random_forest

HEAD_DIM = 128
E4M3 = torch.float8_e4m3fn
LAYERS = 8  # layers per graph, which share one launch as in an engine
# Best rate of dense attention kernels on an H100, for the floor of compute-bound cases.
REFERENCE_FLOPS = 600e12
LONG_TOKENS = 8000  # least context of a long case
LONG_REQUESTS = 8
PAGE_SIZE = 64  # SGLang's with XQA or FlashMLA


@dataclass(frozen=True, slots=True)
class Workload:
    """One decode step of a forest.

    quick: whether the quick mode measures it too. slots: how its KV lies in the pool, one of
    `SLOTS`. kv_dtype: the KV cache's dtype if not the queries'. page_size: slots of a page of the
    pool; if above 1, the forest's nodes are whole pages (`Forest.in_pages`).
    """

    forest: Forest
    num_qo_heads: int
    num_kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = HEAD_DIM
    with_sinks: bool = False
    suite: str = "tree"
    quick: bool = False
    slots: str = "scattered"
    kv_dtype: torch.dtype | None = None
    page_size: int = 1

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def name(self) -> str:
        name = f"{self.forest.name} {self.heads}"
        if self.head_dim != HEAD_DIM:
            name += f" d{self.head_dim}"
        if self.page_size > 1:
            name += f" page {self.page_size}"
        return name + " sinks" * self.with_sinks + " e4m3" * (self.kv_dtype == E4M3)

    @property
    def heads(self) -> str:
        return f"{self.num_qo_heads}/{self.num_kv_heads}"

    @property
    def kind(self) -> str:
        """The kind of case: "shared" or, if nothing is shared, "uniform", "ragged" or "long"."""
        if self.forest.is_shared:
            return "shared"
        lens = self.forest.seq_lens
        if len(lens) <= LONG_REQUESTS and lens.max() >= LONG_TOKENS:
            return "long"
        return "uniform" if lens.min() == lens.max() else "ragged"

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return 2 * self.num_kv_heads * self.head_dim * self.cache_dtype.itemsize

    @property
    def unique_kv_bytes(self) -> int:
        return self.forest.num_tokens * self.token_bytes

    @property
    def flops(self) -> int:
        return 4 * int(self.forest.seq_lens.sum()) * self.num_qo_heads * self.head_dim

    def floor_us(self, copy_bandwidth: float) -> float:
        """Return the least time of the step.

        It is the time to move every KV token, query and output once at copy bandwidth, or to do the
        arithmetic at the reference rate, whichever is longer.
        """
        query_bytes = 2 * self.forest.num_requests * self.num_qo_heads * self.head_dim * 2
        memory = (self.unique_kv_bytes + query_bytes) / copy_bandwidth
        return 1e6 * max(memory, self.flops / REFERENCE_FLOPS)


class KvPool:
    """K and V of all cases, filled with random numbers once and cut into layers for each case."""

    def __init__(self, num_bytes: int, device: str = "cuda") -> None:
        self._k = torch.empty(num_bytes // 4, dtype=torch.bfloat16, device=device).normal_()
        self._v = torch.empty_like(self._k).normal_()

    @staticmethod
    def bytes_for(workload: Workload) -> int:
        """Return the bytes with which no layers of the case overlap."""
        slots = workload.forest.num_slots(workload.page_size)
        return LAYERS * slots * workload.token_bytes

    def layers(self, workload: Workload) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return K and V of `LAYERS` layers, each `[slots, num_kv_heads, head_dim]`.

        Layers overlap if the pool is too small for all. Each is shifted by far more than the size
        of an L2 cache. ValueError if not even one fits.
        """
        dtype = workload.cache_dtype
        if self._k.dtype != dtype:
            self._k, self._v = _filled(self._k.view(dtype)), _filled(self._v.view(dtype))
        slots = workload.forest.num_slots(workload.page_size)
        shape = (slots, workload.num_kv_heads, workload.head_dim)
        size = shape[0] * shape[1] * shape[2]
        stride = min(size, (len(self._k) - size) // (LAYERS - 1)) // HEAD_DIM * HEAD_DIM
        if stride <= 0:
            raise ValueError(
                f"{workload.name}: K of a layer has {size} numbers, the pool {len(self._k)}"
            )
        begins = [index * stride for index in range(LAYERS)]
        return [
            (self._k[begin : begin + size].view(shape), self._v[begin : begin + size].view(shape))
            for begin in begins
        ]


def _filled(numbers: torch.Tensor) -> torch.Tensor:
    """Draw normally distributed numbers. fp8 numbers are rounded from float16, part by part."""
    if numbers.dtype.itemsize > 1:
        return numbers.normal_()
    for part in numbers.split(1 << 28):
        part.copy_(torch.randn(len(part), device=part.device, dtype=torch.float16))
    return numbers


@dataclass(frozen=True, slots=True)
class WorkloadTensors:
    """The workload's tensors on the GPU, except K and V, in SGLang's layout."""

    q: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor  # int32 [requests, pages of the longest]
    sinks: torch.Tensor | None = None

    @classmethod
    def make(cls, workload: Workload) -> WorkloadTensors:
        generator = torch.Generator("cuda").manual_seed(0)
        forest = workload.forest

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=workload.dtype)

        table = forest.token_table(workload.slots, workload.page_size)
        return cls(
            random(forest.num_requests, workload.num_qo_heads, workload.head_dim),
            table,
            torch.arange(forest.num_requests, device="cuda"),
            torch.from_numpy(forest.seq_lens).long().cuda(),
            (table[:, :: workload.page_size] // workload.page_size).contiguous(),
            random(workload.num_qo_heads) if workload.with_sinks else None,
        )


def _product(
    forests: Sequence[Forest],
    heads: Sequence[str],
    quick: Sequence[str],
    *,
    head_dim: int = HEAD_DIM,
) -> list[Workload]:
    """Return all forests with all heads. quick: names of the cases of the quick mode."""
    cases = [
        Workload(forest, *(int(count) for count in pair.split("/")), head_dim=head_dim)
        for pair in heads
        for forest in forests
    ]
    missing = set(quick) - {case.name for case in cases}
    assert not missing, missing
    return [replace(case, quick=case.name in quick) for case in cases]


def _with_heads(
    tree: str, heads: str, head_dim: int = HEAD_DIM, *, quick: bool = False
) -> Workload:
    query_heads, kv_heads = map(int, heads.split("/"))
    return Workload(Forest.of_tree(tree), query_heads, kv_heads, head_dim=head_dim, quick=quick)


def _trees(*names: str) -> list[Forest]:
    return [Forest.of_tree(name) for name in names]


def pat_20() -> list[Workload]:
    """Return the 20 trees of PAT's Figure 10, of which the last two share nothing."""
    return _product(
        _trees(*PAT_TREES),
        ("32/8", "64/8", "16/8", "32/32"),
        (  # launch-bound, many sharers, long tails, deep trees, nothing shared
            "1,10_4096,416 32/8",
            "1,1024_2048,32 32/8",
            "1,1024_2048,32 64/8",
            "1,2,64_1024,256,256 16/8",
            "1,4,256_32,256,32 32/8",
            "1,8,512_32,512,256 64/8",
            "1,16,32,64,128,1024_256,128,64,32,32,32 32/8",
            "1,16,32,64,128,1024_256,128,64,32,32,32 32/32",
            "4,16,256,512_512,32,128,32 16/8",
            "256_1024 32/8",
            "256_1024 32/32",
        ),
    )


def long_prefix() -> list[Workload]:
    """Return shared prefixes of 2k to 128k, with heads of today's models and their ranks."""
    longest = [
        _with_heads("1,32_32768,512", "32/8"),
        _with_heads("1,16_65536,4096", "32/8"),
        _with_heads("1,40_58944,6553", "16/2", 256, quick=True),  # Qwen3-Next, 3.5, 3.6
        _with_heads("1,24_60000,4000", "96/8"),  # GLM-4.6
        _with_heads("1,64_32768,1000", "8/1"),
        _with_heads("1,16_65536,2000", "64/8"),
        *(
            _with_heads(f"1,{count}_131072,1024", heads, head_dim)
            for count, heads, head_dim in (
                (24, "32/8", 128),
                (32, "16/2", 256),
                (16, "96/8", 128),
                (32, "8/1", 128),
                (16, "64/8", 128),
            )
        ),
    ]
    return longest + _product(
        _trees(
            *(f"1,{count}_{tokens},256" for tokens in (8192, 32768) for count in (32, 128, 256)),
            "1,1024_2048,32",
        ),
        ("32/8", "64/8", "16/2"),
        (
            "1,32_8192,256 16/2",
            "1,128_8192,256 32/8",
            "1,128_32768,256 64/8",
            "1,1024_2048,32 16/2",
        ),
    )


def rank() -> list[Workload]:
    """Return cases with one or two KV heads, as on a rank of a large model."""
    return _product(
        _trees(
            "1,10_4096,416",
            "1,4,8,256_32,256,256,32",
            "1,16,64_1024,256,128",
            "1,2,4,8,16,32,64,128_256,128,64,64,32,32,32,32",
            "1,64_2048,128",
            "1,128_8192,256",
        ),
        ("4/1", "8/1", "16/1", "8/2", "16/2", "32/2"),
        (
            "1,10_4096,416 8/1",
            "1,4,8,256_32,256,256,32 8/1",
            "1,16,64_1024,256,128 16/2",
            "1,2,4,8,16,32,64,128_256,128,64,64,32,32,32,32 4/1",
            "1,128_8192,256 8/1",
            "1,64_2048,128 8/2",
        ),
    )


def unshared() -> list[Workload]:
    def ragged(count: int, median: int) -> Forest:
        return Forest.unshared(f"{count}_lognormal-{median}", lognormal_lengths(count, median))

    return _product(
        [
            *_trees("32_512", "128_1024", "32_4096"),
            *(ragged(count, 1000) for count in (16, 64, 200)),
            *_trees("1_8192", "1_32768", "1_131072", "2_65536", "4_32768", "8_8192", "8_50000"),
            *_trees("1_500", "4_700"),  # a small chat
            ragged(16, 300),
        ],
        ("32/8", "8/1"),
        (
            "128_1024 32/8",
            "128_1024 8/1",
            "200_lognormal-1000 32/8",
            "16_lognormal-1000 8/1",
            "1_8192 32/8",
            "1_131072 8/1",
            "8_50000 32/8",
            "8_8192 8/1",
            "4_700 32/8",
        ),
    )


def random_forests() -> list[Workload]:
    heads = ((32, 8), (64, 8), (16, 2), (8, 1), (32, 32), (40, 8))
    return [
        Workload(random_forest(seed), *heads[seed % len(heads)], quick=seed < 4)
        for seed in range(18)
    ]


def hybrid() -> list[Workload]:
    """Return full-attention layers of gpt-oss-20b, Gemma-3-12b and Qwen3-Next."""
    trees = (
        "1,128_8192,256",
        "1,10_4096,416",
        "1,16,32,64,128,1024_256,128,64,32,32,32",
        "256_1024",
    )
    layers = ((64, 8, 64, True), (16, 8, 256, False), (16, 2, 256, False))
    return [
        Workload(
            forest,
            heads,
            kv_heads,
            head_dim=head_dim,
            with_sinks=with_sinks,
            quick=index < 1,
        )
        for heads, kv_heads, head_dim, with_sinks in layers
        for index, forest in enumerate(_trees(*trees))
    ]


def head_dim_512() -> list[Workload]:
    """Return full-attention layers of Gemma-4-26B-A4B and Gemma-4-31B, and of their ranks."""
    return _product(
        _trees(
            "1,64_16384,300",
            "64_4096",
            "1,128_8192,256",
            "8_16384",
            "1,4,64_2048,1024,256",
            "1,10_4096,416",
            "1,16_65536,2000",
            "128_1024",
            "1_32768",
            "4_700",
        ),
        ("16/2", "32/4", "8/1"),
        ("1,64_16384,300 16/2 d512", "64_4096 16/2 d512"),
        head_dim=512,
    )


def fp8() -> list[Workload]:
    """Return unshared batches with 32/8 heads, and PAT's trees, with e4m3 KV."""
    cases = [case for case in unshared() if case.heads == "32/8"] + pat_20()
    return [replace(case, kv_dtype=E4M3) for case in cases]


def page_64() -> list[Workload]:
    """Return cases with pages, which pat reads as runs of consecutive slots."""
    cases = [
        _with_heads("1,128_8192,256", "32/8", quick=True),
        _with_heads("1,64_2048,128", "32/8"),
        _with_heads("32,256_1024,64", "32/8"),
        _with_heads("1,32_32768,512", "32/8"),
        _with_heads("1,16_65536,4096", "32/8"),
        _with_heads("1,64_32768,1000", "8/1"),
        _with_heads("1,40_58944,6553", "16/2", 256),
        _with_heads("4,128_4096,300", "32/8"),
        _with_heads("128_1024", "32/8", quick=True),
        _with_heads("64_2000", "8/1"),
        _with_heads("8_50000", "32/8"),
        _with_heads("4_700", "32/8"),
        _with_heads("1_500", "32/8"),
        Workload(Forest.unshared("200_lognormal-1000", lognormal_lengths(200, 1000)), 32, 8),
        *(_with_heads(tree, "32/8") for tree in PAT_TREES),
        *random_forests()[:6],
    ]
    return [
        replace(case, forest=case.forest.in_pages(PAGE_SIZE), page_size=PAGE_SIZE) for case in cases
    ]


def page_64_fp8() -> list[Workload]:
    return [replace(case, kv_dtype=E4M3) for case in page_64()]


# Suites in the order of measurement, the most informative first.
SUITES: dict[str, Callable[[], list[Workload]]] = {
    "page-64": page_64,
    "pat-20": pat_20,
    "unshared": unshared,
    "long-prefix": long_prefix,
    "rank": rank,
    "random": random_forests,
    "hybrid": hybrid,
    "head-dim-512": head_dim_512,
    "page-64-fp8": page_64_fp8,
    "fp8": fp8,
}
DEFAULT_SUITES = ("page-64", "pat-20", "unshared", "long-prefix", "rank", "random")


def suite(name: str, *, quick: bool = False) -> list[Workload]:
    """Return the cases of a suite. quick: a few representative cases."""
    cases = [replace(case, suite=name) for case in SUITES[name]()]
    return [case for case in cases if case.quick] if quick else cases
