"""Finding, compiling and caching the kernels; the compiler itself is faked."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_pat.executors import jit
from sglang_pat.executors.jit import (
    KernelBuildError,
    KernelConfig,
    Toolchain,
    build,
    cache_key,
    compiler_of,
    load_operators,
    source_folder,
)
from sglang_pat.executors.kernel_cache import KernelCacheError
from sglang_pat.support import HEAD_DIMS

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


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernel sources that may be edited, at one path."""
    copy = tmp_path / "sources"
    shutil.copytree(source_folder(), copy)
    monkeypatch.setattr(jit, "source_folder", lambda: copy)
    return copy


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


def test_a_changed_source_is_compiled_anew(toolchain: Path, sources: Path, tmp_path: Path) -> None:
    """An upgrade in place: the paths are the same, and the sizes too."""
    built = [build(CONFIG, cache=tmp_path / "cache")]
    suffixes = set()
    for path in sorted(sources.rglob("*")):
        if path.is_file() and path.suffix not in suffixes:
            suffixes.add(path.suffix)
            text = path.read_text()
            path.write_text(text[:-2] + ("/" if text[-2] != "/" else "*") + text[-1])
            built.append(build(CONFIG, cache=tmp_path / "cache"))
    assert suffixes == {".cu", ".cuh", ".h", ".cpp"}
    assert len(set(built)) == links(toolchain) == 1 + len(suffixes)


def test_a_source_that_moves_is_compiled_anew(sources: Path) -> None:
    first = cache_key(CONFIG)
    assert cache_key(CONFIG) == first
    (sources / "launch.h").rename(sources / "launch_2.h")
    assert cache_key(CONFIG) != first


def test_the_key_holds_what_a_library_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cache_key(KernelConfig(dtype, head_dim, arch, v_head_dim))
        for dtype in (torch.float16, torch.bfloat16)
        for head_dim, v_head_dim in HEAD_DIMS
        for arch in ((8, 0), (9, 0))
    }
    assert len({key.rpartition("-")[2] for key in keys}) == 4 * len(HEAD_DIMS)
    assert len({key.rpartition("-")[0] for key in keys}) == 4 * len(HEAD_DIMS)
    for owner, name, value in (
        (torch, "__version__", "1.0"),
        (torch.version, "cuda", "10.0"),
        (torch, "compiled_with_cxx11_abi", lambda: False),
        (jit.platform, "machine", lambda: "aarch64"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert cache_key(CONFIG) not in keys, name
    assert cache_key(CONFIG) in keys


def test_flags_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache_key(CONFIG)
    commands = jit._commands

    def with_debug_symbols(*arguments: Any) -> Any:
        compiles, link = commands(*arguments)
        return [[*command, "-g"] for command in compiles], link

    monkeypatch.setattr(jit, "_commands", with_debug_symbols)
    assert cache_key(CONFIG) != first


def test_compiled_kernels_need_no_compiler(
    toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime image has neither nvcc nor g++, and the venv may lie elsewhere."""
    library = build(CONFIG, cache=tmp_path / "cache")
    monkeypatch.setenv("CUDA_HOME", "/no/cuda")
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setenv("PATH", "/nothing")
    monkeypatch.setattr(jit, "_SYSTEM_CUDA", "/no/cuda")
    monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
    assert build(CONFIG, cache=tmp_path / "cache") == library
    with pytest.raises(KernelBuildError, match="no nvcc"):
        build(KernelConfig(torch.float16, 64, (8, 0)), cache=tmp_path / "cache")


def test_the_compilers_are_recorded(toolchain: Path, tmp_path: Path) -> None:
    library = build(CONFIG, cache=tmp_path / "cache")
    assert compiler_of(library) == "13.0, V13.0.88"
    record = json.loads((library.parent / "build.json").read_text())
    assert record["torch"] == torch.__version__
    assert record["compilers"]["cxx"] == os.environ["CXX"]
    assert {path.name for path in library.parent.iterdir()} == {
        "kernels.so",
        "build.json",
        "compiler_report.txt",
    }


def test_force_compiles_again(toolchain: Path, tmp_path: Path) -> None:
    library = build(CONFIG, cache=tmp_path / "cache")
    assert build(CONFIG, cache=tmp_path / "cache", force=True) == library
    assert links(toolchain) == 2


def test_the_variable_names_the_cache(
    toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", str(tmp_path / "of the image"))
    assert build(CONFIG).parents[1] == tmp_path / "of the image"


def test_a_library_that_cannot_be_loaded_is_named(
    toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_KERNEL_CACHE", str(tmp_path / "cache"))
    command = r"sglang-pat build --force --arch 9\.0 --dtype bfloat16 --head-dim 128"
    with pytest.raises(KernelBuildError, match=rf"kernels\.so cannot be loaded.*{command}"):
        load_operators(CONFIG)


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
    message = rf"{cache} cannot be written.*SGLANG_PAT_KERNEL_CACHE"
    with pytest.raises(KernelCacheError, match=message):
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
    ("release", "arch", "needed"),
    [
        ("12.2", (8, 0), "12.3"),
        ("12.7", (10, 0), "12.8"),
        ("12.7", (12, 0), "12.8"),
        ("12.8", (10, 3), "12.9"),
        ("12.9", (15, 0), "13.0"),
    ],
)
def test_an_architecture_needs_its_nvcc(
    toolchain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    arch: tuple[int, int],
    needed: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    nvcc = Path(os.environ["CUDA_HOME"], "bin/nvcc")
    nvcc.write_text(nvcc.read_text().replace("13.0", release))
    message = f"nvcc is CUDA {release}: {needed} or newer is needed for compute capability"
    with pytest.raises(KernelBuildError, match=message):
        build(KernelConfig(torch.bfloat16, 128, arch), cache=tmp_path / "cache")
    nvcc.write_text(nvcc.read_text().replace(f"release {release}", f"release {needed}"))
    monkeypatch.setattr(torch.version, "cuda", needed)
    assert Toolchain.find(arch).release.startswith(needed)


# --- CXX ---


def test_cxx_may_have_several_words(
    toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = os.environ["CXX"]
    ccache = tmp_path / "ccache"
    ccache.write_text(f'#!/bin/sh\necho "ccache $@" >> {toolchain}\nexec "$@"\n')
    ccache.chmod(0o755)
    monkeypatch.setenv("CXX", f"{ccache} '{compiler}' -march=native")
    build(CONFIG, cache=tmp_path / "cache")
    calls = toolchain.read_text().splitlines()
    assert any(call.startswith(f"ccache {compiler} -march=native -D") for call in calls)
    assert any(call.startswith(f"ccache {compiler} -march=native -shared") for call in calls)
    of_nvcc = [call for call in calls if "-gencode" in call]
    assert len(of_nvcc) == 3
    for call in of_nvcc:  # it takes one path
        assert f"-ccbin={compiler}" in call.split()
        assert ",-march=native" in call


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("no-such-g++", "CXX='no-such-g++': there is no program 'no-such-g++'"),
        ("no-such-ccache g++", "CXX='no-such-ccache g++': there is no program 'no-such-ccache'"),
        ("ccache no-such-g++", "CXX='ccache no-such-g++': there is no program"),
        ("ccache", "CXX='ccache' names no compiler"),
        ("'g++", "is no command (No closing quotation): set it to one"),
    ],
)
def test_a_bad_cxx_is_named(
    toolchain: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, message: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(KernelBuildError, match=re.escape(message)):
        Toolchain.find()


def test_no_cxx(toolchain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(jit.shutil, "which", lambda name: None)
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler found: install g\+\+"):
        Toolchain.find()


# --- configs ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.float32, 128, (9, 0)), "float16, torch.bfloat16; got torch.float32"),
        ((torch.float16, 72, (9, 0)), "head_dim = 72"),
        ((torch.float16, 128, (9, 0), 64), "head_dim = 128/64"),
        ((torch.float16, 128, (7, 5)), r"8\.0 \(Ampere\) or newer; got 7\.5"),
    ],
)
def test_unsupported_configs(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelConfig(*arguments)
