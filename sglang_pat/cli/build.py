"""`sglang-pat build`: compile the CUDA kernels ahead of their first use, e.g. into an image."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

from sglang_pat import support
from sglang_pat.cli.gpus import find_gpus

DESCRIPTION = "compile the CUDA kernels now instead of on first use"

DEFAULT_DTYPE = "bfloat16"
DEFAULT_HEAD_DIM = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    parser.add_argument(
        "--arch",
        action="append",
        metavar="X.Y",
        help="compute capability, e.g. 9.0; may be repeated (default: that of the GPUs here)",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=support.KERNEL_DTYPES,
        help=f"of queries and KV cache; may be repeated (default: {DEFAULT_DTYPE})",
    )
    parser.add_argument(
        "--head-dim",
        action="append",
        type=int,
        choices=support.HEAD_DIMS,
        help=f"may be repeated (default: {DEFAULT_HEAD_DIM})",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="where kernels are kept (default: $SGLANG_PAT_KERNEL_CACHE, else sglang-pat in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--force", action="store_true", help="compile even what the cache holds already"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print registers and spills of every kernel"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile every combination asked for, and print the path of each library.

    Returns the exit status: 0, 1 if the kernels cannot be compiled here, 2 for wrong input.
    """
    try:
        import torch

        from sglang_pat.executors import jit, kernel_cache
    except Exception as error:  # a broken installation may raise anything
        return _fail(1, f"torch cannot be imported ({error}): install it: pip install torch")

    try:
        cache = arguments.cache or kernel_cache.default_cache()
        if cache.exists() and not cache.is_dir():
            raise ValueError(f"--cache {cache} is a file; name a folder")
        configs = [
            jit.KernelConfig(getattr(torch, dtype), head_dim, arch)
            for arch, dtype, head_dim in product(
                [jit.parse_arch(text) for text in arguments.arch or _archs_here()],
                arguments.dtype or [DEFAULT_DTYPE],
                arguments.head_dim or [DEFAULT_HEAD_DIM],
            )
        ]
    except ValueError as error:
        return _fail(2, str(error))
    try:
        for config in configs:
            print(jit.build(config, cache=cache, verbose=arguments.verbose, force=arguments.force))
    except (jit.KernelBuildError, kernel_cache.KernelCacheError, OSError) as error:
        return _fail(1, str(error))
    return 0


def _archs_here() -> list[str]:
    archs = sorted({gpu.arch for gpu in find_gpus() if gpu.capability >= support.OLDEST_CAPABILITY})
    if not archs:
        raise ValueError(
            "no GPU with compute capability 8.0 or newer found here: name one to compile for, "
            "e.g. --arch 9.0"
        )
    return archs


def _fail(status: int, message: str) -> int:
    print(f"sglang-pat build: error: {message}", file=sys.stderr)
    return status
