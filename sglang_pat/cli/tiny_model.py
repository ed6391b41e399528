"""`sglang-pat tiny-model`: a model to try a server with, written in seconds without a download."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

DESCRIPTION = "write a tiny model with a tokenizer and random weights, to try a server with"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's argument to `parser`, and the command itself as the default `run`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the model. Returns the exit status: 0, or 2 if it cannot be written."""
    folder: Path = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return _fail(f"{str(folder)!r} is not empty; allowed: a new or an empty folder")
        from sglang_pat.cli.demo.tiny_model import TinyModel

        TinyModel().write(folder)
    except ImportError as error:
        return _fail(f"{error.name} missing: pip install '.[sglang]' in a clone")
    except OSError as error:
        return _fail(f"{str(folder)!r}: {error.strerror}")
    model = shlex.quote(str(folder))
    print(f"{folder} has a tiny Llama with random weights. To serve it:")
    print(f"python -m sglang_pat.sglang.cpu --model-path {model} --attention-backend pat")
    return 0


def _fail(message: str) -> int:
    print(f"sglang-pat tiny-model: error: {message}", file=sys.stderr)
    return 2
