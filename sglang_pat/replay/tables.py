"""The result of a replay on a terminal: rich tables.

Behind the simulation, last thing that the command prints. The rows come from summary.py.
"""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_pat.replay.capacity_rows import capacity_table
from sglang_pat.replay.result import Result
from sglang_pat.replay.summary import (
    LOWER_BOUND,
    QUERY_CENTRIC,
    NumberTable,
    fact_groups,
    headline,
    policy_tables,
    warnings,
)


def print_result(result: Result, console: Console) -> None:
    """Everything that the totals say, warnings first and the result in a sentence last."""
    for warning in warnings(result):
        console.print(f"[bold yellow]WARNING[/] {escape(warning)}")
    console.print(totals_table(result))
    for table in (*policy_tables(result), capacity_table(result["capacity"])):
        if table.rows:
            console.print(number_table(table, dimmed=(QUERY_CENTRIC, LOWER_BOUND)))
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


def number_table(content: NumberTable, dimmed: Collection[str] = ()) -> Table:
    """As rich draws it. dimmed: names of rows that are there to compare with."""
    table = Table(title=escape(content.title))
    for index, heading in enumerate(content.columns):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in content.rows:
        table.add_row(*map(escape, row), style="dim" if row[0] in dimmed else None)
    return table
