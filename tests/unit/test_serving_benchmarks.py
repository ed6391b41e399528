"""The parts of the serving benchmarks that need no server: prompts, models, results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.results import earlier, write
from sglang_pat.bench.cases import Case
from sglang_pat.bench.http_server import as_flags, running_process

META = {"commit": "c", "gpu": "g", "torch": "t", "cuda": "u", "versions": {}}


def test_prompts_share_the_prefix_of_their_group_and_nothing_else() -> None:
    prompts = Case(6, 40, 5, 8, groups=3).prompts(1000)
    assert [len(prompt) for prompt in prompts] == [45] * 6
    assert prompts[0][:40] == prompts[1][:40] != prompts[2][:40] == prompts[3][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 6
    assert prompts == Case(6, 40, 5, 8, groups=3).prompts(1000)


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


def test_results_are_continued_by_the_same_commit_only(tmp_path: Path) -> None:
    file = tmp_path / "traffic.json"
    write(file, {"meta": META, "serving": [1]})
    assert earlier(file, META)["serving"] == [1]
    with pytest.raises(ValueError, match="commit 'c', this is 'd'"):
        earlier(file, META | {"commit": "d"})
