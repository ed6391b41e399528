"""The result of a replay: one JSON document, here as types, and its steps as CSV.

Last stage of the simulation. The tables, the HTML report and comparisons read it. All counts are
exact sums over every decode step, whatever was sampled for `steps`. KV tokens are those of one KV
head of one layer. Bytes are those of one GPU: all its KV heads and layers, K and V.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

# Keys, at any depth, whose values are measured times: two replays of a trace are equal without.
TIMING_KEYS = frozenset({"planning_us", "seconds", "steps_per_second", "gpu"})

# Keys of histograms are decimal numbers. Rows per pack and times are binned by powers of two; the
# key is the lower end of the bin.
Histogram = dict[str, int]


class KvTokenCounts(TypedDict):
    """KV tokens read. policies: by the name of the packing policy, those that were replayed."""

    query_centric: int
    lower_bound: int
    policies: dict[str, int]


class PartialBytes(TypedDict):
    written: int
    read: int


class Balance(TypedDict):
    """How evenly the work of a step is spread over the workers, by the cost model.

    tail: longest worker over the mean of all, 1 is perfect. mean and max over the plans built.
    """

    tail_mean: float
    tail_max: float


class Quantiles(TypedDict):
    """Of simulated durations, in seconds. Quantiles are exact to 2%."""

    mean: float
    p50: float
    p99: float


class Latency(TypedDict):
    """What the requests of the simulated server waited for.

    Its decode steps take as long as query-centric attention does. queue_s: from arrival to
    admission. ttft_s: to the first token. tpot_s: between two tokens of a request, retractions
    included. service_s: from admission to the last token. overloaded: requests wait longer than
    they are served, in the mean.
    """

    queue_s: Quantiles
    ttft_s: Quantiles
    tpot_s: Quantiles
    service_s: Quantiles
    overloaded: bool


class PlanCounts(TypedDict):
    """built: by cause, "first", "batch_changed", "tail_growth"."""

    built: dict[str, int]
    reused: int


class PlanningTime(TypedDict):
    """Microseconds of host time, paths included: of a plan built, and of one reused."""

    p50: float
    p99: float
    reused_p50: float
    histogram: Histogram  # built plans, by microseconds, binned by powers of two


class PolicyTotals(TypedDict):
    """What one policy's plans look like, summed over all decode steps (histograms: plans built)."""

    packs: int
    work_items: int
    split_pieces: int  # work items beyond one per tile
    partials: int
    rows_per_pack: Histogram  # query rows: requests times the group size
    tiles: Histogram  # by block_q
    balance: Balance


class PolicyComparison(TypedDict):
    """The bytes of "memory" against those of another policy, plan by plan.

    plans: compared. more: in how many "memory" moves more bytes. more_before_split: the same with
    the partials that there would be if no tile were cut; a cut serves balance, not bytes.
    worst_ratio: "memory" over the other, at most over all plans.
    """

    plans: int
    more: int
    more_before_split: int
    worst_ratio: float
    worst_ratio_before_split: float


class Totals(TypedDict):
    steps: int
    requests: int  # finished
    retracted: int
    refused: int
    refused_by: NotRequired[dict[str, int]]  # "context" of the model, "pool" of KV: the limit
    truncated: NotRequired[int]  # requests whose answer was cut at one of these limits
    decode_tokens: int
    prompt_tokens: int
    simulated_seconds: float
    batch_mean: float
    prefix_hit_rate: float  # prompt tokens found in the tree over all prompt tokens
    latency: NotRequired[Latency]
    step_ms: NotRequired[dict[str, float]]  # estimated mean decode step, keys as in `bytes`
    kv_tokens: KvTokenCounts
    partial_bytes: dict[str, PartialBytes]
    bytes: dict[str, int]  # by policy and "query_centric", partials included; "lower_bound": KV
    policies: dict[str, PolicyTotals]
    comparisons: dict[str, PolicyComparison]  # of "memory" with each other policy
    mutations: dict[str, int]  # of the tree, by kind
    plans: PlanCounts
    planning_us: PlanningTime
    gpu: NotRequired[dict[str, dict[str, float]]]  # by contender: attention_ms, tpot_ms


class StepRow(TypedDict):
    """One sampled decode step."""

    step: int
    time: float  # simulated seconds
    batch: int
    held_tokens: int  # KV tokens in the pool, those kept for later requests included
    kv_tokens: KvTokenCounts
    partial_bytes: dict[str, PartialBytes]
    bytes: dict[str, int]
    packs: dict[str, int]
    cause: str  # why a plan was built, "reused" if none was
    planning_us: float
    gpu: NotRequired[dict[str, float]]  # milliseconds of one layer, by contender


class ForestNode(TypedDict):
    """A node of the prefix forest of one step: KV positions [begin, end), held by requests.

    parent: id of the node above, -1 for none. holders: requests of the batch below it.
    """

    id: int
    parent: int
    begin: int
    end: int
    holders: int


class Forest(TypedDict):
    """The step with the most holders of shared KV, or the one that was asked for."""

    step: int
    batch: int
    nodes: list[ForestNode]


class TraceCounts(TypedDict):
    name: str
    format: str
    requests: int
    malformed: int
    errors: list[str]  # the first few malformed lines
    failed: int  # requests that the trace records as failed, left out
    estimated: NotRequired[int]  # requests whose prompt is text: 4 bytes count as a token
    input_tokens: int
    output_tokens: int


class Result(TypedDict):
    """A whole replay. config: every option in force. capacity: of `capacity.py`, {} if not asked.

    meta: versions, "interrupted", "seconds" and "steps_per_second".
    """

    meta: dict[str, Any]
    trace: TraceCounts
    config: dict[str, Any]
    totals: Totals
    steps: list[StepRow]
    capacity: dict[str, Any]
    forest: Forest | None


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are no objects themselves, in order; keys are joined with a dot.

    `{"kv_tokens": {"policies": {"memory": 7}}}` gives `("kv_tokens.policies.memory", 7)`.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# The columns of a file without steps; nested objects of a step follow these, named by their keys.
PLAIN_COLUMNS = ("step", "time", "batch", "held_tokens", "cause", "planning_us")


def write_csv(steps: Sequence[StepRow], path: Path) -> None:
    """Write one row per step, UTF-8, with a header.

    Columns of nested values join their keys with a dot: `kv_tokens.policies.memory`. A value that a
    step does not have, of a policy say, is empty. Raises OSError where the file cannot be written.
    """
    rows = [dict(flatten(step)) for step in steps]
    nested = dict.fromkeys(name for row in rows for name in row if name not in PLAIN_COLUMNS)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*PLAIN_COLUMNS, *nested], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
