"""Wheels need no compiler, and do not replace an installed SGLang or its dependencies."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from sglang_pat import support
from sglang_pat.executors import jit

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".ci/wheels.py"
UV = shutil.which("uv") or str(ROOT / "build/uv/bin/uv")
TRACE = ROOT / "tests/support/data/conversation.jsonl"
# The test's wheel has only one kernel variant, so that the build takes seconds.
ONE_VARIANT = """
import runpy, sys
from sglang_pat import support
support.KERNEL_DTYPES, support.HEAD_DIMS = ("bfloat16",), ((128, 128),)
wheels = runpy.run_path({wheels!r})
wheels["add_kernels"].__globals__["ARCHITECTURES"] = ((9, 0),)
wheels["add_kernels"].__globals__["CONVERTED"] = {{}}
wheels["add_kernels"]()
wheels["build_wheel"]({uv!r}, sys.executable)
"""
FIND_IMAGE = """
import torch
from sglang_pat.executors.jit import KernelConfig, build
print(build(KernelConfig(torch.bfloat16, 128, (9, 0))))
"""


def test_wheels_hold_every_shipped_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The script builds each architecture, dtype and head_dim, without old build outputs."""
    namespace = runpy.run_path(str(WHEELS))
    add_kernels = namespace["add_kernels"]
    asked: list[jit.KernelConfig] = []

    def build_all(configs: list[jit.KernelConfig], cache: Path) -> list[Path]:
        asked.extend(configs)
        images = [tmp_path / "cache" / config.name / jit.IMAGE for config in configs]
        for image in images:
            image.parent.mkdir(parents=True)
            image.write_bytes(b"image")
            image.with_name(jit.RECORD).write_text("{}")
        return images

    monkeypatch.setattr(jit, "build_all", build_all)
    shipped = tmp_path / "cubins"
    (shipped / "left").mkdir(parents=True)
    monkeypatch.setitem(add_kernels.__globals__, "SHIPPED", shipped)
    add_kernels()
    variants = {
        (each.arch, each.dtype, each.cache_dtype, each.head_dim, each.v_head_dim) for each in asked
    }
    num_dtypes = len(support.KERNEL_DTYPES) + 1  # plus bfloat16 with an fp8 cache
    archs = {*namespace["ARCHITECTURES"]}
    count = len(archs) * num_dtypes * (len(support.GQA_HEAD_DIMS) - 1)
    count += len(archs & {*support.LATENT_CAPABILITIES}) * num_dtypes
    count += len(archs & {*support.WIDE_CAPABILITIES}) * len(support.KERNEL_DTYPES)
    assert len(variants) == len(asked) == count
    assert {path.name for path in shipped.iterdir()} == {jit.cache_key(each) for each in asked}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel of the tracked files."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    code = ONE_VARIANT.format(wheels=str(tree / ".ci/wheels.py"), uv=UV)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tree)
    (wheel,) = (tree / "dist").glob("*.whl")
    assert "manylinux" in wheel.name
    return wheel


def environment_with(wheel: Path, extra: str, folder: Path) -> Path:
    """Return the `bin` of an environment with only the wheel and its dependencies."""
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, folder / "env"], check=True)
    python = folder / "env/bin/python"
    wanted = f"sglang-pat{extra} @ {wheel.as_uri()}"
    subprocess.run([UV, "pip", "install", "-q", "--python", python, wanted], check=True)
    return folder / "env/bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the `bin` of an environment with the wheel and torch."""
    folder = tmp_path_factory.mktemp("installed")
    yield environment_with(wheel, "[torch]", folder)
    shutil.rmtree(folder)  # torch is large


def in_empty_environment(binaries: Path, *command: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with a PATH that has no compiler or other program of this machine."""
    clean = {"PATH": str(binaries), "HOME": str(binaries.parent)}
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=clean, cwd=binaries.parent
    )


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which(UV), reason="needs uv: run make setup")
def test_the_kernels_of_a_wheel_need_no_compiler(installed: Path) -> None:
    found = in_empty_environment(installed, installed / "python", "-c", FIND_IMAGE)
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).parts[-3] == jit.SHIPPED
    assert "compiling" not in found.stderr
    assert not (installed.parent / ".cache").exists()


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which(UV), reason="needs uv: run make setup")
def test_doctor_of_a_wheel_names_what_is_missing(installed: Path, tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = in_empty_environment(installed, installed / "sglang-pat", "doctor", "--json", path)
    checks = {each["topic"]: each for each in json.loads(path.read_text())["checks"]}
    assert checks["C++ scheduler"]["status"] == "ok", done.stdout
    assert checks["compiler"]["status"] == "ok", done.stdout  # NVRTC, which comes with torch
    assert checks["SGLang"]["status"] != "ok"


@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which(UV), reason="needs uv: run make setup")
def test_advise_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    """Installation and answer take less than two minutes, without torch."""
    begun = time.monotonic()
    binaries = environment_with(wheel, "", tmp_path)
    assert not list((binaries.parent / "lib").glob("python*/site-packages/torch"))
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
            }
        )
    )
    command = "advise", "--model", config, "--trace", TRACE, "--gpu", "H100", "--tp", "1"
    done = in_empty_environment(binaries, binaries / "sglang-pat", *command)
    assert done.returncode == 0, done.stderr
    assert "32 of 32 layers" in " ".join(done.stdout.split())
    assert time.monotonic() - begun < 120


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Extras for users; the others are for development.
FOR_USERS = ("sglang", "torch", "replay")
REQUIREMENTS = [
    Requirement(text)
    for text in (
        *PROJECT["dependencies"],
        *(each for extra in FOR_USERS for each in PROJECT["optional-dependencies"][extra]),
    )
]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_what_is_installed_satisfies_every_requirement(requirement: Requirement) -> None:
    """pip would not replace any installed package."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        pytest.fail(f"{requirement.name} is missing from the test environment")
    assert requirement.specifier.contains(installed, prereleases=True)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_no_requirement_pins_a_package(requirement: Requirement) -> None:
    operators = {specifier.operator for specifier in requirement.specifier}
    # Only SGLang has an upper bound: its next minor version may break every hook.
    assert operators <= ({">=", "<"} if requirement.name == "sglang" else {">="})
