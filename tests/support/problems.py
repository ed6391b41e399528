"""Random attention problems with NaN in unused memory, and their exact answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sample_forests import ForestCase

from sglang_pat import PackAttention
from sglang_pat.executors.reference import dense_attention


class Problem:
    """A case with random queries and a KV pool in which every unused slot is NaN."""

    def __init__(
        self,
        case: ForestCase,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
        seed: int = 0,
        *,
        v_head_dim: int | None = None,
        latent: bool = False,
    ) -> None:
        """latent: V is the first columns of K."""
        num_qo_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(seed)
        num_requests = len(case.seq_lens)
        self.case = case
        self.q = torch.randn(
            (num_requests, num_qo_heads, head_dim), generator=generator, dtype=torch.float32
        ).to(dtype)
        pool = (case.num_slots, num_kv_heads)
        self.k = torch.full((*pool, head_dim), math.nan, dtype=dtype)
        self.v = torch.full((*pool, v_head_dim or head_dim), math.nan, dtype=dtype)
        used = np.unique(np.concatenate([np.empty(0, np.int32), *self._used_slots(case.seq_lens)]))
        slots = torch.from_numpy(used).long()
        for cache in (self.k, self.v):
            values = torch.randn((len(slots), *cache.shape[1:]), generator=generator)
            cache[slots] = values.to(dtype)
        if latent:
            self.v = self.k[..., :v_head_dim]
        # The rows are in another order than the batch; unused table entries name NaN slots.
        self.rows = torch.randperm(num_requests, generator=generator) + 1
        width = case.tokens.shape[1]
        self.req_to_token = torch.zeros((num_requests + 1, width), dtype=torch.int32)
        for request, used_slots in enumerate(self._used_slots(case.seq_lens)):
            row = self.req_to_token[self.rows[request]]
            row[: len(used_slots)] = torch.from_numpy(used_slots)
        self.tables = {"req_to_token": self.req_to_token, "req_pool_indices": self.rows}

    def _used_slots(self, seq_lens: np.ndarray) -> list[np.ndarray]:
        return [row[:n] for row, n in zip(self.case.tokens, seq_lens, strict=True)]

    def dense(self, dtype: torch.dtype, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lens = torch.from_numpy(self.case.seq_lens)
        return dense_attention(
            self.q, self.k, self.v, self.req_to_token, self.rows, lens, dtype=dtype, **kwargs
        )

    def check(self, attention: PackAttention, **kwargs: Any) -> None:
        """Assert at most twice the error of plain torch in the same dtype, and LSEs within 1e-5."""
        lens = torch.from_numpy(self.case.seq_lens)
        attention.plan(self.case.batch(), seq_lens=lens, **self.tables)
        out, lse = attention.run(self.q, self.k, self.v, return_lse=True, **kwargs)
        exact, exact_lse = self.dense(torch.float64, **kwargs)
        plain, _ = self.dense(self.q.dtype, **kwargs)
        error = (out.double() - exact).abs()
        allowed = 2 * (plain.double() - exact).abs().max().item() + 1e-6
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= allowed, f"error {worst} > {allowed} at {int(error.argmax())}"
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
