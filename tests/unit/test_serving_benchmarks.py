"""Parts of the serving benchmarks without a server: requests, comparisons, predictions."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import random_weights
from common.fleet import Member, wait
from server import compare
from server.compare import arguments_of, gates, server_bytes
from server.scenarios import BACKENDS, SCENARIOS, Scenario, shared
from sglang_pat.bench import server as bench_server
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun
from sglang_pat.bench.http_server import as_flags, running_process
from sglang_pat.bench.server import Server


def test_prompts_share_the_prefix_of_their_group_and_nothing_else() -> None:
    prompts = Case(6, 40, 5, 8, groups=3).prompts(1000)
    assert [len(prompt) for prompt in prompts] == [45] * 6
    assert prompts[0][:40] == prompts[1][:40] != prompts[2][:40] == prompts[3][:40]
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 6
    assert prompts == Case(6, 40, 5, 8, groups=3).prompts(1000)


class NormalisedAttention(torch.nn.Module):
    def __init__(self, scaling: float, columns: int) -> None:
        super().__init__()
        self.q_norm = torch.nn.Module()
        self.q_norm.weight = torch.nn.Parameter(torch.ones(columns))
        self.attn = SimpleNamespace(scaling=scaling, qk_head_dim=64)


@pytest.mark.parametrize(
    ("scaling", "columns", "size"),
    [(1, 64, 1 / 8), (1 / 8, 64, 1.0), (1 / 8, 256, 1.0), (1 / 16, 64, 1.0)],
)
def test_random_weights_give_logits_of_unit_scale(
    scaling: float, columns: int, size: float
) -> None:
    """Gemma 4 does not scale its logits; norms of other models may span all heads."""
    layer = NormalisedAttention(scaling, columns)
    random_weights.draw(layer)
    weights = layer.q_norm.weight.detach()
    assert weights.mean().item() == pytest.approx(size, rel=0.1)
    assert weights.std().item() == pytest.approx(0.1 * size, rel=0.3)


def test_switches_that_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's command line cannot turn them off, and some are on by default."""
    commands: list[list[str]] = []

    def run(command: list[str], *_: object, **__: object) -> Any:
        commands.append(command)
        return nullcontext(SimpleNamespace(url=""))

    monkeypatch.setattr(bench_server, "running_process", run)
    model, pat = tmp_path, bench_server.Contender("pat", "pat")
    with bench_server.running_server(pat, model, tmp_path, enable_multimodal=False):
        assert commands[0][-2:] == ["sglang_pat.sglang.cpu", "--off=enable_multimodal"]
    given = {"model_path": "m", "tp_size": 2, "disable_cuda_graph": True, "sleep_on_idle": False}
    assert as_flags({"bs": [1, 8]}) == ["--bs", "1", "8"]
    assert as_flags(given) == ["--model-path", "m", "--tp-size", "2", "--disable-cuda-graph"]


def test_a_server_has_the_variables_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of the benchmark replace the shell's; the shell's others are kept."""
    monkeypatch.setenv("GIVEN", "by the shell")
    monkeypatch.setenv("ALONE", "by the shell")
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import os; print(os.environ['GIVEN'], os.environ['ALONE'])"]
    environment = {"GIVEN": "by the benchmark"}
    with running_process(command, {}, log, start_seconds=None, environment=environment) as server:
        assert server.process.wait() == 0
    assert log.read_text() == "by the benchmark by the shell\n"


def test_a_server_whose_model_falls_back_has_no_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a server plans nothing and writes no file. Other servers must write one."""
    server = Server(SimpleNamespace(url=""), tmp_path / "stats.json")  # type: ignore[arg-type]
    layers = {"pat_layers": 0}
    monkeypatch.setattr(server, "info", lambda: {"pat": layers})
    assert server.stats() == {}
    layers["pat_layers"] = 2
    with pytest.raises(FileNotFoundError):
        server.stats()


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_batch_fits_its_servers(name: str) -> None:
    scenario = SCENARIOS[name]
    arguments = arguments_of(scenario)
    assert BACKENDS[scenario.backends[0]].contender.is_pat
    assert len(scenario.backends) > 1
    for batch in scenario.batches:
        case = batch.case
        prompts = case.prompts(2000)
        more = compare.TAIL + max(case.generated, compare.ANSWER_TOKENS)
        distinct = sum(len(prompt) - case.prefix + more for prompt in prompts)
        assert distinct + case.groups * case.prefix <= arguments["max_total_tokens"]
        assert max(map(len, prompts)) + more < arguments["context_length"]
        assert case.batch in arguments["cuda_graph_bs_decode"]
        assert case.batch <= arguments["max_running_requests"]
        if "max_mamba_cache_size" in arguments:  # SGLang caches states at multiples of chunks
            assert case.prefix % 64 == case.private % 64 == 0
    assert len({batch.name for batch in scenario.batches}) == len(scenario.batches)


def test_one_server_of_each_scenario_fits_on_80_gb() -> None:
    for name, scenario in SCENARIOS.items():
        assert server_bytes(scenario) < 0.9 * 80e9, name


class StubServer:
    """Answers each prompt with its last token, or with another if its name is `xqa`."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.wrong = name, said, name == "xqa"

    def flush(self) -> None:
        self.said.append(f"{self.name} flushes")
        time.sleep(0.05)  # another server could begin

    def stats(self) -> dict[str, Any]:
        return {}

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> list[dict[str, Any]]:
        self.said.append(f"{self.name} {len(prompts)}")
        return [self._answer(prompt[-1] + self.wrong) for prompt in prompts]

    def _answer(self, token: int) -> dict[str, Any]:
        top = [[-0.5, token, None], [-0.9, token + 1, None]]
        return {"output_ids": [token], "meta_info": {"output_top_logprobs": [top]}}


def test_servers_of_a_batch_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers on several GPUs fill their caches one after the other."""

    def ask(members: list[Any], prompts: Any, tokens: int, rounds: int) -> dict[str, Any]:
        times = {"pat": 2.0, "fa3": 6.0, "xqa": 4.0}
        slices = {each.name: dict.fromkeys((8, 16, 24), times[each.name]) for each in members}
        return {name: [DecodeRun(each, 1.0, 1.0, [])] * rounds for name, each in slices.items()}

    monkeypatch.setattr(compare, "ask_in_turn", ask)
    said: list[str] = []
    members: Any = {
        name: SimpleNamespace(name=name, server=StubServer(name, said), failure=None)
        for name in ("pat", "fa3", "xqa")
    }
    batch = shared(5, 128, 64, 2.5)
    measured = compare.Measured("s", Scenario("llama-3-8b", (*members,), (batch,), {"tp_size": 2}))
    # Servers of another group come later, and are compared with the recorded answers.
    measured.measure(batch, {"pat": members["pat"]}, 2)
    assert measured.cases()[0]["over_pat"] == {}
    measured.measure(batch, {name: members[name] for name in ("fa3", "xqa")}, 2)
    (found,) = measured.cases()
    assert [found["over_pat"][name]["median"] for name in ("fa3", "xqa")] == [3.0, 2.0]
    assert [found["answers"][name]["equal"] for name in ("fa3", "xqa")] == [5, 0]
    assert found["own_answers"]["fa3"]["equal"] == 5
    pat, fa3, xqa = ([f"{each} {n}" for n in ("flushes", 1, 5, 5)] for each in members)
    assert said == [*pat, "pat 5", *fa3, *xqa, "fa3 5", "xqa 5", "fa3 2", "fa3 3"]
    assert min(found["fill_seconds"][name] for name in members) >= 0.05
    met = {name: gate["met"] for name, gate in gates({}, [found]).items()}
    assert met == {
        "s, 5 x (128 shared) + 64: fa3 / pat": True,
        "s, 5 x (128 shared) + 64: xqa / pat": False,
        "s, 5 x (128 shared) + 64: answers that part from fa3's, no tie": True,
        "s, 5 x (128 shared) + 64: answers that part from xqa's, no tie": False,
        "s, 5 x (128 shared) + 64: part of the prompts in the cache": True,
    }


class StartingServer:
    """A server that is ready after a number of polls; with `ends` it exits at the first poll."""

    def __init__(self, log: Path, looks: int = 1, *, ends: bool = False) -> None:
        self.process = self
        self.log = log
        self.looks = looks
        self.ends = ends
        log.write_text("".join(f"line {i}\n" for i in range(100)))

    def is_ready(self) -> bool:
        if self.ends:
            raise RuntimeError("the server ended")
        self.looks -= 1
        return self.looks <= 0


def member(tmp_path: Path, name: str, **more: Any) -> Member:
    return Member(name, StartingServer(tmp_path / name, **more))  # type: ignore[arg-type]


def test_servers_that_end_or_hang_do_not_hold_up_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, ended = member(tmp_path, "good", looks=2), member(tmp_path, "ended", ends=True)
    hangs = member(tmp_path, "hangs", looks=1000)
    wait([good, ended, hangs], seconds=1.0)
    assert good.start_seconds is not None
    failures = [each.failure for each in (good, ended, hangs)]
    assert failures == [None, "ended while it started", "not ready after 1 s"]
    assert "line 99" in (printed := capsys.readouterr().out)
    assert "line 69" not in printed


@pytest.mark.parametrize("ignored", [[], ["Ignore import error of x", "OSError: no such library"]])
def test_the_rank_that_failed_first_is_quoted(
    ignored: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = member(tmp_path, "server", ends=True)
    lines = ignored + [f"line {i}" for i in range(50)]
    lines.insert(40 + len(ignored), "[2026-11-27 01:53:26 TP3] ValueError: 7 heads on 8 ranks")
    lines.append("RuntimeError: Rank 0 scheduler died during initialization (exit code: -3).")
    (tmp_path / "server").write_text("\n".join(lines))
    wait([server], seconds=1.0)
    assert server.failure == "ended while it started: ValueError: 7 heads on 8 ranks"
    assert "line 39" in (printed := capsys.readouterr().out)
    assert "line 41" not in printed
