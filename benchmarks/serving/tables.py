"""The results as tables, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(width=132, highlight=False)


def show_failure(text: str) -> None:
    """In red, and as it is: a log may hold what looks like markup."""
    console.print("FAILED", style="bold red", end=" ")
    console.print(text, markup=False)


def show(cases: list[dict[str, Any]], serving: list[dict[str, Any]]) -> None:
    """All tables that there are numbers for."""
    for model in dict.fromkeys(case["model"] for case in cases):
        _show_cases(model, [case for case in cases if case["model"] == model])
    for model in dict.fromkeys(entry["model"] for entry in serving):
        _show_serving(model, [entry for entry in serving if entry["model"] == model])


def _show_cases(model: str, cases: list[dict[str, Any]]) -> None:
    backends = list(dict.fromkeys(name for case in cases for name in case["tpot_ms"]))
    table = _table(
        f"{model}: ms per output token",
        ("batch", "prefix", "private", "floor"),
        (*backends, "best other / pat", "answers as SGLang's"),
    )
    for case in cases:
        times = case["tpot_ms"]
        others = [ms for name, ms in times.items() if not name.startswith("pat")]
        ratio = f"{min(others) / times['pat']:.2f}" if others and "pat" in times else ""
        same = case["answers_identical"].get("pat")
        groups = f"{case['groups']} x " if case["groups"] > 1 else ""
        table.add_row(
            f"{case['batch']:,}",
            f"{groups}{case['prefix']:,}",
            f"{case['private']:,}",
            f"{case['floor_ms']:.2f}",
            *(_number(times.get(name)) for name in backends),
            ratio,
            "" if same is None else f"{same:.1%}",
        )
    console.print(table)

    table = _table(
        f"{model}: as a client sees it, ms",
        ("batch", "prefix", "private", "backend"),
        ("TTFT p50", "p99", "ITL mean", "p50", "p99", "plans built / reused", "KV read ratio"),
    )
    for case in cases:
        for name in backends:
            if name not in case["itl_ms"]:
                continue
            stats = case.get("stats", {}).get(name)
            table.add_row(
                *(f"{case[key]:,}" for key in ("batch", "prefix", "private")),
                name,
                *(_number(case["ttft_ms"][name][key]) for key in ("p50", "p99")),
                *(_number(case["itl_ms"][name][key]) for key in ("mean", "p50", "p99")),
                f"{stats['plans_built']:,} / {stats['plans_reused']:,}" if stats else "",
                _number(stats["kv_read_ratio"]) if stats else "",
            )
        table.add_section()
    console.print(table)


def _show_serving(model: str, entries: list[dict[str, Any]]) -> None:
    table = _table(
        f"{model}: sglang.bench_serving, shared system prompts, ms",
        ("req/s", "backend"),
        ("output tokens/s", "concurrency", "TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99"),
    )
    for rate in sorted({entry["request_rate"] for entry in entries}):
        for entry in entries:
            if entry["request_rate"] == rate:
                percentiles = (
                    entry[f"{of}_{what}_ms"]
                    for what in ("ttft", "tpot", "itl")
                    for of in ("median", "p99")
                )
                table.add_row(
                    f"{rate:g}",
                    entry["backend"],
                    f"{entry['output_throughput']:,.0f}",
                    f"{entry['concurrency']:.1f}",
                    *map(_number, percentiles),
                )
        table.add_section()
    console.print(table)


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    table = Table(title=title)
    for column in (*left, *right):
        table.add_column(column, justify="right")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
