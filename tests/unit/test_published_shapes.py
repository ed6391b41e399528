"""Layers and weights of published models by pat's own rules, which need no SGLang."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from published_shapes import PublishedShape, by_rules, read_shapes

from sglang_pat.model_config import decoder_config
from sglang_pat.model_layers import read_layers
from sglang_pat.workload.weights import read_weights, weight_bytes

SHAPES = read_shapes()
# Models whose weights differ by more than 10%: the rules count two extra embeddings as an output
# head. pat decodes no layer of them.
OTHER_WEIGHTS = {"BAAI/bge-large"}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_are_those_of_sglangs_class(shape: PublishedShape) -> None:
    assert by_rules(shape.config) == shape.layers


OTHERS = yaml.safe_load((Path(__file__).parents[1] / "support/data/other_shapes.yaml").read_text())


@pytest.mark.parametrize("name", OTHERS)
def test_other_shapes(name: str) -> None:
    config, billions = OTHERS[name]["config"], OTHERS[name]["billions"]
    layers = read_layers(config)
    assert sum(each.is_accelerated for each in layers) == OTHERS[name]["decoded"]
    reasons = {str(each.refusal) for each in layers if each.num_qo_heads and each.refusal}
    assert reasons == {OTHERS[name].get("reason")} - {None}
    found = read_weights(decoder_config(config), layers)
    whole = (found.dense + found.experts + found.embedding) / 1e9
    assert billions is None or whole == pytest.approx(billions, rel=0.1)


WRONG = (None, 0, -1, "x", "", [], {}, [1], ["a"], {"a": 1}, 1.5, True, 10**12, [None], [{}])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_wrong_values_are_refused_by_name(shape: PublishedShape) -> None:
    """A key of a wrong type counts as missing, or raises ValueError."""
    others = ("quantization_config", "moe_layers_enum", "mlp_layer_types", "moe_layer_freq")
    for key in (*shape.config, *others):
        for value in WRONG:
            config = {**shape.config, key: value}
            with contextlib.suppress(ValueError):
                decoder = decoder_config(config)
                read_weights(decoder, read_layers(config, 2))
                weight_bytes(decoder)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_are_within_a_tenth(shape: PublishedShape) -> None:
    found = read_weights(decoder_config(shape.config), read_layers(shape.config))
    billions = (found.dense + found.experts + found.embedding) / 1e9
    assert (abs(billions / shape.parameters - 1) < 0.1) == (shape.name not in OTHER_WEIGHTS)
