"""When it pays: time per output token of the best other kernel over pat's, by batch and shared KV.

    python benchmarks/kernel sharing [--json FILE]

All requests of a batch have contexts of one length; a part of it is a prefix that they share.
Attention of a layer is timed beside the other kernels of `kernel attention`, and the rest of a
step comes from the time model of `sglang-pat advise`. A minute. `plot sharing` draws the result;
`server compare` measures both in a server.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.metadata import gpu_state, known_gpu, metadata
from common.models import MODELS, ModelShape
from common.results import write
from common.suites import Refused, add_option
from common.terminal import console, table_of
from sglang_pat.cli.arguments import whole_number
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.models import GPUS, GpuModel

BATCHES = (1, 8, 32, 128)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.97)
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Cell:
    """share: of a request's context, the part that it has in common with all others."""

    batch: int
    share: float
    context: int

    @property
    def prefix(self) -> int:
        return round(self.share * self.context)

    @property
    def private(self) -> int:
        return self.context - self.prefix

    @property
    def tree(self) -> str:
        if not self.prefix:
            return f"{self.batch}_{self.context}"
        return f"1,{self.batch}_{self.prefix},{self.private}"


def cells(context: int) -> list[Cell]:
    """A batch of one shares nothing."""
    return [
        Cell(batch, share, context)
        for batch in BATCHES
        for share in SHARES
        if batch > 1 or share == 0
    ]


def by_kernels(model: ModelShape, context: int, gpu: GpuModel) -> list[dict[str, Any]]:
    """Attention measured, the rest of a step estimated."""
    from kernel.attention import compile_kernels, measure, pool_for
    from kernel.contenders import CONTENDERS
    from kernel.request_forests import Forest
    from kernel.workloads import Workload

    config = model.config
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    asked = cells(context)
    workloads = [Workload(Forest.of_tree(cell.tree), *heads) for cell in asked]
    compile_kernels(workloads, CONTENDERS)
    pool = pool_for(workloads)
    return [
        estimated(cell, model, gpu, measure(workload, pool, CONTENDERS, rounds=7))
        for cell, workload in zip(asked, workloads, strict=True)
    ]


def estimated(
    cell: Cell, model: ModelShape, gpu: GpuModel, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """A cell from the times of its attention, which `kernel attention` measured."""
    us = measured["us"]
    if "pat" not in us or len(us) == 1:
        raise RuntimeError(f"{cell}: {measured['failed']}")
    rest = 1000 * StepTime.of_model(model.config, gpu).without_attention(cell.batch)
    other = min(name for name in us if name != "pat" and us[name] == _best(us))
    layers = model.config["num_hidden_layers"]
    tpot = {name: rest + layers * us[name] / 1000 for name in ("pat", other)}
    return asdict(cell) | {
        "attention_us": dict(us),
        "failed": measured["failed"],
        "tpot_ms": {"pat": tpot["pat"], "other": tpot[other]},
        "other": other,
        "gain": tpot[other] / tpot["pat"],
    }


def _best(us: Mapping[str, float]) -> float:
    return min(value for name, value in us.items() if name != "pat")


def show(found: list[dict[str, Any]], by: str) -> None:
    """A row for each batch, a column for each share."""
    columns = ("requests", *(f"{share:.0%} shared" for share in SHARES))
    table = table_of(f"time per output token, other / pat, by {by}", columns)
    for batch in dict.fromkeys(cell["batch"] for cell in found):
        gains = {cell["share"]: cell["gain"] for cell in found if cell["batch"] == batch}
        table.add_row(str(batch), *(f"{gains[s]:.2f}" if s in gains else "" for s in SHARES))
    console.print(table)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    length = whole_number(1, 1 << 20)
    parser.add_argument("--context", type=length, default=CONTEXT, metavar="N", help="of a request")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    meta = metadata() | {
        "by": "kernels",
        "model": args.model,
        "context": args.context,
        "clocks": {"before": gpu_state()},
    }
    gpu = known_gpu(meta["gpu"])
    if gpu is None:
        raise Refused(f"the time model does not know {meta['gpu']}; it knows {', '.join(GPUS)}")
    found = by_kernels(MODELS[args.model], args.context, GPUS[gpu])
    meta["clocks"]["after"] = gpu_state()
    show(found, "kernels")
    write(args.json, {"meta": meta, "cells": found})
    return 0
