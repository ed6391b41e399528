"""The command line has the documented defaults, and refuses wrong input in one line."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_pat
from sglang_pat import support
from sglang_pat.cli import build, main
from sglang_pat.cli.gpus import Gpu
from sglang_pat.executors import jit
from sglang_pat.executors.jit import KernelBuildError, KernelConfig
from sglang_pat.executors.kernel_cache import KernelCacheError

ANSWER_SECONDS = 5


def answer(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_pat", *words], capture_output=True, text=True, timeout=60
    )


# --- wrong input ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give a command: doctor, build, calibrate, demo, bench, advise, check"),
        ("serve", "'serve' (choose from 'doctor', 'build', 'calibrate', 'demo', 'bench', "),
        ("--verbose", "unknown argument '--verbose'; allowed: --help, --version"),
        ("doctor --jsn f", "unknown argument '--jsn'; allowed: --help, --json"),
        ("doctor everything", "unknown argument 'everything'; allowed: --help, --json"),
        ("doctor --json /no/f", "--json: '/no/f': its folder /no does not exist"),
        ("doctor --json", "--json: expected one argument"),
        ("build --arch 8.5", "--arch: '8.5'; allowed: 8.0, 8.6, 8.7, 8.9, 9.0, 10.0"),
        ("build --arch 7.5", "--arch: '7.5'; allowed: 8.0,"),
        ("build --tp 8", "--tp '8': allowed: with --model"),
        ("build --dtype float32", "'float32' (choose from 'float16', 'bfloat16')"),
        ("build --head-dim 72", "--head-dim: '72'; allowed: 64, 80, 96, 128, 192/128, 256"),
        ("build --head-dim 128/64", "--head-dim: '128/64'; allowed: 64, 80"),
        ("build --cache=", "--cache: ''; allowed: the path of a folder"),
        (
            "build --arch 9.0 --cache /proc/x",
            "the kernel cache /proc/x cannot be written (No such file or directory): correct "
            "this, or name another folder by --cache",
        ),
        ("demo --requests 47", "--requests: '47'; allowed: a whole number from 48 to 10,000"),
        ("demo --json /proc/x", "--json: '/proc/x': No such file or directory"),
        ("demo --json /", "--json: '/': it is a folder; name a file"),
        ("demo --write-model /etc", "'/etc' is not empty; allowed: a new or an empty folder"),
        ("demo --write-model /etc/passwd", "'/etc/passwd'; allowed: the path of a folder"),
        ("advise --model qwen3-8b", "one of the arguments --trace --generate is required"),
        ("advise --model qwen3-8b --trace /etc/passwd --gpu V100", "'V100' (choose from 'H100', "),
        ("advise --model llama-3.1-70b --generate toolagent", "GB at 2 bytes a parameter on "),
        ("advise --model llama-3.1-70b --generate toolagent", "on each of 1 H100 with 80 GB: "),
        ("calibrate --samples /no/f", "--samples: '/no/f': its folder /no does not exist"),
        ("doctor --support-table rows", "unknown argument 'rows'; allowed: --help"),
        # An unknown option is named before one that is missing.
        ("advise --page 1", "unknown argument '--page'; allowed: --help, --trace"),
        ("advise --trace -", "standard input cannot be read twice; name a file"),
    ],
)
def test_wrong_input_is_answered_in_one_line(words: str, message: str, cli: Any) -> None:
    cli(*words.split()).check_refusal(message)


@pytest.mark.parametrize(
    "words", ["", "doctor --model nofile", "build --arch 9", "advise --trace /no/f"]
)
def test_wrong_input_is_answered_at_once(words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = answer(*words.split())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time is measured, since other tests may run at the same time.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert (child.returncode, child.stdout, child.stderr.count("\n")) == (2, "", 1)
    assert seconds < ANSWER_SECONDS


def test_build_without_a_gpu_asks_for_an_architecture(
    monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    for found in ([], [Gpu("Tesla V100", (7, 0), "580.1")]):
        monkeypatch.setattr(build, "find_gpus", lambda found=found: found)
        message = "no GPU with compute capability 8.0 or newer here: use --arch X.Y"
        cli("build").check_refusal(message)


def test_what_is_wrong_with_a_cache_is_told_with_the_option_that_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    for words, advice in (
        (["--cache", str(tmp_path)], "or name another folder by --cache\n"),
        ([], "or set SGLANG_PAT_KERNEL_CACHE to another folder\n"),
    ):
        monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", str(tmp_path))
        assert main.main(["build", "--arch", "9.0", *words]) == 1
        assert capsys.readouterr().err.endswith(f"run chmod go-w {tmp_path}, {advice}")


def test_build_leaves_out_kernels_that_a_gpu_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message counts the layers that pat would decode on another GPU or with another cache."""
    needs = SimpleNamespace(
        dtype="bfloat16", kv_dtypes=(None, "float8_e4m3fn"), head_dims=((256, 256), (512, 512))
    )
    asked: list[jit.KernelConfig] = []
    monkeypatch.setattr(build, "loadable", lambda *_: "model")
    monkeypatch.setattr(build, "_needs_of", lambda *_: needs)
    monkeypatch.setattr(jit, "build_all", lambda configs, **_: asked.extend(configs) or ())
    words = ["--model", "gemma-4", "--arch", "8.0", "--arch", "9.0", "--cache", str(tmp_path)]
    assert main.main(["build", *words]) == 0
    assert {each.name for each in asked} == {
        "bf16_d256_sm80",
        "bf16_e4m3_d256_sm80",
        "bf16_d256_sm90",
        "bf16_e4m3_d256_sm90",
        "bf16_d512_sm90",
    }


def test_a_bad_variable_is_wrong_input(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", "kernels")
    message = "SGLANG_PAT_KERNEL_CACHE='kernels'; allowed: an abs"
    cli("build", "--arch", "9.0").check_refusal(message)


# --- promises of the documentation ---


def test_the_version() -> None:
    script = Path(sys.executable).parent / "sglang-pat"
    for command in ([sys.executable, "-m", "sglang_pat"], [script]):
        child = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert child.stdout == f"sglang-pat {sglang_pat.__version__}\n"


def test_ctrl_c_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(support, "markdown_table", interrupt)
    assert main.main(["doctor", "--support-table"]) == 130
    assert capsys.readouterr().err == "sglang-pat: interrupted\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])  # empty counts as unset
def test_a_reader_that_has_enough_is_no_error(
    unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sglang-pat doctor --support-table | head -1`: the reader is gone before the first line."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    for words in ("doctor --support-table", "advise --generate toolagent --limit 5"):
        command = [sys.executable, "-m", "sglang_pat", *words.split()]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)
        assert (done.stderr, done.returncode) == (b"", 141)


def _options(command: str) -> list[Any]:
    commands = main.build_parser()._subparsers._group_actions[0].choices
    return [action for action in commands[command]._actions if action.option_strings]


@pytest.mark.parametrize("command", ["build", "demo", "advise"])
def test_help_tells_the_real_defaults(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number or name in `(default: X)` is the program's default."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, parser in main.build_parser()._subparsers._group_actions[0].choices.items():
        assert max(map(len, parser.format_help().splitlines())) <= 80, name
    actual = {
        "build": {"dtype": build.DEFAULT_DTYPE, "head_dim": build.DEFAULT_HEAD_DIM},
        "demo": {},
        "advise": {each.dest: each.default for each in _options("advise")},
    }[command]
    told = {}
    for option in _options(command):
        default = re.search(r"\(default: ([^ ;%)]+)[;)]", option.help or "")
        if default is not None and actual.get(option.dest) is not None:
            told[option.dest] = default[1]
    assert {name: str(actual[name]).removesuffix(".0") for name in told} == told
    assert len(told) >= {"build": 2, "demo": 0, "advise": 8}[command]


# --- build ---


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelConfig, dict[str, Any]]]:
    """Record the variants that the command compiles."""
    calls = []

    def fake(config: KernelConfig, **options: Any) -> Path:
        calls.append((config, options))
        return options["cache"] / config.name

    monkeypatch.setattr(jit, "build", fake)
    monkeypatch.setattr(jit, "report_of", lambda library: f"registers of {library.name}")
    monkeypatch.setattr(build, "find_gpus", lambda: pytest.fail("the GPUs were asked"))
    return calls


def test_build_compiles_bfloat16_with_head_dim_128(
    built: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", str(tmp_path))
    assert main.main(["build", "--arch", "9.0"]) == 0
    ((config, options),) = built
    assert config.name == "bf16_d128_sm90"
    assert options == {"cache": tmp_path, "force": False}
    assert capsys.readouterr().out == f"{tmp_path}/bf16_d128_sm90\n"


def test_build_compiles_every_combination(
    built: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "build --arch 8.0 --arch 12.0 --dtype float16 --dtype bfloat16"
    words += " --head-dim 64 --head-dim 192/128"
    assert main.main([*words.split(), "--cache", str(tmp_path), "--verbose", "--force"]) == 0
    names = [
        f"{dtype}_{head_dim}_{arch}"
        for arch in ("sm80", "sm120")
        for dtype in ("fp16", "bf16")
        for head_dim in ("d64", "d192v128")
    ]
    assert {config.name for config, _ in built} == {*names}
    assert len(built) == len(names)
    assert all(options == {"cache": tmp_path, "force": True} for _, options in built)
    lines = [line for n in names for line in (f"registers of {n}", f"{tmp_path}/{n}")]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the needs of a model's server, which a test may change, and record the arguments."""
    found: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_dtypes": (None, "float8_e4m3fn"),
        "head_dims": ((64, 64), (128, 128)),
    }

    def kernels_of_model(source: str, words: list[str]) -> tuple[Any, str]:
        found["asked"] = words
        return SimpleNamespace(**found), "pat decodes nothing: sliding window 128"

    module = SimpleNamespace(kernels_of_model=kernels_of_model)
    monkeypatch.setitem(sys.modules, "sglang_pat.offline.model_support", module)
    return found


def test_build_compiles_what_a_server_needs(
    built: list[Any], needs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"build --arch 9.0 --model qwen3-8b --tp 8 --cache {tmp_path}".split()
    assert main.main([*words, "--server-args", "--speculative-draft-model-path /draft"]) == 0
    names = [config.name for config, _ in built]
    assert names == [
        f"bf16{kv}_{head_dim}_sm90" for kv in ("", "_e4m3") for head_dim in ("d64", "d128")
    ]
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{tmp_path}/{name}" for name in names]
    assert err == "a draft model may need others: sglang-pat build --model DRAFT\n"
    assert needs["asked"] == ["--tp", "8", "--speculative-draft-model-path", "/draft"]


@pytest.mark.parametrize(
    ("options", "changed", "status", "message"),
    [
        (["--dtype", "float16"], {}, 2, "--dtype: allowed: without --model, which says it"),
        (["--head-dim", "64"], {}, 2, "--head-dim: allowed: without --model, which says it"),
        ([], {"head_dims": ()}, 1, "'qwen3-8b' needs no kernels: pat decodes nothing: sliding win"),
        ([], {"dtype": "float32"}, 1, "no kernels for float32; supported: float16, bfloat16"),
        (
            ["--server-args", "tp 8"],
            {},
            2,
            "--server-args: 'tp' is not a flag; allowed: flags of SG",
        ),
    ],
)
def test_build_says_in_one_line_what_it_cannot_compile(
    options: list[str],
    changed: dict[str, Any],
    status: int,
    message: str,
    built: list[Any],
    needs: dict[str, Any],
    cli: Any,
) -> None:
    needs |= changed
    told = cli("build", "--arch", "9.0", "--model", "qwen3-8b", *options)
    told._replace(status=2).check_refusal(f"sglang-pat build: error: {message}")
    assert (told.status, built) == (status, [])


def test_build_asks_the_gpus_at_hand(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        Gpu("NVIDIA H100", (9, 0), "580.1"),
        Gpu("NVIDIA A100", (8, 0), "580.1"),
        Gpu("NVIDIA H100", (9, 0), "580.1"),
        Gpu("Tesla V100", (7, 0), "580.1"),
    ]
    monkeypatch.setattr(build, "find_gpus", lambda: found)
    assert main.main(["build"]) == 0
    assert {config.arch for config, _ in built} == {(8, 0), (9, 0)}


@pytest.mark.parametrize(
    "error", [KernelBuildError("no NVRTC"), KernelCacheError("not yours"), OSError("disk full")]
)
def test_build_fails_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object, **options: object) -> Path:
        raise error

    monkeypatch.setattr(jit, "build", fail)
    assert main.main(["build", "--arch", "9.0"]) == 1
    assert capsys.readouterr().err == f"sglang-pat build: error: {error}\n"
