"""`--load-format dummy` for tests: weights with activations of unit scale.

SGLang's own dummy weights, all within 1e-3, give answers that soon repeat one token: such answers
prove little about attention.
"""

from __future__ import annotations

import hashlib
import math

import torch

GAIN = 1.4


def register() -> None:
    """In every process that loads a model. A plug-in of SGLang, too."""
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw


def draw(model: torch.nn.Module) -> None:
    """Fill all parameters.

    Each depends on its name alone, so that every engine draws the same. Under tensor parallelism a
    rank's part of the vocabulary is its own.
    """
    weights = dict(model.named_parameters())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    is_tied = not any("lm_head" in name for name in weights)  # each is named once
    for name, weight in weights.items():
        if torch.is_floating_point(weight):
            part = str(rank) if rank and ("embed" in name or "lm_head" in name) else ""
            drawn = hashlib.blake2b((name + part).encode(), digest_size=6).digest()
            seed = int.from_bytes(drawn)
            generator = torch.Generator(weight.device).manual_seed(seed)
            _fill(name, weight.data, generator, is_tied)


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator, is_tied: bool) -> None:
    kind = name.rpartition(".")[2]
    noise = torch.randn(weight.shape, generator=generator, device=weight.device)
    if kind == "A_log":
        drawn = noise.abs().log1p()
    elif kind == "A":  # -exp(A_log)
        drawn = -1 - noise.abs()
    elif weight.dim() > 1:
        is_embedding = "embed" in name or "wte" in name or "wpe" in name
        # If the embeddings are the head as well, large ones let every token answer itself.
        of_embedding = 0.2 / math.sqrt(weight.shape[-1]) if is_tied else 1.0
        drawn = noise * (of_embedding if is_embedding else GAIN / math.sqrt(weight.shape[-1]))
    elif bool((weight == 1).all()):  # a norm
        drawn = 1 + 0.1 * noise
    elif kind == "sinks" or "sink" in kind:
        drawn = noise
    else:  # a bias, or the norm of a class that adds 1 to it
        drawn = 0.1 * noise
    weight.copy_(drawn)
