"""`sglang-pat build`: compile the CUDA kernels before their first use, e.g. for an image."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_pat import support
from sglang_pat.cli.arguments import bounded, folder_path
from sglang_pat.cli.gpus import find_gpus
from sglang_pat.cli.progress import sign_of_life
from sglang_pat.cli.served_model import add_model_options, loadable, server_words
from sglang_pat.messages import quoted

if TYPE_CHECKING:
    from sglang_pat.offline.model_support import KernelNeeds

DESCRIPTION = "compile the CUDA kernels now instead of on first use"

DEFAULT_DTYPE = "bfloat16"
DEFAULT_HEAD_DIM = "128"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and register `run` as the function to call."""
    add_model_options(
        parser,
        "compile what a server of this model needs, by its config.json and in place of --dtype, "
        "--kv-dtype and --head-dim",
    )
    parser.add_argument(
        "--arch",
        action="append",
        type=_arch,
        metavar="X.Y",
        help="compute capability, e.g. 9.0; may be repeated (default: that of the GPUs here)",
    )
    parser.add_argument(
        "--dtype",
        action="append",
        choices=support.KERNEL_DTYPES,
        help=f"dtype of the queries; may be repeated (default: {DEFAULT_DTYPE})",
    )
    parser.add_argument(
        "--kv-dtype",
        action="append",
        choices=support.CONVERTED_KV_DTYPES,
        help="dtype of the KV cache; may be repeated (default: that of the queries)",
    )
    parser.add_argument(
        "--head-dim",
        action="append",
        type=_head_dim,
        metavar="D",
        help="head_dim of keys and values, or K/V where they differ, e.g. 192/128; may be repeated "
        f"(default: {DEFAULT_HEAD_DIM})",
    )
    parser.add_argument(
        "--cache",
        type=folder_path,
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
    """Compile all requested kernel variants, and print the path of each compiled image.

    Returns the exit status: 0, 1 if the kernels cannot be compiled here, 2 for wrong input.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-pat-build-") as folder:
        source = ""
        try:
            words = server_words(arguments)
            if arguments.model is not None:
                _check_alone(arguments)
                source = loadable(arguments, Path(folder))
        except (ValueError, OSError) as error:
            return _fail(2, bounded(error))
        return _build(arguments, source, words)


def _build(arguments: argparse.Namespace, source: str, words: list[str]) -> int:
    """Do the work of `run`, and return its exit status.

    source: the folder or the name on the hub from which SGLang loads the model; "" without --model.
    words: the server's arguments.
    """
    archs = arguments.arch or _archs_here()
    if not archs:
        oldest = _name(support.OLDEST_CAPABILITY)
        return _fail(2, f"no GPU with compute capability {oldest} or newer here: use --arch X.Y")
    from sglang_pat.executors import kernel_cache

    try:
        cache = arguments.cache or kernel_cache.default_cache()
        if not os.path.exists(cache):  # an existing cache may be complete and read-only
            kernel_cache.make_folder(cache)
    except (ValueError, kernel_cache.KernelCacheError) as error:
        return _fail(2, _advised(error, arguments))
    try:
        import torch

        from sglang_pat.executors import jit
    except Exception as error:  # a broken installation may raise anything
        return _fail(1, f"torch cannot be imported ({error}): install it: pip install torch")
    dtypes, kv_dtypes = arguments.dtype or [DEFAULT_DTYPE], arguments.kv_dtype or [None]
    head_dims = arguments.head_dim or [_head_dim(DEFAULT_HEAD_DIM)]
    if arguments.model is not None:
        needs = _needs_of(arguments.model, source, words)
        if isinstance(needs, int):
            return needs
        dtypes, kv_dtypes, head_dims = [needs.dtype], needs.kv_dtypes, needs.head_dims
    variants = list(product(archs, dtypes, kv_dtypes, head_dims))
    if arguments.model is not None:
        # Layers without kernels run on SGLang's default backend, so their variants are not built.
        # If no variant has kernels, all are kept, and KernelConfig raises a ValueError below.
        variants = [each for each in variants if _has_kernels(*each)] or variants
    try:
        configs = [
            jit.KernelConfig(
                getattr(torch, dtype),
                head_dim,
                arch,
                v_head_dim,
                None if kv_dtype is None else getattr(torch, kv_dtype),
            )
            for arch, dtype, kv_dtype, (head_dim, v_head_dim) in variants
        ]
    except ValueError as error:  # e.g. there are no kernels for latent attention on this GPU
        return _fail(2, str(error))
    try:
        for image in jit.build_all(configs, cache=cache, force=arguments.force):
            if arguments.verbose:
                print(jit.report_of(image))
            print(image)
    except (jit.KernelBuildError, kernel_cache.KernelCacheError, OSError) as error:
        return _fail(1, _advised(error, arguments))
    return 0


def _has_kernels(
    arch: tuple[int, int], _: str, kv_dtype: str | None, head_dims: tuple[int, int]
) -> bool:
    return support.has_kernels(*head_dims, arch, one_byte=kv_dtype is not None)


def _check_alone(arguments: argparse.Namespace) -> None:
    """Raise ValueError if --dtype, --kv-dtype or --head-dim is given together with --model."""
    for name in ("dtype", "kv_dtype", "head_dim"):
        if getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')}: allowed: without --model, which says it")


def _needs_of(model: str, source: str, words: list[str]) -> KernelNeeds | int:
    """Return which kernels a server of `model` needs or, after an error, the exit status.

    source: as in `_build`. words: the server's arguments.
    """
    try:
        with sign_of_life("building the model without weights"):
            from sglang_pat.sglang.cpu import enable_cpu_engine

            enable_cpu_engine()  # before SGLang is imported
            logging.disable(logging.WARNING)
            from sglang_pat.offline.model_support import kernels_of_model

            needs, routes = kernels_of_model(source, words)
    except Exception as error:  # SGLang may raise anything
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(1, f"SGLang cannot build {quoted(model)} in this process: {said[:300]}")
    finally:
        logging.disable(logging.NOTSET)
    if not needs.head_dims:
        return _fail(1, f"{quoted(model)} needs no kernels: {routes}")
    if needs.dtype not in support.KERNEL_DTYPES:
        return _fail(
            1, f"no kernels for {needs.dtype}; supported: {', '.join(support.KERNEL_DTYPES)}"
        )
    if any(word.startswith("--speculative-draft-model") for word in words):
        print("a draft model may need others: sglang-pat build --model DRAFT", file=sys.stderr)
    return needs


def _advised(error: Exception, arguments: argparse.Namespace) -> str:
    """Return the message of `error`. With `--cache`, the message advises to change that option."""
    from sglang_pat.executors.kernel_cache import ANOTHER_FOLDER

    if arguments.cache is None:
        return str(error)
    return str(error).replace(ANOTHER_FOLDER, "name another folder by --cache")


def _arch(text: str) -> tuple[int, int]:
    """`9.0` -> (9, 0)."""
    archs = {_name(arch): arch for arch in support.CAPABILITIES}
    if text not in archs:
        raise argparse.ArgumentTypeError(f"{quoted(text)}; allowed: {', '.join(archs)}")
    return archs[text]


def _head_dim(text: str) -> tuple[int, int]:
    """`128` -> (128, 128), `192/128` -> (192, 128)."""
    pairs = {support.head_dim_name(*pair): pair for pair in support.HEAD_DIMS}
    if text not in pairs:
        raise argparse.ArgumentTypeError(f"{quoted(text)}; allowed: {', '.join(pairs)}")
    return pairs[text]


def _name(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"


def _archs_here() -> list[tuple[int, int]]:
    found = {gpu.capability for gpu in find_gpus()}
    return sorted(arch for arch in found if arch >= support.OLDEST_CAPABILITY)


def _fail(status: int, message: str) -> int:
    print(f"sglang-pat build: error: {bounded(message)}", file=sys.stderr)
    return status
