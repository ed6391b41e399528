"""`sglang-pat replay` as a user meets it: what it writes and refuses, how it is interrupted."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
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
    words = json.loads(first.read_text())["meta"]["command"]
    words = shlex.split(words)
    assert words[:2] == ["sglang-pat", "replay"]
    assert replay(*words[2:], "--json", second) == 0
    tokens = [json.loads(path.read_text())["totals"]["kv_tokens"] for path in (first, second)]
    assert tokens[0] == tokens[1]


WRONG = (
    ((), "give a TRACE, --generate NAME or --preset NAME"),
    ((TRACE, "--generate", "toolagent"), "not both"),
    (("--generate", "chatter"), "workload 'chatter'; allowed: conversation"),
    (("--generate", "chatter"), "no-sharing, pat-figure-10"),
    ((TRACE, "--rate", "3"), "--rate 3.0 has no effect on"),
    ((TRACE, "--seed", "0"), "--seed 0 has no effect on"),
    (("--preset", "pat-figure-12", "--seed", "1"), "no effect on pat-figure-10"),
    (("--generate", "toolagent", "--strict"), "--strict True has no effect on toolagent"),
    ((TRACE, "--policies", "memory,greedy"), "a policy is one of memory"),
    ((TRACE, "--model", "gpt-9"), "model 'gpt-9'; allowed: llama-3.1-8b"),
    ((TRACE, "--tp", "5"), "--tp 5: llama-3.1-8b has 32 query heads; allowed: a divisor of 32"),
    (("missing.jsonl",), "missing.jsonl: there is no such file"),
    ((TRACE, "--kv-pool-gb", "1e-6"), "--kv-pool-gb 1e-06 holds 0 tokens of llama-3.1-8b"),
    ((TRACE, "--kv-tokens", "10", "--page-size", "16"), "at least two pages of 16 tokens, got 10"),
    ((TRACE, "--format", "csv"), "format 'csv'; allowed: auto, mooncake"),
    ((TRACE, "--json", TRACE), "would overwrite the input"),
    (("--generate", "toolagent", "--json", "x", "--csv", "./x"), "are the same file"),
    ((TRACE, "--save", "copy.jsonl"), "only what --generate makes can be saved"),
    (("--compare", "a.json", "b.json", "--json", "c.json"), "--json c.json has no effect"),
    (("--compare", "a.json", "b.json"), "a.json"),
)
WRONG_VALUES = (
    (("--max-batch", "0"), "'0'; allowed: a whole number from 1 to 1,048,576"),
    (("--max-batch", "1e9"), "'1e9'; allowed: a whole number from 1 to 1,048,576"),
    (("--kv-pool-gb", "0"), "'0'; allowed: a finite number above 0"),
    (("--kv-pool-gb", "inf"), "'inf'; allowed: a finite number above 0"),
    (("--kv-pool-gb", "nan"), "'nan'; allowed: a finite number above 0"),
    (("--time-scale", "-1"), "'-1'; allowed: a finite number above 0"),
    (("--rate", "nan"), "'nan'; allowed: a number above 0, or inf"),
    (("--forest-step", "-1"), "'-1'; allowed: a whole number from 0"),
    (("--page-size", "a"), "'a'; allowed: a whole number from 1"),
    (("--tp", "0"), "'0'; allowed: a whole number from 1"),
    (("--gpu", "G80"), "'G80' (choose from"),
    (("--json", "no/folder/x"), "does not exist"),
)


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_cannot_be_done_is_said_in_a_line(
    words: tuple[object, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert replay(*words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "message"), WRONG_VALUES)
def test_a_value_that_is_not_allowed_is_named(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        replay(TRACE, *words)
    assert stop.value.code == 2
    assert f"argument {words[0]}: " in (error := capsys.readouterr().err)
    assert message in error


def test_a_wrong_trace_is_refused_before_sglang_is_imported(tmp_path: Path) -> None:
    """And without torch, either of which takes seconds."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": 1}\n')
    program = (
        "import sys; from sglang_pat.cli.main import main; "
        f"status = main(['replay', {str(trace)!r}]); "
        "print(status, 'sglang' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "False", "False"]
    assert "trace.jsonl:0: not a single request (1 malformed lines" in done.stderr


def test_the_trace_survives_its_own_name_as_output(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(TRACE.read_bytes())
    (tmp_path / "link").symlink_to(trace)
    for option in ("--json", "--csv", "--html"):
        for name in ("trace.jsonl", "link"):
            assert replay(trace, option, tmp_path / name) == 2
    assert trace.read_bytes() == TRACE.read_bytes()
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert replay(trace, "--model", tmp_path, "--json", config) == 2
    assert config.read_text() == "{}"


def test_one_output_that_fails_does_not_cost_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"result.{name}" for name in ("csv", "html")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert replay(TRACE, "--limit", 5, "--json", "/dev/full", *flags) == 2
    assert "--json /dev/full: No space left on device" in capsys.readouterr().err
    assert all(path.stat().st_size for path in files.values())


def test_the_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    trace, result = tmp_path / "my trace; rm -rf.jsonl", tmp_path / "result.json"
    trace.write_bytes(TRACE.read_bytes())
    assert replay(trace, "--limit", 3, "--gpu", "h200", "--tp", 2, "--json", result) == 0
    command = json.loads(result.read_text())["meta"]["command"]
    expected = ["sglang-pat", "replay", str(trace), "--limit", "3", "--gpu", "H200", "--tp", "2"]
    assert sorted(shlex.split(command)) == sorted(expected)


def test_a_missing_sglang_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec

    def without_sglang(name: str, *rest: Any) -> Any:
        return None if name == "sglang" else found(name, *rest)

    monkeypatch.setattr(command.importlib.util, "find_spec", without_sglang)
    assert replay(TRACE) == 2
    assert "needs sglang: pip install '.[sglang,replay]' in a clone" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run = Replay.run

    def interrupted(self: Replay, on_progress: Any) -> None:
        run(self, lambda: os.kill(os.getpid(), number))

    monkeypatch.setattr(Replay, "run", interrupted)
    before = signal.getsignal(number)
    file = tmp_path / "result.json"
    # The first one is the command's; the next, at the end of the run, is not any more.
    signal.signal(number, lambda *_: None)
    try:
        assert replay(TRACE, "--json", file, "--capacity") == 128 + number
    finally:
        signal.signal(number, before)
    result = json.loads(file.read_text())
    assert result["meta"]["interrupted"]
    assert result["totals"]["steps"] > 0
    assert result["capacity"] == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_sglang_is_imported_leaves_no_traceback(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "sglang_pat", "replay", str(TRACE)]
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "Loading SGLang" in process.stdout.readline()
        assert time.monotonic() - started < 5
        time.sleep(0.5)  # in the middle of it
        process.send_signal(number)
        output, error = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert output == ""
    assert error == "sglang-pat replay: interrupted before the first step\n"


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
