"""Prints tables and failures on the terminal."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rich.console import Console
from rich.table import Table

console = Console(width=132, highlight=False)


def show_failure(text: str) -> None:
    """Print a text in red, without markup, because a log may have brackets."""
    console.print("FAILED", style="bold red", end=" ")
    console.print(text, markup=False)


def table_of(title: str, columns: Iterable[str], *, words: Container[str] = ()) -> Table:
    """Return a table whose columns are numbers, flush right, except those of `words`."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right")
    return table
