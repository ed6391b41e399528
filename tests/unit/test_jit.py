"""Finding, compiling and caching the kernels; the compiler itself is faked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from sglang_pat.executors import jit
from sglang_pat.executors.jit import (
    KernelBuildError,
    KernelConfig,
    Toolchain,
    build,
    parse_arch,
    source_folder,
)

CONFIG = KernelConfig(torch.bfloat16, 128, (9, 0))


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes its output file and logs one line per call. Returns the log."""
    log = tmp_path / "calls"
    script = tmp_path / "cuda" / "bin" / "nvcc"
    script.parent.mkdir(parents=True)
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "include" / "cuda_runtime.h").touch()
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit; fi\n'
        f'echo "$@" >> {log}\n'
        f"[ -e {tmp_path}/fail ] && echo some error && exit 1\n"
        f"[ -e {tmp_path}/slow ] && sleep 30\n"
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return log


def links(log: Path) -> int:
    return sum("-shared" in line for line in log.read_text().splitlines())


def test_compiles_once(toolchain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = build(CONFIG, cache=tmp_path / "cache")
    assert first.read_text() == "built\n"
    assert "compiling CUDA kernels for bf16_d128_sm90" in capfd.readouterr().err
    assert build(CONFIG, cache=tmp_path / "cache") == first
    assert links(toolchain) == 1
    for other in (
        KernelConfig(torch.float16, 128, (9, 0)),
        KernelConfig(torch.bfloat16, 128, (9, 0), force_mma_sync=True),
    ):
        assert other.namespace != CONFIG.namespace
        assert build(other, cache=tmp_path / "cache") != first


def test_a_changed_source_is_compiled_anew(
    toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(CONFIG, cache=tmp_path / "cache")
    copy = tmp_path / "sources"
    copy.mkdir()
    for path in source_folder().rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(source_folder())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (copy / "launch.h").write_text("// changed\n")
    monkeypatch.setattr(jit, "source_folder", lambda: copy)
    assert build(CONFIG, cache=tmp_path / "cache") != first


def test_eight_processes_compile_once(toolchain: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=build, args=(CONFIG,), kwargs={"cache": tmp_path / "cache"})
        for _ in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert links(toolchain) == 1


def test_a_killed_build_does_not_block_the_next(toolchain: Path, tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    worker = multiprocessing.get_context("fork").Process(
        target=build, args=(CONFIG,), kwargs={"cache": tmp_path / "cache"}
    )
    worker.start()
    deadline = time.monotonic() + 20
    while not list((tmp_path / "cache").glob("*.build-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    (tmp_path / "slow").unlink()
    library = build(CONFIG, cache=tmp_path / "cache")
    assert library.read_text() == "built\n"
    assert not list((tmp_path / "cache").glob("*.build-*")), "what the killed build left is gone"


def test_a_failed_build_shows_the_command_and_leaves_nothing(
    toolchain: Path, tmp_path: Path
) -> None:
    (tmp_path / "fail").touch()
    with pytest.raises(KernelBuildError, match=r"(?s)nvcc.*some error"):
        build(CONFIG, cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(toolchain: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    with pytest.raises(KernelBuildError, match=rf"{cache} cannot be written.*XDG_CACHE_HOME"):
        build(CONFIG, cache=cache)


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(KernelBuildError, match=r"has no CUDA: install a CUDA build of torch"):
        Toolchain.find()


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(jit.shutil, "which", lambda name: None)
    monkeypatch.setattr(jit, "_SYSTEM_CUDA", str(tmp_path / "none"))
    with pytest.raises(KernelBuildError, match=r"install the CUDA toolkit 13\.0, or set CUDA_HOME"):
        Toolchain.find()


def test_nvcc_of_another_cuda(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with pytest.raises(KernelBuildError, match=r"is CUDA 13\.0, but torch .* built for CUDA 12\.9"):
        Toolchain.find()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.float32, 128, (9, 0)), "float16, torch.bfloat16; got torch.float32"),
        ((torch.float16, 96, (9, 0)), "head_dim = 96"),
        ((torch.float16, 128, (7, 5)), r"8\.0 \(Ampere\) or newer; got 7\.5"),
    ],
)
def test_unsupported_configs(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelConfig(*arguments)


@pytest.mark.parametrize("text", ["9", "90", "9.x", "sm_90", "9.10"])
def test_bad_arch(text: str) -> None:
    with pytest.raises(ValueError, match=f"looks like 9.0, got '{text}'"):
        parse_arch(text)


def test_arch() -> None:
    assert parse_arch("9.0") == (9, 0)
    assert parse_arch("12.0") == (12, 0)
