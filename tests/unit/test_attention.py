"""PackAttention: when it reuses plans, what it refuses, and that refusals change nothing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from problems import Problem
from sample_forests import make_case, three_level_case

from sglang_pat import DecodeBatch, PackAttention, PathNode, PrefixPaths
from sglang_pat.executors.reference import dense_attention
from sglang_pat.plan import PlanOverflowError

HEADS = (8, 2, 64)


def make_attention(**kwargs: Any) -> PackAttention:
    return PackAttention(*HEADS, dtype=torch.float32, **kwargs)


class Steps:
    """Drives a PackAttention through decode steps of a batch that can grow by `spare` tokens."""

    def __init__(self, spare: int = 400, **kwargs: Any) -> None:
        case = make_case([(-1, 300), (0, 40)], [(1, 10), (1, 20), (0, 30)], spare_tokens=spare)
        self.paths = PrefixPaths.from_lists(case.paths)
        self.lens = case.seq_lens
        self.attention = make_attention(**kwargs)
        self.tables = {
            "req_to_token": torch.from_numpy(case.tokens),
            "req_pool_indices": torch.arange(3),
        }

    def step(self, grown: int, key: object = "batch") -> None:
        lens = self.lens + np.int32(grown)
        batch = DecodeBatch(lens, self.paths, key)
        self.attention.plan(batch, seq_lens=torch.from_numpy(lens), **self.tables)


def test_a_plan_is_reused_until_the_batch_changes_or_a_tail_outgrows_it() -> None:
    steps = Steps(growth_tokens=30)
    for grown in range(31):
        steps.step(grown)
    assert steps.attention.stats.plans_built == 1
    steps.step(31)
    steps.step(32, key="another batch")
    steps.step(33, key="another batch")
    steps.step(20, key="another batch")  # shorter than planned
    stats = steps.attention.stats
    assert stats.plans_built == 4
    assert stats.plans_reused == 31
    assert stats.causes == {"first": 1, "tail_growth": 2, "batch_changed": 1}


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("more", [-2, 400])
def test_lengths_of_the_device_are_those_of_the_host_or_a_few_more(
    more: int, batch_invariant: bool
) -> None:
    steps = Steps(spare=100, batch_invariant=batch_invariant)
    batch = DecodeBatch(steps.lens, steps.paths, "batch")
    q = torch.zeros(3, 8, 64)
    caches = [torch.zeros(2000, 2, 64)] * 2
    for dtype in (torch.int32, torch.int64):
        lens = torch.tensor(steps.lens.tolist(), dtype=dtype)
        steps.attention.plan(batch, seq_lens=lens, **steps.tables)
        lens[1] += more  # changed after plan(), as by a graph
        with pytest.raises(ValueError, match=f"1 has {lens[1]}, and {steps.lens[1]} on the host"):
            steps.attention.run(q, *caches)
        q, caches = torch.randn(3, 8, 64), list(_caches(steps))
        for right in (3, -1):  # the last token's slot may not be set yet
            lens[1] = int(steps.lens[1]) + right
            steps.attention.plan(batch, seq_lens=lens, **steps.tables)
            expected, _ = dense_attention(q, *caches, **steps.tables, seq_lens=lens)
            out = steps.attention.run(q, *caches).double()
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def test_a_request_without_a_tail_has_the_length_of_the_host() -> None:
    """The request ends with its path, so its length on the device must be that on the host."""
    attention = make_attention()
    lens = np.array([20, 30], dtype=np.int32)
    paths = PrefixPaths.from_lists([[(1, 0, 20)], [(1, 0, 20)]])
    step = {
        "batch": DecodeBatch(lens, paths),
        "req_to_token": torch.zeros(2, 40, dtype=torch.int32),
        "req_pool_indices": torch.arange(2),
    }
    q, caches = torch.zeros(2, 8, 64), [torch.zeros(50, 2, 64)] * 2
    for wrong in (19, 21):
        attention.plan(**step, seq_lens=torch.tensor([wrong, 30]))
        with pytest.raises(ValueError, match=f"request 0 has {wrong}, and 20 on the host"):
            attention.run(q, *caches)
    attention.plan(**step, seq_lens=torch.tensor([20, 32]))
    attention.run(q, *caches)
    with pytest.raises(ValueError, match="request 0 has no KV after its path, so the plan reads"):
        attention.advance(torch.tensor([22, 34]), 2)
    attention.advance(torch.tensor([20, 30]), 0)
    attention.run(q, *caches)


def test_another_number_of_rows_is_another_batch() -> None:
    steps = Steps()
    steps.step(0)
    steps.paths = PrefixPaths.private(2)
    steps.lens = steps.lens[:2]
    steps.tables["req_pool_indices"] = torch.arange(2)
    steps.step(1)
    assert steps.attention.stats.causes == {"first": 1, "batch_changed": 1}


def test_a_plan_that_the_executor_refuses_leaves_none() -> None:
    steps = Steps(max_requests=3, max_shared_slots=339)
    steps.attention = steps.attention.sharing_buffers()  # has the same reservation
    shared, steps.paths = steps.paths, PrefixPaths.private(3)
    steps.step(0)
    private, steps.paths = steps.paths, shared
    with pytest.raises(PlanOverflowError, match=r"340 shared_slots; .* 339 shared_slots$"):
        steps.step(1, key="another batch")
    steps.paths = private
    with pytest.raises(RuntimeError, match="run\\(\\) needs a plan"):
        steps.attention.run(*[torch.zeros(3, 8, 64)] * 3)
    assert steps.attention.steps_left() == 0
    steps.step(2)
    assert steps.attention.stats.causes == {"first": 2}


@pytest.mark.parametrize("width", [100, 100_000])
def test_a_refused_table_changes_no_step(width: int) -> None:
    steps = Steps()
    steps.step(0)
    left, table = steps.attention.steps_left(), steps.tables["req_to_token"]
    steps.tables["req_to_token"] = torch.zeros(3, width, dtype=torch.int32)
    steps.tables["req_pool_indices"] = torch.arange(2)
    with pytest.raises(ValueError, match="req_pool_indices must have one entry per request"):
        steps.step(1)
    assert steps.attention.steps_left() == left > 0
    with pytest.raises(ValueError, match=f"at most as long as .* width {table.shape[1]}, got 1060"):
        steps.attention.advance(torch.from_numpy(steps.lens + 700), 700)


def test_a_row_that_is_not_there_leaves_no_plan_of_another_batch() -> None:
    steps = Steps()
    steps.step(0)
    steps.tables["req_pool_indices"] = torch.tensor([0, 1, 9])
    for key, has_plan in (("batch", True), ("another batch", False)):
        with pytest.raises(ValueError, match="must be rows of req_to_token, 0 to 2, got 9"):
            steps.step(1, key)
        assert (steps.attention._plan is not None) == has_plan


@pytest.mark.parametrize("field", ["path_begin", "node_id", "kv_begin", "kv_end"])
def test_without_a_key_each_array_of_the_paths_decides(field: str) -> None:
    steps = Steps()
    steps.step(0, None)
    changed = getattr(steps.paths, field).copy()
    changed[-1] += 1
    steps.paths = dataclasses.replace(steps.paths, **{field: changed})
    with contextlib.suppress(ValueError):  # most single changes are invalid paths
        steps.step(0, None)
    assert steps.attention.stats.plans_reused == 0


def test_without_a_key_a_shorter_shared_range_is_read_as_such() -> None:
    case = make_case([(-1, 300)], [(0, 10), (0, 20)])
    problem = Problem(case, HEADS, torch.float32)
    attention = make_attention()
    problem.check(attention)
    # The same requests share 100 tokens fewer, which they now have privately.
    for row in problem.rows.tolist():
        problem.req_to_token[row, 200:300] = problem.req_to_token[row, :100]
    shorter = dataclasses.replace(
        case, paths=[[(n, b, min(e, 200)) for n, b, e in p] for p in case.paths]
    )
    lens = torch.from_numpy(case.seq_lens)
    plan = attention.plan(shorter.batch(key=None), seq_lens=lens, **problem.tables)
    assert attention.stats.causes == {"first": 1, "batch_changed": 1}
    assert plan.kv_tokens.lower_bound == 200 + 110 + 120


@pytest.mark.parametrize("moved", ["other rows", "other slots"])
def test_without_a_key_shared_kv_may_move(moved: str) -> None:
    """Equal paths need not be the same KV, since node ids may start from 1 again."""
    first, second = (
        Problem(make_case([(-1, 300)], [(0, 10), (0, 20)], seed=seed), HEADS, torch.float32, seed)
        for seed in (1, 2)
    )
    assert not torch.equal(first.req_to_token, second.req_to_token)
    if moved == "other rows":
        second.req_to_token = torch.cat((first.req_to_token, second.req_to_token))
        second.rows = second.rows + len(first.req_to_token)
        second.tables = {"req_to_token": second.req_to_token, "req_pool_indices": second.rows}
    attention = make_attention()
    first.check(attention)
    second.check(attention)
    assert attention.stats.plans_reused == 1


def test_token_counts_follow_the_growth() -> None:
    steps = Steps()
    for grown in range(3):
        steps.step(grown)
    stats = steps.attention.stats
    # 350 + 360 + 330 tokens in three rows; a root of 300 and a child of 40 shared by two of them.
    assert stats.kv_tokens_query_centric == 3 * 1040 + 3 * (0 + 1 + 2)
    assert stats.kv_tokens_lower_bound == 3 * (300 + 40 + 10 + 20 + 30) + 3 * (0 + 1 + 2)
    assert stats.kv_tokens_lower_bound <= stats.kv_tokens_planned < stats.kv_tokens_query_centric


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_autocast_and_gradients_of_the_caller_change_nothing(batch_invariant: bool) -> None:
    steps = Steps(batch_invariant=batch_invariant)
    steps.step(0)
    q, caches = torch.randn(3, 8, 64), _caches(steps)
    expected = steps.attention.run(q, *caches, return_lse=True)
    inputs = [each.clone().requires_grad_() for each in (q, *caches)]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            results = steps.attention.run(*inputs, return_lse=True)
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)
            assert not result.requires_grad


def test_numbers_of_numpy_are_numbers() -> None:
    heads = map(np.int16, HEADS)
    steps = Steps()
    steps.attention = PackAttention(*heads, dtype=torch.float32, num_workers=np.int64(32))
    steps.step(0)
    q, caches = torch.randn(3, 8, 64), _caches(steps)
    expected = steps.attention.run(q, *caches, sm_scale=0.5, logit_cap=2.0)
    scaled = steps.attention.run(q, *caches, sm_scale=np.float32(0.5), logit_cap=np.int64(2))
    torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_attention_says_by_its_name_that_it_cannot_be_copied(copied: Any) -> None:
    with pytest.raises(TypeError, match="a PackAttention cannot be copied or pickled: it has a pl"):
        copied(make_attention())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copied_plan_outlives_the_next_one(copied: Any) -> None:
    steps = Steps()
    steps.step(0)
    plan = steps.attention._plan
    assert plan is not None
    text, kept = plan.describe(), copied(plan)
    plan.buffer[:] = -1  # as the next plan would
    assert kept.describe() == text
    for value in (steps.paths, steps.attention.stats, steps.attention.step_tokens):
        assert repr(copied(value)) == repr(value)


def test_torch_compile_breaks_its_graph_or_says_why_it_cannot() -> None:
    steps = Steps()
    steps.step(0)
    q, caches = torch.randn(3, 8, 64), _caches(steps)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return steps.attention.run(q * 2, *caches) + 1

    torch._dynamo.reset()
    whole = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"cannot be part of torch.compile\(fullgraph=True\)"):
        whole(q)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="eager")(q), layer(q))


def test_buffers_that_may_move_are_not_shared() -> None:
    with pytest.raises(ValueError, match="pass max_requests"):
        make_attention().sharing_buffers()


def test_run_writes_into_out() -> None:
    problem = Problem(three_level_case(3), HEADS, torch.float32)
    attention = make_attention()
    problem.check(attention)
    out = torch.full_like(problem.q, 7)
    assert attention.run(problem.q, problem.k, problem.v, out=out) is out
    assert torch.equal(out, attention.run(problem.q, problem.k, problem.v))


@pytest.mark.parametrize(
    ("heads", "kwargs", "message"),
    [
        ((8, 3, 64), {}, "multiple of num_kv_heads, got 8 and 3"),
        ((0, 1, 64), {}, "positive multiple of num_kv_heads, got 0 and 1"),
        ((17, 1, 64), {}, "query heads per KV head = 17; supported: 1 to 16"),
        ((8, 2, 72), {}, "head_dim = 72; supported: 64, 80, 96, 128, 192/128, 256, 512, 576/512"),
        ((8, 2, 128), {"v_head_dim": 64}, "head_dim = 128/64; supported: 64, 80"),
        ((8, 2, 64), {"dtype": torch.float64}, "float64; supported: float16"),
        ((8, 2, 64), {"kv_dtype": torch.int8}, "torch.float32 and torch.int8; supported: float16"),
        ((8, 2, 64), {"kv_dtype": torch.float16}, "torch.float32 and torch.float16; supported"),
        ((8, 2, 64), {"policy": "greedy"}, "packing policy = greedy; supported: memory"),
        ((8, 2, 64), {"device": "meta"}, "device must be cpu or cuda, got meta"),
        ((8, 2, 64), {"device": "gpu"}, "^device must be cpu or cuda, got 'gpu'$"),
        ((8, 2, 64), {"device": None}, "^device must be cpu or cuda, got None$"),
        ((8, 2, 64), {"num_workers": 0}, "num_workers must be 1 to 65536, got 0"),
        ((8, 2, 64), {"growth_tokens": 0}, "growth_tokens must be at least 1, got 0"),
        ((8, 2, 64), {"growth_tokens": 1 << 31}, "growth_tokens must fit into int32, got 214748"),
        ((8, 2, 64), {"max_shared_slots": -1}, "max_shared_slots must not be negative, got -1"),
        ((8, 2, 64), {"max_seq_len": 0}, "max_seq_len must be at least 1, got 0"),
        ((8, 2, 64), {"max_seq_len": 9, "max_requests": 4}, "without both it has no effect, got 9"),
        ((8, 2, 64), {"device": 99}, "device cuda:99: torch finds [0-9] CUDA devices here"),
    ],
)
def test_unsupported_configurations(
    heads: tuple[int, int, int], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PackAttention(*heads, **{"dtype": torch.float32, **kwargs})


@pytest.mark.parametrize(
    ("heads", "kwargs", "message"),
    [
        ((8, 2, 64.0), {}, "head_dim must be an integer, got 64.0"),
        (("8", 2, 64), {}, "num_qo_heads must be an integer, got '8'"),
        ((8, 2, 64), {"num_workers": 1.5}, "num_workers must be an integer, got 1.5"),
        ((8, 2, 64), {"growth_tokens": None}, "growth_tokens must be an integer, got None"),
        ((8, 2, 64), {"max_shared_slots": None}, "max_shared_slots must be an integer, got None"),
        ((8, 2, 64), {"batch_invariant": "no"}, "batch_invariant must be True or False, got 'no'"),
        ((8, 2, 64), {"dtype": "float32"}, "a dtype must be a torch.dtype, got 'float32'"),
        ((8, 2, 64), {"kv_dtype": "float8_e5m2"}, "a torch.dtype, got 'float8_e5m2'"),
        ((8, np.True_, 64), {}, "num_kv_heads must be an integer, got np.True_"),
        *(
            ((8, 2, 64), {name: True}, f"{name} must be an integer, got True")
            for name in (
                *("v_head_dim", "num_workers", "growth_tokens", "max_requests"),
                *("max_shared_slots", "max_seq_len"),
            )
        ),
    ],
)
def test_arguments_of_another_type(
    heads: tuple[Any, Any, Any], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        PackAttention(*heads, **{"dtype": torch.float32, **kwargs})


PATH_ERRORS = [
    ([[(1, 5, 10)]], "request 0 does not start at a root: its first node, 1, begins at position 5"),
    (
        [[(1, 0, 10), (2, 8, 12)]],
        "overlapping spans on the path of request 0: node 2 begins at position 8",
    ),
    ([[(1, 0, 10), (2, 12, 14)]], "gap on the path of request 0: node 2 begins at position 12"),
    ([[(1, 0, 10), (2, 10, 10)]], r"empty span on the path of request 0: node 2 is \[10, 10\)"),
    ([[(1, 0, 10)], [(1, 0, 11)]], r"disagree about node 1: \[0, 11\) for request 1, \[0, 10\)"),
    ([[(1, 0, 5), (3, 5, 9)], [(2, 0, 5), (3, 5, 9)]], "node 3 has different parents: node 2"),
    ([[(-4, 0, 10)]], "node ids must not be negative, got -4 on the path of request 0"),
    ([[(1, 0, 51)]], "seq_len 50 of request 0 is below its path's length 51"),
]


@pytest.mark.parametrize(("paths", "message"), PATH_ERRORS)
def test_bad_paths_leave_the_last_plan_in_force(paths: list[list[PathNode]], message: str) -> None:
    problem = Problem(three_level_case(3), HEADS, torch.float32)
    attention = make_attention()
    problem.check(attention)
    before = attention.run(problem.q, problem.k, problem.v)
    lens = np.full(len(paths), 50, dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        attention.plan(
            DecodeBatch(lens, PrefixPaths.from_lists(paths)),
            req_to_token=torch.zeros((2, 60), dtype=torch.int32),
            req_pool_indices=torch.zeros(len(paths), dtype=torch.int64),
            seq_lens=torch.from_numpy(lens),
        )
    assert attention.stats.plans_built == 1
    assert torch.equal(attention.run(problem.q, problem.k, problem.v), before)


def batch_of(lens: Any, paths: Any = 2, begun: Any = None) -> DecodeBatch:
    """lens: a list becomes int32. paths: PrefixPaths, or the number of requests without any."""
    lens = np.array(lens, np.int32) if isinstance(lens, list) else lens
    paths = PrefixPaths.private(paths) if isinstance(paths, int) else paths
    return DecodeBatch(lens, paths, None, begun) if begun is not None else DecodeBatch(lens, paths)


def good_step() -> dict[str, Any]:
    return {
        "batch": batch_of([4, 5]),
        "req_to_token": torch.zeros((3, 8), dtype=torch.int32),
        "req_pool_indices": torch.tensor([1, 2]),
        "seq_lens": torch.tensor([4, 5], dtype=torch.int32),
    }


INT_VECTOR = "must be 1-D torch.int64 or torch.int32, got"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("req_to_token", torch.zeros((3, 8)).long(), "req_to_token must be 2-D torch.int32"),
        ("req_to_token", torch.zeros((3, 4)).int(), "req_to_token's width 4, got 5"),
        ("req_to_token", None, "req_to_token must be a torch.Tensor, got NoneType"),
        ("req_pool_indices", torch.tensor([1, 3]), "be rows of req_to_token, 0 to 2, got 3"),
        ("req_pool_indices", torch.tensor([-1, 2]), "be rows of req_to_token, 0 to 2, got -1"),
        ("batch", None, "batch must be a DecodeBatch, got NoneType"),
        ("req_to_token", torch.zeros((3, 8), device="meta").int(), "must be on cpu, got meta"),
        ("req_pool_indices", torch.tensor([1.0, 2.0]), f"{INT_VECTOR} 1-D torch.float32"),
        ("req_pool_indices", torch.tensor([1]), "one entry per request, 2, got 1"),
        ("seq_lens", torch.tensor([[4, 5]]), f"seq_lens {INT_VECTOR} 2-D"),
        ("batch", batch_of(np.array([4, 5])), "1-D int32 NumPy array, got 1-D int64"),
        ("batch", batch_of([4, -5]), "negative, got -5 for request 1"),
        ("batch", batch_of([4, 5], 3), "path_begin must have num_requests"),
        (
            "batch",
            batch_of(np.array([4, 0, 5, 0], np.int32)[::2]),
            r"contiguous, got strides \(8,\)",
        ),
        ("batch", batch_of([4, 5])._replace(key=[7]), r"batch.key must be hashable, got \[7\]"),
        (
            "batch",
            batch_of([4, 5], [[(1, 0, 4)], []]),
            r"batch.paths must be PrefixPaths, got list; PrefixPaths.from_lists\(\)",
        ),
        ("batch", batch_of([4, 5], 2, 10.5), "batch.begun_ns must be an integer"),
    ],
)
def test_bad_steps(name: str, value: object, message: str) -> None:
    attention = make_attention()
    attention.plan(**good_step())
    with pytest.raises((ValueError, TypeError), match=message):
        attention.plan(**{**good_step(), name: value})
    assert attention.stats.plans_built == 1
    assert attention.stats.plans_reused == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(3, 8, 64), r"q must have shape \[2, 8, 64\], got \[3, 8, 64\]"),
        ("q", torch.zeros(2, 8, 64).half(), "q must be torch.float32, got torch.float16"),
        ("q", torch.zeros(2, 8, 64, device="meta"), "q must be on cpu, got meta"),
        ("k_cache", torch.zeros(9, 4, 64), r"k_cache must have shape \[num_slots, 2, 64\]"),
        ("v_cache", torch.zeros(8, 2, 64), "k_cache and v_cache must have the same number of s"),
        ("v_cache", torch.zeros(9, 2, 32), r"v_cache must have shape \[num_slots, 2, 64\]"),
        ("sinks", torch.zeros(2), r"sinks must have shape \[8\], got \[2\]"),
        ("sinks", torch.zeros(8).double(), "torch.bfloat16, torch.float16, got torch.float64"),
        ("sinks", torch.zeros(8, device="meta"), "sinks must be on cpu, got meta"),
        ("out", torch.zeros(2, 8, 32), r"out must have shape \[2, 8, 64\]"),
        (
            "out",
            torch.zeros(64).expand(2, 8, 64),
            r"out must not overlap itself, got .*\(0, 0, 1\)",
        ),
        ("k_cache", None, "k_cache must be a torch.Tensor, got NoneType"),
        ("sinks", [0.0] * 8, "sinks must be a torch.Tensor, got list"),
        ("sm_scale", math.nan, "sm_scale must be positive, got nan"),
        ("sm_scale", torch.ones(()), r"sm_scale must be a number, got tensor\(1.\)"),
        ("logit_cap", False, "logit_cap must be a number, got False"),
        ("v_scale", np.True_, "v_scale must be a number, got np.True_"),
        ("return_lse", "no", "return_lse must be True or False, got 'no'"),
        ("q", torch.zeros(2, 8, 64).to_sparse(), "q must be a dense tensor, got torch.sparse_coo"),
        ("k_scale", None, "k_scale must be a number, got None"),
        ("logit_cap", math.inf, "logit_cap must be 0 .off. or positive, got inf"),
        ("logit_cap", -1.0, "logit_cap must be 0 .off. or positive, got -1.0"),
        ("k_scale", 0.0, "k_scale must be positive, got 0.0"),
        ("v_scale", math.inf, "v_scale must be positive, got inf"),
        ("k_scale", torch.ones(()), "k_scale must be a number over a KV cache of torch.float32"),
        ("v_cache", torch.zeros(9, 2, 64).half(), "v_cache must be torch.float32, got torch.fl"),
    ],
)
def test_bad_runs_write_nothing(name: str, value: object, message: str) -> None:
    attention = make_attention()
    attention.plan(**good_step())
    out = torch.full((2, 8, 64), 7.0)
    run = {
        "q": torch.zeros(2, 8, 64),
        "k_cache": torch.zeros(9, 2, 64),
        "v_cache": torch.zeros(9, 2, 64),
        "out": out,
    }
    with pytest.raises((ValueError, TypeError), match=message):
        attention.run(**{**run, name: value})
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2), r"v_scale must be a number or one float32, got 1-D torch.float32 \[2\]"),
        (torch.ones((), dtype=torch.float64), "v_scale must be a number or one float32, got 0-D"),
        (torch.ones((), device="meta"), "v_scale must be on cpu, got meta"),
    ],
)
def test_a_scale_that_the_kernels_cannot_read_is_refused(scale: torch.Tensor, message: str) -> None:
    kv_dtype = torch.float8_e4m3fn
    attention = PackAttention(8, 2, 64, dtype=torch.float32, kv_dtype=kv_dtype)
    attention.plan(**good_step())
    cache = torch.zeros(9, 2, 64).to(kv_dtype)
    with pytest.raises(ValueError, match=message):
        attention.run(torch.zeros(2, 8, 64), cache, cache, v_scale=scale)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("slot", [-1, 9])
def test_a_slot_outside_of_the_caches_is_named(slot: int, batch_invariant: bool) -> None:
    """For -1 torch would read the last slot."""
    attention = make_attention(batch_invariant=batch_invariant)
    step = good_step()
    step["req_to_token"][1, 2] = slot
    attention.plan(**step)
    caches = torch.zeros(9, 2, 64), torch.zeros(9, 2, 64)
    with pytest.raises(ValueError, match=f"must hold slots of the caches, 0 to 8, got {slot}"):
        attention.run(torch.zeros(2, 8, 64), *caches)
    step["req_to_token"][1, 2] = 0
    step["req_to_token"][1, 4] = slot  # after the request's 4 tokens
    attention.plan(**step)
    attention.run(torch.zeros(2, 8, 64), *caches)


# --- later steps with one plan ---


def _caches(steps: Steps) -> tuple[torch.Tensor, torch.Tensor]:
    slots = int(steps.tables["req_to_token"].max()) + 1
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(slots, 2, 64, generator=generator) for _ in range(2))
    return k, v


@pytest.mark.parametrize("tokens", [0, 1, 7, 101])  # a plan is valid for 100 more
def test_a_later_step_reads_its_own_lengths_under_the_same_plan(tokens: int) -> None:
    steps = Steps(growth_tokens=100)
    steps.step(3)
    attention, q = steps.attention, torch.randn(3, 8, 64)
    before = dataclasses.replace(attention.stats)
    lens = torch.from_numpy(steps.lens) + 3
    attention.advance(lens + tokens, tokens)
    k, v = _caches(steps)
    expected, _ = dense_attention(q, k, v, **steps.tables, seq_lens=lens + tokens)
    torch.testing.assert_close(attention.run(q, k, v).double(), expected, atol=2e-6, rtol=2e-6)
    attention.advance(lens, 0)  # and back
    expected, _ = dense_attention(q, k, v, **steps.tables, seq_lens=lens)
    torch.testing.assert_close(attention.run(q, k, v).double(), expected, atol=2e-6, rtol=2e-6)
    assert attention.stats == before
    assert attention.seq_lens.tolist() == lens.tolist()


def test_padding_stays_padding_in_a_later_step() -> None:
    steps = Steps()
    steps.lens = np.array([*steps.lens[:2], 0], dtype=np.int32)
    steps.paths = PrefixPaths.from_lists([[], [], []])
    # On the device padding may have any row and length.
    steps.tables["req_pool_indices"][2] = 1000
    steps.step(0)
    steps.attention.advance(torch.from_numpy(steps.lens) + 2, 2)
    out = steps.attention.run(torch.randn(3, 8, 64), *_caches(steps))
    assert (out[2] == 0).all()
    assert (out[:2] != 0).all()


@pytest.mark.parametrize(
    ("lens", "tokens", "message"),
    [
        (torch.ones(2, dtype=torch.int64), 1, "seq_lens must have one entry per request, 3, got 2"),
        (torch.ones(3), 1, "seq_lens must be 1-D torch.int64 or torch.int32, got 1-D torch.float"),
        (None, 1, "seq_lens must be a torch.Tensor, got NoneType"),
        (torch.ones(3, dtype=torch.int64), -1, "tokens must not be negative, got -1"),
        (torch.ones(3, dtype=torch.int64), 1000, r"as long as req_to_token's width \d+, got \d+"),
        (torch.ones(3, dtype=torch.int64), 2**31 - 10, r"as long as req_to_token's width \d+, got"),
        (torch.ones(3, dtype=torch.int64), 1.5, "tokens must be an integer, got 1.5"),
        (torch.ones(3, dtype=torch.int64), True, "tokens must be an integer, got True"),
    ],
)
def test_a_bad_later_step_leaves_the_last_one_in_force(
    lens: Any, tokens: Any, message: str
) -> None:
    steps = Steps()
    steps.step(0)
    q, caches = torch.randn(3, 8, 64), _caches(steps)
    expected = steps.attention.run(q, *caches)
    with pytest.raises((ValueError, TypeError), match=message):
        steps.attention.advance(lens, tokens)
    assert torch.equal(steps.attention.run(q, *caches), expected)


def test_a_later_step_needs_a_plan_that_does_not_depend_on_lengths() -> None:
    lens = torch.ones(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"advance\(\) needs a plan: call plan"):
        make_attention().advance(lens, 1)
    steps = Steps(batch_invariant=True)
    steps.step(0)
    with pytest.raises(ValueError, match=r"advance\(\) is not batch-invariant; call plan\(\) for"):
        steps.attention.advance(lens, 1)
