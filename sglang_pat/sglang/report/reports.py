"""StepReports writes the counters of decode steps to SGLang's log, its metrics and a stats file.

SGLang's configuration says how often to log, whether to publish metrics, and with which labels.
SGLANG_PAT_STATS_FILE names the stats file.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.runtime_context import (
    get_disagg,
    get_memory,
    get_observability,
    get_parallel,
    get_serving,
)

from sglang_pat.sglang import compat
from sglang_pat.sglang.report.metrics import MetricClasses, StepMetrics
from sglang_pat.sglang.report.stats_file import StatsFile
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.hooks import AFTER, Hook, install_hooks
from sglang_pat.stats import Counters, PlanningKind, PlanningTime, PlanningTimes

logger = logging.getLogger(__name__)

SCHEDULER = "managers.scheduler"


class StepReports:
    """Reports decode steps to the log, the metrics and the stats file."""

    def __init__(
        self, environment: Environment, model_runner: Any, read_counters: Callable[[], Counters]
    ) -> None:
        self._log: StepLog | None = None
        if rank_speaks():
            warn_without_prefix_cache(get_memory(), get_disagg())
            self._log = StepLog(get_observability().decode_log_interval, read_counters)
        self._metrics: StepMetrics | None = None
        if rank_publishes():
            labels = scheduler_labels(model_runner)
            self._metrics = StepMetrics(labels, read_counters, metric_classes())
        self._stats_file: StatsFile | None = None
        if environment.stats_file is not None and torch.distributed.get_rank() == 0:
            self._stats_file = StatsFile(environment.stats_file, read_counters)

    def start(self) -> None:
        """Start the threads that publish metrics and write the file."""
        if self._metrics is not None:
            self._metrics.start()
        if self._stats_file is not None:
            self._stats_file.start()
            install_in_scheduler(_STATE_HOOK)

    def add_step(self, planning: PlanningTime, num_repeated: int = 0) -> None:
        """Report a planned decode step. num_repeated: how many repeated steps preceded it."""
        if self._metrics is not None:
            self._metrics.add_step(planning)
        if self._log is not None:
            self._log.add_steps(num_repeated + 1)
        if self._stats_file is not None:
            self._stats_file.mark()

    def add_repeated(self, planning: PlanningTime) -> None:
        """Report the time of a repeated step. Called by the thread that counts repeated steps."""
        if self._metrics is not None:
            self._metrics.add_step(planning)

    @property
    def on_step(self) -> Callable[[], None] | None:
        """The function to call in each repeated step, or None."""
        return None if self._stats_file is None else self._stats_file.mark

    @property
    def steps_left(self) -> int:
        """Return how many steps may repeat the last one before the log needs add_step()."""
        return sys.maxsize if self._log is None else self._log.steps_left


def install_in_scheduler(hook: Hook) -> None:
    """Install a hook on SGLang's scheduler if this process has imported it. The import is slow."""
    if f"sglang.srt.{SCHEDULER}" in sys.modules:
        install_hooks([hook])


def _after_get_internal_state(state: Any, *_: object) -> Any:
    """Hook AFTER Scheduler.get_internal_state, which `/server_info` calls: write the stats file."""
    try:
        StatsFile.latest.write()
    except Exception:
        logger.exception("pat could not write the stats file")
    return state


_STATE_HOOK = Hook(f"{SCHEDULER}:Scheduler.get_internal_state", _after_get_internal_state, AFTER)


def warn_without_prefix_cache(memory: Any, disaggregation: Any) -> None:
    """If an option keeps SGLang from caching prefixes, log a warning that names the option.

    The arguments are those of SGLang's `get_memory()` and `get_disagg()`.
    """
    if not memory.disable_radix_cache:
        return
    if disaggregation.disaggregation_mode == "decode":
        cause = "a server with --disaggregation-mode decode keeps no prefixes by default"
        remedy = "start it with --disaggregation-decode-enable-radix-cache"
    else:
        cause = "--disable-radix-cache was given, or SGLang has set it for another option"
        remedy = "start SGLang without it"
    logger.warning("pat finds no KV to share between requests: %s; to share, %s", cause, remedy)


def rank_speaks() -> bool:
    """Return True if this rank logs. As in SGLang, one rank of each tensor-parallel group logs."""
    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def rank_publishes() -> bool:
    """Return True if this rank publishes metrics."""
    observability = get_observability()
    return bool(
        observability.enable_metrics
        and (rank_speaks() or observability.enable_metrics_for_all_schedulers)
    )


def scheduler_labels(model_runner: Any) -> dict[str, str]:
    """Return the labels of SGLang's scheduler metrics except `priority`, which no step has."""
    parallel, disaggregation = get_parallel(), get_disagg()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": (
            "dynamic"
            if compat.switches_roles(disaggregation)
            else DisaggregationMode.to_engine_type(disaggregation.disaggregation_mode)
        ),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    dp_rank = compat.dp_rank(model_runner, parallel)
    if dp_rank is not None:
        labels["dp_rank"] = dp_rank
    labels |= get_observability().extra_metric_labels or {}
    return {name: str(value) for name, value in labels.items()}


def metric_classes() -> MetricClasses:
    """Return the classes of SGLang's scheduler metrics. Embedders like Ray Serve have their own."""
    loggers = get_observability().stat_loggers or {}
    collector = loggers.get("scheduler", SchedulerMetricsCollector)
    own = MetricClasses(collector._counter_cls, collector._gauge_cls, collector._histogram_cls)
    default = MetricClasses.of_prometheus()
    return MetricClasses(*(mine or other for mine, other in zip(own, default, strict=True)))


class StepLog:
    """Every `interval` steps, logs how the counters have changed.

    The first step only sets the baseline, so that SGLang's warm-up and captures are not logged.
    """

    def __init__(self, interval: int, read_counters: Callable[[], Counters]) -> None:
        self._interval = interval
        self._read_counters = read_counters
        self._before: Counters | None = None
        self._steps = 0  # steps since the last line

    @property
    def steps_left(self) -> int:
        """Return how many steps may wait for a later add_steps() call without delaying a line."""
        return max(self._interval - self._steps - 1, 0)  # an interval of -1 logs every step

    def add_steps(self, count: int = 1) -> None:
        """Count decode steps, and log a line if one is due."""
        if self._before is None:
            self._before = self._read_counters()
            return
        self._steps += count
        if self._steps < self._interval:
            return
        counters = self._read_counters()
        logger.info(log_line(self._before, counters))
        self._before = counters
        self._steps = 0


# Counters of speculative decoding: name, and what the log calls their steps and their tokens.
_SPECULATION = (
    ("verify", "verify", "verified"),
    ("draft", "draft", "draft"),
    ("draft_extend", "draft extend", "read draft"),
)


def log_line(before: Counters, counters: Counters) -> str:
    """Return a log line, in SGLang's style, on what was counted between two readings."""

    def since(name: str) -> int:
        count: int = counters[name] - before[name]
        return count

    query_centric = since("kv_tokens_query_centric")
    # An idle rank under data parallelism reads no KV. It saves nothing, so its ratio is 1.
    ratio = since("kv_tokens_planned") / query_centric if query_centric else 1.0
    unshared = [sum(each["steps_without_sharing"].values()) for each in (before, counters)]
    speculation = ""
    for name, step, token in _SPECULATION:  # only kinds of steps that this server counts
        now, then = counters.get(name), before.get(name, {})
        if now is not None:
            steps, rows = (now[each] - then.get(each, 0) for each in ("steps", "rows"))
            speculation += f"#{step} step: {steps}, #{token} token: {rows}, "
    return (
        f"Pat decode, #plan: {since('plans_built')}, #reuse: {since('plans_reused')}, {speculation}"
        f"#step without sharing: {unshared[1] - unshared[0]}, kv read ratio: {ratio:.2f}, "
        f"{_reasons(before, counters)}"
        f"plan time p50/p99 (us): {_times(counters['planning_ns'].since(before['planning_ns']))}"
    )


def _reasons(before: Counters, counters: Counters) -> str:
    """Return why steps were planned (`StepReason`), the most frequent reason first."""
    counted: Counter[str] = Counter(counters["steps_planned"])
    counted -= Counter(before["steps_planned"])
    if not counted:
        return ""
    return f"steps planned: {', '.join(f'{name} {n}' for name, n in counted.most_common())}, "


def _times(planning_ns: PlanningTimes) -> str:
    """Return p50/p99 planning times by kind of step, the cheapest kind first. "": no times."""
    kinds = [kind for kind in get_args(PlanningKind) if planning_ns.get(kind)]
    percentiles = [[planning_ns.percentile_us(kind, p) for p in (50, 99)] for kind in kinds]
    return ", ".join(
        f"{kind} {p50:.1f}/{p99:.1f}" for kind, (p50, p99) in zip(kinds, percentiles, strict=True)
    )
