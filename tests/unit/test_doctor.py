"""`sglang-pat doctor`: each thing that can be wrong is found, and what to do about it is said."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sglang_pat
from sglang_pat.cli import doctor, main
from sglang_pat.cli.doctor import Check, Gpu, worst
from sglang_pat.executors.jit import KernelBuildError, KernelConfig, Toolchain, library_path

H100 = Gpu("NVIDIA H100", (9, 0), "580.1")
V100 = Gpu("Tesla V100", (7, 0), "580.1")


def found_version(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor, "version", version)


# --- GPU and torch ---


def test_without_a_gpu_torch_executes_the_plans() -> None:
    check = doctor.check_gpu([])
    assert check.status == "warning"
    assert check.found == "no NVIDIA GPU: plans are executed by torch (tests only)"


def test_a_gpu_and_its_driver() -> None:
    check = doctor.check_gpu([H100])
    assert check.status == "ok"
    assert check.found == "NVIDIA H100 (compute capability 9.0); driver 580.1"


def test_a_gpu_that_is_too_old() -> None:
    check = doctor.check_gpu([H100, V100])
    assert check.status == "failed"
    assert "CUDA_VISIBLE_DEVICES" in check.advice
    assert "8.0" in check.advice


def test_gpus_are_those_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ask_nvidia_smi", lambda: [V100, H100])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert doctor.find_gpus() == [H100]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.find_gpus() == [V100, H100]


@pytest.mark.parametrize(
    ("answer", "gpus"),
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, gpus: list[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [gpu.name for gpu in doctor._ask_nvidia_smi()] == gpus
    monkeypatch.setenv("PATH", "")
    assert doctor._ask_nvidia_smi() == []


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
def toolchain(monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    versions = "nvcc: NVIDIA\nCuda compilation tools, release 13.0, V13.0.88\ng++ 14"
    toolchain = Toolchain(Path("/cuda/bin/nvcc"), "g++", Path("/cuda"), versions)
    monkeypatch.setattr(Toolchain, "find", lambda: toolchain)
    return toolchain


@pytest.mark.parametrize(("gpus", "status"), [([H100], "failed"), ([], "warning")])
def test_no_compiler(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], status: str) -> None:
    def find() -> Toolchain:
        raise KernelBuildError("no nvcc found (tried PATH): install the CUDA toolkit 13.0")

    monkeypatch.setattr(Toolchain, "find", find)
    (check,) = doctor.check_kernels(gpus)
    assert check.status == status
    assert (check.found, check.advice) == (
        "no nvcc found (tried PATH)",
        "install the CUDA toolkit 13.0",
    )


def test_kernels_that_are_compiled(toolchain: Toolchain, tmp_path: Path) -> None:
    compiler, cache = doctor.check_kernels([H100], tmp_path)
    assert (compiler.status, compiler.found) == ("ok", "/cuda/bin/nvcc, 13.0, V13.0.88")
    assert cache.status == "warning"
    assert cache.found == f"{tmp_path}, 0.0 MB; none compiled for this GPU"
    assert "sglang-pat build --arch 9.0" in cache.advice

    config = KernelConfig(torch.bfloat16, 128, H100.capability)
    library = library_path(config, toolchain, tmp_path)
    library.parent.mkdir()
    library.write_bytes(bytes(1_500_000))
    _, cache = doctor.check_kernels([H100], tmp_path)
    assert (cache.status, cache.found) == ("ok", f"{tmp_path}, 1.5 MB; compiled: bf16_d128_sm90")


def test_a_cache_that_cannot_be_written(toolchain: Toolchain, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    _, cache = doctor.check_kernels([], occupied / "sglang-pat")
    assert cache.status == "failed"
    assert f"make {occupied} writable" in cache.advice


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
    assert "policy memory, debug False, stats_file None, growth_tokens 7" in check.found
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
    monkeypatch.setitem(sys.modules, "sglang_pat.sglang.hooks", None)
    (check,) = doctor._checks_by_sglang()
    assert check.status == "failed"
    assert check.topic == "import of SGLang"


# --- the command ---


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
    checks = [Check(f"topic {i}", status, "[x] found", "do") for i, status in enumerate(statuses)]
    monkeypatch.setattr(doctor, "all_checks", lambda: checks)
    assert worst(checks) == expected
    assert main.main(["doctor", "--json", str(tmp_path / "report.json")]) == exit_status
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["status"] == expected
    assert [Check(**each) for each in report["checks"]] == checks
    table = capsys.readouterr().out
    for check in checks:
        assert check.topic in table
    assert "[x] found" in table


def test_the_whole_command_with_sglang(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "sglang-pat"
    report = tmp_path / "report.json"
    child = subprocess.run(
        [script, "doctor", "--json", report], capture_output=True, text=True, timeout=120
    )
    checks = {each["topic"]: each for each in json.loads(report.read_text())["checks"]}
    assert child.returncode == (1 if "failed" in {c["status"] for c in checks.values()} else 0)
    for topic in ("C++ scheduler", "SGLang", "entry point", "registration", "hooks"):
        assert checks[topic]["status"] == "ok", child.stdout
    assert child.stderr == ""
