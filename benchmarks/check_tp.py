"""Tensor parallelism: the same tokens from two ranks as from one, and the same plans on both.

    python benchmarks/check_tp.py [--tp 2] [--backends pat fa3] [--json FILE]

The requests of check_logits.py, through each backend on one GPU and on several. What the sums in
another order cost is measured on the other backends: pat's logits may move by at most twice that,
and its tokens may part at a tie only. SGLANG_PAT_DEBUG=1 makes pat's ranks compare their plans in
every step, and fail if one has another.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from check_logits import (
    COMMON,
    NUM_TOKENS,
    ON_GPU,
    Run,
    Setup,
    answer_all,
    largest_and_mean,
)
from metadata import metadata
from serving.answers import agreement
from serving.server import contender, running_server
from serving.tables import console


def judge(runs: dict[str, tuple[Run, Run]], steps_alike: int) -> dict[str, Any]:
    """runs: of each backend on one rank and on several. steps_alike: in which pat's ranks were seen
    to have the same plan."""
    moved = {name: largest_and_mean(one.logits, many.logits) for name, (one, many) in runs.items()}
    others = [errors for name, errors in moved.items() if name != "pat"]
    max_limit, mean_limit = (2 * max(column) for column in zip(*others, strict=True))
    one, many = runs["pat"]
    greedy = agreement(many.greedy, one.greedy, max_limit)
    largest, mean = moved["pat"]
    failures = [f"logits moved by {largest:.3g}, more than {max_limit:.3g}"] * (largest > max_limit)
    failures += [f"on average by {mean:.3g}, more than {mean_limit:.3g}"] * (mean > mean_limit)
    failures += [f"other tokens: {error}" for error in greedy.errors]
    if steps_alike < NUM_TOKENS:
        failures.append(f"the ranks compared only {steps_alike} plans")
    return {
        "moved": {name: {"max": errors[0], "mean": errors[1]} for name, errors in moved.items()},
        "limit": {"max": max_limit, "mean": mean_limit},
        "greedy": greedy.as_dict(),
        "steps_with_the_same_plan_on_all_ranks": steps_alike,
        "failures": failures,
    }


def run_all(
    setup: Setup, backends: list[str], tp: int, folder: Path
) -> tuple[dict[str, tuple[Run, Run]], int]:
    """What `judge` judges."""
    model = setup.model.write(folder / "model")
    runs, steps_alike = {}, 0
    for name in backends:
        of_backend = []
        for size in (1, tp):
            console.print(f"starting the server with {name}, tensor parallelism {size}")
            arguments = COMMON | setup.arguments | {"tp_size": size}
            debug = {"SGLANG_PAT_DEBUG": "1"}
            with running_server(
                contender(name), model, folder, environment=debug, **arguments
            ) as server:
                of_backend.append(answer_all(server, setup))
                steps_alike += server.stats().get("ranks_alike", {}).get("steps", 0)
        runs[name] = of_backend[0], of_backend[1]
    return runs, steps_alike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=2, metavar="N")
    parser.add_argument("--backends", nargs="+", default=["pat", "fa3"], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    args = parser.parse_args()
    if args.tp < 2 or "pat" not in args.backends or len(args.backends) < 2:
        parser.error(f"--tp must be 2 or more, and --backends name pat and another; got {args}")
    if torch.cuda.device_count() < args.tp:
        parser.error(f"--tp {args.tp} needs as many GPUs, found {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory(prefix="check-tp-") as folder:
        verdict = judge(*run_all(ON_GPU, args.backends, args.tp, Path(folder)))
    console.print_json(data=verdict)
    if args.json:
        args.json.write_text(json.dumps({"meta": metadata(), **verdict}, indent=1) + "\n")
    return 1 if verdict["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
