"""What a replay says: one JSON document, here as types.

Last stage of the simulation; the table, the CSV, the HTML report and comparisons read it. All
counts are exact sums over every decode step, whatever was sampled for `steps`. KV tokens are those
of one KV head of one layer (as in `KvTokens`); bytes are those of the whole model: all KV heads and
layers, K and V.
"""

from __future__ import annotations

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


class PlanCounts(TypedDict):
    """built: by cause, "first", "batch_changed", "tail_growth"."""

    built: dict[str, int]
    reused: int


class PlanningTime(TypedDict):
    """Microseconds of planning, in total and per plan built (a "built" step) or reused."""

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
    refused: int  # would never fit the pool or the context
    decode_tokens: int
    prompt_tokens: int
    simulated_seconds: float
    batch_mean: float
    prefix_hit_rate: float  # prompt tokens found in the tree over all prompt tokens
    kv_tokens: KvTokenCounts
    partial_bytes: dict[str, PartialBytes]
    bytes: dict[str, int]  # by policy, partials included; "query_centric", "lower_bound": KV only
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
