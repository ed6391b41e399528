"""The simulated server: what it serves, what it counts, and that it does so the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat.attention import new_scheduler
from sglang_pat.replay.formats import open_trace
from sglang_pat.replay.generate import generate
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.result import TIMING_KEYS, Result
from sglang_pat.replay.session import Replay
from sglang_pat.replay.simulate import Simulator
from sglang_pat.replay.trace import Segment, Trace, TraceErrors, TraceRequest
from sglang_pat.sglang.replay_tree import ReplayRequest, ReplayTree, new_tree

TRACE = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"
SHARED = Segment(1, 300)


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace("test", "tokens", requests, TraceErrors(), len(requests))


def sharing(count: int, answer: int, private: int = 50) -> list[TraceRequest]:
    """Requests that arrive at once and share all but the end of their prompts."""
    return [
        TraceRequest(0.0, (SHARED, Segment(100 + i, private)), answer + i) for i in range(count)
    ]


def replayed(trace: Trace, **options: Any) -> Result:
    replay = Replay(trace, ReplayOptions(**options))
    replay.run()
    return replay.result()


def simulator(trace: Trace, **given: Any) -> tuple[Simulator, ReplayTree, StepPlanner]:
    options = ReplayOptions(**given)
    tree = new_tree(options.kv_tokens, options.page_size)
    planner = StepPlanner(options.model, options.policies, options.workers)
    return Simulator(trace, tree, planner, options, ReplayRequest), tree, planner


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(v) for key, v in value.items() if key not in TIMING_KEYS}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def test_two_replays_are_equal_to_the_byte() -> None:
    once, again = (
        json.dumps(without_times(replayed(generate("toolagent", requests=80, seed=3))))
        for _ in range(2)
    )
    assert once == again


@pytest.mark.parametrize("page_size", [1, 16])
def test_no_token_of_the_pool_is_lost(page_size: int) -> None:
    """With evictions and retractions: what is not free in the end is in the tree, unlocked."""
    requests = [*sharing(40, answer=200), TraceRequest(1.0, (Segment(7, 900),), 30)]
    running, tree, _ = simulator(
        trace_of(*requests), kv_tokens=4000, page_size=page_size, max_batch=16
    )
    for step in running.steps():
        assert 0 <= step.held_tokens <= tree.pool.size
    assert running.served.finished == len(requests)
    assert running.served.retracted > 0
    assert tree.mutations["evicted_tokens"] > 0
    assert tree.pool.available + tree.tree.evictable_size() == tree.pool.size
    assert tree.tree.protected_size() == 0


def test_every_token_of_every_answer_is_decoded() -> None:
    requests = sharing(9, answer=5)
    result = replayed(trace_of(*requests))
    # The first token of each comes from its prefill.
    assert result["totals"]["decode_tokens"] == sum(r.output_length - 1 for r in requests)
    assert result["totals"]["requests"] == 9
    assert result["totals"]["steps"] == max(r.output_length for r in requests) - 1


def test_an_answer_of_one_token_needs_no_decode_step() -> None:
    result = replayed(trace_of(TraceRequest(0.0, (SHARED,), 1)))
    assert (result["totals"]["steps"], result["totals"]["requests"]) == (0, 1)
    assert result["forest"] is None


def test_sums_are_those_of_planning_every_step_anew() -> None:
    """Reuse changes nothing: growth between two plans is added alike, and exactly."""
    policies = ("memory", "per-node")
    running, _, planner = simulator(
        generate("few-shot", requests=60, seed=1), policies=policies, max_batch=24
    )
    planned = dict.fromkeys(policies, 0)
    query_centric = lower_bound = 0
    schedulers = {
        policy: new_scheduler(group_size=4, num_workers=33, policy=policy) for policy in policies
    }
    for step in running.steps():
        paths = step.read_paths()
        for policy, scheduler in schedulers.items():
            scheduler.plan(
                paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, step.seq_lens
            )
            tokens = scheduler.kv_tokens
            planned[policy] += tokens[1]
        query_centric += tokens[0]
        lower_bound += tokens[2]
        assert planner.last_kv_tokens()["query_centric"] == step.seq_lens.sum()
    totals = planner.total_kv_tokens()
    assert planner.plans_reused > planner.plans_built.total()
    assert totals == {
        "query_centric": query_centric,
        "lower_bound": lower_bound,
        "policies": pytest.approx(planned, rel=2e-3),  # packing may differ at other lengths
    }


def test_a_plan_is_reused_only_while_the_key_is_the_trees() -> None:
    """What the simulator promises about unchanged keys, checked against the tree in each step."""
    running, tree, _ = simulator(
        generate("toolagent", requests=60, seed=2), max_batch=12, kv_tokens=40_000
    )
    last = None
    reused = 0
    for step in running.steps():
        key = tree.source.key(step.reqs)
        if step.plan.cause == "reused":
            assert key == last
            reused += 1
        last = key
    assert reused > 100


def test_identical_prompts_share_from_the_first_decode_step_on() -> None:
    running, _, planner = simulator(trace_of(*sharing(8, answer=4)))
    next(iter(running.steps()))
    counts = planner.last_kv_tokens()
    assert counts["lower_bound"] == 300 + 8 * 51
    assert counts["query_centric"] == 8 * 351


def test_requests_wait_for_their_arrival() -> None:
    late = TraceRequest(1000.0, (SHARED,), 3)
    result = replayed(trace_of(*sharing(2, answer=3), late))
    assert result["totals"]["simulated_seconds"] > 1000
    result = replayed(trace_of(*sharing(2, answer=3), late), time_scale=100.0)
    assert 10 < result["totals"]["simulated_seconds"] < 11
    assert result["totals"]["prefix_hit_rate"] == pytest.approx(299 / (2 * 350 + 300), abs=1e-6)


def test_what_can_never_fit_is_refused_and_counted() -> None:
    huge = TraceRequest(0.0, (Segment(5, 5000),), 10)
    result = replayed(trace_of(huge, *sharing(2, answer=3)), kv_tokens=4000)
    assert (result["totals"]["refused"], result["totals"]["requests"]) == (1, 2)


def test_limit_and_batch_are_kept() -> None:
    running, *_ = simulator(trace_of(*sharing(30, answer=5)), limit=20, max_batch=6)
    assert max(len(step.reqs) for step in running.steps()) == 6
    assert (running.served.arrived, running.served.finished) == (20, 20)


def test_stopping_leaves_a_result() -> None:
    replay = Replay(trace_of(*sharing(4, answer=500)), ReplayOptions())
    replay.run(on_progress=replay.stop)
    result = replay.result()
    assert result["meta"]["interrupted"]
    assert 0 < result["totals"]["steps"] < 100
    assert len(result["steps"]) == result["totals"]["steps"]


def test_rows_are_thinned_out_but_sums_are_not() -> None:
    whole = replayed(trace_of(*sharing(3, answer=200)), policies=("memory",))
    thinned = replayed(trace_of(*sharing(3, answer=200)), policies=("memory",), max_rows=16)
    assert len(whole["steps"]) == whole["totals"]["steps"]
    assert 8 <= len(thinned["steps"]) <= 16
    steps = [row["step"] for row in thinned["steps"]]
    assert set(np.diff(steps)) == {thinned["meta"]["row_stride"]}
    assert without_times(whole["totals"]) == without_times(thinned["totals"])


def test_memory_moves_the_fewest_bytes_of_all_policies() -> None:
    """Before tiles are cut: a cut serves balance and adds partials, wherever it falls."""
    for name in ("conversation", "toolagent", "multi-document"):
        result = replayed(generate(name, requests=120, seed=4, rate=60.0), max_batch=64)
        for policy, comparison in result["totals"]["comparisons"].items():
            assert comparison["more_before_split"] == 0, (name, policy)
            assert comparison["worst_ratio"] < 1.02, (name, policy)


def test_the_shipped_trace_reads_little_more_than_the_lower_bound() -> None:
    counts = replayed(open_trace(TRACE, strict=True))["totals"]["kv_tokens"]
    assert counts["lower_bound"] <= counts["policies"]["memory"]
    assert counts["policies"]["memory"] <= 1.15 * counts["lower_bound"]
    assert counts["policies"]["memory"] < counts["query_centric"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ("memory", "greedy")}, "a policy is one of memory, .* got greedy"),
        ({"policies": ("memory", "memory")}, "once each"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1, got 0"),
        ({"time_scale": 0.0}, "time_scale must be positive, got 0.0"),
        ({"max_rows": 1}, "max_rows must be 0 or at least 2, got 1"),
    ],
)
def test_options_that_are_not_allowed_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayOptions(**options)
