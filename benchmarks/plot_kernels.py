"""Draw the result of bench_kernels.py: time over floor per tree and contender, a panel per heads.

python benchmarks/plot_kernels.py benchmarks/results/h100/kernels.json docs/kernels.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"pat": "#c0392b", "flashinfer": "#7f8c8d", "fa3": "#b3b6b7", "cascade": "#d6dbdf"}
LABELS = {
    "pat": "sglang-pat",
    "flashinfer": "FlashInfer",
    "fa3": "FA3",
    "cascade": "FlashInfer cascade",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path, help="JSON of bench_kernels.py")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    heads = list(dict.fromkeys((case["heads_q"], case["heads_kv"]) for case in result["cases"]))
    trees = list(dict.fromkeys(case["tree"] for case in result["cases"]))

    figure, axes = plt.subplots(len(heads), 1, figsize=(13, 2.6 * len(heads)), sharex=True)
    width = 0.8 / len(LABELS)
    for axis, (heads_q, heads_kv) in zip(axes, heads, strict=True):
        cases = {
            case["tree"]: case
            for case in result["cases"]
            if (case["heads_q"], case["heads_kv"]) == (heads_q, heads_kv)
        }
        for offset, name in enumerate(LABELS):
            heights = [cases[tree]["us"][name] / cases[tree]["floor_us"] for tree in trees]
            places = [index + (offset - 1.5) * width for index in range(len(trees))]
            axis.bar(places, heights, width, label=LABELS[name], color=COLORS[name])
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_ylim(0.8, 40)
        axis.set_ylabel("time / floor")
        axis.set_title(f"{heads_q} query heads, {heads_kv} KV heads", fontsize=10)
    axes[0].legend(ncols=len(LABELS), fontsize=9, loc="upper right")
    axes[-1].set_xticks(range(len(trees)), trees, rotation=35, ha="right", fontsize=7)
    meta = result["meta"]
    figure.suptitle(
        f"Decode attention, {meta['gpu']}, float16, head_dim 128: lower is better, 1 is the floor",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
