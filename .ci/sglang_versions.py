"""Prints the table of the SGLang versions that were tested, for docs/support.md.

The data is docs/sglang-versions.json: one object for each version that was tried, with what ran.
"""

import json
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "docs/sglang-versions.json"
HEAD = ("SGLang", "Tested on", "torch", "What ran", "Result")


def table() -> str:
    rows = [
        (entry["sglang"], entry["date"], entry["torch"], entry["ran"], entry["result"])
        for entry in json.loads(DATA.read_text())
    ]
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table())
