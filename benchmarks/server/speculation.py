"""Speculative decoding: time per accepted token, and how much is accepted, pat against FA3.

    python benchmarks/server speculation [--drafts small ngram same eagle] [--quick] [--json FILE]

Drafts come from what has been said (ngram), from a model that is the served one itself (same), from
its first layer (small), from the same with 4 branches (trees), or from that layer as a head on the
model (eagle): SGLang's NGRAM,
STANDALONE and EAGLE. For each there are two servers, of pat and of FA3, with the same tokens to
verify per step, which start together and are asked in turn. What is timed are the steps in which
all requests decode (sglang_pat/bench/decoding.py): the time of a step is the median of a round's,
and what is reported is the median of the rounds, per token that a request gains: each was accepted.
All prompts are in the prefix cache before the clock starts.

Draft models decode by pat on pat's server, and read what was accepted by FA3 on both: one as large
as the model leaves FA3 a fourth of the attention there. The servers of NGRAM copy of a prompt what
SGLang 0.5.23 copies (ngram_tails/): the GPU waits for the copies of 0.5.17, whatever the backend.

Answers are greedy: each token must be the one that the model finds most probable, up to rounding,
when all of the answer is given to it as a prompt. So must answers that stop tokens end, of twice as
many requests as run at once.

--quick: three rounds, all servers at once, some 150 s on an H100.
--model tiny: on a CPU, where SGLang has no kernels for drafts; with `--without-drafts` it shows
that everything else works.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.counters import difference, with_ratio
from common.drafts import (
    ACCEPTANCE_LIMIT,
    DRAFT_TOKENS,
    OFF_RATIO,
    OFF_STEP,
    accepted,
    largest_off,
)
from common.fleet import Member, ask_in_turn, fleet, report_starts, wait, watched
from common.metadata import gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import at_most, write
from common.suites import add_option
from common.terminal import console, table_of
from server.nested_models import write_head, write_nested
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, held_up_ms
from sglang_pat.bench.server import START_SECONDS, Server, Start, contender, sampling_of
from sglang_pat.cli.arguments import whole_number

TOGETHER = ("small", "ngram", "same")
DRAFTS = (*TOGETHER, "eagle", "trees")
NONE = "none"
# Layers of the served models. Those of TOGETHER fit on 80 GB at once. NGRAM waits for the host,
# and `same` for its drafts.
LAYERS = {"small": 15, "ngram": 10, "same": 4, "eagle": 10, "trees": 15, NONE: 4}
NGRAM_TAILS = Path(__file__).parent / "ngram_tails"
BACKENDS = {"pat": {"decode_attention_backend": "pat"}, "default": {}}
TREE = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}  # 3 steps
TIME_LIMIT = 0.6  # pat's time per accepted token over FA3's
CHECKED = 32  # requests
QUICK_START_SECONDS = 120
_CASE = Case(64, 8192, 256, 200)
_TINY_CASE = Case(6, 256, 64, 64)


def speculation(drafts: str, draft: Path | None) -> dict[str, Any]:
    """Server arguments. draft: folder of what drafts, if it is a model."""
    if drafts == NONE:
        return {}
    if drafts == "ngram":
        more = {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}
    else:
        more = {
            "speculative_algorithm": "EAGLE" if drafts == "eagle" else "STANDALONE",
            "speculative_draft_model_path": draft,
            "speculative_num_steps": DRAFT_TOKENS - 1,
            "speculative_eagle_topk": 1,
        }
    tree = TREE if drafts == "trees" else {}
    return {"speculative_num_draft_tokens": DRAFT_TOKENS, **more, **tree}


def measure(members: Mapping[str, Member], case: Case, vocab_size: int, rounds: int) -> Any:
    """Both servers in turn, by backend."""
    prompts = case.prompts(vocab_size)
    servers = {backend: member.server for backend, member in members.items()}
    for server in servers.values():
        server.flush()
        server.generate([prompts[0][: case.prefix]], sampling_of(1))
        # Compiles what is compiled at first use; NGRAM hears what will be said.
        server.generate(prompts, sampling_of(case.generated))
    before, state = servers["pat"].stats(), gpu_state()
    asked = ask_in_turn(list(members.values()), prompts, case.generated, rounds)
    runs = {backend: asked[member.name] for backend, member in members.items()}
    counted, after = difference(servers["pat"].stats(), before), gpu_state()
    answers = {backend: passes[-1].answers for backend, passes in runs.items()}
    off = {
        backend: largest_off(servers["default"], prompts[:CHECKED], each[:CHECKED])
        for backend, each in answers.items()
    }
    return summary(runs) | {
        "off": off,
        "stops": stops(servers, prompts, answers["pat"]),
        "batch": case.batch,
        "prefix": case.prefix,
        "private": case.private,
        "tokens": case.generated,
        "pat_stats": with_ratio(counted),
        "gpu": {"before": state, "after": after},
    }


def summary(runs: Mapping[str, Sequence[DecodeRun]]) -> dict[str, Any]:
    """Sum up the rounds. runs: by backend."""
    steps = {backend: [step_ms(run) for run in passes] for backend, passes in runs.items()}
    gained = {backend: [accepted(run.answers) for run in each] for backend, each in runs.items()}
    rounds = {
        backend: [ms / tokens for ms, tokens in zip(steps[backend], gained[backend], strict=True)]
        for backend in runs
    }
    medians = {backend: statistics.median(times) for backend, times in rounds.items()}
    own, other = (
        [answer["output_ids"] for answer in runs[backend][-1].answers]
        for backend in ("pat", "default")
    )
    return {
        "ms_per_accepted_token": medians,
        "rounds_ms": rounds,
        "held_up_ms": {backend: held_up_ms(passes) for backend, passes in runs.items()},
        "step_ms": {backend: statistics.median(times) for backend, times in steps.items()},
        "pat_over_default": medians["pat"] / medians["default"],
        "accepted_per_step": {backend: statistics.mean(each) for backend, each in gained.items()},
        "same_answers": sum(map(list.__eq__, own, other)) / len(own),
    }


def step_ms(run: DecodeRun) -> float:
    """Time of a step: the observer's time for a token, times the tokens that a step gives it."""
    return run.tpot_ms * accepted(run.answers[:1])


def stops(
    servers: Mapping[str, Server],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Ask pat each prompt twice, with a token from the middle of its answer as the stop token."""
    asked = [*prompts, *prompts]
    sampling = []
    for i in range(len(asked)):
        tokens = answers[i % len(prompts)]["output_ids"]
        stop = tokens[len(tokens) // 6 + i % (len(tokens) // 2)]
        sampling.append(sampling_of(len(tokens)) | {"stop_token_ids": [stop], "ignore_eos": False})
    found = servers["pat"].generate(asked, sampling)
    ends = [each["meta_info"]["finish_reason"]["type"] for each in found]
    return {
        "off": largest_off(servers["default"], asked[-CHECKED:], found[-CHECKED:]),
        "stopped": ends.count("stop") / len(ends),
    }


def gates(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the cases: by name, value, limit and whether it is met."""
    found: dict[str, Any] = {}
    for case in cases:
        name, each = case["drafts"], case["accepted_per_step"]
        apart = abs(each["pat"] / each["default"] - 1)
        limit = max(OFF_RATIO * case["off"]["default"], OFF_STEP)
        found |= {
            f"{name}: time per accepted token over FA3's": at_most(
                case["pat_over_default"], TIME_LIMIT
            ),
            f"{name}: accepted tokens per step, apart from FA3's": at_most(apart, ACCEPTANCE_LIMIT),
            f"{name}: least probable token, behind the best one": at_most(
                case["off"]["pat"], limit
            ),
            f"{name}: the same of answers that were stopped": at_most(case["stops"]["off"], limit),
        }
    return found


def starts(
    drafts: str, target: Path, draft: Path | None, arguments: Mapping[str, Any]
) -> dict[str, Start]:
    """Both servers of one kind of drafts. target: the folder of the model. draft: as above."""
    environment = {}
    if drafts == "ngram":
        paths = (str(NGRAM_TAILS), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    options = {**arguments, **speculation(drafts, draft)}
    return {
        f"{drafts} {backend}": Start(contender(backend), target, options | more, environment)
        for backend, more in BACKENDS.items()
    }


def run_drafts(
    drafts: str, members: Mapping[str, Member], case: Case, vocab: int, rounds: int
) -> Any:
    """Measure both servers of some drafts. Returns `failure` if one does not answer."""
    down = [f"{name}: {each.failure}" for name, each in members.items() if each.failure]
    if down:
        return {"failure": "; ".join(down)}
    with watched(list(members.values()), drafts) as failures:
        about = {backend: member.about() for backend, member in members.items()}
        measured = measure(members, case, vocab, rounds)
        stats = measured["pat_stats"]
        shown = ("verify", "draft", "plans_built", "plans_reused", "private_steps", "kv_read_ratio")
        console.print({name: stats[name] for name in shown if name in stats})
        tokens = speculation(drafts, None).get("speculative_num_draft_tokens", 1)
        return {"drafts": drafts, "draft_tokens": tokens, "servers": about, **measured}
    return {"failure": failures[0]}


def show(data: Mapping[str, Any]) -> None:
    compared = ("pat", "FA3", "pat / FA3", "accepted: pat", "FA3", "off: pat", "FA3")
    table = table_of("ms per accepted token", ("drafts", *compared, "same answers"))
    for case in data["cases"]:
        times, each = case["ms_per_accepted_token"], case["accepted_per_step"]
        table.add_row(
            case["drafts"],
            f"{times['pat']:.3f}",
            f"{times['default']:.3f}",
            f"{case['pat_over_default']:.2f}",
            f"{each['pat']:.2f}",
            f"{each['default']:.2f}",
            f"{case['off']['pat']:.3f}",
            f"{case['off']['default']:.3f}",
            f"{case['same_answers']:.2f}",
        )
    console.print(table)
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.3f}, at most {gate['limit']:.3f}: {met}")


def add_options(parser: argparse.ArgumentParser) -> None:
    layers = whole_number(1, 1000)
    parser.add_argument("--drafts", nargs="+", default=list(TOGETHER), choices=DRAFTS)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument(
        "--layers", type=layers, metavar="N", help=f"of the model (default: {LAYERS})"
    )
    parser.add_argument(
        "--draft-layers", type=layers, default=1, metavar="N", help="of `small` (default: 1)"
    )
    add_option(parser, "--rounds", type=whole_number(3, 1000), default=5)
    parser.add_argument("--quick", action="store_true", help="three rounds, all servers at once")
    parser.add_argument("--without-drafts", action="store_true", help="plain decode")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    rounds = 3 if args.quick else args.rounds
    shape = MODELS[args.model]
    case = _TINY_CASE if shape.name == TINY else _CASE
    drafts = [NONE] if args.without_drafts else args.drafts
    layers = {each: args.layers or LAYERS[each] for each in drafts}
    data: dict[str, Any] = {
        "meta": metadata(),
        "model": shape.config,
        "layers": layers,
        "draft_layers": args.draft_layers,
        "cases": [],
        "failures": {},
        "gates": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-speculation-") as name:
        folder = Path(name)
        models = write_nested(folder, shape.config, [*layers.values()], args.draft_layers)
        small = models[args.draft_layers]
        head = write_head(folder, shape.config) if "eagle" in drafts else None
        arguments = shape.arguments | _shared_device(shape, case)
        groups = [drafts] if args.quick else [[each] for each in drafts]
        patience = QUICK_START_SECONDS if args.quick else START_SECONDS
        for group in groups:
            asked = {}
            for each in group:
                model = models[layers[each]]
                draft = {"same": model, "small": small, "trees": small, "eagle": head}.get(each)
                asked |= starts(each, model, draft, arguments)
            with fleet(asked, folder) as members:
                wait(members.values(), patience)
                report_starts(members.values())
                for each in group:
                    pair = {backend: members[f"{each} {backend}"] for backend in BACKENDS}
                    measured = run_drafts(each, pair, case, shape.vocab_size, rounds)
                    if "failure" in measured:
                        data["failures"][each] = measured["failure"]
                    else:
                        data["cases"].append(measured)
                    data["gates"] = gates(data["cases"])
                    write(args.json, data)
    show(data)
    is_met = all(gate["met"] for gate in data["gates"].values())
    return 0 if is_met and not data["failures"] else 1


def _shared_device(shape: ModelShape, case: Case) -> dict[str, Any]:
    """Arguments of servers that share a device."""
    if shape.name == TINY:
        return {}
    return {
        "load_format": "auto",
        "attention_backend": "fa3",
        "max_total_tokens": case.prefix + case.batch * (case.private + case.generated + 64),
        "max_running_requests": case.batch,
        "mem_fraction_static": 0.95,  # of what the others leave
        "chunked_prefill_size": 2048,
        "sleep_on_idle": True,  # another server is being measured
    }
