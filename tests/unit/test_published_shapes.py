"""Layers and weights of published models, by the rules that hold where SGLang is not installed."""

from __future__ import annotations

import pytest
from published_shapes import PublishedShape, by_rules, read_shapes

from sglang_pat.model_layers import decoder_config, read_layers
from sglang_pat.workload.weights import read_weights

SHAPES = read_shapes()
# Their weights are not within 10%: two embeddings beside that of the words, which count here as an
# output head. Nothing of such a model is decoded.
OTHER_WEIGHTS = {"BAAI/bge-large"}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_are_those_of_sglangs_class(shape: PublishedShape) -> None:
    assert by_rules(shape.config) == shape.layers


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_are_within_a_tenth(shape: PublishedShape) -> None:
    found = read_weights(decoder_config(shape.config), read_layers(shape.config))
    billions = (found.dense + found.experts + found.embedding) / 1e9
    assert (abs(billions / shape.parameters - 1) < 0.1) == (shape.name not in OTHER_WEIGHTS)
