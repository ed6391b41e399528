"""Descriptions of models by SGLang's classes, without weights: layers, routes, parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from model_families import FAMILIES
from published_shapes import PublishedShape, alike, read_shapes, told

from sglang_pat.model_layers import read_layers
from sglang_pat.workload.models import NAMED_CONFIGS

pytestmark = pytest.mark.nightly

# A model, its server flags, and per rank: query heads, KV heads, head_dim and v_head_dim, number of
# such layers, and why pat decodes none of them.
LATENT = "latent attention with nothing to gain: {} fill a tile"
EAGLE = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
CASES = (
    ("qwen3-8b", "", (32, 8, 128, 128), 36, None),
    ("qwen3-8b", "--tp 4", (8, 2, 128, 128), 36, None),
    ("qwen3-8b", "--tp 16", (2, 1, 128, 128), 36, None),  # more GPUs than KV heads
    ("qwen3-8b", "--tp 8 --dp-size 8 --enable-dp-attention", (32, 8, 128, 128), 36, None),
    ("qwen3-8b", "--enable-pdmux", (32, 8, 128, 128), 36, "--enable-pdmux"),
    ("deepseek-v2-lite", "", (16, 1, 576, 512), 27, None),
    ("deepseek-v2-lite", f"--tp 2 {EAGLE}", (8, 1, 576, 512), 27, None),
    ("deepseek-v2-lite", EAGLE, (16, 1, 576, 512), 27, LATENT.format("16 heads x 4 draft tokens")),
    ("qwen3-8b", "--pp-size 4", (32, 8, 128, 128), 36, None),  # layers of all stages
)
REFUSED = (
    ("qwen3-8b", "--tp 3", "ValueError: 32 query heads on 3 GPUs; allowed: a divisor of 32"),
    ("qwen3-8b", "--nonsense", "unrecognized arguments: --nonsense"),
)


# Published models that SGLang builds; the test data have the results.
PUBLISHED = {name: shape for name, shape in read_shapes().items() if not shape.not_built}
Described = dict[tuple[str, str], dict[str, Any]]  # by model and flags
SMALL = {name: family.small_config for name, family in FAMILIES.items()}
WITH_WINDOWS = [
    name for name, config in SMALL.items() if any(each.window for each in read_layers(config))
]
OTHERS = yaml.safe_load((Path(__file__).parents[1] / "support/data/other_shapes.yaml").read_text())
# Billions of parameters that a step does not read, apart from the embedding.
ENCODERS = {"InternVL3-8B": 0.332, "gemma-3n-E4B": 0.98 + 2.35, "GLM-4.1V-9B": 0.89}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Described:
    """Return descriptions by one process, as for `advise`."""
    configs = {(name, flags): NAMED_CONFIGS[name] for name, flags, *_ in (*CASES, *REFUSED)}
    configs |= {(name, ""): shape.config for name, shape in PUBLISHED.items()}
    configs |= {(name, ""): SMALL[name] for name in WITH_WINDOWS}
    configs |= {(name, ""): OTHERS[name]["config"] for name in ENCODERS}
    asked = []
    for (_, flags), config in configs.items():
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(config))
        asked.append(json.dumps({"path": str(folder), "flags": flags.split()}))
    # Engine tests in the same process disable all models but two.
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_DISABLED_MODEL_ARCHS"}
    child = subprocess.run(
        [sys.executable, "-m", "sglang_pat.offline.model_descriptions"],
        input="\n".join(asked),
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    return dict(zip(configs, map(json.loads, child.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("name", "flags", "shape", "layers", "reason"), CASES)
def test_layers_of_a_rank(
    described: Described,
    name: str,
    flags: str,
    shape: tuple[int, ...],
    layers: int,
    reason: str | None,
) -> None:
    found = described[name, flags]
    assert "error" not in found
    assert [each[0] for each in found["layers"]] == [*range(layers)]
    assert {tuple(each[1:5]) for each in found["layers"]} == {shape}
    assert {each[6] and each[6][1] for each in found["layers"]} == {reason}


@pytest.mark.parametrize(("name", "flags", "error"), REFUSED)
def test_refused_in_one_line(described: Described, name: str, flags: str, error: str) -> None:
    found = described[name, flags]["error"]
    assert error in found
    assert "\n" not in found


@pytest.mark.parametrize("shape", PUBLISHED.values(), ids=PUBLISHED)
def test_published_layers_and_parameters(described: Described, shape: PublishedShape) -> None:
    found = described[shape.name, ""]
    assert "error" not in found
    layers = [
        (entry[1:5], reason and told(*reason))
        for entry in found["layers"]
        for reason in [entry[6] or found["reason"]]
    ]
    assert alike(layers) == shape.layers
    parameters = sum(found["parameters"].values()) / 1e9
    assert parameters == pytest.approx(shape.parameters, rel=0.005)


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_windows_are_those_of_the_rules(described: Described, name: str) -> None:
    rules = {layer.index: layer.window for layer in read_layers(SMALL[name])}
    found = {entry[0]: entry[5] for entry in described[name, ""]["layers"] if not entry[7]}
    assert found
    assert found.items() <= rules.items()


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [("qwen3-8b", 8.19, [1, 1]), ("deepseek-v2-lite", 15.7, [64, 6])],
)
def test_parameters_of_named_models(
    described: Described, name: str, billions: float, experts: list[int]
) -> None:
    found = described[name, ""]
    assert sum(found["parameters"].values()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert found["experts"] == experts


@pytest.mark.parametrize("name", ENCODERS)
def test_parameters_that_a_step_does_not_read(described: Described, name: str) -> None:
    found = described[name, ""]
    assert "error" not in found
    assert found["parameters"]["encoders"] / 1e9 == pytest.approx(ENCODERS[name], rel=0.02)
