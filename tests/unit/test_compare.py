"""Comparisons of servers: what starts together, what is asked, and how answers are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.fleet import heads_of
from server import compare
from server.compare import arguments_of, compared, gates, groups_of, server_bytes
from server.scenarios import BACKENDS, SCENARIOS, Scenario, alone, shared
from sglang_pat.bench.answers import Answer, Candidate
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun

GIGABYTE = 1e9


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_batch_fits_its_servers(name: str) -> None:
    scenario = SCENARIOS[name]
    arguments = arguments_of(scenario)
    assert BACKENDS[scenario.backends[0]].contender.is_pat
    assert len(scenario.backends) > 1
    for batch in scenario.batches:
        case = batch.case
        prompts = case.prompts(2000)
        more = compare.TAIL + max(case.generated, compare.ANSWER_TOKENS)
        distinct = sum(len(prompt) - case.prefix + more for prompt in prompts)
        assert distinct + case.groups * case.prefix <= arguments["max_total_tokens"]
        assert max(map(len, prompts)) + more < arguments["context_length"]
        assert case.batch in arguments["cuda_graph_bs_decode"]
        assert case.batch <= arguments["max_running_requests"]
        if "max_mamba_cache_size" in arguments:  # states are kept at multiples of chunks
            assert case.prefix % 64 == case.private % 64 == 0
    assert len({batch.name for batch in scenario.batches}) == len(scenario.batches)


def test_one_server_of_each_scenario_fits_on_80_gb() -> None:
    for name, scenario in SCENARIOS.items():
        assert server_bytes(scenario) < 0.9 * 80e9, name


def scenario(layers: int, *backends: str) -> Scenario:
    return Scenario("llama-3-8b", backends or ("pat", "fa3"), (alone(layers, 64),))


def test_servers_start_together_as_far_as_the_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {1: 15.0, 2: 15.0, 3: 15.0, 4: 60.0, 5: 5.0}
    monkeypatch.setattr(
        compare, "server_bytes", lambda each: needs[each.batches[0].case.batch] * GIGABYTE
    )
    scenarios = {str(number): scenario(number) for number in needs}
    both = ("pat", "fa3")
    assert groups_of(scenarios, 80 * GIGABYTE) == [
        [("1", both), ("2", both)],
        [("3", both)],
        [("4", ("pat",))],  # the two do not fit at once
        [("4", ("fa3",)), ("5", both)],
    ]


def test_servers_of_other_ranks_are_started_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "server_bytes", lambda _: GIGABYTE)
    several = Scenario("llama-3-8b", ("pat", "fa3"), (alone(1, 64),), {"tp_size": 2})
    groups = groups_of({"one": scenario(1), "two": several}, 80 * GIGABYTE)
    assert [[name for name, _ in group] for group in groups] == [["one"], ["two"]]


def answer(*tokens: tuple[int, float, int, float]) -> Answer:
    """(best, its log-probability, second, its own) of each token."""
    candidates = [[Candidate(a, best), Candidate(b, second)] for best, a, second, b in tokens]
    return Answer([best for best, *_ in tokens], candidates)


def test_answers_part_at_ties_as_wide_as_the_servers_differ() -> None:
    ours = answer((7, -0.50, 8, -1.0), (5, -0.60, 6, -0.61), (1, -0.1, 2, -3.0))
    theirs = answer((7, -0.52, 8, -1.0), (6, -0.60, 5, -0.63), (9, -0.1, 4, -3.0))
    found = compared([ours], [theirs], most_tie=0.5)
    assert found["tie"] == pytest.approx(0.04)
    assert (found["ties"], found["errors"], found["equal"]) == (1, [], 0)
    assert found["positions_equal"] == 1
    # Tokens after the parting belong to another text.
    assert found["largest_difference"] == pytest.approx(0.02)
    # The same gap is no tie where the servers agree better, or where ties are at most narrower.
    exact = answer((7, -0.50, 8, -1.0), (6, -0.60, 5, -0.63), (9, -0.1, 4, -3.0))
    assert len(compared([ours], [exact], most_tie=0.5)["errors"]) == 1
    assert len(compared([ours], [theirs], most_tie=0.02)["errors"]) == 1


def case(median: float, error: float | None = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "scenario": "s",
        "case": "c",
        "least": 2.0,
        "prefix": 0,
        "over_pat": {"fa3": {"median": median, "error": error}},
        "answers": {"fa3": {"errors": []}},
        **more,
    }


@pytest.mark.parametrize(
    ("median", "error", "met"), [(2.1, 0.0, True), (1.99, 0.01, True), (1.9, 0.01, False)]
)
def test_a_ratio_may_miss_its_gate_by_two_errors(median: float, error: float, met: bool) -> None:
    assert gates({}, [case(median, error)])["s, c: fa3 / pat"]["met"] is met
    assert "s, c: fa3 / pat" not in gates({}, [case(median, error, least=None)])


def test_answers_that_part_and_prompts_that_were_not_cached_fail() -> None:
    wrong = case(3.0, answers={"fa3": {"errors": [{}]}})
    assert [gate["met"] for gate in gates({}, [wrong]).values()] == [True, False]
    # A model of experts leaps: the other server parts from itself, too.
    leaps = wrong | {"own_answers": {"fa3": {"errors": [{}]}}}
    assert [gate["met"] for gate in gates({}, [leaps]).values()] == [True, True]
    for cached, met in ((0.95, True), (0.5, False)):
        found = gates({}, [case(3.0, prefix=64, share_of_prompts_cached={"pat": cached})])
        assert found["s, c: part of the prompts in the cache"]["met"] is met


class StubServer:
    """Answers each prompt with its last token; `wrong`: with another one."""

    def __init__(self, *, wrong: bool = False) -> None:
        self.wrong = wrong
        self.batches: list[int] = []

    def stats(self) -> dict[str, Any]:
        return {}

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> list[dict[str, Any]]:
        self.batches.append(len(prompts))
        return [self._answer(prompt[-1] + self.wrong) for prompt in prompts]

    def _answer(self, token: int) -> dict[str, Any]:
        top = [[-0.5, token, None], [-0.9, token + 1, None]]
        return {"output_ids": [token], "meta_info": {"output_top_logprobs": [top]}}


def test_servers_of_a_batch_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(members: list[Any], prompts: Any, tokens: int, rounds: int) -> dict[str, Any]:
        times = {"pat": 2.0, "fa3": 6.0, "xqa": 4.0}
        slices = {each.name: dict.fromkeys((8, 16, 24), times[each.name]) for each in members}
        return {name: [DecodeRun(each, 1.0, 1.0, [])] * rounds for name, each in slices.items()}

    monkeypatch.setattr(compare, "ask_in_turn", ask)
    monkeypatch.setattr(compare, "fill_all", lambda *_: None)
    servers = {"pat": StubServer(), "fa3": StubServer(), "xqa": StubServer(wrong=True)}
    members: Any = {
        name: SimpleNamespace(name=name, server=server, failure=None)
        for name, server in servers.items()
    }
    batch = shared(5, 128, 64, 2.5)
    of = Scenario("llama-3-8b", ("pat", "fa3", "xqa"), (batch,))
    measured = compare.Measured("s", of)
    # Those of another group come later, and are compared with what is known by then.
    measured.measure(batch, {"pat": members["pat"]}, 2)
    assert measured.cases()[0]["over_pat"] == {}
    measured.measure(batch, {name: members[name] for name in ("fa3", "xqa")}, 2)
    (found,) = measured.cases()
    assert {name: each["median"] for name, each in found["over_pat"].items()} == {
        "fa3": 3.0,
        "xqa": 2.0,
    }
    assert [found["answers"][name]["equal"] for name in ("fa3", "xqa")] == [5, 0]
    assert found["own_answers"]["fa3"]["equal"] == 5
    assert servers["fa3"].batches == [5, 2, 3]
    assert servers["pat"].batches == servers["xqa"].batches == [5]
    met = {name: gate["met"] for name, gate in gates({}, [found]).items()}
    assert met == {
        "s, 5 x (128 shared) + 64: fa3 / pat": True,
        "s, 5 x (128 shared) + 64: xqa / pat": False,
        "s, 5 x (128 shared) + 64: answers that part from fa3's, no tie": True,
        "s, 5 x (128 shared) + 64: answers that part from xqa's, no tie": False,
        "s, 5 x (128 shared) + 64: part of the prompts in the cache": True,
    }


@pytest.mark.parametrize(("layers", "met"), [(16, True), (8, False), (0, False)])
def test_pat_has_to_decode_what_it_can(layers: int, met: bool) -> None:
    about = {
        "config": compare.SHAPES["llama-3-8b"].config,
        "arguments": {},
        "servers": {"pat": {"pat": {"pat_layers": layers}}, "fa3": {}},
    }
    (gate,) = gates({"s": about}, []).values()
    assert gate["met"] is met


def test_heads_are_the_prefixes_each_once() -> None:
    case = Case(6, 5, 2, 4, groups=3)
    prompts = case.prompts(1000)
    heads = heads_of(case, prompts)
    assert [len(head) for head in heads] == [5, 5, 5]
    assert all(prompts[2 * i + j][:5] == heads[i] for i in range(3) for j in range(2))
    assert heads_of(Case(2, 0, 3, 4), Case(2, 0, 3, 4).prompts(1000)) == []
