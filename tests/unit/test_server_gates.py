"""Serving gates: what is asked of servers that share a GPU, and what follows from the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.fleet import heads_of
from server import gates
from server.kernel_times import kernel_times, layer_us
from sglang_pat.bench.cases import Case


def event(name: str, begin: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": category, "ts": begin, "dur": duration}


def steps_of(layers: int, gap: float = 2.0) -> list[dict[str, Any]]:
    """Two steps: attention of 10 us and a product of 5 in each layer, then a head of 30."""
    events, now = [], 100.0
    for _ in range(2):
        events.append({"name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": now, "dur": 1})
        for _ in range(layers):
            events += [event("attention", now, 10), event("product", now + 10 + gap, 5)]
            now += 15 + 2 * gap
        events.append(event("head", now, 30))
        now += 50
    return events


def test_kernels_of_a_step_are_summed_and_gaps_are_not_busy() -> None:
    found = kernel_times(steps_of(4))
    assert found["steps"] == 2
    assert found["kernels"] == {"attention": [40, 4], "head": [30, 1], "product": [20, 4]}
    assert found["busy"] == 90
    assert found["step"] == 126  # 4 x 19 + 50


def test_kernels_that_overlap_keep_the_gpu_busy_once() -> None:
    launch = {"name": "cudaGraphLaunch", "cat": "cuda_runtime", "ts": 0, "dur": 1}
    found = kernel_times([launch, event("a", 10, 10), event("b", 15, 10)])
    assert (found["busy"], found["step"]) == (15, None)


def test_a_profile_without_a_graph_is_no_decode_step() -> None:
    with pytest.raises(ValueError, match="no CUDA graph"):
        kernel_times([event("a", 10, 10)])


def test_a_layer_is_from_one_attention_to_the_next() -> None:
    assert layer_us(steps_of(4), 4) == 19
    assert layer_us(steps_of(4), 5) is None  # no kernel runs five times


def test_missing_layers_are_added() -> None:
    assert gates.projection(3.0, 100.0, 16, 32)["projected_ms"] == pytest.approx(4.6)
    assert gates.projection(3.0, None, 16, 32)["projected_ms"] is None


def answered(**ratios: float) -> dict[str, Any]:
    return {"model": "m", "question": "128 x 1,024", "over_pat": {"pat": 1.0, **ratios}}


@pytest.mark.parametrize(("ratio", "met"), [(1.2, True), (0.995, True), (0.98, False)])
def test_fa3_may_not_be_faster(ratio: float, met: bool) -> None:
    (gate,) = gates.gates([answered(fa3=ratio)]).values()
    assert gate["met"] is met


def test_e4m3_has_to_pay_where_the_issue_says_so() -> None:
    found = gates.gates([answered(**{"fa3": 1.0, "pat fp8": 0.95})])
    assert [gate["met"] for gate in found.values()] == [True, False]


def test_a_projection_is_judged_by_its_limit() -> None:
    case = answered(fa3=2.0) | {"projected_ms": 9.5, "whole_layers": 32, "whole_ms_limit": 9.0}
    found = gates.gates([case])
    assert [gate["met"] for gate in found.values()] == [True, False]


@pytest.mark.parametrize(("limit", "met"), [(9.0, True), (7.0, False)])
def test_a_whole_model_is_judged_by_what_was_measured(limit: float, met: bool) -> None:
    case = answered(fa3=2.0) | {"tpot_ms": {"pat": 8.0, "fa3": 16.0}, "whole_ms_limit": limit}
    gate = gates.gates([case])["m, 128 x 1,024: ms"]
    assert (gate["value"], gate["met"]) == (8.0, met)


def test_only_the_whole_model_has_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "cuda_driver_is_present", lambda: True)
    layers = [
        gates.models(whole)["llama-3-8b"].config["num_hidden_layers"] for whole in (False, True)
    ]
    assert layers == [16, 32]


@pytest.mark.parametrize(
    ("layers", "delegated", "met"), [(16, {}, True), (0, {}, False), (8, {"fp8": 8}, False)]
)
def test_pat_has_to_decode_its_servers(layers: int, delegated: dict[str, int], met: bool) -> None:
    routes = {"pat_layers": layers, "default_layers": delegated}
    (gate,) = gates.route_gates({"m pat": {"pat": routes}, "m fa3": {}}).values()
    assert gate["met"] is met


def test_every_question_fits_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "cuda_driver_is_present", lambda: True)
    starts = gates.starts(gates.PARTS, Path())
    asked = gates.questions(gates.PARTS)
    assert {question.part for question in asked} == {"unshared", "shared", "rank"}
    for question in asked:
        prefix = len(question.heads[0]) if question.heads else 0
        own = sum(len(prompt) - prefix + gates.TOKENS for prompt in question.prompts)
        slots = own + sum(map(len, question.heads))
        servers = [start for start in starts.values() if start.model.name == question.model]
        assert len(servers) == 3 - (question.part == "rank")
        for start in servers:
            assert slots <= start.arguments["max_total_tokens"]
            assert len(question.prompts) in start.arguments["cuda_graph_bs_decode"]
            longest = max(map(len, question.prompts))
            assert longest + gates.TOKENS < start.arguments["context_length"]
    named = {question.name for question in asked}
    assert named >= set(gates._FP8_QUESTIONS)


def test_heads_are_the_prefixes_each_once() -> None:
    case = Case(6, 5, 2, 4, groups=3)
    prompts = case.prompts(1000)
    heads = heads_of(case, prompts)
    assert [len(head) for head in heads] == [5, 5, 5]
    assert all(prompts[2 * i + j][:5] == heads[i] for i in range(3) for j in range(2))
    assert heads_of(Case(2, 0, 3, 4), Case(2, 0, 3, 4).prompts(1000)) == []
