"""Compares logits of pat in SGLang's server with those of SGLang's own backends.

    python benchmarks/check logits [--backends pat fa3 triton] [--json FILE]

Each backend has a server, and all servers start at the same time. A model whose logits are not flat
answers 32 requests over a three-level prefix tree with 64 tokens each. The last backend is the
reference. pat must decode all layers (SGLANG_PAT_STRICT=1), plan every step, and share common KV.

Forced pass: a logit bias makes every request repeat one token, whatever the backend, so that all
positions of all requests can be compared. The logits of PROBES other tokens, minus their mean, are
compared. pat's largest and mean difference from the reference may be at most twice those of the
backends between pat and the reference.

Greedy pass: the tokens are compared up to a tie. Two tokens tie if their logits differ in the
reference by at most twice the other backends' largest difference, because each logit may move by
that difference.

Each server runs both passes twice, from an empty cache. Both times must give the same tokens, and
with pat bit-identical logits.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from common.counters import read_ratio
from common.metadata import gpu_state, metadata
from common.results import write
from common.suites import Refused, add_option
from common.terminal import console, table_of
from common.tiny_model import NUM_SPECIAL_TOKENS, TinyModel
from sglang_pat.bench.answers import Agreement, Answer, agreement, with_candidates
from sglang_pat.bench.server import Server, Start, contender, running_servers, sampling_of
from sglang_pat.sglang.cpu import cuda_driver_is_present

REQUESTS = 32
DOCUMENTS = 4
NUM_TOKENS = 64
PROBES = 64
CANDIDATES = 64  # top tokens with scores; about 40 may tie in bfloat16
BIAS = 80.0  # several times any logit
LARGEST_RATIO = 0.9  # planned KV / KV that query-centric attention reads
STRICT = {"SGLANG_PAT_STRICT": "1"}  # layers that the default backend decodes would compare nothing
# The limits if there is no other backend to compare with, for float32 sums in another order.
FLOAT32_LIMIT = 1e-3

COMMON = {
    "skip_tokenizer_init": True,
    "enable_fp32_lm_head": True,
    "context_length": 8192,
    "max_running_requests": REQUESTS,  # captures no larger CUDA graphs
}


class Setup(NamedTuple):
    """Model and requests for this machine. system, document: tokens of the two shared levels."""

    model: TinyModel
    arguments: dict[str, Any]
    backends: list[str]
    system: int
    document: int


ON_GPU = Setup(
    TinyModel(
        num_layers=8,
        hidden_size=2048,
        num_qo_heads=16,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=4096,
        vocab_size=8192,
    ),
    {"dtype": "bfloat16", "cuda_graph_backend_prefill": "disabled", "max_total_tokens": 1 << 16},
    ["pat", "fa3", "triton"],
    1024,
    512,
)
ON_CPU = Setup(
    TinyModel(),
    {"dtype": "float32", "device": "cpu", "disable_cuda_graph": True, "max_total_tokens": 1 << 14},
    ["pat", "torch_native"],
    160,
    48,
)


def this_setup() -> Setup:
    return ON_GPU if cuda_driver_is_present() else ON_CPU


_PROBED = "output_token_ids_logprobs"
Logits = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]


class Run(NamedTuple):
    """The two passes over all requests. logits: forced pass, `[requests, tokens, probes]`."""

    logits: Logits
    greedy: list[Answer]


def prompts(setup: Setup) -> list[list[int]]:
    source = random.Random(5)

    def tokens(count: int) -> list[int]:
        return source.choices(range(NUM_SPECIAL_TOKENS, setup.model.vocab_size), k=count)

    system = tokens(setup.system)
    documents = [system + tokens(setup.document) for _ in range(DOCUMENTS)]
    return [documents[i % DOCUMENTS] + tokens(20 + 3 * i) for i in range(REQUESTS)]


def answer_all(server: Server, setup: Setup, *, flush: bool = True) -> Run:
    """Run both passes. flush: empty the radix cache before each pass."""
    usable = range(NUM_SPECIAL_TOKENS, setup.model.vocab_size)
    chosen = random.Random(6).sample(usable, REQUESTS + PROBES)
    forced, probes = chosen[:REQUESTS], chosen[REQUESTS:]
    sampling = sampling_of(NUM_TOKENS)

    if flush:
        server.flush()
    answers = server.generate(
        prompts(setup),
        [sampling | {"logit_bias": {str(token): BIAS}} for token in forced],
        return_logprob=True,
        token_ids_logprob=[probes] * REQUESTS,
    )
    for token, answer in zip(forced, answers, strict=True):
        if answer["output_ids"] != [token] * NUM_TOKENS:
            raise RuntimeError(f"a bias of {BIAS} does not force token {token}")
    if flush:
        server.flush()
    greedy = server.generate(prompts(setup), sampling, **with_candidates(CANDIDATES))
    return Run(_probed(answers), [Answer.parse(answer) for answer in greedy])


def _probed(answers: list[dict[str, Any]]) -> Logits:
    """Return the probes' logits minus their mean, computed from log-probabilities."""
    logprobs = np.array(
        [
            [[probe[0] for probe in position] for position in answer["meta_info"][_PROBED]]
            for answer in answers
        ]
    )
    assert logprobs.shape == (REQUESTS, NUM_TOKENS, PROBES), logprobs.shape
    return logprobs - logprobs.mean(axis=2, keepdims=True)


def largest_and_mean(left: Logits, right: Logits) -> tuple[float, float]:
    """Return the largest and the mean difference, infinite if a logit is not a number."""
    differences = np.nan_to_num(np.abs(left - right), nan=np.inf)
    return float(differences.max()), float(differences.mean())


def problems_of_decoding(stats: dict[str, Any]) -> list[str]:
    """Return why pat's counters show that it has not decoded the requests, or shared nothing."""
    steps = stats.get("plans_built", 0) + stats.get("plans_reused", 0)
    ratio = read_ratio(stats) if steps else None
    found = []
    if steps < NUM_TOKENS - 1:
        found.append(f"pat planned {steps} steps, of at least {NUM_TOKENS - 1}")
    if ratio is None or ratio > LARGEST_RATIO:
        found.append(f"pat shared too little: KV read ratio {ratio}")
    return found


def problems_of_comparing(greedy: Agreement, limits: Sequence[float]) -> list[str]:
    """Return why a comparison of answers, or its limits, would let anything pass."""
    found = []
    compared = greedy.positions + len(greedy.partings)
    if compared < greedy.requests:
        found.append(f"{compared} tokens of {greedy.requests} requests were compared")
    if not np.isfinite(limits).all():
        found.append(f"SGLang's own backends differ without bound: {[*limits]}")
    return found


def judge(runs: dict[str, tuple[Run, Run]], problems: Sequence[str]) -> dict[str, Any]:
    """Compare each backend with the last, and its two runs. `passed` is the verdict on pat.

    problems: reasons why the runs prove nothing about pat (`problems_of_decoding`).
    """
    *names, yardstick = runs
    off = {
        name: largest_and_mean(runs[name][0].logits, runs[yardstick][0].logits) for name in names
    }
    others = [errors for name, errors in off.items() if name != "pat"]
    limits = [2 * max(column) for column in zip(*others, strict=True)] if others else None
    max_limit, mean_limit = limits or (FLOAT32_LIMIT, FLOAT32_LIMIT)
    backends: dict[str, Any] = {}
    for name, (first, second) in runs.items():
        again = agreement(first.greedy, second.greedy, 0.0)
        backends[name] = {
            "same_tokens_again": not again.partings,
            "same_logits_again": bool(np.array_equal(first.logits, second.logits)),
        }
        if name != yardstick:
            # Twice the noise, by which each of the two logits may move.
            greedy = agreement(first.greedy, runs[yardstick][0].greedy, max_limit)
            largest, mean = off[name]
            backends[name] |= {"max": largest, "mean": mean, "greedy": greedy.as_dict()}
    pat = backends["pat"]
    greedy = agreement(runs["pat"][0].greedy, runs[yardstick][0].greedy, max_limit)
    problems = [*problems, *problems_of_comparing(greedy, (max_limit, mean_limit))]
    passed = (
        not problems
        and pat["max"] <= max_limit
        and pat["mean"] <= mean_limit
        and not pat["greedy"]["errors"]
        and pat["same_tokens_again"]
        and pat["same_logits_again"]
    )
    return {
        "yardstick": yardstick,
        "spread_of_logits": float(runs[yardstick][0].logits.std()),
        "limit": {"max": max_limit, "mean": mean_limit, "gap_of_a_tie": max_limit},
        "backends": backends,
        "problems": problems,
        "passed": passed,
    }


def show(verdict: dict[str, Any]) -> None:
    columns = ("", "found")
    table = table_of(f"logits against {verdict['yardstick']}", columns, words=columns)
    for name, found in verdict["backends"].items():
        table.add_row(name, Text(json.dumps(found)))
    table.add_row("limit", Text(json.dumps(verdict["limit"])))
    console.print(table)
    for problem in verdict["problems"]:
        console.print(problem, style="bold red")
    spread = f"logits spread by {verdict['spread_of_logits']:.3g}"
    console.print(f"{'passed' if verdict['passed'] else '[bold red]FAILED[/]'}; {spread}")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--backends", default=this_setup().backends)
    add_option(parser, "--json")


def check_backends(backends: Sequence[str]) -> None:
    if "pat" not in backends[:-1]:
        raise Refused(f"--backends needs pat, and the yardstick as the last; got {backends}")


def run(args: argparse.Namespace) -> int:
    setup = this_setup()
    check_backends(args.backends)
    before = gpu_state()
    runs = {}
    with tempfile.TemporaryDirectory(prefix="check-logits-") as folder:
        model = setup.model.write(Path(folder, "model"))
        arguments = COMMON | setup.arguments
        starts = {name: Start(contender(name), model, arguments, STRICT) for name in args.backends}
        console.print(f"starting {len(starts)} servers: {', '.join(starts)}")
        with running_servers(starts, Path(folder)) as servers:
            for name, server in servers.items():
                runs[name] = answer_all(server, setup), answer_all(server, setup)
            stats = servers["pat"].stats()
    verdict = judge(runs, problems_of_decoding(stats))
    meta = metadata() | {"gpu_before": before, "gpu_after": gpu_state()}
    write(args.json, {"meta": meta, **verdict})
    show(verdict)
    return 0 if verdict["passed"] else 1
