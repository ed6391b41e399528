"""Parts of the demo: workload, comparison, exit status, and the end of its session."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.bench.answers import Candidate
from sglang_pat.cli import demo
from sglang_pat.cli.demo import comparison, session
from sglang_pat.cli.demo.engine import DemoMachine, Served
from sglang_pat.cli.demo.report import (
    TIE_LOGPROB,
    DemoReport,
    Difference,
    differences,
    show_answers,
)
from sglang_pat.cli.demo.session import SHARED_MEMORY, run_in_session
from sglang_pat.cli.demo.workload import (
    DOCUMENTS_PER_SYSTEM_PROMPT,
    END,
    NEW_TOKENS,
    NUM_SYSTEM_PROMPTS,
    SYSTEM_PROMPT_TOKENS,
    DemoRequest,
    Words,
    make_requests,
)
from sglang_pat.cli.main import main

TRAINED_CONTEXT = 1024  # tokens of the model's training texts
STATS = {
    "plans_built": 3,
    "plans_reused": 5,
    "causes": {"first": 1, "batch_changed": 2},
    "kv_tokens_query_centric": 900,
    "kv_tokens_planned": 300,
    "kv_tokens_lower_bound": 200,
}


def test_workload_is_a_tree_of_three_levels() -> None:
    prompts = [request.prompt for request in make_requests(64)]
    systems = Counter(tuple(prompt[:64]) for prompt in prompts)
    contexts = Counter(tuple(prompt[: SYSTEM_PROMPT_TOKENS[1] + 64]) for prompt in prompts)
    assert len(systems) == NUM_SYSTEM_PROMPTS
    assert len(contexts) == NUM_SYSTEM_PROMPTS * DOCUMENTS_PER_SYSTEM_PROMPT
    assert min(contexts.values()) > 1
    assert len({tuple(prompt) for prompt in prompts}) > 0.9 * len(prompts)
    assert max(map(len, prompts)) + NEW_TOKENS[1] < TRAINED_CONTEXT


def test_prompts_are_texts_and_answers_are_shown_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison.console, "width", 200)  # breaks no line of the longest question
    requests, words = make_requests(48), Words()
    for request in requests:
        assert (
            words.answer(request.prompt[-len(words.tokens(request.question)) :]) == request.question
        )
    answers = [words.tokens(f"the answer {i}{END} and more") for i in range(48)]
    show_answers(requests, answers)
    printed = capsys.readouterr().out
    assert requests[0].question in printed
    assert "the answer 0" in printed
    assert "the answer 2" in printed
    assert "and more" not in printed


def test_workload_is_the_same_every_time_and_arrives_over_time() -> None:
    requests = make_requests(64)
    assert requests == make_requests(64)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == len(arrivals)
    assert len({request.num_new_tokens for request in requests}) > 8


@pytest.mark.parametrize(
    ("pat", "own", "expected"),
    [
        ([[1, 2], [3]], [[1, 2], [3]], []),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], [Difference(1, 1, 4, 5)]),
        ([[1, 9, 9], [8]], [[1, 2, 3], [3]], [Difference(0, 1, 9, 2), Difference(1, 0, 8, 3)]),
        ([[1]], [[1, 2]], [Difference(0, 1, None, 2)]),
        ([[1, 2]], [[1]], [Difference(0, 1, 2, None)]),
    ],
)
def test_differences(
    pat: list[list[int]], own: list[list[int]], expected: list[Difference]
) -> None:
    assert differences(pat, own) == expected


@pytest.mark.parametrize(
    ("gap", "second_token", "tied"),
    [(TIE_LOGPROB / 2, 7, True), (TIE_LOGPROB * 2, 7, False), (TIE_LOGPROB / 2, 8, False)],
)
def test_a_tie_needs_both_tokens_close_in_both_runs(
    gap: float, second_token: int, tied: bool
) -> None:
    def served(token: int, other: int, gap: float) -> Served:
        certain = [Candidate(-0.1, 5), Candidate(-9.0, 6)]
        return Served(
            [[5, token]], 1.0, [[certain, [Candidate(-2, token), Candidate(-2 - gap, other)]]]
        )

    report = DemoReport("default", served(2, second_token, gap), served(7, 2, 0.001), STATS)
    assert report.ties == ([Difference(0, 1, 2, 7)] if tied else [])
    assert report.difference == (None if tied else Difference(0, 1, 2, 7))


def test_report_counts_equal_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    DemoReport("torch_native", Served([[1, 2]], 1.0), Served([[1, 7]], 1.0), STATS).print()
    printed = capsys.readouterr().out
    assert "1/2" in printed
    assert "3.00 times fewer" in printed
    assert "batch changed: 2, first: 1" in printed


def test_the_verdict_is_one_sentence() -> None:
    own = Served([[1, 7]], 1.0)
    assert DemoReport("torch_native", own, own, STATS).verdict() == (
        "All 2 tokens are equal, and pat read 3.0 times less KV than torch_native."
    )
    assert DemoReport("torch_native", Served([[1, 2]], 1.0), own, STATS).verdict() == (
        "Tokens differ: request 0, new token 1: pat gave 2, torch_native gave 7. Please report it."
    )
    tied = [
        Served([[token]], 1.0, [[[Candidate(-1, token), Candidate(-1, other)]]])
        for token, other in ((2, 7), (7, 2))
    ]
    assert DemoReport("default", *tied, STATS).verdict() == (
        "All 1 tokens are equal (1 requests compared up to a tie of two tokens), and pat read 3.0 "
        "times less KV than default."
    )


@pytest.mark.parametrize(("own_token", "status"), [(2, 0), (7, 1)])
def test_exit_status_and_json(
    own_token: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(
        model_path: Path,
        backend: str,
        requests: list[DemoRequest],
        machine: DemoMachine,
        stats_file: Path | None = None,
    ) -> Served:
        assert (model_path / "config.json").is_file()
        assert machine.exact
        if backend == "pat":
            assert os.environ["SGLANG_PAT_STATS_FILE"] == str(stats_file)
            return Served([[2]] * len(requests), 1.0, stats=STATS)
        assert "SGLANG_PAT_STATS_FILE" not in os.environ
        assert stats_file is None
        return Served([[2]] * (len(requests) - 1) + [[own_token]], 1.0)

    monkeypatch.setattr(comparison, "serve", serve)
    monkeypatch.setattr(comparison, "enable_cpu_engine", lambda: True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result_file = tmp_path / "result.json"
    assert comparison.compare(48, result_file) == status
    result = json.loads(result_file.read_text())
    difference = {"request": 47, "position": 0, "pat": 2, "own": 7} if status else None
    assert result["first_difference"] == difference
    assert result["decode_steps"] == 8
    assert result["stats"] == STATS


def test_the_command_runs_the_comparison_in_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def fake(command: list[str]) -> int:
        commands.append(command[1:])
        return 1

    monkeypatch.setattr(demo, "run_in_session", fake)
    monkeypatch.setattr(demo, "_quieten", lambda: None)
    assert main(["demo"]) == 1
    assert main(["demo", "--requests", "48", "--json", str(tmp_path / "f")]) == 1
    module = ["-m", "sglang_pat.cli.demo.comparison"]
    assert commands == [[*module, "64"], [*module, "48", str(tmp_path / "f")]]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cli("demo").check_refusal("sglang and rich missing: pip install '.[sglang]'")


def test_a_wrong_variable_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    monkeypatch.setattr(demo, "run_in_session", lambda command: pytest.fail("started"))
    monkeypatch.setenv("SGLANG_PAT_POLICE", "memory")
    message = "sglang-pat demo: error: unknown variable SGLANG_PAT_POLICE; allowed: "
    cli("demo").check_refusal(message)


# Starts a process that outlives its parent, writes files, and ignores Ctrl-C.
CHILD = """
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder, name = sys.argv[1:]
open(os.path.join(os.environ["TMPDIR"], "temporary"), "w").close()
descriptor = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
os.close(descriptor)
os.link(f"/dev/shm/{name}", f"/dev/shm/{name}_linked")
os.unlink(f"/dev/shm/{name}")
pid = os.fork()
with open(os.path.join(folder, str(os.getpid())), "w") as file:
    file.write(os.environ["TMPDIR"])
if pid == 0:
    os.setpgid(0, 0)
time.sleep(60 if len(os.listdir(folder)) < 3 else 0)
"""
PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from sglang_pat.cli import main
from sglang_pat.cli.demo import session
session._POLL_S = 0.1
main.demo.run_in_session = lambda command: session.run_in_session(sys.argv[1:])
main.demo._quieten = lambda: None
sys.exit(main.main(["demo"]))
"""


@pytest.fixture
def shared_memory() -> str:
    name = f"sglang_pat_test_{os.getpid()}"
    yield name
    for path in SHARED_MEMORY.glob(f"{name}*"):
        path.unlink()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_all_and_leaves_nothing(
    number: int, status: int, tmp_path: Path, shared_memory: str
) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), shared_memory]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while len([p for p in tmp_path.iterdir() if p.read_text()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    memory = SHARED_MEMORY / f"{shared_memory}_linked"  # mapped under another name
    assert memory.exists()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    temporary = Path(next(tmp_path.iterdir()).read_text())
    assert (temporary / "temporary").exists()
    time.sleep(0.3)  # the demo checks the session every 0.1 s
    parent.send_signal(number)
    _, error = parent.communicate(timeout=60)
    assert parent.returncode == status
    assert error == ("sglang-pat: interrupted\n" if number == signal.SIGINT else "")
    assert not any(map(is_alive, pids))
    assert not temporary.exists()
    assert not memory.exists()


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_status_is_that_of_the_command(code: str, status: int) -> None:
    assert run_in_session([sys.executable, "-c", f"import os; {code}"]) == status


def test_what_was_there_before_stays(shared_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_POLL_S", 0.1)
    path = SHARED_MEMORY / shared_memory
    path.write_bytes(bytes(8))
    code = f"import time; file = open({str(path)!r}); time.sleep(0.3)"
    assert run_in_session([sys.executable, "-c", code]) == 0
    assert path.exists()


def test_processes_that_are_left_over_are_ended(tmp_path: Path) -> None:
    """The command has ended, but a process that it started would continue."""
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    )
    assert run_in_session([sys.executable, "-c", code]) == 0
    assert not is_alive(int((tmp_path / "pid").read_text()))
