"""SGLANG_PAT_DEBUG=1 checks every decode step in the running engine.

StepChecker compares a step with SGLang's radix tree and request table, to find paths that were
wrongly kept and plans that were wrongly reused. It synchronises the device, so it is for tests and
for finding errors. RankChecker compares the plans of tensor-parallel ranks. With
SGLANG_PAT_DEBUG=ranks, only RankChecker runs, so that steps repeat plans as they do in production.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sglang_pat._scheduler import PLAN_SECTIONS, PrefixForest
from sglang_pat.attention import PackAttention
from sglang_pat.batch import IntArray
from sglang_pat.plan import DecodePlan
from sglang_pat.sglang.compat import RequestFields
from sglang_pat.sglang.tree.batch_builder import DecodeBatchBuilder
from sglang_pat.sglang.tree.radix_paths import PathReader, Request
from sglang_pat.stats import bound_of
from sglang_pat.window import WindowAttention

_WAIT_SECONDS = 600  # for other ranks to plan a step; one may compile kernels first


class DebugChecks:
    """All checks of a step, made after it has been planned."""

    def __init__(self) -> None:
        self._steps: dict[PackAttention, StepChecker] = defaultdict(StepChecker)
        # Per builder: the PackAttention that planned its last step, and the lengths in that step.
        self._before: dict[DecodeBatchBuilder, tuple[PackAttention, IntArray]] = {}

    def check_growth(
        self, attention: PackAttention, builder: DecodeBatchBuilder, *, would_repeat: bool
    ) -> None:
        """Raise RuntimeError if `would_repeat` is True and a request has not grown by one token.

        would_repeat: whether the step would repeat the last one if checks were off.
        """
        planner, lens = self._before.get(builder, (None, attention.seq_lens))
        self._before[builder] = attention, attention.seq_lens
        # Graphs of another size have another number of padding rows.
        if would_repeat and planner is attention and len(lens) == len(attention.seq_lens):
            check_growth(lens, attention.seq_lens)

    def check(
        self,
        made: Sequence[tuple[PackAttention, DecodePlan]],
        builder: DecodeBatchBuilder,
        request_lens: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Raise RuntimeError that names the request if a check fails.

        made: what `StepPlans.plan()` returned for `tensors`. builder: the builder that has just
        read the step. request_lens: the lengths of the step's requests, on the device.
        """
        shared = builder.last_shared
        if shared is not None:
            check_host_lengths(builder.lens, request_lens)
        for attention, _ in made:
            if shared is not None:
                plan_is_new = attention.step_kind != "unchanged"
                table, rows = tensors["req_to_token"], tensors["req_pool_indices"]
                self._steps[attention].check(*shared, table, rows, plan_is_new=plan_is_new)
            if isinstance(attention, WindowAttention):
                check_windows(attention, **tensors)


# A path as (node id, end) of each node. When a node is split, its lower part keeps id and end.
_Ends = list[tuple[int, int]]


class StepChecker:
    """Finds requests for which the plan of a step reads wrong KV."""

    def __init__(self) -> None:
        self._planned: list[torch.Tensor] | None = None  # the last step's shared slots

    def check(
        self,
        reader: PathReader,
        reqs: Sequence[Request],
        forest: PrefixForest,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        *,
        plan_is_new: bool,
    ) -> None:
        """Raise RuntimeError that names the request if the plan reads wrong KV for a request.

        reqs: the requests of the step that was just planned, in row order.
        """
        fields = RequestFields.on(reqs[0])
        rows = [fields.req_pool_idx(req) for req in reqs]
        if req_pool_indices[: len(rows)].tolist() != rows:
            raise RuntimeError(
                f"the batch has rows {req_pool_indices.tolist()}, its requests {rows}"
            )
        in_tree = [[(node[0], node[3]) for node in path] for path in reader.read(reqs)]
        _check_kept(reqs, forest, in_tree)
        slots = [
            # copy=True, because SGLang rewrites the table in place, and the table may be on the
            # CPU.
            req_to_token[row, : ends[-1][1] if ends else 0].to("cpu", torch.int64, copy=True)
            for row, ends in zip(rows, in_tree, strict=True)
        ]
        for req, row_slots in zip(reqs, slots, strict=True):
            if len(row_slots) and not torch.equal(row_slots, reader.shared_slots(req).cpu()):
                raise RuntimeError(
                    f"request {req.rid}: its row and the radix tree hold other KV slots"
                )
        if not plan_is_new and self._planned is not None:
            _check_reuse(reqs, self._planned, slots)
        self._planned = slots


def check_growth(before: IntArray, now: IntArray) -> None:
    """Raise RuntimeError unless each length, except the 0 of padding, has grown by one.

    A step that repeats the last one assumes this growth (`repeated_steps.py`).
    """
    if not np.array_equal(now, np.where(before > 0, before + 1, 0)):
        raise RuntimeError(
            f"the same requests had lengths {before.tolist()} in the last step and have "
            f"{now.tolist()} in this one"
        )


def check_host_lengths(on_host: IntArray, seq_lens: torch.Tensor) -> None:
    """Raise RuntimeError if a request is longer on the host than on the device.

    The plan would then share KV that has not been written. A request may be longer on the device,
    because kernels read the end of a row's tail there.
    """
    lens = seq_lens[: len(on_host)].cpu().numpy()
    wrong = np.flatnonzero(on_host > lens)
    if len(wrong):
        row = wrong[0]
        raise RuntimeError(f"request {row} has {lens[row]} tokens, and {on_host[row]} on the host")


def check_windows(
    attention: WindowAttention,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Raise RuntimeError unless each request's row reads each slot of the request's window once."""
    steps = zip(attention.slots(), req_pool_indices.tolist(), seq_lens.tolist(), strict=False)
    for request, (found, row, length) in enumerate(steps):
        slots = req_to_token[row, length - attention.attended(length) : length].long()
        if attention.slot_map is not None:
            slots = attention.slot_map[slots]
        if not torch.equal(found.long().sort().values, slots.cpu().long().sort().values):
            raise RuntimeError(f"request {request} does not read the slots of its window")


def _check_kept(reqs: Sequence[Request], forest: PrefixForest, in_tree: list[_Ends]) -> None:
    """Raise RuntimeError if the forest's paths differ from the tree's by more than node splits."""
    kept = [[(node_id, end) for node_id, _, end in path] for path in forest.paths()]
    if len(kept) != len(reqs):
        raise RuntimeError(f"the paths of {len(kept)} requests were kept for {len(reqs)}")
    for req, ours, theirs in zip(reqs, kept, in_tree, strict=True):
        if not set(ours) <= set(theirs) or ours[-1:] != theirs[-1:]:
            raise RuntimeError(
                f"request {req.rid}: its path was kept though it changed, from nodes and ends "
                f"{ours} to {theirs}"
            )


def _check_reuse(
    reqs: Sequence[Request], planned: list[torch.Tensor], now: list[torch.Tensor]
) -> None:
    if len(planned) != len(reqs):
        raise RuntimeError(f"a plan for {len(planned)} requests was reused for {len(reqs)}")
    for req, before, after in zip(reqs, planned, now, strict=True):
        if not torch.equal(before, after):
            raise RuntimeError(
                f"request {req.rid}: a plan was reused though its shared KV has moved"
            )


@dataclass(slots=True)
class RankChecker:
    """Compares the ranks of a group: their plans, and how long each rank took to plan.

    All ranks of the group call `check` for every step that they plan. The group is the checker's
    own, so that a rank that plans alone does not disturb SGLang's messages.
    """

    group: dist.ProcessGroup | None  # a CPU group; None: there are no other ranks
    checked: Counter[str] = field(default_factory=Counter)  # planned steps with equal plans
    # How much longer the slowest rank took for a step than the fastest: histograms over all timed
    # steps and over those of them that were planned, as in `PlanningTimes`.
    apart_ns: Counter[str] = field(default_factory=Counter)
    planned_apart_ns: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_sglang(cls) -> RankChecker:
        """Return a checker for the ranks that have the same requests as this rank."""
        from sglang.srt.distributed.parallel_state import get_attn_tp_group

        ranks = get_attn_tp_group().ranks
        return cls(own_group(ranks) if len(ranks) > 1 else None)

    def counters(self) -> dict[str, Counter[str]]:
        """Return the counters, by name."""
        return {
            "ranks_alike": self.checked,
            "ranks_apart_ns": self.apart_ns,
            "ranks_planned_apart_ns": self.planned_apart_ns,
        }

    def check(
        self, plans: Sequence[DecodePlan], repeated_ns: Sequence[int], planned_ns: int | None
    ) -> None:
        """Raise RuntimeError on all ranks if their plans differ. Waits for the other ranks.

        repeated_ns: the host times of the steps that repeated the last planned step. planned_ns:
        the host time of this step. None: a capture or a warm-up, whose time does not count.
        """
        if self.group is None:
            return
        found: list[Any] = [None] * dist.get_world_size(self.group)
        mine = [*map(digest, plans)], len(repeated_ns), [*repeated_ns, planned_ns]
        try:
            dist.all_gather_object(found, mine, group=self.group)
        except RuntimeError as error:
            raise RuntimeError("this rank planned a step that another rank did not plan") from error
        digests, repeats, times = zip(*found, strict=True)
        if any(each != digests[0] for each in digests):
            raise RuntimeError(f"ranks planned the step differently: plans by rank {[*digests]}")
        if any(each != repeats[0] for each in repeats):
            raise RuntimeError(f"ranks repeated the last plan differently: steps {[*repeats]}")
        self.checked["steps"] += 1
        *before, now = ([*step] for step in zip(*times, strict=True))
        if None not in now:
            self.planned_apart_ns[_apart(now)] += 1
            before.append(now)
        self.apart_ns.update(map(_apart, before))


def own_group(ranks: Sequence[int], seconds: float = _WAIT_SECONDS) -> dist.ProcessGroup:
    """Return a new CPU group. All of these ranks, and no others, call this together.

    seconds: how long a rank waits for the others.
    """
    wait = timedelta(seconds=seconds)
    group: Any = dist.new_group(
        [*ranks], timeout=wait, backend="gloo", use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)  # it is a number for processes outside
    return group


def _apart(times_ns: Sequence[int]) -> str:
    """Return the bound of the ranks' difference, as a key of JSON."""
    return str(bound_of(max(times_ns) - min(times_ns)))


def digest(plan: DecodePlan) -> str:
    """Return a digest of everything that kernels read of a plan."""
    state = hashlib.blake2b(repr(plan.header).encode(), digest_size=8)
    for name, *_ in PLAN_SECTIONS:
        state.update(getattr(plan, name).tobytes())
    return state.hexdigest()
