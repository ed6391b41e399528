"""Draw what pat gains, by the share of common KV and the batch, from a result of `kernel sharing`.

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


def draw(result: dict[str, Any], picture: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.2))
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
    axis.set_title(
        f"{meta['model']} shape, {meta['context']:,} tokens a request, {meta['gpu']}\n"
        "attention measured, the rest of a step modelled",
        fontsize=10,
    )
    axis.legend(fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)
