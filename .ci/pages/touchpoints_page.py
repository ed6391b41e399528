"""The documentation's table of the places in SGLang that pat touches, from the adapter's own list.

`python .ci/pages/touchpoints_page.py` writes it into `docs/versioning.md`; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from sglang_pat.offline.installed_sglang import TOUCHPOINTS, Touchpoint

PAGE = Path(__file__).parents[2] / "docs/versioning.md"
KINDS = {
    "name": "pat's name is added",
    "hook": "hook",
    "wrapper": "method of one object replaced",
    "override": "method overridden",
    "class": "class of an object changed",
    "attribute": "note on an object",
    "value": "value set",
    "field": "field read",
}
_BLOCK = re.compile(r"(<!-- touchpoints -->\n\n)(.*?)(\n\n<!-- end of touchpoints -->)", re.DOTALL)


def table() -> str:
    """The table in Markdown."""
    lines = ["| In SGLang | What | Why | Versions |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *map(_row, TOUCHPOINTS)])


def _row(place: Touchpoint) -> str:
    target = place.target.removeprefix("sglang.srt.").replace("|", "` or `")
    name = f", `{place.name}`" if place.name is not None else ""
    versions = "all" if place.not_in is None else f"not {place.not_in}"
    return f"| `{target}`{name} | {KINDS[place.kind]} | {place.why} | {versions} |"


def written() -> str:
    """The page with its present table."""
    text, count = _BLOCK.subn(lambda found: found[1] + table() + found[3], PAGE.read_text())
    assert count == 1
    return text


if __name__ == "__main__":
    PAGE.write_text(written())
