"""The parts of the checks of SGLang's server that need no server: what they call wrong."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import check
from check import deterministic, hicache, soak
from check import logits as check_logits
from check import ranks as check_ranks
from check.memory import Memory
from common import drafts, suites
from common.models import MODELS
from server import speculation
from server.nested_models import write_head, write_nested
from sglang_pat.bench.answers import Answer, Candidate, agreement
from sglang_pat.bench.decoding import DecodeRun

# --- answers ---


def answer(tokens: list[int], gap: float = 1.0) -> Answer:
    """Each position has the next token as its second choice, `gap` behind."""
    return Answer(tokens, [[Candidate(0.0, t), Candidate(-gap, t + 1)] for t in tokens])


def test_answers_agree_up_to_a_tie() -> None:
    one = answer([5, 6, 7], gap=0.001)
    swapped = Answer([5, 7, 9], answer([5, 7, 9]).candidates)
    swapped.candidates[1] = [Candidate(0.0, 7), Candidate(-0.001, 6)]
    found = agreement([one], [swapped], tie=0.01)
    assert (found.positions, found.errors) == (1, [])
    assert found.partings[0].position == 1
    assert found.as_dict()["largest_gap_of_a_tie"] == 0.001
    assert agreement([one], [swapped], tie=0.0001).errors


def test_a_tie_is_what_the_reference_says_and_may_have_others_between() -> None:
    reference = Answer(
        [5], [[Candidate(-1.0, 5), Candidate(-1.2, 8), Candidate(-1.5, 6), Candidate(-3.0, 9)]]
    )
    far_apart = Answer([6], [[Candidate(-0.1, 6), Candidate(-9.0, 7), Candidate(-9.5, 5)]])
    (parting,) = agreement([far_apart], [reference], tie=0.5).partings
    assert parting == (0, 0, (6, 5), 0.5, True)
    (parting,) = agreement([far_apart], [reference], tie=0.49).errors
    assert (parting.gap, parting.is_tie) == (0.5, False)
    assert agreement([Answer([9], far_apart.candidates)], [reference], tie=1.9).errors
    (parting,) = agreement([Answer([7], far_apart.candidates)], [reference], tie=100.0).errors
    assert parting.gap is None  # not among the candidates


def test_greedy_tokens_part_rightly_within_twice_the_noise_of_others() -> None:
    def verdict(gap: float) -> dict[str, Any]:
        triton = run_of(0.0, [4])
        triton.greedy[0].candidates[0][:] = [Candidate(0.0, 4), Candidate(-gap, 9)]
        runs = {"pat": run_of(0.0, [9]), "fa3": run_of(0.1, [4]), "triton": triton}
        return check_logits.judge({name: (run, run) for name, run in runs.items()}, ())

    assert verdict(0.19)["passed"]
    assert verdict(0.19)["limit"]["gap_of_a_tie"] == pytest.approx(0.2)
    assert not verdict(0.21)["passed"]


def test_other_tokens_that_are_no_tie_are_errors() -> None:
    assert agreement([answer([5, 6])], [answer([5, 9])], tie=10.0).errors  # not the same two tokens
    (error,) = agreement([answer([5, 6])], [answer([5])], tie=10.0).errors
    assert error.tokens == (6, None)
    assert agreement([answer([5, 6])], [answer([5, 6])], tie=0.0).partings == []


def run_of(logits: float, tokens: list[int]) -> check_logits.Run:
    return check_logits.Run(np.full((1, 2, 3), logits), [answer(tokens)])


def test_pat_may_be_off_by_twice_what_others_are() -> None:
    def verdict(pat: float, again: float | None = None) -> dict[str, Any]:
        runs = {
            "pat": (run_of(pat, [4, 5]), run_of(pat if again is None else again, [4, 5])),
            "fa3": (run_of(0.1, [4, 5]), run_of(0.1, [4, 5])),
            "triton": (run_of(0.0, [4, 5]), run_of(0.0, [4, 5])),
        }
        return check_logits.judge(runs, ())

    assert verdict(0.19)["passed"]
    assert not verdict(0.21)["passed"]
    assert not verdict(0.19, again=0.18)["passed"]
    assert not verdict(float("nan"))["passed"]


def test_pat_must_answer_the_same_tokens() -> None:
    own = run_of(0.0, [4, 5])
    off = run_of(0.0, [4, 8])
    assert check_logits.judge({"pat": (own, own), "triton": (own, own)}, ())["passed"]
    assert not check_logits.judge({"pat": (off, off), "triton": (own, own)}, ())["passed"]
    assert not check_logits.judge({"pat": (own, off), "triton": (own, own)}, ())["passed"]


GOOD_PLANS = check_ranks.Plans(
    steps=100, reused=80, kv_ratio=0.5, steps_alike=100, private_steps={}, apart_us={}
)


def test_several_ranks_must_answer_as_one() -> None:
    def failures(own: tuple[check_logits.Run, check_logits.Run]) -> list[str]:
        found = check_ranks.judge({"pat": own, "fa3": (run, off)}, GOOD_PLANS, "tp")["failures"]
        assert isinstance(found, list)
        return found

    run, off, far = (run_of(logits, [4, 5]) for logits in (0.0, 0.5, 1.1))
    assert not failures((run, run))
    assert not failures((run, off))
    assert len(failures((run, far))) == 2
    assert failures((run, run_of(0.0, [4, 9])))


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, []),
        ({"steps": check_logits.NUM_TOKENS - 1}, ["tp", "pp", "dp", "mla", "mla-dp"]),
        ({"kv_ratio": 0.95}, [*check_ranks.LAYOUTS]),
        ({"private_steps": {"a reason": 1}}, [*check_ranks.LAYOUTS]),
        ({"steps_alike": 0}, ["tp", "mla", "chains"]),
        ({"reused": 20}, ["pp"]),
    ],
)
def test_several_ranks_must_plan_as_their_layout_asks(
    changed: dict[str, Any], failing: list[str]
) -> None:
    plans = GOOD_PLANS._replace(**changed)
    assert [layout for layout in check_ranks.LAYOUTS if plans.failures(layout)] == failing


def test_ranks_count_what_they_have_compared() -> None:
    stats: dict[str, Any] = {
        "plans_built": 20,
        "plans_reused": 80,
        "kv_tokens_planned": 50,
        "kv_tokens_query_centric": 100,
        "private_steps": {"no requests of pat's": 0},
        "ranks_alike": {"steps": 100},
        "ranks_apart_ns": {"9216": 85, "61440": 15},
    }
    plans = check_ranks.Plans.of(stats)
    assert plans.apart_us == {"p50": 9.216, "p90": 61.44, "p99": 61.44}
    (gate,) = check_ranks.gates({"tp": {"plans": plans._asdict()}, "pp": {}}).values()
    assert not gate["met"]
    alone = check_ranks.Plans.of({**stats, "ranks_alike": {}, "ranks_apart_ns": {}})
    assert alone.apart_us == {}
    assert not check_ranks.gates({"dp": {"plans": alone._asdict()}})


def test_chains_must_be_the_models_own_tokens_and_accepted() -> None:
    def failures(off: float, accepted: float, of_others: float = 3.0) -> list[str]:
        drafted = {
            "pat": check_ranks.Drafted(off, accepted),
            "fa3": check_ranks.Drafted(0.03, of_others),
        }
        found = check_ranks.judge_chains(drafted, GOOD_PLANS)["failures"]
        assert isinstance(found, list)
        return found

    assert failures(0.05, 2.95) == []
    assert len(failures(0.07, 2.95)) == 1
    assert len(failures(float("nan"), 2.95)) == 1
    assert len(failures(0.0, 2.8)) == 1
    assert failures(0.0, 1.0, of_others=1.0) == ["no draft was accepted"]


def test_one_rank_of_each_model_serves_the_comparison_of_its_layouts() -> None:
    layouts = [*check_ranks.LAYOUTS]
    starts = check_ranks.starts_of(check_logits.ON_GPU, Path("m"), ["pat", "fa3"], layouts, 2)
    assert sorted(starts) == sorted(
        f"{backend}-{name}"
        for backend in ("pat", "fa3")
        for name in ("llama", "qwen3", "latent", *layouts)
    )
    names = ("tp_size", "pp_size", "dp_size", "enable_dp_attention", "speculative_algorithm")
    sizes = {
        name: [starts[f"pat-{name}"].arguments.get(each) for each in names]
        for name in ("latent", *layouts)
    }
    assert sizes == {
        "latent": [None, None, None, None, None],
        "tp": [2, None, None, None, None],
        "pp": [None, 2, None, None, None],
        "dp": [2, None, 2, True, None],
        "mla": [2, None, None, None, None],
        "mla-dp": [2, None, 2, True, None],
        "chains": [2, None, None, None, "STANDALONE"],
    }
    models = {name: starts[f"fa3-{name}"].model.name for name in layouts}
    assert models == check_ranks.LAYOUTS
    assert starts["pat-chains"].arguments["speculative_draft_model_path"] == Path("m/llama")


@pytest.mark.parametrize("failing", [None, "fa3-pp", "fa3-llama"])
def test_a_server_that_fails_fails_its_layouts_alone(
    failing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check_ranks, "this_setup", lambda: check_logits.ON_CPU)
    monkeypatch.setattr(check_ranks.Plans, "of", lambda _: GOOD_PLANS)
    run, off = run_of(0.0, [4, 5]), run_of(0.5, [4, 5])
    monkeypatch.setattr(
        check_ranks, "answer_all", lambda server, _: off if server.name == "fa3-tp" else run
    )

    @contextmanager
    def fleet(starts: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
        members = {}
        for name in starts:
            server = SimpleNamespace(name=name, stats=dict)
            failure = "ended while it started" if name == failing else None
            members[name] = SimpleNamespace(server=server, failure=failure, name=name)
        yield members

    monkeypatch.setattr(check_ranks, "fleet", fleet)
    monkeypatch.setattr(check_ranks, "wait", lambda *_: None)
    monkeypatch.setattr(check_ranks, "report_starts", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [])
    command = ["ranks", "--layout", "tp", "pp", "--backends", "pat", "fa3"]
    status = suites.main(check, [*command, "--json", str(tmp_path / "found.json")])
    written = json.loads((tmp_path / "found.json").read_text())
    failed = {layout for layout in ("tp", "pp") if written[layout]["failed"]}
    assert failed == {None: set(), "fa3-pp": {"pp"}, "fa3-llama": {"tp", "pp"}}[failing]
    assert len(written["failures"]) == len(failed)
    assert status == (1 if failed else 0)
    assert written["tp"]["layout"] == "tp"


def test_kv_from_the_host_must_be_right_and_must_have_been_there() -> None:
    def failures(after: float, on_host: int = 9, planned: int = 5) -> list[str]:
        own, fa3, triton = (run_of(logits, [4, 5]) for logits in (0.0, 0.1, 0.0))
        counted = {"kv_tokens_planned": planned, "kv_tokens_query_centric": 10}
        pat, others = (own, run_of(after, [4, 5])), {"fa3": fa3, "triton": triton}
        found = hicache.judge(pat, others, on_host, counted)["failures"]
        assert isinstance(found, list)
        return found

    assert failures(0.19) == []
    assert len(failures(0.21)) == 2  # the largest, and the mean
    assert failures(0.0, on_host=0) == ["nothing came back from the host"]
    assert len(failures(0.0, planned=10)) == 1


# --- speculation ---


def test_time_and_acceptance_are_compared_with_the_default_backend() -> None:
    def answer(steps: int) -> dict[str, Any]:
        return {"output_ids": [1, 2, 3, 4], "meta_info": {"spec_verify_ct": steps}}

    def passed(pat: float, steps: int) -> list[bool]:
        # 20 requests: each gains 2 tokens a step, except the one that is observed.
        runs = {
            name: [DecodeRun({0: ms / 4, 8: ms / 4}, 1.0, 1.0, [answer(1)] + [answer(count)] * 19)]
            for name, ms, count in (("pat", 20 * pat, steps), ("default", 20.0, 2))
        }
        found = speculation.summary(runs)
        gained = {name: 80 / (1 + 19 * count) for name, count in (("pat", steps), ("default", 2))}
        assert found["step_ms"] == pytest.approx({"pat": 20 * pat, "default": 20})
        assert found["accepted_per_step"] == pytest.approx(gained)
        assert found["ms_per_accepted_token"] == pytest.approx(
            {"pat": 20 * pat / gained["pat"], "default": 20 / gained["default"]}
        )
        assert found["same_answers"] == 1
        off = {"pat": 0.0, "default": 0.0}
        case = found | {"drafts": "ngram", "off": off, "stops": {"off": 0.0}, "alone": []}
        gates = speculation.gates([case])
        return [gate["met"] for gate in gates.values()]

    assert passed(0.5, 2) == [True, True, True, True]
    assert passed(0.7, 2) == [False, True, True, True]
    assert passed(0.35, 3) == [True, False, True, True]


def test_acceptance_is_compared_in_the_same_answers() -> None:
    def compared(*pat: tuple[int, int]) -> tuple[float, dict[str, float]]:
        # Answers by their last token, with the steps that they took. FA3 says 4 in 2 steps.
        given = {"pat": pat, "default": [(4, 2)] * len(pat)}
        runs = {
            name: [
                DecodeRun(
                    {0: 1.0, 8: 1.0},
                    1.0,
                    1.0,
                    [
                        {"output_ids": [1, 2, 3, last], "meta_info": {"spec_verify_ct": steps}}
                        for last, steps in answers
                    ],
                )
            ]
            for name, answers in given.items()
        }
        found = speculation.summary(runs)
        return found["same_answers"], found["accepted_in_same_answers"]

    assert compared((4, 2), (5, 4)) == (0.5, {"pat": 2.0, "default": 2.0})
    assert compared((4, 4), (5, 2)) == (0.5, {"pat": 1.0, "default": 2.0})
    assert compared((5, 2), (5, 2)) == (0.0, {})
    none = {"drafts": "ngram", "pat_over_default": 0.5, "alone": []}
    gates = speculation.gates([none | {"accepted_in_same_answers": {}}])
    assert [gate["met"] for gate in gates.values()] == [True, False]


def test_answers_under_speculation_are_what_the_model_finds_most_probable() -> None:
    best = [[(-0.5, 7, None)], [(-0.25, 8, None)]]
    assert drafts.off([(-0.5, 7, None), (-0.25, 8, None)], best) == 0
    assert drafts.off([(-0.5, 7, None), (-1.25, 9, None)], best) == 1
    with pytest.raises(ValueError, match="no position"):
        drafts.off([], [])

    def is_met(pat: float, default: float, stopped: float = 0.0) -> bool:
        case = {
            "drafts": "same",
            "pat_over_default": 0.5,
            "accepted_in_same_answers": {"pat": 4, "default": 4},
            "alone": [],
            "off": {"pat": pat, "default": default},
            "stops": {"off": stopped},
        }
        return all(gate["met"] for gate in speculation.gates([case]).values())

    assert is_met(0.04, 0)
    assert not is_met(0.05, 0)
    assert is_met(0.19, 0.1)
    assert not is_met(0.21, 0.1)
    assert not is_met(0.1, 0.1, stopped=0.21)


def test_steps_that_share_nothing_may_be_one_percent_longer() -> None:
    def is_met(*ratios: float) -> bool:
        alone = [{"case": f"{i}", "pat_over_default": each} for i, each in enumerate(ratios)]
        case = {
            "drafts": "dflash",
            "pat_over_default": 0.5,
            "accepted_in_same_answers": {"pat": 4, "default": 4},
            "alone": alone,
        }
        return all(gate["met"] for gate in speculation.gates([case]).values())

    assert is_met(1.0, 1.005)
    assert not is_met(1.0, 1.02)
    assert not is_met(1.02, 1.0)


def test_drafts_are_server_arguments() -> None:
    path = Path("draft")
    assert speculation.speculation("deep-trees", path) == {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": path,
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }
    assert "speculative_draft_model_path" not in speculation.speculation("ngram", None)
    for each in speculation.starts("dflash", path, path, {}).values():
        assert each.environment == {"SGLANG_SIMULATE_ACC_LEN": "4"}
        assert each.arguments["speculative_draft_load_format"] == "dummy"


def test_three_kinds_of_drafts_fit_on_80_gb() -> None:
    shape = MODELS["llama-3-8b"]
    needs = {
        name: speculation.gigabytes(shape, name, 10, 1, 41_472)
        for name in ("trees", "ngram", "dflash")
    }
    # Weights alone, in 16 bits: 10 layers of 218 million, and both ends of the vocabulary.
    weights = 2 * 2e-9 * (10 * 218e6 + 2 * 128_256 * 4096)
    assert weights < needs["ngram"] < needs["trees"] < needs["dflash"]
    assert sum(needs.values()) < 0.95 * 85.5


def test_the_model_that_drafts_is_the_beginning_of_the_others(tmp_path: Path) -> None:
    config = MODELS["tiny"].config
    paths = write_nested(tmp_path, config, [3, 2], draft_layers=1)
    assert sorted(paths) == [1, 2, 3]
    for count, path in paths.items():
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == count
        weights: dict[str, torch.Tensor] = {}
        for file in path.glob("*.safetensors"):
            weights |= load_file(file)
        layers = {int(name.split(".")[2]) for name in weights if ".layers." in name}
        assert layers == set(range(count))
    # Each token has one that it is likely to follow, and some that are likely to follow it.
    head, embeddings = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    before = (head @ embeddings.T).argmax(dim=1)
    assert len(before.unique()) > 0.9 * len(before)


def test_a_head_drafts_by_the_first_layer_and_the_embedding_alone(tmp_path: Path) -> None:
    config = MODELS["tiny"].config
    write_nested(tmp_path, config, [2], draft_layers=1)
    path = write_head(tmp_path, config)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1
    weights = load_file(path / "model.safetensors")
    first = load_file(tmp_path / "layers-1" / "0.safetensors")
    for name, weight in first.items():
        if "input_layernorm" not in name:
            assert torch.equal(weights.pop(name.removeprefix("model.")), weight)
    hidden = config["hidden_size"]
    embedding, state = torch.randn(2, 3, hidden).to(weights["fc.weight"].dtype)
    joined = torch.cat((embedding, state), dim=-1)
    into = torch.nn.functional.linear(joined, weights.pop("fc.weight"), weights.pop("fc.bias"))
    assert torch.equal(into, embedding)
    assert not weights


# --- soak and profile ---


def test_the_soak_repeats_itself_and_does_all_that_it_says() -> None:
    def first(count: int) -> list[soak.Request]:
        requests = soak.Workload(3).requests()
        return [next(requests) for _ in range(count)]

    requests = first(200)
    assert requests == first(200)
    assert any(request.sample is not None for request in requests)
    assert any(request.abort_after is not None for request in requests)
    assert any("stop_token_ids" in request.sampling for request in requests)


def test_growth_of_memory_is_a_failure() -> None:
    before = Memory({"sglang::scheduler": 1000.0, "server": 500.0}, 8000.0)
    assert soak.grown(before, Memory({"sglang::scheduler": 1110.0, "server": 9000.0}, 8400.0)) == []
    (host,) = soak.grown(before, Memory({"sglang::scheduler": 1120.0}, 8000.0))
    assert host == "memory of schedulers grew from 1,000 to 1,120 MiB"
    assert len(soak.grown(before, Memory({"sglang::scheduler": 1000.0}, 8500.0))) == 1


def test_a_soak_in_which_nothing_was_retracted_proves_nothing() -> None:
    ended = Counter({"length": 1, "stop token": 1, "abort": 1, "samples compared": 1})
    assert soak.missing(ended) == ["no retractions"]


def test_a_check_that_compared_nothing_does_not_pass() -> None:
    empty = run_of(0.0, [])
    verdict = check_logits.judge({"pat": (empty, empty), "triton": (empty, empty)}, ())
    assert not verdict["passed"]
    counted = {
        "plans_built": 30,
        "plans_reused": 40,
        "kv_tokens_planned": 4,
        "kv_tokens_query_centric": 10,
    }
    assert check_logits.problems_of_decoding(counted) == []
    assert check_logits.problems_of_decoding(counted | {"plans_reused": 0})
    assert check_logits.problems_of_decoding(counted | {"kv_tokens_planned": 10})
    assert check_logits.problems_of_decoding({})


# --- deterministic servers ---


class Answering:
    """A server whose log-probabilities may depend on what is asked together."""

    def __init__(self, *, varies: bool = False, value: float | None = -1.5) -> None:
        self.varies = varies
        self.value = value

    def flush(self) -> None: ...

    def generate(
        self, asked: list[list[int]], sampling: list[dict[str, Any]], **_: Any
    ) -> list[dict[str, Any]]:
        varied = -1.25 if self.varies and len(asked) == 3 else self.value
        logprobs = [(self.value, 7, None), (varied, 8, None)]
        return [
            {"output_ids": [7, 8], "meta_info": {"output_token_logprobs": logprobs}} for _ in asked
        ]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_bits_that_depend_on_the_batch_are_counted(
    monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool
) -> None:
    monkeypatch.setattr(deterministic, "cuda_driver_is_present", lambda: on_gpu)
    prompts = [[3, i] for i in range(9)]
    found = {
        name: deterministic.of_answers(Answering(varies=varies), prompts, 3, sampled=False)
        for name, varies in (("pat", True), ("fa3", False))
    }
    batches = {"1, cached": 0, "3": 3 * on_gpu, "9": 0, "9, reversed, cached": 0}
    assert found["pat"]["different"] == batches
    assert not any(found["pat"]["different_first"].values())
    assert not any(found["fa3"]["different"].values())
    for pair, more in ((("pat", "fa3"), 3 * on_gpu), (("fa3", "pat"), 0)):
        more_answers, odd = deterministic.gates_of("case", found, *pair).values()
        assert (more_answers["value"], more_answers["met"]) == (more, more == 0)
        assert odd["met"]


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_log_probabilities_that_are_no_numbers_are_counted(value: float | None) -> None:
    found = deterministic.of_answers(Answering(value=value), [[3], [4], [5]], 2, sampled=True)
    assert found["not_finite"] == found["log_probabilities"] > 0
    gates = deterministic.gates_of("case", {"pat": found, "fa3": found}, "pat", "fa3")
    assert [gate["met"] for gate in gates.values()] == [True, False]
