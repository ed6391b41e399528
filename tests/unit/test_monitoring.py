"""The dashboard and the alert rules use only existing metrics and labels, and all of them.

`promtool` runs the rules' own tests if Debian's package `prometheus` is installed, or if
PROMETHEUS_FOLDER has it. `tests/engine/test_monitoring.py` lets a Prometheus scrape a server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_pat.sglang.report import metrics as ours

FOLDER = Path(__file__).resolve().parents[2] / "docs/operate/monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "pat-dashboard.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "pat-rules.yml").read_text())
PAGE = (FOLDER.parent / "index.md").read_text()
# SGLang's own metrics, in both supported versions. The test with an engine checks that they exist.
SGLANG_METRICS = {
    "sglang:num_requests_total",
    "sglang:num_aborted_requests_total",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:inter_token_latency_seconds_bucket",
    "sglang:generation_tokens_total",
}


def registered() -> dict[str, set[str]]:
    """Return every metric that the code registers, with its labels besides SGLang's."""
    found: dict[str, set[str]] = {}

    class Metric:
        def __init__(self, *, name: str, labelnames: list[str], **_: object) -> None:
            found[name] = set(labelnames) - {"of SGLang"}

        def labels(self, **_: object) -> Metric:
            return self

    classes = ours.MetricClasses(Metric, Metric, Metric)
    ours.StepMetrics({"of SGLang": ""}, dict, classes)
    ours.LayerMetrics({"of SGLang": ""}, classes)
    histogram = found.pop(f"{ours.PREFIX}plan_seconds")
    for suffix in ("bucket", "count", "sum"):
        found[f"{ours.PREFIX}plan_seconds_{suffix}"] = histogram
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for rule in rules()] + rollout_queries()


def rollout_queries() -> list[str]:
    found: list[str] = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == PAGE.count("promql") >= 5
    return found


def test_every_metric_exists() -> None:
    metrics = registered()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = set()
    for expression in expressions():
        named |= set(re.findall(r"\w+:\w+(?::\w+)*", re.sub(r'"[^"]*"', "", expression)))
    assert named <= set(metrics) | recorded | SGLANG_METRICS
    # Metrics that the dashboard may omit: former names, and parts of a histogram.
    left_out = ("private_steps_total", "plan_seconds_count", "plan_seconds_sum")
    assert set(metrics) - named == {f"{ours.PREFIX}{each}" for each in left_out}


def test_every_label_exists() -> None:
    metrics = registered()
    for expression in expressions():
        for metric, selectors in re.findall(r"(sglang:pat_\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+) ?[=!]~?\"", selectors))
            assert labels <= metrics[metric] | {"instance"}, expression
    grouped = {
        label
        for expression in expressions()
        for labels in re.findall(r"by \(([^)]*)\)", expression)
        for label in labels.split(", ")
    }
    assert grouped <= {label for labels in metrics.values() for label in labels} | {
        "instance",
        "le",
    }


def test_reasons_and_kinds_that_rules_select_are_given_by_the_code() -> None:
    package = Path(ours.__file__).parents[2]
    source = "\n".join(path.read_text() for path in sorted(package.rglob("*.py")))
    for expression in expressions():
        for reason in re.findall(r'reason[=!]~"(.*?)\.\*"', expression):
            assert reason in source, reason
        for kind in re.findall(r'kind="(.*?)"', expression):
            assert f'"{kind}"' in source, kind


def test_the_dashboard_lists_servers_that_decode_nothing_by_pat() -> None:
    """A server without layers on pat has one metric of pat: the backends of its layers."""
    (instance,) = (e for e in DASHBOARD["templating"]["list"] if e["name"] == "instance")
    assert instance["query"]["query"] == "label_values(sglang:pat_layers, instance)"


def promtool(*arguments: str, folder: Path) -> None:
    program = shutil.which("promtool", path=os.environ.get("PROMETHEUS_FOLDER"))
    if program is None:
        pytest.skip("promtool is missing: apt-get install prometheus")
    result = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SUCCESS" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "pat-rules.yml"),
        ("test", "rules", "pat-rules-test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
)
def test_promtool_accepts_the_files(arguments: tuple[str, ...]) -> None:
    promtool(*arguments, folder=FOLDER)


def test_promtool_accepts_the_queries_of_a_rollout(tmp_path: Path) -> None:
    queries = [{"record": f"query:{i}", "expr": expr} for i, expr in enumerate(rollout_queries())]
    (tmp_path / "queries.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "rollout", "rules": queries}]})
    )
    promtool("check", "rules", "queries.yml", folder=tmp_path)


def test_the_page_names_every_alert() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(re.findall(r"`(Pat\w+)`", PAGE)) == alerts


def test_the_metrics_of_sglang_are_in_its_source() -> None:
    spec = importlib.util.find_spec("sglang")
    folders = [*map(Path, spec.submodule_search_locations or ())] if spec else []
    files = (file for folder in folders for file in folder.glob("srt/**/metrics_collector.py"))
    sources = "".join(file.read_text() for file in files)
    if not sources:
        pytest.skip("SGLang is not installed")
    for name in SGLANG_METRICS:
        assert f'"{name.removesuffix("_bucket")}"' in sources, name


FALLBACKS: list[tuple[dict[tuple[str, str], int], bool]] = [
    ({("default", "sliding window 4096"): 32}, True),
    ({("default", "no attention layer in Mamba"): 0}, True),
    ({("pat", ""): 16, ("default", "sliding window 4096"): 16}, False),
    ({("pat", ""): 32}, False),
]


def test_what_the_code_publishes_of_a_whole_fallback_fires(tmp_path: Path) -> None:
    series: list[dict[str, str]] = []

    class Gauge:
        def __init__(self, *, name: str, **_: object) -> None:
            self.name = name

        def labels(self, **labels: str) -> Gauge:
            self.series = ", ".join(f"{name}={json.dumps(text)}" for name, text in labels.items())
            return self

        def set(self, value: int) -> None:
            text = f'{self.name}{{instance="a", {self.series}}}'
            series.append({"series": text, "values": f"{value}+0x60"})

    (rule,) = (each for each in rules() if each.get("alert") == "PatFallsBack")
    tests = []
    for counts, falls_back in FALLBACKS:
        series.clear()
        labels = {"model_name": "m", "tp_rank": "0"}
        ours.LayerMetrics(labels, ours.MetricClasses(Gauge, Gauge, Gauge)).set(counts)
        told = {"instance": "a", "reason": next(iter(counts))[1]}
        annotations = {
            name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found, told=told: told[found[1]], text)
            for name, text in rule["annotations"].items()
        }
        fired = {"exp_labels": {"severity": "warning", **told}, "exp_annotations": annotations}
        check = {"eval_time": "30m", "alertname": rule["alert"], "exp_alerts": [fired] * falls_back}
        tests.append({"interval": "1m", "input_series": [*series], "alert_rule_test": [check]})
    file = tmp_path / "test.yml"
    rule_files = [str(FOLDER / "pat-rules.yml")]
    file.write_text(yaml.safe_dump({"rule_files": rule_files, "tests": tests}))
    promtool("test", "rules", str(file), folder=tmp_path)
