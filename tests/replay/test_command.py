"""`sglang-pat replay` as a user meets it: what it writes and refuses, how it is interrupted."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.cli import replay as command
from sglang_pat.cli.main import main
from sglang_pat.replay.options import PRESETS
from sglang_pat.replay.pat_trees import PAT_TREES, PrefixTree, figure_10_trace
from sglang_pat.replay.session import Replay

TRACE = Path(__file__).parents[1] / "support" / "data" / "conversation.jsonl"


def replay(*words: object) -> int:
    return main(["replay", *map(str, words)])


def test_every_output_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"result.{name}" for name in ("json", "csv", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert replay(TRACE, "--limit", 30, "--kv-tokens", 60_000, "--capacity", *flags) == 0
    result = json.loads(files["json"].read_text())
    assert result["totals"]["requests"] == 30
    assert set(result["totals"]["kv_tokens"]["policies"]) == set(result["config"]["policies"])
    assert result["capacity"]["uses"]
    assert not result["meta"]["interrupted"]
    with files["csv"].open() as file:
        assert len(list(csv.DictReader(file))) == len(result["steps"])
    assert "<html" in files["html"].read_text()
    assert "Replay of conversation.jsonl" in capsys.readouterr().out


def test_the_command_in_the_result_repeats_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    given = ["--generate", "rl-rollout", "--limit", "20", "--seed", "9", "--page-size", "16"]
    assert replay(*given, "--json", first) == 0
    words = json.loads(first.read_text())["meta"]["command"].split()
    assert words[:2] == ["sglang-pat", "replay"]
    assert replay(*words[2:], "--json", second) == 0
    tokens = [json.loads(path.read_text())["totals"]["kv_tokens"] for path in (first, second)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a TRACE, --generate NAME or --preset NAME"),
        ((TRACE, "--generate", "toolagent"), "not both"),
        (("--generate", "chatter"), "workload 'chatter'; allowed: conversation"),
        (("--generate", "chatter"), "no-sharing, pat-figure-10"),
        ((TRACE, "--rate", "3"), "--rate 3.0 has no effect on"),
        ((TRACE, "--seed", "0"), "--seed 0 has no effect on"),
        (("--preset", "pat-figure-12", "--seed", "1"), "no effect on pat-figure-10"),
        (("--generate", "toolagent", "--strict"), "--strict True has no effect on toolagent"),
        ((TRACE, "--policies", "memory,greedy"), "a policy is one of memory"),
        ((TRACE, "--model", "gpt-9"), "model 'gpt-9'; allowed: llama-3-8b"),
        (("missing.jsonl",), "missing.jsonl: there is no such file"),
        ((TRACE, "--max-batch", "0"), "max_batch must be at least 1, got 0"),
        ((TRACE, "--kv-pool-gb", "0"), "kv_tokens must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    words: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_missing_sglang_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def without_sglang(name: str, *rest: Any) -> Any:
        return None if name == "sglang" else found(name, *rest)

    monkeypatch.setattr(command.importlib.util, "find_spec", without_sglang)
    assert replay(TRACE) == 2
    assert "needs sglang: pip install '.[sglang,replay]' in a clone" in capsys.readouterr().err


def test_ctrl_c_writes_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Replay.run

    def interrupted(self: Replay, on_progress: Any) -> None:
        run(self, lambda: os.kill(os.getpid(), signal.SIGINT))

    monkeypatch.setattr(Replay, "run", interrupted)
    before = signal.getsignal(signal.SIGINT)
    file = tmp_path / "result.json"
    # The first Ctrl-C is the command's; the next, at the end of the run, is not any more.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        assert replay(TRACE, "--json", file) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    result = json.loads(file.read_text())
    assert result["meta"]["interrupted"]
    assert result["totals"]["steps"] > 0


def test_presets_give_way_to_what_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert replay("--preset", "pat-figure-14", "--limit", 5, "--max-batch", 3, "--json", file) == 0
    result = json.loads(file.read_text())
    assert result["config"]["max_batch"] == 3
    assert result["config"]["policies"] == ["memory"]
    assert result["trace"]["requests"] == 5
    assert result["trace"]["name"] == PRESETS["pat-figure-14"].options["generate"]


def test_figure_10_holds_the_shared_trees_of_the_paper() -> None:
    trace = figure_10_trace()
    trees = [tree for tree in map(PrefixTree.parse, PAT_TREES) if tree.is_shared]
    requests = list(trace.stream)
    assert len(requests) == trace.requests == sum(tree.num_requests for tree in trees)
    for number, tree in enumerate(trees):
        batch = [r for r in requests if r.arrival == requests[0].arrival + number * 1e6]
        assert len(batch) == tree.num_requests
        segments = {segment for request in batch for segment in request.prompt}
        assert sum(segment.length for segment in segments) == tree.num_tokens
