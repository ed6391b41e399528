"""The demo's child process: serves the workload twice, compares the tokens, and reports.

python -m sglang_pat.cli.demo.comparison REQUESTS [RESULT.json]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

from sglang_pat.cli.demo.engine import DemoMachine, serve
from sglang_pat.cli.demo.report import DemoReport, console, show_answers
from sglang_pat.cli.demo.workload import make_requests
from sglang_pat.cli.tiny_model import TRAINED
from sglang_pat.sglang.cpu import enable_cpu_engine


def compare(num_requests: int, result_file: Path | None = None) -> int:
    """Serve the workload with pat and with SGLang's own backend, and compare every token.

    Parameters
    ----------
    num_requests
        How many requests the workload has.
    result_file
        The path of a JSON file for the result, or None.

    Returns
    -------
    int
        The exit status: 0 if every token is equal, else 1.
    """
    begun = time.perf_counter()
    on_cpu = enable_cpu_engine()  # before SGLang is imported
    machine = DemoMachine.choose(on_cpu=on_cpu)
    model = json.loads((TRAINED / "config.json").read_text())
    requests = make_requests(num_requests)
    console.print(
        f"A Llama of {model['num_hidden_layers']} layers, {model['num_attention_heads']} query and "
        f"{model['num_key_value_heads']} KV heads, trained on docstrings, "
        f"{machine.arguments['dtype']}, on the {'CPU' if on_cpu else 'GPU'}. {len(requests)} "
        "requests over a three-level prefix tree (system prompt, document, user) arrive one after "
        "another."
    )
    # No clean-up is needed: session.py deletes the folder that TMPDIR names.
    stats_file = Path(tempfile.mkdtemp()) / "stats.json"
    os.environ["SGLANG_PAT_STATS_FILE"] = str(stats_file)
    pat = serve(TRAINED, "pat", requests, machine, stats_file)
    del os.environ["SGLANG_PAT_STATS_FILE"]
    own = serve(TRAINED, machine.own_backend, requests, machine)
    report = DemoReport(machine.own_backend or "SGLang's default", pat, own, pat.stats)
    report.print()
    show_answers(requests, pat.tokens)
    style = "bold green" if report.difference is None else "bold red"
    console.print(f"\n{report.verdict()}", style=style, markup=False)
    console.print(
        f"The demo took {time.perf_counter() - begun:.0f} s. Next, does it pay for your requests?",
        f"    {_program()} advise --generate conversation    # or --trace YOUR_LOG.jsonl",
        sep="\n",
        markup=False,
        soft_wrap=True,
    )
    if result_file is not None:
        result_file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    return 0 if report.difference is None else 1


def _program() -> str:
    """Return the command for this `sglang-pat`: its name if a shell finds it, else its path."""
    script = Path(sys.executable).with_name("sglang-pat")
    found = shutil.which("sglang-pat")
    if found is not None and Path(found).absolute() == script.absolute():
        return "sglang-pat"
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)


# Guarded, because spawned processes of the engine import the main module again.
if __name__ == "__main__":
    warnings.simplefilter("ignore")  # every import of SGLang prints warnings
    sys.exit(compare(int(sys.argv[1]), *map(Path, sys.argv[2:])))
