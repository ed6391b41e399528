"""Several ranks: the same tokens from them as from one, and plans as they should be.

    python benchmarks/check ranks --layout tp pp dp [--ranks 2] [--json FILE]

tp: the ranks have a part of the heads each; SGLANG_PAT_DEBUG=1 makes them compare their plans in
every step, and fail if one has another. pp: a part of the layers each; batches take turns, and each
reuses its own plans. dp: the layers' attention is for requests of a rank's own
(--enable-dp-attention); each rank plans its own.

The requests of `check logits`, through each backend on one rank and on several. What the sums in
another order cost is measured on the other backends: pat's logits may move by at most twice that,
and its tokens may part at a tie only. The servers of all layouts start at once, with one rank and
with several. Without a GPU, tp and pp run on the CPU with a smaller model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from check.cpu_ranks import environment_of_ranks
from check.logits import (
    COMMON,
    FLOAT32_LIMIT,
    NUM_TOKENS,
    ON_CPU,
    ON_GPU,
    STRICT,
    Run,
    Setup,
    answer_all,
    largest_and_mean,
    problems_of_comparing,
    this_setup,
)
from check.qwen3 import write_qwen3
from common.results import report
from common.suites import Refused, add_option
from common.terminal import console
from sglang_pat.bench.answers import agreement
from sglang_pat.bench.server import Start, contender, running_servers
from sglang_pat.cli.arguments import whole_number
from sglang_pat.sglang.cpu import cuda_driver_is_present

LAYOUTS = ("tp", "pp", "dp")
# Least share of the steps that have the last plan; the others follow a change of the batch.
LEAST_REUSED = 0.5
# KV that is planned, of what attention for each request alone reads.
LARGEST_RATIO = 0.9


class Plans(NamedTuple):
    """Counters of one of pat's ranks."""

    steps: int
    reused: int
    kv_ratio: float
    steps_alike: int  # on all ranks
    private_steps: dict[str, int]  # by reason; a rank without requests of its own decodes padding

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Plans:
        from sglang_pat.sglang.tree.reader import NO_REQUESTS  # imports SGLang

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
    failures += problems_of_comparing(greedy, (max_limit, mean_limit))
    failures += plans.failures(layout)
    return {
        "layout": layout,
        "moved": {name: {"max": errors[0], "mean": errors[1]} for name, errors in moved.items()},
        "limit": {"max": max_limit, "mean": mean_limit},
        "greedy": greedy.as_dict(),
        "plans": plans._asdict(),
        "failures": failures,
    }


def arguments_of(layout: str, ranks: int, *, on_cpu: bool) -> dict[str, Any]:
    """Return arguments of sglang.Engine."""
    # SGLang's own all-reduce is compiled for a minute, and pat has no part in it.
    more: dict[str, Any] = {} if on_cpu else {"disable_custom_all_reduce": True}
    if layout == "pp":
        return {"pp_size": ranks, **more}
    if layout == "dp":
        more |= {"dp_size": ranks, "enable_dp_attention": True}
    return {"tp_size": ranks, **more}


def starts_of(
    setup: Setup, model: Path, backends: Sequence[str], layouts: Sequence[str], ranks: int
) -> dict[str, Start]:
    """Every backend on one rank, and in every layout: `pat-one`, `pat-tp`. model: its folder."""
    on_cpu = setup.arguments.get("device") == "cpu"
    starts = {}
    for layout in ("one", *layouts):
        environment = {
            "SGLANG_PAT_DEBUG": "1",
            # SGLang would take the other servers on a GPU for a fault.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            **STRICT,
        }
        arguments = COMMON | setup.arguments
        if layout != "one":
            arguments |= arguments_of(layout, ranks, on_cpu=on_cpu)
            if on_cpu:
                sizes = {
                    name: arguments[name] for name in ("tp_size", "pp_size") & arguments.keys()
                }
                environment |= environment_of_ranks(**sizes)
        starts |= {
            f"{name}-{layout}": Start(contender(name), model, arguments, environment)
            for name in backends
        }
    return starts


def run_all(
    setup: Setup, backends: Sequence[str], layouts: Sequence[str], ranks: int, folder: Path
) -> dict[str, tuple[dict[str, tuple[Run, Run]], Plans]]:
    """Return the arguments of `judge`, by layout."""
    write = write_qwen3 if "dp" in layouts else type(setup.model).write
    model = write(setup.model, folder / "model")
    starts = starts_of(setup, model, backends, layouts, ranks)
    console.print(f"starting {len(starts)} servers: {', '.join(starts)}")
    with running_servers(starts, folder) as servers, ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(answer_all, server, setup) for name, server in servers.items()}
        answers = {name: answer.result() for name, answer in asked.items()}
        plans = {layout: Plans.of(servers[f"pat-{layout}"].stats()) for layout in layouts}
    return {
        layout: (
            {name: (answers[f"{name}-one"], answers[f"{name}-{layout}"]) for name in backends},
            plans[layout],
        )
        for layout in layouts
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    setup = this_setup()
    parser.add_argument("--layout", required=True, nargs="+", choices=LAYOUTS)
    parser.add_argument("--ranks", type=whole_number(2, 64), default=2, metavar="N")
    backends = ["pat", "fa3"] if setup is ON_GPU else setup.backends
    add_option(parser, "--backends", default=backends)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    setup = this_setup()
    if "pat" not in args.backends or len(args.backends) < 2:
        raise Refused(f"--backends must name pat and another; got {args.backends}")
    if setup is ON_GPU and torch.cuda.device_count() < args.ranks:
        raise Refused(f"--ranks {args.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
    if setup is ON_CPU and "dp" in args.layout:
        raise Refused(
            "--layout dp needs GPUs: on a CPU SGLang's torch_native cannot pad a batch "
            "(tests/engine/test_tensor_parallel.py adds what it lacks)"
        )
    with tempfile.TemporaryDirectory(prefix="check-ranks-") as folder:
        found = run_all(setup, args.backends, args.layout, args.ranks, Path(folder))
    verdicts = {layout: judge(*runs, layout) for layout, runs in found.items()}
    failures = [
        f"{layout}: {failure}"
        for layout, verdict in verdicts.items()
        for failure in verdict.pop("failures")
    ]
    return report({**verdicts, "failures": failures}, args.json)
