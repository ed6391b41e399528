"""Counts of decode steps, and who decodes which layer, as metrics of Prometheus.

A decode step only appends to a list: a thread publishes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, get_args

from sglang_pat.stats import Counters, PlanningClass, PlanningTime

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0

# The prefix of SGLang's own metrics, by which scrapers and dashboards select what they keep.
PREFIX = "sglang:pat_"
# 1 us to 33 ms
_TIME_BUCKETS = tuple(1e-6 * 2**i for i in range(16))
# Steps whose times wait for the thread. It would take a thread that has died to exceed that.
_MAX_WAITING = 100_000


class _CounterSpec(NamedTuple):
    """A Prometheus counter, and the entry of `Counters` that it shows.

    label: tells the numbers of that entry apart, if it is a mapping.
    """

    metric: str
    entry: str
    documentation: str
    label: str | None = None


_COUNTERS = (
    _CounterSpec("plans_built_total", "causes", "Decode plans built, by cause.", "cause"),
    _CounterSpec("plans_reused_total", "plans_reused", "Decode steps that reused the last plan."),
    _CounterSpec(
        "kv_tokens_query_centric_total",
        "kv_tokens_query_centric",
        "KV tokens of all decode steps if each request read its own.",
    ),
    _CounterSpec("kv_tokens_read_total", "kv_tokens_planned", "KV tokens that the plans read."),
    _CounterSpec(
        "kv_tokens_lower_bound_total",
        "kv_tokens_lower_bound",
        "KV tokens of all decode steps if each were read once.",
    ),
    _CounterSpec(
        "steps_planned_total",
        "steps_planned",
        "Decode steps that were planned, by the reason why they did not repeat the last step.",
        "reason",
    ),
    _CounterSpec(
        "steps_without_sharing_total",
        "steps_without_sharing",
        "Decode steps in which no KV could be shared, by reason.",
        "reason",
    ),
    # Until 0.3.0.
    _CounterSpec(
        "private_steps_total",
        "steps_without_sharing",
        "The former name of steps_without_sharing_total.",
        "reason",
    ),
    _CounterSpec(
        "verify_total",
        "verify",
        "Steps of speculative decoding in which drafts were verified, and draft tokens in them.",
        "kind",
    ),
    _CounterSpec(
        "draft_total",
        "draft",
        "Decode steps of the draft model, draft tokens in them, and plans of a round's steps.",
        "kind",
    ),
    _CounterSpec(
        "draft_extend_total",
        "draft_extend",
        "Steps in which the draft model read what was verified, and draft tokens in them.",
        "kind",
    ),
    _CounterSpec("tree_events_total", "tree_events", "Changes of the radix tree, by kind.", "kind"),
    _CounterSpec(
        "batch_changes_total",
        "batch_changes",
        "Changes of the batch of running requests, by kind.",
        "kind",
    ),
)


class MetricClasses(NamedTuple):
    """Classes of metrics: prometheus_client's, or an embedder's with the same interface."""

    counter: Any
    gauge: Any
    histogram: Any

    @classmethod
    def of_prometheus(cls) -> MetricClasses:
        """Return the classes of prometheus_client.

        It decides on import how it keeps values, so SGLang must have set PROMETHEUS_MULTIPROC_DIR
        before.
        """
        from prometheus_client import Counter, Gauge, Histogram

        return cls(Counter, Gauge, Histogram)


class StepMetrics:
    """The metrics of one backend. `start()` once, `add_step()` after each decode step."""

    def __init__(
        self,
        labels: dict[str, str],
        read_counters: Callable[[], Counters],
        classes: MetricClasses | None = None,
    ) -> None:
        """Make the metrics.

        labels: of every metric. read_counters: called from another thread. classes: None for
        prometheus_client's.
        """
        self._metrics = _metrics(tuple(labels.items()), classes or MetricClasses.of_prometheus())
        self._read_counters = read_counters
        self._published: Counters = {}
        self._waiting: deque[PlanningTime] = deque(maxlen=_MAX_WAITING)

    def start(self) -> None:
        """Publish every second from now on, until the process ends."""
        threading.Thread(target=self._run, name="sglang-pat metrics", daemon=True).start()

    def add_step(self, planning: PlanningTime) -> None:
        """After a decode step that was planned, or whose plan was reused."""
        self._waiting.append(planning)

    def publish(self) -> None:
        """Bring the metrics up to date."""
        for _ in range(len(self._waiting)):
            kind, nanoseconds = self._waiting.popleft()
            self._metrics.plan_seconds[kind].observe(nanoseconds / 1e9)
        counters = self._read_counters()
        for spec in _COUNTERS:
            now, before = (_by_label(spec, which) for which in (counters, self._published))
            for label, value in now.items():
                if value > before.get(label, 0):
                    self._metrics.counter(spec, label).inc(value - before.get(label, 0))
        query_centric, planned = (
            counters[name] - self._published.get(name, 0)
            for name in ("kv_tokens_query_centric", "kv_tokens_planned")
        )
        # Not a number while nothing decodes: 0 or 1 would read as all saved, or nothing.
        self._metrics.kv_read_ratio.set(planned / query_centric if query_centric else math.nan)
        self._published = counters

    def _run(self) -> None:
        try:
            while True:
                self.publish()
                time.sleep(PUBLISH_SECONDS)
        except Exception:
            logger.exception("pat publishes no more metrics; decode goes on")


def _by_label(spec: _CounterSpec, counters: Counters) -> dict[str, int]:
    """The numbers of an entry by the value of its label; of a plain number, by an empty one."""
    if not counters:  # before the first publication
        return {}
    value = counters.get(spec.entry, {})  # not all are counted by every server
    return value if spec.label is not None else {"": value}


class _Metrics:
    """The children of all metrics for one set of labels, each looked up once."""

    def __init__(self, labels: dict[str, str], classes: MetricClasses) -> None:
        self._labels = labels
        self._counters = {
            spec: classes.counter(
                name=PREFIX + spec.metric,
                documentation=spec.documentation,
                labelnames=[*labels, *([spec.label] if spec.label else [])],
            )
            for spec in _COUNTERS
        }
        self._children: dict[tuple[_CounterSpec, str], Any] = {}
        for spec in _COUNTERS:
            if spec.label is None:  # on the page from the start: a rule cannot add what is missing
                self.counter(spec, "")
        self.kv_read_ratio = classes.gauge(
            name=PREFIX + "kv_read_ratio",
            documentation="KV tokens read / query-centric KV tokens in the last second, or NaN.",
            labelnames=[*labels],
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        seconds = classes.histogram(
            name=PREFIX + "plan_seconds",
            documentation="Host time of planning a decode step, by kind: unchanged (the plan was "
            "reused), changed (some requests were in the last step) or cold.",
            labelnames=[*labels, "kind"],
            buckets=_TIME_BUCKETS,
        )
        self.plan_seconds = {
            kind: seconds.labels(**labels, kind=kind) for kind in get_args(PlanningClass)
        }

    def counter(self, spec: _CounterSpec, label: str) -> Any:
        if (spec, label) not in self._children:
            more = {spec.label: label} if spec.label else {}
            self._children[spec, label] = self._counters[spec].labels(**self._labels, **more)
        return self._children[spec, label]


class LayerMetrics:
    """Number of layers that pat decodes, and of those of the default backend, by reason."""

    def __init__(self, labels: dict[str, str], classes: MetricClasses | None = None) -> None:
        """labels: of every metric. classes: None for prometheus_client's."""
        self._labels = labels
        self._gauge = _layer_gauge(tuple(labels), classes or MetricClasses.of_prometheus())
        self._told: set[tuple[str, str]] = set()

    def set(self, counts: Mapping[tuple[str, str], int]) -> None:
        """counts: (route, reason) -> number of layers."""
        for route, reason in self._told | counts.keys():
            child = self._gauge.labels(**self._labels, route=route, reason=reason)
            child.set(counts.get((route, reason), 0))
        self._told |= counts.keys()


@cache
def _layer_gauge(labels: tuple[str, ...], classes: MetricClasses) -> Any:
    return classes.gauge(
        name=PREFIX + "layers",
        documentation="Attention layers by who decodes them: pat, or SGLang's default backend, for "
        "which there is a reason.",
        labelnames=[*labels, "route", "reason"],
        multiprocess_mode="mostrecent",
    )


@cache  # a name can be registered once in a process, which may build its backend again
def _metrics(labels: tuple[tuple[str, str], ...], classes: MetricClasses) -> _Metrics:
    return _Metrics(dict(labels), classes)
