"""`sglang-pat doctor` finds each kind of problem, and says how to solve it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.hub import install_hub

import sglang_pat
from sglang_pat.cli import doctor, gpus, main, server_options
from sglang_pat.cli.doctor import Check, worst
from sglang_pat.cli.gpus import Gpu
from sglang_pat.executors import kernel_cache
from sglang_pat.executors.jit import Compiler, KernelBuildError, KernelConfig, cache_key

H100 = Gpu("NVIDIA H100", (9, 0), "580.1")
V100 = Gpu("Tesla V100", (7, 0), "580.1")


def found_version(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor, "version", version)


# --- GPU and torch ---


@pytest.mark.parametrize(
    ("gpus", "status", "found", "advice"),
    [
        ([], "warning", "no NVIDIA GPU: torch executes the plans (tests only)", ""),
        ([H100], "ok", "NVIDIA H100 (compute capability 9.0); driver 580.1", ""),
        ([H100, V100], "failed", "", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_gpus(gpus: list[Gpu], status: str, found: str, advice: str) -> None:
    check = doctor.check_gpu(gpus)
    assert check.status == status
    assert found in check.found
    assert advice in check.advice


def test_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ask_nvidia_smi", lambda: [V100, H100])
    monkeypatch.setattr(gpus, "cuda_driver_is_present", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert gpus.find_gpus() == [H100]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpus.find_gpus() == [V100, H100]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpus.find_gpus() == [V100, H100]


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (
            "echo 'NVIDIA H100, 80GB, 9.0, 580.1'; echo 'Tesla V100, 7.0, 580.1'",
            ["NVIDIA H100, 80GB", "Tesla V100"],
        ),
        ("exit 9", []),  # no driver is loaded
        ("echo 'GRID, [N/A], 580.1'; echo 'L4, 8.9, 580.1'", ["L4"]),
    ],
)
def test_nvidia_smi_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, names: list[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [gpu.name for gpu in gpus.ask_nvidia_smi()] == names
    monkeypatch.setenv("PATH", "")
    assert gpus.ask_nvidia_smi() == []


@pytest.mark.parametrize(
    ("cuda", "available", "visible", "status", "advice"),
    [
        ("13.0", True, None, "ok", ""),
        (None, False, None, "failed", "install a CUDA build of torch"),
        ("13.0", False, "", "failed", "CUDA_VISIBLE_DEVICES='' shows torch no GPU"),
        ("13.0", False, None, "failed", "driver 580.1 may be too old for CUDA 13.0"),
    ],
)
def test_torch(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    available: bool,
    visible: str | None,
    status: str,
    advice: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check = doctor.check_torch([H100])
    assert check.status == status
    assert advice in check.advice
    assert doctor.check_torch([]).status == "ok"


# --- compilers and kernels ---


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler("NVRTC 13.0", Path("/cuda/include"), "0123")
    monkeypatch.setattr(Compiler, "find", lambda arch: compiler)
    return compiler


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(arch: object) -> Compiler:
        raise KernelBuildError("NVRTC cannot be loaded: install a CUDA build of torch")

    monkeypatch.setattr(Compiler, "find", find)


def add_kernels(cache: Path) -> Path:
    """Write a kernel image of 1.5 MB for the H100."""

    def fill(work: Path) -> None:
        (work / "kernels.cubin").write_bytes(bytes(1_500_000))
        (work / "build.json").write_text('{"compiler": "NVRTC 13.0"}')

    key = cache_key(KernelConfig(torch.bfloat16, 128, H100.capability))
    return kernel_cache.add(cache, f"{key}-0123", fill)


@pytest.mark.parametrize(("found", "status"), [([H100], "failed"), ([], "warning")])
def test_no_compiler(no_compiler: None, tmp_path: Path, found: list[Gpu], status: str) -> None:
    compiler, _ = doctor.check_kernels(found, tmp_path)
    assert compiler.status == status
    assert (compiler.found, compiler.advice) == (
        "NVRTC cannot be loaded",
        "install a CUDA build of torch",
    )


def test_compiled_kernels_need_no_compiler(no_compiler: None, tmp_path: Path) -> None:
    """There are kernels, but no compiler."""
    add_kernels(tmp_path)
    compiler, cache = doctor.check_kernels([H100], tmp_path)
    assert (compiler.status, cache.status) == ("warning", "ok")


def test_the_newest_gpu_decides_which_compiler_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def find(arch: object) -> Compiler:
        asked.append(arch)
        raise KernelBuildError("NVRTC 12.4 cannot compile for 10.0: install a newer torch")

    monkeypatch.setattr(Compiler, "find", find)
    doctor.check_kernels([H100, Gpu("B200", (10, 0), "580.1")], tmp_path)
    doctor.check_kernels([], tmp_path)
    assert asked == [(10, 0), None]


def test_kernels_that_are_compiled(compiler: Compiler, tmp_path: Path) -> None:
    found, cache = doctor.check_kernels([H100], tmp_path)
    assert (found.status, found.found) == ("ok", "NVRTC 13.0, /cuda/include")
    assert cache.status == "warning"
    assert cache.found == f"{tmp_path}, 0.0 MB; none compiled for this GPU"
    assert cache.advice.endswith("sglang-pat build")

    add_kernels(tmp_path)
    _, cache = doctor.check_kernels([H100], tmp_path)
    assert cache.status == "ok"
    assert cache.found == f"{tmp_path}, 1.5 MB; compiled: bf16_d128_sm90 (NVRTC 13.0)"


def test_the_cache_is_the_one_that_a_server_uses(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", str(tmp_path))
    _, cache = doctor.check_kernels([])
    assert cache.found.startswith(f"{tmp_path}, ")
    monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", "a folder")
    _, cache = doctor.check_kernels([])
    assert cache.status == "failed"
    assert cache.found == "SGLANG_PAT_KERNEL_CACHE='a folder'; allowed"
    assert cache.advice == "an absolute path of a folder"


def test_a_cache_that_cannot_be_written(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    _, cache = doctor.check_kernels([], occupied / "sglang-pat")
    assert cache.status == "failed"
    assert f"{occupied} is not a folder" in cache.found
    assert "set SGLANG_PAT_KERNEL_CACHE" in cache.advice
    # The kernel cache of an image is complete, so it may be read-only.
    add_kernels(tmp_path)
    monkeypatch.setattr(kernel_cache, "problem_with_writing", lambda cache: "read-only")
    assert doctor.check_kernels([], tmp_path)[1].status == "failed"
    assert doctor.check_kernels([H100], tmp_path)[1].status == "ok"


def test_a_cache_that_others_can_write(compiler: Compiler, tmp_path: Path) -> None:
    add_kernels(tmp_path).chmod(0o666)
    _, cache = doctor.check_kernels([H100], tmp_path)
    assert cache.status == "failed"
    assert "can be written by other users (mode 0666)" in cache.found
    tmp_path.chmod(0o777)
    _, cache = doctor.check_kernels([], tmp_path)
    assert cache.status == "failed"
    assert f"run chmod go-w {tmp_path}" in cache.advice


# --- what may be missing ---


def without(*modules: str) -> str:
    """Return code that hides modules, then runs doctor's checks without SGLang."""
    hidden = dict.fromkeys(modules)
    return (
        f"import sys; sys.modules.update({hidden})\n"
        "from sglang_pat.cli import doctor, main\n"
        "doctor._checks_by_sglang = lambda: []\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )


def run_without(*modules: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", without(*modules), *command], capture_output=True, text=True
    )


def test_doctor_reports_that_torch_is_missing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    child = run_without("torch", command=["doctor", "--json", str(report)])
    assert (child.returncode, child.stderr) == (1, "")
    checks = {each["topic"]: Check(**each) for each in json.loads(report.read_text())["checks"]}
    assert checks["torch"].status == "failed"
    assert checks["torch"].found.startswith("cannot be imported: ")
    assert "install torch" in checks["torch"].advice
    assert checks["kernels"].status == "failed"
    assert checks["variables"].status == "ok"
    assert checks["C++ scheduler"].status == "ok"


def test_doctor_runs_without_any_of_its_packages() -> None:
    child = run_without("torch", "rich", "filelock", "platformdirs", "numpy", command=["doctor"])
    assert (child.returncode, child.stderr) == (1, "")
    assert "failed   torch: cannot be imported" in child.stdout
    assert "failed   variables: not checked" in child.stdout


def test_build_says_that_torch_is_missing() -> None:
    child = run_without("torch", command=["build", "--arch", "9.0"])
    assert child.returncode == 1
    assert child.stderr.count("\n") == 1
    assert "torch cannot be imported" in child.stderr
    assert "install it" in child.stderr


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    check = doctor.check_packages()
    assert (check.status, check.found) == ("ok", f"sglang-pat {sglang_pat.__version__}")
    needed = [
        "torch>=2.4",
        "no-such-package[all]>=1; python_version > '3'",
        "sphinx ; extra == 'x'",
    ]
    monkeypatch.setattr(doctor, "requires", lambda name: needed)
    check = doctor.check_packages()
    assert check.status == "failed"
    assert check.advice == "pip install no-such-package"
    found_version(None, monkeypatch)
    assert doctor.check_packages().found == "sglang-pat is not installed"


# --- the package and SGLang ---


def test_the_scheduler_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_scheduler().status == "ok"
    monkeypatch.setitem(sys.modules, "sglang_pat._scheduler", None)
    check = doctor.check_scheduler()
    assert check.status == "failed"
    assert "reinstall" in check.advice


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_GROWTH_TOKENS", "7")
    check = doctor.check_environment()
    assert check.status == "ok"
    assert (
        "policy memory, debug 0, strict False, stats_file None, growth_tokens 7, kernel_"
        in check.found
    )
    monkeypatch.setenv("SGLANG_PAT_POLICY", "greedy")
    check = doctor.check_environment()
    assert check.status == "failed"
    assert "SGLANG_PAT_POLICY='greedy'; allowed: memory" in check.found


@pytest.mark.parametrize(
    ("found", "status"), [("0.5.23", "ok"), ("0.4.0", "warning"), (None, "failed")]
)
def test_versions_of_sglang(
    monkeypatch: pytest.MonkeyPatch, found: str | None, status: str
) -> None:
    found_version(found, monkeypatch)
    check = doctor.check_sglang()
    assert check.status == status
    assert bool(check.advice) == (status != "ok")


@pytest.mark.parametrize(("count", "status"), [(1, "ok"), (0, "failed"), (2, "failed")])
def test_entry_point(monkeypatch: pytest.MonkeyPatch, count: int, status: str) -> None:
    point = EntryPoint("pat", "sglang_pat.sglang.plugin:register", doctor.PLUGIN_GROUP)
    points = EntryPoints([point] * count)
    monkeypatch.setattr(doctor, "entry_points", lambda **wanted: points.select(**wanted))
    assert doctor.check_entry_point().status == status


@pytest.mark.parametrize(
    ("given", "status"), [("", "ok"), ("pat", "ok"), ("a, pat", "ok"), ("a,path", "failed")]
)
def test_white_list(monkeypatch: pytest.MonkeyPatch, given: str, status: str) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", given)
    check = doctor.check_white_list()
    assert check.status == status
    if status == "failed":
        assert check.advice == "add pat: SGLANG_PLUGINS=a,path,pat"


def test_sglang_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sglang_pat, "sglang_doctor", raising=False)
    monkeypatch.setitem(sys.modules, "sglang_pat.sglang.tree.request_tracker", None)
    for check in ("check_registration", "check_touchpoints"):
        monkeypatch.setattr(doctor, check, lambda check=check: Check(check, "ok", ""))
    *_, check = doctor._checks_by_sglang()
    assert check.status == "failed"
    assert check.topic == "import of SGLang"


# --- the command ---


class Routes:
    """The layers of a model, as SGLang's process reports them."""

    default, shapes = "fa3", ()

    def __str__(self) -> str:
        return "pat decodes 60 of 61 layers"

    def as_json(self) -> dict[str, int]:
        return {"pat_layers": 60}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[str]]]:
    """Record the models that SGLang is to build (a config or a name on the hub), and the flags."""
    asked = []

    def layers_of_config(source: str, words: list[str]) -> Routes:
        config = Path(source, "config.json")
        asked.append((json.loads(config.read_text()) if config.exists() else source, words))
        return Routes()

    module = SimpleNamespace(
        layers_of_config=layers_of_config, layer_table=lambda routes: [("0-59", "pat", "")]
    )
    monkeypatch.setitem(sys.modules, "sglang_pat.offline.model_support", module)
    known = {"--tp", "--tp-size", "--x", "--attention-backend"}
    monkeypatch.setattr(server_options, "launch_flags", lambda: known)
    return asked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", "8"], ["--tp", "8"]),
        (["--tp", "2", "--server-args", "--x 'a b'"], ["--tp", "2", "--x", "a b"]),
        (["--server-args", "--attention-backend pat --tp-size=4"], ["--tp-size=4"]),
        (["--server-args=--attention-backend=pat"], []),
    ],
)
def test_a_model_is_built_as_the_server_would_build_it(
    options: list[str], words: list[str], built: list[Any], cli: Any, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    told = cli("doctor", "--model", "qwen3-8b", *options, "--json", report)
    assert told.status == 0
    ((config, asked),) = built
    assert (config["architectures"], asked) == (["Qwen3ForCausalLM"], words)
    assert ("Assumed: one GPU and default options" in told.out) == (not words)
    if words:
        assert f"With {shlex.join(words)}, on one of its GPUs." in told.out
    assert json.loads(report.read_text()) == {"pat_layers": 60, "server_args": words}


def test_a_model_is_a_path_or_a_name_on_the_hub(
    built: list[Any], cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["A"], "model_type": "a"}
    for name in ("config.json", "another.json"):
        (tmp_path / name).write_text(json.dumps(config))
        assert cli("doctor", "--model", tmp_path / name).status == 0
    assert cli("doctor", "--model", tmp_path).status == 0
    for file, error in ((None, None), (tmp_path / "config.json", OSError("offline"))):
        install_hub(monkeypatch, file, error)
        assert cli("doctor", "--model", "some/model").status == 0
    assert [source for source, _ in built] == [config] * 3 + ["some/model"] * 2


def test_what_sglang_says_of_a_model_is_told_in_one_line(
    built: list[Any], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("num_attention_heads:\n    expected int,\tgot str")

    monkeypatch.setattr(sys.modules["sglang_pat.offline.model_support"], "layers_of_config", refuse)
    assert cli("doctor", "--model", "qwen3-8b") == (
        1,
        "",
        "SGLang cannot build qwen3-8b in this process: ValueError: num_attention_heads: expected "
        "int, got str\n",
    )


QWEN = ["--model", "qwen3-8b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/no/such/model"], "'/no/such/model': no file; allowed: llama-3.1-8b, "),
        (["--model", "~/model"], "--model '~/model': no file; allowed: "),
        (["--model", "some/where/else"], "--model 'some/where/else': no file; allowed: "),
        (["--model", ""], "--model '': no file; allowed: "),
        (["--model", "9" * 5000], "no config.json of that name (Name or service not known); allow"),
        (["--model", "some/model"], "no config.json of that name (Name or service not known); al"),
        (["--model", "{folder}"], "'{folder}': no config.json in this folder; allowed: llama-3.1-"),
        (["--model", "{folder}/broken.json"], "{folder}/broken.json: not a config.json: "),
        (["--model", "{folder}/nested.json"], "{folder}/nested.json: not a config.json: "),
        (["--model", "{folder}/number.json"], "not a model's config.json: it names no arch"),
        (["--model", "{folder}/weights"], "not a config.json: it has 100,000,000 bytes"),
        (["--tp", "8"], "--tp '8': allowed: with --model"),
        (["--server-args", "--tp 8"], "--server-args '--tp 8': allowed: with --model"),
        (
            [*QWEN, "--tp", "2", "--server-args", "--tp-size=4"],
            "--tp 2 and --tp-size=4 in --server-args; allowed: one of them",
        ),
        (
            [*QWEN, "--server-args", "--attention-backend fa3"],
            "--server-args must not contain --attention-backend; the command is about pat",
        ),
        ([*QWEN, "--server-args", f"--{'x' * 5000}"], "is not a flag of the installed SGLang"),
        ([*QWEN, "--server-args", "--x '"], "No closing quotation; allowed: as in"),
    ],
)
def test_what_cannot_be_built_is_told_without_sglang(
    words: list[str],
    message: str,
    built: list[Any],
    cli: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_hub(monkeypatch, None, OSError("Name or service not known\nsecond line"))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "nested.json").write_text("[" * 100_000)
    (tmp_path / "number.json").write_text('{"architectures": [1]}')
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(100_000_000)
    told = cli("doctor", *(word.format(folder=tmp_path) for word in words))
    told.check_refusal(message.format(folder=tmp_path))
    assert told.err.startswith("sglang-pat doctor: ")
    assert built == []


@pytest.mark.parametrize(
    ("statuses", "expected", "exit_status"),
    [
        (["ok", "ok"], "ok", 0),
        (["ok", "warning"], "warning", 0),
        (["failed", "warning", "ok"], "failed", 1),
    ],
)
def test_report_and_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    statuses: list[doctor.Status],
    expected: str,
    exit_status: int,
) -> None:
    long = "[x] /" + "folder/" * 30
    checks = [Check(f"topic {i}", status, long, "do") for i, status in enumerate(statuses)]
    monkeypatch.setattr(doctor, "all_checks", lambda: checks)
    assert worst(checks) == expected
    assert main.main(["doctor", "--json", str(tmp_path / "report.json")]) == exit_status
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == expected
    assert [Check(**each) for each in report["checks"]] == checks
    lines = [f"{each.status:8} {each.topic}: {long} -> do" for each in checks]
    assert capsys.readouterr().out.splitlines() == lines
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main.main(["doctor"]) == exit_status
    table = capsys.readouterr().out
    assert all(check.topic in table for check in checks)
    assert "[x]" in table  # brackets are no markup
