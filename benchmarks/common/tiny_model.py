"""Writes a tiny Llama with random weights, so that SGLang needs no download.

Engine tests and benchmarks serve it on the CPU in seconds. Users get a trained model
(`sglang_pat/cli/trained`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "assistant:"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Shape and seed of the model, which is float32 with grouped-query heads."""

    num_layers: int = 4
    hidden_size: int = 256
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    vocab_size: int = 768
    max_context_len: int = 8192
    seed: int = 20

    def write(self, folder: Path | str) -> Path:
        """Write configuration, weights and tokenizer to `folder`, which is made if missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n")
        save_file(self._weights(), folder / "model.safetensors", metadata={"format": "pt"})
        self._write_tokenizer(folder)
        return folder

    def config(self) -> dict[str, object]:
        """Contents of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_qo_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_context_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def _write_tokenizer(self, folder: Path) -> None:
        """Write a tokenizer that reads any text byte by byte, and has a word for each other token.

        Some words have a line end, a full stop or an "and", at which SGLang's test kits stop
        answers.
        """
        unknown, begin, end = SPECIAL_TOKENS
        known = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        words = known + [_word(token) for token in range(len(known), self.vocab_size)]
        vocabulary = {word: token for token, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.add_special_tokens([*SPECIAL_TOKENS])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": unknown,
            "bos_token": begin,
            "eos_token": end,
            "chat_template": _CHAT_TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def _weights(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            weight = torch.randn(rows, columns, generator=generator)
            return weight * (gain / math.sqrt(columns))

        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_qo_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = {
            "model.embed_tokens.weight": normal(self.vocab_size, hidden, math.sqrt(hidden)),
            "model.norm.weight": torch.ones(hidden),
            "lm_head.weight": normal(self.vocab_size, hidden),
        }
        # Special tokens (unknown, begin, end) are never generated, so answers have the requested
        # length.
        weights["lm_head.weight"][:NUM_SPECIAL_TOKENS] = 0
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            weights |= {
                f"{prefix}.input_layernorm.weight": torch.ones(hidden),
                f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
                # With gain 2 for queries and keys, a far away token can decide the next one. With
                # gain 1, the softmax is nearly flat, and the output hardly depends on a long
                # prefix.
                f"{prefix}.self_attn.q_proj.weight": normal(q_size, hidden, 2.0),
                f"{prefix}.self_attn.k_proj.weight": normal(kv_size, hidden, 2.0),
                f"{prefix}.self_attn.v_proj.weight": normal(kv_size, hidden, 2.0),
                f"{prefix}.self_attn.o_proj.weight": normal(hidden, q_size),
                f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
                f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
                f"{prefix}.mlp.down_proj.weight": normal(hidden, inner),
            }
        return weights


def _word(token: int) -> str:
    """Return the text of a token, as in a vocabulary of bytes: Ġ is a space, Ċ a line feed."""
    endings = {0: "Ċ", 1: ".", 2: "and"}
    return f"Ġw{token}{endings.get(token % 20, '')}"
