"""`sglang-pat advise --save`: what was generated replays the same from its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.generate import generate


def test_saved_trace_replays_as_the_generated_one(advise: Any, tmp_path: Path) -> None:
    saved, first, second = (tmp_path / name for name in ("trace.jsonl", "1.json", "2.json"))
    asked = ["--generate", "multi-chain", "--limit", "12", "--seed", "5"]
    assert advise(*asked, "--save", saved, "--json", first).status == 0
    requests = list(open_trace(saved, strict=True).stream)
    assert requests == list(generate("multi-chain", requests=12, seed=5).stream)
    assert advise("--trace", saved, "--json", second).status == 0
    found = [json.loads(path.read_text()) for path in (first, second)]
    for name in ("default", "pat", "steps", "forest"):
        assert found[0][name] == found[1][name]


def test_failed_requests_of_a_trace_are_in_the_result(advise: Any, tmp_path: Path) -> None:
    rows = ["Timestamp,Model,Request tokens,Response tokens", "1,m,50,9", "2,m,60,0"]
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text("\n".join(rows) + "\n")
    assert advise("--trace", trace, "--json", result).status == 0
    found = json.loads(result.read_text())
    assert (found["pat"]["requests"], found["trace"]["left_out"], found["trace"]["malformed"]) == (
        (1, {"requests that failed": 1}, 0)
    )
