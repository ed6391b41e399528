"""Cases for compute-sanitizer, and the reading of its output."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from check import sanitizer_grid
from check.sanitizer_grid import GRID, HOPPER, Case, run_case
from check.sanitizers import KERNELS, TOOLS, verdict, version_of
from common.suites import Refused
from sglang_pat._scheduler import LATENT_TILE_TABLE, TILE_TABLE
from sglang_pat.executors.jit import source_folder
from sglang_pat.plan import BufferSizes, DecodePlan, KvTokens

CLEAN = """========= COMPUTE-SANITIZER
1 of 2: group-1: 0.5 s
2 of 2: group-2: 0.5 s
========= ERROR SUMMARY: 0 errors
"""
RACE = """========= COMPUTE-SANITIZER
1 of 1: group-1: 0.5 s
========= Error: Race reported between Write access at pack_decode_kernel+0xa70
=========     and Read access at pack_decode_kernel+0x2b80 [508 hazards]
=========
========= Error: Race reported between Write access at pack_decode_kernel+0xa70
=========     and Read access at pack_decode_kernel+0x2b80 [508 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def largest_rows(case: Case) -> int:
    """Return the rows of a latent case's largest tile; Hopper has a body for each size."""
    plan = case.plan(case.config(HOPPER))
    sizes = BufferSizes.needed_by(plan)  # type: ignore[arg-type]
    buffer = np.zeros(sizes.plan.layout()["size"], dtype=np.int32)
    plan.write(sizes.plan, sizes.num_partials, sizes.num_shared_slots, 0, buffer)
    header = DecodePlan(buffer, sizes.plan, KvTokens(0, 0, 0), LATENT_TILE_TABLE).header
    return LATENT_TILE_TABLE[header.largest_tile][0]


# --- the grid ---


@pytest.mark.parametrize("body", GRID)
def test_each_body_has_all_that_it_does(body: str) -> None:
    cases, is_latent = GRID[body], body.startswith("latent")
    assert len({case.name for case in cases}) == len(cases)
    configs = {case.config(HOPPER) for case in cases}
    assert {c.is_latent for c in configs} == {is_latent}
    assert {c.force_mma_sync for c in configs} == {"mma.sync" in body}
    assert {c.kv_dtype is not None for c in configs} == {"fp8" in body}
    groups = {case.heads[0] // case.heads[1] for case in cases}
    assert groups >= ({1, 5, 8, 16, 20, 64} if is_latent else {1, 2, 4, 5, 8, 16})
    if is_latent:
        assert {largest_rows(case) for case in cases} == {32, 64}
        assert {case.dtype for case in cases} == {torch.bfloat16, torch.float16}
    else:
        assert {(64, 64), (128, 128), (256, 256)} <= {(c.head_dim, c.v_head_dim) for c in configs}
        blocks = {case.scheduler.get("max_block_q", TILE_TABLE[-1][0]) for case in cases}
        assert blocks == {block_q for block_q, _, _ in TILE_TABLE}
        assert any(case.logit_cap > 0 for case in cases)
    assert any(case.scheduler.get("batch_invariant") for case in cases)
    assert any(case.sinks for case in cases)
    assert any(case.broken for case in cases)
    assert {case.placement for case in cases} >= {"scattered", "ranges", "mixed"}


@pytest.mark.parametrize("uninitialized", [False, True])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("wgmma", "split"),
        ("wgmma", "random-plan-1"),
        ("wgmma", "runs-mixed"),
        ("latent fp8", "latent-split"),
        ("latent fp8", "latent-random-plan-1"),
    ],
)
def test_cases_are_right_where_plain_torch_runs_them(
    body: str, name: str, uninitialized: bool
) -> None:
    (case,) = (case for case in GRID[body] if case.name == name)
    run_case(case, torch.device("cpu"), uninitialized=uninitialized)


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GRID["wgmma"][0]
    exact = sanitizer_grid.dense_attention
    monkeypatch.setattr(
        sanitizer_grid, "dense_attention", lambda *tensors, **_: exact(*tensors, logit_cap=0.5)
    )
    with pytest.raises(RuntimeError, match="group-1: the output is wrong"):
        run_case(case, torch.device("cpu"))


def test_a_planted_fault_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference checks slots and reports NaN."""
    case = GRID["wgmma"][0]
    with pytest.raises(ValueError, match="must hold slots of the caches"):
        run_case(case, torch.device("cpu"), planted=True)
    checked = []
    monkeypatch.setattr(sanitizer_grid, "_check", lambda *args: checked.append(args))
    run_case(case, torch.device("cpu"), planted=True, uninitialized=True)
    assert not checked


# --- the tools ---


def test_every_kernel_has_a_filter() -> None:
    source = (source_folder() / "entry_points.cu").read_text()
    kernels = re.findall(r"(\w+)\(const __grid_constant__", source)
    assert len(kernels) == source.count("__global__")
    assert all(any(name in kernel for name in KERNELS) for kernel in kernels), kernels


@pytest.mark.parametrize(
    ("output", "timed_out", "failures"),
    [
        (CLEAN, False, []),
        (CLEAN.replace("0 errors", "3 errors"), False, ["3 reports"]),
        (
            CLEAN.replace("0 errors", "36 errors")
            + "========= ERROR SUMMARY: 28 errors were not printed\n",
            False,
            ["36 reports"],
        ),
        (CLEAN.replace("2 of 2: group-2: 0.5 s\n", ""), False, ["only 1 of 2 cases ran"]),
        (CLEAN, True, ["it took too long"]),
        ("", False, ["no summary", "only 0 of the cases ran"]),
        (RACE, False, ["2 reports"]),
    ],
)
def test_anything_but_a_clean_run_fails(output: str, timed_out: bool, failures: list[str]) -> None:
    assert verdict(output, timed_out=timed_out, seconds=1.0)["failures"] == failures


def test_a_planted_fault_must_be_reported() -> None:
    planted = {"timed_out": False, "seconds": 1.0, "planted": True}
    found = CLEAN.replace("0 errors", "9 errors").replace("2 of 2: group-2: 0.5 s\n", "")
    assert verdict(found, **planted)["failures"] == []
    assert verdict(CLEAN, **planted)["failures"] == ["the planted fault is not reported"]


def test_reports_that_are_not_shown_are_counted() -> None:
    reports = [f"========= Error: Race at kernel+{place}\n=========\n" for place in range(11)]
    summary = "========= RACECHECK SUMMARY: 40 hazards displayed (40 errors, 0 warnings)\n"
    found = verdict("".join(reports) + summary, timed_out=False, seconds=1.0)["reports"]
    assert found[:8] == [f"Error: Race at kernel+{place}" for place in range(8)]
    assert found[8:] == ["3 other reports; --logs keeps them"]


def _sanitizer(folder: Path, version: str) -> str:
    """Write a program that prints a version like compute-sanitizer."""
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho 'NVIDIA (R) Compute Sanitizer\n{version}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("version", ["Version 2025.3.1.0 (build 3640)", "Version 2026.3.9", "none"])
def test_racecheck_that_misreads_mbarriers_is_refused(tmp_path: Path, version: str) -> None:
    sanitizer = _sanitizer(tmp_path, version)
    with pytest.raises(Refused, match=r"needs compute-sanitizer 2026\.4 or newer") as refused:
        version_of(sanitizer, [*TOOLS])
    assert version in str(refused.value)
    version_of(sanitizer, [tool for tool in TOOLS if tool != "racecheck"])


@pytest.mark.parametrize("version", ["Version 2026.4.0.0 (build 3902)", "Version 2027.1.0.0"])
def test_newer_racechecks_run(tmp_path: Path, version: str) -> None:
    assert version_of(_sanitizer(tmp_path, version), [*TOOLS]) == version
