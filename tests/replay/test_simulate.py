"""The simulated server: what it serves, what it counts, and that it does so the same every time."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat.batch import PrefixPaths
from sglang_pat.plan import new_scheduler
from sglang_pat.replay.account import Account, split_partials
from sglang_pat.replay.options import ReplayOptions
from sglang_pat.replay.result import TIMING_KEYS, Result
from sglang_pat.replay.session import Replay
from sglang_pat.replay.simulate import Simulator
from sglang_pat.sglang.replay_tree import ReplayReader, ReplayRequest, ReplayTree, new_tree
from sglang_pat.support import POLICIES
from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.generate import generate
from sglang_pat.workload.models import GPUS, model_shape
from sglang_pat.workload.trace import Segment, Trace, TraceErrors, TraceRequest

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


def simulator(trace: Trace, **given: Any) -> tuple[Simulator, ReplayTree, Account]:
    options = ReplayOptions(**given)
    tree = new_tree(options.kv_tokens, options.page_size)
    account = Account(options.model, options.policies, options.workers)
    running = Simulator(trace, tree, ReplayReader(tree), account, options, ReplayRequest)
    return running, tree, account


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
    running, tree, account = simulator(
        generate("few-shot", requests=60, seed=1), policies=policies, max_batch=24
    )
    planned: dict[str, Any] = dict.fromkeys(policies, 0)
    query_centric = lower_bound = 0
    schedulers = {
        policy: new_scheduler(group_size=4, num_workers=33, policy=policy) for policy in policies
    }
    for step in running.steps():
        paths = tree.source.paths(step.reqs, len(step.reqs))
        for policy, scheduler in schedulers.items():
            scheduler.plan(
                paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, step.batch.seq_lens
            )
            tokens = scheduler.kv_tokens
            planned[policy] += tokens[1]
        query_centric += tokens[0]
        lower_bound += tokens[2]
        assert account.last_kv_tokens()["query_centric"] == step.batch.seq_lens.sum()
    totals = account.total_kv_tokens()
    assert account.plans_reused > account.plans_built.total()
    # At other lengths, requests may be packed in another way, or in tiles of half the rows.
    planned["memory"] = pytest.approx(planned["memory"], rel=3e-3)
    assert totals == {
        "query_centric": query_centric,
        "lower_bound": lower_bound,
        "policies": planned,
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
        if step.planned.cause == "reused":
            assert key == last
            reused += 1
        last = key
    assert reused > 100


def test_identical_prompts_share_from_the_first_decode_step_on() -> None:
    running, _, account = simulator(trace_of(*sharing(8, answer=4)))
    next(iter(running.steps()))
    counts = account.last_kv_tokens()
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
    totals = replayed(trace_of(huge, *sharing(2, answer=3)), kv_tokens=4000)["totals"]
    assert (totals["refused"], totals["requests"], totals["truncated"]) == (1, 2, 0)
    assert totals["refused_by"] == {"context": 0, "pool": 1}


@pytest.mark.parametrize(
    ("prompt", "answer", "decoded"),
    [
        (993, 5, 4),
        (993, 6, 4),  # the answer is cut
        (994, 1, None),  # refused
        (1000, 1, None),
        (500, 5000, 497),
    ],
)
def test_the_context_length_limits_requests_as_in_sglang(
    prompt: int, answer: int, decoded: int | None
) -> None:
    """SGLang: max_req_len is 999, max_req_input_len 994, an answer at most 999 - prompt - 1."""
    model = replace(model_shape("llama-3.1-8b"), context_length=1000)
    request = TraceRequest(0.0, (Segment(5, prompt),), answer)
    totals = replayed(trace_of(request), model=model)["totals"]
    assert totals["decode_tokens"] == (decoded or 0)
    assert totals["refused_by"] == {"context": int(decoded is None), "pool": 0}
    assert totals["truncated"] == int(decoded is not None and answer > decoded + 1)


def test_the_hit_rate_counts_each_prompt_once() -> None:
    """A retracted request is prefilled again; what it finds of its own is no hit."""
    running, *_ = simulator(trace_of(*sharing(40, answer=200)), kv_tokens=4000, max_batch=16)
    for _ in running.steps():
        pass
    assert running.served.retracted > 0
    assert running.served.prompt_tokens == 40 * 350
    assert 0 < running.served.prompt_tokens_found <= 39 * 300


def test_counts_grow_with_the_answers_between_two_plans() -> None:
    """Of every step and in total: also what a plan that is reused does not know of."""
    running, _, account = simulator(trace_of(*sharing(3, answer=40)), policies=("memory",))
    lower_bound = query_centric = 0
    for step in running.steps():
        counts = account.last_kv_tokens()
        lens = step.batch.seq_lens.astype(int)
        shared = 300 * (len(lens) - 1)  # all but one request find it read
        assert counts["query_centric"] == lens.sum()
        assert counts["lower_bound"] == lens.sum() - shared
        query_centric += lens.sum()
        lower_bound += lens.sum() - shared
    assert account.plans_reused > 30
    totals = account.total_kv_tokens()
    assert (totals["query_centric"], totals["lower_bound"]) == (query_centric, lower_bound)


def test_paths_are_read_when_a_request_joins_and_kept_until_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the backend: its reader asks the tree for newcomers only."""
    running, tree, _ = simulator(trace_of(*sharing(20, answer=30)), max_batch=8)
    read: list[int] = []
    source_type = type(tree.source)
    original = source_type.read

    def counting(self: Any, reqs: Any) -> Any:
        read.append(len(reqs))
        return original(self, reqs)

    monkeypatch.setattr(source_type, "read", counting)
    steps = sum(1 for _ in running.steps())
    assert steps > 60
    # 20 joined; a split of a node may ask for its holders once more.
    assert 20 <= sum(read) <= 40


def test_kept_paths_hold_what_the_tree_holds() -> None:
    """With evictions and retractions, in every step: as tokens, since kept paths may be coarser."""
    requests = [
        *sharing(40, answer=200),
        *(TraceRequest(0.5, (SHARED, Segment(200 + i, 40)), 90) for i in range(10)),
    ]
    running, tree, _ = simulator(trace_of(*requests), kv_tokens=4000, max_batch=16)
    for step in running.steps():
        fresh = tree.source.paths(step.reqs, len(step.reqs))
        kept = step.batch.read_paths()
        for row in range(len(step.reqs)):
            ends = [int(paths.kv_end[paths.path_begin[row + 1] - 1]) for paths in (fresh, kept)]
            assert ends[0] == ends[1]
        counts = [_shared_tokens(paths) for paths in (fresh, kept)]
        assert counts[0] == counts[1]
    assert running.served.retracted > 0


def _shared_tokens(paths: PrefixPaths) -> int:
    """Tokens of all nodes, each once."""
    spans = zip(paths.node_id, paths.kv_begin, paths.kv_end, strict=True)
    return sum(end - begin for _, begin, end in {tuple(map(int, span)) for span in spans})


# --- latency ---


def test_latency_is_that_of_the_simulated_clock() -> None:
    """Two requests, one after another: a batch of one makes the second wait."""
    requests = [TraceRequest(0.0, (Segment(i, 1000),), 11) for i in (1, 2)]
    options = ReplayOptions(max_batch=1, policies=("memory",))
    replay = Replay(trace_of(*requests), options)
    replay.run()
    latency = replay.result()["totals"]["latency"]
    base, per_token = options.time.prefill_seconds(options.model)
    prefill = base + 1000 * per_token
    step, per_kv = options.time.decode_seconds(options.model)
    answer = sum(step + per_kv * (1000 + i) for i in range(1, 11))
    assert latency["queue_s"]["mean"] == pytest.approx((prefill + answer) / 2, abs=2e-6)
    assert latency["ttft_s"]["mean"] == pytest.approx(prefill + (prefill + answer) / 2, abs=2e-6)
    assert latency["tpot_s"]["mean"] == pytest.approx(answer / 10, abs=2e-6)
    assert latency["service_s"]["mean"] == pytest.approx(prefill + answer, abs=2e-6)
    assert latency["tpot_s"]["p50"] == pytest.approx(answer / 10, rel=0.03)
    assert not latency["overloaded"]


def test_an_overloaded_server_is_called_so() -> None:
    crowd = replayed(trace_of(*sharing(40, answer=20)), max_batch=2)["totals"]["latency"]
    assert crowd["overloaded"]
    alone = replayed(trace_of(*sharing(40, answer=20)), max_batch=40)["totals"]["latency"]
    assert not alone["overloaded"]


def test_a_gpu_and_its_number_change_the_clock_and_the_workers() -> None:
    model = model_shape("llama-3.1-8b")
    one, eight = ReplayOptions(), ReplayOptions(model=model.on_one_of(8), tp=8)
    assert (one.workers, eight.workers) == (33, 264)
    assert eight.time.decode_seconds(eight.model) < one.time.decode_seconds(one.model)
    assert ReplayOptions(gpu=GPUS["L40S"]).workers == 17
    request = trace_of(*sharing(4, answer=50))
    seconds = [
        replayed(request, gpu=GPUS[name])["totals"]["simulated_seconds"]
        for name in ("H200", "H100", "L40S")
    ]
    assert seconds == sorted(seconds)


# --- what query-centric attention is charged for ---


@pytest.mark.parametrize(
    ("lengths", "workers", "partials"),
    [
        ([1000], 4, 4),  # chunks of 250
        ([1000], 100, 8),  # of 128, the shortest
        ([100], 100, 0),  # one chunk
        ([1000, 100], 4, 3),  # chunks of 334: only the long one is cut
        ([1000] * 8, 8, 0),  # one worker each
        ([1000] * 8, 4, 0),  # more requests than workers
        ([3000, 3000], 33, 32),  # 16 each, of 188
        ([], 4, 0),
    ],
)
def test_splits_of_query_centric_attention(lengths: list[int], workers: int, partials: int) -> None:
    assert split_partials(np.array(lengths, dtype=np.int32), workers) == partials


def test_query_centric_bytes_hold_the_partials_of_its_splits() -> None:
    result = replayed(trace_of(TraceRequest(0.0, (Segment(1, 4000),), 2)), policies=("memory",))
    totals, options = result["totals"], ReplayOptions()
    model = options.model
    # 4,001 tokens over 33 workers: 32 chunks of at least 128.
    written = 32 * model.num_qo_heads * model.num_layers * (model.head_dim + 1) * 4
    assert totals["partial_bytes"]["query_centric"] == {"written": written, "read": written}
    assert totals["bytes"]["query_centric"] == 4001 * model.kv_bytes_per_token + 2 * written
    base, _ = options.time.decode_seconds(model)
    moved = totals["bytes"]["query_centric"] / options.time.bytes_per_second
    assert totals["step_ms"]["query_centric"] == pytest.approx(1000 * (base + moved), rel=1e-4)


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
    """But for a few: to `memory`, a token that is read again counts a third, as it comes out of the
    L2, and small steps read more where they end earlier then.
    """
    for name in ("conversation", "toolagent", "multi-document"):
        result = replayed(generate(name, requests=120, seed=4, rate=60.0), max_batch=64)
        assert result["totals"]["comparisons"].keys() == set(POLICIES) - {"memory", "query-centric"}
        for policy, comparison in result["totals"]["comparisons"].items():
            assert comparison["worst_ratio_before_split"] < 1.03, (name, policy)
            assert comparison["worst_ratio"] < 1.03, (name, policy)


def test_the_shipped_trace_reads_little_more_than_the_lower_bound() -> None:
    counts = replayed(open_trace(TRACE, strict=True))["totals"]["kv_tokens"]
    assert counts["lower_bound"] <= counts["policies"]["memory"]
    assert counts["policies"]["memory"] <= 1.15 * counts["lower_bound"]
    assert counts["policies"]["memory"] < counts["query_centric"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ("memory", "greedy")}, "a policy is one of memory, .* got 'greedy'"),
        ({"policies": ("memory", "memory")}, "once each"),
        ({"kv_tokens": 0}, "kv_tokens must be at least 1, got 0"),
        ({"time_scale": 0.0}, "time_scale must be a finite number above 0, got 0.0"),
        ({"time_scale": float("inf")}, "time_scale must be a finite number above 0, got inf"),
        ({"forest_step": -1}, "forest_step must be at least 0, got -1"),
        ({"max_rows": 1}, "max_rows must be 0 or at least 2, got 1"),
    ],
)
def test_options_that_are_not_allowed_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayOptions(**options)


def test_eviction_frees_what_is_missing_and_less_than_a_leaf_more() -> None:
    """The engine test compares every step's free tokens; this one takes no engine."""
    tree = new_tree(1000, 1)
    for number in range(10):
        request = ReplayRequest(
            number, array("q", range(1000 * number, 1000 * number + 100)), 99, 0
        )
        tree.match(request, 99)
        request.kv_len = 99
        tree.pool.take(99)
        tree.cache_prompt(request)
        tree.cache_finished(request)
    assert tree.pool.available == 10
    assert tree.make_room(310)
    evicted = tree.mutations["evicted_tokens"]
    assert 300 <= evicted < 300 + 99
    assert tree.pool.available == 10 + evicted
    assert tree.make_room(50)
    assert tree.mutations["evicted_tokens"] == evicted
    assert not tree.make_room(2000)
