"""Compares servers with pat and with SGLang's other backends.

    python benchmarks/server compare [--scenarios long-8b 70b-tp4] [--rounds N] [--seconds N]
        [--json FILE]

A scenario (scenarios.py) has the servers of one model and the batches that they run. As many
servers as fit on the GPU start at the same time and share it: one at a time works while the others
sleep. If those of a scenario do not fit together, they run one after the other.

Prompts are prefilled once, and the steps in which all requests decode are timed
(sglang_pat/bench/decoding.py). In every round each server runs once. A ratio is the median over
slices that begin at the same token, and a gate may be missed by two of its standard errors.

Then every server answers the same prompts greedily. Weights are random and of unit scale, so that
answers depend on attention. Two tokens tie if their log-probabilities in the reference differ by at
most twice the servers' difference while their answers are still equal. In models with experts,
another rounding may choose another expert. So the first of the other servers also answers in two
halves of the batch, and pat's answers may differ without a tie twice as often as these two runs do.

If a server fails, the others go on. After --seconds, no measurement begins. The file of --json is
written after each batch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from common import random_weights
from common.counters import difference, with_ratio
from common.fleet import (
    SHARED_GPU,
    Member,
    ask_in_turn,
    fill_all,
    fleet,
    groups_that_fit,
    heads_of,
    report_starts,
    times_of,
    wait,
    watched,
)
from common.metadata import gpu_state, metadata
from common.models import TINY
from common.results import at_least, at_most, write
from common.suites import Refused, add_option
from common.terminal import console, show_failure, table_of
from server import jobs
from server.jobs import Job
from server.scenarios import BACKENDS, SCENARIOS, Batch, Scenario, on_cpu
from server.shapes import CONTEXT, SHAPES
from sglang_pat.bench.answers import Answer, agreement, with_candidates
from sglang_pat.bench.decoding import DecodeRun, ratio
from sglang_pat.bench.server import START_SECONDS, Start, sampling_of
from sglang_pat.model_config import decoder_config
from sglang_pat.model_layers import read_layers
from sglang_pat.sglang.cpu import cuda_driver_is_present
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.models import GPUS

# Tokens at a prompt's end that are prefilled each time. A cache of recurrent states has states only
# at multiples of its chunks, so prefix and private tokens are such multiples.
TAIL = 2
ANSWER_TOKENS, CANDIDATES = 32, 5
TIE_RATIO = 2.0
MOST_TIE = {True: 2.0, False: 0.5}  # largest tie, by whether the KV cache is fp8

_OTHER_BYTES = 4e9  # per server: context, graphs, workspaces
_SHARE = 0.9  # of GPU memory, for servers
_ENVIRONMENT = {
    # SGLang would report the memory of other servers on a GPU as an error.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}


def arguments_of(scenario: Scenario) -> dict[str, Any]:
    """Return server arguments that make the pool and the graphs large enough for each batch."""
    shape = SHAPES[scenario.shape]
    cases = [batch.case for batch in scenario.batches]
    pools = [case.pool_tokens + case.batch * (TAIL + ANSWER_TOKENS) for case in cases]
    groups = scenario.dp_groups
    batches = sorted({size for case in cases for size in (case.batch, -(-case.batch // groups))})
    if scenario.jobs:
        pools.append(jobs.POOL_TOKENS)
        batches = [1, 2, 4, 8, *range(16, jobs.MAX_RUNNING + 1, 16)]
    found = {
        "max_total_tokens": max(pools) if scenario.jobs else round(1.1 * max(pools)) + 16_384,
        "max_running_requests": batches[-1],
    }
    if scenario.shape == TINY:
        return found | shape.arguments | {"skip_tokenizer_init": True}
    found |= SHARED_GPU | {
        "chunked_prefill_size": jobs.CHUNK,
        "context_length": CONTEXT,
        "cuda_graph_bs_decode": batches,
    }
    if any("linear" in name for name in shape.config):
        # SGLang counts five states per running request, including those of cached prompts.
        found["max_mamba_cache_size"] = 5 * batches[-1]
    return found | shape.arguments | scenario.arguments


def server_bytes(scenario: Scenario) -> float:
    """Return the approximate memory of a server on each of its GPUs."""
    arguments = arguments_of(scenario)
    time_of_step = StepTime.of_model(
        decoder_config(SHAPES[scenario.shape].config),
        GPUS["H100"],
        scenario.gpus,
        kv_cache_dtype=arguments.get("kv_cache_dtype", "auto"),
        dp=scenario.dp_groups,
    )
    pool = time_of_step.kv_bytes_per_token * arguments["max_total_tokens"]
    states = arguments.get("max_mamba_cache_size", 0) * len(time_of_step.layers) * 2e6
    return time_of_step.held_weight_bytes + pool + states + _OTHER_BYTES


Group = list[tuple[str, tuple[str, ...]]]  # (scenario, backends) whose servers start together


def groups_of(scenarios: Mapping[str, Scenario], memory: float) -> list[Group]:
    """Divide the servers into groups that start together, in the order of the scenarios.

    memory: memory of a GPU, in bytes. Servers of a scenario that do not fit together are split.
    """
    groups: list[Group] = []
    for _, several in groupby(scenarios.items(), lambda each: each[1].gpus):
        needs: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
        for name, scenario in several:
            count, need = len(scenario.backends), server_bytes(scenario)
            if count * need <= memory:
                needs[name, scenario.backends] = count, count * need
            else:
                needs |= {(name, (backend,)): (1, need) for backend in scenario.backends}
        groups += groups_that_fit(needs, memory)
    return groups


class Measured:
    """Passes and answers of one scenario, by batch and backend."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self.name = name
        self.scenario = scenario
        self.servers: dict[str, Any] = {}
        self.runs: dict[str, dict[str, list[DecodeRun]]] = {}
        self.answers: dict[str, dict[str, list[Answer]]] = {}
        self.more: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}

    def prompts(self, batch: Batch) -> list[list[int]]:
        """Return the prompts. All tokens but the TAIL are in the cache."""
        cached = batch.case.prompts(SHAPES[self.scenario.shape].vocab_size)
        return [prompt + prompt[:TAIL] for prompt in cached]

    def measure(self, asked: Batch | Job, members: Mapping[str, Member], rounds: int) -> None:
        """Run a batch or a job on the servers, in turn."""
        if isinstance(asked, Job):
            self._time_job(asked, members, rounds)
        else:
            self._time_batch(asked, members, rounds)

    def _time_job(self, job: Job, members: Mapping[str, Member], rounds: int) -> None:
        entry, requests = jobs.described(job, SHAPES[self.scenario.shape])
        for member in members.values():
            jobs.warm_up(member.server, requests)
        entry = self.jobs.setdefault(job.name, entry | {"scenario": self.name})
        for _ in range(rounds):
            for name, member in members.items():
                state = gpu_state()
                run = asdict(jobs.run_job(member.server, requests))
                gpu = {"before": state, "after": gpu_state()}
                entry["measured"].setdefault(name, []).append(run | {"gpu": gpu})

    def _time_batch(self, batch: Batch, members: Mapping[str, Member], rounds: int) -> None:
        """Fill the caches, time the passes, and compare greedy answers."""
        prompts, case = self.prompts(batch), batch.case
        # The groups get requests in turn, so that each gets every prefix.
        heads = [head for head in heads_of(case, prompts) for _ in range(self.scenario.dp_groups)]
        cached = [prompt[:-TAIL] for prompt in prompts]
        in_turn = self.scenario.gpus > 1
        filled = fill_all([*members.values()], prompts, heads, cached, in_turn=in_turn)
        alive = {name: each for name, each in members.items() if each.failure is None}
        before = {name: each.server.stats() for name, each in alive.items()}
        state = gpu_state()
        asked = ask_in_turn([*alive.values()], prompts, case.generated, rounds)
        more = self.more.setdefault(batch.name, {})
        seconds = {name: filled[each.name] for name, each in alive.items()}
        more.setdefault("fill_seconds", {}).update(seconds)
        gpu = {"before": state, "after": gpu_state()}
        for name, member in alive.items():
            self.runs.setdefault(batch.name, {})[name] = asked[member.name]
            more.setdefault("gpu", {})[name] = gpu
            if before[name]:
                counted = difference(member.server.stats(), before[name])
                more.setdefault("stats", {})[name] = with_ratio(counted)
        answers = self.answers.setdefault(batch.name, {})
        for name, member in alive.items():
            answers[name] = answered(member, prompts)
        other = next((name for name in alive if name != self.scenario.backends[0]), None)
        if other is not None:
            middle = len(prompts) // 2
            halves = (prompts[:middle], prompts[middle:])
            again = [answer for half in halves if half for answer in answered(alive[other], half)]
            more["own_answers"] = {
                other: compared(again, answers[other], self._most_tie(other)),
            }

    def about(self) -> dict[str, Any]:
        """Return a description of the model and its servers, for the result."""
        shape = SHAPES[self.scenario.shape]
        return {
            "model": self.scenario.shape,
            "config": shape.config,
            "cut_from": shape.cut,
            "arguments": arguments_of(self.scenario),
            "servers": self.servers,
        }

    def _most_tie(self, backend: str) -> float:
        several = [
            self.scenario,
            *(BACKENDS[each] for each in (self.scenario.backends[0], backend)),
        ]
        return MOST_TIE[any("kv_cache_dtype" in each.arguments for each in several)]

    def cases(self) -> list[dict[str, Any]]:
        """Return the results of each batch."""
        pat = self.scenario.backends[0]
        found = []
        for batch in self.scenario.batches:
            runs = self.runs.get(batch.name)
            if not runs:
                continue
            answers = self.answers.get(batch.name, {})
            case = batch.case
            others = [name for name in runs if name != pat and pat in runs]
            found.append(
                {
                    "scenario": self.name,
                    "model": self.scenario.shape,
                    "case": batch.name,
                    "least": batch.least,
                    "pat": pat,
                    "batch": case.batch,
                    "groups": case.groups,
                    "prefix": case.prefix,
                    "private": case.private,
                    "generated": case.generated,
                    **times_of(runs),
                    "over_pat": {name: ratio(runs[name], runs[pat]).as_dict() for name in others},
                    "answers": {
                        name: compared(answers[pat], answers[name], self._most_tie(name))
                        for name in others
                        if pat in answers and name in answers
                    },
                    **self.more.get(batch.name, {}),
                }
            )
        return found


def answered(member: Member, prompts: list[list[int]]) -> list[Answer]:
    """Return a server's greedy answers, with the most probable tokens at each position."""
    sampling = sampling_of(ANSWER_TOKENS)
    found = member.server.generate(prompts, sampling, **with_candidates(CANDIDATES))
    return [Answer.parse(each) for each in found]


def compared(
    answers: Sequence[Answer], reference: Sequence[Answer], most_tie: float
) -> dict[str, Any]:
    """Compare greedy answers up to near ties, and log-probabilities where they are equal."""
    apart = [
        abs(one.logprob - other.logprob)
        for answer, expected in zip(answers, reference, strict=True)
        for position, (token, same) in enumerate(zip(answer.tokens, expected.tokens, strict=True))
        if answer.tokens[: position + 1] == expected.tokens[: position + 1]
        for one in answer.candidates[position]
        for other in expected.candidates[position]
        if one.token == other.token == token == same
    ]
    tie = min(most_tie, TIE_RATIO * max(apart, default=0.0))
    found = agreement(answers, reference, tie)
    return {
        **found.as_dict(),
        "equal": found.requests - len(found.partings),
        "tie": tie,
        "mean_difference": sum(apart) / len(apart) if apart else None,
        "largest_difference": max(apart, default=None),
    }


def gates(scenarios: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return gates of cases and servers: name -> value, limit and whether it is met."""
    found: dict[str, Any] = {}
    for case in cases:
        name = f"{case['scenario']}, {case['case']}"
        for other, spread in case["over_pat"].items():
            if case["least"] is not None:
                noise = 2 * (spread["error"] or 0.0)
                gate = at_least(spread["median"], case["least"], noise=noise)
                found[f"{name}: {other} / pat"] = gate
        own = sum(len(each["errors"]) for each in case.get("own_answers", {}).values())
        for other, compared_with in case["answers"].items():
            errors = len(compared_with["errors"])
            found[f"{name}: answers that part from {other}'s, no tie"] = at_most(errors, 2 * own)
        if case["prefix"]:
            # If the prefix was not in the cache, the comparison is not valid.
            cached = min(case["share_of_prompts_cached"].values())
            found[f"{name}: part of the prompts in the cache"] = at_least(cached, 0.9)
    for name, scenario in scenarios.items():
        arguments = scenario["arguments"]
        layers = read_layers(scenario["config"], arguments.get("tp_size", 1))
        expected = sum(layer.is_accelerated for layer in layers)
        for server, about in scenario["servers"].items():
            if "pat" in about:
                gate = at_least(about["pat"]["pat_layers"], expected)
                found[f"{name}, {server}: layers that pat decodes"] = gate
    return found


class _Session:
    """Starts groups of servers and measures them, until the time is over."""

    def __init__(self, args: argparse.Namespace, data: dict[str, Any]) -> None:
        on_gpu = cuda_driver_is_present()
        chosen = {name: SCENARIOS[name] for name in args.scenarios}
        self.args = args
        self.data = data
        self.measured = {
            name: Measured(name, each if on_gpu else on_cpu(each)) for name, each in chosen.items()
        }
        self._begun = time.monotonic()
        self._failures: list[str] = []

    def run(self, folder: Path) -> list[str]:
        """Measure everything, and return what failed."""
        memory = float(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 1e18
        scenarios = {name: each.scenario for name, each in self.measured.items()}
        environment = _ENVIRONMENT | random_weights.install(folder)
        for number, group in enumerate(groups_of(scenarios, _SHARE * memory)):
            if self._is_late(", ".join(name for name, _ in group)):
                continue
            path = folder / str(number)
            path.mkdir()
            self._ask_group(group, path, environment)
        return self._failures

    def _ask_group(self, group: Group, folder: Path, environment: dict[str, str]) -> None:
        starts: dict[str, Start] = {}
        for name, backends in group:
            scenario = self.measured[name].scenario
            model = SHAPES[scenario.shape].write(folder / name)
            for backend in backends:
                kind, arguments = BACKENDS[backend], arguments_of(scenario)
                if scenario.shape == TINY and not kind.contender.is_pat:
                    pages = {key: value for key, value in kind.arguments.items() if "page" in key}
                    kind = replace(kind, backend="torch_native", arguments=pages)
                start = Start(kind.contender, model, arguments | kind.arguments, environment)
                starts[f"{name} {backend}"] = start
        console.print(f"[{self._took():.0f} s] starting {', '.join(starts)}")
        with fleet(starts, folder) as members:
            wait(members.values(), self.args.start_seconds)
            report_starts(members.values())
            asked = {
                name: {backend: members[f"{name} {backend}"] for backend in backends}
                for name, backends in group
            }
            for name, of_scenario in asked.items():
                for backend, member in of_scenario.items():
                    if member.failure is None:
                        with watched([member], member.name):
                            self.measured[name].servers[backend] = member.about()
            self._each(asked)
            self._failures += [
                f"{member.name}: {member.failure}" for member in members.values() if member.failure
            ]

    def _each(self, asked: Mapping[str, Mapping[str, Member]]) -> None:
        """Measure the first batches of all scenarios, then the second ones, and so on."""
        longest = max(len(self.measured[name].scenario.asked) for name in asked)
        for number in range(longest):
            for name, members in asked.items():
                batches = self.measured[name].scenario.asked
                if number >= len(batches):
                    continue
                batch = batches[number]
                self._ask(name, batch, members)
                self._tell(name, batch.name)

    def _ask(
        self,
        name: str,
        batch: Batch | Job,
        members: Mapping[str, Member],
    ) -> None:
        """Measure. If a server fails, measure again without that server."""
        up = {key: each for key, each in members.items() if each.failure is None}
        while up and not self._is_late(f"{name}, {batch.name}"):
            with watched([*up.values()], f"{name}, {batch.name}") as failures:
                self.measured[name].measure(batch, up, self.args.rounds)
            self._failures += failures
            self.save()
            before, up = up, {key: each for key, each in up.items() if each.failure is None}
            if not failures or len(up) == len(before):
                return

    def _tell(self, scenario: str, name: str) -> None:
        line = f"[{self._took():.0f} s] {scenario}, {name}"
        for case in self.data["cases"]:
            if (case["scenario"], case["case"]) == (scenario, name):
                times = {key: round(ms, 3) for key, ms in case["tpot_ms"].items()}
                over = {key: round(each["median"], 3) for key, each in case["over_pat"].items()}
                line += f": {times} ms, over pat {over}"
        for job in self.data["jobs"]:
            if (job["scenario"], job["job"]) == (scenario, name):
                line += f": {_seconds(job)} s, predicted {job['predicted_seconds']}"
        console.print(line, markup=False)

    def save(self) -> None:
        data = self.data
        data["scenarios"] = {name: each.about() for name, each in self.measured.items()}
        data["cases"] = [case for each in self.measured.values() for case in each.cases()]
        data["jobs"] = [job for each in self.measured.values() for job in each.jobs.values()]
        data["gates"] = gates(data["scenarios"], data["cases"]) | jobs.gates(data["jobs"])
        write(self.args.json, data)

    def _is_late(self, what: str) -> bool:
        late: bool = self._took() > self.args.seconds
        if late:
            self._failures.append(f"{what}: not begun in time")
        return late

    def _took(self) -> float:
        return time.monotonic() - self._begun


def _seconds(job: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: round(statistics.median(run["seconds"] for run in runs), 2)
        for name, runs in job["measured"].items()
    }


def show(data: Mapping[str, Any]) -> None:
    columns = ("scenario", "case", "ms per output token", "over pat", "answers equal, ties, errors")
    table = table_of("servers, asked in turn", columns, words=columns)
    for case in data["cases"]:
        table.add_row(
            case["scenario"],
            case["case"],
            ", ".join(f"{name} {ms:.3f}" for name, ms in case["tpot_ms"].items()),
            ", ".join(f"{name} {each['median']:.3f}" for name, each in case["over_pat"].items()),
            ", ".join(
                f"{name} {each['equal']}, {each['ties']}, {len(each['errors'])}"
                for name, each in case["answers"].items()
            ),
        )
    if data["cases"]:
        console.print(table)
    for job in data["jobs"]:
        console.print(f"{job['job']}: {_seconds(job)} s, predicted {job['predicted_seconds']}")
    for name, gate in data["gates"].items():
        if not gate["met"]:
            show_failure(f"{name}: {gate['value']:.3f}, limit {gate['limit']}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="+", required=True, choices=SCENARIOS)
    add_option(parser, "--rounds", default=3)
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--seconds")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    found = torch.cuda.device_count()
    for name in args.scenarios:
        needed = SCENARIOS[name].gpus
        if found and needed > found:
            raise Refused(f"--scenarios {name}: needs {needed} GPUs, found {found}")
    data: dict[str, Any] = {
        "meta": metadata(),
        "scenarios": {},
        "cases": [],
        "jobs": [],
        "gates": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as folder:
        session = _Session(args, data)
        failures = session.run(Path(folder))
        session.save()
    show(data)
    for failure in failures:
        show_failure(failure)
    passed = data["gates"] and all(gate["met"] for gate in data["gates"].values())
    return 0 if passed and not failures else 1
