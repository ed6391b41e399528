"""A backend's reports: stats file, log line, ranks and labels."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.backends import decode_batch, pat_backend, runner

from sglang_pat.reasons import StepReason
from sglang_pat.sglang.report import reports
from sglang_pat.sglang.report.reports import StepLog, log_line, scheduler_labels
from sglang_pat.sglang.report.stats_file import StatsFile
from sglang_pat.stats import PlanningTimes, PlanStats, read_counters


def decode(backend: Any, steps: int) -> None:
    for step in range(steps):
        backend.init_forward_metadata(decode_batch([1], [2 + step], [9]))


@pytest.mark.usefixtures("server_context")
def test_the_state_of_the_scheduler_comes_after_a_file_with_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stats.json"
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(file))
    monkeypatch.setattr(StatsFile, "_run", lambda self: None)  # a thread that is late
    backend = pat_backend(runner())
    for step in range(3):
        assert reports._after_get_internal_state({"a": 1}) == {"a": 1}
        counted = json.loads(file.read_text())
        assert counted["plans_built"] + counted["plans_reused"] == step
        assert counted["kv_tokens_query_centric"] == sum(2 + i for i in range(step))
        assert counted["causes"] == ({"first": 1} if step else {})
        assert counted["steps_without_sharing"] == ({StepReason.NO_REQUESTS: step} if step else {})
        backend.init_forward_metadata(decode_batch([1], [2 + step], [9]))
    assert [*tmp_path.iterdir()] == [file]
    file.unlink()
    file.mkdir()
    assert reports._after_get_internal_state({"a": 1}) == {"a": 1}, "the scheduler goes on"
    assert "pat could not write the stats file" in caplog.text
    file.rmdir()  # the file is written again when the process ends


def test_only_the_first_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace
) -> None:
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", str(tmp_path / "stats.json"))
    server_context.parallel.tp_rank = 1
    decode(pat_backend(runner()), 1)
    assert list(tmp_path.iterdir()) == []


# --- log line ---


def test_a_line_is_logged_at_sglangs_interval(
    server_context: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    server_context.observability.decode_log_interval = 4
    caplog.set_level(logging.INFO, "sglang_pat")
    backend = pat_backend(runner())
    decode(backend, 1)  # the first line starts the counting
    decode(backend, 3)
    assert "Pat decode" not in caplog.text
    backend.init_forward_metadata(decode_batch([1, 2], [2, 2], [9, 10]))
    decode(backend, 3)
    (line,) = (line for line in caplog.messages if line.startswith("Pat decode"))
    assert line.startswith("Pat decode, #plan: 1, #reuse: 3, #step without sharing: 4, kv read ")
    assert ", kv read ratio: 1.00, plan time p50/p99 (us): unchanged " in line
    assert ", cold " in line


@pytest.mark.parametrize("interval", [-1, 1])
def test_no_step_is_left_unplanned_where_each_is_logged(interval: int) -> None:
    counters = read_counters([PlanStats()], steps_without_sharing=[{}], steps_planned=[{}])
    log = StepLog(interval, lambda: counters)
    for _ in range(3):
        assert log.steps_left == 0
        log.add_steps()


def test_log_line() -> None:
    before = {
        "plans_built": 10,
        "plans_reused": 20,
        "steps_without_sharing": {"warm-up": 5},
        "steps_planned": {"moved": 7},
        "kv_tokens_query_centric": 1000,
        "kv_tokens_planned": 900,
        "planning_ns": PlanningTimes(unchanged=Counter({9_000: 4}), cold=Counter({1_000: 1})),
    }
    after = {
        "plans_built": 13,
        "plans_reused": 57,
        "steps_without_sharing": {"warm-up": 5, "beams": 2},
        "steps_planned": {"moved": 8, "due": 2},
        "kv_tokens_query_centric": 2000,
        "kv_tokens_planned": 1110,
        "planning_ns": PlanningTimes(
            changed=Counter({40_960: 3}),
            unchanged=Counter({9_000: 4, 5_120: 36, 6_144: 1}),
            cold=Counter({1_000: 1}),
        ),
    }
    assert log_line(before, after) == (
        "Pat decode, #plan: 3, #reuse: 37, #step without sharing: 2, kv read ratio: 0.21, "
        "steps planned: due 2, moved 1, "
        "plan time p50/p99 (us): unchanged 5.1/6.1, changed 41.0/41.0"
    )
    # With speculative decoding, the line also has verify steps.
    before, after = (
        counters | {"verify": {"steps": steps, "rows": 8 * steps}}
        for counters, steps in ((before, 3), (after, 43))
    )
    assert "#reuse: 37, #verify step: 40, #verified token: 320, #step" in log_line(before, after)
    # With a draft model, the line also has its steps.
    before, after = (
        counters | {"draft": {"steps": 2 * steps, "rows": 4 * steps}}
        for counters, steps in ((before, 3), (after, 43))
    )
    line = log_line(before, after)
    assert "#verified token: 320, #draft step: 80, #draft token: 160, #step" in line
    before, after = (
        counters | {"draft_extend": {"steps": steps, "rows": 8 * steps}}
        for counters, steps in ((before, 3), (after, 43))
    )
    line = log_line(before, after)
    assert "#draft token: 160, #draft extend step: 40, #read draft token: 320, #step" in line
    # Idle ranks read nothing.
    assert "kv read ratio: 1.00" in log_line(after, after)


def test_only_one_rank_of_a_group_logs(
    server_context: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    server_context.observability.decode_log_interval = 1
    server_context.parallel.attn_tp_rank = server_context.parallel.tp_rank = 1
    caplog.set_level(logging.INFO, "sglang_pat")
    decode(pat_backend(runner()), 5)
    assert "Pat decode" not in caplog.text


# --- metrics ---


@pytest.mark.parametrize(
    ("enabled", "everywhere", "rank", "expected"),
    [(False, True, 0, 0), (True, False, 0, 1), (True, False, 1, 0), (True, True, 1, 1)],
)
def test_metrics_are_made_where_sglang_makes_its_own(
    server_context: SimpleNamespace,
    enabled: bool,
    everywhere: bool,
    rank: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = Mock()
    monkeypatch.setattr(reports, "StepMetrics", metrics)
    server_context.observability.enable_metrics = enabled
    server_context.observability.enable_metrics_for_all_schedulers = everywhere
    server_context.parallel.attn_tp_rank = rank
    decode(pat_backend(runner()), 3)
    assert metrics.call_count == expected
    told = [call.args[0] for call in metrics.return_value.add_step.call_args_list]
    assert [each.kind for each in told] == expected * ["cold", "unchanged", "unchanged"]
    assert all(0 < each.nanoseconds < 60e9 for each in told)


def test_labels_are_those_of_sglangs_scheduler_metrics(server_context: SimpleNamespace) -> None:
    server_context.observability.extra_metric_labels = {"cluster": "b"}
    server_context.parallel.tp_rank = 3
    plain = {"model_name": "a model", "engine_type": "unified", "tp_rank": "3", "pp_rank": "0"}
    plain |= {"moe_ep_rank": "0", "cluster": "b"}
    assert scheduler_labels(SimpleNamespace()) == plain
    # The model runner knows the replica in 0.5.17, the context in later versions.
    in_runner = SimpleNamespace(ps=SimpleNamespace(dp_rank=5))
    assert scheduler_labels(in_runner) == plain | {"dp_rank": "5"}
    server_context.parallel.dp_rank = 2
    assert scheduler_labels(SimpleNamespace()) == plain | {"dp_rank": "2"}
