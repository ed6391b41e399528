"""Stubs for machines without a CUDA driver: they raise when called, and a driver disables them."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_pat.sglang import cpu

pytestmark = pytest.mark.skipif(
    cpu.cuda_driver_is_present(), reason="there is a CUDA driver, so nothing is stubbed"
)


def test_a_stub_that_is_called_raises_with_its_name() -> None:
    import sgl_kernel
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.rmsnorm was called"):
        sgl_kernel.rmsnorm(1, eps=2)
    with pytest.raises(
        NotImplementedError, match=r"sgl_kernel\.flash_attn\.flash_attn_varlen_func"
    ):
        flash_attn_varlen_func()


def test_plain_python_comes_from_the_wheel() -> None:
    from sgl_kernel.scalar_type import ScalarType, scalar_types

    assert not Path(sys.modules["sgl_kernel.scalar_type"].__file__).is_relative_to(cpu.STUB_DIR)
    assert Path(sys.modules["sgl_kernel"].__file__).is_relative_to(cpu.STUB_DIR)
    assert isinstance(scalar_types.int4, ScalarType)


def test_flashinfer_is_hidden() -> None:
    with pytest.raises(ImportError, match="no CUDA driver"):
        import flashinfer  # noqa: F401


def test_child_processes_inherit_the_stubs() -> None:
    assert cpu.enable_cpu_engine()
    assert cpu.enable_cpu_engine()  # a second call changes nothing
    assert os.environ["PYTHONPATH"].split(os.pathsep).count(str(cpu.STUB_DIR)) == 1
    code = "import sgl_kernel; print(sgl_kernel.__file__)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(cpu.STUB_DIR) in child.stdout


def test_nothing_happens_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cuda_driver_is_present", lambda: True)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    assert cpu.enable_cpu_engine() is False
    assert os.environ == {}
    assert sys.path == ["elsewhere"]


def test_stubs_refuse_to_be_imported_where_there_is_a_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "cuda_driver_is_present", lambda: True)
    with pytest.raises(ImportError, match="on a machine with a CUDA driver"):
        runpy.run_path(str(cpu.STUB_DIR / "sgl_kernel/__init__.py"))


def test_enabling_after_sglang_was_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.plugins  # noqa: F401

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    with pytest.raises(RuntimeError, match="after SGLang had been imported"):
        cpu.enable_cpu_engine()


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], cpu.KV_POOL_TOKENS), (["--max-total-tokens", "99"], 99), (["--max-total-tokens=99"], 99)],
)
def test_the_kv_pool_of_a_server_is_bounded(given: list[str], expected: int) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = cpu.bound_kv_pool([*given, "--model-path", "m"])
    assert parser.parse_args(arguments).max_total_tokens == expected


def test_a_configuration_file_is_not_overridden() -> None:
    given = ["--config", "server.yaml"]
    assert cpu.bound_kv_pool(given) == given
