"""SGLang's server, pat against FA3, in minutes: all servers start at once and share a GPU.

    python benchmarks/server gates [--parts unshared shared fp8 rank sharing] [--whole]
        [--seconds N] [--json FILE] [--sharing-json FILE]

The Llama-3-8B shape with a part of its layers, and the shape of one of the eight ranks of a 70B
model with a part of its layers, so that the servers fit on one GPU. What is timed are the steps in
which all requests decode (sglang_pat/bench/decoding.py), in rounds in which every server is asked
once. A ratio of two servers is the median over the rounds of the ratios of their medians.

For gates in milliseconds of a whole model, `projected_ms` adds the missing layers: each takes the
time between two layers in a profile of the same steps, from the attention of one to that of the
next. It is no measurement of a whole model. With --whole the Llama-3-8B shape has all its layers:
two servers of it fill an H100, so the other parts are asked for apart.

Parts: nothing shared; prefixes shared; e4m3 KV against bfloat16; the rank; and when it pays, by
batch and share of common KV (for `plot sharing`). With --seconds nothing is begun after so many.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.counters import difference, with_ratio
from common.fleet import (
    SHARED_GPU,
    Member,
    answers_equal,
    ask_in_turn,
    fill_all,
    fleet,
    heads_of,
    report_starts,
    times_of,
    wait,
    watched,
)
from common.metadata import gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import at_least, at_most, write
from common.suites import Refused, add_option
from common.terminal import console, show_failure, table_of
from kernel.sharing import Cell
from kernel.sharing import show as show_sharing
from server.kernel_times import kernel_times, layer_us, trace
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, held_up_ms, tpot
from sglang_pat.bench.server import START_SECONDS, Start, contender
from sglang_pat.output_file import output_file
from sglang_pat.sglang.cpu import cuda_driver_is_present

PARTS = ("unshared", "shared", "fp8", "rank", "sharing")
TOKENS = 56  # of an answer
PROFILED_STEPS = 8
TRACE_SECONDS = 15
FP8_LIMIT = 0.9  # pat with e4m3 KV over pat with bfloat16
# A run cannot tell apart ratios of two medians that differ by less.
NOISE = 0.01
# When it pays. A batch of 128 that shares nothing is among the questions.
CONTEXT = 1024
SHARES = ((128, 0.5), (128, 0.9), (16, 0.0), (16, 0.5), (16, 0.9))

_LLAMA_LAYERS, _RANK_LAYERS = 16, 32
_WHOLE = {"llama-3-8b": 32, "llama-3-70b-rank": 80}


@dataclass(frozen=True, slots=True)
class Question:
    """A batch, and what has to hold.

    Attributes
    ----------
    part
        One of PARTS.
    model
        Whose servers are asked.
    prompts
        Token ids; all but the last token of each is in the cache.
    heads
        Prefixes that fill the cache first.
    whole_ms
        Of the whole model: the largest time per token allowed, if there is a limit.
    """

    name: str
    part: str
    model: str
    prompts: list[list[int]]
    heads: list[Sequence[int]]
    whole_ms: float | None = None

    @classmethod
    def of_case(
        cls, name: str, part: str, model: ModelShape, case: Case, whole_ms: float | None = None
    ) -> Question:
        prompts = case.prompts(model.vocab_size)
        return cls(name, part, model.name, prompts, heads_of(case, prompts), whole_ms)


def ragged(batch: int, vocab_size: int) -> list[list[int]]:
    """Lengths as of a chat service: lognormal, a median of 300 tokens, at most 3,000."""
    source = random.Random(0)
    lengths = [min(3000, max(16, round(source.lognormvariate(5.7, 0.8)))) for _ in range(batch)]
    return [source.choices(range(256, vocab_size - 256), k=length) for length in lengths]


def _cut(name: str, shape: ModelShape, layers: int, **changes: Any) -> ModelShape:
    config = shape.config | {"num_hidden_layers": layers, "max_position_embeddings": 131072}
    arguments = SHARED_GPU | {
        "context_length": 101_000,
        "max_running_requests": 256,
        "cuda_graph_bs_decode": [1, 4, 8, 16, 64, 128, 200, 256],
    }
    return ModelShape(name, config | changes, arguments)


def models(whole: bool = False) -> dict[str, ModelShape]:
    """Return the models of this machine, by name. whole: the first one with all its layers."""
    if not cuda_driver_is_present():
        return {TINY: MODELS[TINY]}
    llama = MODELS["llama-3-8b"]
    found = (
        _cut("llama-3-8b", llama, _WHOLE["llama-3-8b"] if whole else _LLAMA_LAYERS),
        # Its part of the vocabulary too.
        _cut(
            "llama-3-70b-rank",
            llama,
            _RANK_LAYERS,
            hidden_size=8192,
            intermediate_size=3584,
            num_attention_heads=8,
            num_key_value_heads=1,
            vocab_size=16032,
            bos_token_id=16000,
            eos_token_id=16001,
        ),
    )
    return {shape.name: shape for shape in found}


def starts(parts: Sequence[str], folder: Path) -> dict[str, Start]:
    """The servers that parts need, by model and backend. folder: has a folder of each model."""
    if not cuda_driver_is_present():
        arguments = MODELS[TINY].arguments | {"skip_tokenizer_init": True}
        return {
            f"{TINY} {backend}": Start(contender(backend), folder / TINY, arguments, {})
            for backend in ("pat", "torch_native")
        }
    shapes = models()
    found: dict[str, Start] = {}

    def add(name: str, model: str, backend: str, tokens: int, **more: Any) -> None:
        arguments = shapes[model].arguments | {"max_total_tokens": tokens, **more}
        found[f"{model} {name}"] = Start(contender(backend), folder / model, arguments, {})

    if set(parts) != {"rank"}:
        add("pat", "llama-3-8b", "pat", 140_000)
        add("fa3", "llama-3-8b", "fa3", 140_000)
    if "fp8" in parts:
        add("pat fp8", "llama-3-8b", "pat", 140_000, kv_cache_dtype="fp8_e4m3")
    if "rank" in parts:
        add("pat", "llama-3-70b-rank", "pat", 140_000)
        add("fa3", "llama-3-70b-rank", "fa3", 140_000)
    return found


def questions(parts: Sequence[str]) -> list[Question]:
    """In the order in which they are asked."""
    shapes = models()
    if TINY in shapes:
        tiny = shapes[TINY]
        found = [
            Question.of_case("6 x 60", "unshared", tiny, Case(6, 0, 60, TOKENS)),
            Question.of_case("6 x (100 shared) + 10", "shared", tiny, Case(6, 100, 10, TOKENS)),
        ]
        return [each for each in found if each.part in parts]
    llama, rank = shapes["llama-3-8b"], shapes["llama-3-70b-rank"]

    def unshared(part: str, shape: ModelShape, batch: int, tokens: int) -> Question:
        case = Case(batch, 0, tokens, TOKENS)
        return Question.of_case(f"{batch} x {tokens:,}", part, shape, case)

    def shared(part: str, shape: ModelShape, case: Case, whole_ms: float | None) -> Question:
        groups = f"{case.groups} x " if case.groups > 1 else ""
        name = f"{case.batch} x ({groups}{case.prefix:,} shared) + {case.private}"
        return Question.of_case(name, part, shape, case, whole_ms)

    def chat(part: str, shape: ModelShape) -> Question:
        return Question("200 ragged", part, shape.name, ragged(200, shape.vocab_size), [])

    found = [
        shared("shared", llama, Case(128, 8192, 256, TOKENS), 9.0),
        unshared("unshared", llama, 128, 1024),
        unshared("unshared", llama, 1, 500),
        unshared("unshared", llama, 4, 700),
        chat("unshared", llama),
        shared("shared", llama, Case(64, 2048, 128, TOKENS), 7.1),
        shared("shared", llama, Case(256, 1024, 64, TOKENS), 10.0),
        shared("shared", llama, Case(256, 1024, 0, TOKENS, groups=32), 12.8),
        unshared("unshared", llama, 8, 16_000),
        unshared("unshared", llama, 1, 100_000),
        shared("rank", rank, Case(128, 8192, 256, TOKENS), None),
        unshared("rank", rank, 1, 500),
        unshared("rank", rank, 4, 700),
        chat("rank", rank),
        unshared("rank", rank, 64, 1024),
        unshared("rank", rank, 8, 16_000),
        unshared("rank", rank, 1, 100_000),
    ]
    # The servers with e4m3 KV are asked what the others are asked as well.
    kept = [*parts, "shared", "unshared"] if "fp8" in parts else parts
    return [each for each in found if each.part in kept]


def ask(question: Question, members: Sequence[Member], rounds: int, layers: int) -> dict[str, Any]:
    """One question to its servers. layers: of the model."""
    fill_all(members, question.prompts, question.heads)
    members = [member for member in members if member.failure is None]
    pat = next((member for member in members if member.name.endswith(" pat")), None)
    if pat is None or len(members) < 2:
        raise RuntimeError("too few servers are left")
    before, state = pat.server.stats(), gpu_state()
    runs = ask_in_turn(members, question.prompts, TOKENS, rounds)
    counted = difference(pat.server.stats(), before)
    names = {member.name: member.name.removeprefix(f"{question.model} ") for member in members}
    by_backend = {names[name]: passes for name, passes in runs.items()}
    found: dict[str, Any] = {
        "question": question.name,
        "part": question.part,
        "model": question.model,
        "layers": layers,
        "tokens": TOKENS,
        **times_of(by_backend),
        "pat_stats": with_ratio(counted),
        "gpu": {"before": state, "after": gpu_state()},
    }
    if question.whole_ms is not None and layers == _WHOLE.get(question.model):
        found["whole_ms_limit"] = question.whole_ms
    found["share_of_answers_equal"] = {
        name: answers_equal(passes, by_backend["pat"]) for name, passes in by_backend.items()
    }
    found["over_pat"] = {
        name: over(passes, by_backend["pat"]) for name, passes in by_backend.items()
    }
    return found


def profile(question: Question, pat: Member, found: dict[str, Any]) -> None:
    """Add the kernels of a step, and what one of the whole model would take if it has more."""
    assert question.whole_ms is not None
    fill_all([pat], question.prompts, question.heads)
    with tempfile.TemporaryDirectory() as folder:
        events = trace(
            pat.server, question.prompts, Path(folder), steps=PROFILED_STEPS, seconds=TRACE_SECONDS
        )
    layers, whole = found["layers"], _WHOLE[question.model]
    found["step_us"] = kernel_times(events)
    if layers < whole:
        found |= projection(found["tpot_ms"]["pat"], layer_us(events, layers), layers, whole)
        found["whole_ms_limit"] = question.whole_ms


def over(runs: Sequence[DecodeRun], of: Sequence[DecodeRun]) -> float:
    """Time of one server over that of another: the median of the rounds."""
    return statistics.median(a.tpot_ms / b.tpot_ms for a, b in zip(runs, of, strict=True))


def projection(ms: float, layer: float | None, layers: int, whole: int) -> dict[str, float | None]:
    """Estimate a step of the whole model.

    ms: with so many layers. layer: microseconds of one, if they are known.
    """
    projected = None if layer is None else ms + (whole - layers) * layer / 1000
    return {"layer_us": layer, "whole_layers": whole, "projected_ms": projected}


def gates(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Judge the questions: by name, value, limit and whether it is met."""
    result: dict[str, dict[str, Any]] = {}
    for each in found:
        name = f"{each['model']}, {each['question']}"
        ratios = each["over_pat"]
        for other in ratios.keys() - {"pat", "pat fp8"}:
            result[f"{name}: {other} / pat"] = at_least(ratios[other], 1.0, noise=NOISE)
        if "pat fp8" in ratios and each["question"] in _FP8_QUESTIONS:
            ratio = ratios["pat fp8"]
            result[f"{name}: pat with e4m3 KV / pat"] = at_most(ratio, FP8_LIMIT)
        projected, limit = each.get("projected_ms"), each.get("whole_ms_limit")
        if projected is not None:
            layers = each["whole_layers"]
            result[f"{name}: ms, projected to {layers} layers"] = at_most(projected, limit)
        elif limit is not None:
            result[f"{name}: ms"] = at_most(each["tpot_ms"]["pat"], limit)
    return result


def route_gates(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """pat decodes all layers of its servers: what it delegates compares nothing."""
    found = {}
    for name, about in servers.items():
        if "pat" in about:
            gate = at_most(sum(about["pat"]["default_layers"].values()), 0)
            gate["met"] &= about["pat"]["pat_layers"] > 0
            found[f"{name}: layers that pat does not decode"] = gate
    return found


_FP8_QUESTIONS = ("128 x (8,192 shared) + 256", "128 x 1,024")


def sharing(
    members: Sequence[Member], vocab_size: int, seconds_left: Callable[[], float]
) -> list[dict[str, Any]]:
    """When it pays: pat and the other, by batch and share."""
    found = []
    for batch, share in SHARES:
        cell = Cell(batch, share, CONTEXT)
        if seconds_left() < 0:
            show_failure(f"sharing, {cell.tree}: not begun")
            continue
        case = Case(cell.batch, cell.prefix, cell.private, TOKENS)
        prompts = case.prompts(vocab_size)
        with watched(members, f"sharing, {cell.tree}"):
            fill_all(members, prompts, heads_of(case, prompts))
            runs = list(ask_in_turn(members, prompts, TOKENS, 2).values())
            ms = [tpot(passes).median for passes in runs]
            held_up = {"pat": held_up_ms(runs[0]), "other": held_up_ms(runs[1])}
            measured = sharing_cell(cell, ms[0], ms[1], over(runs[1], runs[0]))
            found.append(measured | {"held_up_ms": held_up})
    return found


def sharing_cell(cell: Cell, pat: float, other: float, gain: float) -> dict[str, Any]:
    """Return a cell for `plot sharing`."""
    return {
        "batch": cell.batch,
        "share": cell.share,
        "context": cell.context,
        "tpot_ms": {"pat": pat, "other": other},
        "other": "fa3",
        "gain": gain,
    }


def _sharing(
    members: Mapping[str, Member],
    shapes: Mapping[str, ModelShape],
    path: Path | None,
    meta: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    seconds_left: Callable[[], float],
) -> None:
    """Measure the first model's first two servers."""
    model, shape = next(iter(shapes.items()))
    pair = [member for name, member in members.items() if name.startswith(f"{model} ")][:2]
    if len(pair) < 2 or any(member.failure for member in pair):
        show_failure(f"sharing: not measured without both servers of {model}")
        return
    cells = sharing(pair, shape.vocab_size, seconds_left)
    for each in cases:
        if (each["model"], each["question"]) == (model, f"128 x {CONTEXT:,}"):
            ms = each["tpot_ms"]
            cell = Cell(128, 0.0, CONTEXT)
            cells.append(sharing_cell(cell, ms["pat"], ms["fa3"], each["over_pat"]["fa3"]))
    if cells:
        show_sharing(cells, "server")
    if cells:
        about = {"by": "server", "model": model, "context": CONTEXT}
        layers = shape.config["num_hidden_layers"]
        write(path, {"meta": {**meta, **about, "layers": layers}, "cells": cells})


def show(data: Mapping[str, Any]) -> None:
    def ms(each: Mapping[str, Any], name: str) -> str:
        return f"{each['tpot_ms'][name]:.3f}" if name in each["tpot_ms"] else ""

    columns = ("pat", "fa3", "pat fp8")
    more = ("fa3 / pat", "KV read ratio", "projected")
    table = table_of("ms per output token", ("model", "question", *columns, *more))
    for each in data["cases"]:
        read, projected = each["pat_stats"]["kv_read_ratio"], each.get("projected_ms")
        ratio = each["over_pat"].get("fa3")
        table.add_row(
            f"{each['model']}, {each['layers']} layers",
            each["question"],
            *(ms(each, name) for name in columns),
            "" if ratio is None else f"{ratio:.3f}",
            "" if read is None else f"{read:.3f}",
            "" if projected is None else f"{projected:.2f}",
        )
    console.print(table)
    for name, gate in data["gates"].items():
        if not gate["met"]:
            show_failure(f"{name}: {gate['value']:.3f}, limit {gate['limit']}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--whole", action="store_true", help="Llama-3-8B with all its layers")
    add_option(parser, "--rounds", default=5, help="where nothing is shared")
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--seconds")
    add_option(parser, "--json")
    parser.add_argument(
        "--sharing-json", type=output_file, metavar="FILE", help="of the part `sharing`"
    )


def run(args: argparse.Namespace) -> int:
    if args.whole and {"fp8", "rank"} & {*args.parts}:
        raise Refused("--whole leaves no room for the servers of the parts fp8 and rank")
    begun = time.monotonic()

    def seconds_left() -> float:
        return float(args.seconds - (time.monotonic() - begun))

    meta = metadata()
    data: dict[str, Any] = {"meta": meta, "models": {}, "servers": {}, "cases": [], "gates": {}}
    shapes = models(args.whole)
    data["models"] = {name: shape.config for name, shape in shapes.items()}

    def save() -> None:
        data["gates"] = gates(data["cases"]) | route_gates(data["servers"])
        write(args.json, data)

    with tempfile.TemporaryDirectory(prefix="bench-gates-") as name:
        for model, shape in shapes.items():
            shape.write(Path(name, model))
        with fleet(starts(args.parts, Path(name)), Path(name)) as members:
            prepared = questions(args.parts)
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            for each, member in members.items():
                with watched([member], each):
                    data["servers"][each] = member.about()
            for question in prepared:
                of_model = _alive(members, question)
                if seconds_left() < 0 or len(of_model) < 2:
                    show_failure(f"{question.model}, {question.name}: not begun")
                    continue
                rounds = 3 if question.heads else args.rounds
                layers = shapes[question.model].config["num_hidden_layers"]
                with watched(of_model, question.name):
                    data["cases"].append(ask(question, of_model, rounds, layers))
                    times = {k: round(v, 3) for k, v in data["cases"][-1]["tpot_ms"].items()}
                    took = time.monotonic() - begun
                    console.print(f"[{took:.0f} s] {question.model}, {question.name}: {times}")
                save()
            if "sharing" in args.parts:
                _sharing(members, shapes, args.sharing_json, meta, data["cases"], seconds_left)
            # At last: profilers have crashed.
            for question in prepared:
                done = [each for each in data["cases"] if each["question"] == question.name]
                of_model = _alive(members, question)
                if question.whole_ms is None or not done or not of_model or seconds_left() < 0:
                    continue
                with watched(of_model[:1], f"profile, {question.name}"):
                    profile(question, of_model[0], done[0])
                save()
    save()
    show(data)
    return 0 if data["gates"] and all(gate["met"] for gate in data["gates"].values()) else 1


def _alive(members: Mapping[str, Member], question: Question) -> list[Member]:
    """The servers that are asked a question: pat first. With e4m3 KV only some are."""
    return [
        member
        for name, member in members.items()
        if name.startswith(f"{question.model} ")
        and member.failure is None
        and (not name.endswith("fp8") or question.name in _FP8_QUESTIONS)
    ]
