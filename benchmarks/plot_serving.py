"""Draw the result of bench_serving.py, a row per model.

Left, time per output token of each case with its floor; right, what SGLang's client measured at
rising request rates.

python benchmarks/plot_serving.py benchmarks/results/h100/serving.json docs/serving.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from sglang_pat.cli.arguments import Parser, input_file
from sglang_pat.output_file import output_file

# What is not named here is drawn in the order and the grey that are left.
COLORS = {"pat": "#c0392b", "fa3": "#7f8c8d", "flashinfer": "#a9b0b3", "triton": "#c9cfd3"}
LABELS = {"pat": "sglang-pat", "fa3": "FA3", "flashinfer": "FlashInfer", "triton": "Triton"}
OTHER_COLOR = "#e8c3be"
MARKERS = "os^Dv"


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=input_file, help="JSON of bench_serving.py")
    parser.add_argument("picture", type=output_file, help="PNG to write")
    args = parser.parse_args()
    draw(json.loads(args.result.read_text()), args.picture)


def draw(result: dict[str, Any], picture: Path) -> None:
    """ValueError if there is nothing to draw."""
    models = dict.fromkeys(entry["model"] for entry in (*result["cases"], *result["serving"]))
    if not models:
        raise ValueError("neither cases nor serving in this result: nothing to draw")
    columns = 2 if result["serving"] else 1
    figure, rows = plt.subplots(
        len(models),
        columns,
        figsize=(14, 4.2 * len(models)),
        squeeze=False,
        width_ratios=(3, 2)[:columns],
    )
    for (left, *rest), model in zip(rows, models, strict=True):
        _draw_cases(left, [case for case in result["cases"] if case["model"] == model])
        left.set_title(f"{model}: batches that start together", fontsize=10)
        for right in rest:
            entries = [each for each in result["serving"] if each["model"] == model]
            right.set_title(f"{model}: requests at random, shared system prompts", fontsize=10)
            _draw_serving(right, entries)
    figure.suptitle(f"Time per output token in SGLang, {result['meta']['gpu']}: lower is better")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _draw_cases(axis: Axes, cases: list[dict[str, Any]]) -> None:
    backends = _in_order(name for case in cases for name in case["tpot_ms"])
    width = 0.8 / max(1, len(backends))
    for offset, name in enumerate(backends):
        measured = [
            (i, case["tpot_ms"][name]) for i, case in enumerate(cases) if name in case["tpot_ms"]
        ]
        places = [index + (offset - (len(backends) - 1) / 2) * width for index, _ in measured]
        bars = axis.bar(places, [ms for _, ms in measured], width, **_style(name))
        axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    for index, case in enumerate(cases):
        label = "weights and KV once, at 3 TB/s" if index == 0 else None
        axis.hlines(case["floor_ms"], index - 0.45, index + 0.45, color="black", lw=1, label=label)
    axis.set_xticks(range(len(cases)), [_title(case) for case in cases], fontsize=8)
    axis.set_ylabel("ms per output token")
    if cases:
        axis.legend(fontsize=8)


def _draw_serving(axis: Axes, entries: list[dict[str, Any]]) -> None:
    if not entries:
        axis.set_visible(False)
        return
    for name, marker in zip(_in_order(each["backend"] for each in entries), MARKERS, strict=False):
        points = sorted(
            (each["request_rate"], each["median_tpot_ms"], each["p99_tpot_ms"])
            for each in entries
            if each["backend"] == name
        )
        rates, median, p99 = zip(*points, strict=True)
        style = _style(name)
        axis.plot(rates, median, marker=marker, **style)
        axis.plot(rates, p99, marker=marker, linestyle=":", color=style["color"])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("requests per second")
    axis.set_ylabel("ms per output token: median, dotted p99")
    axis.legend(fontsize=8)


def _title(case: dict[str, Any]) -> str:
    groups = f"{case['groups']} x " if case["groups"] > 1 else ""
    return (
        f"{case['batch']} requests\n{groups}{case['prefix']:,} shared\n{case['private']:,} private"
    )


def _in_order(names: Any) -> list[str]:
    found = set(names)
    return [name for name in COLORS if name in found] + sorted(found - set(COLORS))


def _style(name: str) -> dict[str, Any]:
    return {"label": LABELS.get(name, name), "color": COLORS.get(name, OTHER_COLOR)}


if __name__ == "__main__":
    main()
