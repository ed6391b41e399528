"""Draws the picture of docs/index.md: the gain by shared prefixes, in SGLang and in the kernels.

The left part shows the time per output token in SGLang (`server compare`). The right part shows the
speed-up of attention over the fastest other kernel, by how often a KV token is shared (`kernel
attention`).

python benchmarks/plot gain benchmarks/results/h100/{compare-8b,kernels}.json docs/gain.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from kernel.request_forests import Forest
from sglang_pat.cli.arguments import input_file
from sglang_pat.output_file import output_file

SUITE = "pat-20"  # suite of the kernel benchmark
COLORS = {"pat": "#c0392b", "fa3": "#7f8c8d"}
LABELS = {"pat": "sglang-pat", "fa3": "FA3"}
CASES = {
    "96 x 1,024": "96 requests\nnothing shared",
    "256 x (32 x 1,024 shared) + 0": "256 requests\n32 x 1,024 tokens shared",
    "64 x (2,048 shared) + 128": "64 requests\n2,048 tokens shared",
    "256 x (1,024 shared) + 64": "256 requests\n1,024 tokens shared",
    "128 x (8,192 shared) + 256": "128 requests\n8,192 tokens shared",
    "64 x (32,768 shared) + 1,024": "64 requests\n32,768 tokens shared",
}
HEAD_STYLES = {(16, 8): "o", (32, 8): "s", (64, 8): "^", (32, 32): "D"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("serving", type=input_file, help="JSON of `server compare`")
    parser.add_argument("kernels", type=input_file, help="JSON of `kernel attention`")
    parser.add_argument("picture", type=output_file, help="PNG to write")


def run(args: argparse.Namespace) -> None:
    draw(json.loads(args.serving.read_text()), json.loads(args.kernels.read_text()), args.picture)


def draw(serving: dict[str, Any], kernels: dict[str, Any], picture: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), width_ratios=(5, 4))
    _draw_serving(left, [case for case in serving["cases"] if case["case"] in CASES])
    _draw_kernels(right, [case for case in kernels["cases"] if case["suite"] == SUITE])
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def sharing(tree_name: str) -> float:
    """Return a tree's KV tokens / its distinct KV tokens, which is 1 if nothing is shared.

    tree_name: numbers of nodes per level and of tokens per node, e.g. `1,10_4096,416`.
    """
    forest = Forest.of_tree(tree_name)
    return int(forest.seq_lens.sum()) / forest.num_tokens


def speedup(case: dict[str, Any]) -> float:
    """Return the time of the fastest other contender / the time of pat."""
    others = [us for name, us in case["us"].items() if name != "pat"]
    return float(min(others) / case["us"]["pat"])


def _draw_serving(axis: Axes, cases: list[dict[str, Any]]) -> None:
    cases = sorted(cases, key=lambda case: float(case["tpot_ms"]["fa3"] / case["tpot_ms"]["pat"]))
    height = 0.8 / len(LABELS)
    for offset, name in enumerate(LABELS):
        places = [index + (0.5 - offset) * height for index in range(len(cases))]
        times = [case["tpot_ms"][name] for case in cases]
        bars = axis.barh(places, times, height, label=LABELS[name], color=COLORS[name])
        axis.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
    titles = [CASES[case["case"]] for case in cases]
    axis.set_yticks(range(len(cases)), titles, fontsize=9)
    axis.set_xlabel("ms per output token (lower is better)")
    axis.set_title("In SGLang: Llama-3-8B shape, one H100", fontsize=11)
    axis.legend(fontsize=9, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_kernels(axis: Axes, cases: list[dict[str, Any]]) -> None:
    for (heads_q, heads_kv), marker in HEAD_STYLES.items():
        points = [
            (sharing(case["tree"]), speedup(case))
            for case in cases
            if (case["heads_q"], case["heads_kv"]) == (heads_q, heads_kv)
        ]
        label = f"{heads_q} query heads, {heads_kv} KV heads"
        axis.scatter(*zip(*points, strict=True), s=28, marker=marker, label=label, alpha=0.85)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log")
    ticks = (1, 2, 5, 10, 20, 50)
    axis.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests per KV token, on average (1x: nothing shared)")
    axis.set_ylabel("speed-up over the fastest other kernel")
    axis.set_title("Attention alone: 20 prefix trees, four head counts", fontsize=11)
    axis.legend(fontsize=9, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
