"""The dashboard and the alert rules: they name only metrics and labels that exist, and all of them.

That the expressions are right is checked by a Prometheus (`tests/engine/test_monitoring.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import yaml

from sglang_pat.sglang.report import metrics as ours
from sglang_pat.stats import StepKind

FOLDER = Path(__file__).resolve().parents[2] / "docs/operate/monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "pat-dashboard.json").read_text())
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "pat-rules.yml").read_text())
# SGLang's own, of both supported versions. The test with an engine finds them on its page.
SGLANG_METRICS = {
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:inter_token_latency_seconds_bucket",
    "sglang:generation_tokens_total",
}


def registered() -> dict[str, set[str]]:
    """Every metric that the code registers, with the labels beside SGLang's own."""
    found: dict[str, set[str]] = {}

    class Metric:
        def __init__(self, *, name: str, labelnames: list[str], **_: object) -> None:
            found[name] = set(labelnames) - {"of SGLang"}

        def labels(self, **_: object) -> Metric:
            return self

    classes = ours.MetricClasses(Metric, Metric, Metric)
    ours.StepMetrics({"of SGLang": ""}, dict, classes)
    histogram = found.pop(f"{ours.PREFIX}plan_seconds")
    for suffix in ("bucket", "count", "sum"):
        found[f"{ours.PREFIX}plan_seconds_{suffix}"] = histogram
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return panels + [rule["expr"] for rule in rules()]


def test_every_metric_exists() -> None:
    metrics = registered()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = set()
    for expression in expressions():
        named |= set(re.findall(r"\w+:\w+(?::\w+)*", re.sub(r'"[^"]*"', "", expression)))
    assert named <= set(metrics) | recorded | SGLANG_METRICS
    # And none that users of the dashboard would miss.
    unused = (
        set(metrics) - named - {f"{ours.PREFIX}plan_seconds_{each}" for each in ("count", "sum")}
    )
    assert not unused


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
    source = "\n".join(
        path.read_text() for path in sorted(Path(ours.__file__).parents[1].rglob("*.py"))
    )
    for expression in expressions():
        for reason in re.findall(r'reason[=!]~"(.*?)\.\*"', expression):
            assert reason in source, reason
        for kind in re.findall(r'kind="(.*?)"', expression):
            assert f'"{kind}"' in source, kind


def test_panels_and_alerts_explain_themselves() -> None:
    for panel in DASHBOARD["panels"]:
        assert panel["description"].endswith("."), panel["title"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(places) == len(DASHBOARD["panels"])
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning")
            assert set(rule["annotations"]) == {"summary", "description"}
    tested = (FOLDER / "pat-rules-test.yml").read_text()
    assert all(rule["alert"] in tested for rule in rules() if "alert" in rule)


def test_kinds_of_steps_are_those_of_the_documentation() -> None:
    (panel,) = (each for each in DASHBOARD["panels"] if each["title"] == "Host time of a plan")
    for kind in get_args(StepKind):
        assert kind in panel["description"]
