"""The simulated server makes the same passes with its own tree and with SGLang's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import SlowClock, log_of

from sglang_pat.cli.main import main
from sglang_pat.offline.simulated_cache import IdTree, new_tree
from sglang_pat.workload.generate import WORKLOADS, generate
from sglang_pat.workload.server import Decode, Rules, SimulatedServer, accepted
from sglang_pat.workload.trace import Segment, Trace, TraceRequest
from sglang_pat.workload.tree import RadixTree

pytestmark = pytest.mark.skipif(
    not isinstance(new_tree(8), IdTree), reason="RadixCache of 0.5.17 has other rules"
)


def shortened(trace: Trace) -> Iterator[TraceRequest]:
    """Divide all lengths by ten, so that small pools are tight."""
    for each in trace.stream:
        prompt = tuple(Segment(s.content, max(1, s.length // 10)) for s in each.prompt)
        yield TraceRequest(each.arrival, prompt, max(1, each.output_length // 10))


def logs(stream: list[TraceRequest], pool: int, page: int, rules: Rules) -> list[list[Any]]:
    found = []
    for tree in (RadixTree(pool, page), new_tree(pool, page)):
        requests, _ = accepted(stream, rules, tree.size, page)
        server = SimulatedServer(requests, tree, SlowClock(), rules)
        found.append([*log_of(server), server.retracted])
    return found


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("name", [*WORKLOADS])
def test_the_log_is_that_of_sglangs_tree(name: str, page: int) -> None:
    stream = list(shortened(generate(name, requests=70, rate=100.0)))
    longest = max(each.input_length + each.output_length for each in stream)
    for pool in (longest + 200, 2 * longest, 100_000):
        for policy in ("fcfs", "lpm", "dfs-weight"):
            rules = Rules(
                chunked_prefill_size=1024,
                max_running_requests=24,
                max_new_tokens=300,
                ignore_eos=False,
                schedule_policy=policy,
            )
            ours, theirs = logs(stream, pool, page, rules)
            assert ours == theirs, (pool, policy)


@pytest.mark.parametrize("page", [1, 16])
def test_retractions_are_those_of_sglangs_tree(page: int) -> None:
    stream = [
        TraceRequest(0.3 * i, (Segment(i % 3, 40), Segment(100 + i, 7)), 400) for i in range(30)
    ]
    rules = Rules(max_new_tokens=400, ignore_eos=False)
    retracted = 0
    for pool in range(1_300, 2_600, 100):
        ours, theirs = logs(stream, pool, page, rules)
        assert ours == theirs, pool
        retracted += ours[-1]
    assert retracted > 5


def test_paths_are_those_of_sglangs_tree() -> None:
    stream = list(shortened(generate("toolagent", requests=40, rate=100.0)))
    rules = Rules(max_running_requests=12)
    servers = []
    for tree in (RadixTree(3_000), new_tree(3_000)):
        requests, _ = accepted(stream, rules, tree.size)
        servers.append(SimulatedServer(requests, tree, SlowClock(), rules))
    for events in zip(*(server.events() for server in servers), strict=True):
        if isinstance(events[0], Decode):
            ours, theirs = (
                server.tree.paths(event.batch.requests)
                for server, event in zip(servers, events, strict=True)
            )
            for part in ("path_begin", "kv_begin", "kv_end"):
                assert (getattr(ours, part) == getattr(theirs, part)).all()


@pytest.mark.parametrize("name", [*WORKLOADS, "the trace"])
def test_the_verdict_is_that_of_sglangs_tree(name: str, tmp_path: Path) -> None:
    trace = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"
    source = ["--trace", str(trace)] if name == "the trace" else ["--generate", name]
    words = [*source, "--limit", "60", "--kv-tokens", "60000", "--max-running-requests", "64"]
    found = []
    for tree in ("own", "sglang"):
        assert main(["advise", *words, "--tree", tree, "--json", str(tmp_path / tree)]) == 0
        found.append(json.loads((tmp_path / tree).read_text()))
        del found[-1]["meta"]
    assert found[0]["verdict"] == found[1]["verdict"]
    assert found[0] == found[1]
