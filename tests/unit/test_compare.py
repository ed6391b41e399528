"""Comparisons of servers: what starts together, what is asked, and how answers are judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server import compare
from server.compare import arguments_of, gates, server_bytes
from server.scenarios import BACKENDS, SCENARIOS, Scenario, shared
from sglang_pat.bench.decoding import DecodeRun


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
