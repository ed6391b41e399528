"""The kernel benchmark without a GPU: its forests, its errors against torch's, and its gates."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel import measurement
from kernel.contenders import cascade_groups, level_of
from kernel.gates import gates
from kernel.latent_workloads import COLUMNS, LatentWorkload
from kernel.numerics import compare
from kernel.pages import Unsupported
from kernel.request_forests import SLOTS, Forest, random_forest
from kernel.workloads import Workload
from sglang_pat import PackAttention
from sglang_pat.executors.reference import dense_attention


@pytest.mark.parametrize("slots", SLOTS)
def test_equal_slots_are_equal_tokens(slots: str) -> None:
    forest = Forest.of_tree("1,3,7_50,6,40")
    table = forest.token_table(slots, device="cpu")
    assert table.dtype == torch.int32
    assert sorted(table.unique().tolist()) == [*range(1, forest.num_tokens + 1)]
    for row, path in zip(table, forest.paths, strict=True):
        for other, other_path in zip(table, forest.paths, strict=True):
            same = max((a.kv_end for a, b in zip(path, other_path, strict=True) if a == b))
            assert torch.equal(row[:same], other[:same])
        ends = [0, *(node.kv_end for node in path), len(row)]
        follow = [bool((row[a:b].diff() == 1).all()) for a, b in pairwise(ends)]
        assert follow == [slots == "runs"] * len(follow)


@pytest.mark.parametrize(
    ("tree", "heads"), [("1,3_40,60", 16), ("3_50", 16), ("1,2_40,20", 16), ("1,3_40,60", 20)]
)
def test_rows_of_drafts_read_what_a_chain_reads(tree: str, heads: int) -> None:
    """Each row reads one token more than the row before, from the slots of its request.

    With 20 heads a request has more rows than a tile.
    """
    case = LatentWorkload(Forest.of_tree(tree), heads, drafts=4)
    requests, rows = case.forest.num_requests, len(case.row_lens)
    assert rows == 4 * requests
    assert case.row_lens.reshape(-1, 4)[:, -1].tolist() == case.forest.seq_lens.tolist()
    assert (case.row_lens.reshape(-1, 4)[:, 1:] - case.row_lens.reshape(-1, 4)[:, :-1] == 1).all()
    kv = torch.randn(case.forest.num_tokens + 1, 1, case.head_dim)
    q = torch.randn(rows, heads, case.head_dim)
    table = case.forest.token_table(device="cpu")
    pool, lens = torch.arange(requests).repeat_interleave(4), torch.from_numpy(case.row_lens).long()
    attention = PackAttention(heads, 1, case.head_dim, v_head_dim=COLUMNS, dtype=torch.float32)
    plan = attention.plan(case.batch(), req_to_token=table, req_pool_indices=pool, seq_lens=lens)
    out = attention.run(q, kv, kv[..., :COLUMNS])
    exact, _ = dense_attention(q, kv, kv[..., :COLUMNS], table, pool, lens, dtype=torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    # A plan without sharing within a request would read its tokens once per row.
    assert plan.kv_tokens.planned <= plan.kv_tokens.query_centric / 1.3


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize(
    "forest",
    [
        Forest.of_tree("1,2,6_10,5,3"),
        Forest.of_tree("1,3_130,70"),
        Forest.of_tree("4_16"),
        random_forest(1),
        random_forest(5),
    ],
    ids=lambda forest: forest.name,
)
def test_cascade_reads_every_token_of_a_request_once(forest: Forest, page_size: int) -> None:
    """The test decodes the plans of the levels as FlashInfer's kernels read them."""
    forest = forest.in_pages(page_size)
    workload = Workload(forest, 8, 2, page_size=page_size)
    table = forest.token_table(page_size=page_size, device="cpu")
    page_table = table[:, ::page_size] // page_size
    read: list[list[int]] = [[] for _ in range(forest.num_requests)]
    num_kv = 0
    for groups in cascade_groups(forest):
        level = level_of(groups, page_table, workload)
        assert level.qo_indptr[0] == level.kv_indptr[0] == 0
        assert level.qo_indptr[-1] == forest.num_requests
        assert level.kv_indptr[-1] == len(level.kv_indices)
        spans = [pairwise(level.qo_indptr.tolist()), pairwise(level.kv_indptr.tolist())]
        for (first, end), (begin, stop), last in zip(*spans, level.last_page_len, strict=True):
            pages = level.kv_indices[begin:stop, None] * page_size + torch.arange(page_size)
            slots = pages.flatten().tolist()[: max(stop - begin - 1, 0) * page_size + int(last)]
            num_kv += len(slots)
            for request in range(first, end):
                read[request] += slots
    for slots, row, length in zip(read, table, forest.seq_lens, strict=True):
        assert slots == row[:length].tolist()
    assert num_kv == forest.num_tokens


def test_a_disturbed_round_does_not_put_a_kernel_far_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"pat": iter([80.0, *[10.0] * 99]), "fa3": iter([12.0] * 99)}

    def interleaved_us(graphs: Any, *, rounds: int, **_: Any) -> dict[str, float]:
        return {name: median(next(times[name]) for _ in range(rounds)) for name in graphs}

    monkeypatch.setattr(measurement.timing, "interleaved_us", interleaved_us)
    graphs = dict.fromkeys(times, lambda: None)
    assert measurement._timed(graphs, 1, 7, dirty=False)["us"] == {"pat": 10.0, "fa3": 12.0}


def test_what_is_wrong_or_not_supported_is_named_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(4, 8, 16, generator=generator, dtype=torch.float64)
    cache = exact.bfloat16()
    calls = iter(range(1000))

    def contender(result: torch.Tensor) -> Any:
        return lambda workload, tensors: lambda kv: result.clone()

    def refuses(workload: Any, tensors: Any) -> Any:
        raise Unsupported("pages of 7 tokens")

    def breaks(workload: Any, tensors: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    one_head_wrong = cache.clone()
    one_head_wrong[2, 5] = 1.0
    contenders = {
        "pat": contender(cache),
        "pat-wrong": contender(cache * 1.02),
        "pat-random": lambda w, t: lambda kv: cache.float() + 1e-6 * next(calls),
        "good": contender(cache * 1.002),
        "rounded": contender(exact.to(torch.float8_e4m3fn).float()),
        "one head wrong": contender(one_head_wrong),
        "nan": contender(cache * float("nan")),
        "refuses": refuses,
        "breaks": breaks,
    }
    timed: list[str] = []
    monkeypatch.setattr(measurement, "_forget_error", lambda: None)
    monkeypatch.setattr(measurement.timing, "capture", lambda run: SimpleNamespace(replay=run))

    def layer_us(graphs: Any, layers: int, rounds: int, **_: Any) -> Any:
        timed[:] = graphs
        return {"us": dict.fromkeys(graphs, 100.0 / rounds)}

    monkeypatch.setattr(measurement.timing, "layer_us", layer_us)

    def measured(kv_dtype: torch.dtype | None) -> dict[str, Any]:
        return measurement.measure(
            contenders,
            Workload(Forest.of_tree("4_16"), 8, 2, kv_dtype=kv_dtype),
            SimpleNamespace(q=exact),
            [(cache,)],
            lambda rows, dtype: exact[rows].to(dtype),
            checked_requests=4,
            rounds=1,
            dirty=False,
        )

    found = measured(None)
    # The stub of a graph leaves zeros in the output.
    assert found["failed"].pop("pat") == "the graph has other bits than the eager run"
    assert found["failed"].keys() == {
        "pat-wrong",
        "pat-random",
        "rounded",
        "one head wrong",
        "nan",
        "breaks",
    }
    assert found["failed"]["pat-random"] == "a second run of the same plan has other bits"
    assert found["failed"]["breaks"] == "RuntimeError: no such kernel"
    assert found["unsupported"] == {"refuses": "pages of 7 tokens"}
    assert timed == ["good"]
    assert set(measured(torch.float8_e4m3fn)["failed"]) >= {"one head wrong", "nan"}
    assert timed == ["good", "rounded"]


def _case(suite: str, name: str, kind: str, pat: float, peer: float, floor: float = 10.0) -> Any:
    us = {"pat": pat, "fa3": peer, "cascade": 10 * peer}
    return {
        "suite": suite,
        "name": name,
        "kind": kind,
        "shared": kind == "shared",
        "floor_us": floor,
        "us": us,
        "failed": {},
    }


def _good() -> list[Any]:
    return [
        _case("pat-20", "a", "shared", 13.0, 22.0),
        _case("pat-20", "b", "uniform", 10.0, 10.0),
        _case("unshared", "c", "ragged", 10.0, 10.2),
        _case("unshared", "d", "long", 10.0, 10.2),
        _case("long-prefix", "e", "shared", 15.0, 40.0),
        _case("rank", "1,10_4096,416 8/1", "shared", 11.9, 12.0),
        _case("random", "f", "shared", 14.9, 20.0),
    ]


def test_a_case_in_which_pat_failed_fails_its_suite() -> None:
    cases = _good()
    assert [gate.passed for gate in gates(cases)] == [True] * 11
    del cases[4]["us"]["pat"]
    cases[4]["failed"]["pat"] = "wrong"
    cases.append(_case("long-prefix", "g", "shared", 10.0, 40.0))
    failed = {gate.suite: gate.found for gate in gates(cases) if gate.passed is False}
    wrong = "pat failed in e"
    assert failed == {"shared, all": wrong, "long-prefix": wrong, "all": "not in e"}


@pytest.mark.parametrize("shape", [(6,), (3, 2), (3, 1, 2)])
def test_results_of_any_shape(shape: tuple[int, ...]) -> None:
    """A selection of elements is a vector, which tests of isolation compare."""
    exact = torch.tensor([1.0, 1.0, 2.0, 2.0, 4.0, 4.0], dtype=torch.float64).view(shape)
    result = (exact + 0.25).bfloat16()
    report = compare(result, exact.bfloat16(), exact)
    assert not report.acceptable
    assert report.mean_error == 0.25
    assert report.relative_error == pytest.approx(1.5 / 14 if len(shape) == 1 else 0.25)


def test_a_nan_that_is_not_exact_is_an_infinite_error() -> None:
    exact = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert compare(exact.bfloat16(), exact.bfloat16(), exact).max_error == 0
    missing = torch.tensor([float("nan"), 1.0]).bfloat16()
    assert compare(missing, exact.bfloat16(), exact).max_error == float("inf")
