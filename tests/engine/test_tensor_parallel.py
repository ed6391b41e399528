"""Two ranks that share the layers: with one batch, or with attention for requests of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.driver import go_without_driver
from sglang_engines import (
    Expected,
    Stats,
    Workload,
    generate,
    run_several_ranks,
    running_engine,
    running_pat_engine,
    tokens,
)

from check.tiny_models import write_qwen3
from common.tiny_model import TinyModel
from sglang_pat.sglang.report.stats_file import read_stats

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@contextmanager
def two_ranks(model: Path, folder: Path, **arguments: Any) -> Iterator[tuple[Any, Stats]]:
    with pytest.MonkeyPatch.context() as environment:
        run_several_ranks(environment, tp_size=2)
        pool = {"max_total_tokens": 16384, "max_running_requests": 16}
        with running_pat_engine(model, folder, tp_size=2, **pool, **arguments) as running:
            yield running


def test_both_ranks_plan_the_same(
    tiny_model: Path, tmp_path: Path, workload: Workload, expected: Expected
) -> None:
    with two_ranks(tiny_model, tmp_path) as (engine, stats):
        for asked in (workload.crowd, workload.three_levels, workload.three_levels):
            stats.new()
            assert tokens(generate(engine, asked)) == [expected.of(each) for each in asked]
        counted = stats.new()
        steps_alike = read_stats(stats.path)["ranks_alike"]["steps"]
    assert steps_alike >= counted["plans_built"] + counted["plans_reused"] > 0
    assert counted["kv_tokens_planned"] < 0.6 * counted["kv_tokens_query_centric"]


def test_each_rank_has_requests_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: Workload
) -> None:
    go_without_driver(tmp_path, monkeypatch)
    model, expected = write_qwen3(TinyModel(), tmp_path / "model"), Expected()
    groups = (workload.crowd, workload.three_levels, workload.long_answers)
    with running_engine(model, "torch_native", max_total_tokens=16384) as engine:
        for asked in groups:
            expected.ask(engine, asked)
    assert expected.smallest_gap > 1e-5  # of the sums of float32, that come in another order
    # A rank without requests idles along, and one decodes as a prefill while the other prefills.
    with two_ranks(model, tmp_path, dp_size=2, enable_dp_attention=True) as (engine, stats):
        for asked in groups:
            for _ in range(2):
                assert tokens(generate(engine, asked)) == [expected.of(each) for each in asked]
        for request in workload.long_answers[:2]:
            assert tokens(generate(engine, [request])) == [expected.of(request)]
        counted = stats.new()
    # While one rank answers alone, the other one decodes a row of padding, which is not counted.
    assert counted["steps_without_sharing"] == {}
    assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
