"""Two replays side by side: what was asked differently, and what came out.

Behind the simulation: reads two results as they were written with `--json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sglang_pat.replay.report_text import (
    LOWER_BOUND,
    NONE,
    QUERY_CENTRIC,
    count,
    shown,
    times,
    warnings,
    words,
)
from sglang_pat.replay.result import TIMING_KEYS, Result, Totals, flatten

T = TypeVar("T")

_SECTIONS = frozenset(Result.__annotations__)


class Difference(NamedTuple):
    """A setting or a property of the trace that is not the same; None where one has none."""

    name: str
    left: Any
    right: Any


class Row(NamedTuple):
    """A number of both replays, ready to print. ratio: right over left."""

    name: str
    left: str
    right: str
    ratio: str


class RowGroup(NamedTuple):
    """Rows under one heading."""

    title: str
    rows: list[Row]


def read_result(path: Path) -> Result:
    """A result from its JSON file.

    Raises OSError where it cannot be read, ValueError with the name of the file where it is not the
    result of a replay.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not the result of a replay: it holds no JSON object")
    if missing := sorted(_SECTIONS - content.keys()):
        raise ValueError(f"{path} is not the result of a replay: without {', '.join(missing)}")
    return cast(Result, content)


def differences(left: Result, right: Result) -> list[Difference]:
    """All that was given and is not equal: trace, configuration, versions. Times are results."""
    found = []
    for section in ("trace", "config", "meta"):
        of_left, of_right = _given(left, section), _given(right, section)
        for name in dict.fromkeys([*of_left, *of_right]):
            pair = of_left.get(name), of_right.get(name)
            if pair[0] != pair[1]:
                found.append(Difference(f"{section}: {words(name)}", *pair))
    return found


def compared(left: Result, right: Result) -> list[RowGroup]:
    """The totals of both. What only one has, a policy say, is a row without a ratio."""
    a, b = left["totals"], right["totals"]
    return [
        RowGroup("Serving", list(_serving(a, b))),
        RowGroup("Latency, mean, s", list(_latencies(a, b))),
        RowGroup("Estimated mean decode step, ms", list(_steps(a, b))),
        RowGroup("KV tokens", list(_counts(_kv_tokens(a), _kv_tokens(b)))),
        RowGroup("KV tokens, times the lower bound", list(_over_bound(a, b))),
        RowGroup("Bytes, partials included", list(_counts(_bytes(a), _bytes(b), _in_bytes))),
        RowGroup("Packs", list(_counts(_plan_field(a, "packs"), _plan_field(b, "packs")))),
        RowGroup("Plans", list(_plans(a, b))),
        RowGroup("Changes of the tree", list(_counts(a["mutations"], b["mutations"]))),
    ]


def print_comparison(left: Path, right: Path, console: Console) -> None:
    """Read both files and print the differences of what was asked, then the totals.

    Raises OSError and ValueError as `read_result` does.
    """
    results = read_result(left), read_result(right)
    for path, result in zip((left, right), results, strict=True):
        for warning in warnings(result):
            console.print(f"[bold yellow]WARNING[/] {escape(f'{path}: {warning}')}")
    charged = ["query_centric" in result["totals"]["partial_bytes"] for result in results]
    if charged[0] != charged[1]:
        console.print(
            "[bold yellow]WARNING[/] Only one of the two charges query-centric attention for the "
            "partials of its splits: its bytes cannot be compared."
        )
    console.print(f"A is {left}", f"B is {right}", sep="\n", markup=False, highlight=False)
    if different := differences(*results):
        table = Table(title="What differs")
        for heading in ("", "A", "B"):
            table.add_column(heading, overflow="fold")
        for difference in different:
            values = (NONE if value is None else shown(value) for value in difference[1:])
            table.add_row(escape(difference.name), *map(escape, values))
        console.print(table)
    else:
        console.print("Trace, configuration and versions are equal.")
    table = Table(title="Totals")
    table.add_column("")
    for heading in ("A", "B", "B / A"):
        table.add_column(heading, justify="right")
    for group in filter(lambda group: group.rows, compared(*results)):
        table.add_section()
        table.add_row(f"[bold]{escape(group.title)}[/]")
        for row in group.rows:
            table.add_row(*map(escape, row))
    console.print(table)


def _given(result: Result, section: str) -> dict[str, Any]:
    values = cast(Mapping[str, Any], result[section])  # type: ignore[literal-required]
    return {name: value for name, value in flatten(values) if name not in TIMING_KEYS}


def _serving(a: Totals, b: Totals) -> Iterator[Row]:
    for name, label in (
        ("steps", "decode steps"),
        ("requests", "requests finished"),
        ("retracted", "requests retracted"),
        ("refused", "requests refused"),
        ("decode_tokens", "tokens decoded"),
        ("batch_mean", "batch, mean"),
        ("prefix_hit_rate", "prefix-hit rate"),
        ("simulated_seconds", "simulated time, s"),
    ):
        yield _row(label, a[name], b[name])  # type: ignore[literal-required]


def _latencies(a: Totals, b: Totals) -> Iterator[Row]:
    """Mean seconds. Results of older versions have none."""
    of_a, of_b = (_latency_means(totals) for totals in (a, b))
    for name, left, right in _pairs(of_a, of_b):
        yield _row(name, left, right, "{:.4f}".format)


def _latency_means(totals: Totals) -> dict[str, float]:
    latency = totals.get("latency")
    if latency is None:
        return {}
    return {
        "waiting for admission": latency["queue_s"]["mean"],
        "to the first token": latency["ttft_s"]["mean"],
        "per further token": latency["tpot_s"]["mean"],
    }


def _kv_tokens(totals: Totals) -> dict[str, int]:
    kv_tokens = totals["kv_tokens"]
    return {
        QUERY_CENTRIC: kv_tokens["query_centric"],
        **kv_tokens["policies"],
        LOWER_BOUND: kv_tokens["lower_bound"],
    }


def _steps(a: Totals, b: Totals) -> Iterator[Row]:
    step_ms = a.get("step_ms", {}), b.get("step_ms", {})
    for name, left, right in _pairs(*step_ms):
        yield _row(words(name), left, right, "{:.2f}".format)


def _over_bound(a: Totals, b: Totals) -> Iterator[Row]:
    """What a comparison of traces of different lengths is about."""
    least = a["kv_tokens"]["lower_bound"], b["kv_tokens"]["lower_bound"]
    if not all(least):
        return
    for name, *read in _pairs(_kv_tokens(a), _kv_tokens(b)):
        if name != LOWER_BOUND:
            ratios = [
                None if tokens is None else tokens / bound
                for tokens, bound in zip(read, least, strict=True)
            ]
            yield _row(words(name), ratios[0], ratios[1], "{:.3f}".format)


def _bytes(totals: Totals) -> dict[str, int]:
    """A policy's own bytes outrank those of query-centric attention without partials."""
    moved = totals["bytes"]
    policies = {name: moved[name] for name in totals["kv_tokens"]["policies"]}
    return {
        QUERY_CENTRIC: moved["query_centric"],
        **policies,
        LOWER_BOUND: moved["lower_bound"],
    }


def _plan_field(totals: Totals, name: str) -> dict[str, int]:
    policies = totals["policies"].items()
    return {policy: values[name] for policy, values in policies}  # type: ignore[literal-required]


def _plans(a: Totals, b: Totals) -> Iterator[Row]:
    yield _row("reused", a["plans"]["reused"], b["plans"]["reused"])
    for name, left, right in _pairs(a["plans"]["built"], b["plans"]["built"]):
        yield _row(f"built: {words(name)}", left, right)
    yield _row("planning, median, us", a["planning_us"]["p50"], b["planning_us"]["p50"])
    yield _row("planning, p99, us", a["planning_us"]["p99"], b["planning_us"]["p99"])


def _counts(
    a: Mapping[str, int], b: Mapping[str, int], show: Callable[[Any], str] = count
) -> Iterator[Row]:
    for name, left, right in _pairs(a, b):
        yield _row(words(name), left, right, show)


def _pairs(a: Mapping[str, T], b: Mapping[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name), b.get(name)


def _in_bytes(number: int) -> str:
    return decimal(number, precision=2)


def _row(
    label: str,
    left: float | None,
    right: float | None,
    show: Callable[[Any], str] = count,
) -> Row:
    ratio = NONE if left is None or right is None else times(right, left)
    return Row(
        label,
        NONE if left is None else show(left),
        NONE if right is None else show(right),
        ratio,
    )
