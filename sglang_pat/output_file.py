"""output_file: the type of every option of `sglang-pat` that names a file to be written.

Beside the pipeline. A wrong path is refused before the work, not when its result is to be kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """The path. argparse's error, naming it, if its folder does not exist or it is a folder."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: its folder does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    return path
