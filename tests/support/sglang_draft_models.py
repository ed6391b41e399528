"""Common parts of the tests of draft models.

A model that is served, another one that drafts, and two requests that share a prefix.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang_fakes import HEAD_DIM, KV_HEADS, KVPool, dense, runner, server_arguments
from sglang_trees import TREE_KINDS, Tree

from sglang_pat.sglang.report import layer_report

WIDTH, SLOTS = 300, 900
PREFIX, PREFIX_SLOTS = list(range(1, 21)), list(range(100, 120))
ROWS = (1, 2)


def kv_pool(seed: int, heads: int = KV_HEADS) -> KVPool:
    """KV pool of two layers."""
    made = KVPool()
    generator = torch.Generator().manual_seed(seed)
    shape = (SLOTS, heads, HEAD_DIM)
    made.keys = [torch.randn(shape, generator=generator) for _ in range(2)]
    made.values = [torch.randn(shape, generator=generator) for _ in range(2)]
    return made


def told_default_layers(key: str) -> str:
    """Report of `/server_info` on a draft model's layers, all of which fall back.

    key: one of its steps.
    """
    told = layer_report._after_get_init_info({})["pat"]
    assert told["pat_layers"] == 2  # of the model that is served
    assert told[key]["pat_layers"] == 0
    (found,) = told[key]["default_layers"]
    assert isinstance(found, str)
    return found


class DraftScene:
    """A model that is served with drafts of another.

    `served` is the backend of the model, `runner` that of the draft model.
    """

    served: Any
    runner: Any

    def __init__(
        self, tree_kind: str = TREE_KINDS[0], *, num_drafts: int, arguments: dict[str, Any] | None
    ) -> None:
        self.table = torch.zeros(4, WIDTH, dtype=torch.int32)
        for row in ROWS:
            self.table[row, :20] = torch.tensor(PREFIX_SLOTS)
            self.table[row, 20:] = torch.arange(20, WIDTH) + 100 + 280 * (row - 1)
        given = {"speculative_algorithm": "STANDALONE"} | (arguments or {})
        self.arguments = server_arguments(speculative_num_draft_tokens=num_drafts, **given)
        self.arguments._sglang_pat_decodes = True
        self._req_to_token_pool = SimpleNamespace(req_to_token=self.table)
        tree = Tree(tree_kind)
        tree.cache.req_to_token_pool = self._req_to_token_pool
        tree.insert(PREFIX, PREFIX_SLOTS)
        self.reqs = [tree.request(f"request {row}", PREFIX, 20, row) for row in ROWS]
        self.scheduled = SimpleNamespace(reqs=self.reqs, tree_cache=tree.cache)

    def new_runner(self, **fields: Any) -> Any:
        return runner(
            server_args=self.arguments, **{"req_to_token_pool": self._req_to_token_pool} | fields
        )

    @property
    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.served._pat.planner.counters()
        return counters

    def assert_reads(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        request: int,
        length: int,
        layer: int = 0,
        table: torch.Tensor | None = None,
    ) -> None:
        """A row of queries has read so many tokens of its request, in the draft model's KV."""
        slots = (self.table if table is None else table)[ROWS[request], :length].long()
        exact = dense(q, self.runner.token_to_kv_pool, layer, slots)
        torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=2e-6)
