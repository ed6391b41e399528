"""PlanStats: what has been counted over decode steps.

Beside the pipeline: `PackAttention` counts the steps that it plans, `RepeatedSteps` those that it
is not asked about; statistics and metrics read the sums (`step_counters.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sglang_pat.decode_plan import KvTokens
from sglang_pat.planning_times import PlanningTimes


@dataclass(slots=True)
class PlanStats:
    """Counters, summed over decode steps.

    plans_built counts by cause in `causes`: "first"; "batch_changed": another key, or another
    number of rows; "tail_growth": a request outgrew the length its tail was planned for, or became
    shorter than it was then. The kv_tokens_* fields are those of `KvTokens` at the lengths of each
    step. planning_ns has one time per step: from `DecodeBatch.begun_ns`, or the call of plan(), to
    its return; of a repeated step, until it was known to be one.
    """

    plans_built: int = 0
    plans_reused: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    kv_tokens_query_centric: int = 0
    kv_tokens_planned: int = 0
    kv_tokens_lower_bound: int = 0
    planning_ns: PlanningTimes = field(default_factory=PlanningTimes)

    def add_tokens(self, tokens: KvTokens) -> None:
        """The KV tokens of one step."""
        self.kv_tokens_query_centric += tokens.query_centric
        self.kv_tokens_planned += tokens.planned
        self.kv_tokens_lower_bound += tokens.lower_bound
