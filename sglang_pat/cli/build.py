"""`sglang-pat build`: compile the CUDA kernels ahead of their first use, e.g. into an image.

Beside the pipeline: the arguments, and a loop over `executors/jit.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_pat import support

DESCRIPTION = "compile the CUDA kernels now instead of on first use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    parser.add_argument(
        "--arch",
        action="append",
        required=True,
        help="compute capability, e.g. 9.0; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=support.KERNEL_DTYPES,
        help="of queries and KV cache; default bfloat16; may be repeated",
    )
    parser.add_argument(
        "--head-dim",
        action="append",
        type=int,
        choices=support.HEAD_DIMS,
        help="default 128; may be repeated",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=None,
        help="default sglang-pat in $XDG_CACHE_HOME or in ~/.cache",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print registers and spills of every kernel"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile every combination asked for and print the libraries' paths. 1 if one fails."""
    import torch

    from sglang_pat.executors.jit import KernelBuildError, KernelConfig, build, parse_arch

    try:
        for arch in arguments.arch:
            for dtype in arguments.dtype or ["bfloat16"]:
                for head_dim in arguments.head_dim or [128]:
                    config = KernelConfig(getattr(torch, dtype), head_dim, parse_arch(arch))
                    print(build(config, cache=arguments.cache, verbose=arguments.verbose))
    except (KernelBuildError, ValueError) as error:
        print(f"sglang-pat build: {error}", file=sys.stderr)
        return 1
    return 0
