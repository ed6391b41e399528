"""Prometheus metrics: counts of decode steps, and the layers that each backend decodes.

A decode step only appends to a list. A separate thread publishes the metrics.
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

from sglang_pat.stats import Counters, PlanningKind, PlanningTime

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0

# Starts with SGLang's own prefix, by which scrapers and dashboards select metrics.
PREFIX = "sglang:pat_"
# 1 us to 33 ms
_TIME_BUCKETS = tuple(1e-6 * 2**i for i in range(16))
# This many planning times may wait for the thread. The limit matters only if the thread has died.
_MAX_WAITING = 100_000


# Documentation of the counters `sglang:pat_..._total`, by the name of their label ("": none). A
# counter shows the entry of `Counters` with the same name. If the counter has a label, the entry
# maps values of the label to numbers.
_DOCUMENTATION = {
    "": {
        "plans_reused": "Decode steps that reused the last plan.",
        "kv_tokens_query_centric": "KV tokens of all decode steps if each request read its own.",
        "kv_tokens_read": "KV tokens that the plans read.",
        "kv_tokens_lower_bound": "KV tokens of all decode steps if each were read once.",
    },
    "cause": {"plans_built": "Decode plans built, by cause."},
    "reason": {
        "steps_planned": "Planned decode steps, by why they did not repeat the last step.",
        "steps_without_sharing": "Decode steps in which no KV could be shared, by reason.",
        "private_steps": "The former name of steps_without_sharing_total.",  # 0.3.0 drops it
    },
    "kind": {
        "verify": "Steps in which drafts were verified, and draft tokens in them.",
        "draft": "Decode steps of the draft model, draft tokens in them, and plans of rounds.",
        "draft_extend": "Steps of draft extend, and draft tokens in them.",
        "windows": "Plans of layers with sliding windows, and KV tokens that these read.",
        "tree_events": "Changes of the radix tree, by kind.",
        "batch_changes": "Changes of the batch of running requests, by kind.",
    },
}
_LABELS = {name: label for label, names in _DOCUMENTATION.items() for name in names}
_ENTRIES = {  # for a counter whose entry of `Counters` has another name: the entry's name
    "kv_tokens_read": "kv_tokens_planned",
    "plans_built": "causes",
    "private_steps": "steps_without_sharing",
}


class MetricClasses(NamedTuple):
    """The classes of metrics: prometheus_client's, or an embedder's with the same interface."""

    counter: Any
    gauge: Any
    histogram: Any

    @classmethod
    def of_prometheus(cls) -> MetricClasses:
        """Return the classes of prometheus_client.

        SGLang must have set PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads when imported.
        """
        from prometheus_client import Counter, Gauge, Histogram

        return cls(Counter, Gauge, Histogram)


@cache  # cached, because a name may be registered only once per process
def _metric(make: Any, name: str, documentation: str, labels: tuple[str, ...], **more: Any) -> Any:
    return make(name=PREFIX + name, documentation=documentation, labelnames=[*labels], **more)


class StepMetrics:
    """The metrics of decode steps. Call `start()` once, and `add_step()` after each step."""

    def __init__(
        self,
        labels: dict[str, str],
        read_counters: Callable[[], Counters],
        classes: MetricClasses | None = None,
    ) -> None:
        """Make the metrics.

        labels: labels of all metrics. read_counters: called by the publishing thread. classes: None
        for those of prometheus_client.
        """
        classes = classes or MetricClasses.of_prometheus()
        names = tuple(labels)
        self._labels = labels
        self._counters = {
            name: _metric(
                classes.counter,
                f"{name}_total",
                _DOCUMENTATION[label][name],
                (*names, label) if label else names,
            )
            for name, label in _LABELS.items()
        }
        # Creates these series with value 0, because recording rules cannot add up missing series.
        for name in _DOCUMENTATION[""]:
            self._counter(name, "")
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
            kind: seconds.labels(**labels, kind=kind) for kind in get_args(PlanningKind)
        }
        self._read_counters = read_counters
        self._published: Counters = {}
        self._waiting: deque[PlanningTime] = deque(maxlen=_MAX_WAITING)

    def start(self) -> None:
        """Publish every second, from now until the process ends."""
        threading.Thread(target=self._run, name="sglang-pat metrics", daemon=True).start()

    def add_step(self, planning: PlanningTime) -> None:
        """Queue the host time of a decode step for the publishing thread."""
        self._waiting.append(planning)

    def publish(self) -> None:
        """Update the metrics to the current counters."""
        for _ in range(len(self._waiting)):
            kind, nanoseconds = self._waiting.popleft()
            self._plan_seconds[kind].observe(nanoseconds / 1e9)
        counters = self._read_counters()
        for name in _LABELS:
            now, before = (_by_label(name, which) for which in (counters, self._published))
            for label, value in now.items():
                if value > before.get(label, 0):
                    self._counter(name, label).inc(value - before.get(label, 0))
        query_centric, planned = (
            counters[name] - self._published.get(name, 0)
            for name in ("kv_tokens_query_centric", "kv_tokens_planned")
        )
        # NaN while nothing decodes, because 0 would mean that all reads are saved, and 1 that none
        # are.
        self._kv_read_ratio.set(planned / query_centric if query_centric else math.nan)
        self._published = counters

    def _counter(self, name: str, value: str) -> Any:
        more = {_LABELS[name]: value} if _LABELS[name] else {}
        return self._counters[name].labels(**self._labels, **more)

    def _run(self) -> None:
        try:
            while True:
                self.publish()
                time.sleep(PUBLISH_SECONDS)
        except Exception:
            logger.exception("pat no longer publishes metrics; decode continues")


def _by_label(name: str, counters: Counters) -> dict[str, int]:
    """Return a counter's numbers by label value, or under "" if the counter has no label."""
    value = counters.get(_ENTRIES.get(name, name))
    if value is None:  # before the first publication, or a counter that this server lacks
        return {}
    return value if _LABELS[name] else {"": value}


class LayerMetrics:
    """The metric that counts the layers that pat decodes and, by reason, those that fall back."""

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
