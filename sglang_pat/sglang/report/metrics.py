"""Prometheus metrics: counts of decode steps, and who decodes which layers.

A decode step only appends to a list. A thread publishes.
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
# Steps whose times wait for the thread. Only a thread that has died lets them exceed this.
_MAX_WAITING = 100_000


class _CounterSpec(NamedTuple):
    """A Prometheus counter, and the entry of `Counters` that it shows."""

    metric: str
    entry: str
    documentation: str
    label: str | None = None  # whose values are the keys of the entry, if the entry is a mapping


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

        SGLang must have set PROMETHEUS_MULTIPROC_DIR, which that package reads when it is imported.
        """
        from prometheus_client import Counter, Gauge, Histogram

        return cls(Counter, Gauge, Histogram)


@cache  # a name can be registered once in a process, which may build its backend again
def _metric(make: Any, name: str, documentation: str, labels: tuple[str, ...], **more: Any) -> Any:
    return make(name=PREFIX + name, documentation=documentation, labelnames=[*labels], **more)


class StepMetrics:
    """The metrics of one backend. `start()` once, `add_step()` after each decode step."""

    def __init__(
        self,
        labels: dict[str, str],
        read_counters: Callable[[], Counters],
        classes: MetricClasses | None = None,
    ) -> None:
        """Make the metrics.

        Each metric has the labels. Another thread calls read_counters. Without classes, those of
        prometheus_client are used.
        """
        classes = classes or MetricClasses.of_prometheus()
        names = tuple(labels)
        self._labels = labels
        self._counters = {
            spec: _metric(
                classes.counter,
                spec.metric,
                spec.documentation,
                (*names, spec.label) if spec.label else names,
            )
            for spec in _COUNTERS
        }
        for spec in _COUNTERS:
            if spec.label is None:  # on the page from the start: a rule cannot add what is missing
                self._counter(spec, "")
        self._kv_read_ratio = _metric(
            classes.gauge,
            "kv_read_ratio",
            "KV tokens read / query-centric KV tokens in the last second, or NaN.",
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        seconds = _metric(
            classes.histogram,
            "plan_seconds",
            "Host time of planning a decode step, by kind: unchanged (the plan was reused), "
            "changed (some requests were in the last step) or cold.",
            (*names, "kind"),
            buckets=_TIME_BUCKETS,
        )
        self._plan_seconds = {
            kind: seconds.labels(**labels, kind=kind) for kind in get_args(PlanningClass)
        }
        self._read_counters = read_counters
        self._published: Counters = {}
        self._waiting: deque[PlanningTime] = deque(maxlen=_MAX_WAITING)

    def start(self) -> None:
        """Publish every second from now on, until the process ends."""
        threading.Thread(target=self._run, name="sglang-pat metrics", daemon=True).start()

    def add_step(self, planning: PlanningTime) -> None:
        """Publish the host time of a decode step later."""
        self._waiting.append(planning)

    def publish(self) -> None:
        """Bring the metrics up to date."""
        for _ in range(len(self._waiting)):
            kind, nanoseconds = self._waiting.popleft()
            self._plan_seconds[kind].observe(nanoseconds / 1e9)
        counters = self._read_counters()
        for spec in _COUNTERS:
            now, before = (_by_label(spec, which) for which in (counters, self._published))
            for label, value in now.items():
                if value > before.get(label, 0):
                    self._counter(spec, label).inc(value - before.get(label, 0))
        query_centric, planned = (
            counters[name] - self._published.get(name, 0)
            for name in ("kv_tokens_query_centric", "kv_tokens_planned")
        )
        # Not a number while nothing decodes: 0 or 1 would read as all saved, or nothing.
        self._kv_read_ratio.set(planned / query_centric if query_centric else math.nan)
        self._published = counters

    def _counter(self, spec: _CounterSpec, label: str) -> Any:
        more = {spec.label: label} if spec.label else {}
        return self._counters[spec].labels(**self._labels, **more)

    def _run(self) -> None:
        try:
            while True:
                self.publish()
                time.sleep(PUBLISH_SECONDS)
        except Exception:
            logger.exception("pat publishes no more metrics; decode goes on")


def _by_label(spec: _CounterSpec, counters: Counters) -> dict[str, int]:
    """Return the numbers of an entry by label. A plain number has an empty label."""
    if not counters:  # before the first publication
        return {}
    value = counters.get(spec.entry, {})  # not every server counts all
    return value if spec.label is not None else {"": value}


class LayerMetrics:
    """The number of layers that pat decodes, and of those of the default backend, by reason."""

    def __init__(self, labels: dict[str, str], classes: MetricClasses | None = None) -> None:
        """Make the metric. See `StepMetrics` for the arguments."""
        self._labels = labels
        self._gauge = _metric(
            (classes or MetricClasses.of_prometheus()).gauge,
            "layers",
            "Attention layers by who decodes them: pat, or SGLang's default backend, for which "
            "there is a reason.",
            (*labels, "route", "reason"),
            multiprocess_mode="mostrecent",
        )
        self._published: set[tuple[str, str]] = set()

    def set(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Publish the number of layers by route and reason."""
        for route, reason in self._published | counts.keys():
            child = self._gauge.labels(**self._labels, route=route, reason=reason)
            child.set(counts.get((route, reason), 0))
        self._published |= counts.keys()
