"""RankChecker: in debug mode, that all ranks of a tensor-parallel group execute the same plan.

Beside the pipeline, called by the backend after each step is planned. Ranks do not tell each other
what they plan: each plans for itself, from the same requests and the same tree, and so they must
arrive at the same plan, byte by byte.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import torch.distributed as dist

from sglang_pat.decode_plan import DecodePlan


@dataclass(slots=True)
class RankChecker:
    """Compares plans within `group`, whose ranks all call `check` for every step.

    group: a process group for host data, None for a rank that is alone. checked: steps in which
    all plans were the same.
    """

    group: dist.ProcessGroup | None
    checked: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_sglang(cls) -> RankChecker:
        """For the ranks that share the requests of this one."""
        from sglang.srt.distributed.parallel_state import get_attn_tp_group

        group = get_attn_tp_group()
        return cls(group.cpu_group if group.world_size > 1 else None)

    def check(self, plan: DecodePlan) -> None:
        """RuntimeError, on every rank, if a rank has another plan. Waits for the other ranks."""
        if self.group is None:
            return
        digests: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(digests, digest(plan), group=self.group)
        if len(set(digests)) > 1:
            raise RuntimeError(f"ranks planned the step differently: plans by rank {digests}")
        self.checked["steps"] += 1


def digest(plan: DecodePlan) -> str:
    """Of all that the kernels read of the plan."""
    state = hashlib.blake2b(repr(plan.header).encode(), digest_size=8)
    for section in (
        plan.ticket_begin,
        plan.work_items,
        plan.item_requests,
        plan.gather_spans,
        plan.merges,
    ):
        state.update(section.tobytes())
    return state.hexdigest()
