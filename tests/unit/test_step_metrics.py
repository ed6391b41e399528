"""StepMetrics, in a new process per test, since prometheus_client has a global registry."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_pat.attention import PlanStats
from sglang_pat.reasons import StepReason
from sglang_pat.stats import read_counters

PUBLISH = """
import logging, sys, time
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sglang_pat.sglang.report import metrics as published
from sglang_pat.stats import PlanningTime
from sglang_pat.sglang.report.metrics import StepMetrics

logging.basicConfig(stream=sys.stderr)
published.PUBLISH_SECONDS = 0.05
counters = {
    "causes": {}, "plans_reused": 0, "kv_tokens_query_centric": 0, "kv_tokens_planned": 0,
    "kv_tokens_lower_bound": 0, "steps_without_sharing": {}, "tree_events": {}, "batch_changes": {},
    "steps_planned": {},
}

def read():
    if counters is None:
        raise RuntimeError("unreadable")
    return {name: dict(v) if isinstance(v, dict) else v for name, v in counters.items()}

def page():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry).decode()

def wait_for(text):
    deadline = time.monotonic() + 10
    while text not in page():
        assert time.monotonic() < deadline, page()
        time.sleep(0.02)

metrics = StepMetrics({"model_name": "m", "tp_rank": "0"}, read)
"""


def published(code: str, folder: Path) -> tuple[dict[str, float], str]:
    """Return the samples of the last page that `code` prints, by name and labels, and stderr."""
    child = subprocess.run(
        [sys.executable, "-c", PUBLISH + code],
        capture_output=True,
        text=True,
        env={"PROMETHEUS_MULTIPROC_DIR": str(folder), "PATH": ""},
    )
    assert child.returncode == 0, child.stderr
    samples = {}
    for family in text_string_to_metric_families(child.stdout):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "tp_rank")}
            assert {"model_name", "tp_rank"} <= sample.labels.keys()
            samples[" ".join([sample.name, *(labels[name] for name in sorted(labels))])] = (
                sample.value
            )
    return samples, child.stderr


def test_counters_grow_to_what_was_counted(tmp_path: Path) -> None:
    code = """
counters |= {"causes": {"first": 1}, "kv_tokens_query_centric": 100, "kv_tokens_planned": 60}
metrics.publish()
counters |= {
    "causes": {"first": 1, "tail_growth": 2}, "plans_reused": 7, "kv_tokens_lower_bound": 40,
    "kv_tokens_query_centric": 300, "kv_tokens_planned": 110,
    "steps_without_sharing": {"no tree": 2},
    "tree_events": {"insert": 5, "evict": 0}, "batch_changes": {"join": 4, "leave": 1},
    "verify": {"steps": 3, "rows": 24}, "draft": {"steps": 6, "plans_built": 1},
    "draft_extend": {"steps": 3, "rows": 24}, "steps_planned": {"moved": 6, "due": 1},
}
for nanoseconds in (3_000, 5_000, 1_000_000_000):
    metrics.add_step(PlanningTime("unchanged", nanoseconds))
metrics.add_step(PlanningTime("changed", 20_000))
metrics.add_step(PlanningTime("cold", 40_000))
metrics.publish()
layers = published.LayerMetrics({"model_name": "m", "tp_rank": "0"})
layers.set({("pat", ""): 2, ("default", "head_dim = 80"): 1})
layers.set({("pat", ""): 1, ("default", "sinks"): 2})
print(page())
metrics.publish()  # nothing new
"""
    samples, _ = published(code, tmp_path)
    expected = {
        "plans_built_total first": 1,
        "plans_built_total tail_growth": 2,
        "plans_reused_total": 7,
        "kv_tokens_query_centric_total": 300,
        "kv_tokens_read_total": 110,
        "kv_tokens_lower_bound_total": 40,
        "steps_without_sharing_total no tree": 2,
        "private_steps_total no tree": 2,
        "steps_planned_total moved": 6,
        "steps_planned_total due": 1,
        "kv_read_ratio": 0.25,  # (110 - 60) / (300 - 100)
        "tree_events_total insert": 5,
        "batch_changes_total join": 4,
        "batch_changes_total leave": 1,
        "verify_total steps": 3,
        "verify_total rows": 24,
        "draft_total steps": 6,
        "draft_total plans_built": 1,
        "draft_extend_total steps": 3,
        "draft_extend_total rows": 24,
        "plan_seconds_count unchanged": 3,
        "plan_seconds_bucket unchanged 4e-06": 1,
        "plan_seconds_bucket unchanged 8e-06": 2,
        "plan_seconds_bucket unchanged +Inf": 3,
        "plan_seconds_sum changed": 20e-6,
        "plan_seconds_sum cold": 40e-6,
        "layers  pat": 1,
        "layers head_dim = 80 default": 0,  # this reason is gone
        "layers sinks default": 2,
    }
    found = {name: samples.get(f"sglang:pat_{name}") for name in expected}
    assert found == pytest.approx(expected)


def test_an_idle_server_saves_neither_all_nor_nothing(tmp_path: Path) -> None:
    """The ratio of an idle server is NaN, and its counters exist for rules to sum."""
    decode = "counters |= {'kv_tokens_query_centric': 9, 'kv_tokens_planned': 9}"
    for before in ("", f"{decode}; metrics.publish()"):
        folder = tmp_path / str(len(before))
        folder.mkdir()
        samples, _ = published(f"\n{before}\nmetrics.publish()\nprint(page())", folder)
        assert math.isnan(samples["sglang:pat_kv_read_ratio"])
        assert samples["sglang:pat_plans_reused_total"] == 0


def test_the_last_steps_are_published_without_another(tmp_path: Path) -> None:
    code = """
metrics.start()
counters["plans_reused"] = 5
wait_for('sglang:pat_plans_reused_total{model_name="m",tp_rank="0"} 5.0')
counters["plans_reused"] = 6
wait_for('sglang:pat_plans_reused_total{model_name="m",tp_rank="0"} 6.0')
"""
    published(code, tmp_path)


def test_a_second_backend_in_the_process_goes_on_counting(tmp_path: Path) -> None:
    code = """
counters["plans_reused"] = 5
metrics.publish()
counters["plans_reused"] = 2
StepMetrics({"model_name": "m", "tp_rank": "0"}, read).publish()
print(page())
"""
    assert published(code, tmp_path)[0]["sglang:pat_plans_reused_total"] == 7


def test_an_error_is_logged_and_decode_goes_on(tmp_path: Path) -> None:
    code = """
counters = None
metrics.start()
time.sleep(0.3)
for _ in range(2 * published._MAX_WAITING):
    metrics.add_step(PlanningTime("cold", 1_000))
assert len(metrics._waiting) == published._MAX_WAITING
"""
    _, errors = published(code, tmp_path)
    assert "pat no longer publishes metrics; decode continues" in errors
    assert "RuntimeError: unreadable" in errors


def test_counters_are_summed_and_copied() -> None:
    eager, captured = PlanStats(plans_built=2), PlanStats(plans_built=3, kv_tokens_planned=7)
    eager.causes.update({"first": 1, "tail_growth": 1})
    captured.causes.update({"first": 1})
    private = {"no tree": 4}
    counters = read_counters([eager, captured], steps_without_sharing=[private])
    captured.causes["first"] += 1
    private["no tree"] += 1
    assert counters["plans_built"] == 5
    assert counters["kv_tokens_planned"] == 7
    assert counters["causes"] == {"first": 2, "tail_growth": 1}
    assert counters["steps_without_sharing"] == {"no tree": 4}


def test_the_page_explains_each_reason_why_a_step_was_planned() -> None:
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    planned = [*StepReason][: [*StepReason].index(StepReason.LENGTHS) + 1]
    rows = [f"| `{reason}` | {reason.meaning} |" for reason in planned]
    assert "\n".join(rows) in page
    for reason in (StepReason.NO_REQUESTS, StepReason.CUT, StepReason.OVERFLOW):
        assert f"| `{reason}` |" in page
    for cause in (StepReason.BATCH_CHANGED, StepReason.TAIL_GROWTH):
        assert f"`{cause}` ({cause.meaning})" in page
