"""Writes a model, and a smaller one that drafts for it: the model's embedding and first layers.

Most tokens follow from the previous token, by a permutation of the vocabulary. About one in thirty
depends on tokens far away, by sharp attention. Few of these are near ties, so rounding seldom
changes an answer. The layers that the smaller model lacks change little. So drafts are accepted as
often as those of a trained draft model, and n-grams repeat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.models import write_tokenizer

# Weight of the layers that the draft model lacks.
_LATER = 0.01
# Weight of a token's predecessor's embedding in the head. Times 0.62, an embedding's fraction of
# the last layer's output, it competes with the largest random logit, 4.5.
_ORDER = 10.0
BLOCK_LAYERS = 5  # layers of a model that drafts blocks


def write_nested(
    folder: Path, config: Mapping[str, Any], counts: Sequence[int], draft_layers: int
) -> dict[int, Path]:
    """Write models with several numbers of layers. The smallest drafts for the others.

    Parameters
    ----------
    folder : Path
        A folder that exists.
    config : mapping
        Configuration of a Llama.
    counts : sequence of int
        Numbers of layers of the models.
    draft_layers : int
        Layers of the draft model.

    Returns
    -------
    dict
        Number of layers -> folder.
    """
    weights = folder / "weights"
    weights.mkdir()
    for name, tensors in _parts(config, max(counts), draft_layers):
        save_file(tensors, weights / f"{name}.safetensors", metadata={"format": "pt"})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # frees it for servers
    paths = {}
    for count in sorted({*counts, draft_layers}):
        path = paths[count] = folder / f"layers-{count}"
        path.mkdir()
        text = json.dumps({**config, "num_hidden_layers": count}, indent=2) + "\n"
        (path / "config.json").write_text(text)
        write_tokenizer(path, config["vocab_size"], config["eos_token_id"])
        for name in ("ends", *map(str, range(count))):
            (path / f"{name}.safetensors").symlink_to(weights / f"{name}.safetensors")
    return paths


def write_head(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write an EAGLE head for the models that write_nested() wrote into `folder`.

    Its only layer is the models' first layer. It ignores the model's hidden states and uses only
    the token's embedding, so it drafts like that layer alone. Nearly all of its drafts are accepted
    if draft_layers was 1.

    Parameters
    ----------
    folder : Path
    config : mapping
        Configuration of a Llama.

    Returns
    -------
    Path
        The head's folder.
    """
    path = _write_config(folder, "LlamaForCausalLMEagle", config)
    # EAGLE's layer does not begin with a norm, but embeddings have the length of normed ones.
    weights = {
        name.removeprefix("model."): weight
        for name, weight in load_file(folder / "weights" / "0.safetensors").items()
        if not name.endswith("input_layernorm.weight")
    }
    hidden, dtype = config["hidden_size"], getattr(torch, config["torch_dtype"])
    weights["fc.weight"] = torch.eye(hidden, 2 * hidden, dtype=dtype)
    weights["fc.bias"] = torch.zeros(hidden, dtype=dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_eagle3_head(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write an EAGLE3 head for the models that write_nested() wrote into `folder`.

    Attention keeps its strongest key, that of the token itself, and copies a part of the token's
    embedding, from which the models' head takes the next token. `fc` drops the models' hidden
    states. In later steps the layer's input is the copy of the token before. The values subtract
    it, because the layer adds it.

    Parameters
    ----------
    folder : Path
    config : mapping
        Configuration of a Llama.

    Returns
    -------
    Path
        The head's folder.
    """
    path = _write_config(folder, "LlamaForCausalLMEagle3", {**config, "draft_vocab_size": None})
    hidden, inner, width = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    q_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    directions = torch.linalg.qr(
        torch.randn(hidden, kv_heads * width, generator=torch.Generator().manual_seed(3))
    )[0].T
    nothing = torch.zeros_like(directions)
    keys = torch.cat([2 * directions, nothing], dim=1)
    by_head = keys.view(kv_heads, width, -1).repeat_interleave(q_heads // kv_heads, dim=0)
    # Of the query heads that read a KV head, the first one writes.
    output = torch.zeros(hidden, kv_heads, q_heads // kv_heads, width)
    output[:, :, 0] = directions.T.view(hidden, kv_heads, width)
    # The norm makes the copy longer, because it has a part of the embedding's directions.
    longer = math.sqrt(hidden / (kv_heads * width))
    layer = {
        "self_attn.q_proj": by_head.flatten(0, 1),
        "self_attn.k_proj": keys,
        "self_attn.v_proj": torch.cat([directions, -directions / longer], dim=1),
        "self_attn.o_proj": output.flatten(1),
        "mlp.gate_proj": torch.zeros(inner, hidden),
        "mlp.up_proj": torch.zeros(inner, hidden),
        "mlp.down_proj": torch.zeros(hidden, inner),
        **{
            name: torch.ones(hidden)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    weights = {f"midlayer.{name}.weight": weight for name, weight in layer.items()}
    weights |= {"fc.weight": torch.zeros(hidden, 3 * hidden), "norm.weight": torch.ones(hidden)}
    dtype = getattr(torch, config["torch_dtype"])
    save_file(
        {name: weight.to(dtype).contiguous() for name, weight in weights.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    return path


def write_blocks(
    folder: Path, config: Mapping[str, Any], layers: int, tokens: int, algorithm: str
) -> Path:
    """Write the configuration of a DFLASH or DSPARK model, which drafts blocks for another model.

    Its weights will be SGLang's random ones (`speculative_draft_load_format=dummy`).

    Parameters
    ----------
    folder : Path
    config : mapping
        Configuration of a Llama.
    layers : int
        Layers of the model for which it drafts.
    tokens : int
        Tokens to verify per request and step.
    algorithm : str
        DFLASH or DSPARK.

    Returns
    -------
    Path
        The folder of the configuration.
    """
    path = folder / f"{algorithm}-{layers}"
    path.mkdir(exist_ok=True)
    is_dspark = algorithm == "DSPARK"
    blocks = {
        **config,
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "num_hidden_layers": BLOCK_LAYERS,
        # DSPARK does not count the token before its block.
        "block_size": tokens - 1 if is_dspark else tokens,
        "num_target_layers": layers,
        "dflash_config": {"mask_token_id": config["vocab_size"] - 1},
    }
    if is_dspark:
        blocks |= {"markov_rank": 256, "markov_head_type": "vanilla"}
    (path / "config.json").write_text(json.dumps(blocks, indent=2) + "\n")
    return path


def _write_config(folder: Path, architecture: str, config: Mapping[str, Any]) -> Path:
    """Write the configuration and tokenizer of a head with one layer, and return their folder."""
    path = folder / architecture
    path.mkdir()
    head = {**config, "architectures": [architecture], "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(head, indent=2) + "\n")
    write_tokenizer(path, config["vocab_size"], config["eos_token_id"])
    return path


def _parts(
    config: Mapping[str, Any], layers: int, draft_layers: int
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the weights of embedding and head, then of each layer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)
    dtype = getattr(torch, config["torch_dtype"])

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=dtype, device=device)
        return weight.normal_(std=gain / math.sqrt(columns), generator=generator).cpu()

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    ones = torch.ones(hidden, dtype=dtype)
    q_size, kv_size = (
        config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value")
    )
    vocab_size = config["vocab_size"]
    embeddings = normal(vocab_size, hidden, math.sqrt(hidden))
    before = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(2))
    head = normal(vocab_size, hidden)
    head += embeddings[before] * (_ORDER / hidden)
    yield (
        "ends",
        {
            "model.embed_tokens.weight": embeddings,
            "model.norm.weight": ones,
            "lm_head.weight": head,
        },
    )
    for layer in range(layers):
        prefix, gain = f"model.layers.{layer}", 1.0 if layer < draft_layers else _LATER
        yield (
            str(layer),
            {
                f"{prefix}.input_layernorm.weight": ones.clone(),
                f"{prefix}.post_attention_layernorm.weight": ones.clone(),
                # With gain 2 for queries and keys, a far away token can decide the next one.
                f"{prefix}.self_attn.q_proj.weight": normal(q_size, hidden, 2.0),
                f"{prefix}.self_attn.k_proj.weight": normal(kv_size, hidden, 2.0),
                f"{prefix}.self_attn.v_proj.weight": normal(kv_size, hidden, 2.0),
                f"{prefix}.self_attn.o_proj.weight": normal(hidden, q_size, gain),
                f"{prefix}.mlp.gate_proj.weight": normal(inner, hidden),
                f"{prefix}.mlp.up_proj.weight": normal(inner, hidden),
                f"{prefix}.mlp.down_proj.weight": normal(hidden, inner, gain),
            },
        )
