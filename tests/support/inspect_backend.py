"""Gives tests access to the private state and hooks of pat's backends, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat.sglang.report import layer_report
from sglang_pat.sglang.speculative import attach, draft_requests
from sglang_pat.sglang.speculative.draft_requests import DRAFT_REQUESTS
from sglang_pat.sglang.step.debug_checks import DebugChecks
from sglang_pat.sglang.tree import request_tracker
from sglang_pat.sglang.tree.request_tracker import REQUEST_TRACKER, StepRequests


def planner(backend: Any) -> Any:
    """Return the planner of a backend, or of the container of a draft model's steps."""
    return backend._pat.planner


def _planner(owner: Any) -> Any:
    return owner._pat.planner if hasattr(owner, "_pat") else owner


def plans(backend: Any) -> Any:
    """Return the plans of the last step of a backend."""
    return backend._pat.plans


def layer_support(backend: Any) -> Any:
    """Return the LayerSupport of a backend."""
    return backend._pat.layer_support


def step_types(backend: Any) -> Any:
    """Return the types of steps that pat plans for a backend, by SGLang's forward mode."""
    return backend._pat.step_types


def draft_round(steps: Any) -> Any:
    """Return the type of step of a draft model's container."""
    return steps._pat.round


def microbatch(owner: Any) -> Any:
    """Return the microbatch of the last step: its builder, and its eager and captured plans.

    owner (here and below): a planner or its backend.
    """
    return _planner(owner)._microbatches.current


def reservation(owner: Any) -> Any:
    """Return the reservation for graphs, as arguments of PackAttention."""
    return _planner(owner)._microbatches._reservation


def num_repeated(owner: Any) -> int:
    """Return the number of steps that reused the plan of the step before."""
    count: int = _planner(owner)._repeated.stats().plans_reused
    return count


def reasons(owner: Any) -> Any:
    """Return the counts of the reasons for planning."""
    return _planner(owner)._reasons


def attentions(plans: Any) -> Any:
    """Return the PackAttention of each shape of layers."""
    return [*plans.of_kind.values()]


def plan_of(plans: Any) -> Any:
    """Return the plan of the only shape of layers."""
    (attention,) = attentions(plans)
    return attention._plan


def rerun(plans: Any) -> None:
    """Repeat the reads that a graph's kernels do in each replay."""
    for attention in attentions(plans):
        attention._executor.reuse_plan(attention._executor._step)


def paths(owner: Any) -> Any:
    """Return the paths of the last step's rows."""
    return microbatch(owner).builder._forest.paths()


def round_lengths(steps: Any) -> Any:
    """Return the lengths that captured graphs of a draft model's round read: `[steps, rows]`."""
    return draft_round(steps).device_rows._reserved


def check_steps(owner: Any) -> None:
    """Check each step of a planner, as SGLANG_PAT_DEBUG=1 does."""
    _planner(owner)._checks = DebugChecks()


def log_every(owner: Any, num_steps: int) -> None:
    """Let a planner log after that many steps."""
    _planner(owner)._reports._log._interval = num_steps


def forget_requests() -> None:
    """Forget the last steps and their requests, of the served model and of draft models."""
    REQUEST_TRACKER._step = None
    REQUEST_TRACKER.last_reqs = []
    DRAFT_REQUESTS.last_reqs = []
    attach._TargetModel.planner = None


def awaits_draft_model() -> Any:
    """Return the planner of the served model whose draft model SGLang builds next, if any."""
    return attach._TargetModel.planner


# --- the hooks, as SGLang calls them ---


def batch_made(batch: Any, scheduled: Any, model_runner: Any) -> None:
    """Call the hook after SGLang has made the forward batch of a scheduled batch."""
    request_tracker._after_init_new(batch, object, scheduled, model_runner)


def run_forward(call: Callable[..., Any], model_runner: Any, batch: Any) -> Any:
    """Call the hook around a model's forward: `call(model_runner, batch)`."""
    return request_tracker._around_forward(call, model_runner, batch)


def load_batch(call: Callable[..., Any], graphs: Any, batch: Any) -> Any:
    """Call the hook around the graph runner's loading of a batch: `call(graphs, batch)`."""
    return draft_requests._around_load_batch(call, graphs, batch)


def draft_blocks(call: Callable[..., Any], worker: Any, scheduled: Any) -> Any:
    """Call the hook around the drafting of blocks: `call(worker, scheduled)`."""
    return draft_requests._around_blocks(call, worker, scheduled)


def retract(req: Any) -> None:
    """Call the hook on a request's retraction."""
    request_tracker._after_retraction(None, req)


def running_step() -> StepRequests | None:
    """Return the step that SGLang runs."""
    return REQUEST_TRACKER._step


def server_info() -> dict[str, Any]:
    """Return what `/server_info` says of pat's layers."""
    told: dict[str, Any] = layer_report._after_get_init_info({})["pat"]
    return told
