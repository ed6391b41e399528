"""The parts of the checks of SGLang's server that need no server: what they call wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from check import deterministic, hicache, soak
from check import logits as check_logits
from check import ranks as check_ranks
from sglang_pat.bench.answers import Answer, Candidate, agreement

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
    steps=100, reused=80, kv_ratio=0.5, steps_alike=100, steps_without_sharing={}, apart_us={}
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
        ({"steps_without_sharing": {"a reason": 1}}, [*check_ranks.LAYOUTS]),
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
        "steps_without_sharing": {"no requests of pat's": 0},
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


# --- soak ---


def test_growth_of_memory_is_a_failure() -> None:
    before = soak.Memory({"sglang::scheduler": 1000.0, "server": 500.0}, 8000.0)
    assert (
        soak.grown(before, soak.Memory({"sglang::scheduler": 1110.0, "server": 9000.0}, 8400.0))
        == []
    )
    (host,) = soak.grown(before, soak.Memory({"sglang::scheduler": 1120.0}, 8000.0))
    assert host == "memory of schedulers grew from 1,000 to 1,120 MiB"
    assert len(soak.grown(before, soak.Memory({"sglang::scheduler": 1000.0}, 8500.0))) == 1


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
