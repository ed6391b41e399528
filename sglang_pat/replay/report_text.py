"""The result of a replay in words and numbers: a verdict, facts, rows, and rich tables of them.

Reads a `Result`. The HTML report shows the same verdict, facts and rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sglang_pat.replay.result import PolicyComparison, Quantiles, Result, flatten

# Where a ratio has no denominator, or a policy was not replayed.
NONE = "-"

QUERY_CENTRIC = "query-centric"
LOWER_BOUND = "lower bound"


# By the part of a decode step's time that is saved, at least.
_VERDICTS = (
    (0.10, "pays", "pat pays for this traffic"),
    (0.03, "pays-a-little", "pat pays a little for this traffic"),
    (float("-inf"), "does-not-pay", "pat does not pay for this traffic"),
)


class Verdict(NamedTuple):
    """What the replay means. kind: "pays", "pays-a-little", "does-not-pay" or "unknown"."""

    kind: str
    sentence: str


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
    """One way to read KV, over all decode steps. Every field is ready to print.

    saving: times fewer KV tokens than query-centric. partials: their share of the bytes. tail: the
    work of the slowest worker over the mean of all, as the mean and the maximum over the plans.
    """

    name: str
    saving: str
    over_bound: str
    total_bytes: str
    partials: str
    kv_tokens: str
    packs: str
    work_items: str
    split_pieces: str
    tail: str


POLICY_COLUMNS = PolicyRow(
    name="policy",
    saving="saving",
    over_bound="vs bound",
    total_bytes="bytes",
    partials="partials",
    kv_tokens="KV tokens",
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
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or "none"
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:,.6g}"
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


def verdict(result: Result) -> Verdict:
    """Whether pat pays for this traffic, in a sentence. "unknown" where nothing was replayed."""
    totals, policy = result["totals"], main_policy(result)
    step_ms = totals.get("step_ms", {})
    if policy is None or policy not in step_ms:
        return Verdict("unknown", headline(result))
    before, after = step_ms["query_centric"], step_ms[policy]
    saved = round(1 - after / before, 2)  # as it is shown
    kind, opening = next(entry for least, *entry in _VERDICTS if saved >= least)
    moved = totals["bytes"]
    return Verdict(
        kind,
        f"{opening}: a decode step would take about {abs(saved):.0%} "
        f"{'less' if saved >= 0 else 'more'} time ({after:,.1f} instead of {before:,.1f} ms). "
        f"Attention moves {times(moved['query_centric'], moved[policy])} fewer bytes, and it is "
        f"{_attention_ms(result) / before:.0%} of a step.",
    )


def _attention_ms(result: Result) -> float:
    """The part of the mean decode step in which query-centric attention moves its bytes."""
    totals = result["totals"]
    speed = result["config"]["time"]["bytes_per_second"]
    return float(1000 * totals["bytes"]["query_centric"] / totals["steps"] / speed)


def headline(result: Result) -> str:
    """The reads of KV in a sentence."""
    totals = result["totals"]
    kv_tokens, policy = totals["kv_tokens"], main_policy(result)
    if not totals["steps"]:
        return "No decode step was replayed."
    if policy is None:
        return f"{totals['steps']:,} decode steps were replayed, but no packing policy."
    read = kv_tokens["policies"][policy]
    return (
        f"Over {totals['steps']:,} decode steps, policy {policy} reads "
        f"{times(kv_tokens['query_centric'], read)} fewer KV tokens than query-centric attention. "
        f"That is {over_bound(read, kv_tokens['lower_bound'])} the lower bound."
    )


def basis(result: Result) -> str:
    """What the verdict is estimated from, in a sentence or two."""
    config = result["config"]
    gpu, model = config.get("gpu"), config.get("model")
    if not (isinstance(gpu, dict) and isinstance(model, dict)):
        return "Times are estimated from the bytes that a step moves."
    gpus = gpu["name"] if config["tp"] == 1 else f"each of {config['tp']} {gpu['name']}"
    return (
        f"Times are estimates for {model['name']} on {gpus}, from the bytes that a step moves. "
        "No kernel ran for them."
    )


def key_numbers(result: Result) -> list[Fact]:
    """The five numbers to look at first. None where no step was replayed."""
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
        Fact("to build a plan", f"{totals['planning_us']['p50']:,.0f} us", "median, on the host"),
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
    if trace.get("estimated"):
        found.append(
            f"The prompts of {trace['estimated']:,} requests are text. 4 bytes count as one token."
        )
    found += _limit_warnings(result)
    found += _memory_warnings(result["config"])
    latency = totals.get("latency")
    if latency and latency["overloaded"]:
        found.append(
            "The simulated server is overloaded: a request waits "
            f"{_duration(latency['queue_s']['mean'])} and is then served in "
            f"{_duration(latency['service_s']['mean'])}, in the mean. Arrivals are faster than one "
            "server of this kind can answer them."
        )
    return found


def _limit_warnings(result: Result) -> Iterator[str]:
    """Requests that were refused or cut, and at which limit."""
    totals, config = result["totals"], result["config"]
    by = totals.get("refused_by", {"": totals["refused"]})
    limits = {
        "context": f"the model's context of {_context_length(config)} tokens",
        "pool": f"the KV pool of {config.get('kv_tokens', 0):,} tokens",
        "": "the KV pool or the model's context",
    }
    for limit, refused in by.items():
        if refused:
            were = "request was" if refused == 1 else "requests were"
            yield f"{refused:,} {were} refused: longer than {limits[limit]}."
    truncated = totals.get("truncated", 0)
    if truncated:
        were = "answer was" if truncated == 1 else "answers were"
        yield f"{truncated:,} {were} cut where the model's context or the KV pool ends."


def _memory_warnings(config: Mapping[str, Any]) -> Iterator[str]:
    """Whether weights and KV pool fit into the memory of the GPU."""
    gpu, model = config.get("gpu"), config.get("model")
    if not (isinstance(gpu, dict) and isinstance(model, dict)):
        return
    weights = model["weight_bytes"]
    per_token = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"]
    pool = config["kv_tokens"] * per_token * model["dtype_bytes"]
    if weights + pool > gpu["memory_bytes"]:
        yield (
            f"No such server can be built: {decimal(weights)} of weights and {decimal(pool)} of KV "
            f"pool do not fit into the {decimal(int(gpu['memory_bytes']))} of one {gpu['name']}."
        )


def _context_length(config: Mapping[str, Any]) -> str:
    model = config.get("model")
    length = model.get("context_length") if isinstance(model, dict) else None
    return "unknown" if length is None else f"{length:,}"


def fact_groups(result: Result) -> list[FactGroup]:
    """Everything but the policies, in the order of the pipeline; groups may be empty."""
    totals = result["totals"]
    return [
        FactGroup("Trace", list(_trace_facts(result))),
        FactGroup("Serving", list(_serving_facts(result))),
        FactGroup("Latency on the simulated server", list(_latency_facts(result))),
        FactGroup("Estimated mean decode step", list(_step_facts(result))),
        FactGroup("Plans", list(_plan_facts(result))),
        FactGroup(
            "Plans in which memory moves more bytes than another policy",
            list(_comparison_facts(totals["comparisons"])),
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
        row = PolicyRow(*[NONE] * len(PolicyRow._fields))._replace(
            name=name,
            saving=times(most, tokens),
            over_bound=over_bound(tokens, least),
            kv_tokens=count(tokens),
            **plans,
        )
        return row if in_bytes is None else row._replace(total_bytes=decimal(in_bytes, precision=2))

    # Replayed as a policy, it has plans, and a row like any other.
    replayed = QUERY_CENTRIC in kv_tokens["policies"]

    def partials(key: str) -> dict[str, str]:
        found = totals["partial_bytes"].get(key)
        if found is None:
            return {}
        share = percent(found["written"] + found["read"], totals["bytes"].get(key, 0))
        return {"partials": share}

    rows = []
    if not replayed:
        rows = [row(QUERY_CENTRIC, "query_centric", most, **partials("query_centric"))]
    for name, tokens in kv_tokens["policies"].items():
        plans = partials(name)
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
    if "truncated" in totals:
        yield Fact("answers cut", count(totals["truncated"]), "at the pool's or the context's end")
    yield Fact("tokens decoded", count(totals["decode_tokens"]))
    yield Fact("batch, mean", f"{totals['batch_mean']:,.1f}")
    yield Fact("prefix-hit rate", f"{totals['prefix_hit_rate']:.1%}", "of all prompt tokens")
    yield Fact("simulated time", _duration(totals["simulated_seconds"]))


def _latency_facts(result: Result) -> Iterator[Fact]:
    latency = result["totals"].get("latency")
    if latency is None or not result["totals"]["requests"]:
        return
    for key, label in _LATENCIES.items():
        durations: Quantiles = latency[key]  # type: ignore[literal-required]
        yield Fact(
            label,
            _duration(durations["mean"]),
            f"mean; median {_duration(durations['p50'])}, "
            f"99th percentile {_duration(durations['p99'])}",
        )


_LATENCIES = {
    "queue_s": "waiting for admission",
    "ttft_s": "time to the first token",
    "tpot_s": "time per further token",
    "service_s": "from admission to the last token",
}


def _step_facts(result: Result) -> Iterator[Fact]:
    step_ms = result["totals"].get("step_ms", {})
    for name, milliseconds in step_ms.items():
        faster = times(step_ms["query_centric"], milliseconds)
        note = "" if name == "query_centric" else f"{faster} as fast as query-centric"
        yield Fact(_LABELS.get(name, name), f"{milliseconds:,.2f} ms", note)


_LABELS = {"query_centric": QUERY_CENTRIC, "lower_bound": LOWER_BOUND}


def _duration(seconds: float) -> str:
    """In the unit that a reader would take."""
    if seconds < 1:
        return f"{1000 * seconds:,.1f} ms"
    if seconds < 600:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 36_000 else f"{seconds / 3600:,.1f} h"


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
            worst = max(against["worst_ratio"] - 1, 0)
            uncut = against["more_before_split"]
            yield Fact(
                f"than {name}",
                f"{against['more']:,} of {against['plans']:,}",
                f"worst plan: {worst:.2%} more; before tiles are cut: {uncut:,} plans"
                if against["more"] or uncut
                else "",
            )


def _mutation_facts(mutations: Mapping[str, int]) -> Iterator[Fact]:
    for kind, number in mutations.items():
        yield Fact(words(kind), count(number))


# --- the capacity study ---


class CapacityRow(NamedTuple):
    """One way to hand out a KV pool; every field is ready to print."""

    scheme: str
    page_size: str
    requests: str
    extent: str
    over_contiguous: str
    wasted: str


CAPACITY_COLUMNS = CapacityRow(
    scheme="scheme",
    page_size="page size",
    requests="requests",
    extent="range",
    over_contiguous="vs contiguous",
    wasted="wasted",
)


def capacity_rows(capacity: Mapping[str, Any]) -> list[CapacityRow]:
    """A row per scheme and page size; none without a study."""
    uses = capacity.get("uses", [])
    contiguous = next((use["requests"] for use in uses if use["scheme"] == "contiguous"), 0)
    return [
        CapacityRow(
            use["scheme"],
            page_size(use),
            f"{_at_least(capacity)}{use['requests']:,.1f}",
            f"{use['fewest']:,} to {use['most']:,}",
            times(use["requests"], contiguous),
            percent(use["wasted_bytes"], use["reserved_bytes"]),
        )
        for use in uses
    ]


def capacity_table(capacity: Mapping[str, Any]) -> NumberTable:
    """The rows under their headings."""
    rows: list[tuple[str, ...]] = list(capacity_rows(capacity))
    return NumberTable("Requests that fit into the KV pool at once", CAPACITY_COLUMNS, rows)


def page_size(use: Mapping[str, Any]) -> str:
    """Of a scheme; a contiguous reservation is one whole."""
    return "whole" if use["page_size"] is None else f"{use['page_size']:,}"


def _at_least(capacity: Mapping[str, Any]) -> str:
    return "" if capacity["full"] else "≥ "


# --- on a terminal ---


def print_result(result: Result, console: Console) -> None:
    """Everything that the totals say: warnings first, the verdict last, where a reader looks."""
    for warning in warnings(result):
        console.print(f"[bold yellow]WARNING[/] {escape(warning)}")
    console.print(totals_table(result))
    for table in (*policy_tables(result), capacity_table(result["capacity"])):
        if table.rows:
            console.print(number_table(table, dimmed=(QUERY_CENTRIC, LOWER_BOUND)))
    console.print(headline(result), markup=False)
    found = verdict(result)
    if found.kind != "unknown":
        console.print(f"[bold]{escape(found.sentence)}[/]", highlight=False)


def totals_table(result: Result) -> Table:
    """Trace, serving, plans and the tree: one section each."""
    table = Table(title=f"Replay of {escape(result['trace']['name'])}")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    for group in filter(lambda group: group.facts, fact_groups(result)):
        table.add_section()
        table.add_row(f"[bold]{escape(group.title)}[/]")
        for fact in group.facts:
            table.add_row(*map(escape, fact))
    return table


def number_table(content: NumberTable, dimmed: Collection[str] = ()) -> Table:
    """As rich draws it. dimmed: names of rows that are there to compare with."""
    table = Table(title=escape(content.title))
    for index, heading in enumerate(content.columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in content.rows:
        table.add_row(*map(escape, row), style="dim" if row[0] in dimmed else None)
    return table
