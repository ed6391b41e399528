"""The model and options of a server that does not run yet, for `doctor` and `build`.

Both commands build the model without weights, by the class that SGLang has for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_pat.cli.arguments import FLAGS
from sglang_pat.cli.server_options import add_tp, check_flags, server_flags
from sglang_pat.messages import quoted
from sglang_pat.model_classes import class_name
from sglang_pat.model_config import check_architectures, check_counts, decoder_config
from sglang_pat.model_layers import check_ranks, read_layers
from sglang_pat.offline.model_modules import check_known
from sglang_pat.support import BACKEND
from sglang_pat.workload.models import MODEL_NAMES, MODELS, ask_hub, naming, read_whole_config

_FLAG = "--attention-backend"


def add_model_options(parser: argparse.ArgumentParser, does: str) -> None:
    """Add --model, --tp and --server-args to `parser`. does: what the command does with a model."""
    parser.add_argument("--model", metavar="MODEL", help=f"{does}: {MODELS}")
    add_tp(parser, "with --model: GPUs that share it (default: 1)")
    parser.add_argument(
        FLAGS,
        metavar="ARGS",
        help="with --model: more arguments of the server, as one text: '--kv-cache-dtype fp8_e4m3'",
    )


def server_words(arguments: argparse.Namespace) -> list[str]:
    """Return the server's arguments, as words.

    Raises ValueError if --tp or --server-args is given without --model, if `check_flags` refuses a
    flag, or if --server-args repeats --tp.
    """
    if arguments.model is None:
        for option, value in (("--tp", arguments.tp), (FLAGS, arguments.server_args)):
            if value is not None:
                raise ValueError(f"{option} {quoted(str(value))}: allowed: with --model")
        return []
    words = _without_pat(server_flags(arguments))
    check_flags(words, f"the command is about {BACKEND}")
    return words


def _without_pat(words: list[str]) -> list[str]:
    """Remove `--attention-backend pat`, which users may have copied from their launch command."""
    kept: list[str] = []
    for word in words:
        if word == BACKEND and kept[-1:] == [_FLAG]:
            kept.pop()
        elif word != f"{_FLAG}={BACKEND}":
            kept.append(word)
    return kept


def check_config(whole: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Raise ValueError if SGLang cannot build the model on as many GPUs as --tp says."""
    tp = 1 if arguments.server_args else arguments.tp or 1  # --server-args may set another tp
    check_architectures(whole)
    config = decoder_config(whole)
    check_counts(config)
    check_known(class_name(whole), whole)
    try:
        layers = read_layers(config, tp)
    except ValueError:  # the rules of `model_layers.py` do not know the model's class
        return
    check_ranks(layers, tp)


def loadable(arguments: argparse.Namespace, folder: Path) -> str:
    """Return a folder or a name on the hub from which SGLang can load --model's configuration.

    If --model is a file or one of MODEL_NAMES, writes its configuration into `folder`. Raises
    ValueError or OSError if --model is neither a configuration nor on the hub. Also raises
    ValueError for a configuration that SGLang itself would take half a minute to refuse.
    """
    model: str = arguments.model
    if os.path.exists(model) or model in MODEL_NAMES:
        label, config = read_whole_config(model)
        with naming(label):
            check_config(config, arguments)
        if os.path.isdir(model):
            return model
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model) is None:
        raise ValueError(f"--model {quoted(model)}: no file; allowed: {MODELS}")
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() not in ("1", "true"):
        ask_hub(model)
    return model
