"""The promises of the repository as a whole: README, packaging, who may import what."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from datetime import date
from graphlib import TopologicalSorter
from importlib.metadata import entry_points, version
from importlib.resources import files
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import grimp
import pytest
import torch

import sglang_pat
from sglang_pat import _scheduler, support
from sglang_pat.sglang.report import metrics
from sglang_pat.sglang.start.environment import Environment

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/guide.md").read_text()
PAGES = {
    path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _python(code: str) -> str:
    """Run `code` in a fresh interpreter; return the output."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- README and documentation ---


def test_the_support_table_is_documented_once() -> None:
    head = support.markdown_table().splitlines()[0]
    (page,) = (text for text in PAGES.values() if head in text)
    assert page.count(head) == 1
    lines = page[page.index(head) :].splitlines()
    table = "\n".join(takewhile(lambda line: line.startswith("|"), lines))
    assert table == support.markdown_table(), (
        "copy the output of: sglang-pat doctor --support-table"
    )


def test_the_configuration_page_describes_every_policy() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    section = page.partition("## Policies\n")[2].partition("\n## ")[0]
    assert [policy for policy in support.POLICIES if f"`{policy}`" not in section] == []


def test_readme_names_the_supported_sglang_versions() -> None:
    first, *_, last = support.SGLANG_VERSIONS
    assert f"**SGLang:** {first} to {last}" in README


def test_examples_of_the_guide_run_and_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    section = GUIDE.partition("## Without SGLang")[2]
    first, second, paged = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(first + second, names)
    assert capsys.readouterr().out.strip() == first.rpartition("# ")[2].strip()
    q = torch.cat((names["q_nope"], names["q_rope"]), dim=-1).double()

    def check(found: torch.Tensor, request: int, k: torch.Tensor, v: torch.Tensor) -> None:
        # 8 query heads, 2 KV heads: query head h reads KV head h // 4.
        k, v = (each.double().repeat_interleave(4, dim=1) for each in (k, v))
        logits = torch.einsum("hd,thd->ht", names["q"][request].double(), k) / 8
        expected = torch.einsum("ht,thd->hd", logits.softmax(-1), v)
        torch.testing.assert_close(found[request].double(), expected, rtol=0, atol=1e-5)

    for request, length in enumerate(names["seq_lens"].tolist()):
        slots = names["req_to_token"][request, :length].long()
        check(names["out"], request, names["k_cache"][slots], names["v_cache"][slots])
        latent = names["cache"][slots, 0].double()
        expected = (q[request] @ latent.T * 192**-0.5).softmax(-1) @ latent[:, :512]
        found = names["latent_out"][request].double()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    exec(paged, names)
    for request, (pages, length) in enumerate((([7, 2, 9], 37), ([7, 4], 28))):
        k, v = (names[each][pages].flatten(0, 1)[:length] for each in ("k_pages", "v_pages"))
        check(names["page_out"], request, k, v)
    assert names["attention"].step_tokens == (65, 49, 49)


def test_the_plan_of_six_requests_is_the_one_that_the_page_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/design/deep-dive.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    described = capsys.readouterr().out
    lines = re.findall(r"^(?:plan v|KV tokens: |ticket \d|merge request \d).*", page, re.M)
    assert len(lines) == 7
    for line in lines:
        shown = line.partition(", requests ...")[0].partition(" ...")[0]
        assert f"\n{shown}" in f"\n{described}"


def test_the_readme_is_short_and_begins_with_what_to_run() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100
    assert {"make demo", "make test"} <= {line.partition("  ")[0] for line in lines[:40]}


@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("README.md", {"demo", "test"}),
        ("CONTRIBUTING.md", {"setup", "test-fast", "lint"}),
        ("docs/development.md", {"setup", "test-fast", "lint", "docs", "mutants"}),
    ],
)
def test_pages_name_only_make_targets_that_exist(page: str, least: set[str]) -> None:
    assert least <= _make_targets((ROOT / page).read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path, text in PAGES.items():
        assert _make_targets(text) <= targets, path


def _make_targets(text: str) -> set[str]:
    return set(chain(*re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, re.M))) - {""}


@pytest.mark.parametrize(
    ("page", "section"),
    [("docs/guide.md", "Troubleshooting"), ("docs/metrics.md", "Other lines in the log")],
)
def test_pages_quote_what_the_code_says(page: str, section: str) -> None:
    sources = [path.read_text() for path in sorted((ROOT / "sglang_pat").rglob("*.py"))]
    code = re.sub(r'"\s*f?"', "", "\n".join(sources))  # adjacent string literals are one string
    table = PAGES[ROOT / page].partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| ", table, re.MULTILINE)
    quoted = {words for row in rows for words in re.findall(r"`(.*?)`", row)}
    assert len(quoted) > 5
    parts = chain(*(words.split("...") for words in quoted - {_OF_ARGPARSE}))
    said = [part.strip(" :;").replace("SGLANG_PAT_", "") for part in parts]
    assert [words for words in said if words.strip() not in code] == []


_OF_ARGPARSE = "--attention-backend: invalid choice: 'pat'"


def test_records_that_pages_name_exist() -> None:
    folder = ROOT / "benchmarks/results"
    named = set(re.findall(r"`((?:h\d+|cpu)/[^`\s]+)`", "\n".join(PAGES.values())))
    assert len(named) > 20
    assert [record for record in sorted(named) if not [*folder.glob(record)]] == []


def test_pages_name_only_metrics_that_exist() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"\bsglang:pat_(\w+)", text)}
    assert {f"{name}_total" for name in metrics._LABELS} <= named
    others = {"kv_read_ratio", "layers", "plan_seconds"}
    assert named - {f"{name}_total" for name in metrics._LABELS} == others


def test_relative_links_lead_somewhere() -> None:
    """The strict build of the documentation does not check these files."""
    folders = ("", "kernels/", "tests/", "scheduler/", "benchmarks/", "benchmarks/results/")
    for page in chain(*(ROOT.glob(f"{folder}*.md") for folder in folders)):
        for link, part in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page}: {link}"
            heads = re.findall("^#+ (.*)", target.read_text(), re.M) if part else []
            anchors = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
            assert part in ("", *anchors), f"{page}: {link}#{part}"


def test_every_variable_is_documented() -> None:
    with pytest.raises(ValueError, match="allowed: ") as error:
        Environment.read({"SGLANG_PAT_NO_SUCH": "1"})
    allowed = str(error.value).partition("allowed: ")[2].split(", ")
    documented = [re.findall(r"^\| `(SGLANG_PAT_\w+)`", page, re.M) for page in PAGES.values()]
    assert max(documented, key=len) == allowed


# --- packaging ---


def test_sglang_finds_the_plugin() -> None:
    (plugin,) = entry_points(group="sglang.srt.plugins", name="pat")
    assert plugin.value == "sglang_pat.sglang.plugin:register"
    assert callable(plugin.load())


@pytest.mark.parametrize(
    "module", ["sglang_pat", "sglang_pat.cli.main", "sglang_pat.sglang.plugin"]
)
def test_importing_is_light(module: str) -> None:
    heavy = "{'torch', 'numpy', 'sglang', 'rich', 'sglang_pat._scheduler'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    assert _python(code).strip() == "[]"


def test_a_server_imports_little_that_sglang_does_not() -> None:
    """A server's processes import neither the command line nor the simulation.

    They also import no package that SGLang and torch do not need. Every process imports the
    plug-in, and a scheduler the backend. tests/sglang/test_plugin.py measures the import time.
    """
    graph = grimp.build_graph(
        "sglang_pat", include_external_packages=True, exclude_type_checking_imports=True
    )
    modules: set[str] = set()
    for entry in ("plugin", "start.argument_rewrite", "attach"):
        modules |= graph.find_upstream_modules(f"sglang_pat.sglang.{entry}")
    outer = {name for name in modules if not name.startswith("sglang_pat")}
    outer -= {*sys.stdlib_module_names}
    known = {"cuda", "filelock", "numpy", "prometheus_client", "sglang", "torch", "triton"}
    assert outer - known == {"platformdirs"}
    ours = {name for name in modules if name.startswith("sglang_pat.")}
    assert not [name for name in ours if name.split(".")[1] in ("bench", "cli", "workload")]


def test_advice_needs_no_torch_and_is_what_its_page_shows() -> None:
    command = "advise --generate few-shot --limit 300"
    code = (
        "import sys; sys.modules.update(torch=None, sglang=None)\n"
        "from sglang_pat.cli.main import main\n"
        f"sys.exit(main({command.split()}))"
    )
    page = PAGES[ROOT / "docs/advise.md"]
    assert f"sglang-pat {command} " in page
    assert f"```text\n{_python(code)}```" in page


def test_without_torch_the_kernels_say_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import sglang_pat; sglang_pat.DecodeBatch\n"
        "try: sglang_pat.PackAttention\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    expected = "sglang_pat.attention needs torch: pip install '.[torch]' in a clone"
    assert _python(code).strip() == expected


def test_nobody_is_told_to_install_a_name_that_no_index_has() -> None:
    """Somebody else may register it there."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    by_name = re.compile(r"pip install(?: -[-\w]+(?:[ =][./\w]+)?)* ['\"]?sglang[-_]pat")
    assert by_name.search("pip install --quiet --find-links dist 'sglang-pat[torch]'")
    told = [
        f"{name}: {found[0]}"
        for name in listed.stdout.splitlines()
        if name.endswith((".py", ".md", ".yml", ".yaml", "Makefile", "Dockerfile"))
        and (ROOT / name).is_file()
        and name != "tests/unit/test_project.py"
        for found in by_name.finditer((ROOT / name).read_text())
    ]
    assert told == []


def test_public_names_are_imported_on_first_use() -> None:
    for name in sglang_pat.__all__:
        assert getattr(sglang_pat, name).__name__ == name
        assert name in dir(sglang_pat)
    assert sglang_pat.__version__ == version("sglang-pat")
    with pytest.raises(AttributeError, match="'sglang_pat' has no attribute 'PackAttentions'"):
        _ = sglang_pat.PackAttentions  # type: ignore[attr-defined]


def test_kernel_sources_and_types_are_installed() -> None:
    assert (files("sglang_pat") / "py.typed").is_file()
    kernels = files("sglang_pat") / "kernels"
    installed = (kernels / "contract" / "plan_format.h").read_text()
    assert installed == (ROOT / "kernels/contract/plan_format.h").read_text()


def test_a_source_distribution_can_set_itself_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scikit_build_core.build import build_sdist

    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build_sdist(str(tmp_path))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "pyproject.toml", ".ci/check_python.py", "scheduler/CMakeLists.txt"):
        assert name in names
    assert {_relative(path) for path in (ROOT / "kernels").rglob("*.cu")} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", ".git/"))]


def test_supported_pythons() -> None:
    project = PYPROJECT["project"]
    minors = [int(version.removeprefix("3.")) for version in support.PYTHON_VERSIONS]
    assert project["requires-python"] == f">=3.{minors[0]},<3.{minors[-1] + 1}"
    prefix = "Programming Language :: Python :: "
    classified = [each.removeprefix(prefix) for each in project["classifiers"] if prefix in each]
    assert tuple(classified) == support.PYTHON_VERSIONS


@pytest.mark.parametrize(
    ("version", "refused"), [((3, 10), True), ((3, 11), False), ((3, 12), False), ((3, 13), True)]
)
def test_the_set_up_refuses_other_pythons(
    version: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = runpy.run_path(str(ROOT / ".ci/check_python.py"))
    monkeypatch.setattr(sys, "version_info", (*version, 1, "final", 0))
    assert ("needs Python 3.11 or 3.12" in check["problem"]()) == refused


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("/no/such/c++", "CXX=/no/such/c++ cannot be run (No such file or directory)"),
        ("false", "false compiles no C++20, needed to build the scheduler"),
        (None, "no C++ compiler (c++, g++ or clang++), needed to build the scheduler"),
    ],
)
def test_a_missing_compiler_is_named_before_anything_is_downloaded(
    compiler: str | None, message: str, tmp_path: Path
) -> None:
    """The Makefile's `uv` is replaced by a program that reports its calls."""
    for name in ("Makefile", "pyproject.toml", ".ci/check_python.py", "sglang_pat/support.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("make", "bash", "sed", "grep", "tail", "find", "touch", "env"):
        (tools / name).symlink_to(str(shutil.which(name)))
    for program in ("build/uv/bin/uv", ".venv/bin/python"):
        (tmp_path / program).parent.mkdir(parents=True)
        (tmp_path / program).write_text("#!/bin/bash\necho downloads\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "kernels/contract").mkdir(parents=True)
    environment = {"PATH": str(tools) if compiler is None else os.environ["PATH"]}
    if compiler is not None:
        environment["CXX"] = compiler
    command = ["make", f"PYTHON={sys.executable}", ".venv/.dependencies-installed"]
    command[0] = str(tools / "make")
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert child.returncode == 2
    assert "downloads" not in child.stdout + child.stderr
    assert "Installing" not in child.stdout
    first, *rest = child.stderr.splitlines()
    assert message in first
    assert all(line.startswith("make: ***") for line in rest)


# --- one truth in several files ---


def test_support_agrees_with_the_scheduler() -> None:
    assert support.MAX_GROUP_SIZE == _scheduler.MAX_GROUP_SIZE
    assert support.MAX_LATENT_GROUP_SIZE == _scheduler.MAX_LATENT_GROUP_SIZE


def test_support_names_every_server_option_that_delegates_the_model() -> None:
    options = (ROOT / "sglang_pat/sglang/start/server_options.py").read_text()
    flags = set(re.findall(r"--[a-z][a-z0-9-]+", options))
    flags.remove("--kv-cache-dtype")  # under another topic
    topics = ("server options", "speculative decoding")
    named = "".join(row.supported for row in support.support_matrix() if row.topic in topics)
    assert set(re.findall(r"--[a-z][a-z0-9-]+", named)) == flags
    assert {"--speculative-algorithm", "--dcp-size"} <= flags


@pytest.mark.parametrize(
    ("step", "act", "message"),
    [
        ("test-cpp", "true", None),
        ("test", "exit 3", "FAILED: make test"),
        ("lint", "exit 3", "FAILED: make lint"),
        # The shell that runs the steps beside the tests is killed, as if memory ran out.
        ("test-cpp", "kill -9 $PPID", "FAILED: what runs beside the tests: ended early with 137"),
    ],
)
def test_no_failure_of_a_ci_step_is_lost(
    step: str, act: str, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    make = tmp_path / "make"
    make.write_text(f"#!/bin/bash\n[[ $* != {step} ]] || {act}\n")
    make.chmod(0o755)
    done = subprocess.run(
        [tmp_path / ".ci/run"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert (done.returncode, failed) == ((1, [message]) if message else (0, [])), done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {".ci", "make"}  # no other files are left


def test_every_supported_sglang_is_tested() -> None:
    (wanted,) = PYPROJECT["project"]["optional-dependencies"]["sglang"]
    oldest, default = support.SGLANG_VERSIONS[0], support.SGLANG_VERSIONS[-1]
    # The range also allows untested versions, so that installing pat never replaces a host's
    # SGLang.
    assert wanted == f"sglang>={oldest},<0.6"
    makefile = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert f"the default is {default}\n" in makefile.stdout
    tested = {
        default,
        *re.findall(r"make test-sglang SGLANG=(\S+)", (ROOT / ".ci/run").read_text()),
    }
    assert tested == {oldest, default}  # the others only when added to the table
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    matrix = re.search(r"sglang: \[(.*)\]", workflow)
    assert matrix is not None
    assert set(re.findall(r'"(.+?)"', matrix[1])) == {oldest, default}


def test_every_supported_sglang_has_a_test_result() -> None:
    results = runpy.run_path(str(ROOT / ".ci/sglang_versions.py"))
    tried = json.loads(results["DATA"].read_text())
    passed = [each["sglang"] for each in tried if each["result"].startswith("passed")]
    assert tuple(passed) == support.SGLANG_VERSIONS
    for each in tried:
        assert date.fromisoformat(each["date"]) <= date.today()
        assert "tests/sglang" in each["ran"]
    table = results["table"]()
    assert table in PAGES[ROOT / "docs/support.md"], "copy the output of .ci/sglang_versions.py"


# --- structure ---


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = grimp.build_graph("sglang_pat", exclude_type_checking_imports=True)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the cycle
