"""The demo: SGLang serves the same workload twice, with pat and with its own backend.

The demo is the shortest way to see pat work: a real engine with its scheduler and radix tree serves
the tiny trained model that `--write-model` writes. Every token is compared, and some answers are
shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from sglang_pat.cli.arguments import fail, folder_path, whole_number
from sglang_pat.cli.demo.session import run_in_session
from sglang_pat.cli.tiny_model import write_model
from sglang_pat.output_file import output_file

DESCRIPTION = "serve a live workload through pat and through SGLang's own backend, and compare"
MIN_REQUESTS = 48
MAX_REQUESTS = 10_000  # this many requests arrive within nine minutes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`, and register `run` as the function to call."""
    parser.add_argument(
        "--requests",
        type=whole_number(MIN_REQUESTS, MAX_REQUESTS),
        default=64,
        metavar="N",
        help=f"requests to send, {MIN_REQUESTS} to {MAX_REQUESTS:,} (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the result as JSON"
    )
    parser.add_argument(
        "--write-model",
        type=folder_path,
        metavar="DIR",
        help="instead, write the demo's model with its tokenizer into a new or an empty folder, to "
        "try a server with",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve, compare, report.

    Returns the exit status: 0 if every token is equal, 1 if one is not, 2 if a package is missing
    or is a stand-in, or if an environment variable has a wrong value.
    """
    if arguments.write_model is not None:
        return write_model(arguments.write_model)
    missing = [name for name in ("sglang", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        return fail("demo", f"{needed} missing: pip install '.[sglang]' in a clone")
    from sglang_pat.bench.stand_ins import refuse_stand_ins
    from sglang_pat.sglang.start.environment import Environment

    try:
        Environment.read()
        refuse_stand_ins()
    except ValueError as error:
        return fail("demo", error)
    _quieten()
    command = [sys.executable, "-m", "sglang_pat.cli.demo.comparison", str(arguments.requests)]
    return run_in_session(command if arguments.json is None else [*command, str(arguments.json)])


def _quieten() -> None:
    """Hide what SGLang and its libraries print at every start. Errors are still shown."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    # SGLang's weight loader ignores TQDM_DISABLE, so its progress bars are delayed by an hour.
    os.environ.setdefault("TQDM_DELAY", "3600")
