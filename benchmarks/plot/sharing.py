"""Draw what pat gains, by the share of common KV and the batch.

The result is of `kernel sharing`, or of `server compare --scenarios sharing`.

python benchmarks/plot sharing benchmarks/results/h100/sharing.json docs/sharing.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from sglang_pat.cli.arguments import input_file
from sglang_pat.output_file import output_file


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("result", type=input_file, help="JSON of the suite")
    parser.add_argument("picture", type=output_file, help="PNG to write")


def run(args: argparse.Namespace) -> None:
    draw(json.loads(args.result.read_text()), args.picture)


def of_servers(result: dict[str, Any]) -> dict[str, Any]:
    """The cells of a result of `server compare`."""
    cases = [case for case in result["cases"] if case["scenario"] == "sharing"]
    context = cases[0]["prefix"] + cases[0]["private"]
    cells = [
        {
            "batch": case["batch"],
            "share": case["prefix"] / context,
            "gain": next(iter(case["over_pat"].values()))["median"],
        }
        for case in cases
    ]
    about = {"by": "server", "model": cases[0]["model"], "context": context}
    return {"meta": result["meta"] | about, "cells": cells}


def draw(result: dict[str, Any], picture: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.2))
    if "scenarios" in result:
        result = of_servers(result)
    cells, meta = result["cells"], result["meta"]
    for batch in dict.fromkeys(cell["batch"] for cell in cells):
        points = sorted((cell["share"], cell["gain"]) for cell in cells if cell["batch"] == batch)
        if len(points) == 1:  # one request shares nothing: no line
            continue
        axis.plot(*zip(*points, strict=True), marker="o", label=f"{batch} requests")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1))
    axis.set_xlabel("of a request's context, shared with all others")
    axis.set_ylabel("time per output token, other / pat")
    how = "measured in SGLang's server"
    if meta["by"] == "kernels":
        how = "attention measured, the rest of a step modelled"
    axis.set_title(
        f"{meta['model']} shape, {meta['context']:,} tokens a request, {meta['gpu']}\n{how}",
        fontsize=10,
    )
    axis.legend(fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)
