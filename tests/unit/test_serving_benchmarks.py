"""The parts of the serving benchmarks that need no server: prompts, models, results."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from common.counters import difference
from common.models import write_tokenizer
from common.results import earlier, write
from sglang_pat.bench.cases import Case
from sglang_pat.bench.http_server import as_flags, running_process
from sglang_pat.bench.server import unused_ports

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
META = {"commit": "c", "gpu": "g", "torch": "t", "cuda": "u", "versions": {}}


# --- what is served ---


def test_prompts_share_the_prefix_of_their_group_and_nothing_else() -> None:
    prompts = Case(6, 40, 5, 8, groups=3).prompts(1000)
    assert [len(prompt) for prompt in prompts] == [45] * 6
    assert prompts[0][:40] == prompts[1][:40] != prompts[2][:40] == prompts[3][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 6
    assert prompts == Case(6, 40, 5, 8, groups=3).prompts(1000)


def test_the_tokenizer_keeps_lengths(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path, 500, end=2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokens = [7, 499, 0, 7, 300]
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(f"{text}\n\n{text}") == tokens + tokens
    assert len(tokenizer.get_vocab()) == 500


def test_switches_that_are_off_are_left_out() -> None:
    given = {"model_path": "m", "tp_size": 2, "disable_cuda_graph": True, "sleep_on_idle": False}
    assert as_flags({"bs": [1, 8]}) == ["--bs", "1", "8"]
    assert as_flags(given) == ["--model-path", "m", "--tp-size", "2", "--disable-cuda-graph"]


def test_a_server_has_the_variables_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the shell has for them; and all others of the shell."""
    monkeypatch.setenv("GIVEN", "by the shell")
    monkeypatch.setenv("ALONE", "by the shell")
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import os; print(os.environ['GIVEN'], os.environ['ALONE'])"]
    environment = {"GIVEN": "by the benchmark"}
    with running_process(command, {}, log, start_seconds=None, environment=environment) as server:
        assert server.process.wait() == 0
    assert log.read_text() == "by the benchmark by the shell\n"


def test_servers_that_start_together_listen_at_other_ports() -> None:
    ports = unused_ports(8)
    assert len(set(ports)) == 8
    with socket.socket() as listener:
        listener.bind(("", ports[0]))  # nobody holds it any more


# --- counters ---


def test_counters_are_subtracted_however_deep() -> None:
    before = {"plans": 3, "causes": {"first": 1}}
    after = {"plans": 10, "causes": {"first": 1, "growth": 4}, "p99": 1.5}
    assert difference(after, before) == {
        "plans": 7,
        "causes": {"first": 0, "growth": 4},
        "p99": 1.5,
    }


# --- results ---


def test_results_are_continued_by_the_same_commit_only(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    write(file, {"meta": META, "serving": [1]})
    assert earlier(file, META)["serving"] == [1]
    with pytest.raises(ValueError, match="commit 'c', this is 'd'"):
        earlier(file, META | {"commit": "d"})
