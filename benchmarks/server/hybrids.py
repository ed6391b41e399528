"""Hybrid and latent models: time per output token, pat against SGLang's default.

    python benchmarks/server hybrids [--models gpt-oss-20b ...] [--cases shared unshared]
        [--kv-cache-dtype fp8_e4m3] [--ranks 2] [--profile] [--seconds N] [--json FILE]

Two servers of each model, one with pat and one with the backend that SGLang chooses. As many models
as fit on the GPU start at the same moment and share it; then one at a time is asked while the
others sleep. The rest of the models follow when these have ended. What is timed
are the steps in which all requests decode (sglang_pat/bench/decoding.py); neither prefill nor
admission is in it. The time of one server over that of the other is a median over slices of all
rounds; its quartiles say how noisy the run was.

A server that fails takes its model out, and the others go on: the end of its log is printed, and
the exit status is 1. With --seconds nothing more is begun after so many seconds. With --profile the
kernels of a decode step are timed after each case. With --json a file that exists is continued, so
that models can be measured one by one.

Over an fp8 cache, SGLang's FA3 and FlashInfer convert the pool of a latent layer in each layer of
each step, all of it. `conversion` in the result is that operation alone, on a pool as long as the
servers' and on one of a million tokens.

With --ranks the servers are tensor-parallel, with --dp-attention each rank attends for requests of
its own. A Llama-3-70B needs at least 8 GPUs of 80 GB for its two servers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from common.counters import difference, with_ratio
from common.fleet import (
    Member,
    answers_equal,
    ask_in_turn,
    fill_all,
    fleet,
    report_starts,
    times_of,
    wait,
    watched,
)
from common.metadata import gpu_state, metadata
from common.models import TINY
from common.results import earlier, write
from common.suites import Refused, add_option
from common.terminal import console, show_failure, table_of
from server.hybrid_shapes import HYBRIDS, LATENT, LLAMAS, HybridModel, groups_on_gpu
from server.kernel_times import kernel_times, trace
from sglang_pat.bench import timing
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, ratio
from sglang_pat.bench.server import START_SECONDS, Start, contender
from sglang_pat.cli.arguments import whole_number
from sglang_pat.support import LATENT_HEAD_DIMS

BACKENDS = ("pat", "default")
TOKENS = 104  # of an answer
# Tokens at a prompt's end that are prefilled each time. A cache of recurrent states begins at a
# state that it has kept, at a multiple of its chunks: prefix and private tokens are such multiples.
TAIL = 2
# The default's time over pat's, at least: with a prefix that is shared, and with nothing shared.
LIMITS = {
    "deepseek-v2-lite": (1.25, 0.99),
    "glm-4.7-flash": (1.25, 0.99),
    "v3-rank": (1.2, 0.99),
    "k2-rank": (1.3, 0.99),
    "llama-3-8b": (1 / 0.72, 1.0),
    "llama-3-70b": (1 / 0.72, 1.0),
}
OTHER_LIMITS = (1.0, 1 / 1.02)
# A ratio is judged by its median and two standard errors, if its quartiles are no further apart.
MOST_NOISE = 0.10

# Tokens of a pool that is converted beside the servers' own: about one that has a GPU alone.
LARGE_POOL = 1_000_000

PROFILED_STEPS = 12
TRACE_SECONDS = 20
LONGEST_KERNELS = 8  # that are shown

# SGLang would take the other servers on a GPU for a fault.
_ENVIRONMENT = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}

_CASES = {
    "shared": Case(128, 8192, 256, TOKENS),
    "unshared": Case(128, 0, 512, TOKENS),
}
_LATENT_CASES = {
    "shared": Case(64, 16384, 512, TOKENS),
    "unshared": Case(128, 0, 512, TOKENS),
}
_TINY_CASES = {
    "shared": Case(6, 256, 64, 48),
    "unshared": Case(6, 0, 64, 48),
}


class Served:
    """A model that is served. members: its two servers, by backend."""

    def __init__(self, model: HybridModel, members: Mapping[str, Member]) -> None:
        self.model = model
        self.name = model.name
        self.members = members
        self.measured: list[dict[str, Any]] = []

    @property
    def is_up(self) -> bool:
        return all(member.failure is None for member in self.members.values())

    def case(self, name: str) -> Case:
        cases = (
            _TINY_CASES if self.name == TINY else _LATENT_CASES if self.name in LATENT else _CASES
        )
        return cases[name]

    def prompts(self, name: str) -> list[list[int]]:
        """Return the prompts: all but the TAIL is in the cache."""
        cached = self.case(name).prompts(self.model.shape.vocab_size)
        return [prompt + prompt[:TAIL] for prompt in cached]

    def fill(self, name: str) -> None:
        """The caches of both servers."""
        prompts = self.prompts(name)
        prefix = self.case(name).prefix
        heads = [prompts[0][:prefix]] if prefix else []
        fill_all(list(self.members.values()), prompts, heads, [each[:-TAIL] for each in prompts])

    def measure(self, name: str, rounds: int) -> None:
        """One case on both servers, in turn. Their caches hold the prompts."""
        case = self.case(name)
        pat = self.members["pat"].server
        before, state = pat.stats(), gpu_state()
        members = list(self.members.values())
        asked = ask_in_turn(members, self.prompts(name), case.generated, rounds)
        runs = {backend: asked[member.name] for backend, member in self.members.items()}
        counted = difference(pat.stats(), before)
        found = summary(runs) | {
            "model": self.name,
            "case": name,
            "batch": case.batch,
            "prefix": case.prefix,
            "private": case.private,
            "tokens": case.generated,
            "pat_stats": with_ratio(counted),
            "gpu": {"before": state, "after": gpu_state()},
        }
        self.measured.append(found)
        console.print(f"  {self.name}, {name}: {_times(found)}")

    def profile(self, name: str) -> None:
        """Time the kernels of a step of a case that has been measured, on both servers."""
        (case,) = (case for case in self.measured if case["case"] == name)
        prompts = self.prompts(name)
        times = case.setdefault("step_us", {})
        for backend, member in self.members.items():
            with tempfile.TemporaryDirectory() as folder:
                events = trace(
                    member.server,
                    prompts,
                    Path(folder),
                    steps=PROFILED_STEPS,
                    seconds=TRACE_SECONDS,
                )
            times[backend] = kernel_times(events)
            show_step(f"{self.name}, {name}, {backend}", times[backend])


def show_step(name: str, found: Mapping[str, Any]) -> None:
    """The longest kernels of a decode step."""
    step = "unknown length" if found["step"] is None else f"{found['step']:.0f} us"
    console.print(f"  {name}: a step of {step}, the GPU busy for {found['busy']:.0f} us")
    for kernel, (us, count) in list(found["kernels"].items())[:LONGEST_KERNELS]:
        print(f"    {us:8.1f} us in {count:5.1f} x {kernel}", flush=True)


def summary(runs: Mapping[str, Sequence[DecodeRun]]) -> dict[str, Any]:
    """Times per token and their ratio, with quartiles. runs: by backend, in the order of rounds."""
    return times_of(runs) | {
        "default_over_pat": ratio(runs["default"], runs["pat"]).as_dict(),
        "first_ms": {backend: [run.first_ms for run in passes] for backend, passes in runs.items()},
        "share_of_answers_equal": answers_equal(runs["pat"], runs["default"]),
    }


def gates(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the cases, by model and case: whether they pass, and by what numbers."""
    found: dict[str, Any] = {}
    for case in cases:
        spread = case["default_over_pat"]
        limit = LIMITS.get(case["model"], OTHER_LIMITS)[case["case"] != "shared"]
        noise = (spread["high"] - spread["low"]) / spread["median"]
        at_best = spread["median"] + 2 * spread["error"]
        # Without a shared prefix in the cache, nothing was compared.
        hit = case["case"] != "shared" or min(case["share_of_prompts_cached"].values()) > 0.9
        found[f"{case['model']}, {case['case']}"] = {
            "passed": noise <= MOST_NOISE and at_best > limit and hit,
            "above": limit,
            "with_two_standard_errors": at_best,
            "noise": noise,
            "noise_at_most": MOST_NOISE,
            "prefix_was_cached": hit,
        }
    return found


Save = Callable[[Served, dict[str, Any]], None]


def measure_all(args: argparse.Namespace, save: Save) -> list[str]:
    """All cases of all models with one start of each server. Returns what failed.

    save: is given a model, and what is served, whenever there is more: nothing is lost to a kill.
    """
    begun, failures = time.monotonic(), []
    models = [
        HYBRIDS[name].served(args.kv_cache_dtype, args.ranks, own_requests=args.dp_attention)
        for name in args.models
    ]
    for group in groups_on_gpu(models):
        took = time.monotonic() - begun
        if took > args.seconds:
            failures += [f"{model.name}: not begun in time" for model in group]
            continue
        console.print(f"[{took:.0f} s] starting {', '.join(model.name for model in group)}")
        failures += _measure_group(group, args, begun, save)
    return failures


def _measure_group(
    group: Sequence[HybridModel], args: argparse.Namespace, begun: float, save: Save
) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="bench-hybrid-") as name:
        starts = {}
        for model in group:
            path = model.shape.write(Path(name, model.name))
            for backend in BACKENDS:
                start = Start(contender(backend), path, model.shape.arguments, _ENVIRONMENT)
                starts[f"{model.name} {backend}"] = start
        with fleet(starts, Path(name)) as members:
            models = [
                Served(each, {name: members[f"{each.name} {name}"] for name in BACKENDS})
                for each in group
            ]
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            session = _Session(models, begun, args.seconds, save)
            for case in args.cases:
                session.fill(case)
                session.each(case, lambda model, case: model.measure(case, args.rounds))
            # At last: a profiler may take its server along.
            for case in reversed(args.cases) if args.profile else ():
                session.fill(case)
                session.each(case, Served.profile)
            down = [f"{each.name}: {each.failure}" for each in members.values() if each.failure]
            return session.failures + down


def conversion(model: HybridModel) -> dict[str, Any]:
    """The time in which the pool of a latent layer becomes bfloat16, by its tokens."""
    pools = {}
    for tokens in (model.shape.arguments["max_total_tokens"], LARGE_POOL):
        shape = (tokens, 1, LATENT_HEAD_DIMS[0])
        pool = torch.zeros(shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        us = timing.interleaved_us({"convert": lambda pool=pool: pool.to(torch.bfloat16)})
        pools[str(tokens)] = {
            "layer_us": us["convert"],
            "step_ms": us["convert"] * model.full_layers / 1000,
        }
    return {"layers": model.full_layers, "by_tokens_of_the_pool": pools}


class _Session:
    """Asks the models that are up, one after the other, until the time is over."""

    def __init__(self, models: Sequence[Served], begun: float, seconds: float, save: Save) -> None:
        self._models = models
        self._begun = begun
        self._seconds = seconds
        self._save = save
        self._about = {model.name: _about(model) for model in models if model.is_up}
        self._filled: str | None = None
        self.failures: list[str] = []

    def fill(self, case: str) -> None:
        """The caches of all models at once, unless they are."""
        up = [model for model in self._models if model.is_up]
        if case == self._filled or not up or self._took() > self._seconds:
            return
        with ThreadPoolExecutor(len(up)) as pool:
            list(pool.map(Served.fill, up, [case] * len(up)))
        self._filled = case
        console.print(f"[{self._took():.0f} s] {case}: caches are filled")

    def each(self, case: str, step: Callable[[Served, str], object]) -> None:
        for model in self._models:
            if not model.is_up:
                continue
            if self._took() > self._seconds:
                self.failures.append(f"{model.name}, {case}: not begun in time")
                continue
            with watched(list(model.members.values()), f"{model.name}, {case}"):
                step(model, case)
                self._save(model, self._about[model.name])

    def _took(self) -> float:
        return time.monotonic() - self._begun


def _about(model: Served) -> dict[str, Any]:
    """Describe the model, and what the servers say of themselves."""
    return {
        "config": model.model.shape.config,
        "arguments": model.model.shape.arguments,
        "full_attention_layers": model.model.full_layers,
        "cut_from": model.model.cut,
        "servers": {backend: member.about() for backend, member in model.members.items()},
    }


def _times(case: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in case["tpot_ms"].items())
    return f"{times} per token: {_between(case['default_over_pat'], 'x')}"


def _between(spread: Mapping[str, float], unit: str = "") -> str:
    """The median, and the quartiles in brackets."""
    return f"{spread['median']:.3f}{unit} ({spread['low']:.3f} to {spread['high']:.3f})"


def show(data: Mapping[str, Any]) -> None:
    columns = (*BACKENDS, "default / pat", "KV read ratio", "answers equal", "gate")
    table = table_of("ms per output token: median (quartiles)", ("model", "case", *columns))
    for case in data["cases"]:
        read, equal = case["pat_stats"]["kv_read_ratio"], case.get("share_of_answers_equal")
        gate = data["gates"][f"{case['model']}, {case['case']}"]
        too_noisy = "" if gate["noise"] <= MOST_NOISE else ": too noisy"
        table.add_row(
            case["model"],
            case["case"],
            *(_between(case["tpot_spread_ms"][backend]) for backend in BACKENDS),
            _between(case["default_over_pat"]),
            "" if read is None else f"{read:.3f}",
            "" if equal is None else f"{equal:.0%}",
            "passed" if gate["passed"] else f"FAILED{too_noisy}",
        )
    console.print(table)
    for model, found in data.get("conversion", {}).items():
        for tokens, times in found["by_tokens_of_the_pool"].items():
            layer, step = times["layer_us"], times["step_ms"]
            console.print(
                f"{model}: {int(tokens):,} fp8 tokens of a layer are converted in {layer:.0f} us; "
                f"in a step of {found['layers']} layers {step:.2f} ms"
            )


def add_options(parser: argparse.ArgumentParser) -> None:
    models = [name for name in HYBRIDS if name not in (TINY, *LATENT, *LLAMAS)]
    parser.add_argument("--models", nargs="+", default=models, choices=HYBRIDS)
    parser.add_argument("--cases", nargs="+", default=list(_CASES), choices=_CASES)
    add_option(parser, "--rounds", default=3)
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8_e4m3", "fp8_e5m2"),
        default="auto",
        help="of all servers (default: auto)",
    )
    parser.add_argument("--ranks", type=whole_number(1, 64), default=1, metavar="N", help="GPUs")
    parser.add_argument(
        "--dp-attention", action="store_true", help="requests of each rank's own, with --ranks"
    )
    parser.add_argument("--profile", action="store_true", help="time the kernels of a step")
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--seconds")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if args.dp_attention and args.ranks == 1:
        raise Refused("--dp-attention needs several --ranks")
    if args.ranks > max(1, torch.cuda.device_count()):
        raise Refused(f"--ranks {args.ranks} needs as many GPUs, found {torch.cuda.device_count()}")
    for name in () if args.dp_attention else args.models:
        heads = HYBRIDS[name].shape.config["num_attention_heads"]
        if heads % args.ranks:
            raise Refused(f"--ranks {args.ranks}: {name} has {heads} heads; must divide them")
    data: dict[str, Any] = {"meta": metadata(), "models": {}, "cases": [], "gates": {}}
    if args.json and args.json.exists():
        data = earlier(args.json, data["meta"])

    def save(model: Served, about: dict[str, Any]) -> None:
        if not model.measured:
            return
        data["models"][model.name] = about
        done = [(case["model"], case["case"]) for case in model.measured]
        kept = [case for case in data["cases"] if (case["model"], case["case"]) not in done]
        data["cases"] = kept + model.measured
        data["gates"] = gates(data["cases"])
        write(args.json, data)

    failures = measure_all(args, save)
    if args.kv_cache_dtype != "auto" and torch.cuda.is_available():
        data["conversion"] = data.get("conversion", {}) | {
            name: conversion(HYBRIDS[name]) for name in args.models if name in LATENT
        }
        write(args.json, data)
    show(data)
    for failure in failures:
        show_failure(failure)
    missing = {f"{model}, {case}" for model in args.models for case in args.cases} - {
        *data["gates"]
    }
    passed = all(gate["passed"] for gate in data["gates"].values())
    return 0 if passed and not failures and not missing else 1
