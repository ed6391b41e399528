"""The models of the server benchmarks: shapes of well-known models with random weights.

SGLang needs only a folder with config.json and a word-level tokenizer of the model's vocabulary.
`load_format=dummy` draws the weights, and nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.tiny_model import TinyModel
from sglang_pat.model_config import decoder_config
from sglang_pat.workload.models import NAMED_CONFIGS


@dataclass(frozen=True)
class ModelShape:
    """config: the Hugging Face model's. arguments: the server's, such as dtype and device.

    cut: the real model's numbers where this shape has fewer, by key of the config.
    """

    name: str
    config: dict[str, Any]
    arguments: dict[str, Any]
    cut: dict[str, int] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        size: int = decoder_config(self.config)["vocab_size"]
        return size

    def write(self, folder: Path) -> Path:
        """Write all files that SGLang reads to `folder`, and return `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.name == TINY:
            TinyModel().write(folder)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        if not self.arguments.get("skip_tokenizer_init"):
            write_tokenizer(folder, self.vocab_size, self.config["eos_token_id"])
        return folder


def write_tokenizer(folder: Path, vocab_size: int, end: int) -> None:
    """Write a tokenizer in which the word `w7` is token 7, so that texts have known lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token=f"w{end}"
    ).save_pretrained(folder)


_GPU = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "context_length": 16384,
    "mem_fraction_static": 0.85,
    "cuda_graph_backend_prefill": "disabled",  # halves the time of a start
}
_LLAMA_3_8B = {
    **NAMED_CONFIGS["llama-3-8b"],
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_QWEN3_8B = {
    **_LLAMA_3_8B,
    **NAMED_CONFIGS["qwen3-8b"],
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
TINY = "tiny"
MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3-8b", _LLAMA_3_8B, _GPU),
        ModelShape("qwen3-8b", _QWEN3_8B, _GPU),
        # For a machine without a GPU, to test in seconds that everything works.
        ModelShape(
            TINY,
            TinyModel().config(),
            {
                "dtype": "float32",
                "device": "cpu",
                "disable_cuda_graph": True,
                "sleep_on_idle": True,
                # Fixed, so that other processes' memory does not matter.
                "max_total_tokens": 32768,
                "mem_fraction_static": 0.95,
            },
        ),
    )
}
