"""What a replay says in words and numbers: the rows that the terminal and the HTML report show.

Behind the simulation: reads a `Result`, knows nothing of rich or HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.filesize import decimal

from sglang_pat.replay.flat import flatten
from sglang_pat.replay.result import PolicyComparison, Result

# Where a ratio has no denominator, or a policy was not replayed.
NONE = "-"

QUERY_CENTRIC = "query-centric"
LOWER_BOUND = "lower bound"


class Fact(NamedTuple):
    """One line of a table: what, how much, and what that means."""

    label: str
    value: str
    note: str = ""


class FactGroup(NamedTuple):
    """Facts under one heading."""

    title: str
    facts: list[Fact]


class PolicyRow(NamedTuple):
    """One way to read KV, over all decode steps; every field is ready to print.

    saving: times fewer KV tokens than query-centric. partials: their share of the bytes. tail: the
    longest worker's work over the mean, mean and maximum over the plans.
    """

    name: str
    kv_tokens: str
    over_bound: str
    saving: str
    total_bytes: str
    partials: str
    packs: str
    work_items: str
    split_pieces: str
    tail: str


POLICY_COLUMNS = PolicyRow(
    name="policy",
    kv_tokens="KV tokens",
    over_bound="vs bound",
    saving="saving",
    total_bytes="bytes",
    partials="partials",
    packs="packs",
    work_items="work items",
    split_pieces="pieces",
    tail="tail",
)


_FIRST_OF_PLANS = PolicyRow._fields.index("packs")


class NumberTable(NamedTuple):
    """A table whose first column is names, and the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def count(value: float) -> str:
    """A count with thousands separated; fractions, as means have them, to two decimals."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def times(numerator: float, denominator: float, digits: int = 2) -> str:
    """A ratio as `1.23x`."""
    return f"{numerator / denominator:,.{digits}f}x" if denominator else NONE


def over_bound(tokens: float, lower_bound: float) -> str:
    """Tokens read over the lower bound; policies often differ by less than a percent."""
    return times(tokens, lower_bound, digits=3)


def percent(part: float, whole: float) -> str:
    """A share as `12.3%`."""
    return f"{part / whole:.1%}" if whole else NONE


def words(name: str) -> str:
    """A key of the JSON as a person would write it."""
    return name.replace("_", " ")


def shown(value: Any) -> str:
    """A value of the configuration or of the metadata on one line; objects in it as JSON."""
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return json.dumps(value, ensure_ascii=False)


def settings(values: Mapping[str, Any]) -> list[Fact]:
    """The configuration or the metadata, a line for each value however deep."""
    return [Fact(words(name), shown(value)) for name, value in flatten(values)]


def main_policy(result: Result) -> str | None:
    """The policy that the replay is about: `memory` where it was replayed, else the first."""
    policies = result["totals"]["kv_tokens"]["policies"]
    return "memory" if "memory" in policies else next(iter(policies), None)


def headline(result: Result) -> str:
    """The result in a sentence."""
    totals = result["totals"]
    kv_tokens, policy = totals["kv_tokens"], main_policy(result)
    if not totals["steps"]:
        return "No decode step was replayed."
    if policy is None:
        return f"{totals['steps']:,} decode steps; no packing policy was replayed."
    read = kv_tokens["policies"][policy]
    return (
        f"Policy {policy} reads {times(kv_tokens['query_centric'], read)} fewer KV tokens than "
        f"query-centric attention, {over_bound(read, kv_tokens['lower_bound'])} the lower bound, "
        f"over {totals['steps']:,} decode steps."
    )


def key_numbers(result: Result) -> list[Fact]:
    """The five numbers to look at first; none where no step was replayed."""
    totals, policy = result["totals"], main_policy(result)
    if not totals["steps"] or policy is None:
        return []
    kv_tokens, plans = totals["kv_tokens"], totals["plans"]
    read = kv_tokens["policies"][policy]
    built = sum(plans["built"].values())
    return [
        Fact("fewer KV tokens", times(kv_tokens["query_centric"], read), "than query-centric"),
        Fact("the lower bound", over_bound(read, kv_tokens["lower_bound"]), f"by {policy}"),
        Fact("prefix-hit rate", f"{totals['prefix_hit_rate']:.1%}", "of prompt tokens"),
        Fact("plans reused", percent(plans["reused"], built + plans["reused"]), "of all steps"),
        Fact("to plan", f"{totals['planning_us']['p50']:,.0f} us", "median, host"),
    ]


def warnings(result: Result) -> list[str]:
    """What a reader must know before trusting the numbers."""
    found = []
    trace, totals = result["trace"], result["totals"]
    if result["meta"].get("interrupted"):
        found.append("The replay was interrupted: the numbers cover the part that was done.")
    if trace["failed"]:
        failed = "request" if trace["failed"] == 1 else "requests"
        found.append(f"{trace['failed']:,} {failed} left out: failed when the trace was recorded.")
    if trace["malformed"]:
        shown = "; ".join(trace["errors"])
        more = ", ..." if trace["malformed"] > len(trace["errors"]) else ""
        lines = "line was" if trace["malformed"] == 1 else "lines were"
        found.append(f"{trace['malformed']:,} malformed {lines} skipped: {shown}{more}")
    if totals["refused"]:
        found.append(
            f"{totals['refused']:,} requests were refused: longer than the pool or the context."
        )
    return found


def fact_groups(result: Result) -> list[FactGroup]:
    """Everything but the policies, in the order of the pipeline; groups may be empty."""
    totals = result["totals"]
    return [
        FactGroup("Trace", list(_trace_facts(result))),
        FactGroup("Serving", list(_serving_facts(result))),
        FactGroup("Plans", list(_plan_facts(result))),
        FactGroup(
            "Plans in which memory moves more bytes", list(_comparison_facts(totals["comparisons"]))
        ),
        FactGroup("Changes of the tree", list(_mutation_facts(totals["mutations"]))),
    ]


def policy_rows(result: Result) -> list[PolicyRow]:
    """Query-centric first, then the policies as replayed, the lower bound last."""
    totals = result["totals"]
    kv_tokens = totals["kv_tokens"]
    most, least = kv_tokens["query_centric"], kv_tokens["lower_bound"]

    def row(name: str, key: str, tokens: int, **plans: str) -> PolicyRow:
        in_bytes = totals["bytes"].get(key)
        details = dict.fromkeys(PolicyRow._fields[5:], NONE) | plans
        return PolicyRow(
            name,
            count(tokens),
            over_bound(tokens, least),
            times(most, tokens),
            NONE if in_bytes is None else decimal(in_bytes, precision=2),
            **details,
        )

    # Replayed as a policy, it has plans, and a row like any other.
    replayed = QUERY_CENTRIC in kv_tokens["policies"]
    rows = [] if replayed else [row(QUERY_CENTRIC, "query_centric", most)]
    for name, tokens in kv_tokens["policies"].items():
        plans: dict[str, str] = {}
        if partials := totals["partial_bytes"].get(name):
            moved = partials["written"] + partials["read"]
            plans["partials"] = percent(moved, totals["bytes"].get(name, 0))
        if policy := totals["policies"].get(name):
            balance = policy["balance"]
            plans["packs"] = count(policy["packs"])
            plans["work_items"] = count(policy["work_items"])
            plans["split_pieces"] = count(policy["split_pieces"])
            plans["tail"] = f"{balance['tail_mean']:.2f} / {balance['tail_max']:.2f}"
        rows.append(row(name, name, tokens, **plans))
    return [*rows, row(LOWER_BOUND, "lower_bound", least)]


def policy_tables(result: Result) -> list[NumberTable]:
    """What the policies read, and what their plans look like: together too wide for a terminal."""
    rows, plans = policy_rows(result), slice(_FIRST_OF_PLANS, None)
    return [
        NumberTable(
            "KV read in all decode steps",
            POLICY_COLUMNS[:_FIRST_OF_PLANS],
            [row[:_FIRST_OF_PLANS] for row in rows],
        ),
        NumberTable(
            "Plans in all decode steps",
            (POLICY_COLUMNS.name, *POLICY_COLUMNS[plans]),
            [(row.name, *row[plans]) for row in rows if row.packs != NONE],
        ),
    ]


def _trace_facts(result: Result) -> Iterator[Fact]:
    trace = result["trace"]
    yield Fact("name", trace["name"], trace["format"])
    malformed = f"{trace['malformed']:,} malformed lines" if trace["malformed"] else ""
    yield Fact("requests", count(trace["requests"]), malformed)
    yield Fact("input tokens", count(trace["input_tokens"]))
    yield Fact("output tokens", count(trace["output_tokens"]))


def _serving_facts(result: Result) -> Iterator[Fact]:
    totals = result["totals"]
    yield Fact("decode steps", count(totals["steps"]))
    yield Fact("requests finished", count(totals["requests"]))
    yield Fact("requests retracted", count(totals["retracted"]), "no KV left in a decode step")
    yield Fact("requests refused", count(totals["refused"]), "longer than the pool or the context")
    yield Fact("tokens decoded", count(totals["decode_tokens"]))
    yield Fact("batch, mean", f"{totals['batch_mean']:,.1f}")
    yield Fact("prefix-hit rate", f"{totals['prefix_hit_rate']:.1%}", "of all prompt tokens")
    yield Fact("simulated time", f"{totals['simulated_seconds']:,.1f} s")


def _plan_facts(result: Result) -> Iterator[Fact]:
    plans, planning = result["totals"]["plans"], result["totals"]["planning_us"]
    built = sum(plans["built"].values())
    causes = ", ".join(f"{words(cause)}: {number:,}" for cause, number in plans["built"].items())
    yield Fact("plans built", count(built), causes)
    reused = percent(plans["reused"], built + plans["reused"])
    yield Fact("plans reused", count(plans["reused"]), f"{reused} of the steps")
    if built:
        yield Fact("planning, median", f"{planning['p50']:,.1f} us", "of a plan built")
        yield Fact("planning, 99th percentile", f"{planning['p99']:,.1f} us", "of a plan built")
    if plans["reused"]:
        yield Fact("reuse, median", f"{planning['reused_p50']:,.1f} us")


def _comparison_facts(comparisons: Mapping[str, PolicyComparison]) -> Iterator[Fact]:
    for name, against in comparisons.items():
        if against["plans"]:
            uncut = against["worst_ratio_before_split"]
            yield Fact(
                f"than {name}",
                f"{against['more']:,} of {against['plans']:,}",
                f"at most {against['worst_ratio']:.5f}x; were no tile cut, "
                f"{against['more_before_split']:,}, at most {uncut:.5f}x",
            )


def _mutation_facts(mutations: Mapping[str, int]) -> Iterator[Fact]:
    for kind, number in mutations.items():
        yield Fact(words(kind), count(number))
