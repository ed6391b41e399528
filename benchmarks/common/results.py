"""The JSON file of a benchmark, which is written after each measurement.

A later command can continue the file, so that contenders can be measured one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from common.metadata import metadata
from common.terminal import console

# Metadata that must be equal for numbers to be compared.
_SAME = ("commit", "gpu", "torch", "cuda", "versions")


def earlier(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Read `path`. ValueError if it was measured elsewhere or with other versions."""
    data: dict[str, Any] = json.loads(path.read_text())
    for name in _SAME:
        before, now = data["meta"].get(name), meta[name]
        if before != now:
            raise ValueError(
                f"{path} was measured with {name} {before!r}, this is {now!r}: "
                "write to another file"
            )
    return data


def write(path: Path | None, data: Mapping[str, Any]) -> None:
    """Write a file atomically, if `path` is given."""
    if path is None:
        return
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    new.replace(path)


def at_most(value: float, limit: float, *, noise: float = 0.0) -> dict[str, Any]:
    """Return value, limit and whether the limit is met, which `value` may exceed by `noise`."""
    return _gate(value, limit, noise, met=value <= limit + noise)


def at_least(value: float, limit: float, *, noise: float = 0.0) -> dict[str, Any]:
    """Return value, limit and whether it is met, which `value` may miss by `noise`."""
    return _gate(value, limit, noise, met=value >= limit - noise)


def _gate(value: float, limit: float, noise: float, *, met: bool) -> dict[str, Any]:
    more = {"noise": noise} if noise else {}
    return {"value": value, "limit": limit, **more, "met": met}


def report(verdict: Mapping[str, Any], path: Path | None) -> int:
    """Print the findings of a check, with the verdict last, and write them to `path` if given.

    Returns the exit status: 1 if it names failures.
    """
    write(path, {"meta": metadata(), **verdict})
    table = Table(show_header=False)
    for name, found in verdict.items():
        if name != "failures":
            table.add_row(name, Text(json.dumps(found)))
    for failure in verdict["failures"]:
        table.add_row("FAILED", Text(failure))
    table.add_row("verdict", "FAILED" if verdict["failures"] else "passed")
    console.print(table)
    return 1 if verdict["failures"] else 0
