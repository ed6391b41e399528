"""Rows of a beam search share their prompt, and permute the slots after it in every step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pack_decode_cases import Heads, Tensors, captured, check, planned_step, run
from sample_forests import make_case

pytestmark = pytest.mark.usefixtures("kernel_body")

CACHED, PROMPT = 1500, 1700  # tokens in the tree; the rest of the prompt is a node too
ANSWER, STEPS = 40, 12
OTHERS = [(0, 30), (-1, 300)]  # requests beside the search; the first shares the cached prompt


@pytest.mark.parametrize("width", [4, 8, 16, 64])
@pytest.mark.parametrize("heads", [Heads(32, 8), Heads(8, 2, 64)], ids=["128", "64"])
def test_one_plan_serves_beams_that_change_places(heads: Heads, width: int) -> None:
    """A beam that continues another beam gets that beam's slots, as in SGLang."""
    nodes = [(-1, CACHED), (0, PROMPT - CACHED)]
    case = make_case(nodes, [(1, ANSWER)] * width + OTHERS, spare_tokens=STEPS)
    grown = dataclasses.replace(case, seq_lens=case.seq_lens + STEPS)  # with later slots
    tensors = Tensors.make(grown, heads)
    tensors.seq_lens -= STEPS
    step = planned_step(heads)
    plan = step.write(case.batch(), **tensors.index)
    assert plan.kv_tokens.planned < 0.3 * plan.kv_tokens.query_centric
    check(*run(step, tensors), tensors)
    graph, out, lse = captured(step, tensors)
    generator = torch.Generator("cuda").manual_seed(width)
    rows, behind = tensors.req_pool_indices[:width], slice(PROMPT, PROMPT + ANSWER + STEPS)
    for _ in range(STEPS):
        before = out.clone()
        survivors = torch.randint(width, (width,), generator=generator, device="cuda")
        tensors.req_to_token[rows, behind] = tensors.req_to_token[rows[survivors], behind]
        tensors.seq_lens += 1
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        check(out, lse, tensors)
        assert not torch.equal(out, before)
