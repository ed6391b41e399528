"""Where a plan's work items point to: the rows of the step, wherever they lie, and no further."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forests import ForestCase, make_case
from pack_decode_cases import Heads, Tensors, check, needs_gpu, planned_step, run
from test_reference import Problem
from test_row_reuse import AsLaunched, in_all_executions

from sglang_pat import DecodeBatch, PackAttention, PrefixPaths
from sglang_pat.decode_batch import Step
from sglang_pat.decode_kernels import DecodeKernels

HEADS = (8, 2, 64)
SHARED = 300


class MovedRows:
    """Three requests, two of which share a prefix, in a table that has each of their rows twice.

    Everything else in the table is slot 0, which is NaN.
    """

    def __init__(self, device: str, dtype: torch.dtype, key: object) -> None:
        case = make_case([(-1, SHARED)], [(0, 10), (0, 40), (-1, 200)])
        problem = Problem(case, HEADS, dtype)
        table = problem.req_to_token
        self.table = torch.cat((table, table)).to(device)
        self.moved_by = len(table)
        self.rows = problem.rows.to(device)
        self.lens = torch.from_numpy(case.seq_lens).to(device)
        self.q, self.k, self.v = (x.to(device) for x in (problem.q, problem.k, problem.v))
        self.exact = problem.dense(torch.float64)[0].to(device)
        self.batch = case.batch(key)
        self.attention = PackAttention(*HEADS, dtype=dtype, device=device, max_requests=3)

    def plan(self, table: torch.Tensor | None = None) -> None:
        self.attention.plan(
            self.batch,
            req_to_token=self.table if table is None else table,
            req_pool_indices=self.rows,
            seq_lens=self.lens,
        )

    def run(self) -> torch.Tensor:
        out = self.attention.run(self.q, self.k, self.v)
        assert isinstance(out, torch.Tensor)
        return out

    def check(self, out: torch.Tensor) -> None:
        assert self.attention.stats.plans_built == 1
        bound = 2e-5 if out.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.double(), self.exact, rtol=0, atol=bound)


@in_all_executions
def test_without_a_key_a_reused_plan_follows_the_rows(
    device: str, dtype: torch.dtype, as_launched: AsLaunched
) -> None:
    moved = MovedRows(device, dtype, key=None)
    moved.plan()
    run = as_launched(moved.run)
    moved.check(run())
    moved.table[: moved.moved_by] = 0
    moved.rows += moved.moved_by  # in place, as SGLang fills what its graphs captured
    moved.table[moved.rows[:2], :SHARED] = 0  # shared ranges stay as they were gathered
    moved.plan()
    moved.check(run())


@in_all_executions
def test_a_reused_plan_follows_the_table(
    device: str, dtype: torch.dtype, as_launched: AsLaunched
) -> None:
    moved = MovedRows(device, dtype, key="batch")
    moved.plan()
    run = as_launched(moved.run)
    wider = torch.zeros(len(moved.table), moved.table.shape[1] + 5, dtype=torch.int32)
    wider = wider.to(device)
    wider[:, :-5] = moved.table
    moved.table.zero_()
    moved.plan(wider)
    moved.check(run())


def test_rows_are_those_of_an_earlier_step_only_if_promised_and_in_the_same_table() -> None:
    table = torch.zeros(4, 8, dtype=torch.int32)

    def step(rows_promised: bool, req_to_token: torch.Tensor = table) -> Step:
        rows = torch.arange(2)
        return Step(req_to_token, rows, rows, np.zeros(2, dtype=np.int32), rows_promised)

    unkeyed = step(False)
    assert unkeyed.has_rows_of(unkeyed)  # nothing to do twice for one step
    assert not step(False).has_rows_of(unkeyed)
    assert step(True).has_rows_of(step(True))
    assert step(True, table[:]).has_rows_of(step(True))  # another object, the same memory
    assert not step(True, table.clone()).has_rows_of(step(True))
    assert not step(True, table[1:]).has_rows_of(step(True))
    assert not step(True, table[:, :4]).has_rows_of(step(True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("key", "gathers"), [("batch", [True]), (None, [True, False, False])])
def test_only_rows_that_may_have_moved_are_looked_up_again(
    key: object, gathers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    bind = DecodeKernels.bind_plan

    def noted(kernels: DecodeKernels, step: Any, *, gather: bool) -> None:
        launched.append(gather)
        bind(kernels, step, gather=gather)

    monkeypatch.setattr(DecodeKernels, "bind_plan", noted)
    moved = MovedRows("cuda", torch.bfloat16, key)
    for _ in range(3):
        moved.plan()
        moved.rows = moved.rows.clone()  # SGLang makes new index tensors in each step
    moved.check(moved.run())
    assert launched == gathers


def exact_fit(case: ForestCase, heads: Heads) -> Tensors:
    """The case on the device, with a table that ends where its longest rows end.

    To be run under `compute-sanitizer --tool memcheck` too, with PYTORCH_NO_CUDA_MEMORY_CACHING=1:
    then every tensor is an allocation of its own.
    """
    tensors = Tensors.make(case, heads)
    width = int(case.seq_lens.max())
    rows = torch.arange(len(case.seq_lens), device="cuda")
    table = tensors.req_to_token[tensors.req_pool_indices, :width]
    tensors.req_to_token, tensors.req_pool_indices = table.contiguous(), rows
    return tensors


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(make_case([], [(-1, 5), (-1, 700 + length)]), id=f"private-{length}")
        for length in (0, 1, 31, 33, 127, 128, 129)
    ]
    + [
        pytest.param(make_case([(-1, length)], [(0, 1)] * 3), id=f"shared-{length}")
        for length in (64, 127, 128, 129, 161, 2048)
    ],
)
class TestAtTheEnd:
    """Of req_to_token, of the slot buffer, of the plan."""

    pytestmark = needs_gpu

    def test_nothing_behind_is_read(self, case: ForestCase, index_dtype: torch.dtype) -> None:
        heads = Heads(8, 2)
        tensors = exact_fit(case, heads)
        rows = tensors.req_pool_indices.to(index_dtype)
        lens = tensors.seq_lens.to(index_dtype)
        num_shared = sum(node.kv_end - node.kv_begin for node in case.paths[-1])
        for num_workers in (1, 7):
            step = planned_step(
                heads, num_workers=num_workers, min_piece_tokens=64, max_shared_slots=num_shared
            )
            plan = step.write(case.batch(), tensors.req_to_token, rows, lens)
            assert plan.header.num_shared_slots == num_shared
            check(*run(step, tensors), tensors)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_plan_without_work_reads_none() -> None:
    attention = PackAttention(*HEADS, dtype=torch.bfloat16, device="cuda")
    lens = np.zeros(3, dtype=np.int32)
    attention.plan(
        DecodeBatch(lens, PrefixPaths.private(3)),
        req_to_token=torch.zeros(3, 8, dtype=torch.int32, device="cuda"),
        req_pool_indices=torch.zeros(3, dtype=torch.int64, device="cuda"),
        seq_lens=torch.from_numpy(lens).cuda(),
    )
    q = torch.randn(3, 8, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(4, 2, 64, device="cuda", dtype=torch.bfloat16)
    out = attention.run(q, cache, cache)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, torch.zeros_like(out))
