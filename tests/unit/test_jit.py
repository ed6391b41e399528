"""The kernels are compiled by a fake compiler, and cached."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat.executors import jit, kernel_cache
from sglang_pat.executors.jit import (
    Compiler,
    KernelBuildError,
    KernelConfig,
    build,
    cache_key,
    compiler_of,
    source_folder,
)
from sglang_pat.executors.kernel_cache import KernelCacheError
from sglang_pat.support import GQA_HEAD_DIMS, has_kernels

CONFIG = KernelConfig(torch.bfloat16, 128, (9, 0))


class Nvrtc:
    """Stands in for cuda.bindings.nvrtc: returns the image `built`, and logs a line per call."""

    class Result:
        value, name = 0, "NVRTC_SUCCESS"

    class Failure:
        value, name = 6, "NVRTC_ERROR_COMPILATION"

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=Result)

    def __init__(self, folder: Path) -> None:
        self.build = b"CL-1"
        self._folder = folder
        self.log = folder / "calls"
        self.log.touch()

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()

    def nvrtcVersion(self) -> tuple[Any, int, int]:
        return self.Result, 13, 0

    def nvrtcGetSupportedArchs(self) -> tuple[Any, list[int]]:
        return self.Result, [80, 90, 100]

    def nvrtcCreateProgram(self, text: bytes, *rest: object) -> tuple[Any, object]:
        assert not text or b"pack_decode_kernel" in text
        return self.Result, text

    def nvrtcCompileProgram(self, program: object, count: int, options: list[bytes]) -> tuple[Any]:
        assert count == len(options)
        if not program:
            return (self.Result,)
        with self.log.open("a") as log:
            log.write(b" ".join(options).decode() + "\n")
        if (self._folder / "slow").exists():
            time.sleep(30)
        return (self.Failure if (self._folder / "fail").exists() else self.Result,)

    def nvrtcGetProgramLogSize(self, program: object) -> tuple[Any, int]:
        return self.Result, 11

    def nvrtcGetProgramLog(self, program: object, output: bytearray) -> tuple[Any]:
        output[:] = b"some error\0"
        return (self.Result,)

    def nvrtcGetCUBINSize(self, program: object) -> tuple[Any, int]:
        return self.Result, 5

    def nvrtcGetCUBIN(self, program: object, output: bytearray) -> tuple[Any]:
        output[:] = b"built"
        return (self.Result,)

    def nvrtcGetPTXSize(self, program: object) -> tuple[Any, int]:
        return self.Result, len(self.build)

    def nvrtcGetPTX(self, program: object, output: bytearray) -> tuple[Any]:
        output[:] = self.build
        return (self.Result,)

    def nvrtcDestroyProgram(self, program: object) -> tuple[Any]:
        return (self.Result,)


@pytest.fixture
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvrtc:
    fake = Nvrtc(tmp_path)
    monkeypatch.setattr(jit, "_nvrtc", lambda: fake)
    monkeypatch.setattr(jit, "_find_cuda_headers", lambda: tmp_path / "include")
    (tmp_path / "include").mkdir()
    return fake


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of an editable copy of the kernel sources."""
    copy = tmp_path / "sources"
    shutil.copytree(source_folder(), copy)
    monkeypatch.setattr(jit, "source_folder", lambda: copy)
    return copy


def test_compiles_once(nvrtc: Nvrtc, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = build(CONFIG, cache=tmp_path / "cache")
    assert first.read_bytes() == b"built"
    assert "compiling CUDA kernels for bf16_d128_sm90" in capfd.readouterr().err
    assert build(CONFIG, cache=tmp_path / "cache") == first
    assert len(nvrtc.calls()) == 1
    for other in (
        KernelConfig(torch.float16, 128, (9, 0)),
        KernelConfig(torch.bfloat16, 128, (9, 0), force_mma_sync=True),
    ):
        assert other.name != CONFIG.name
        assert build(other, cache=tmp_path / "cache") != first


def test_the_options_name_the_variant_and_the_headers(nvrtc: Nvrtc, tmp_path: Path) -> None:
    build(CONFIG, cache=tmp_path / "cache")
    build(KernelConfig(torch.float16, 64, (8, 0)), cache=tmp_path / "cache")
    hopper, ampere = (call.split() for call in nvrtc.calls())
    assert {"--gpu-architecture=sm_90a", "-DPAT_ELEMENT=__nv_bfloat16"} <= set(hopper)
    assert {"--gpu-architecture=sm_80", "-DPAT_ELEMENT=__half", "-DPAT_HEAD_DIM=64"} <= set(ampere)
    folders = [source_folder(), source_folder() / "nvrtc", tmp_path / "include"]
    assert ampere[-3:] == [f"--include-path={folder}" for folder in folders]


def test_a_changed_source_is_compiled_anew(nvrtc: Nvrtc, sources: Path, tmp_path: Path) -> None:
    """An upgrade in place keeps the paths, and may keep the sizes."""
    built = [build(CONFIG, cache=tmp_path / "cache")]
    suffixes = set()
    skipped = {".md"}  # no source
    for path in sorted(sources.rglob("*")):
        if path.is_file() and path.suffix not in suffixes | skipped:
            suffixes.add(path.suffix)
            text = path.read_text()
            path.write_text(text[:-2] + ("/" if text[-2] != "/" else "*") + text[-1])
            built.append(build(CONFIG, cache=tmp_path / "cache"))
    assert suffixes >= {".cu", ".cuh", ".h", ""}
    assert len(set(built)) == len(nvrtc.calls()) == 1 + len(suffixes)


def test_the_key_holds_what_an_image_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cache_key(KernelConfig(dtype, head_dim, arch, v_head_dim))
        for dtype in (torch.float16, torch.bfloat16)
        for head_dim, v_head_dim in GQA_HEAD_DIMS
        for arch in ((8, 0), (9, 0))
        if has_kernels(head_dim, v_head_dim, arch)
    }
    assert len({key.rpartition("-")[2] for key in keys}) == 4 * len(GQA_HEAD_DIMS) - 2
    assert len({key.rpartition("-")[0] for key in keys}) == 4 * len(GQA_HEAD_DIMS) - 2
    options = CONFIG.options
    monkeypatch.setattr(KernelConfig, "options", property(lambda config: [*options, "-g"]))
    assert cache_key(CONFIG) not in keys


def test_a_mended_compiler_takes_effect(nvrtc: Nvrtc, tmp_path: Path) -> None:
    """The version stays the same, although it is all that NVRTC's interface tells of a compiler."""
    cache = tmp_path / "cache"
    first = build(CONFIG, cache=cache)
    nvrtc.build = b"CL-2"
    second = build(CONFIG, cache=cache)
    (tmp_path / "include/cuda_bf16.hpp").write_text("mended")
    third = build(CONFIG, cache=cache)
    assert len({first, second, third}) == len(nvrtc.calls()) == 3
    nvrtc.build = b"CL-1"
    (tmp_path / "include/cuda_bf16.hpp").unlink()
    assert build(CONFIG, cache=cache) == first  # as by another process with another torch
    assert len(nvrtc.calls()) == 3


def test_without_its_compiler_the_newest_image_is_used(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    images = {}
    for age, name in enumerate(("CL-2", "CL-1", "CL-3")):
        nvrtc.build = name.encode()
        images[name] = build(CONFIG, cache=cache)
        os.utime(images[name].parent, (1e9 - age, 1e9 - age))
    config = KernelConfig(torch.bfloat16, 128, (12, 0))  # a GPU that NVRTC does not know
    assert jit.find_image(config, cache) is None
    images["CL-1"].parent.rename(cache / f"{cache_key(config)}-0123")
    assert build(config, cache=cache).parent.name.endswith("-0123")
    monkeypatch.setattr(jit, "_nvrtc", lambda: (_ for _ in ()).throw(KernelBuildError("none")))
    assert build(CONFIG, cache=cache) == images["CL-2"]
    (cache / f"{cache_key(CONFIG)}-12.build-1@host-x").mkdir()  # an incomplete entry
    assert build(CONFIG, cache=cache) == images["CL-2"]


def test_a_cache_that_cannot_be_written_serves_what_it_holds(
    nvrtc: Nvrtc,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = build(CONFIG, cache=tmp_path / "cache")
    nvrtc.build = b"CL-2"
    capsys.readouterr()
    monkeypatch.setattr(kernel_cache, "problem_with_writing", lambda cache: "read-only")
    assert build(CONFIG, cache=tmp_path / "cache") == image
    assert "cannot be written: bf16_d128_sm90-" in capsys.readouterr().err
    with pytest.raises(KernelCacheError, match="cannot be written"):
        build(KernelConfig(torch.float16, 128, (9, 0)), cache=tmp_path / "cache")


def test_a_shipped_image_is_used_with_any_compiler(
    nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / jit.SHIPPED / cache_key(CONFIG) / jit.IMAGE
    shipped.parent.mkdir(parents=True)
    shipped.write_bytes(b"shipped")
    sources = source_folder()
    monkeypatch.setattr(jit, "source_folder", lambda: sources)
    monkeypatch.setattr(jit.importlib.resources, "files", lambda name: tmp_path)
    for build_id in (b"CL-1", b"CL-2"):
        nvrtc.build = build_id
        assert build(CONFIG, cache=tmp_path / "cache") == shipped
    assert nvrtc.calls() == []
    made = build(CONFIG, cache=tmp_path / "cache", force=True)
    assert build(CONFIG, cache=tmp_path / "cache") == made  # the user's build


def test_the_compiler_is_recorded(nvrtc: Nvrtc, tmp_path: Path) -> None:
    image = build(CONFIG, cache=tmp_path / "cache")
    assert compiler_of(image) == "NVRTC 13.0"
    record = json.loads((image.parent / "build.json").read_text())
    assert record["options"] == CONFIG.options
    assert {path.name for path in image.parent.iterdir()} == {
        "kernels.cubin",
        "build.json",
        "compiler_report.txt",
    }
    assert (image.parent / "compiler_report.txt").read_text() == "some error"


def test_force_compiles_again(nvrtc: Nvrtc, tmp_path: Path) -> None:
    image = build(CONFIG, cache=tmp_path / "cache")
    assert build(CONFIG, cache=tmp_path / "cache", force=True) == image
    assert len(nvrtc.calls()) == 2


def test_a_killed_build_does_not_block_the_next(nvrtc: Nvrtc, tmp_path: Path) -> None:
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
    image = build(CONFIG, cache=tmp_path / "cache")
    assert image.read_bytes() == b"built"
    assert not list((tmp_path / "cache").glob("*.build-*")), "what the killed build left is gone"


def test_a_failed_build_shows_the_options_and_leaves_nothing(nvrtc: Nvrtc, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    with pytest.raises(
        KernelBuildError, match=r"(?s)NVRTC 13\.0 cannot compile.*-DPAT.*some error"
    ):
        build(CONFIG, cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


# --- the compiler ---


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelBuildError, match=r"NVRTC.* cannot be loaded.* install a CUDA build"):
        Compiler.find()


def test_an_architecture_that_this_nvrtc_does_not_know(nvrtc: Nvrtc, tmp_path: Path) -> None:
    message = r"NVRTC 13\.0 cannot compile for compute capability 12\.0: install a torch"
    with pytest.raises(KernelBuildError, match=message):
        build(KernelConfig(torch.bfloat16, 128, (12, 0)), cache=tmp_path / "cache")
    assert Compiler.find((10, 0)).name == "NVRTC 13.0"


def test_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: None)
    with pytest.raises(KernelBuildError, match=r"no headers of the CUDA runtime found"):
        Compiler.find()


# --- configs ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.float32, 128, (9, 0)), "float16, torch.bfloat16; got torch.float32"),
        ((torch.float16, 72, (9, 0)), "head_dim = 72"),
        ((torch.float16, 128, (9, 0), 64), "head_dim = 128/64"),
        ((torch.float16, 128, (7, 5)), r"8\.0 \(Ampere\) or newer; got 7\.5"),
        ((torch.bfloat16, 576, (10, 0), 512), "for head_dim 576/512 on compute capability 10.0"),
    ],
)
def test_unsupported_configs(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KernelConfig(*arguments)


def test_a_cache_of_one_byte_has_variants_of_its_own() -> None:
    e4m3 = KernelConfig(torch.bfloat16, 128, (9, 0), kv_dtype=torch.float8_e4m3fn)
    e5m2 = KernelConfig(torch.float16, 192, (9, 0), 128, torch.float8_e5m2)
    assert (e4m3.name, e5m2.name) == ("bf16_e4m3_d128_sm90", "fp16_e5m2_d192v128_sm90")
    assert e4m3.cache_dtype == torch.float8_e4m3fn
    assert (e4m3.partial_dtype, CONFIG.partial_dtype) == (torch.float16, CONFIG.dtype)
    assert (CONFIG.tiles_agree, e4m3.tiles_agree) == (True, False)
    assert e4m3.build_options.endswith("--head-dim 128 --kv-dtype float8_e4m3fn")
    assert "-DPAT_KV_TYPE=kE4m3" in e4m3.options
    assert "-DPAT_KV_TYPE=kE5m2" in e5m2.options
    assert "-DPAT_KV_TYPE=kAsQueries" in CONFIG.options
    assert KernelConfig(torch.bfloat16, 128, (9, 0), kv_dtype=torch.bfloat16) == CONFIG
    with pytest.raises(ValueError, match=r"KV cache of torch\.float16, .*; got torch\.int8"):
        KernelConfig(torch.float16, 128, (9, 0), kv_dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"arch": (8, 0)}, "on compute capability 8.0"),
        ({"arch": (10, 0)}, "on compute capability 10.0"),
        ({"kv_dtype": torch.float8_e4m3fn}, "over a KV cache of torch.float8_e4m3fn on compute"),
        ({"force_mma_sync": True}, "on compute capability 9.0 by mma.sync"),
    ],
)
def test_head_dim_512_is_hoppers(change: dict[str, object], where: str) -> None:
    wide = KernelConfig(torch.bfloat16, 512, (9, 0))
    with pytest.raises(ValueError, match=f"no CUDA kernels for head_dim 512 {where}"):
        dataclasses.replace(wide, **change)
