"""Pipeline parallelism: two ranks on the CPU, whose microbatches take turns and reuse plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_engines import Request, Workload, generate, running_engine, running_pat_engine, tokens

from check.cpu_ranks import environment_of_ranks
from common.tiny_model import TinyModel

pytestmark = pytest.mark.engine


def test_two_stages_give_the_same_tokens_and_reuse_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: Workload
) -> None:
    model = TinyModel().write(tmp_path / "model")  # two layers in each stage
    with running_engine(model, "torch_native", max_total_tokens=32768) as engine:
        expected = tokens(generate(engine, workload.many))
    for name, value in environment_of_ranks(pp_size=2).items():
        monkeypatch.setenv(name, value)
    arguments = {
        "pp_size": 2,
        "max_total_tokens": 32768,
        "max_running_requests": len(workload.many),
    }
    with running_pat_engine(model, tmp_path, **arguments) as (engine, stats):
        # Fills the tree, so that all requests share from their first step on.
        generate(engine, [Request(request.prompt, 1) for request in workload.many])
        stats.new()
        answers = generate(engine, workload.many)
        counted = stats.new()
    assert tokens(answers) == expected
    steps = counted["plans_built"] + counted["plans_reused"]
    steps_of_each = workload.many[0].num_tokens - 1  # the first token comes from the prefill
    assert steps >= 2 * steps_of_each, "batches take turns"
    assert counted["plans_reused"] >= 0.8 * steps
    assert counted["steps_without_sharing"] == {}
    assert counted["kv_tokens_planned"] < 0.5 * counted["kv_tokens_query_centric"]
