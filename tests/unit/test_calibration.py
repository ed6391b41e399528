"""Calibration without a GPU: designed plans, a fit to invented times, and the file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sglang_pat._scheduler import TILE_TABLE, CostModel
from sglang_pat.attention import PackAttention
from sglang_pat.bench import calibration as bench
from sglang_pat.bench.calibration import (
    CalibrationError,
    Design,
    Features,
    Measurement,
    calibrate,
    designs,
    fit,
    missing_tokens,
    nnls,
)
from sglang_pat.cli import calibrate as command
from sglang_pat.cli import doctor
from sglang_pat.cli.gpus import Gpu
from sglang_pat.executors import calibration, jit
from sglang_pat.executors.calibration import (
    KINDS,
    LATENT,
    ONE_BYTE_LATENT,
    PLAIN,
    Calibration,
    Machine,
    costs_of,
    load,
)
from sglang_pat.executors.kernel_cache import CACHE_VARIABLE, KernelCacheError

MACHINE = Machine("NVIDIA H100 80GB HBM3", "580.159.04", "0123456789abcdef")
TRUE = Features(
    layer=6.0,
    merge=2.0,
    token=1.5e-4,
    reread=0.7e-4,
    partial_row=3.3e-4,
    item=3.6e-3,
    query_row=2.25e-4,
)


SHORTEST = 48


class Planned(NamedTuple):
    design: Design
    features: Features
    missing: list[float]


@pytest.fixture(scope="module")
def planned() -> list[Planned]:
    return planned_of(PLAIN)


@functools.cache
def planned_of(kind: str) -> list[Planned]:
    """Return all designs with their plans, as on a GPU with 264 CTAs (132 of latent attention)."""
    found = []
    layers = bench.LAYERS_OF[kind]
    workers = 132 if layers.shape.is_latent else 33
    for design in designs(kind):
        attention = layers.attention(policy=design.policy, device="cpu", num_workers=workers)
        batch = design.batch()
        lens = torch.from_numpy(batch.seq_lens)
        table = torch.zeros((len(lens), int(lens.max())), dtype=torch.int32)
        plan = attention.plan(
            batch, req_to_token=table, req_pool_indices=torch.arange(len(lens)), seq_lens=lens
        )
        missing = missing_tokens(plan, batch.seq_lens, layers.shape.num_kv_heads)
        found.append(Planned(design, Features.of_plan(plan, layers.shape), missing))
    return found


def timed(planned: list[Planned], true: Features = TRUE, noise: float = 0.0) -> list[Measurement]:
    draw = np.random.default_rng(0)
    result = []
    for design, features, missing in planned:
        us = float(np.dot(features, true))
        us += missing[bench.SHORTEST.index(SHORTEST)] * true.token
        if design.body == TILE_TABLE[-1][0]:  # twice as slow per token
            us += features.token * true.token
        result.append(Measurement(design, features, missing, us * (1 + noise * draw.normal())))
    return result


def test_made_up_times_are_found_again(planned: list[Planned]) -> None:
    found = fit(timed(planned))
    assert found.error < 1e-6
    assert found.microseconds == pytest.approx(TRUE, rel=1e-3)
    largest = TILE_TABLE[-1][0]
    assert found.bodies[largest] == pytest.approx(2.0, rel=0.01)
    small = [rate for rows, rate in found.bodies.items() if rows < largest]
    assert small == pytest.approx([1.0] * len(small), abs=0.01)
    assert found.costs() == pytest.approx(
        {
            "reread_token": 0.467,
            "partial_row": 2.2,
            "packed_item": 24.0,
            "item": 24.0,
            "shortest": SHORTEST,
            "query_row": 1.5,
            **{f"token_{rows}": rate for rows, rate in found.bodies.items()},
        },
        abs=0.01,
    )
    CostModel(**found.costs())


def test_a_bad_fit_is_refused(planned: list[Planned]) -> None:
    with pytest.raises(CalibrationError, match=r"off by \d\d\.\d% \(allowed: 10%\)"):
        fit(timed(planned, noise=0.3))
    without = TRUE._replace(token=0.0)
    with pytest.raises(CalibrationError, match="KV tokens no time"):
        fit(timed(planned, without))


@pytest.mark.parametrize("kind", KINDS)
def test_the_designs_tell_the_features_apart(kind: str) -> None:
    planned = planned_of(kind)
    summed = [each for each in planned if not each.design.body]
    matrix = np.array([each.features for each in summed])
    scaled = matrix / np.linalg.norm(matrix, axis=0)
    assert np.linalg.cond(scaled) < 50
    assert len({each.design for each in planned}) == len(planned)
    # Short items have several lengths, and are not the only items.
    assert len({tuple(each.missing) for each in summed}) > 5
    assert any(each.missing[-1] == 0 for each in summed)


def test_missing_tokens_are_those_of_short_items() -> None:
    attention = PackAttention(32, 8, 128, dtype=torch.bfloat16, num_workers=1, policy="per-node")
    batch = Design(2, 300, 4, 40).batch()
    lens = torch.from_numpy(batch.seq_lens)
    table = torch.zeros((len(lens), int(lens.max())), dtype=torch.int32)
    plan = attention.plan(
        batch, req_to_token=table, req_pool_indices=torch.arange(len(lens)), seq_lens=lens
    )
    # Eight private items of 40 tokens, two prefixes, and 8 KV heads.
    lacking = [max(0, least - 40) * 8 * 8 for least in bench.SHORTEST]
    assert missing_tokens(plan, batch.seq_lens, 8) == lacking


def test_least_squares_stay_non_negative() -> None:
    draw = np.random.default_rng(1)
    for _ in range(50):
        matrix, target = draw.normal(size=(12, 5)), draw.normal(size=12)
        x = nnls(matrix, target)
        gradient = matrix.T @ (target - matrix @ x)
        assert (x >= 0).all()
        assert gradient.max() < 1e-9  # raising any value fits no better
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-9  # nor lowering one
    exact = np.abs(draw.normal(size=5))
    matrix = draw.normal(size=(12, 5))
    assert nnls(matrix, matrix @ exact) == pytest.approx(exact)


# --- the file ---


@pytest.fixture
def made(planned: list[Planned]) -> Calibration:
    return calibrate(MACHINE, timed(planned))


def test_the_file_is_read_as_it_was_written(made: Calibration, tmp_path: Path) -> None:
    assert load(MACHINE, tmp_path) is None
    path = made.save(tmp_path)
    assert path.parent == tmp_path / "calibration"
    assert path.stat().st_mode & 0o777 == 0o644
    assert load(MACHINE, tmp_path) == made
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_write_that_fails_leaves_nothing(made: Calibration, tmp_path: Path) -> None:
    path = made.save(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        made.save(tmp_path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("field", ["gpu", "driver", "kernels"])
def test_another_machine_has_another_file(field: str, made: Calibration, tmp_path: Path) -> None:
    made.save(tmp_path)
    assert load(replace(MACHINE, **{field: "other"}), tmp_path) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 9}, "not in format 1"),
        ({"costs": {"packed_item": -1}}, "packed_item"),
        ({"costs": {"nonsense": 1}}, "nonsense"),
        ({"costs": {"item": "x"}}, "item must be a number, got 'x'"),
        ({"machine": asdict(MACHINE) | {"driver": "1"}}, "made for"),  # a renamed file
        ({"machine": asdict(MACHINE) | {"kernels": "1"}}, "made for"),
        ({"machine": {"gpu": "x"}}, "missing"),
    ],
)
def test_a_file_that_is_wrong_is_named(
    change: dict[str, object], problem: str, made: Calibration, tmp_path: Path
) -> None:
    path = made.save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(KernelCacheError, match=problem) as raised:
        load(MACHINE, tmp_path)
    assert str(path) in str(raised.value)
    assert "sglang-pat calibrate" in str(raised.value)


def test_planning_takes_the_costs_of_the_file(
    made: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(calibration, "_machine", lambda _: MACHINE)
    replace(made, costs=dict(made.costs) | {"packed_item": 77.0}).save()
    assert costs_of(torch.device("cuda", 0)).values()["packed_item"] == 77


@pytest.mark.parametrize(
    ("gpu", "origin"),
    [
        ("NVIDIA H100 80GB HBM3", "measured on the H100"),
        ("NVIDIA A100-SXM4-80GB", "estimates for the A100"),
        ("NVIDIA GeForce RTX 4090", "those of the H100"),
    ],
)
def test_without_a_file_the_costs_that_are_shipped_hold(
    gpu: str, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(calibration, "_machine", lambda _: replace(MACHINE, gpu=gpu))
    shipped, words = calibration.shipped_costs(gpu)
    assert words == origin
    assert costs_of(torch.device("cuda", 0)) == shipped


@pytest.mark.parametrize("kind", [LATENT, ONE_BYTE_LATENT])
def test_costs_of_latent_attention_are_measured_as_well(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(calibration, "_machine", lambda _: MACHINE)
    found = calibrate(MACHINE, timed(planned_of(kind)), kind)
    assert found.cost_model.values()["reread_token"] == pytest.approx(0.467, abs=0.02)
    path = found.save()
    assert load(MACHINE, kind=kind) == found
    device, one_byte = torch.device("cuda", 0), kind == ONE_BYTE_LATENT
    assert costs_of(device, latent=True, one_byte=one_byte) == found.cost_model
    # Other kernels keep their constants.
    assert costs_of(device, latent=True, one_byte=not one_byte) != found.cost_model
    assert costs_of(device, one_byte=one_byte) == calibration.shipped_costs(MACHINE.gpu)[0]
    path.rename(path.with_name(MACHINE.file_name()))
    with pytest.raises(KernelCacheError, match="made for layers of kind"):
        load(MACHINE)


# --- the commands ---


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.setattr(command, "find_gpus", list)
    cli("calibrate").check_refusal("no NVIDIA GPU")


class OnAGpu:
    """Runs the command on a fake GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, cli: Any, cache: Path) -> None:
        self.patch, self.cli = patch, cli
        patch.setenv(CACHE_VARIABLE, str(cache))
        patch.setattr(command, "find_gpus", lambda: [Gpu(MACHINE.gpu, (9, 0), "")])
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        self.has_capability(9, 0)
        patch.setattr(Machine, "of_device", lambda _: MACHINE)
        patch.setattr(calibration, "driver_version", lambda: MACHINE.driver)
        patch.setattr(jit, "source_hash", lambda: MACHINE.kernels)
        self.measures(lambda kind: timed(planned_of(kind)))

    def has_capability(self, *capability: int) -> None:
        self.patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    def measures(self, measure: Callable[[str], list[Measurement]]) -> None:
        self.patch.setattr(bench, "measure", lambda _, kind: measure(kind))

    def run(self, *flags: str) -> tuple[int, str]:
        """Run the command; return its exit status and output."""
        status, *printed = self.cli("calibrate", *flags)
        return status, "".join(printed)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cli: Any, tmp_path: Path) -> OnAGpu:
    return OnAGpu(monkeypatch, cli, tmp_path)


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_the_command_keeps_its_result_unless_it_is_told_not_to(
    flags: list[str], gpu: OnAGpu, tmp_path: Path
) -> None:
    gpu.measures(lambda kind: timed(planned_of(kind), noise=0.01))
    status, printed = gpu.run(*flags)
    assert status == 0
    for kind in KINDS:
        assert f"{kind} layers:\n" in printed
        assert f"fitted to {len(planned_of(kind))} plans, off by" in printed
        assert (load(MACHINE, tmp_path, kind=kind) is None) == bool(flags)
    assert "packed_item 2" in printed
    check, *of_latent = doctor.check_calibration([Gpu(MACHINE.gpu, (9, 0), "")], tmp_path)
    assert check.status == "ok"
    assert ("not measured" if flags else "measured, off by") in check.found
    assert len(of_latent) == (0 if flags else 2)


def test_a_gpu_without_kernels_for_latent_attention_has_the_others_measured(
    gpu: OnAGpu, tmp_path: Path
) -> None:
    gpu.has_capability(10, 0)
    status, printed = gpu.run("--kinds", PLAIN, LATENT)
    assert status == 1
    assert "latent attention has no kernels for the NVIDIA H100" in printed
    assert load(MACHINE, tmp_path) is None
    assert gpu.run()[0] == 0
    kept = [load(MACHINE, tmp_path, kind=kind) is not None for kind in KINDS]
    assert kept == [True, False, False]


@pytest.mark.parametrize("noise", [0.01, 0.4])
def test_samples_are_written_whatever_the_fit(noise: float, gpu: OnAGpu, tmp_path: Path) -> None:
    measured = timed(planned_of(PLAIN), noise=noise)
    gpu.measures(lambda _: measured)
    file = tmp_path / "samples.json"
    status, _ = gpu.run("--dry-run", "--kinds", PLAIN, "--samples", str(file))
    assert status == (noise > 0.1)
    samples = json.loads(file.read_text())["samples"]
    assert [Design(**each["design"]) for each in samples] == [each.design for each in measured]
    assert [each["us"] for each in samples] == [each.us for each in measured]


def test_a_bad_fit_leaves_the_file_alone(made: Calibration, gpu: OnAGpu, tmp_path: Path) -> None:
    made.save(tmp_path)
    gpu.measures(lambda kind: timed(planned_of(kind), noise=0.4))
    status, printed = gpu.run()
    assert status == 1
    assert "Its file was not changed" in printed
    assert load(MACHINE, tmp_path) == made


def test_a_kind_that_fails_leaves_the_others_kept(gpu: OnAGpu, tmp_path: Path) -> None:
    def measure(kind: str) -> list[Measurement]:
        if kind != PLAIN:
            raise jit.KernelBuildError("no kernels")
        return timed(planned_of(kind))

    gpu.measures(measure)
    status, printed = gpu.run()
    assert status == 1
    assert f"{LATENT}: no kernels" in printed
    assert load(MACHINE, tmp_path) is not None
    (kept,) = tmp_path.rglob("*.json")
    assert "kind" not in json.loads(kept.read_text())


@pytest.mark.usefixtures("gpu")
def test_doctor_names_a_file_that_is_wrong(made: Calibration, tmp_path: Path) -> None:
    made.save(tmp_path).write_text("{}")
    (check,) = doctor.check_calibration([Gpu(MACHINE.gpu, (9, 0), "")], tmp_path)
    assert check.status == "failed"
    assert "sglang-pat calibrate" in check.advice
    assert doctor.check_calibration([], tmp_path) == []
