"""The HTML report of a replay: one file that needs no network, with charts to hover and zoom.

From a `Result` to a page. The charts are Plotly's, whose script (5 MB) is
part of the file: a chart over 100,000 decode steps is of little use if one cannot look into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from sglang_pat.replay.charts import capacity_charts, time_charts, total_charts
from sglang_pat.replay.forest_chart import forest_chart, largest_table
from sglang_pat.replay.report_text import (
    basis,
    capacity_table,
    fact_groups,
    headline,
    key_numbers,
    main_policy,
    policy_tables,
    settings,
    verdict,
    warnings,
)
from sglang_pat.replay.result import Result

_FOLDER = Path(__file__).parent


def write_report(result: Result, path: Path) -> None:
    """Write the page, UTF-8. Raises OSError where the file cannot be written."""
    path.write_text(render(result), encoding="utf-8")


def render(result: Result) -> str:
    """The page: the same text for the same result. All text in it is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=f"Replay of {result['trace']['name']} - sglang-pat",
        css=(_FOLDER / "report.css").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        result=result,
        verdict=verdict(result),
        headline=headline(result),
        basis=basis(result),
        key_numbers=key_numbers(result),
        configuration=settings(result["config"]),
        environment=settings(_without_command(result["meta"])),
        warnings=warnings(result),
        main_policy=main_policy(result),
        policy_tables=policy_tables(result),
        fact_groups=fact_groups(result),
        time_charts=time_charts(result),
        total_charts=total_charts(result),
        forest=forest_chart(result["forest"]),
        largest=largest_table(result["forest"]),
        capacity_charts=capacity_charts(result["capacity"]),
        capacity_table=capacity_table(result["capacity"]),
    )


def _without_command(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The page shows the command apart, to be copied."""
    return {name: value for name, value in meta.items() if name != "command"}
