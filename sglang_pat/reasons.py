"""The reasons why a step was planned, why a plan was built, and why a step shared nothing.

Counters, the log, metrics, documentation and tests use the values of `StepReason`.
"""

from __future__ import annotations

from enum import StrEnum


class StepReason(StrEnum):
    """A reason that is counted for a step, with its meaning."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> StepReason:
        """Make a member. If no `meaning` is given, it is the value itself."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning or value
        return member

    # For `steps_planned`: why a step was planned instead of repeating the last one, in the order in
    # which the reasons are checked.
    FIRST = "first", "no step of known requests was planned before"
    REQUESTS = "requests", "other requests, or they ran elsewhere in between"
    KIND = "kind", "a decode step follows a verify step, or the reverse"
    PLACE = "place", "the last plan lies in other buffers: of eager steps, of another microbatch"
    ROWS = "rows", "another graph runs, whose padding differs"
    # Reasons that were noted when the last step was planned, or since then.
    MOVED = "moved", "a prompt, a checkpoint or a retraction may have changed paths and rows"
    EAGER = "eager", "the step runs without a graph, or the last one did"
    PRIVATE = "private", "the last step could not share"
    CHECKED = "checked", "debug mode checks every step"
    GRAPH = "graph", "the captured graph does not write its rows itself"
    DUE = "due", "the log wants a line, or the plan is outgrown"
    # The reason that is checked last, by `StepType.repeat`.
    LENGTHS = "lengths", "a request has grown by more than the plan serves"

    # For `causes`: why a plan was built. The very first plan counts as `FIRST`.
    BATCH_CHANGED = "batch_changed", "other requests or paths, or another number of rows"
    TAIL_GROWTH = "tail_growth", "a request has outgrown the length that its tail was planned for"

    # For `steps_without_sharing`. One more reason, "no shared paths are known to ...", is not a
    # member because it names the prefix cache.
    NO_REQUESTS = "no requests are known (warm-up)"
    CUT = "the batch was cut into parts"
    OVERFLOW = "the plan does not fit into the buffers of the CUDA graphs"
