"""Tests of the numbers and gates of `benchmarks/experiments rl` and `planted`, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiments import planted, rl
from sglang_pat.cli.tiny_model import TRAINED


def followed(*groups: list[float]) -> rl.Followed:
    arrays = [np.array(group) for group in groups]
    return rl.Followed(arrays, old_shares=[0.5], rewards=[0.25, 0.5], iterations=len(groups) // 2)


def test_mismatches_are_compared_over_all_tokens() -> None:
    pat, other = (
        followed([-2.0, 2.0], [1.0], [1.0], [1.0]),
        followed([1.0, 1.0], [2.0], [2.0], [2.0]),
    )
    ratio, noise = rl.ratio_of(pat, other)
    assert ratio == pytest.approx(7 / 8)
    assert 0.1 < noise < 1.0
    assert rl.ratio_of(pat, pat) == (1.0, 0.0)
    found = pat.summary()
    assert (found["tokens"], found["mean"], found["worst"]) == (5, pytest.approx(1.4), 2.0)
    assert found["mean_by_iteration"] == [pytest.approx(5 / 3), 1.0]


def test_a_checkpoint_with_scales_quantizes_no_weights(tmp_path: Path) -> None:
    trainer = rl.Trainer(TRAINED, 1e-3)
    scales = trainer.scales([*range(8, 40)])
    layers = json.loads((TRAINED / "config.json").read_text())["num_hidden_layers"]
    names = {f"model.layers.{i}.self_attn.{kind}_scale" for i in range(layers) for kind in "kv"}
    assert scales.keys() == names
    assert all(0 < float(scale) < 1 for scale in scales.values())
    folder = rl.write_scaled(TRAINED, tmp_path / "scaled", scales)
    weights, before = (load_file(each / "model.safetensors") for each in (folder, TRAINED))
    assert weights.keys() == before.keys() | names
    linear = {name.removesuffix(".weight") for name in before if "_proj." in name}
    config = json.loads((folder / "config.json").read_text())
    assert {*config["quantization_config"]["ignored_layers"]} == linear
    assert len(linear) == 7 * layers


def test_a_step_of_the_trainer_raises_the_probability_of_what_is_rewarded() -> None:
    trainer, prompt, answers = rl.Trainer(TRAINED, 1e-3), [*range(8, 40)], [[50, 51], [60, 61]]
    before = trainer.logprobs(prompt, answers)
    (-(torch.tensor([[1.0], [-1.0]]) * before).mean()).backward()
    trainer.step()
    after = trainer.logprobs(prompt, answers)
    assert (after - before).sum(1)[0] > 0 > (after - before).sum(1)[1]
    change = trainer.change(prompt, answers)
    torch.testing.assert_close(change, (after - before).detach(), rtol=0, atol=1e-4)


def test_the_share_of_old_weights_shows_below_the_rounding() -> None:
    rng = np.random.default_rng(0)
    changes = [0.03 * rng.standard_normal(2048)]
    rounding = 0.1 * rng.standard_normal(2048)
    assert abs(rl.old_share([rounding], changes)) < 0.3
    assert rl.old_share([rounding + changes[0]], changes) > 0.7


@pytest.mark.parametrize(
    ("found", "clean", "met"),
    [
        ([False, False], [True, True, True], [True, True, True]),
        ([False, True], [True, True, True], [False, True, True]),
        ([False, False], [True, False, True], [True, True, False]),
        ([False, False], [True, None, True], [True, False, True]),
    ],
)
def test_gates_of_planted_errors(found: list[bool], clean: list[Any], met: list[bool]) -> None:
    def verdict(is_close: bool | None) -> dict[str, Any]:
        return {"failure": "none"} if is_close is None else {"is_close": is_close}

    kinds = ["one", "two"]
    data: dict[str, Any] = {
        "with an error": dict(zip(kinds, map(verdict, found), strict=True)),
        "without an error": dict(enumerate(map(verdict, clean))),
    }
    planted.fill(data, kinds, len(clean) - 1)
    assert [gate["met"] for gate in data["gates"].values()] == met
    assert data["missed"] == [kind for kind, close in zip(kinds, found, strict=True) if close]
