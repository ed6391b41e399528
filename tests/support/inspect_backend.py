"""The private state of pat's backends, for tests: nothing else in tests/ reaches into it."""

from __future__ import annotations

from typing import Any

from sglang_pat.sglang.speculative.draft_requests import DRAFT_REQUESTS
from sglang_pat.sglang.step.debug_checks import DebugChecks, RankChecker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER


def planner(backend: Any) -> Any:
    """Return the planner of a backend, or of the container of a draft model's steps."""
    return backend._pat.planner


def _planner(owner: Any) -> Any:
    return owner._pat.planner if hasattr(owner, "_pat") else owner


def plans(backend: Any) -> Any:
    """Return the plans of the last step of a backend."""
    return backend._pat.plans


def layer_support(backend: Any) -> Any:
    """Return which layers pat decodes in a backend."""
    return backend._pat.layer_support


def kinds(backend: Any) -> Any:
    """Return the steps that pat plans for a backend, by SGLang's mode."""
    return backend._pat.kinds


def draft_round(steps: Any) -> Any:
    """Return the kind of step of a draft model's container."""
    return steps._pat.round


def microbatch(owner: Any) -> Any:
    """Return the microbatch of the last step: its builder, and its eager and captured plans.

    owner: of this function and those below, a planner or its backend.
    """
    return _planner(owner)._microbatches.current


def reservation(owner: Any) -> Any:
    """Return what graphs are reserved for: arguments of PackAttention."""
    return _planner(owner)._microbatches._reservation


def num_repeated(owner: Any) -> int:
    """Count the steps that repeated the one before them."""
    count: int = _planner(owner)._skipped.stats().plans_reused
    return count


def reasons(owner: Any) -> Any:
    """Return the counter of why steps were planned."""
    return _planner(owner)._reasons


def attentions(plans: Any) -> Any:
    """Return the PackAttention of each shape of layers."""
    return plans._attentions


def check_steps(owner: Any) -> None:
    """Check each step of a planner, as SGLANG_PAT_DEBUG=1 does."""
    _planner(owner)._checks = DebugChecks(RankChecker(None))


def do_not_check_steps(owner: Any) -> None:
    """Let steps of a planner repeat, unchecked."""
    _planner(owner)._checks = None


def log_every(owner: Any, num_steps: int) -> None:
    """Let a planner log after that many steps."""
    _planner(owner)._reports._log._interval = num_steps


def forget_requests() -> None:
    """Forget the requests of the last steps, of the served model and of draft models."""
    REQUEST_TRACKER.last_reqs = []
    DRAFT_REQUESTS.last_reqs = []
