"""Why a step was planned, why it built a plan, and why it shared nothing.

Counters, the log, metrics, documentation and tests use the values of `StepReason`.
"""

from __future__ import annotations

from enum import StrEnum


class StepReason(StrEnum):
    """A reason that is counted for a step, with its meaning."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> StepReason:
        """Make a member. Without a meaning, the value says it all."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning or value
        return member

    # `steps_planned`: why a step was planned and did not repeat the last step, in order of checks.
    FIRST = "first", "no step of known requests was planned before"
    REQUESTS = "requests", "other requests, or they ran elsewhere in between"
    KIND = "kind", "a decode step follows a verify step, or the reverse"
    PLACE = "place", "the last plan lies in other buffers: of eager steps, of another microbatch"
    ROWS = "rows", "another graph runs, whose padding differs"
    # These were noted when the last step was planned, or after it.
    MOVED = "moved", "a prompt, a checkpoint or a retraction may have changed paths and rows"
    EAGER = "eager", "the step runs without a graph, or the last one did"
    PRIVATE = "private", "the last step could not share"
    CHECKED = "checked", "debug mode checks every step"
    GRAPH = "graph", "the captured graph does not write its rows itself"
    DUE = "due", "the log wants a line, or the plan is outgrown"
    # Checked last, by `StepType.repeat`.
    LENGTHS = "lengths", "a request has grown by more than the plan serves"

    # `causes`: a plan was built. The very first plan counts as `FIRST`.
    BATCH_CHANGED = "batch_changed", "other requests or paths, or another number of rows"
    TAIL_GROWTH = "tail_growth", "a request has outgrown the length that its tail was planned for"

    # `steps_without_sharing`. The reason "no shared paths are known to ..." is no member: it names
    # the prefix cache.
    NO_REQUESTS = "no requests are known (warm-up)"
    CUT = "the batch was cut into parts"
    OVERFLOW = "the plan does not fit into the buffers of the CUDA graphs"
