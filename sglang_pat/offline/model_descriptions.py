"""Describes models as SGLang builds them, for processes that do not import SGLang.

`python -m sglang_pat.offline.model_descriptions` reads lines of `{"path": ..., "flags": [...]}`.
For each line, it writes a line with the result of `describe_model` or with `{"error": ...}`. It
imports SGLang once and forks for each model, because a process can build only one model.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_pat.sglang.cpu import enable_cpu_engine

if TYPE_CHECKING:
    import torch

# _ATTENTION matches the name of a module with attention or a state. It also matches the name of an
# MLP inside such a module, which _MLP then excludes.
_ATTENTION = re.compile(r"attn|attention|mixer|mamba|\bconv\b|qkv_proj|\b[qo]_proj")
_MLP = re.compile(r"mlp|expert")


def describe_model(path: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return the layers and the parameters of a model, for JSON. See `layers_of_config`.

    Returns
    -------
    dict
        `class`: the name of the model's class.
        `reason`: [topic, value] if pat does not decode the model at all, else None.
        `layers`: a list per attention layer, with the numbers of heads on one rank: [id, query
        heads, KV heads, head_dim, v_head_dim, window, fallback, is_chunked]. window: the number of
        tokens that a request attends to, including its new token, or None if the layer has no
        window. fallback: [topic, value] if pat does not decode the layer, else None.
        is_chunked: whether the layer attends within chunks.
        `parameters`: the number of parameters on one rank, by role: "attention" (includes states),
        "dense", "experts", "head" (0 if the head is the embedding), "embedding", "encoders"
        (includes embeddings per layer).
        `experts`: [experts in a layer, how many of them a token uses].
    """
    from sglang_pat.offline.model_support import build_model
    from sglang_pat.sglang.start.layer_rules import attention_layers, shape_of

    model, layer_support = build_model(path, flags)
    layers = []
    for layer in sorted(attention_layers(model), key=lambda each: each.layer_id):
        reason = layer_support.fallback.get(layer.layer_id)
        window = layer.sliding_window_size
        layers.append(
            [
                layer.layer_id,
                *shape_of(layer),
                None if window is None or window < 0 else window + 1,
                reason and [reason.topic, str(reason.value)],
                layer.layer_id in layer_support.chunked,
            ]
        )
    whole = layer_support.whole
    return {
        "class": type(model).__name__,
        "reason": whole and [whole.topic, str(whole.value)],
        "layers": layers,
        "parameters": _parameters(model),
        "experts": _experts(model),
    }


def _parameters(model: torch.nn.Module) -> dict[str, int]:
    """Count the parameters by role. Parameters that modules share count once."""
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    from sglang_pat.sglang.start.layer_rules import attention_layers

    names = {id(module): name for name, module in model.named_modules()}
    attention = [names.get(id(layer), "") for layer in attention_layers(model)]
    decoder = os.path.commonprefix(attention).rpartition(".layers.")[0]
    kinds = ("attention", "dense", "experts", "head", "embedding", "encoders")
    counts = dict.fromkeys(kinds, 0)
    seen: set[int] = set()
    experts = {name for name, module in model.named_modules() if _is_experts(module)}
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            kind = "head"
        elif name.endswith("embed_tokens_per_layer"):  # Gemma 3n: a step reads a few rows of it
            kind = "encoders"
        elif isinstance(module, VocabParallelEmbedding) or name.endswith("embed_tokens"):
            kind = "embedding"
        elif any(name == each or name.startswith(each + ".") for each in experts):
            kind = "experts"
        else:
            kind = "dense" if name.startswith(decoder) else "encoders"
            if kind == "dense" and _ATTENTION.search(name) and not _MLP.search(name):
                kind = "attention"
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                counts[kind] += parameter.numel()
    return counts


def _is_experts(module: torch.nn.Module) -> bool:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return isinstance(module, FusedMoE)


def _experts(model: torch.nn.Module) -> list[int]:
    """Return the most experts that a layer has, and how many of them a token uses."""
    modules: list[Any] = [module for module in model.modules() if _is_experts(module)]
    found = [(int(module.num_experts), int(module.top_k or 1)) for module in modules]
    return list(max(found, default=(1, 1)))


def main() -> None:
    """Answer each line of the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints to stdout goes to stderr
    enable_cpu_engine()
    logging.disable(logging.WARNING)
    from sglang_pat.offline.model_support import without_gpu

    with without_gpu():
        import sglang.srt.models.registry
        import sglang.srt.server_args  # noqa: F401  # slow, so imported before the forks

    for line in sys.stdin:
        asked = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer = describe_model(asked["path"], asked.get("flags", ()))
            except BaseException as error:  # SGLang may raise anything
                text = " ".join(f"{type(error).__name__}: {error}".split())
                answer = {"error": text}
            with os.fdopen(write, "w") as file:
                json.dump(answer, file)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        _, status = os.waitpid(child, 0)
        text = text or json.dumps({"error": f"SGLang's process ended with status {status}"})
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
