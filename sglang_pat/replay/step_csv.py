"""The sampled decode steps of a replay as CSV: one row per step, one column per number.

Behind the simulation. Spreadsheets and pandas read it; the JSON holds the same and the totals.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from sglang_pat.replay.flat import flatten
from sglang_pat.replay.result import StepRow

# The columns of a file without steps; nested objects of a step follow these, named by their keys.
PLAIN_COLUMNS = ("step", "time", "batch", "held_tokens", "cause", "planning_us")


def write_csv(steps: Sequence[StepRow], path: Path) -> None:
    """Write one row per step, UTF-8, with a header.

    Columns of nested values join their keys with a dot: `kv_tokens.policies.memory`. A value that a
    step does not have, of a policy say, is empty. Raises OSError where the file cannot be written.
    """
    rows = [dict(flatten(step)) for step in steps]
    nested = dict.fromkeys(name for row in rows for name in row if name not in PLAIN_COLUMNS)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*PLAIN_COLUMNS, *nested], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
