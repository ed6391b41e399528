"""Models are read from SGLang's class in another process, or by pat's rules if that fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.hub import install_hub

from sglang_pat.model_layers import CHUNK, FULL, LATENT, STATE, WINDOW
from sglang_pat.workload import model_reader, models
from sglang_pat.workload.model_reader import read_model

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
}
ALONE: dict[str, Any] = {
    "class": "GptOssForCausalLM",
    "reason": None,
    "layers": [
        [0, 8, 2, 64, 64, 127, ["sliding window", "127"], False],
        [1, 8, 2, 64, 64, None, None, False],
        [2, 8, 2, 64, 64, None, ["attention", f"{CHUNK} of 8192"], True],
    ],
    "parameters": {
        "attention": 400,
        "dense": 600,
        "experts": 8000,
        "head": 50,
        "embedding": 50,
        "encoders": 7,
    },
    "experts": [8, 2],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, *answers: Mapping[str, Any]) -> list[Any]:
    """Let SGLang's process return these answers. Returns a list of its requests."""
    asked: list[Any] = []

    def ask(
        questions: Sequence[Mapping[str, Any]], without: Sequence[str] = ()
    ) -> list[Mapping[str, Any]]:
        asked[:] = (question.get("flags", []) for question in questions)
        return list(answers)

    monkeypatch.setattr(model_reader, "version", lambda name: "0.5.23")
    monkeypatch.setattr(model_reader, "_ask", ask)
    return asked


def test_the_class_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, ALONE)
    model = read_model(str(folder))
    assert asked == [[]]
    assert [layer.kind for layer in model.layers] == [WINDOW, FULL, CHUNK, STATE]
    assert [layer.is_accelerated for layer in model.layers] == [False, True, False, False]
    assert (model.layers[1].num_qo_heads, model.layers[1].kv_elements) == (8, 2 * 128)
    weights = model.weights
    assert (weights.dense, weights.experts, weights.embedding) == (1050, 8000, 57)
    assert (weights.num_experts, weights.experts_per_token, weights.vocabulary) == (8, 2, 50)
    assert weights.attention == 400
    assert model.note == ""


def test_tied_embeddings_are_the_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ALONE | {"parameters": ALONE["parameters"] | {"head": 0}})
    weights = read_model(str(folder)).weights
    assert (weights.dense, weights.vocabulary, weights.embedding) == (1050, 50, 7)


def test_reasons_are_those_of_the_gpus_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = [0, 128, 1, 576, 512, None]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"kv_lora_rank": 512}))
    alone = ALONE | {"layers": [[*latent, ["attention", "fills a tile"], False]]}
    asked = answer(
        monkeypatch, alone, ALONE | {"layers": [[0, 16, 1, 576, 512, None, None, False]]}
    )
    (layer, *_) = read_model(str(folder), tp=8, kv_cache_dtype="fp8_e5m2").layers
    assert asked == [[], ["--tp", "8", "--kv-cache-dtype", "fp8_e5m2"]]
    assert (layer.kind, layer.num_qo_heads, layer.is_accelerated) == (LATENT, 128, True)


def test_what_sglang_cannot_build_is_read_by_rules_and_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, {"error": "ValueError: no GPU"})
    model = read_model(str(folder))
    assert [layer.kind for layer in model.layers] == [WINDOW, FULL] * 2
    assert model.note == "SGLang 0.5.23 cannot build GptOssForCausalLM here (ValueError: no GPU)"
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": ["BloomForCausalLM"]})
    )
    message = "'BloomForCausalLM' is .*; SGLang 0.5.23 cannot build BloomForCausalLM here"
    with pytest.raises(ValueError, match=message):
        read_model(str(folder))


def test_a_model_that_is_known_by_name_needs_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(monkeypatch) == []
    assert len(read_model("qwen3-8b").layers) == 36


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "BertModel is an embedding, reward or encoder model"),
        ({"architectures": ["Qwen3ForRewardModel"]}, "it generates no tokens"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "generates no tokens"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "drafts tokens for another model"),
        ({"architectures": None}, "it names no architectures"),
    ],
)
def test_what_decodes_nothing_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ValueError, match=message):
        read_model(str(folder))


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, ["--trace", "/no/trace"], "there is no such file"),
        ({}, ["--policies", "best"], "--policies 'best'"),
        ({}, ["--page-size", "64", "--kv-tokens", "100"], "two pages of 64 are needed"),
        ({}, ["--tp", "3"], "--tp 3: 8 query heads; allowed: a divisor of 8"),
        ({"torch_dtype": "int3"}, [], "torch_dtype='int3'"),
        ({"num_hidden_layers": "many"}, [], "num_hidden_layers='many'; allowed: a whole number"),
        ({"intermediate_size": 10**8}, [], "the weights take"),
        (
            {"architectures": ["Cheese" * 99]},
            [],
            "neither the installed SGLang nor transformers has",
        ),
        ({"architectures": ["BertModel"]}, [], "it generates no tokens"),
    ],
)
def test_wrong_input_is_refused_before_sglang_is_asked(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Any,
    changes: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(model_reader, "_of_sglang", lambda *_: pytest.fail("SGLang is asked"))
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    workload = [] if "--trace" in words else ["--generate", "rl-rollout"]
    cli("advise", "--model", folder, *workload, *words).check_refusal(message, most=700)


def test_a_quantisation_beside_the_config_is_read(folder: Path) -> None:
    assert "name has NVFP4" in str(models.unread_quantisation("a/V3-NVFP4", CONFIG))
    assert models.unread_quantisation("safp4/V3", CONFIG) is None
    file = folder / "hf_quant_config.json"
    file.write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    config = read_model(str(folder)).config
    assert config["quantization_config"] == {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert models.unread_quantisation("a/V3-NVFP4", config) is None
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: not a quantization"):
        read_model(str(folder))


def test_a_name_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "config.json"
    assert install_hub(monkeypatch, file, OSError("offline")) == []  # the file is cached
    assert models.read_whole_config("org/model") == (str(file), CONFIG)
    asked = install_hub(monkeypatch, file, None)
    assert models.read_whole_config("org/model") == (str(file), CONFIG)
    assert asked == ["org/model/config.json", "org/model/hf_quant_config.json"]


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = install_hub(monkeypatch, None, OSError("Name or service not known"))
    with pytest.raises(ValueError, match=r"no config\.json .* \(Name or service"):
        models.read_whole_config("org/model")
    assert asked == []  # a download would retry for half a minute
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="huggingface_hub is not installed"):
        models.read_whole_config("org/model")
