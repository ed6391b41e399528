"""`benchmarks/experiments/train_model.py` learns its text on a CPU, in seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from experiments import train_model
from experiments.train_model import SHAPES, Llama, Shape, train, write_tokens

TOY = Shape(1, 32, 2, 1, 16, 64, 320, "float32", 32, 8, 1e-2, held_out=4)
LINE = ["paths", "begin", "at", "the", "root", "and", "end", "at", "the", "last", "node"]
TEXTS = [
    " ".join(LINE[(i + j * k) % len(LINE)] for j in range(40)) for i in range(9) for k in (1, 3)
]


def test_it_learns(tmp_path: Path) -> None:
    write_tokens(tmp_path, TEXTS, TOY.vocab_size)
    loss = train(tmp_path, tmp_path / "model", TOY, steps=150)
    assert loss < 0.7 * math.log(TOY.vocab_size)
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} < written
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (TOY.vocab_size, config["hidden_size"])
    facts = json.loads((tmp_path / "model" / "training.json").read_text())
    assert facts["parameters"] == sum(each.numel() for each in weights.values())


def test_tokens_are_the_texts(tmp_path: Path) -> None:
    write_tokens(tmp_path, TEXTS, TOY.vocab_size)
    tokens = np.load(tmp_path / "tokens.npy").tolist()
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = [i for i, token in enumerate(tokens) if token == train_model.END]
    begins = [0, *(end + 1 for end in ends[:-1])]
    read = [tokenizer.decode(tokens[a:b]) for a, b in zip(begins, ends, strict=True)]
    assert sorted(read) == sorted(TEXTS)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.zeros(100, dtype=np.uint16))
    with pytest.raises(ValueError, match="100 tokens; allowed: more than 165"):
        train(tmp_path, tmp_path, TOY, steps=1)


@pytest.mark.parametrize(
    ("name", "millions"), [("tiny", (2, 3)), ("small", (7, 11)), ("base", (50, 120))]
)
def test_shapes_have_their_sizes(name: str, millions: tuple[int, int]) -> None:
    import torch

    with torch.device("meta"):
        model = Llama(SHAPES[name])
    assert millions[0] <= sum(each.numel() for each in model.parameters()) / 1e6 <= millions[1]


def test_the_shipped_model_is_tiny() -> None:
    shipped = Path(train_model.ROOT) / "sglang_pat/cli/trained/config.json"
    assert json.loads(shipped.read_text()) == SHAPES["tiny"].config()
