"""Says which layers pat decodes: in the log, in a metric, and in `/server_info`."""

from __future__ import annotations

import logging
import sys
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_pat.sglang.report import reports
from sglang_pat.sglang.report.metrics import LayerMetrics
from sglang_pat.sglang.start.hooks import Hook, install_hooks
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.support import BACKEND

logger = logging.getLogger(__name__)

SERVER_INFO_KEY = "pat"
_SCHEDULER = "sglang.srt.managers.scheduler"


class _LastReport:
    """Last report of this process. SGLang may build its backend several times."""

    routes: dict[str, Any] | None = None
    model_runner: Any = None
    # If there is a draft model: of its decode steps, and where it reads what was accepted.
    draft_routes: dict[str, Any] | None = None
    extend_routes: dict[str, Any] | None = None
    line: str = ""
    metrics: LayerMetrics | None = None


def report_routes(routes: LayerSupport, model_runner: Any = None) -> None:
    """Tell the routes, at start-up and when they change.

    Parameters
    ----------
    routes
        Of the model that this process serves.
    model_runner
        SGLang's, at start-up.
    """
    _LastReport.routes = routes.as_json()
    line = str(routes)
    if reports.rank_speaks() and line != _LastReport.line:
        logger.info(line)
    _LastReport.line = line
    if model_runner is not None:
        # SGLang builds the backends of a draft model after the model's first one, and before the
        # model's others (adaptive drafts).
        if model_runner is not _LastReport.model_runner:
            _LastReport.draft_routes = _LastReport.extend_routes = None
        _LastReport.model_runner = model_runner
        if _SCHEDULER in sys.modules:  # nobody else asks, and its import is heavy
            install_hooks([_SERVER_INFO_HOOK])
        if reports.rank_publishes():
            labels = reports.scheduler_labels(model_runner)
            _LastReport.metrics = LayerMetrics(labels, reports.metric_classes())
    if _LastReport.metrics is not None:
        _LastReport.metrics.set(routes.counts())


def report_draft_routes(routes: LayerSupport) -> None:
    """Tell the routes of the draft model, when its backend has been built and when they change."""
    _LastReport.draft_routes = routes.as_json()
    if reports.rank_speaks():
        logger.info("draft model: %s", routes)


def report_extend_routes(routes: LayerSupport) -> None:
    """Report the routes of draft extend, as `report_draft_routes` does those of decode steps."""
    _LastReport.extend_routes = routes.as_json()
    if reports.rank_speaks():
        logger.info("draft model, reading what was accepted: %s", routes)


def _after_get_init_info(result: dict[str, Any], *_: object) -> dict[str, Any]:
    """AFTER Scheduler.get_init_info: its fields replace SGLang's arguments.

    Those name the default backend.
    """
    told = _LastReport.routes
    decodes = told is not None and told["pat_layers"] > 0
    if told is not None and _LastReport.draft_routes is not None:
        told = told | {"draft_model": _LastReport.draft_routes}
    if told is not None and _LastReport.extend_routes is not None:
        told = told | {"draft_extend": _LastReport.extend_routes}
    decode_backend = {"decode_attention_backend": BACKEND} if decodes else {}
    return result | decode_backend | {SERVER_INFO_KEY: told}


_SERVER_INFO_HOOK = Hook(
    f"{_SCHEDULER}:Scheduler",
    "get_init_info",
    _after_get_init_info,
    HookType.AFTER,
)
