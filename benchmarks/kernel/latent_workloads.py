"""The cases of the benchmark of latent attention (MLA): forests, heads and draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernel.request_forests import Forest, lognormal_lengths
from kernel.workloads import E4M3, Workload
from sglang_pat.batch import DecodeBatch, IntArray, PathNode, PrefixPaths
from sglang_pat.support import LATENT_HEAD_DIMS

COLUMNS = LATENT_HEAD_DIMS[1]  # value columns, before the rope columns
HEADS = (8, 12, 16, 20, 32)
SUITE, MANY_ROWS = SUITES = "mla", "many-rows"
# Tokens that a request has committed since planning, which each row reads separately.
_COMMITTED_SINCE = 16


@dataclass(frozen=True, slots=True)
class LatentWorkload(Workload):
    """A step of latent attention, with one KV head whose values are a part of the keys.

    drafts: rows per request. If above 1, it is a verify step of chains, in which row `i` of a
    request reads all but the last `drafts - 1 - i` tokens.
    """

    num_kv_heads: int = 1
    head_dim: int = LATENT_HEAD_DIMS[0]
    suite: str = SUITE
    drafts: int = 1

    @property
    def name(self) -> str:
        name = f"{self.forest.name} h{self.num_qo_heads}"
        name += f" x{self.drafts}" * (self.drafts > 1)
        return name + " e4m3" * (self.kv_dtype == E4M3)

    @property
    def token_bytes(self) -> int:
        return self.head_dim * self.cache_dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * int(self.row_lens.sum()) * self.num_qo_heads * (self.head_dim + COLUMNS)

    @property
    def row_lens(self) -> IntArray:
        """KV tokens that each row reads, int32 `[requests * drafts]`."""
        last = np.repeat(self.forest.seq_lens, self.drafts)
        rows = np.tile(np.arange(1 - self.drafts, 1), self.forest.num_requests)
        return (last + rows).astype(np.int32)

    def batch(self) -> DecodeBatch:
        """Return the rows as the adapter plans them, each request's rows below one node."""
        forest = self.forest
        if self.drafts == 1:
            return forest.batch()
        paths: list[list[PathNode]] = []
        for request, path in enumerate(forest.paths):
            begin = path[-1].kv_end if path else 0
            end = int(forest.seq_lens[request]) - self.drafts - _COMMITTED_SINCE
            own = PathNode(len(forest.nodes) + request, begin, end)
            paths += [[*path, own] if end > begin else path] * self.drafts
        return DecodeBatch(self.row_lens, PrefixPaths.from_lists(paths), key=self.name)

    @property
    def sharing(self) -> int:
        """Number of requests that share the first node."""
        return sum(bool(path) and path[0].node_id == 0 for path in self.forest.paths)

    @property
    def prefix(self) -> int:
        """Tokens of the first node."""
        return self.forest.nodes[0][1] if self.forest.nodes else 0

    def least_us(self, copy_bandwidth: float, flops: float) -> float:
        """Return the least time: to move everything once, or to compute without padding."""
        columns = self.head_dim + COLUMNS
        query_bytes = len(self.row_lens) * self.num_qo_heads * columns * self.dtype.itemsize
        memory = (self.unique_kv_bytes + query_bytes) / copy_bandwidth
        return 1e6 * max(memory, self.flops / flops)


def _ragged(count: int, prefix: int, median: int) -> Forest:
    tails = lognormal_lengths(count, median)
    name = f"1,{count}_{prefix},lognormal-{median}"
    return Forest(name, ((-1, prefix),), tuple((0, tail) for tail in tails))


def workloads(*, quick: bool = False) -> list[LatentWorkload]:
    """Return all cases, the most informative first. quick: a few representative cases."""
    gated = [("1,128_8192,256", 16), ("1,128_8192,256", 8)]
    gated += [("1,32_16384,512", 16), ("1,64_2048,128", 16)]
    unshared = [
        Forest.of_tree("128_1024"),
        Forest.of_tree("32_512"),
        Forest.of_tree("64_4096"),
        Forest.of_tree("8_16384"),
        Forest.of_tree("1_65536"),
        Forest.unshared("64_lognormal-1000", lognormal_lengths(64, 1000)),
    ]
    cases = [LatentWorkload(Forest.of_tree(tree), heads, quick=True) for tree, heads in gated]
    cases += [
        LatentWorkload(forest, heads, quick=heads == 16 and index in (0, 5))
        for heads in (16, 8, 20, 32)
        for index, forest in enumerate(unshared)
    ]
    shared = [
        f"1,{count}_{prefix},{tail}"
        for count, prefix, tail in (
            *((count, 4096, 512) for count in (2, 4, 16, 64, 256)),
            *((64, prefix, 512) for prefix in (1024, 16384, 65536)),
            *((count, 16384, 512) for count in (2, 4, 16)),
            *((64, 4096, tail) for tail in (128, 2048)),
            (256, 1024, 64),
            (256, 65536, 128),
        )
    ]
    cases += [
        LatentWorkload(Forest.of_tree(tree), 16, quick=index == 2)
        for index, tree in enumerate(shared)
    ]
    trees = [
        Forest.of_tree("1,4,64_4096,1024,256"),
        Forest.of_tree("1,8,128_8192,512,256"),
        Forest.of_tree("1,4,16,128_2048,1024,512,128"),
        _ragged(64, 8192, 400),
        _ragged(128, 2048, 1000),
    ]
    cases += [
        LatentWorkload(forest, heads, quick=heads == 16 and index == 0)
        for heads in (16, 8)
        for index, forest in enumerate(trees)
    ]
    cases += [
        LatentWorkload(Forest.of_tree(tree), heads)
        for heads in HEADS
        if heads != 16
        for tree in ("1,64_4096,512", "1,16_16384,512", "1,64_16384,512", "1,256_1024,64")
    ]
    return [case for case in cases if case.quick] if quick else cases


# (query heads, draft tokens): recommended MTP, no MTP, GLM-4.7-Flash with MTP, blocks of 8.
MANY = ((16, 4), (64, 1), (20, 4), (8, 8))


def many_rows(shapes: Sequence[tuple[int, int]] = MANY) -> list[LatentWorkload]:
    """Return cases of requests with many rows, about 64, which fill a tile, and long prefixes.

    shapes: (query heads, draft tokens) pairs.
    """
    trees = ["1,64_8192,256", "1,64_40960,256", "1,24_122880,256", "64_8192"]
    cases = [(tree, *shape) for shape in shapes for tree in trees]
    cases += [(tree, *shapes[0]) for tree in ("1,64_16384,256", "1,24_60000,256")]
    cases += [(tree, *shape) for tree in ("64_1024", "8_32768") for shape in shapes]
    return [
        LatentWorkload(Forest.of_tree(tree), heads, suite=MANY_ROWS, drafts=drafts)
        for tree, heads, drafts in cases
    ]
