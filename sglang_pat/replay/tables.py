"""The result of a replay on a terminal: rich tables.

Behind the simulation, last thing that the command prints. The rows come from summary.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_pat.replay.capacity_rows import CAPACITY_COLUMNS, CapacityRow, capacity_rows
from sglang_pat.replay.result import Result
from sglang_pat.replay.summary import (
    NONE,
    POLICY_COLUMNS,
    PolicyRow,
    fact_groups,
    headline,
    policy_rows,
    warnings,
)

_FIRST_OF_PLANS = PolicyRow._fields.index("packs")


def print_result(result: Result, console: Console) -> None:
    """Everything that the totals say, warnings first and the result in a sentence last."""
    for warning in warnings(result):
        console.print(f"[bold yellow]WARNING[/] {escape(warning)}")
    console.print(totals_table(result))
    for table in policy_tables(result):
        console.print(table)
    if rows := capacity_rows(result["capacity"]):
        console.print(capacity_table(rows))
    console.print(headline(result), markup=False)


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


def policy_tables(result: Result) -> list[Table]:
    """KV read under each policy, between query-centric attention and the lower bound; its plans.

    Two tables, for one does not fit a terminal of 80 columns.
    """
    rows = policy_rows(result)
    reads = _numbers("KV read in all decode steps", POLICY_COLUMNS[:_FIRST_OF_PLANS])
    plans = _numbers("Plans", (POLICY_COLUMNS.name, *POLICY_COLUMNS[_FIRST_OF_PLANS:]))
    for row in rows:
        style = None if row.packs != NONE else "dim"
        reads.add_row(*map(escape, row[:_FIRST_OF_PLANS]), style=style)
        if row.packs != NONE:
            plans.add_row(*map(escape, (row.name, *row[_FIRST_OF_PLANS:])))
    return [reads, plans]


def capacity_table(rows: Sequence[CapacityRow]) -> Table:
    """How many requests fit into the KV pool, by the way its memory is handed out."""
    table = _numbers("Requests that fit into the KV pool at once", CAPACITY_COLUMNS)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _numbers(title: str, columns: Sequence[str]) -> Table:
    """A table whose first column is names, and the others numbers."""
    table = Table(title=title)
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table
