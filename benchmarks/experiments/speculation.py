"""Compares pat with FA3 in speculative decoding: acceptance, and time per accepted token.

    python benchmarks/experiments speculation [--drafts NAME ...] [--quick] [--json FILE]

Drafts come from earlier text (ngram) or from a model: the served model itself (same), its first
layer (small), or that layer as a head on the model (eagle). An EAGLE3 head knows only the order of
tokens (eagle3). These are chains of 3 steps. With 4 branches, there are trees of 3 steps from the
first layer (trees), and of 5 steps from the head (deep-trees), as SGLang chooses for a Llama. A
model of 5 random layers drafts blocks, of which 8 tokens are verified (dflash, dspark).

For each kind, a pat server and an FA3 server, with the same tokens to verify per step, start
together and work in turn. The steps in which all requests decode are timed
(sglang_pat/bench/decoding.py). The time of a step is the median of a round, and the result is the
median of the rounds, per accepted token. All prompts are in the prefix cache before the clock
starts. Acceptance is compared on answers for which both servers gave the same tokens, because other
text has other drafts. One request alone, and requests that share nothing, are compared by the time
of a step.

On pat's server, draft models decode with pat, but draft extend is FA3's on both servers. For a
draft model as large as the model, FA3 does a fourth of the attention. NGRAM servers copy as little
of the prompts as SGLang 0.5.23 (ngram_tails/), because with 0.5.17 the GPU would wait for the
copies.

Answers are greedy: each token must be the model's most probable one, up to rounding, when the
answer is given to the model as a prompt. This includes answers that end at stop tokens, of twice as
many requests as run at once. It excludes random drafts, because SGLang accepts 4 tokens of each
block.

--quick: three rounds. As many servers as fit into GPU memory start together; each is measured for
about 40 s. Servers that fail start once more alone. --seconds: begin nothing later. --model tiny:
for a CPU, where SGLang has no kernels for drafts; with `--without-drafts` it tests that everything
else works.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.counters import difference, with_ratio
from common.drafts import (
    ACCEPTANCE_LIMIT,
    OFF_RATIO,
    OFF_STEP,
    accepted,
    largest_off,
)
from common.fleet import (
    Member,
    ask_in_turn,
    fleet,
    groups_that_fit,
    report_starts,
    wait,
    watched,
)
from common.metadata import gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import at_most, write
from common.suites import add_option
from common.terminal import console, show_failure, table_of
from experiments.nested_models import (
    BLOCK_LAYERS,
    write_blocks,
    write_eagle3_head,
    write_head,
    write_nested,
)
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, held_up_ms
from sglang_pat.bench.server import Server, Start, contender, sampling_of
from sglang_pat.cli.arguments import whole_number


class Drafting(NamedTuple):
    """A kind of drafts.

    algorithm: SGLang's name. tokens: tokens to verify per request and step. source: the draft
    model. layers: layers of the served model; with ten, servers of three kinds fit into 80 GB.
    """

    algorithm: str
    steps: int
    topk: int
    tokens: int
    source: str | None
    layers: int


KINDS = {
    "trees": Drafting("STANDALONE", 3, 4, 8, "small", 10),
    "deep-trees": Drafting("EAGLE", 5, 4, 8, "head", 10),
    "dflash": Drafting("DFLASH", 1, 1, 8, "blocks", 10),
    "dspark": Drafting("DSPARK", 1, 1, 8, "blocks", 10),
    "eagle": Drafting("EAGLE", 3, 1, 4, "head", 10),
    "eagle3": Drafting("EAGLE3", 3, 1, 4, "eagle3", 10),
    "ngram": Drafting("NGRAM", 3, 1, 4, None, 10),
    "small": Drafting("STANDALONE", 3, 1, 4, "small", 15),
    "same": Drafting("STANDALONE", 3, 1, 4, "same", 4),
}
HEADS = {"head": write_head, "eagle3": write_eagle3_head}  # sources that are heads of one layer
NONE = "none"
NO_DRAFTS = Drafting("", 0, 0, 1, None, 4)
NGRAM_TAILS = Path(__file__).parent / "ngram_tails"
BACKENDS = {"pat": {"decode_attention_backend": "pat"}, "default": {}}
# Tokens of a block that SGLang is told to accept.
TAKEN = 4
# Limits of pat's over FA3's time per accepted token, and time of a step if nothing is shared.
TIME_LIMIT, ALONE_LIMIT = 0.6, 1.01
CHECKED = 32  # requests
START_SECONDS = 180
FILLED = 16  # tokens tokens of an answer that fills the cache
_CASE = Case(64, 8192, 256, 200)
_ALONE = (Case(1, 0, 1024, 200), Case(64, 0, 384, 112))
_TINY_CASE = Case(6, 256, 64, 64)
_TINY_ALONE = (Case(1, 0, 64, 64), Case(6, 0, 64, 64))
_FREE = 0.95  # of free GPU memory, for servers
_OTHER_GB = 1.8  # per server: CUDA, graphs, activations


def drafting(drafts: str) -> Drafting:
    return NO_DRAFTS if drafts == NONE else KINDS[drafts]


def speculation(drafts: str, draft: Path | None) -> dict[str, Any]:
    """Return server arguments. draft: folder of the draft model, if any."""
    kind = drafting(drafts)
    if drafts == NONE:
        return {}
    common = {
        "speculative_algorithm": kind.algorithm,
        "speculative_num_draft_tokens": kind.tokens,
    }
    if kind.source is None:
        return {**common, "speculative_ngram_max_bfs_breadth": 1}
    common["speculative_draft_model_path"] = draft
    if kind.source == "blocks":
        return {**common, "speculative_draft_load_format": "dummy"}
    return {
        **common,
        "speculative_num_steps": kind.steps,
        "speculative_eagle_topk": kind.topk,
    }


def gigabytes(shape: ModelShape, drafts: str, layers: int, draft_layers: int, slots: int) -> float:
    """Return the approximate GPU memory of both servers. slots: slots of the KV pool."""
    config, kind = shape.config, drafting(drafts)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size, kv_size = (
        config[f"num_{each}_heads"] * config["head_dim"] for each in ("attention", "key_value")
    )
    layer = hidden * (2 * q_size + 2 * kv_size + 3 * inner)
    ends = 2 * config["vocab_size"] * hidden
    drafting_layers = {"small": draft_layers, "same": layers, "blocks": BLOCK_LAYERS}
    drafting_layers |= dict.fromkeys(HEADS, 1)
    more = drafting_layers.get(kind.source or "", 0)
    numbers = (layers + more) * (layer + 2 * kv_size * slots) + ends
    if kind.source == "blocks":
        numbers += BLOCK_LAYERS * hidden**2
    elif more:
        numbers += ends
    return len(BACKENDS) * (2 * numbers / 1e9 + _OTHER_GB)


def measure(
    drafts: str, members: Mapping[str, Member], cases: Sequence[Case], vocab: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Measure both servers in turn. Yield the measurements so far after each case.

    cases: the case with a shared prefix, then those that share nothing.
    """
    case, *alone = cases
    prompts = case.prompts(vocab)
    servers = {backend: member.server for backend, member in members.items()}
    for server in servers.values():
        server.flush()
        server.generate([prompts[0][: case.prefix]], sampling_of(1))
        fill(drafts, server, prompts, case)
    before, state = servers["pat"].stats(), gpu_state()
    runs = in_turn(members, prompts, case, rounds)
    counted, after = difference(servers["pat"].stats(), before), gpu_state()
    found = summary(runs) | {
        "batch": case.batch,
        "prefix": case.prefix,
        "private": case.private,
        "tokens": case.generated,
        "pat_stats": with_ratio(counted),
        "gpu": {"before": state, "after": after},
        "alone": [],
    }
    yield found
    for each in alone:
        found["alone"].append(nothing_shared(drafts, members, each, vocab, rounds))
        yield found
    if drafting(drafts).source == "blocks":
        return
    answers = {backend: passes[-1].answers for backend, passes in runs.items()}
    found["off"] = {
        backend: largest_off(servers["default"], prompts[:CHECKED], each[:CHECKED])
        for backend, each in answers.items()
    }
    found["stops"] = stops(servers, prompts, answers["pat"])
    yield found


def fill(drafts: str, server: Server, prompts: Sequence[Sequence[int]], case: Case) -> None:
    """Fill the cache and compile kernels. NGRAM gets the text from which it drafts."""
    server.generate(prompts, sampling_of(case.generated if drafts == "ngram" else FILLED))


def in_turn(
    members: Mapping[str, Member], prompts: Sequence[Sequence[int]], case: Case, rounds: int
) -> dict[str, list[DecodeRun]]:
    """Return the passes of each server, by backend."""
    asked = ask_in_turn(list(members.values()), prompts, case.generated, rounds)
    return {backend: asked[member.name] for backend, member in members.items()}


def nothing_shared(
    drafts: str, members: Mapping[str, Member], case: Case, vocab: int, rounds: int
) -> dict[str, Any]:
    """Compare the time of a step if nothing is shared. A single request gets twice the rounds."""
    prompts = case.prompts(vocab)
    for member in members.values():
        member.server.flush()
        fill(drafts, member.server, prompts, case)
    runs = in_turn(members, prompts, case, rounds * (2 if case.batch == 1 else 1))
    found = summary(runs)
    steps = found["step_ms"]
    return {
        "case": case.title,
        "step_ms": steps,
        "rounds_step_ms": found["rounds_step_ms"],
        "held_up_ms": found["held_up_ms"],
        "pat_over_default": steps["pat"] / steps["default"],
        "accepted_per_step": found["accepted_per_step"],
    }


def summary(runs: Mapping[str, Sequence[DecodeRun]]) -> dict[str, Any]:
    """Return a summary of the rounds. runs: by backend."""
    steps = {backend: [step_ms(run) for run in passes] for backend, passes in runs.items()}
    gained = {backend: [accepted(run.answers) for run in each] for backend, each in runs.items()}
    rounds = {
        backend: [ms / tokens for ms, tokens in zip(steps[backend], gained[backend], strict=True)]
        for backend in runs
    }
    medians = {backend: statistics.median(times) for backend, times in rounds.items()}
    pairs = [
        pair
        for passes in zip(runs["pat"], runs["default"], strict=True)
        for pair in zip(*(run.answers for run in passes), strict=True)
    ]
    same = [(own, other) for own, other in pairs if own["output_ids"] == other["output_ids"]]
    return {
        "ms_per_accepted_token": medians,
        "rounds_ms": rounds,
        "held_up_ms": {backend: held_up_ms(passes) for backend, passes in runs.items()},
        "step_ms": {backend: statistics.median(times) for backend, times in steps.items()},
        "rounds_step_ms": steps,
        "pat_over_default": medians["pat"] / medians["default"],
        "accepted_per_step": {backend: statistics.mean(each) for backend, each in gained.items()},
        "same_answers": len(same) / len(pairs),
        "accepted_in_same_answers": {
            backend: accepted(each)
            for backend, each in zip(("pat", "default"), zip(*same, strict=True), strict=False)
        },
    }


def step_ms(run: DecodeRun) -> float:
    """Return the time of a step: the observer's time per token times its tokens per step."""
    return run.tpot_ms * accepted(run.answers[:1])


def stops(
    servers: Mapping[str, Server],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Send pat each prompt twice, with a token from the middle of the answer as stop token."""
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
    """Return the gates of the cases: name -> value, limit and whether it is met."""
    found: dict[str, Any] = {}
    for case in cases:
        name, each = case["drafts"], case["accepted_in_same_answers"]
        apart = abs(each["pat"] / each["default"] - 1) if each else math.inf
        found |= {
            f"{name}: time per accepted token over FA3's": at_most(
                case["pat_over_default"], TIME_LIMIT
            ),
            f"{name}: accepted tokens per step in the same answers, apart from FA3's": at_most(
                apart, ACCEPTANCE_LIMIT
            ),
        }
        for alone in case["alone"]:
            found[f"{name}: time of a step over FA3's, {alone['case']}"] = at_most(
                alone["pat_over_default"], ALONE_LIMIT
            )
        if "off" not in case:
            continue
        limit = max(OFF_RATIO * case["off"]["default"], OFF_STEP)
        found |= {
            f"{name}: least probable token, behind the best one": at_most(
                case["off"]["pat"], limit
            ),
            f"{name}: the same of answers that were stopped": at_most(case["stops"]["off"], limit),
        }
    return found


def starts(
    drafts: str, target: Path, draft: Path | None, arguments: Mapping[str, Any]
) -> dict[str, Start]:
    """Return both servers of a kind of drafts. target: model folder. draft: as above."""
    environment = {}
    if drafts == "ngram":
        paths = (str(NGRAM_TAILS), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if drafting(drafts).source == "blocks":
        environment["SGLANG_SIMULATE_ACC_LEN"] = str(TAKEN)
    options = {**arguments, **speculation(drafts, draft)}
    return {
        f"{drafts} {backend}": Start(contender(backend), target, options | more, environment)
        for backend, more in BACKENDS.items()
    }


def run_drafts(
    drafts: str,
    members: Mapping[str, Member],
    cases: Sequence[Case],
    vocab: int,
    rounds: int,
    data: dict[str, Any],
    path: Path | None,
) -> None:
    """Measure both servers of a kind of drafts, and write the measurements.

    A failure is written too.
    """
    down = [f"{name}: {each.failure}" for name, each in members.items() if each.failure]
    if down:
        data["failures"][drafts] = "; ".join(down)
        return
    with watched(list(members.values()), drafts) as failures:
        about = {backend: member.about() for backend, member in members.items()}
        described = {"drafts": drafts, "draft_tokens": drafting(drafts).tokens, "servers": about}
        place = len(data["cases"])
        for measured in measure(drafts, members, cases, vocab, rounds):
            data["cases"][place:] = [described | measured]
            data["gates"] = gates(data["cases"])
            write(path, data)
        stats = data["cases"][place]["pat_stats"]
        shown = (
            "verify",
            "draft",
            "plans_built",
            "plans_reused",
            "steps_without_sharing",
            "kv_read_ratio",
        )
        console.print({name: stats[name] for name in shown if name in stats})
    if failures:
        data["failures"][drafts] = failures[0]


def show(data: Mapping[str, Any]) -> None:
    compared = ("pat", "FA3", "pat / FA3", "accepted: pat", "FA3", "off: pat", "FA3")
    table = table_of("ms per accepted token", ("drafts", *compared, "same answers"))
    for case in data["cases"]:
        times, each = case["ms_per_accepted_token"], case["accepted_per_step"]
        off = case.get("off", {"pat": math.nan, "default": math.nan})
        table.add_row(
            case["drafts"],
            f"{times['pat']:.3f}",
            f"{times['default']:.3f}",
            f"{case['pat_over_default']:.2f}",
            f"{each['pat']:.2f}",
            f"{each['default']:.2f}",
            f"{off['pat']:.3f}",
            f"{off['default']:.3f}",
            f"{case['same_answers']:.2f}",
        )
    console.print(table)
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.3f}, at most {gate['limit']:.3f}: {met}")
    for name, failure in data["failures"].items():
        show_failure(f"{name}: {failure}")


def add_options(parser: argparse.ArgumentParser) -> None:
    layers = whole_number(1, 1000)
    parser.add_argument("--drafts", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    default = {name: kind.layers for name, kind in KINDS.items()}
    parser.add_argument(
        "--layers", type=layers, metavar="N", help=f"of the model (default: {default})"
    )
    parser.add_argument(
        "--draft-layers",
        type=layers,
        default=1,
        metavar="N",
        help="of `small` and `trees` (default: 1)",
    )
    add_option(parser, "--rounds", type=whole_number(3, 1000), default=5)
    add_option(parser, "--seconds")
    add_option(parser, "--start-seconds", default=START_SECONDS)
    parser.add_argument("--quick", action="store_true", help="three rounds, servers at once")
    parser.add_argument("--without-drafts", action="store_true", help="plain decode")
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    begun = time.monotonic()
    rounds = 3 if args.quick else args.rounds
    shape = MODELS[args.model]
    cases = (_TINY_CASE, *_TINY_ALONE) if shape.name == TINY else (_CASE, *_ALONE)
    drafts = [NONE] if args.without_drafts else args.drafts
    layers = {each: args.layers or drafting(each).layers for each in drafts}
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
        sources = {each: drafting(each).source for each in drafts}
        heads = {
            source: write(folder, shape.config)
            for source, write in HEADS.items()
            if source in sources.values()
        }
        arguments = shape.arguments | _shared_device(shape, cases)

        def starts_of(each: str) -> dict[str, Start]:
            model = models[layers[each]]
            drafters = {"same": model, "small": models[args.draft_layers], **heads}
            draft = drafters.get(sources[each] or "")
            if sources[each] == "blocks":
                draft = write_blocks(
                    folder, shape.config, layers[each], KINDS[each].tokens, KINDS[each].algorithm
                )
            return starts(each, model, draft, arguments)

        slots = arguments["max_total_tokens"]
        needs = {
            each: (
                len(BACKENDS),
                gigabytes(shape, each, layers[each], args.draft_layers, slots),
            )
            for each in drafts
        }
        free = _FREE * _free_gigabytes() if args.quick else 0.0
        groups = groups_that_fit(needs, free)
        for group in groups:
            if time.monotonic() - begun > args.seconds:
                late = f"not begun: {args.seconds:.0f} s were over"
                data["failures"] |= {each: data["failures"].get(each, late) for each in group}
                continue
            asked = {name: start for each in group for name, start in starts_of(each).items()}
            with fleet(asked, folder) as members:
                wait(members.values(), args.start_seconds)
                report_starts(members.values())
                for each in group:
                    data["failures"].pop(each, None)
                    pair = {backend: members[f"{each} {backend}"] for backend in BACKENDS}
                    if time.monotonic() - begun > args.seconds:
                        data["failures"][each] = f"not asked: {args.seconds:.0f} s were over"
                        continue
                    run_drafts(each, pair, cases, shape.vocab_size, rounds, data, args.json)
                    started = all(one.start_seconds is not None for one in pair.values())
                    if not started and len(group) > 1:
                        groups.append([each])  # tries it once more, alone
            console.print(f"{', '.join(group)}: {time.monotonic() - begun:.0f} s since the start")
            write(args.json, data)
    write(args.json, data)
    show(data)
    is_met = all(gate["met"] for gate in data["gates"].values())
    return 0 if is_met and data["gates"] and not data["failures"] else 1


def _free_gigabytes() -> float:
    if not torch.cuda.is_available():
        return math.inf
    return float(torch.cuda.mem_get_info()[0]) / 1e9


def _shared_device(shape: ModelShape, cases: Sequence[Case]) -> dict[str, Any]:
    """Return arguments of servers that share a device."""
    if shape.name == TINY:
        return {"skip_tokenizer_init": True}
    tokens = [each.prefix + each.batch * (each.private + each.generated + 64) for each in cases]
    sizes = sorted({each.batch for each in cases})
    return {
        "load_format": "auto",
        "attention_backend": "fa3",
        "max_total_tokens": max(tokens),
        "max_running_requests": max(sizes),
        "mem_fraction_static": 0.98,  # of free memory; max_total_tokens limits the pool
        "chunked_prefill_size": 2048,
        "cuda_graph_bs_decode": [*sizes[:1], 16, *sizes[1:]],
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,  # does not disturb the measured server
    }
