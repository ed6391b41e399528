"""Checks that several ranks give the same tokens as one rank, by the right plans.

    python benchmarks/check ranks --layout tp pp dp mla mla-dp chains [--ranks 2] [--json FILE]

tp: each rank has some of the heads. SGLANG_PAT_DEBUG makes the ranks compare their plans, and fail
if these differ. pp: each rank has some of the layers, batches alternate, and each reuses its own
plans. dp: each rank computes and plans attention for its own requests (--enable-dp-attention). mla,
mla-dp: like tp and dp, with a model with latent attention. chains: like tp, and the same model
drafts chains of tokens.

Each backend answers the requests of `check logits` on one rank and on several. The other backends
show how much logits move by sums in another order. pat's logits may move by at most twice that, and
its tokens may differ only at ties. With chains, another backend on one rank gets the answers as
prompts. Each token must be its most probable one, up to rounding. As many drafts must be accepted
as with that backend, up to two standard errors.

Ranks that share a batch must not wait for one another's plans. So on GPUs, where steps repeat plans
as in production (SGLANG_PAT_DEBUG=ranks), there is a limit on how much longer the slowest rank
plans a step than the fastest.

The servers of all layouts start at once. A server that fails, fails its layout. Results are written
after each layout. Without a GPU, tp and pp run on the CPU with a smaller model.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.text import Text

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
    prompts,
    this_setup,
)
from check.tiny_models import write_latent, write_qwen3
from common.drafts import (
    ACCEPTANCE_LIMIT,
    DRAFT_TOKENS,
    OFF_RATIO,
    OFF_STEP,
    accepted,
    error_of_accepted,
    largest_off,
)
from common.fleet import Member, fleet, report_starts, wait, watched
from common.metadata import metadata
from common.results import at_most, write
from common.suites import Refused, add_option
from common.terminal import console, show_failure, table_of
from common.tiny_model import TinyModel
from sglang_pat.bench.answers import agreement
from sglang_pat.bench.server import START_SECONDS, Server, Start, contender, sampling_of
from sglang_pat.cli.arguments import whole_number
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.cpu import cuda_driver_is_present
from sglang_pat.stats import PlanningTimes

# The model of each layout, and the function that writes it. SGLang's Llama lacks data-parallel
# attention.
LAYOUTS = {
    "tp": "llama",
    "pp": "llama",
    "dp": "qwen3",
    "mla": "latent",
    "mla-dp": "latent",
    "chains": "llama",
}
WRITERS: dict[str, Callable[[TinyModel, Path], Path]] = {
    "llama": TinyModel.write,
    "qwen3": write_qwen3,
    "latent": write_latent,
}
ONE_BATCH = ("tp", "mla", "chains")  # all ranks decode the same requests
ON_A_CPU = ("tp", "pp")
# Least fraction of steps that reuse the last plan. The others follow a change of the batch.
LEAST_REUSED = 0.5
# Largest allowed planned KV / KV that query-centric attention reads.
LARGEST_RATIO = 0.9
# Limit, for 90% of the steps, on the slowest rank's planning time minus the fastest's.
APART_US, APART_PERCENT = 50.0, 90


class Plans(NamedTuple):
    """Counters of one of pat's ranks, about its plans."""

    steps: int
    reused: int
    kv_ratio: float
    built: int  # plans, with those of a draft model
    steps_alike: int  # planned steps with equal plans on all ranks
    # Number by reason. A rank without requests decodes padding.
    steps_without_sharing: dict[str, int]
    # By percentile, over all steps and over the planned ones. Empty if ranks share no batch.
    apart_us: dict[str, float]
    planned_apart_us: dict[str, float]

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> Plans:
        reused = stats["plans_reused"]
        query_centric = stats["kv_tokens_query_centric"]
        return cls(
            stats["plans_built"] + reused,
            reused,
            stats["kv_tokens_planned"] / query_centric if query_centric else 1.0,
            stats["plans_built"] + stats.get("draft", {}).get("plans_built", 0),
            stats.get("ranks_alike", {}).get("steps", 0),
            {
                why: n
                for why, n in stats["steps_without_sharing"].items()
                if why != StepReason.NO_REQUESTS
            },
            percentiles_us(stats.get("ranks_apart_ns", {})),
            percentiles_us(stats.get("ranks_planned_apart_ns", {})),
        )

    def failures(self, layout: str) -> list[str]:
        found = []
        least = NUM_TOKENS // DRAFT_TOKENS if layout == "chains" else NUM_TOKENS
        if self.steps < least:
            found.append(f"only {self.steps} steps were planned")
        if self.kv_ratio > LARGEST_RATIO:
            found.append(f"{self.kv_ratio:.2f} of the KV was planned, more than {LARGEST_RATIO}")
        if self.steps_without_sharing:
            found.append(f"steps that shared nothing: {self.steps_without_sharing}")
        if layout in ONE_BATCH and self.steps_alike < max(1, self.built):
            found.append(f"the ranks compared only {self.steps_alike} plans")
        if layout == "pp" and self.reused < LEAST_REUSED * self.steps:
            found.append(f"only {self.reused} of {self.steps} steps reused a plan")
        return found


def percentiles_us(histogram: Mapping[str, int]) -> dict[str, float]:
    """Return percentiles of a histogram of `RankChecker`, without any if it is empty."""
    times = PlanningTimes(changed=Counter({int(ns): n for ns, n in histogram.items()}))
    percents = (50, APART_PERCENT, 99) if histogram else ()
    return {f"p{percent}": times.percentile_us("changed", percent) for percent in percents}


def judge(runs: dict[str, tuple[Run, Run]], plans: Plans, layout: str) -> dict[str, Any]:
    """Judge a layout. runs: each backend's on one rank and on several. plans: pat's on several."""
    moved = {name: largest_and_mean(one.logits, many.logits) for name, (one, many) in runs.items()}
    others = [errors for name, errors in moved.items() if name != "pat"]
    max_limit, mean_limit = (2 * max(column) for column in zip(*others, strict=True))
    if not cuda_driver_is_present():  # on a CPU, other backends may have no difference
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


class Drafted(NamedTuple):
    """Answers of a backend whose ranks verify drafts.

    off: by how much a token is at most less probable than the best one. accepted: mean tokens that
    a step gives a request. error: the standard error of `accepted`.
    """

    off: float
    accepted: float
    error: float


def judge_chains(found: Mapping[str, Drafted], plans: Plans) -> dict[str, Any]:
    """Judge chains. found: the answers of pat and of the other backends, by backend."""
    pat = found["pat"]
    others = [each for name, each in found.items() if name != "pat"]
    limit = max(OFF_STEP, OFF_RATIO * max(each.off for each in others))
    best = max(others, key=lambda each: each.accepted)
    noise = 2 * math.hypot(pat.error, best.error)
    least = (1 - ACCEPTANCE_LIMIT) * best.accepted - noise
    failures = [f"a token is off by {pat.off:.3g}, more than {limit:.3g}"] * (not pat.off <= limit)
    if pat.accepted < least:
        failures.append(f"{pat.accepted:.2f} tokens a step were accepted, fewer than {least:.2f}")
    if best.accepted <= 1:
        failures.append("no draft was accepted")
    return {
        "layout": "chains",
        "drafted": {name: each._asdict() for name, each in found.items()},
        "limit": {"off": limit, "accepted": least},
        "plans": plans._asdict(),
        "failures": failures + plans.failures("chains"),
    }


def arguments_of(layout: str, ranks: int, model: Path, *, on_cpu: bool) -> dict[str, Any]:
    """Return arguments of sglang.Engine. model: the folder of the model."""
    # SGLang's own all-reduce takes a minute to compile, and does not concern pat.
    more: dict[str, Any] = {} if on_cpu else {"disable_custom_all_reduce": True}
    if layout == "pp":
        return {"pp_size": ranks, **more}
    if layout.endswith("dp"):
        more |= {"dp_size": ranks, "enable_dp_attention": True}
    if layout == "chains":
        more |= {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": model,
            "speculative_num_steps": DRAFT_TOKENS - 1,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": DRAFT_TOKENS,
        }
    return {"tp_size": ranks, **more}


def starts_of(
    setup: Setup, folder: Path, backends: Sequence[str], layouts: Sequence[str], ranks: int
) -> dict[str, Start]:
    """Return the servers: every backend in every layout (`pat-tp`) and on one rank (`pat-llama`).

    folder: folder of the models.
    """
    on_cpu = setup.arguments.get("device") == "cpu"
    models = dict.fromkeys(LAYOUTS[layout] for layout in layouts)
    starts = {}
    for name in (*models, *layouts):
        environment = {
            "SGLANG_PAT_DEBUG": "ranks" if name in ONE_BATCH and not on_cpu else "1",
            # SGLang would report the memory of other servers on a GPU as an error.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            **STRICT,
        }
        arguments = COMMON | setup.arguments | {"sleep_on_idle": True}
        model = folder / LAYOUTS.get(name, name)
        if name in LAYOUTS:
            arguments |= arguments_of(name, ranks, model, on_cpu=on_cpu)
        if name == "chains":
            del arguments["enable_fp32_lm_head"]
        if on_cpu and name in LAYOUTS:
            sizes = {size: arguments[size] for size in ("tp_size", "pp_size") & arguments.keys()}
            environment |= environment_of_ranks(**sizes)
        starts |= {
            f"{backend}-{name}": Start(contender(backend), model, arguments, environment)
            for backend in backends
        }
    return starts


def answer_chains(server: Server, setup: Setup) -> list[dict[str, Any]]:
    """Return the greedy answers to all prompts."""
    server.flush()
    return server.generate(prompts(setup), sampling_of(NUM_TOKENS))


class Answers:
    """The answers of servers, by name. failures: why a server has no answers."""

    def __init__(self, members: Mapping[str, Member], setup: Setup) -> None:
        self._members = members
        self._setup = setup
        self._found: dict[str, Any] = {}
        self.failures: dict[str, str] = {}

    def ask(self, name: str) -> None:
        member = self._members[name]
        if member.failure is not None:
            self.failures[name] = member.failure
            return
        ask = answer_chains if name.endswith("-chains") else answer_all
        with watched([member], name) as failures:
            self._found[name] = ask(member.server, self._setup)
        if failures:
            self.failures[name] = failures[0]

    def judge(self, layout: str, backends: Sequence[str]) -> dict[str, Any]:
        """Return the verdict on a layout, whose servers have answered."""
        one = {name: f"{name}-{LAYOUTS[layout]}" for name in backends}
        many = {name: f"{name}-{layout}" for name in backends}
        missing = [name for name in (*one.values(), *many.values()) if name not in self._found]
        if missing:
            failures = [f"{name}: {self.failures[name]}" for name in missing]
            return {"layout": layout, "failures": failures}
        plans = Plans.of(self._members[many["pat"]].server.stats())
        if layout != "chains":
            runs = {name: (self._found[one[name]], self._found[many[name]]) for name in backends}
            return judge(runs, plans, layout)
        yardstick = self._members[next(one[name] for name in backends if name != "pat")].server
        drafted = {
            name: Drafted(
                largest_off(yardstick, prompts(self._setup), self._found[each]),
                accepted(self._found[each]),
                error_of_accepted(self._found[each]),
            )
            for name, each in many.items()
        }
        return judge_chains(drafted, plans)


def gates(verdicts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return gates on the differences of the ranks' planning times, by layout."""
    key = f"p{APART_PERCENT}"
    return {
        f"{layout}: planning of the slowest rank less the fastest's, {key}, us": at_most(
            verdict["plans"]["apart_us"][key], APART_US
        )
        for layout, verdict in verdicts.items()
        if verdict.get("plans", {}).get("apart_us")
    }


def show(data: Mapping[str, Any], layouts: Sequence[str]) -> None:
    table = table_of(
        "several ranks", ("layout", "what", "found"), words=("layout", "what", "found")
    )
    for layout in layouts:
        for name, found in data.get(layout, {}).items():
            table.add_row(layout, name, Text(json.dumps(found)))
    console.print(table)
    for failure in data["failures"]:
        show_failure(failure)
    for name, gate in data["gates"].items():
        if not gate["met"]:
            show_failure(f"{name}: {gate['value']:.1f}, limit {gate['limit']}")


def check_all(
    setup: Setup, backends: Sequence[str], args: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Run all layouts. Return and write their verdicts, `failures` and `gates`."""
    layouts = args.layout
    for model in {LAYOUTS[layout] for layout in layouts}:
        WRITERS[model](setup.model, folder / model)
    starts = starts_of(setup, folder, backends, layouts, args.ranks)
    console.print(f"starting {len(starts)} servers: {', '.join(starts)}")
    verdicts: dict[str, Any] = {}
    data: dict[str, Any] = {"meta": metadata(), "ranks": args.ranks, "failures": [], "gates": {}}
    with fleet(starts, folder) as members:
        wait(members.values(), args.start_seconds)
        report_starts(members.values())
        answers = Answers(members, setup)
        # Ranks that compare planning times run alone, so that they have all cores.
        in_turn = [f"pat-{layout}" for layout in layouts if layout in ONE_BATCH]
        with ThreadPoolExecutor() as pool:
            list(pool.map(answers.ask, starts.keys() - {*in_turn}))
        for name in in_turn:
            answers.ask(name)
        for layout in layouts:
            with watched([], layout) as problems:
                verdicts[layout] = answers.judge(layout, backends)
            found = verdicts.setdefault(layout, {"layout": layout, "failures": problems})
            failures = found.pop("failures")
            found["failed"] = bool(failures)
            data["failures"] += [f"{layout}: {failure}" for failure in failures]
            data |= {layout: found}
            if setup is not ON_CPU:  # the CPU has few cores
                data["gates"] = gates(verdicts)
            write(args.json, data)
    return data


def add_options(parser: argparse.ArgumentParser) -> None:
    setup = this_setup()
    parser.add_argument("--layout", required=True, nargs="+", choices=LAYOUTS)
    parser.add_argument("--ranks", type=whole_number(2, 64), default=2, metavar="N")
    backends = ["pat", "fa3"] if setup is ON_GPU else setup.backends
    add_option(parser, "--backends", default=backends)
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    setup = this_setup()
    if "pat" not in args.backends or len(args.backends) < 2:
        raise Refused(f"--backends must name pat and another; got {args.backends}")
    if setup is ON_GPU and torch.cuda.device_count() < args.ranks:
        raise Refused(f"--ranks {args.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
    for layout in args.layout:
        if setup is ON_CPU and layout not in ON_A_CPU:
            raise Refused(
                f"--layout {layout} needs GPUs: SGLang lacks what it takes on a CPU "
                "(tests/engine/test_families.py adds it)"
            )
    with tempfile.TemporaryDirectory(prefix="check-ranks-") as folder:
        data = check_all(setup, args.backends, args, Path(folder))
    show(data, args.layout)
    met = all(gate["met"] for gate in data["gates"].values())
    console.print("passed" if met and not data["failures"] else "FAILED")
    return 0 if met and not data["failures"] else 1
