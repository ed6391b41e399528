"""Tracks the requests of verify steps and of a draft model's steps.

SGLang makes the batches of most draft models from the scheduler's batch. `watch_draft_batches()`
makes the request tracker note these batches, and those of verify steps. For draft models that draft
blocks, SGLang makes batches in another way, so `block_hook()` notes their requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat._scheduler import same_objects
from sglang_pat.sglang.start.hooks import AROUND, Hook, install_hooks
from sglang_pat.sglang.tree.radix_paths import Request
from sglang_pat.sglang.tree.request_tracker import (
    REQUEST_TRACKER,
    StepRequests,
    note_requests,
    requests_of,
)


class DraftRequests:
    """The requests for which SGLang's draft model currently drafts in this process."""

    def __init__(self) -> None:
        # The last batch's requests. If the next batch has the same requests, it gets this list.
        self.last_reqs: list[Request] = []
        self._blocks: StepRequests | None = None  # set while a draft model drafts blocks

    def on_draft_batch(self, forward_batch: Any, batch: Any) -> None:
        """Note the requests of `forward_batch`, which SGLang made from `batch` for drafting."""
        if not batch.reqs:
            return
        mode = forward_batch.forward_mode
        if mode.is_decode():
            note_requests(forward_batch, self._step(batch))
        elif mode.is_draft_extend_v2() and same_objects(REQUEST_TRACKER.last_reqs, batch.reqs):
            # The requests are noted on spec_info, because a replay gets another batch with the same
            # spec_info.
            step = StepRequests(REQUEST_TRACKER.last_reqs, batch.tree_cache, has_beams=False)
            note_requests(forward_batch.spec_info, step)

    def _step(self, batch: Any) -> StepRequests:
        if not same_objects(self.last_reqs, batch.reqs):
            self.last_reqs = list(batch.reqs)
        return StepRequests(self.last_reqs, batch.tree_cache, has_beams=False)

    def on_block_draft(self, batch: Any | None) -> None:
        """Note that a draft model begins to draft blocks for the scheduler's `batch`.

        batch: None if the draft model is done. The draft model's own batch does not tell the
        requests, because SGLang does not make it from the scheduler's batch.
        """
        is_known = batch is not None and batch.reqs
        self._blocks = self._step(batch) if is_known else None

    def of_blocks(self, forward_batch: Any) -> StepRequests | None:
        """Return the requests for which a draft model currently drafts blocks."""
        return self._blocks


DRAFT_REQUESTS = DraftRequests()


def step_of_extend(forward_batch: Any) -> StepRequests | None:
    """Return the requests of draft extend, or None if they were not in the last verify step."""
    return requests_of(forward_batch.spec_info)


def watch_draft_batches() -> None:
    """Make the request tracker note verify steps and batches of draft models."""
    REQUEST_TRACKER.modes.add(ForwardMode.TARGET_VERIFY)
    REQUEST_TRACKER.on_draft_batch = DRAFT_REQUESTS.on_draft_batch
    install_hooks(VERIFY_HOOKS)


def _around_load_batch(
    original: Callable[..., Any], graphs: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook AROUND DecodeCudaGraphRunner.load_batch, which SGLang may call before a step runs."""
    if graphs.model_runner.is_draft_worker or REQUEST_TRACKER.is_within_step:
        return original(graphs, forward_batch, *args, **kwargs)
    with REQUEST_TRACKER.running(forward_batch):
        return original(graphs, forward_batch, *args, **kwargs)


def _around_blocks(
    original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook AROUND forward_batch_generation of a worker that drafts and verifies blocks."""
    DRAFT_REQUESTS.on_block_draft(batch)
    try:
        return original(worker, batch, *args, **kwargs)
    finally:
        DRAFT_REQUESTS.on_block_draft(None)


# The class that runs the target model's graphs, in which drafts are verified.
_GRAPHS = "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
VERIFY_HOOKS = (Hook(f"{_GRAPHS}.load_batch", _around_load_batch, AROUND),)
# Workers of speculative decoding whose draft models draft blocks.
BLOCK_WORKERS = {
    "DFLASH": "speculative.dflash_worker_v2:DFlashWorkerV2",
    "DSPARK": "speculative.dspark_components.dspark_worker_v2:DSparkWorkerV2",
}


def block_hook(worker: str) -> Hook:
    """Return the hook that notes the requests of a worker, a value of `BLOCK_WORKERS`."""
    return Hook(f"{worker}.forward_batch_generation", _around_blocks, AROUND)
