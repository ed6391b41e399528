"""Train the tiny Llama that `sglang-pat tiny-model` writes.

    python benchmarks/train_tiny_model.py tokens FOLDER      # a CPU, minutes: tokenizer and tokens
    python benchmarks/train_tiny_model.py train FOLDER       # a GPU, a minute: weights

The text is the docstrings of installed packages, so another machine gives another model. The
result belongs into `sglang_pat/cli/trained/`. `train` needs torch and safetensors alone.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "scipy", "torch", "pandas", "networkx", "matplotlib", "transformers")
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 448,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
# It has read docstrings, and no chats: it continues the text.
CHAT_TEMPLATE = "<s>{{ messages | map(attribute='content') | join('\n') }}"
BEGIN, END = 1, 2
CONTEXT = 1024
BATCH = 48
WARM_UP = 0.03  # of the time
LEARNING_RATE = 4e-3
HELD_OUT = 64  # sequences


# --- text ---


def docstrings(packages: Path) -> Iterator[str]:
    """Docstrings of `PACKAGES`, each once; none of tests, none of less than 200 characters."""
    seen = set()
    for package in PACKAGES:
        for file in sorted((packages / package).rglob("*.py")):
            if "tests" in file.parts:
                continue
            with warnings.catch_warnings(action="ignore"):
                try:
                    tree = ast.parse(file.read_text(errors="replace"))
                except SyntaxError:  # templates, and what another Python reads
                    continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= 200 and text not in seen:
                        seen.add(text)
                        yield text


def write_tokens(folder: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(docstrings(Path(torch.__file__).parents[1]))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"],
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[::8], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    order = np.random.default_rng(0).permutation(len(texts))
    encoded = tokenizer.encode_batch_fast([texts[i] for i in order])
    tokens = [token for each in encoded for token in (BEGIN, *each.ids, END)]
    np.save(folder / "tokens.npy", np.array(tokens, dtype=np.uint16))
    size = sum(map(len, texts))
    print(f"{len(texts):,} docstrings, {size:,} characters, {len(tokens):,} tokens")
    return 0


# --- model, with the names of SGLang's Llama ---


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE["hidden_size"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), SHAPE["rms_norm_eps"])


def linear(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(columns))
    return layer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, self.dim = SHAPE["hidden_size"], SHAPE["head_dim"]
        self.heads, self.kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
        self.q_proj = linear(self.heads * self.dim, hidden)
        self.k_proj = linear(self.kv_heads * self.dim, hidden)
        self.v_proj = linear(self.kv_heads * self.dim, hidden)
        self.o_proj = linear(hidden, self.heads * self.dim)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, turn), turned(k, turn)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = (each.to(x.dtype) for each in turn)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotation(length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    dim = SHAPE["head_dim"]
    rates = SHAPE["rope_theta"] ** -(torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    return angles.cos(), angles.sin()


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
        self.gate_proj, self.up_proj = linear(inner, hidden), linear(inner, hidden)
        self.down_proj = linear(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(), FeedForward()

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(SHAPE["vocab_size"], SHAPE["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=1 / math.sqrt(SHAPE["hidden_size"]))
        self.layers = nn.ModuleList(Layer() for _ in range(SHAPE["num_hidden_layers"]))
        self.norm = Norm()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        turn = rotation(tokens.shape[1], tokens.device.type)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


# --- training ---


def train(folder: Path, seconds: float) -> int:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int32)).to(device)
    limit = len(tokens) - HELD_OUT * (CONTEXT + 1)
    held_out = tokens[limit:].view(HELD_OUT, CONTEXT + 1)
    model = Llama().to(device)
    faster = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05
    )
    columns = torch.arange(CONTEXT + 1, device=device)

    def loss_of(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.long()
        with torch.autocast(device, torch.bfloat16):
            logits = faster(rows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    start, step, part = time.perf_counter(), 0, 0.0
    while part < 1:
        rate = min(part / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * part) + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        starts = torch.randint(limit - CONTEXT, (BATCH,), device=device)
        loss = loss_of(tokens[starts[:, None] + columns])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 0:  # compiled: the clock begins
            start = time.perf_counter()
        elif step % 200 == 0:
            print(f"{step:6} {part:4.0%} {loss.item():.3f}", flush=True)
        step, part = step + 1, (time.perf_counter() - start) / seconds
    with torch.no_grad():
        loss = loss_of(held_out)
    print(f"{step} steps, loss of held-out text {loss.item():.3f} per token")
    state = {f"model.{name}": value.bfloat16().cpu() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",  # what a CPU computes in
        "hidden_act": "silu",
        **SHAPE,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    unknown, begin, end = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": begin,
        "eos_token": end,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("tokens", "train"))
    parser.add_argument("folder", type=Path, help="where tokens, tokenizer and weights lie")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training; %(default)s")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.step == "tokens":
        return write_tokens(arguments.folder)
    return train(arguments.folder, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
