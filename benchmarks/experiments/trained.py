"""Decode with a trained model: pat, FA3 and FlashInfer against a third backend's prefill.

    python benchmarks/experiments trained --model BASE --draft SMALL --tokens FOLDER/tokens.npy
        [--parts distances speculation command] [--json FILE]

The models and the tokens are those of train_model.py. Prompts are its held-out text: groups of
2,048 common tokens with branches. They are answered greedily and sampled, with bfloat16 and with
e4m3 KV (scales are 1), while requests join and leave. Triton, with bfloat16 KV, scores all answers
by prefills, as in `sglang-pat check`: the distance of a token is the difference of its
log-probability in decode and there. pat may have 1.1 times the mean and the 99th percentile of
FA3's distances.

A largest value says little: of two equal backends either one has it in half of all runs. So
prompts with a token beyond FA3's worst are counted: answers to one prompt often have the same
tokens. Of equal backends each has the next worst prompt with a chance of one half; more than 6 in a
row are no accident (less than 1%).

Speculation: greedy answers with drafts of the small model, in chains (3 steps, 4 tokens) and in
trees (3 steps, 4 branches, 8 tokens). Tokens per step may be 2% apart from FA3's.

Command: `sglang-pat check --model BASE`, as a user types it, while all others share the GPU.

Nothing is timed, so all servers start at once. On a CPU pat and torch_native are compared, without
speculation, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from common.counters import read_ratio
from common.drafts import ACCEPTANCE_LIMIT, accepted, largest_off
from common.fleet import ON_CPU, SHARED_GPU, fleet, report_starts, wait, watched
from common.metadata import metadata
from common.results import at_least, at_most, write
from common.suites import Refused, add_option
from common.terminal import console, table_of
from server.speculation import speculation
from sglang_pat.bench.check_requests import Asked, ask
from sglang_pat.bench.closeness import judge
from sglang_pat.bench.prefill_scores import (
    Distances,
    Reply,
    Scores,
    distances,
    over_http,
    score,
    serve,
)
from sglang_pat.bench.server import Server, Start, contender, sampling_of
from sglang_pat.cli.arguments import input_file
from sglang_pat.sglang.cpu import cuda_driver_is_present

PARTS = ("distances", "speculation", "command")
DRAFTS = ("small", "trees")
GROUPS, BRANCHES, TAILS = 8, 3, 4  # 96 prompts
SHARED, BRANCH, TAIL = 2048, (128, 512), (8, 64)  # tokens
RUNNING = 32  # at once
TOKENS, SAMPLES = 192, 8  # of an answer; of every fourth prompt
SPECULATED = 256  # tokens of an answer with drafts
RATIO_LIMIT, BEYOND_LIMIT = 1.1, 6
LARGEST_READ_RATIO = 0.9
COMMAND_SECONDS = 300
RESAMPLES = 1000
_ON_GPU = cuda_driver_is_present()
PEERS = ("fa3", "flashinfer") if _ON_GPU else ("torch_native",)
CACHES = {"bfloat16": {}, "fp8": {"kv_cache_dtype": "fp8_e4m3"}} if _ON_GPU else {"float32": {}}
REFERENCE = "triton" if _ON_GPU else "torch_native"
STRICT = {"SGLANG_PAT_STRICT": "1"}


def prompts(tokens: Path, shared: int) -> list[list[int]]:
    """Cut prompts out of the end of the text, which no step of training read."""
    text = np.load(tokens, mmap_mode="r")[-(1 << 16) :].tolist()
    rng, end = np.random.default_rng(3), 0

    def cut(least: int, most: int) -> list[int]:
        nonlocal end
        begin, end = end, end + int(rng.integers(least, most + 1))
        if end > len(text):
            raise Refused(f"--tokens {tokens}: too few; allowed: at least {1 << 16}")
        return text[begin:end]

    found = []
    for _ in range(GROUPS):
        root = cut(shared, shared)
        for _ in range(BRANCHES):
            branch = root + cut(*(max(1, n * shared // SHARED) for n in BRANCH))
            found += [branch + cut(*TAIL) for _ in range(TAILS)]
    return found


def starts(model: Path, draft: Path | None, parts: Sequence[str]) -> dict[str, Start]:
    """All servers, by name."""
    common = {
        **(SHARED_GPU | {"load_format": "auto"} if _ON_GPU else ON_CPU),
        "max_running_requests": RUNNING,
        "max_total_tokens": 1 << 17 if _ON_GPU else 1 << 15,
        "context_length": 4096,
    }
    if _ON_GPU:
        common["cuda_graph_max_bs_decode"] = RUNNING
    found = {}
    if "distances" in parts:
        for cache, more in CACHES.items():
            for name in ("pat", *PEERS):
                environment = STRICT if name == "pat" else {}
                found[f"{name} {cache}"] = Start(contender(name), model, common | more, environment)
    if {"distances", "speculation"} & {*parts}:
        found["reference"] = Start(contender(REFERENCE), model, common, {})
    if "speculation" in parts:
        for drafts in DRAFTS:
            for name, chosen in (("pat", {"decode_attention_backend": "pat"}), ("fa3", {})):
                options = common | speculation(drafts, draft) | chosen
                found[f"{drafts} {name}"] = Start(contender("default"), model, options, {})
    return found


class Served:
    """Answers of one server: greedy and sampled."""

    def __init__(self, replies: list[Reply], stats: dict[str, Any]) -> None:
        self.replies = replies
        self.stats = stats
        self.distances: list[Distances] = []


def answers_of(server: Server, asked: Sequence[Asked]) -> Served:
    server.flush()
    replies, _ = serve(over_http(server), asked)
    return Served(replies, server.stats())


def perplexities(asked: Sequence[Asked], served: Served, scores: Scores) -> dict[str, Any]:
    """Perplexity of greedy and of sampled answers under the reference.

    noise: the standard error of its logarithm, over answers.
    """
    found = {}
    for kind, sampled in (("greedy", False), ("sampled", True)):
        logprobs = [
            scores[(*asked[each.request].prompt, *each.answer.tokens)].logprobs
            for each in served.replies
            if bool(asked[each.request].samples) is sampled
        ]
        means = [float(np.mean(each)) for each in logprobs]
        found[kind] = {
            "perplexity": math.exp(-float(np.mean(np.concatenate(logprobs)))),
            "noise": float(np.std(means)) / math.sqrt(len(means)),
            "answers": len(means),
            "tokens": sum(map(len, logprobs)),
        }
    return found


def of_distances(served: Served) -> dict[str, float]:
    distance = np.concatenate([each.distance for each in served.distances])
    return {
        "tokens": len(distance),
        "mean": float(distance.mean()),
        "p99": float(np.quantile(distance, 0.99)),
        "worst": float(distance.max()),
        "kl": float(np.concatenate([each.kl for each in served.distances]).mean()),
    }


def of_cache(asked: Sequence[Asked], runs: Mapping[str, Served], scores: Scores) -> dict[str, Any]:
    """Compare pat with each other backend over one type of cache. runs: by backend."""
    for each in runs.values():
        each.distances = distances(asked, each.replies, scores)
    found: dict[str, Any] = {
        "backends": {
            name: of_distances(each) | perplexities(asked, each, scores)
            for name, each in runs.items()
        },
        "kv_read_ratio": read_ratio(runs["pat"].stats),
        "against": {},
    }
    pat = runs["pat"]
    for peer in PEERS:
        if peer in runs:
            other = runs[peer]
            pair = (pat.replies, other.replies), (pat.distances, other.distances)
            own = peer == REFERENCE
            verdict = judge(asked, *pair, "bfloat16" if _ON_GPU else "float32", own_prefill=own)
            worst = found["backends"][peer]["worst"]
            beyond = [
                reply.request
                for reply, each in zip(pat.replies, pat.distances, strict=True)
                if float(each.distance.max(initial=0)) > worst
            ]
            found["against"][peer] = verdict.as_dict() | {
                "answers_beyond_worst": len(beyond),
                "prompts_beyond_worst": len({tuple(asked[request].prompt) for request in beyond}),
            }
    return found


def gates_of_cache(cache: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Judge pat against the first peer: FA3, or on a CPU torch_native."""
    peer = PEERS[0]
    pat, other = found["backends"]["pat"], found["backends"][peer]
    beyond = found["against"][peer]["prompts_beyond_worst"]
    return {
        f"{cache}: mean distance over {peer}'s": at_most(pat["mean"] / other["mean"], RATIO_LIMIT),
        f"{cache}: p99 distance over {peer}'s": at_most(pat["p99"] / other["p99"], RATIO_LIMIT),
        f"{cache}: mean KL over {peer}'s": at_most(pat["kl"] / other["kl"], RATIO_LIMIT**2),
        f"{cache}: prompts beyond {peer}'s worst token": at_most(beyond, BEYOND_LIMIT),
        f"{cache}: KV that pat read, over query by query": at_most(
            found["kv_read_ratio"] or 1.0, LARGEST_READ_RATIO
        ),
    }


def speculate(server: Server, asked: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    server.flush()
    return server.generate(asked, sampling_of(SPECULATED))


def of_drafts(
    runs: Mapping[str, list[dict[str, Any]]], asked: Sequence[Sequence[int]], scorer: Server
) -> dict[str, Any]:
    """Compare tokens per step. runs: by backend. noise: standard error of the ratio, by prompt."""
    rates = {name: accepted(each) for name, each in runs.items()}
    counts = {
        name: np.array(
            [(len(a["output_ids"]), a["meta_info"]["spec_verify_ct"]) for a in each], dtype=float
        )
        for name, each in runs.items()
    }
    n = len(asked)
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    sums = {name: weights @ each for name, each in counts.items()}
    ratios = np.divide(*(sums[name][:, 0] / sums[name][:, 1] for name in ("pat", "fa3")))
    same = [a["output_ids"] == b["output_ids"] for a, b in zip(*runs.values(), strict=True)]
    return {
        "accepted_per_step": rates,
        "ratio": rates["pat"] / rates["fa3"],
        "noise": float(ratios.std()),
        "tokens": {name: int(each[:, 0].sum()) for name, each in counts.items()},
        "same_answers": sum(same) / n,
        "off": {name: largest_off(scorer, asked, each) for name, each in runs.items()},
    }


def user_command(model: Path, folder: Path) -> dict[str, Any]:
    """Run `sglang-pat check` and keep what it prints."""
    words = ["check", "--model", str(model), "--json", str(folder / "check.json")]
    if not _ON_GPU:
        words += ["--device", "cpu", "--requests", "12", "--tokens", "16", "--prefix", "128"]
    begun, log = time.monotonic(), folder / "check.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_pat", *words], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its servers
            process.wait()
    found = {
        "exit_status": process.returncode,
        "seconds": time.monotonic() - begun,
        "output": log.read_text(errors="replace").splitlines()[-60:],
    }
    if (folder / "check.json").is_file():
        result = json.loads((folder / "check.json").read_text())
        found |= {name: result[name] for name in ("is_close", "verdict", "measures", "tokens")}
    return found


def show(data: Mapping[str, Any]) -> None:
    columns = ("", "mean", "p99", "worst", "KL", "perplexity: greedy", "sampled", "tokens")
    table = table_of("distance of decode from prefill", columns, words=("",))
    for cache, found in data["distances"].items():
        for name, each in found["backends"].items():
            numbers = [f"{each[key]:.3g}" for key in ("mean", "p99", "worst", "kl")]
            both = [f"{each[kind]['perplexity']:.3f}" for kind in ("greedy", "sampled")]
            table.add_row(f"{name} {cache}", *numbers, *both, f"{each['tokens']:,}")
    console.print(table)
    for drafts, found in data["speculation"].items():
        console.print(f"{drafts}: {json.dumps(found)}")
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.4g}, limit {gate['limit']:.4g}: {met}")
    for name, failure in data["failures"].items():
        console.print(f"{name}: {failure}", markup=False)


def measure(args: argparse.Namespace, data: dict[str, Any], folder: Path) -> None:
    """Fill `data`, and write it after every part."""
    asked = ask(prompts(args.tokens, args.shared), tokens=TOKENS, samples=SAMPLES, seed=1)
    texts = [each.prompt for each in asked if not each.samples]
    if not _ON_GPU:
        asked = [Asked(each.prompt, 16, min(each.samples, 2)) for each in asked[:24]]
    gates = data["gates"]

    def done(part: str, found: Any, more: Mapping[str, Any]) -> None:
        data[part] = found
        gates.update(more)
        write(args.json, data)
        console.print(f"{part}: done after {time.monotonic() - begun:.0f} s")

    begun = time.monotonic()
    asked_for = starts(args.model, args.draft, args.parts)
    with ThreadPoolExecutor(24) as pool, fleet(asked_for, folder) as members:
        command = pool.submit(user_command, args.model, folder) if "command" in args.parts else None
        wait(members.values(), args.start_seconds)
        report_starts(members.values())
        data["servers"] = {
            name: each.about() if each.failure is None else {"failure": each.failure}
            for name, each in members.items()
        }

        def together(names: Sequence[str], work: Callable[[Server], Any]) -> dict[str, Future[Any]]:
            up = {name: members[name] for name in names if members[name].failure is None}
            data["failures"].update(
                {name: members[name].failure for name in names if name not in up}
            )
            return {name: pool.submit(work, each.server) for name, each in up.items()}

        def collect(futures: Mapping[str, Future[Any]]) -> dict[str, Any]:
            found = {}
            for name, each in futures.items():
                with watched([members[name]], name) as failures:
                    found[name] = each.result()
                data["failures"] |= dict.fromkeys([name] if failures else [], "; ".join(failures))
            return found

        plain = [f"{name} {cache}" for cache in CACHES for name in ("pat", *PEERS)]
        plain = plain if "distances" in args.parts else []
        drafted = [name for name in members if name.partition(" ")[0] in DRAFTS]
        answering = together(plain, lambda server: answers_of(server, asked))
        speculating = together(drafted, lambda server: speculate(server, texts))
        served, drafts = collect(answering), collect(speculating)
        scorers = [members[name] for name in ("reference",) if name in members]
        with watched(scorers, "scoring") as failures:
            if served:
                replies = [reply for each in served.values() for reply in each.replies]
                scores = score(over_http(scorers[0].server), asked, replies)
            for cache in CACHES if served else ():
                names = ("pat", *PEERS)
                runs = {n: served[f"{n} {cache}"] for n in names if f"{n} {cache}" in served}
                if {"pat", PEERS[0]} <= {*runs}:
                    found = of_cache(asked, runs, scores)
                    both = data["distances"] | {cache: found}
                    done("distances", both, gates_of_cache(cache, found))
            for kind in DRAFTS:
                runs = {n: drafts[f"{kind} {n}"] for n in ("pat", "fa3") if f"{kind} {n}" in drafts}
                if len(runs) == 2:
                    found = of_drafts(runs, texts, scorers[0].server)
                    name = f"{kind}: accepted tokens per step, apart from FA3's"
                    gate = {name: at_most(abs(found["ratio"] - 1), ACCEPTANCE_LIMIT)}
                    done("speculation", data["speculation"] | {kind: found}, gate)
        data["failures"] |= dict.fromkeys(["scoring"] if failures else [], "; ".join(failures))
        if command is not None:
            found = command.result()
            close = float(found.get("is_close", False))
            more = {
                "sglang-pat check: pat is as close": at_least(close, 1.0),
                "sglang-pat check: seconds": at_most(found["seconds"], COMMAND_SECONDS),
            }
            done("command", found, more)
            print(*found["output"], sep="\n", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    folder = {"type": Path, "required": True, "metavar": "FOLDER"}
    parser.add_argument("--model", **folder, help="trained by train_model.py")
    parser.add_argument("--draft", type=Path, metavar="FOLDER", help="trained on the same tokens")
    parser.add_argument("--tokens", type=input_file, required=True, metavar="FILE")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.set_defaults(shared=SHARED if _ON_GPU else 64)
    add_option(parser, "--start-seconds", default=200)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if not _ON_GPU:
        args.parts = [part for part in args.parts if part != "speculation"]
    if "speculation" in args.parts and args.draft is None:
        raise Refused("--parts speculation needs --draft, the folder of a model")
    training = args.model / "training.json"
    data: dict[str, Any] = {
        "meta": metadata(),
        "model": json.loads((args.model / "config.json").read_text()),
        "training": json.loads(training.read_text()) if training.is_file() else None,
        "shared_tokens": args.shared,
        "distances": {},
        "speculation": {},
        "failures": {},
        "gates": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-trained-") as folder:
        measure(args, data, Path(folder))
    write(args.json, data)
    show(data)
    missed = [name for name, gate in data["gates"].items() if not gate["met"]]
    return 1 if missed or data["failures"] or not data["gates"] else 0
