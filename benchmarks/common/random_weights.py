"""A plug-in of SGLang for `--load-format dummy`, whose weights give activations of unit scale.

SGLang's own dummy weights are all within 1e-3. With them, attention adds next to nothing, and
answers soon repeat one token, so they prove little about attention.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from pathlib import Path

import torch

GAIN = 1.4


_NAME = "sglang_random_weights"


def install(folder: Path) -> dict[str, str]:
    """Write the plug-in into a folder, and return the variables of servers that load it."""
    shutil.copy(__file__, folder / f"{_NAME}.py")
    metadata = folder / f"{_NAME}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{_NAME} = {_NAME}:register\n"
    )
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths)}


def register() -> None:
    """Replace SGLang's dummy weights. SGLang calls this in every process that loads a model."""
    from sglang.srt.model_loader import loader  # noqa: TID251  # runs within SGLang

    loader.initialize_dummy_weights = draw


def draw(model: torch.nn.Module) -> None:
    """Fill all parameters.

    Each parameter depends only on its name, so that every engine draws the same. With tensor
    parallelism, each rank draws its own part of the vocabulary.
    """
    weights = dict(model.named_parameters())
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    is_tied = not any("lm_head" in name for name in weights)  # shared weights are named once
    for name, weight in weights.items():
        if torch.is_floating_point(weight):
            is_part = ("embed" in name or "lm_head" in name) and len(weight) < vocabulary
            part = str(rank) if rank and is_part else ""
            drawn = hashlib.blake2b((name + part).encode(), digest_size=6).digest()
            seed = int.from_bytes(drawn)
            generator = torch.Generator(weight.device).manual_seed(seed)
            _fill(name, weight.data, generator, is_tied)
    for module in model.modules():
        _limit_logits(module)


def _limit_logits(layer: torch.nn.Module) -> None:
    """Scale the queries' norm so that logits have unit scale in a layer that does not scale them.

    Gemma 4 has such layers, and its own weights keep logits small. With weights of 1, each row
    would attend to one token alone, and any rounding would change the answer.
    """
    weight = getattr(getattr(layer, "q_norm", None), "weight", None)
    attention = getattr(layer, "attn", None)
    scale, columns = (getattr(attention, name, None) for name in ("scaling", "qk_head_dim"))
    if isinstance(weight, torch.nn.Parameter) and scale and columns:
        weight.data.mul_(min(1.0, 1 / (scale * math.sqrt(columns))))


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator, is_tied: bool) -> None:
    kind = name.rpartition(".")[2]
    noise = torch.randn(weight.shape, generator=generator, device=weight.device)
    if kind == "A_log":
        drawn = noise.abs().log1p()
    elif kind == "A":  # -exp(A_log)
        drawn = -1 - noise.abs()
    elif weight.dim() > 1:
        is_embedding = "embed" in name or "wte" in name or "wpe" in name
        # If the embedding is also the head, large values would make every token predict itself.
        of_embedding = 0.2 / math.sqrt(weight.shape[-1]) if is_tied else 1.0
        drawn = noise * (of_embedding if is_embedding else GAIN / math.sqrt(weight.shape[-1]))
    elif bool((weight == 1).all()):  # a norm
        drawn = 1 + 0.1 * noise
    elif kind == "sinks" or "sink" in kind:
        drawn = noise
    else:  # a bias, or the norm of a class that adds 1 to it
        drawn = 0.1 * noise
    weight.copy_(drawn)
