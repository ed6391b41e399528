"""Computes how much KV a batch reads, with pat's plan and with query-centric attention.

A batch's repeated tokens are the KV tokens of its requests minus the distinct tokens. All results
but `PlanReads.partials` are fractions of the repeated tokens. Such a fraction stays valid while the
requests grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sglang_pat._scheduler import PackScheduler
from sglang_pat.batch import PrefixPaths
from sglang_pat.model_layers import LATENT
from sglang_pat.plan import new_scheduler, shipped_latent_costs
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.server import Batch
from sglang_pat.workload.tree import Tree

_L2_SHARE = 0.5  # each half of the cache keeps its own copy of what all SMs read


class PlanReads(NamedTuple):
    """Reads of one plan.

    again: the fraction of the repeated tokens that are still read if attention follows the plan.
    partials: the plan's partials per request, if each request has one query row.
    """

    again: float = 0.0
    partials: float = 0.0


class Ratios(NamedTuple):
    """Says how a batch reads its repeated tokens, as fractions of their number.

    Attributes
    ----------
    from_memory
        The fraction that query-centric attention reads from memory instead of the L2 cache.
    plans
        The reads of a plan, by the packing policy that made it.
    """

    from_memory: float
    plans: dict[str, PlanReads]


@dataclass(slots=True)
class Planner:
    """Plans batches of one model on one GPU.

    Attributes
    ----------
    stride
        Every `stride`-th batch is planned. Until the next plan, batches are assumed to have the
        same fractions.
    """

    time: StepTime
    policies: Sequence[str] = ("memory",)
    stride: int = 1
    ratios: Ratios = field(init=False)
    _changes: int = 0
    _schedulers: dict[str, PackScheduler] = field(init=False)
    _cached_tokens: float = field(init=False)

    def __post_init__(self) -> None:
        time = self.time
        accelerated = [layer for layer in time.layers if layer.is_accelerated]
        accelerated.sort(key=lambda layer: layer.window is not None)  # layers with windows last
        attended = accelerated or [layer for layer in time.layers if layer.num_kv_heads]
        self._schedulers = {}
        self._cached_tokens = math.inf
        self.ratios = Ratios(0.0, dict.fromkeys(self.policies, PlanReads()))
        if attended:
            token_bytes = attended[0].kv_elements / attended[0].num_kv_heads * time.kv_bytes
            self._cached_tokens = time.gpu.l2_bytes * _L2_SHARE / token_bytes
        if accelerated:
            layer = accelerated[0]
            is_latent = layer.kind == LATENT
            heads, workers = layer.num_qo_heads, time.gpu.workers(time.kv_heads(layer))
            if is_latent:  # all GPUs have the one KV head; an SM runs one CTA
                heads, workers = heads // time.group, time.gpu.num_sms
            self._schedulers = {
                policy: new_scheduler(
                    group_size=max(1, heads // layer.num_kv_heads),
                    num_workers=workers,
                    policy=policy,
                    latent=is_latent,
                    one_byte=time.kv_bytes < 2,
                    cost=shipped_latent_costs(time.gpu.name) if is_latent else None,
                )
                for policy in self.policies
            }

    def begin(self, batch: Batch, tree: Tree) -> None:
        """Begin the steps of another batch. Set `ratios` if it is a `stride`-th batch."""
        self._changes += 1
        if (self._changes - 1) % self.stride:
            return
        paths = tree.paths(batch.requests)
        again = _tokens_read_again(paths)
        if not again:
            self.ratios = Ratios(0.0, dict.fromkeys(self.policies, PlanReads()))
            return
        plans = {}
        for policy in self.policies:
            scheduler = self._schedulers.get(policy)
            if scheduler is None:
                plans[policy] = PlanReads(again=1.0)
                continue
            scheduler.plan(
                paths.path_begin, paths.node_id, paths.kv_begin, paths.kv_end, batch.lengths
            )
            _, planned, distinct = scheduler.kv_tokens
            partials = scheduler.num_partials / len(batch.lengths)
            plans[policy] = PlanReads((planned - distinct) / again, partials)
        self.ratios = Ratios(self._from_memory(paths) / again, plans)

    def _from_memory(self, paths: PrefixPaths) -> float:
        """Return how many of the repeated tokens a query-centric kernel reads from memory.

        Neighbours in the batch read a shared node at the same time, so the second one finds the
        node in the L2 cache. Other requests find only as much of the shared nodes as fits into the
        cache.
        """
        lengths = paths.kv_end - paths.kv_begin
        _, first, holders = np.unique(paths.node_id, return_index=True, return_counts=True)
        shared = int(lengths[first[holders > 1]].sum())
        again = int(lengths.sum() - lengths[first].sum())
        missed = max(0.0, 1 - self._cached_tokens / max(shared, 1))
        return missed * (again - _tokens_of_neighbours(paths)) if missed else 0.0


def _tokens_read_again(paths: PrefixPaths) -> int:
    lengths = paths.kv_end - paths.kv_begin
    _, first = np.unique(paths.node_id, return_index=True)
    return int(lengths.sum() - lengths[first].sum())


def _tokens_of_neighbours(paths: PrefixPaths) -> int:
    """Return the total number of tokens that requests share with the request before them."""
    ids, ends = paths.node_id.tolist(), paths.kv_end.tolist()
    bounds = paths.path_begin.tolist()
    found = 0
    for begin, middle, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
        common = 0
        for index in range(min(middle - begin, end - middle)):
            if ids[begin + index] != ids[middle + index]:
                break
            common = ends[middle + index]
        found += common
    return found
