"""Says which layers pat decodes: in the log, in a metric, and in `/server_info`."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from sglang_pat.sglang.report import reports
from sglang_pat.sglang.report.metrics import LayerMetrics
from sglang_pat.sglang.start.hooks import AFTER, Hook
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.support import BACKEND

logger = logging.getLogger(__name__)

SERVER_INFO_KEY = "pat"

# Types of a draft model's steps: the key in `/server_info` -> the name in the log.
_DRAFTS = {"draft_model": "draft model", "draft_extend": "draft model, reading what was accepted"}


class _LastReport:
    """Keeps what this process reported last, because SGLang may build several backends."""

    layer_support: dict[str, Any] | None = None
    model_runner: Any = None
    drafts: ClassVar[dict[str, dict[str, Any]]] = {}  # draft models' reports, by key of `_DRAFTS`
    line: str = ""
    metrics: LayerMetrics | None = None


def has_reported(model_runner: Any) -> bool:
    """Return True if the last report was on this model."""
    return _LastReport.model_runner is model_runner


def report_layer_support(layer_support: LayerSupport, model_runner: Any = None) -> None:
    """Report which layers of the target model pat decodes, at start-up and when that changes.

    model_runner: None if SGLang has already started.
    """
    _LastReport.layer_support = layer_support.as_json()
    line = str(layer_support)
    if reports.rank_speaks() and line != _LastReport.line:
        logger.info(line)
    _LastReport.line = line
    if model_runner is not None:
        # With adaptive drafts, SGLang builds several backends for the target model, the last one
        # after the draft model's backends. The report on the last one must not clear the draft
        # model's reports.
        if model_runner is not _LastReport.model_runner:
            _LastReport.drafts.clear()
        _LastReport.model_runner = model_runner
        reports.install_in_scheduler(_INFO_HOOK)
        if reports.rank_publishes():
            labels = reports.scheduler_labels(model_runner)
            _LastReport.metrics = LayerMetrics(labels, reports.metric_classes())
    if _LastReport.metrics is not None:
        _LastReport.metrics.set(layer_support.counts())


def report_draft_support(layer_support: LayerSupport, key: str = "draft_model") -> None:
    """Report which layers of the draft model pat decodes: at start-up, and when that changes.

    key: one of `_DRAFTS`.
    """
    _LastReport.drafts[key] = layer_support.as_json()
    if reports.rank_speaks():
        logger.info("%s: %s", _DRAFTS[key], layer_support)


def _after_get_init_info(result: dict[str, Any], *_: object) -> dict[str, Any]:
    """Hook AFTER Scheduler.get_init_info.

    Adds the last report, and names pat as the decode backend if pat decodes any layer.
    """
    report = _LastReport.layer_support
    decodes = report is not None and report["pat_layers"] > 0
    report = report and report | _LastReport.drafts
    decode_backend = {"decode_attention_backend": BACKEND} if decodes else {}
    return result | decode_backend | {SERVER_INFO_KEY: report}


_INFO_HOOK = Hook(f"{reports.SCHEDULER}:Scheduler.get_init_info", _after_get_init_info, AFTER)
