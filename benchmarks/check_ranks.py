"""Several ranks: the same tokens from them as from one, and plans as they should be.

    python benchmarks/check_ranks.py --layout tp|pp|dp [--ranks 2] [--json FILE]

tp: the ranks have a part of the heads each; SGLANG_PAT_DEBUG=1 makes them compare their plans in
every step, and fail if one has another. pp: a part of the layers each; batches take turns, and each
reuses its own plans. dp: the layers' attention is for requests of a rank's own
(--enable-dp-attention); each rank plans its own.

The requests of check_logits.py, through each backend on one rank and on several. What the sums in
another order cost is measured on the other backends: pat's logits may move by at most twice that,
and its tokens may part at a tie only. Without a GPU, tp and pp run on the CPU with a smaller model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from check_logits import (
    COMMON,
    FLOAT32_LIMIT,
    NUM_TOKENS,
    ON_CPU,
    ON_GPU,
    Run,
    Setup,
    answer_all,
    largest_and_mean,
)
from serving.answers import agreement
from serving.cpu_ranks import environment_of_ranks
from serving.qwen3 import write_qwen3
from serving.results import report
from serving.tables import console

from sglang_pat.bench.server import contender, running_server
from sglang_pat.sglang.cpu import cuda_driver_is_present

LAYOUTS = ("tp", "pp", "dp")
# Of the steps, how many have the plan of the step before; the others follow a change of the batch.
LEAST_REUSED = 0.5
# KV that is planned, of what attention for each request alone reads.
LARGEST_RATIO = 0.9


class Plans(NamedTuple):
    """What one of pat's ranks has counted."""

    steps: int
    reused: int
    kv_ratio: float
    steps_alike: int  # on all ranks
    private_steps: dict[str, int]  # by reason; a rank without requests of its own decodes padding

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Plans:
        from sglang_pat.sglang.reader import NO_REQUESTS  # imports SGLang

        reused = stats["plans_reused"]
        query_centric = stats["kv_tokens_query_centric"]
        return cls(
            stats["plans_built"] + reused,
            reused,
            stats["kv_tokens_planned"] / query_centric if query_centric else 1.0,
            stats.get("ranks_alike", {}).get("steps", 0),
            {why: n for why, n in stats["private_steps"].items() if why != NO_REQUESTS},
        )

    def failures(self, layout: str) -> list[str]:
        found = []
        if self.steps < NUM_TOKENS:
            found.append(f"only {self.steps} steps were planned")
        if self.kv_ratio > LARGEST_RATIO:
            found.append(f"{self.kv_ratio:.2f} of the KV was planned, more than {LARGEST_RATIO}")
        if self.private_steps:
            found.append(f"steps that shared nothing: {self.private_steps}")
        if layout == "tp" and self.steps_alike < NUM_TOKENS:
            found.append(f"the ranks compared only {self.steps_alike} plans")
        if layout == "pp" and self.reused < LEAST_REUSED * self.steps:
            found.append(f"only {self.reused} of {self.steps} steps reused a plan")
        return found


def judge(runs: dict[str, tuple[Run, Run]], plans: Plans, layout: str) -> dict[str, Any]:
    """runs: of each backend on one rank and on several. plans: of pat on several."""
    moved = {name: largest_and_mean(one.logits, many.logits) for name, (one, many) in runs.items()}
    others = [errors for name, errors in moved.items() if name != "pat"]
    max_limit, mean_limit = (2 * max(column) for column in zip(*others, strict=True))
    if not cuda_driver_is_present():  # where one other backend may happen not to move at all
        max_limit, mean_limit = max(max_limit, FLOAT32_LIMIT), max(mean_limit, FLOAT32_LIMIT)
    one, many = runs["pat"]
    greedy = agreement(many.greedy, one.greedy, max_limit)
    largest, mean = moved["pat"]
    failures = [f"logits moved by {largest:.3g}, more than {max_limit:.3g}"] * (largest > max_limit)
    failures += [f"on average by {mean:.3g}, more than {mean_limit:.3g}"] * (mean > mean_limit)
    failures += [f"other tokens: {error}" for error in greedy.errors]
    failures += plans.failures(layout)
    return {
        "layout": layout,
        "moved": {name: {"max": errors[0], "mean": errors[1]} for name, errors in moved.items()},
        "limit": {"max": max_limit, "mean": mean_limit},
        "greedy": greedy.as_dict(),
        "plans": plans._asdict(),
        "failures": failures,
    }


def arguments_of(layout: str, ranks: int) -> dict[str, Any]:
    """Of sglang.Engine."""
    if layout == "pp":
        return {"pp_size": ranks}
    more = {"dp_size": ranks, "enable_dp_attention": True} if layout == "dp" else {}
    return {"tp_size": ranks, **more}


def run_all(
    setup: Setup, backends: list[str], layout: str, ranks: int, folder: Path
) -> tuple[dict[str, tuple[Run, Run]], Plans]:
    """What `judge` judges."""
    write = write_qwen3 if layout == "dp" else type(setup.model).write
    model = write(setup.model, folder / "model")
    on_cpu = setup.arguments.get("device") == "cpu"
    runs, plans = {}, None
    for name in backends:
        of_backend = []
        for size in (1, ranks):
            console.print(f"starting the server with {name} on {size} rank(s), {layout}")
            layout_arguments = arguments_of(layout, size) if size > 1 else {}
            environment = {"SGLANG_PAT_DEBUG": "1"}
            if on_cpu and size > 1:
                sizes = {"pp_size": size} if layout == "pp" else {"tp_size": size}
                environment |= environment_of_ranks(**sizes)
            arguments = COMMON | setup.arguments | layout_arguments
            with running_server(
                contender(name), model, folder, environment=environment, **arguments
            ) as server:
                of_backend.append(answer_all(server, setup))
                if name == "pat" and size > 1:
                    plans = Plans.of(server.stats())
        runs[name] = of_backend[0], of_backend[1]
    assert plans is not None
    return runs, plans


def main() -> int:
    setup = ON_GPU if cuda_driver_is_present() else ON_CPU
    backends = ["pat", "fa3"] if setup is ON_GPU else setup.backends
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layout", required=True, choices=LAYOUTS)
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--backends", nargs="+", default=backends, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    args = parser.parse_args()
    if args.ranks < 2 or "pat" not in args.backends or len(args.backends) < 2:
        parser.error(f"--ranks must be 2 or more, and --backends name pat and another; got {args}")
    if setup is ON_GPU and torch.cuda.device_count() < args.ranks:
        parser.error(f"--ranks {args.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
    if setup is ON_CPU and args.layout == "dp":
        parser.error(
            "--layout dp needs GPUs: on a CPU SGLang's torch_native cannot pad a batch "
            "(tests/engine/test_tensor_parallel.py adds what it lacks)"
        )
    with tempfile.TemporaryDirectory(prefix="check-ranks-") as folder:
        found = run_all(setup, args.backends, args.layout, args.ranks, Path(folder))
    verdict = judge(*found, args.layout)
    return report(verdict, args.json)


if __name__ == "__main__":
    sys.exit(main())
