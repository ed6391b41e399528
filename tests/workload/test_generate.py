"""Generated workloads are reproducible, and have the statistics of the papers."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections import Counter, defaultdict

import pytest

from sglang_pat.workload.generate import WORKLOADS, generate
from sglang_pat.workload.run import distinct_tokens
from sglang_pat.workload.trace import TraceRequest

# Hashes of the first 64 requests of seed 0. They must change only with a workload, not with the
# version of Python or the machine.
DIGESTS = {
    "conversation": "3d0f1a9d832cfab6",
    "toolagent": "47634ff512a931a9",
    "few-shot": "e4a3f3d94f18721d",
    "multi-chain": "e33fa8eaf78204b6",
    "multi-document": "c2431ab0d1c472be",
    "rl-rollout": "523d5860458a9123",
    "no-sharing": "fa02dbcc5d8456b6",
}


def requests_of(name: str, requests: int, seed: int = 0, **options: float) -> list[TraceRequest]:
    return list(generate(name, requests=requests, seed=seed, **options).stream)


def hit_rate(requests: list[TraceRequest]) -> float:
    """Return the part of prompt tokens that a cache without eviction has."""
    distinct = distinct_tokens(request.prompt for request in requests)
    return 1 - distinct / sum(request.input_length for request in requests)


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_seed_same_trace_on_every_machine(name):
    digest = hashlib.sha256(repr(requests_of(name, 64)).encode()).hexdigest()[:16]
    assert digest == DIGESTS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_another_seed_is_another_trace(name):
    assert requests_of(name, 20, seed=1) != requests_of(name, 20, seed=2)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("count", [1, 7, 130])
def test_as_many_requests_as_asked_for_in_order(name, count):
    trace = generate(name, requests=count)
    requests = list(trace.stream)
    assert (trace.requests, len(requests)) == (count, count)
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0
    assert all(request.output_length >= 1 for request in requests)
    assert all(segment.length >= 1 for request in requests for segment in request.prompt)


@pytest.mark.parametrize("name", WORKLOADS)
def test_longer_trace_begins_as_the_shorter_one(name):
    assert requests_of(name, 60)[:50] == requests_of(name, 50)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rate_is_requests_a_second(name):
    requests = requests_of(name, 4000, rate=20.0)
    assert requests[-1].arrival == pytest.approx(200, rel=0.15)
    assert {request.arrival for request in requests_of(name, 50, rate=math.inf)} == {0.0}


def test_gaps_are_exponential():
    arrivals = [request.arrival for request in requests_of("no-sharing", 4000, rate=1.0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(statistics.stdev(gaps), rel=0.1)


def test_conversation_has_three_levels():
    requests = requests_of("conversation", 2000)
    levels = [Counter(request.prompt[:depth] for request in requests) for depth in (1, 2, 3)]
    assert [len(level) for level in levels] == [1, 8, 32]
    assert [segment.length for segment in requests[0].prompt[:3]] == [46, 348, 2123]
    messages = [request.prompt[3].length for request in requests]
    answers = [request.output_length for request in requests]
    assert statistics.mean(messages) == pytest.approx(621, rel=0.1)
    assert statistics.mean(answers) == pytest.approx(126, rel=0.1)
    # Chats have heavy tails.
    assert statistics.median(messages) < 0.75 * statistics.mean(messages)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1000, 4000])
def test_toolagent_finds_59_percent_in_the_cache(seed, count):
    assert hit_rate(requests_of("toolagent", count, seed)) == pytest.approx(0.59, abs=0.025)


def test_few_shot_is_8_combinations_of_16_questions():
    batch = requests_of("few-shot", 256)
    assert len({request.prompt[0] for request in batch}) == 1
    assert batch[0].prompt[0].length == 3193
    for half in (batch[:128], batch[128:]):
        assert list(Counter(request.prompt[1] for request in half).values()) == [16] * 8
    assert not {r.prompt[1] for r in batch[:128]} & {r.prompt[1] for r in batch[128:]}
    assert {request.output_length for request in batch} == {256}


def test_multi_chain_is_4_chains_a_question_at_once():
    by_question = defaultdict(list)
    for request in requests_of("multi-chain", 128):
        by_question[request.prompt[:2]].append(request)
    assert len(by_question) == 32
    for chains in by_question.values():
        assert len({request.arrival for request in chains}) == 1
        assert len({request.prompt for request in chains}) == 4


def test_multi_document_shares_one_to_three_parts():
    requests = requests_of("multi-document", 128)
    groups = [len({request.prompt[:depth] for request in requests}) for depth in (1, 2, 3, 4)]
    assert groups == [4, 10, 20, 128]  # prefixes of 6 parts: first 4, pairs 10, all 20
    other_report = requests_of("multi-document", 256)[128:]
    assert not {r.prompt[0] for r in requests} & {r.prompt[0] for r in other_report}


def test_rl_rollout_samples_each_prompt_16_times():
    requests = requests_of("rl-rollout", 64)
    groups = [requests[begin : begin + 16] for begin in range(0, 64, 16)]
    assert len({request.prompt[0] for request in requests}) == 1
    for group in groups:
        assert len({(request.prompt, request.arrival) for request in group}) == 1
        assert len({request.output_length for request in group}) > 1
    assert len({group[0].prompt for group in groups}) == 4


def test_no_sharing_shares_nothing_and_is_as_long_as_conversation():
    private, chat = requests_of("no-sharing", 2000), requests_of("conversation", 2000)
    assert hit_rate(private) == 0
    mean_lengths = [statistics.mean(r.input_length for r in each) for each in (private, chat)]
    assert mean_lengths[0] == pytest.approx(mean_lengths[1], rel=0.05)
