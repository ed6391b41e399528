"""Reads a model's layers and weights: by SGLang's class if SGLang is installed, else by rules.

`advise` uses this module. `doctor --model` also asks SGLang's class. The rules (`model_layers.py`,
`weights.py`) are for machines without SGLang, for the models in `NAMED_CONFIGS`, and for models
that SGLang cannot build on this machine; in the last case, `Model.note` says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.model_classes import KNOWN, class_name
from sglang_pat.model_config import check_counts, check_served, decoder_config
from sglang_pat.model_layers import CHUNK, FULL, LATENT, STATE, WINDOW, Layer, read_layers
from sglang_pat.offline.model_modules import VARIABLE, check_known, modules_without
from sglang_pat.support import Unsupported
from sglang_pat.workload.models import (
    NAMED_CONFIGS,
    naming,
    quantised_config,
    read_whole_config,
    served_dtype,
)
from sglang_pat.workload.weights import Weights, read_weights

_ASKED = "where SGLang is installed, sglang-pat asks SGLang's own class"
_SECONDS = 300  # SGLang's import may take minutes on a busy machine
# Matches errors of SGLang that a missing model module may have caused, and the names of SGLang's
# classes that run a model of transformers.
_NEEDS_MORE = re.compile("not supported for now|not a registered model|^Transformers|^KeyError")


class Model(NamedTuple):
    """A model that a server could serve.

    Attributes
    ----------
    label
        The name to show.
    config
        The decoder's part of the model's configuration.
    layers
        All layers of the decoder. Each one says whether pat accelerates its part on one GPU.
    weights
        The model's parameters.
    note
        A remark for the user on how this description was made, usually empty.
    """

    label: str
    config: Mapping[str, Any]
    layers: Sequence[Layer]
    weights: Weights
    note: str = ""


def check_model(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return a model's label and its decoder's configuration, without importing SGLang.

    ValueError for a model that `read_model` would refuse after a slow import of SGLang.
    """
    label, whole = read_whole_config(name)
    with naming(label):
        check_served(whole)
        config = decoder_config(quantised_config(label, whole))
        served_dtype(config)
        check_counts(config)
        if class_name(whole) not in KNOWN:
            check_known(class_name(whole), whole)
    return label, config


def read_model(name: str, tp: int = 1, kv_cache_dtype: str = "auto") -> Model:
    """Read a model that runs on `tp` GPUs. kv_cache_dtype: SGLang's option.

    Raises
    ------
    ValueError
        There is no such model, it does not generate tokens, or neither SGLang nor the rules know
        its class.
    """
    label, config = check_model(name)
    _, whole = read_whole_config(name)
    with naming(label):
        found = None if label in NAMED_CONFIGS else _of_sglang(whole, config, tp, kv_cache_dtype)
        if isinstance(found, tuple):
            return Model(label, config, *found)
        layers = _by_rules(config, tp, found)
        return Model(label, config, layers, read_weights(config, layers), found or "")


def _by_rules(config: Mapping[str, Any], tp: int, why: str | None) -> Sequence[Layer]:
    try:
        return read_layers(config, tp)
    except ValueError as error:
        more = why or ("" if class_name(config) in KNOWN else _ASKED)
        raise ValueError(f"{error}; {more}" if more else str(error)) from None


def _of_sglang(
    whole: Mapping[str, Any], config: Mapping[str, Any], tp: int, kv_cache_dtype: str
) -> tuple[list[Layer], Weights] | str | None:
    """Read a model by SGLang's class. Return None without SGLang, or the reason if SGLang fails."""
    try:
        installed = f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        return None
    with tempfile.TemporaryDirectory(prefix="sglang-pat-model-") as folder:
        Path(folder, "config.json").write_text(json.dumps(whole))
        asked: list[dict[str, Any]] = [{"path": folder}]
        flags = ["--tp", str(tp)] * (tp > 1)
        flags += ["--kv-cache-dtype", kv_cache_dtype] * (kv_cache_dtype != "auto")
        if flags:
            asked.append({"path": folder, "flags": flags})
        # First let SGLang import only the module of the model's class, which takes a fraction of
        # the time. If that class needs other modules, let SGLang import all.
        answers = _ask(asked, modules_without(_classes(whole)))
        if any(_NEEDS_MORE.search(each.get("error", each.get("class", ""))) for each in answers):
            answers = _ask(asked)
    errors = [answer["error"] for answer in answers if "error" in answer]
    if errors:
        error = errors[0].replace(folder, "it")
        return f"{installed} cannot build {class_name(whole)} here ({error[:200]})"
    alone, shared = answers[0], answers[-1]
    layers = _layers(alone, shared, config)
    return layers, _weights(alone, config, layers)


def _classes(config: Mapping[str, Any]) -> set[str]:
    """Return the classes that a configuration names, including those of its parts."""
    inner = (_classes(each) for each in config.values() if isinstance(each, Mapping))
    return {name for name in config.get("architectures") or () if isinstance(name, str)}.union(
        *inner
    )


def _ask(asked: Sequence[Mapping[str, Any]], without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Let a new process describe models. SGLang does not import the modules in `without` there."""
    left_out = {VARIABLE: ",".join(without)} if without else {}
    command = [sys.executable, "-m", "sglang_pat.offline.model_descriptions"]
    lines = "".join(json.dumps(each) + "\n" for each in asked)
    try:
        done = subprocess.run(
            command,
            input=lines,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **left_out},
        )
    except subprocess.TimeoutExpired:
        return [{"error": f"no answer in {_SECONDS} s"}]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if len(answers) < len(asked):
        *_, last = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        answers.append({"error": last})
    return answers


def _layers(
    alone: Mapping[str, Any], shared: Mapping[str, Any], config: Mapping[str, Any]
) -> list[Layer]:
    """Return a model's layers, from SGLang's descriptions of the model on one GPU and on several.

    alone: the model on one GPU, which gives the shapes of whole layers. shared: the model on all
    GPUs, with the flags of the server, which gives the reasons why pat refuses layers.
    """
    reasons = [each[6] or shared["reason"] for each in shared["layers"]]
    found = [
        _layer(entry, reason and Unsupported(*reason), config)
        for entry, reason in zip(alone["layers"], reasons, strict=True)
    ]
    others = max(0, int(config.get("num_hidden_layers") or 0) - len({each.index for each in found}))
    refusal = Unsupported("attention", STATE)
    return found + [Layer(len(found) + i, STATE, refusal=refusal) for i in range(others)]


def _layer(entry: Sequence[Any], refusal: Unsupported | None, config: Mapping[str, Any]) -> Layer:
    index, heads, kv_heads, head_dim, v_head_dim, window = entry[:6]
    is_latent = bool(config.get("kv_lora_rank")) and kv_heads == 1 and v_head_dim < head_dim
    kind = LATENT if is_latent else FULL if window is None else WINDOW
    if entry[7]:
        kind, window = CHUNK, config.get("attention_chunk_size")
    return Layer(
        index, kind, heads, kv_heads, head_dim, v_head_dim, window,
        kv_elements=head_dim if is_latent else kv_heads * (head_dim + v_head_dim),
        refusal=refusal,
    )  # fmt: skip


def _weights(
    alone: Mapping[str, Any], config: Mapping[str, Any], layers: Sequence[Layer]
) -> Weights:
    found = alone["parameters"]
    if not found["experts"]:  # none, or of a kind that SGLang's description misses
        with contextlib.suppress(ValueError):
            weights = read_weights(config, layers)
            if weights.experts:
                return weights
    head = found["head"] or found["embedding"]
    num_experts, per_token = alone["experts"]
    return Weights(
        dense=found["dense"] + found["attention"] + head,
        experts=found["experts"],
        num_experts=num_experts,
        experts_per_token=per_token,
        vocabulary=head,
        embedding=(found["embedding"] if found["head"] else 0) + found["encoders"],
        attention=found["attention"],
    )
