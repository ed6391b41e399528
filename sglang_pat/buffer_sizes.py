"""BufferSizes: how large the buffers are that plans are executed in.

Beside the scheduler, which writes a plan if it fits them (`decode_plan.py`); `cuda_executor.py`
allocates them.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_pat._scheduler import TILE_TABLE, PackScheduler, PlanCapacity

CAPACITY_FIELDS = (
    "num_tickets",
    "num_work_items",
    "num_item_requests",
    "num_gather_spans",
    "num_merges",
)


class BufferSizes(NamedTuple):
    """plan: entries of the plan's sections. num_partials: partial slots, of 4 * num_qo_heads *
    (head_dim + 1) bytes each. num_shared_slots: KV tokens of all shared ranges, 4 bytes each.
    """

    plan: PlanCapacity = PlanCapacity()
    num_partials: int = 0
    num_shared_slots: int = 0

    @classmethod
    def for_requests(
        cls, max_requests: int, num_shared_slots: int, num_workers: int, group_size: int
    ) -> BufferSizes:
        """Enough for paths of about five shared ranges per request. Cuts add at most a largest
        tile's requests for each worker (scheduler/kv_split.h).
        """
        cut_requests = num_workers * (TILE_TABLE[-1][0] // group_size)
        entries = 6 * max_requests + cut_requests
        return cls(
            plan=PlanCapacity(
                num_tickets=4 * max_requests + cut_requests,
                num_work_items=4 * max_requests + cut_requests,
                num_item_requests=entries,
                num_gather_spans=2 * max_requests,
                num_merges=max_requests,
            ),
            num_partials=entries,
            num_shared_slots=num_shared_slots,
        )

    @classmethod
    def needed_by(cls, scheduler: PackScheduler) -> BufferSizes:
        """What the scheduler's last plan needs."""
        return cls(
            scheduler.required_capacity(), scheduler.num_partials, scheduler.num_shared_slots
        )

    def grown(self, needed: BufferSizes) -> BufferSizes:
        """Sizes that are too small become twice what is needed: a growing batch then reallocates a
        logarithmic number of times.
        """
        sections = {
            name: _grown(getattr(self.plan, name), getattr(needed.plan, name))
            for name in CAPACITY_FIELDS
        }
        return BufferSizes(
            PlanCapacity(**sections),
            _grown(self.num_partials, needed.num_partials),
            _grown(self.num_shared_slots, needed.num_shared_slots),
        )

    def __str__(self) -> str:
        sections = [f"{getattr(self.plan, name)} {name[4:]}" for name in CAPACITY_FIELDS]
        others = (f"{self.num_partials} partials", f"{self.num_shared_slots} shared_slots")
        return ", ".join((*sections, *others))


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else 2 * needed
