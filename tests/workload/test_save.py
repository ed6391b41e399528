"""`sglang-pat advise --save`: what was generated replays the same from its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_pat.cli.main import main
from sglang_pat.workload.formats import open_trace
from sglang_pat.workload.generate import generate


def test_saved_trace_replays_as_the_generated_one(tmp_path: Path) -> None:
    saved, first, second = (tmp_path / name for name in ("trace.jsonl", "1.json", "2.json"))
    asked = ["advise", "--generate", "multi-chain", "--limit", "12", "--seed", "5"]
    assert main([*asked, "--save", str(saved), "--json", str(first)]) == 0
    requests = list(open_trace(saved, strict=True).stream)
    assert requests == list(generate("multi-chain", requests=12, seed=5).stream)
    assert main(["advise", "--trace", str(saved), "--json", str(second)]) == 0
    found = [json.loads(path.read_text()) for path in (first, second)]
    for name in ("default", "pat", "steps", "forest"):
        assert found[0][name] == found[1][name]


def test_only_generated_traces_are_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"
    assert main(["advise", "--trace", str(trace), "--save", str(tmp_path / "copy.jsonl")]) == 2
    assert "--save" in capsys.readouterr().err


def test_failed_requests_of_a_trace_are_in_the_result(tmp_path: Path) -> None:
    rows = ["Timestamp,Model,Request tokens,Response tokens", "1,m,50,9", "2,m,60,0"]
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text("\n".join(rows) + "\n")
    assert main(["advise", "--trace", str(trace), "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    assert (found["pat"]["requests"], found["trace"]["left_out"], found["trace"]["malformed"]) == (
        (1, {"requests that failed": 1}, 0)
    )
