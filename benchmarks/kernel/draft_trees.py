"""The kernel that merges drafts with what a plan has read, by trees and branches of several sizes.

    python benchmarks/kernel draft-trees [--rounds N] [--json FILE]

Each contender is one of the kernel's two bodies: rows that read their keys one by one, or tiles of
rows and keys. The one that is chosen by itself is marked. Layers have tensors of their own. Alone:
a layer's kernel, with an L2 that holds none of them. Added: what it adds to a copy of the output,
which stands for the kernel before it, and leaves the output in the L2.

A tree of 64 drafts has 63 keys beside the root, which the plan reads. Some seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from common.metadata import gpu_state, metadata
from common.results import at_most, write
from common.suites import add_option
from common.terminal import console, table_of
from sglang_pat.bench import timing
from sglang_pat.sglang.speculative.tree_attention_kernel import is_tiled, merge_drafts

LAYERS = 8
QO_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
BODIES = {"rows": False, "tiles": True}
LARGEST = "64 requests, 64 rows, 64 keys"
LIMIT_US = 40.0  # of the largest tree, in a layer
CHOICE_LIMIT = 1.1  # the chosen body's time over the faster one's


class Shape(NamedTuple):
    """Groups of rows, of which each has keys of its own. A request's tree is a group."""

    groups: int
    rows: int
    keys: int

    @property
    def title(self) -> str:
        what = "branches" if self.rows == 1 else "requests"
        return f"{self.groups} {what}, {self.rows} rows, {self.keys} keys"

    @property
    def chosen(self) -> str:
        return "tiles" if is_tiled(self.rows, self.keys) else "rows"


SHAPES = (
    Shape(64, 64, 64),
    Shape(64, 32, 32),
    Shape(64, 16, 16),
    Shape(64, 8, 8),
    Shape(256, 1, 1),
    Shape(256, 1, 4),
)


class Layer:
    """Tensors of a layer."""

    def __init__(self, shape: Shape, masks: torch.Tensor, device: str) -> None:
        count, num_slots = shape.groups * shape.rows, shape.groups * shape.keys
        self.q, self.source = (
            torch.randn(count, QO_HEADS, HEAD_DIM, device=device).to(DTYPE) for _ in range(2)
        )
        self.out = self.source.clone()
        self.lse = torch.randn(count, QO_HEADS, device=device)
        self.caches = tuple(
            torch.randn(num_slots, KV_HEADS, HEAD_DIM, device=device).to(DTYPE) for _ in range(2)
        )
        self.slots = torch.arange(num_slots, device=device)
        self.biases = masks.log()

    def merge(self, *, tiled: bool) -> torch.Tensor:
        return merge_drafts(
            self.q,
            (self.caches[0], self.caches[1]),
            self.slots,
            self.biases,
            (self.out, self.lse),
            HEAD_DIM**-0.5,
            tiled=tiled,
        )


def masks_of(shape: Shape, device: str) -> torch.Tensor:
    """Trees: each draft reads a random half of those before it, and not the root."""
    if shape.rows == 1:
        return torch.ones(shape.groups, 1, shape.keys, device=device)
    masks = torch.rand(shape.groups, shape.rows, shape.keys, device=device) < 0.5
    masks = masks.tril() | torch.eye(shape.keys, dtype=torch.bool, device=device)
    masks[:, :, 0] = False
    return masks.float()


def largest_apart(layer: Layer) -> float:
    """Return the largest difference of the two bodies' outputs."""
    found = []
    for tiled in BODIES.values():
        layer.out.copy_(layer.source)
        found.append(layer.merge(tiled=tiled).float().clone())
    return float((found[0] - found[1]).abs().max())


def _alone(layers: Sequence[Layer], tiled: bool) -> None:
    for layer in layers:
        layer.merge(tiled=tiled)


def _behind_a_copy(layers: Sequence[Layer], tiled: bool | None) -> None:
    for layer in layers:
        layer.out.copy_(layer.source)
        if tiled is not None:
            layer.merge(tiled=tiled)


def measure(shape: Shape, rounds: int, device: str = "cuda") -> dict[str, Any]:
    """Microseconds of a layer, by body."""
    masks = masks_of(shape, device)
    layers = [Layer(shape, masks, device) for _ in range(LAYERS)]
    apart = largest_apart(layers[0])
    graphs = {
        f"{how} {name}": timing.capture(partial(run, layers, tiled)).replay
        for how, run in (("alone", _alone), ("behind", _behind_a_copy))
        for name, tiled in BODIES.items()
    }
    graphs["copy"] = timing.capture(partial(_behind_a_copy, layers, None)).replay
    times = timing.layer_us(graphs, LAYERS, rounds, dirty=False)["us"]
    return {
        "shape": shape.title,
        "chosen": shape.chosen,
        "alone_us": {name: times[f"alone {name}"] for name in BODIES},
        "added_us": {name: times[f"behind {name}"] - times["copy"] for name in BODIES},
        "largest_apart": apart,
    }


def gates(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the cases: by name, value, limit and whether it is met."""
    found = {}
    for case in cases:
        added, chosen = case["added_us"], case["chosen"]
        if case["shape"] == LARGEST:
            found[f"{LARGEST}: us in a layer"] = at_most(added[chosen], LIMIT_US)
        found[f"{case['shape']}: the chosen body's time over the faster one's"] = at_most(
            case["alone_us"][chosen] / min(case["alone_us"].values()), CHOICE_LIMIT
        )
        # Two steps of bfloat16 at 2 to 4, which random outputs reach.
        found[f"{case['shape']}: both bodies, apart"] = at_most(case["largest_apart"], 0.04)
    return found


def show(data: Mapping[str, Any]) -> None:
    table = table_of("us of a layer", ("shape", "body", "alone", "added"))
    for case in data["cases"]:
        for name in BODIES:
            mark = " *" if name == case["chosen"] else ""
            times = (f"{case[key][name]:.2f}" for key in ("alone_us", "added_us"))
            table.add_row(case["shape"], f"{name}{mark}", *times)
    console.print(table)
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.3f}, at most {gate['limit']:.3f}: {met}")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--rounds", default=30)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    data: dict[str, Any] = {"meta": metadata(), "layers": LAYERS, "cases": [], "gates": {}}
    data["gpu"] = {"before": gpu_state()}
    for shape in SHAPES:
        data["cases"].append(measure(shape, args.rounds))
        data["gates"] = gates(data["cases"])
        data["gpu"]["after"] = gpu_state()
        write(args.json, data)
    show(data)
    return 0 if all(gate["met"] for gate in data["gates"].values()) else 1
