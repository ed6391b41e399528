"""`sglang-pat tiny-model`: a model to try a server with, written without a download."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from sglang_pat.cli.arguments import folder_path

DESCRIPTION = "write a tiny trained model with its tokenizer, to try a server with"

TRAINED = Path(__file__).parent / "trained"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's argument to `parser`, and the command itself as the default `run`."""
    parser.add_argument(
        "folder", type=folder_path, metavar="FOLDER", help="a new or an empty folder"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the model. Returns the exit status: 0, or 2 if it cannot be written."""
    folder: Path = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            return _fail(f"{str(folder)!r} is not empty; allowed: a new or an empty folder")
        for file in TRAINED.iterdir():
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        return _fail(f"{str(folder)!r}: {error.strerror}")
    model = shlex.quote(str(folder))
    print(f"{folder} has a tiny Llama, which continues docstrings of Python. To serve it:")
    print(f"python -m sglang_pat.sglang.cpu --model-path {model} --attention-backend pat")
    return 0


def _fail(message: str) -> int:
    print(f"sglang-pat tiny-model: error: {message}", file=sys.stderr)
    return 2
