"""`sglang-pat bench` without a server: input, batch sizes and verdict."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_pat.bench import comparison, server
from sglang_pat.bench.cases import Case
from sglang_pat.bench.comparison import Compared, ComparedModel, compare, fit, verdict
from sglang_pat.bench.decoding import DecodeRun, Spread
from sglang_pat.cli import bench, server_options
from sglang_pat.cli.gpus import Gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "max_position_embeddings": 9000,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def has_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_options.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(server_options, "attention_backends", lambda: {"fa3", "triton"})
    known = {"--tp-size", "--attention-backend", "--decode-attention-backend", "--port", "--x"}
    known.add("--config")
    monkeypatch.setattr(server_options, "launch_flags", lambda: known)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--against", "pat"], "--against pat; allowed: another backend of SGLang, or default"),
        (["--server-args", "--attention-backend fa3"], "--against names the other backend"),
        (["--server-args", "--attention-back fa3"], "--against names the other backend"),
        (["--server-args=--decode-attention-backend=fa3"], "--against names the other backend"),
        (["--server-args", "--tp 2 --port 3"], "must not contain --port; it is set here"),
        (["--server-args", "--help"], "must not contain --help; it is set here"),
        (
            ["--server-args", "--config /no/such.yaml"],
            "--config '/no/such.yaml': there is no such file",
        ),
        (["--against", "nosuch"], "--against 'nosuch'; allowed: default, fa3, triton"),
        (["--model", "/nowhere"], "model '/nowhere'; allowed: llama-3.1-8b, llama-3-8b, "),
        (["--model", "qwen3-8b", "--weights"], "--weights: qwen3-8b has none; allowed: with a "),
        (
            ["--model", "{folder}/cheese.json"],
            "/cheese.json: neither the installed SGLang nor transformers",
        ),
        (["--json", "{folder}/config.json"], "would overwrite the input"),
        ([], "no NVIDIA GPU that the driver reports"),
    ],
)
def test_wrong_input_is_one_line(
    flags: list[str], message: str, config: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_options, "find_gpus", list)
    has_sglang(monkeypatch)
    (config.parent / "cheese.json").write_text('{"architectures": ["Cheese"]}')
    flags = [flag.format(folder=config.parent) for flag in flags]
    model = [] if "--model" in flags else ["--model", config]
    cli("bench", *model, *flags).check_refusal(message)


@pytest.mark.usefixtures("servers")
def test_a_machine_that_cannot_run_the_servers(
    config: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "--tp 2; allowed: up to the 1 GPUs of this machine"
    cli("bench", "--model", config, "--tp", 2).check_refusal(message)
    monkeypatch.setattr(server_options.importlib.util, "find_spec", lambda _: None)
    cli("bench", "--model", config).check_refusal("SGLang is not installed")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": 5}, "not a model's config.json: it names no architectures"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": 512}, "vocab_size=512; allowed: more than 512"),
        ({"max_position_embeddings": 300}, "the context ends at 300"),
    ],
)
def test_a_model_that_cannot_be_measured_starts_no_server(
    changed: dict[str, Any], message: str, config: Path, servers: FakeServers, cli: Any
) -> None:
    config.write_text(json.dumps(CONFIG | changed))
    told = cli("bench", "--model", config)
    told.check_refusal(message)
    assert f"sglang-pat bench: {config}: " in told.err
    assert servers.started == []


def test_other_plug_ins_may_bring_backends(
    config: Path, servers: FakeServers, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = [EntryPoint(name, "m:f", "g") for name in ("mine", "pat", "smg-zmq")]
    servers.pools["mine"] = 10_000
    monkeypatch.setattr(server_options, "entry_points", lambda group: plugins)
    assert cli("bench", "--model", config, "--against", "mine").status == 0
    monkeypatch.setattr(server_options, "entry_points", lambda group: plugins[1:])
    assert cli("bench", "--model", config, "--against", "mine").status == 2


def test_weights_are_random_or_come_from_the_folder_of_the_config(
    config: Path, servers: FakeServers, cli: Any
) -> None:
    assert cli("bench", "--model", "qwen3-8b").status == 0
    (_, _, arguments, there), _ = servers.started
    assert (arguments["load_format"], there) == ("dummy", True)
    assert cli("bench", "--model", config.parent, "--weights").status == 0
    assert servers.models[2:] == [config.parent] * 2
    assert all("load_format" not in arguments for _, _, arguments, _ in servers.started[2:])


def test_arguments_that_the_server_refuses_are_told_in_one_line(
    config: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    said = (
        "usage: launch_server.py\n  [-h]\nlaunch_server.py: error: argument --x: invalid int: 'y'"
    )
    script = f"import sys; print({said!r}); sys.exit(2)"
    monkeypatch.setattr(server, "LAUNCH", (sys.executable, "-c", script))
    monkeypatch.setattr(server_options, "find_gpus", lambda: [Gpu("H100", (9, 0), "1")])
    has_sglang(monkeypatch)
    told = cli("bench", "--model", config, "--server-args", "--x y")
    assert told.status == 2
    assert told.err == (
        "sglang-pat bench: --server-args '--x y': launch_server.py: error: argument --x: invalid "
        "int: 'y'\n"
    )


def test_a_case_is_made_smaller_until_the_server_holds_it() -> None:
    model, case = ComparedModel(Path(), 1000, 9000), Case(64, 4096, 256, 136)
    large = {"max_total_num_tokens": 100_000, "context_length": None}
    assert fit(case, model, large) == case
    assert fit(case, model, large | {"max_total_num_tokens": 20_000}).batch == 16
    assert fit(case, model, large | {"context_length": 2000}).prefix == 2000 - 256 - 136 - 1
    with pytest.raises(RuntimeError, match="of 1600 tokens of KV"):
        fit(case, model, large | {"max_total_num_tokens": 2000})
    with pytest.raises(RuntimeError, match="the context ends at 300"):
        fit(case, model, large | {"context_length": 300})


def _compared(gain: float, spread: float) -> Compared:
    runs = [DecodeRun({8: 1.0, 16: 1.0, 24: 1.0}, 1.0, 1.0, [])]
    slices = {8: gain - spread, 16: gain, 24: gain + spread}
    case = Case(4, 0, 8, 8)
    measured = [
        comparison.Measured(1.0, {}, {"x": case}, {"x": each})
        for each in (runs, [DecodeRun(slices, 1.0, 1.0, [])])
    ]
    (found,) = compare(*measured)
    return found


def test_the_verdict_knows_its_noise() -> None:
    faster, equal, slower = _compared(1.3, 0.02), _compared(1.0, 0.02), _compared(0.9, 0.01)
    noisy = _compared(1.3, 0.3)
    assert (
        verdict([faster, equal], "fa3")
        == "pat is faster x (1.30x), as fast x (1.00x), against fa3."
    )
    assert "slower x (0.90x)" in verdict([slower], "fa3")
    assert "too noisy to judge x (1.30x)" in verdict([noisy], "fa3")
    # Gain and loss are within the error of the median.
    for gain in (0.98, 1.02):
        assert f"as fast x ({gain:.2f}x)" in verdict([_compared(gain, 0.04)], "fa3")
    result = faster.as_dict("fa3")
    assert result["tokens_per_second"] == pytest.approx({"pat": 4000, "fa3": 4000 / 1.3})
    assert result["gain"]["median"] == pytest.approx(1.3)
    assert not result["too_noisy"]


def test_a_narrow_terminal_cuts_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    slow = Spread(1234.567, 1200.111, 1288.888, 1.0)
    case = Case(64, 4096, 256, 32)
    compared = Compared("shared", case, slow, slow, Spread(1.609, 1.596, 1.627, 0.01))
    Console(width=80).print(bench._table([compared], "fa3 (SGLang's default)"))
    text = capsys.readouterr().out
    for number in ("1234.567", "1200.111", "1288.888)", "1.609", "1.596", "1.627)", "256"):
        assert number in text


class FakeServer:
    """Stands in for a server: reports its arguments, and decodes at its own speed."""

    def __init__(self, backend: str, pool: int, log: list[Any]) -> None:
        self.backend, self.pool, self.log = backend, pool, log

    def info(self) -> dict[str, Any]:
        return {
            "max_total_num_tokens": self.pool,
            "decode_attention_backend": "pat" if self.backend == "pat" else "fa3",
            "pat": {"layers": 4},
        }

    def flush(self) -> None:
        self.log.append((self.backend, "flush"))

    def generate(self, prompts: list[list[int]], sampling: Any) -> None:
        self.log.append((self.backend, len(prompts), len(prompts[0])))

    def stats(self) -> dict[str, Any]:
        return {"plans_built": 3} if self.backend == "pat" else {}


class FakeServers:
    """Stand-in for SGLang's servers.

    pools: KV tokens. fails: raised by pat's pass without sharing. log, started: requests, and
    arguments of the servers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.started: list[Any] = []
        self.pools = {"pat": 10_000, "default": 10_000}
        self.fails: BaseException | None = None
        monkeypatch.setattr(comparison, "running_server", self.running_server)
        monkeypatch.setattr(comparison, "decode_run", self.decode_run)
        monkeypatch.setattr(server_options, "find_gpus", lambda: [Gpu("H100", (9, 0), "1")])
        has_sglang(monkeypatch)
        monkeypatch.setenv("COLUMNS", "200")
        self.models: list[Path] = []
        self.held_up = 0  # passes of pat whose tokens all come at once

    @contextlib.contextmanager
    def running_server(
        self, contender: Any, model: Path, folder: Path, *, flags: list[str], **arguments: Any
    ) -> Iterator[FakeServer]:
        self.models.append(model)
        there = (model / "config.json").exists()
        self.started.append((contender.backend, flags, arguments, there))
        name = contender.backend or "default"
        yield FakeServer(name, self.pools[name], self.log)

    def decode_run(self, server: FakeServer, prompts: list[list[int]], tokens: int) -> DecodeRun:
        if self.fails is not None and server.backend == "pat" and prompts[0][:1] != prompts[-1][:1]:
            raise self.fails
        speed = 2.0 if server.backend == "pat" else 3.0
        if server.backend == "pat" and self.held_up:
            self.held_up -= 1
            speed = 0.1
        return DecodeRun(dict.fromkeys(range(8, tokens, 8), speed), 5.0, 1.0, [])


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeServers:
    return FakeServers(monkeypatch)


def test_two_servers_serve_the_same_batches(
    config: Path, tmp_path: Path, servers: FakeServers, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(server_options, "find_gpus", lambda: [Gpu("H100", (9, 0), "1")] * 2)
    flags = ["--tp", "2", "--server-args", "--x y", "--json", out, "--requests", "16"]
    told = cli("bench", "--model", config, *flags)
    assert told.status == 0
    faster = "pat is faster with a shared prefix (1.50x), faster with nothing shared (1.50x)"
    assert faster in told.out
    assert "fa3 (SGLang's default)" in told.out
    assert [(backend, flags) for backend, flags, *_ in servers.started] == [
        (None, ["--tp", "2", "--x", "y"]),
        ("pat", ["--tp", "2", "--x", "y"]),
    ]
    for *_, arguments, there in servers.started:
        assert there
        assert arguments["load_format"] == "dummy"
        assert arguments["max_running_requests"] == 16
    of_pat = [entry[1:] for entry in servers.log if entry[0] == "pat"]
    assert of_pat == [entry[1:] for entry in servers.log if entry[0] == "default"]
    assert (4, 1024) in of_pat  # 16 requests do not fit into 10,000 tokens
    result = json.loads(out.read_text())
    assert [case["requests"] for case in result["cases"]] == [8, 4, 1]
    assert result["cases"][0]["tpot_ms"]["pat"]["median"] == 2.0
    assert result["servers"]["pat"]["stats"] == {"plans_built": 3}
    assert result["meta"]["gpus"] == [{"name": "H100", "driver": "1"}] * 2
    assert result["meta"]["server_args"] == "--tp 2 --x y"
    assert result["failure"] is None


@pytest.mark.parametrize(
    ("failure", "message", "status"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (SystemExit(143), "told to end", 143),
        (RuntimeError("out of memory"), "out of memory", 1),
    ],
)
def test_what_was_measured_before_the_end_is_kept(
    failure: BaseException,
    message: str,
    status: int,
    config: Path,
    tmp_path: Path,
    servers: FakeServers,
    cli: Any,
) -> None:
    servers.fails = failure
    out = tmp_path / "out.json"
    told = cli("bench", "--model", config, "--json", out)
    assert (told.status, told.err) == (status, f"sglang-pat bench: {message}\n")
    assert "pat is faster with a shared prefix (1.50x), against fa3" in told.out
    result = json.loads(out.read_text())
    assert result["failure"] == message
    assert [case["name"] for case in result["cases"]] == ["with a shared prefix"]
    # The measurements of the other server are kept.
    assert len(result["servers"]["default"]["tpot_ms"]) == 3
    assert list(result["servers"]["pat"]["tpot_ms"]) == ["with a shared prefix"]


def test_a_pass_that_was_asked_again_is_told_and_kept(
    config: Path, tmp_path: Path, servers: FakeServers, cli: Any
) -> None:
    servers.held_up = 1
    out = tmp_path / "out.json"
    told = "pat, 8 requests, 4096 shared + 256 private: 0.10 ms per token came at once, asked again"
    assert told in cli("bench", "--model", config, "--json", out).out
    result = json.loads(out.read_text())
    assert result["servers"]["pat"]["held_up_ms"] == {
        "with a shared prefix": [0.1],
        "with nothing shared": [],
        "with one request": [],
    }
    assert result["cases"][0]["tpot_ms"]["pat"]["low"] == 2.0


def test_batches_of_different_sizes_are_not_compared(
    config: Path, servers: FakeServers, cli: Any
) -> None:
    """Batches leave a fifth of the first pool free, so that they fit into a smaller second pool."""
    servers.pools["pat"] = 7_500  # the largest batch takes 7,232 tokens
    assert cli("bench", "--model", config).status == 0
    servers.pools["pat"] = 6_000
    told = cli("bench", "--model", config)
    assert told.status == 1
    assert "8 requests, 4096 shared" in told.err
    assert "pat holds less than the server before it" in told.err
    assert "gain" not in told.out
