"""The criteria of the checks with SGLang's server, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np

from check import logits as check_logits
from check.ranks import Drafted, Plans, judge_chains
from common.drafts import accepted, error_of_accepted
from sglang_pat.bench.answers import Answer, Candidate, agreement


def answer(tokens: list[int], gap: float = 1.0) -> Answer:
    """Return an answer whose second choice is the next token id, `gap` less likely."""
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
    assert parting.gap is None  # the other token is not among the candidates


def test_other_tokens_that_are_no_tie_are_errors() -> None:
    assert agreement([answer([5, 6])], [answer([5, 9])], tie=10.0).errors  # two other tokens
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


def drafted(steps: list[int]) -> Drafted:
    """Return requests with 40 tokens each, in these numbers of verify steps."""
    answers = [{"output_ids": [7] * 40, "meta_info": {"spec_verify_ct": n}} for n in steps]
    return Drafted(0.0, accepted(answers), error_of_accepted(answers))


def test_drafts_are_accepted_as_often_up_to_chance() -> None:
    plans = Plans(40, 20, 0.5, 20, 40, {}, {}, {})
    fa3 = drafted([30, 34, 38, 32] * 4)
    assert 0.01 < fa3.error < 0.05
    few_less, far_less = drafted([31, 35, 39, 33] * 4), drafted([38, 39, 40, 38] * 4)
    assert not judge_chains({"pat": few_less, "fa3": fa3}, plans)["failures"]
    (failure,) = judge_chains({"pat": far_less, "fa3": fa3}, plans)["failures"]
    assert "1.03 tokens a step were accepted" in failure
