"""Draw `kernel attention`: time over floor by tree and contender, a panel per number of heads.

python benchmarks/plot kernels benchmarks/results/h100/kernels.json docs/kernels.png
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from sglang_pat.cli.arguments import input_file
from sglang_pat.output_file import output_file

LABELS = {
    "pat": "sglang-pat",
    "flashinfer": "FlashInfer",
    "fa3": "FA3",
    "cascade": "FlashInfer cascade",
    "xqa": "XQA",
}
COLORS = dict(zip(LABELS, ("#c0392b", "#7f8c8d", "#b3b6b7", "#5d6d7e", "#d6dbdf"), strict=True))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("result", type=input_file, help="JSON of `kernel attention`")
    parser.add_argument("picture", type=output_file, help="PNG to write")
    parser.add_argument("--suite", default="pat-20", help="default: %(default)s")


def run(args: argparse.Namespace) -> None:
    draw(json.loads(args.result.read_text()), args.suite, args.picture)


def draw(result: dict[str, Any], suite: str, picture: Path) -> None:
    cases = [case for case in result["cases"] if case["suite"] == suite]
    if not cases:
        raise SystemExit(f"the result has no cases of the suite {suite!r}")
    panels = _panels(cases)
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(13, 2.6 * len(panels)), sharex=True, squeeze=False
    )
    names = [name for name in LABELS if any(name in case["us"] for case in cases)]
    width = 0.8 / len(names)
    for axis, (title, shown) in zip(axes.flat, panels.items(), strict=True):
        for offset, name in enumerate(names):
            heights = [case["us"].get(name, math.nan) / case["floor_us"] for case in shown]
            places = [
                index + (offset - (len(names) - 1) / 2) * width for index in range(len(shown))
            ]
            axis.bar(places, heights, width, label=LABELS[name], color=COLORS[name])
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_ylim(0.8, 40)
        axis.set_ylabel("time / floor")
        axis.set_title(title, fontsize=10)
    axes[0, 0].legend(ncols=len(names), fontsize=9, loc="upper right")
    trees = [case["tree"] if len(panels) > 1 else case["name"] for case in shown]
    axes[-1, 0].set_xticks(range(len(trees)), trees, rotation=35, ha="right", fontsize=7)
    meta = result["meta"]
    figure.suptitle(
        f"Decode attention, {meta['gpu']}, {cases[0]['dtype']}, head_dim {cases[0]['head_dim']}: "
        "lower is better, 1 is the floor",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _panels(cases: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A panel for each number of heads if all have the same trees, else one."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        title = f"{case['heads_q']} query heads, {case['heads_kv']} KV heads"
        panels.setdefault(title, []).append(case)
    trees = [[case["tree"] for case in shown] for shown in panels.values()]
    return panels if all(names == trees[0] for names in trees) else {"all heads": cases}
