"""SGLang's own test of deterministic inference, with pat in batch-invariant mode.

    python benchmarks/check deterministic [--json FILE]

One server, with `--enable-deterministic-inference` where there is a GPU. The modes are those of
tests/support/sglang_deterministic.py; an answer's log-probabilities must be equal to the last bit,
whatever runs beside it. pat must have decoded all layers, and shared what is common.

On a CPU, where SGLang's matrix products depend on the batch, tokens alone are compared.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_deterministic import MODES, different_answers

from check.logits import LARGEST_RATIO, STRICT, this_setup
from common.counters import read_ratio
from common.metadata import gpu_state
from common.results import report
from common.suites import add_option
from common.terminal import console
from sglang_pat.bench.server import Server, contender, running_server
from sglang_pat.cli.arguments import whole_number
from sglang_pat.sglang.cpu import cuda_driver_is_present

INVARIANT = {"SGLANG_PAT_BATCH_INVARIANT": "1"}  # where SGLang has no mode
COMMON = {"skip_tokenizer_init": True, "context_length": 8192, "max_running_requests": 64}
DETERMINISTIC = {
    "enable_deterministic_inference": True,
    "max_total_tokens": 1 << 18,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 48, 64],
}


def check(server: Server, trials: int, new_tokens: int, *, logprobs: bool) -> dict[str, Any]:
    """All modes, and what was wrong."""
    modes = {}
    for mode in MODES:
        begun = time.monotonic()
        different = different_answers(
            server.url, mode, trials=trials, new_tokens=new_tokens, logprobs=logprobs
        )
        seconds = time.monotonic() - begun
        console.print(f"{mode}: different answers by prompt {different}, {seconds:.1f} s")
        modes[mode] = {"different_answers": different, "seconds": seconds}
    info, stats = server.info(), server.stats()
    failures = [
        f"{mode}: {modes[mode]['different_answers']}"
        for mode, prompts in MODES.items()
        if modes[mode]["different_answers"] != [1] * prompts
    ]
    if not info["pat"]["batch_invariant"]:
        failures.append("pat is not in batch-invariant mode")
    ratio = read_ratio(stats)
    if ratio is None or ratio > LARGEST_RATIO:
        failures.append(f"pat shared too little: KV read ratio {ratio}")
    return {
        "trials": trials,
        "new_tokens": new_tokens,
        "log_probabilities_compared": logprobs,
        "modes": modes,
        "pat": info["pat"],
        "kv_read_ratio": ratio,
        "failures": failures,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    trials, tokens = whole_number(1, 10000), whole_number(1, 1 << 16)
    parser.add_argument("--trials", type=trials, default=30, help="batches of a mode")
    parser.add_argument("--new-tokens", type=tokens, default=48, help="tokens of an answer")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    on_gpu = cuda_driver_is_present()
    setup = this_setup()
    before = gpu_state()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-deterministic-") as folder:
        model = setup.model.write(Path(folder, "model"))
        arguments = COMMON | setup.arguments | (DETERMINISTIC if on_gpu else {})
        environment = STRICT | ({} if on_gpu else INVARIANT)
        with running_server(
            contender("pat"), model, Path(folder), environment=environment, **arguments
        ) as server:
            console.print(f"ready after {time.monotonic() - begun:.0f} s")
            found = check(server, args.trials, args.new_tokens, logprobs=on_gpu)
            after = gpu_state()
    return report(found | {"gpu": {"before": before, "after": after}}, args.json)
