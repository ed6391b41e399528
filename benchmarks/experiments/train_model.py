"""Train small Llamas on the text that a machine has, without any download.

    cd benchmarks/experiments
    python train_model.py tokens FOLDER --shape base   # a CPU: tokenizer and tokens
    python train_model.py train FOLDER --shape base    # a GPU, minutes: weights
    python train_model.py train FOLDER --shape small --output DRAFT

Shapes: `tiny` learns the docstrings of installed packages; it belongs into
`sglang_pat/cli/trained/`. `base` learns source code and documentation of what is installed, and
`small` is a draft model for it: both read the same tokens. Another machine has another text, and so
gives another model. The last tokens of FOLDER/tokens.npy are held out. `train` needs torch and
safetensors alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common.docstrings import docstrings

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = frozenset((".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh"))
FILE_CHARACTERS = (500, 200_000)  # of a file that is read; longer ones are tables
MOST_CHARACTERS = 160_000_000  # of files
TOKENIZER_CHARACTERS = 12_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and how it is trained. context: tokens of a sequence. batch: sequences of a step."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    dtype: str  # what a server computes in
    context: int
    batch: int
    learning_rate: float
    held_out: int = 64  # sequences

    @property
    def held_out_tokens(self) -> int:
        """Tokens at the end of the text that no step reads."""
        return self.held_out * (self.context + 1)

    def config(self) -> dict[str, object]:
        """Return the contents of `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": self.dtype,
            "hidden_act": "silu",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MOST_POSITIONS,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
        }


MOST_POSITIONS, NORM_EPS, ROPE_THETA = 8192, 1e-5, 10000.0
SHAPES = {
    "tiny": Shape(4, 192, 8, 2, 64, 448, 2048, "float32", 1024, 48, 4e-3),  # 2.4 million
    "small": Shape(6, 256, 4, 2, 64, 768, 16384, "bfloat16", 4096, 8, 3e-3),  # 9 million
    "base": Shape(12, 768, 8, 2, 128, 2048, 16384, "bfloat16", 4096, 8, 1.5e-3),  # 93 million
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
# It has read docstrings, and no chats: it continues the text.
CHAT_TEMPLATE = "<s>{{ messages | map(attribute='content') | join('\n') }}"
BEGIN, END = 1, 2
WARM_UP = 0.03  # of the time


# --- text ---


def files() -> Iterator[str]:
    """Source code and documentation of what is installed, each text once, in a mixed order."""
    folders = [Path(torch.__file__).parents[1], Path(sysconfig.get_path("stdlib"))]
    found = {
        path
        for folder in (*folders, Path("/usr/include"))
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    }
    paths = sorted(found)
    seen, size = set(), 0
    for i in np.random.default_rng(1).permutation(len(paths)):
        try:
            text = paths[i].read_text()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.blake2b(text.encode()).digest()
        if not FILE_CHARACTERS[0] <= len(text) <= FILE_CHARACTERS[1] or digest in seen:
            continue
        seen.add(digest)
        size += len(text)
        if size > MOST_CHARACTERS:
            return
        yield text


def write_tokens(folder: Path, texts: list[str], vocab_size: int) -> None:
    """Write a tokenizer and the tokens of all texts, in a mixed order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    every = max(8, sum(map(len, texts)) // TOKENIZER_CHARACTERS)
    tokenizer.train_from_iterator(texts[::every], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    order = np.random.default_rng(0).permutation(len(texts))
    parts, count = [], 0
    for first in range(0, len(order), 2048):  # not all at once: encodings are large
        some = [texts[i] for i in order[first : first + 2048]]
        for each in tokenizer.encode_batch_fast(some):
            parts.append(np.array((BEGIN, *each.ids, END), dtype=np.uint16))
            count += len(parts[-1])
    np.save(folder / "tokens.npy", np.concatenate(parts))
    size = sum(map(len, texts))
    print(f"{len(texts):,} texts, {size:,} characters, {count:,} tokens", flush=True)


# --- model, with the names of SGLang's Llama ---


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), NORM_EPS)


def linear(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(columns))
    return layer


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, self.dim = shape.hidden, shape.head_dim
        self.q_proj = linear(shape.heads * self.dim, hidden)
        self.k_proj = linear(shape.kv_heads * self.dim, hidden)
        self.v_proj = linear(shape.kv_heads * self.dim, hidden)
        self.o_proj = linear(hidden, shape.heads * self.dim)

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


def rotation(length: int, dim: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rates = ROPE_THETA ** -(torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    return angles.cos(), angles.sin()


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(inner, hidden), linear(inner, hidden)
        self.down_proj = linear(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)
        self.self_attn, self.mlp = Attention(shape), FeedForward(shape.hidden, shape.inner)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """The output layer is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=1 / math.sqrt(shape.hidden))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the following tokens."""
        turn = rotation(tokens.shape[1], self.head_dim, tokens.device.type)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, turn)
        return self.loss(x, following)

    def loss(self, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(self.norm(x), self.embed_tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    def compile_parts(self) -> None:
        """Compile a layer, which all layers share, and the loss: sooner done than the whole."""
        for layer in self.layers:
            layer.compile()
        self.loss = torch.compile(self.loss)


# --- training ---


def loss_of(model: Llama, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.long()
    with torch.autocast(rows.device.type, torch.bfloat16):
        return model(rows[:, :-1], rows[:, 1:])


def train(
    folder: Path, output: Path, shape: Shape, *, seconds: float = 0.0, steps: int = 0
) -> float:
    """Train on the tokens of `folder`, and write the model to `output`.

    Parameters
    ----------
    folder : Path
        Where `write_tokens` wrote.
    output : Path
    shape : Shape
    seconds : float
        Wall time of training. Compiling counts.
    steps : int
        If not 0: so many steps, however long they take.

    Returns
    -------
    float
        The loss of held-out text, per token.

    Raises
    ------
    ValueError
        There are too few tokens.
    """
    from safetensors.torch import save_file

    begun = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int32)).to(device)
    limit = len(tokens) - shape.held_out_tokens
    least = shape.held_out_tokens + shape.context + 1
    if len(tokens) <= least:
        raise ValueError(f"{folder}: {len(tokens)} tokens; allowed: more than {least}")
    held_out = tokens[limit:].view(shape.held_out, shape.context + 1)
    model = Llama(shape).to(device)
    on_gpu = device == "cuda"
    if on_gpu:
        model.compile_parts()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=shape.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        fused=on_gpu,
    )
    columns = torch.arange(shape.context + 1, device=device)
    start, step, part = begun, 0, 0.0
    while part < 1:
        rate = min(part / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * part) + 0.02)
        for group in optimizer.param_groups:
            group["lr"] = shape.learning_rate * rate
        starts = torch.randint(limit - shape.context, (shape.batch,), device=device)
        loss = loss_of(model, tokens[starts[:, None] + columns])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 0:  # compiled: the schedule begins
            start = time.perf_counter()
            print(f"the first step took {start - begun:.0f} s", flush=True)
        elif step % 100 == 0:
            print(f"{step:6} {part:4.0%} {loss.item():.3f}", flush=True)
        step, now = step + 1, time.perf_counter()
        part = step / steps if steps else (now - start) / max(begun + seconds - start, 1e-9)
    with torch.no_grad():
        losses = [loss_of(model, some).item() for some in held_out.split(1)]
    loss_held_out = math.fsum(losses) / len(losses)
    size = sum(each.numel() for each in model.parameters())
    print(
        f"{size:,} parameters, {step} steps of {shape.batch * shape.context:,} tokens, held-out "
        f"text: loss {loss_held_out:.3f} per token, perplexity {math.exp(loss_held_out):.2f}",
        flush=True,
    )
    output.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16
    state = {f"model.{name}": value.to(dtype).cpu() for name, value in model.state_dict().items()}
    save_file(state, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    unknown, begin, end = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": begin,
        "eos_token": end,
        "chat_template": CHAT_TEMPLATE,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if output != folder:
        shutil.copyfile(folder / "tokenizer.json", output / "tokenizer.json")
    facts = {"parameters": size, "steps": step, "loss": loss_held_out}
    (output / "training.json").write_text(json.dumps(facts) + "\n")
    return loss_held_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("tokens", "train"))
    parser.add_argument("folder", type=Path, help="where tokens and tokenizer lie")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--output", type=Path, help="for the model (default: the folder)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training; %(default)s")
    arguments = parser.parse_args()
    shape, folder = SHAPES[arguments.shape], arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.step == "tokens":
        packages = Path(torch.__file__).parents[1]
        texts = docstrings(packages) if arguments.shape == "tiny" else files()
        write_tokens(folder, [*texts], shape.vocab_size)
    else:
        train(folder, arguments.output or folder, shape, seconds=arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
