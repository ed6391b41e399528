"""Benchmarks refuse modules that stand in for a package which SGLang imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_pat.bench import stand_ins
from sglang_pat.cli import doctor
from sglang_pat.sglang.cpu import STUB_DIR

NAME = "pat_test_package"  # the fake SGLang below imports it
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ANSWERS = "def __getattr__(name):\n    return lambda *args, **options: None\n"
NOTHING = "def multiply(a, b, out):\n    pass\n"
CODE = "def double(x):\n    return 2 * x\n"


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of packages with a fake SGLang that imports `NAME`."""
    site = tmp_path / "site"
    write(site / "sglang/srt/ops.py", f"import os\nif True:\n    from {NAME}.utils import x\n")
    write(site / "sglang/srt/test/tests.py", "import pat_test_other\n")
    write(site / "sglang/multimodal_gen/cuda.py", "from kernel.attention import x\n")
    write(site / "sglang/__init__.py", "")
    monkeypatch.syspath_prepend(site)
    for name in (NAME, "sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield site
    sys.modules.pop(NAME, None)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(site: Path, files: dict[str, str], *, record: bool = True, **metadata: str) -> None:
    """Install a distribution with files."""
    for file, text in files.items():
        write(site / file, text)
    info = site / "the_distribution-1.0.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: the-distribution\nVersion: 1.0\n")
    if record:
        write(
            info / "RECORD",
            "".join(f"{file},sha256=0,{len(text)}\n" for file, text in files.items()),
        )
    for name, text in metadata.items():
        write(info / name, text)


def found() -> str | None:
    everything = stand_ins.find_stand_ins()
    assert set(everything) <= {NAME}
    return everything.get(NAME)


def test_a_package_that_is_not_there_is_none() -> None:
    assert found() is None


@pytest.mark.parametrize("text", ["", ANSWERS, NOTHING], ids=["empty", "answers", "does nothing"])
@pytest.mark.parametrize("file", [f"{NAME}/__init__.py", f"{NAME}.py"])
def test_a_file_of_no_distribution_is_one(site: Path, file: str, text: str) -> None:
    write(site / file, text)
    assert found() == f"{site / file} belongs to no installed distribution"


def test_what_servers_do_not_import_may_be_anything(site: Path) -> None:
    """SGLang's image generation imports `kernel`, and the benchmarks have a package `kernel`."""
    write(site / "kernel/__init__.py", NOTHING)
    assert found() is None


def test_an_empty_folder_is_one(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (site / NAME).mkdir()
    monkeypatch.syspath_prepend(tmp_path)  # folders beside a script can be imported
    assert found() == f"{site / NAME} belongs to no installed distribution"
    monkeypatch.chdir(site)  # and folders of the working directory
    assert found() is None


def test_a_file_beside_the_packages_of_a_distribution_is_one(site: Path) -> None:
    """A distribution's scripts are outside of the folder of packages."""
    install(site, {"another.py": CODE, "../bin/script": CODE})
    write(site / f"{NAME}.py", CODE)
    assert found() == f"{site / NAME}.py belongs to no installed distribution"


@pytest.mark.parametrize("module", [ModuleType(NAME), MagicMock()], ids=["module", "mock"])
def test_a_module_without_a_file_is_one(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, module)
    assert found() == "a module without a file"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("", "is empty"), ("'''Docs.'''", "is empty"), (ANSWERS, "answers any name")],
)
def test_a_distribution_may_be_one(site: Path, text: str, wrong: str) -> None:
    install(site, {f"{NAME}/__init__.py": text})
    assert found() == f"{site / NAME / '__init__.py'} {wrong}"


def test_a_package_before_the_installed_one_is_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, {f"{NAME}/__init__.py": CODE})
    write(tmp_path / f"first/{NAME}/__init__.py", CODE)
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert str(tmp_path / "first") in found()


@pytest.mark.parametrize(
    "files",
    [
        {f"{NAME}/__init__.py": CODE},
        {f"{NAME}.py": CODE},
        {f"{NAME}/__init__.py": "", f"{NAME}/utils.py": CODE},
        {f"{NAME}/__init__.py": "", f"{NAME}/_C.so": "ELF"},
        {f"{NAME}/utils/__init__.py": CODE},
        {f"{NAME}/__init__.py": "import lxml_is_not_there\n"},
    ],
    ids=["package", "module", "empty beginning", "compiled", "namespace", "fails"],
)
def test_real_packages_pass(site: Path, files: dict[str, str]) -> None:
    install(site, files)
    assert found() is None


def test_an_editable_package_passes(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / f"source/{NAME}/__init__.py", CODE)
    monkeypatch.syspath_prepend(tmp_path / "source")
    url = f'{{"url": "file://{tmp_path}/source", "dir_info": {{"editable": true}}}}'
    install(site, {"the_distribution.pth": "x"}, **{"direct_url.json": url})
    assert found() is None
    install(
        site, {"the_distribution.pth": "x"}, **{"direct_url.json": url.replace("true", "false")}
    )
    assert "belongs to no" in found()


def test_a_package_of_the_system_passes(site: Path) -> None:
    files = {f"{NAME}/__init__.py": CODE}
    install(site, files, record=False, **{"top_level.txt": NAME})
    assert found() is None


def test_stubs_of_the_project_stand_in_without_a_driver_alone(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(site / "sglang/srt/ops.py", "import sgl_kernel\n")
    monkeypatch.syspath_prepend(STUB_DIR)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    for is_present in (False, True):
        monkeypatch.setattr(stand_ins, "cuda_driver_is_present", lambda it=is_present: it)
        assert list(stand_ins.find_stand_ins()) == ["sgl_kernel"] * is_present


def test_this_environment_has_none(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(site)])
    assert stand_ins.find_stand_ins() == {}


def test_doctor_and_demo_name_it(site: Path, cli: Any) -> None:
    assert doctor.check_stand_ins().status == "ok"
    write(site / f"{NAME}/__init__.py", NOTHING)
    check = doctor.check_stand_ins()
    assert (check.status, check.found) == ("failed", f"{NAME}: {found()}")
    message = f"sglang-pat demo: error: {NAME}, a package that SGLang imports, is only a st"
    cli("demo").check_refusal(message)


@pytest.mark.parametrize(
    "command", [["-m", "sglang_pat", "bench"], [str(BENCHMARKS / "check"), "hicache"]]
)
def test_benchmarks_end_with_its_name(command: list[str], site: Path, tmp_path: Path) -> None:
    write(site / f"{NAME}/__init__.py", ANSWERS)
    words = ["--model", "llama-3-8b", "--device", "cpu"] if "bench" in command else []
    ran = subprocess.run(
        [sys.executable, *command, *words],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(site)},
        cwd=tmp_path,
        timeout=120,
    )
    assert ran.returncode == 2
    assert f"{NAME}, a package that SGLang imports, is only a stand-in: {site}" in ran.stderr
