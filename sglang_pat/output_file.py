"""Paths of files to be written, from options (`output_file`) and from the environment.

Beside the pipeline. A wrong path is refused before the work, not when its result is to be kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """The type of every option of `sglang-pat` that names a file to be written: the path; or
    argparse's error, naming it and what is wrong with it."""
    path = Path(text)
    problem = problem_with(path)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text}: {problem}")
    return path


def problem_with(path: Path) -> str | None:
    """Why no file can be written there; None if one may."""
    if not path.absolute().parent.is_dir():
        return "its folder does not exist"
    if path.is_dir():
        return "it is a folder"
    return None
