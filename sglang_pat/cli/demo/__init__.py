"""The demo: one live workload through SGLang twice, decoded by pat and by SGLang's own backend.

Beside the pipeline, and the shortest way to see all of it at work: a real engine, its scheduler
and its radix tree, on a small model that is written on the spot. Every token is compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from sglang_pat.cli.demo.workload import make_requests
from sglang_pat.output_file import output_file

DESCRIPTION = "serve a live workload through pat and through SGLang's own backend, and compare"
MIN_REQUESTS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`, and the demo itself as the default `run`."""
    parser.add_argument(
        "--requests",
        type=_request_count,
        default=64,
        metavar="N",
        help=f"how many requests to send, at least {MIN_REQUESTS} (default: %(default)s)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the result as JSON"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve, compare, report. Returns the exit status: 0 only if no token is another."""
    missing = [name for name in ("sglang", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        print(f"the demo needs {needed}: pip install '.[sglang]' in a clone", file=sys.stderr)
        return 2
    _quieten()

    # Only now: rich may be missing, and the engine must be enabled before SGLang is imported.
    from sglang_pat.cli.demo.engine import Machine, serve
    from sglang_pat.cli.demo.report import Report, console
    from sglang_pat.cli.demo.tiny_model import TinyModel
    from sglang_pat.sglang.cpu import enable_cpu_engine

    on_cpu = enable_cpu_engine()
    if on_cpu:
        # The engine's processes share few cores; threads that wait for each other make it crawl.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = Machine.choose(on_cpu=on_cpu)
    model = TinyModel()
    requests = make_requests(arguments.requests, model.vocab_size)
    console.print(
        f"A Llama of {model.num_layers} layers, {model.num_qo_heads} query and "
        f"{model.num_kv_heads} KV heads, random weights, {machine.arguments['dtype']}, on the "
        f"{'CPU' if on_cpu else 'GPU'}. {len(requests)} requests over a three-level prefix tree "
        "(system prompt, document, user) arrive one after another."
    )
    with tempfile.TemporaryDirectory(prefix="sglang-pat-demo-") as folder:
        model_path = model.write(Path(folder, "model"))
        stats_file = Path(folder, "stats.json")
        os.environ["SGLANG_PAT_STATS_FILE"] = str(stats_file)
        pat = serve(model_path, "pat", requests, machine, stats_file)
        del os.environ["SGLANG_PAT_STATS_FILE"]
        own = serve(model_path, machine.own_backend, requests, machine)
        own_name = machine.own_backend or "SGLang's default"
        report = Report(own_name, pat, own, pat.stats)

    report.print()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    return 0 if report.difference is None else 1


def _quieten() -> None:
    """Silence what SGLang and its libraries say on every start. Errors still come through."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for the engine's processes
    # The weight loader's bars appear after this many seconds; it ignores TQDM_DISABLE.
    os.environ.setdefault("TQDM_DELAY", "3600")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m sglang_pat.cli.demo`."""
    parser = argparse.ArgumentParser(prog="python -m sglang_pat.cli.demo", description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _request_count(text: str) -> int:
    if not text.isdecimal() or int(text) < MIN_REQUESTS:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number from {MIN_REQUESTS}")
    return int(text)
