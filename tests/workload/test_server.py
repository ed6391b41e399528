"""The simulated server: prefill passes, admission, retraction, and the tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from served import COST, SlowClock, log_of, requests_of, served

from sglang_pat.workload.server import Decode, Prefill, Rules, SimulatedServer, accepted
from sglang_pat.workload.trace import Segment, TraceRequest
from sglang_pat.workload.tree import RadixTree

SHARED = Segment(1, 300)


def sharing(count: int, answer: int = 20, arrival: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(arrival, (SHARED, Segment(100 + i, 50)), answer) for i in range(count)]


def passes(stream: list[TraceRequest], **more: Any) -> list[list[tuple[int, int]]]:
    """Return (request, new tokens) of every prefill pass."""
    events, _ = served(stream, **more)
    return [
        [(request.number, new) for request, new, _ in event.admitted]
        for event in events
        if isinstance(event, Prefill)
    ]


def test_prompts_of_one_pass_do_not_see_each_other() -> None:
    assert passes(sharing(4)) == [[(i, 350) for i in range(4)]]
    # The second pass finds the first pass's tokens in the cache.
    assert passes(sharing(4), chunked_prefill_size=700) == [
        [(0, 350), (1, 350)],
        [(2, 50), (3, 50)],
    ]


def test_a_pass_is_cut_exactly_and_the_part_is_in_the_tree_between() -> None:
    prompts = [TraceRequest(0.0, (Segment(9, 250),), 2), TraceRequest(0.0, (Segment(9, 100),), 2)]
    assert passes(prompts, chunked_prefill_size=100) == [[(0, 100)], [(0, 100)], [(0, 50), (1, 1)]]
    # No decode step runs between the chunks of a prompt.
    events, _ = served(prompts, chunked_prefill_size=100)
    kinds = [type(event) for event in events]
    assert kinds == [Prefill, Prefill, Prefill, Decode]


def test_answers_are_kept_for_the_next_turn() -> None:
    first = TraceRequest(0.0, (Segment(1, 100),), 11)
    _, server = served([first])
    (request, _), *_ = server.finished
    # The KV of the last token is never computed.
    assert server.tree.size - server.tree.available == 110
    turn = replace(request, number=7, answer_length=1, kv_len=0, handle=None)
    turn._tokens = request.tokens
    assert server.tree.match(turn, 111) == 110


def test_jumps_are_single_steps_taken_together() -> None:
    stream = [*sharing(9, answer=40), *sharing(5, answer=70, arrival=0.4)]
    for page in (1, 16):
        for pool in (1_000, 2_500, 100_000):
            more = {"pool": pool, "page": page, "max_new_tokens": 120}
            jumps, fast = served(stream, **more)
            steps, slow = served(stream, steps_at_once=1, **more)
            assert len(jumps) < len(steps)
            assert fast.retracted == slow.retracted
            assert fast.now == pytest.approx(slow.now)
            ends = [[(each.number, time) for each, time in s.finished] for s in (fast, slow)]
            assert [number for number, _ in ends[0]] == [number for number, _ in ends[1]]
            assert [time for _, time in ends[0]] == pytest.approx([time for _, time in ends[1]])
    assert slow.retracted == 0


def test_lengths_and_distinct_tokens_of_every_step() -> None:
    """Four requests share 300 tokens. A jump has the means of its single steps."""
    events, _ = served(sharing(4, answer=11))
    (jump,) = [event for event in events if isinstance(event, Decode)]
    assert jump.steps == 10
    assert jump.batch.lengths.tolist() == [351] * 4
    assert jump.kv_tokens == 4 * (351 + 360) / 2
    assert jump.distinct == 300 + 4 * (51 + 60) / 2


def admitted(events: list[Prefill | Decode]) -> list[int]:
    """Return the ids of admitted requests in order; retracted ones occur again."""
    return [each.number for e in events if isinstance(e, Prefill) for each, *_ in e.admitted]


def test_the_shortest_answers_are_retracted_and_come_back() -> None:
    stream = [TraceRequest(0.6 * i, (Segment(i, 20),), 400) for i in range(12)]
    events, server = served(stream, pool=1_600, max_new_tokens=400)
    # Request 11 had the shortest answer, so it was retracted first and returns first.
    assert admitted(events) == [*range(12), 11, 9, 10]
    assert server.retracted == 3
    assert sorted(each.number for each, _ in server.finished) == [*range(12)]


@pytest.mark.parametrize(("lengths", "again"), [((20, 28), [11, 10]), ((28, 20), [10, 11])])
def test_of_equal_answers_those_with_long_prompts_are_retracted_first(
    lengths: tuple[int, int], again: list[int]
) -> None:
    stream = [TraceRequest(1.0 * (i // 2), (Segment(i, lengths[i % 2]),), 400) for i in range(12)]
    events, _ = served(stream, pool=2_000, max_new_tokens=400)
    assert admitted(events)[12:] == again


def test_with_known_lengths_the_whole_answer_is_reserved() -> None:
    stream = [TraceRequest(0.6 * i, (Segment(i, 20),), 400) for i in range(12)]
    known, server = served(stream, pool=1_600)
    assert server.retracted == 0
    expected, _ = served(stream, pool=1_600, max_new_tokens=400)
    largest = [max(len(e.batch.requests) for e in events if isinstance(e, Decode))
               for events in (known, expected)]  # fmt: skip
    assert largest[0] < largest[1]


def test_no_more_run_than_allowed() -> None:
    events, _ = served(sharing(9), max_running_requests=4)
    assert max(len(e.batch.requests) for e in events if isinstance(e, Decode)) == 4


def test_requests_wait_for_their_arrival() -> None:
    stream = [*sharing(1, answer=3), TraceRequest(100.0, (Segment(5, 10),), 3)]
    _, server = served(stream)
    assert [time for _, time in server.finished] == pytest.approx(
        [COST.prefill(350, 0, 1) + 2 * COST.step, 100 + COST.prefill(10, 0, 1) + 2 * COST.step]
    )


@pytest.mark.parametrize(
    ("prompt", "answer", "given"),
    [(993, 5, 5), (993, 6, 5), (994, 1, None), (1000, 1, None), (500, 5000, 498)],
)
def test_the_context_limits_requests_as_in_sglang(
    prompt: int, answer: int, given: int | None
) -> None:
    """SGLang: max_req_len is 999, max_req_input_len 994, an answer at most 999 - prompt - 1."""
    stream = [TraceRequest(0.0, (Segment(5, prompt),), answer)]
    requests, refused = accepted(stream, Rules(context_length=1000), 100_000)
    assert [each.answer_length for each in requests] == ([] if given is None else [given])
    assert (refused.context, refused.pool) == (int(given is None), 0)
    assert refused.truncated == int(given is not None and given < answer)


def test_what_can_never_fit_is_refused_and_counted() -> None:
    huge = TraceRequest(0.0, (Segment(5, 5000),), 10)
    requests, refused = accepted([huge, *sharing(2)], Rules(), 4000)
    assert (len(requests), refused.pool, refused.context) == (2, 1, 0)


def test_clients_ask_for_more_than_they_get() -> None:
    (request,), _ = accepted(sharing(1), Rules(max_new_tokens=64), 4000)
    assert (request.answer_length, request.asked) == (20, 64)
    (request,), _ = accepted(sharing(1), Rules(max_new_tokens=8), 4000)
    assert (request.answer_length, request.asked) == (8, 8)


def groups() -> list[TraceRequest]:
    """Return requests of four prefixes in turn: FCFS evicts prefixes that it needs again."""
    return [TraceRequest(0.0, (Segment(i % 4, 400), Segment(100 + i, 10)), 30) for i in range(24)]


def new_tokens(policy: str) -> int:
    found = passes(groups(), pool=1_400, chunked_prefill_size=1024, schedule_policy=policy)
    return sum(tokens for each in found for _, tokens in each)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_policies_order_the_queue(policy: str) -> None:
    assert new_tokens(policy) < new_tokens("fcfs")


def test_the_log_of_a_server_tells_all_that_trees_decide() -> None:
    """tests/sglang compares this log with that of SGLang's own tree."""
    requests = requests_of(sharing(3, answer=3))
    server = SimulatedServer(requests, RadixTree(2_000), SlowClock(), Rules())
    assert log_of(server) == [
        ("prefill", [(0, 350, 0), (1, 350, 0), (2, 350, 0)], 1550),
        ("decode", 2, [351, 351, 351], 1544),
    ]


def test_a_prompt_of_which_no_page_fits_lets_go_of_its_prefix() -> None:
    """A pass of 100 tokens with 90 new ones (6 pages of 16) has 4 left, less than a page."""
    prefix = Segment(1, 64)
    stream = [
        TraceRequest(0.0, (prefix, Segment(2, 8)), 2),
        TraceRequest(9.0, (Segment(3, 90),), 2),
        TraceRequest(9.0, (prefix, Segment(4, 40)), 2),
    ]
    events, server = served(stream, pool=800, page=16, chunked_prefill_size=100)
    assert [e.new for e in events if isinstance(e, Prefill)] == [72, 90, 40]
    assert server.tree.reachable == server.tree.size, "a prefix stayed locked"


def test_nobody_is_admitted_into_a_full_batch_before_somebody_leaves() -> None:
    """Without the rule there would be room, as running requests reserve less than new ones."""
    lengths = ((50, 10), (50, 100), (200, 20))
    stream = [
        TraceRequest(0.0, (Segment(i, prompt),), answer)
        for i, (prompt, answer) in enumerate(lengths)
    ]
    events, _ = served(stream, pool=300, max_new_tokens=100)
    assert [type(event) for event in events] == [Prefill, Decode] * 3
