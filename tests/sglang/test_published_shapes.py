"""SGLang's own classes have the layers and parameters that are kept of published models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from published_shapes import PublishedShape, alike, read_shapes, told

pytestmark = pytest.mark.nightly

SHAPES = {name: shape for name, shape in read_shapes().items() if not shape.not_built}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    asked = []
    for shape in SHAPES.values():
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(shape.config))
        asked.append(json.dumps({"path": str(folder)}))
    # Engine tests of the same process leave out all models but two.
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_DISABLED_MODEL_ARCHS"}
    child = subprocess.run(
        [sys.executable, "-m", "sglang_pat.offline.model_descriptions"],
        input="\n".join(asked),
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment,
    )
    return dict(zip(SHAPES, map(json.loads, child.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_and_parameters(described: dict[str, dict[str, Any]], shape: PublishedShape) -> None:
    found = described[shape.name]
    assert "error" not in found
    layers = [
        (entry[1:5], reason and told(*reason))
        for entry in found["layers"]
        for reason in [entry[6] or found["reason"]]
    ]
    assert alike(layers) == shape.layers
    parameters = sum(found["parameters"].values()) / 1e9
    assert parameters == pytest.approx(shape.parameters, rel=0.005)
