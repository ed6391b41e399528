"""Speculative decoding: time per accepted token, and how much is accepted, pat against FA3.

    python benchmarks/bench_speculation.py [--algorithms STANDALONE NGRAM] [--quick] [--json FILE]

Two servers run at once, with the same drafts and the same tokens to verify per step, and are asked
in turn. A round answers the same requests with two lengths; the difference is decoding, and what is
reported is the median of the rounds, per token of the answers: each was accepted. Drafts come from
a model of the same shape with fewer layers (STANDALONE), or from what has been said (NGRAM). All
prompts are in the prefix cache before the clock starts.

--quick: three rounds and half the layers, under 200 s on an H100. --model tiny: on a CPU, where
SGLang has no kernels for drafts; with `--without-drafts` it shows that everything else works.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from metadata import gpu_state, metadata
from rich.table import Table
from serving.latency import difference, read_ratio
from serving.models import MODELS, TINY, ModelShape
from serving.results import write
from serving.tables import console

from sglang_pat.bench.cases import Case
from sglang_pat.bench.http_server import wait_for_all
from sglang_pat.bench.server import START_SECONDS, Server, contender, running_server, sampling_of

ALGORITHMS = ("STANDALONE", "NGRAM")
DRAFT_TOKENS = 4
SHORT = 8  # tokens of the shorter answers
# pat's time per accepted token over FA3's, and how far acceptance may be apart.
TIME_LIMIT, ACCEPTANCE_LIMIT = 0.6, 0.05
_CASE = Case(64, 8192, 256, SHORT + 128)
_TINY_CASE = Case(6, 256, 64, SHORT + 16)


def speculation(algorithm: str, draft: Path) -> dict[str, Any]:
    """Server arguments."""
    if algorithm == "NGRAM":
        more = {"speculative_ngram_max_bfs_breadth": 1}
    else:
        more = {
            "speculative_draft_model_path": draft,
            "speculative_num_steps": DRAFT_TOKENS - 1,
            "speculative_eagle_topk": 1,
        }
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_draft_tokens": DRAFT_TOKENS,
        **more,
    }


def with_layers(shape: ModelShape, count: int) -> ModelShape:
    return replace(shape, config=shape.config | {"num_hidden_layers": count})


def measure(servers: Mapping[str, Server], case: Case, vocab_size: int, rounds: int) -> Any:
    """All servers in turn."""
    prompts = case.prompts(vocab_size)
    for server in servers.values():
        server.flush()
        server.generate([prompts[0][: case.prefix]], sampling_of(1))
        server.generate(prompts, sampling_of(SHORT))  # compiles what is compiled at first use
    before, state = servers["pat"].stats(), gpu_state()
    seconds: dict[str, list[tuple[float, float]]] = {backend: [] for backend in servers}
    answers: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for backend, server in servers.items():
            times = []
            for count in (SHORT, case.generated):
                begin = time.perf_counter()
                answers[backend] = server.generate(prompts, sampling_of(count))
                times.append(time.perf_counter() - begin)
            seconds[backend].append((times[0], times[1]))
    counted = difference(servers["pat"].stats(), before)
    return summary(seconds, answers, case.generated - SHORT) | {
        "batch": case.batch,
        "prefix": case.prefix,
        "private": case.private,
        "tokens": [SHORT, case.generated],
        "draft_tokens": DRAFT_TOKENS,
        "pat_stats": counted | {"kv_read_ratio": read_ratio(counted)},
        "gpu": {"before": state, "after": gpu_state()},
    }


def summary(
    seconds: Mapping[str, Sequence[tuple[float, float]]],
    answers: Mapping[str, Sequence[Mapping[str, Any]]],
    tokens: int,
) -> dict[str, Any]:
    """What the rounds show.

    Parameters
    ----------
    seconds
        By backend, of the shorter and the longer answers of each round.
    answers
        By backend, the longer answers of the last round.
    tokens
        How many more the longer ones have.
    """
    rounds = {
        backend: [1000 * (long - short) / tokens for short, long in pairs]
        for backend, pairs in seconds.items()
    }
    medians = {backend: statistics.median(times) for backend, times in rounds.items()}
    own, other = (
        [answer["output_ids"] for answer in answers[backend]] for backend in ("pat", "default")
    )
    return {
        "ms_per_accepted_token": medians,
        "rounds_ms": rounds,
        "pat_over_default": medians["pat"] / medians["default"],
        "accepted_per_step": {name: accepted(each) for name, each in answers.items()},
        "same_answers": sum(map(list.__eq__, own, other)) / len(own),
    }


def accepted(answers: Sequence[Mapping[str, Any]]) -> float:
    """Tokens of the answers per step and request."""
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    steps = sum(
        answer["meta_info"].get("spec_verify_ct") or len(answer["output_ids"]) for answer in answers
    )
    return tokens / steps


def gates(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What has to hold."""
    found: dict[str, Any] = {}
    for case in cases:
        ratio, each = case["pat_over_default"], case["accepted_per_step"]
        apart = abs(each["pat"] / each["default"] - 1)
        name = case["algorithm"]
        found[f"{name}: time per accepted token over FA3's"] = {
            "value": ratio,
            "limit": TIME_LIMIT,
            "met": ratio <= TIME_LIMIT,
        }
        found[f"{name}: accepted tokens per step, apart from FA3's"] = {
            "value": apart,
            "limit": ACCEPTANCE_LIMIT,
            "met": apart <= ACCEPTANCE_LIMIT,
        }
    return found


def run(
    shape: ModelShape, draft: ModelShape, algorithm: str, case: Case, rounds: int, drafts: bool
) -> dict[str, Any]:
    """One algorithm on servers of both backends."""
    arguments = dict(shape.arguments)
    if shape.name != TINY:
        arguments |= {
            "attention_backend": "fa3",
            "max_total_tokens": case.prefix + case.batch * (case.private + 512),
            "max_running_requests": case.batch,
            "sleep_on_idle": True,  # the other server is being measured
        }
    with (
        tempfile.TemporaryDirectory(prefix="bench-speculation-") as folder,
        contextlib.ExitStack() as up,
    ):
        paths = []
        for name, each in (("target", shape), ("draft", draft)):
            path = Path(folder) / name
            path.mkdir()
            paths.append(each.write(path))
        if drafts:
            arguments |= speculation(algorithm, paths[1])
        more = {"pat": {"decode_attention_backend": "pat"}, "default": {}}
        servers = {
            backend: up.enter_context(
                running_server(
                    contender(backend),
                    paths[0],
                    Path(folder),
                    wait=False,
                    environment={"SGLANG_PAT_PREVIEW": "speculation"},
                    **(arguments | more[backend]),
                )
            )
            for backend in more
        }
        seconds = wait_for_all(
            {backend: server.process for backend, server in servers.items()}, START_SECONDS
        )
        about = {}
        for backend, server in servers.items():
            routes = {key: value for key, value in server.info().items() if key.startswith("pat")}
            about[backend] = {"start_seconds": seconds[backend], **routes}
            console.print(f"{algorithm}, {backend}: ready after {seconds[backend]:.0f} s")
        measured: dict[str, Any] = measure(servers, case, shape.vocab_size, rounds)
    return {"algorithm": algorithm, "servers": about, **measured}


def show(data: Mapping[str, Any]) -> None:
    table = Table(title="ms per accepted token")
    for column in ("drafts", "pat", "FA3", "pat / FA3", "accepted: pat", "FA3", "same answers"):
        table.add_column(column, justify="right")
    for case in data["cases"]:
        times, each = case["ms_per_accepted_token"], case["accepted_per_step"]
        table.add_row(
            case["algorithm"],
            f"{times['pat']:.3f}",
            f"{times['default']:.3f}",
            f"{case['pat_over_default']:.2f}",
            f"{each['pat']:.2f}",
            f"{each['default']:.2f}",
            f"{case['same_answers']:.2f}",
        )
    console.print(table)
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.3f}, at most {gate['limit']}: {met}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    parser.add_argument("--layers", type=int, default=16, metavar="N", help="of the model")
    parser.add_argument("--draft-layers", type=int, default=1, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="three or more")
    parser.add_argument("--quick", action="store_true", help="8 layers, three rounds")
    parser.add_argument("--without-drafts", action="store_true", help="plain decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error(f"--rounds must be 3 or more; got {args.rounds}")
    layers, rounds = (8, 3) if args.quick else (args.layers, args.rounds)
    shape = MODELS[args.model]
    is_tiny = shape.name == TINY
    if not is_tiny:
        shape = with_layers(shape, layers)
    draft = shape if is_tiny else with_layers(shape, args.draft_layers)
    case = _TINY_CASE if is_tiny else _CASE
    data: dict[str, Any] = {
        "meta": metadata(),
        "model": shape.config,
        "draft_layers": draft.config["num_hidden_layers"],
        "cases": [],
        "gates": {},
    }
    for algorithm in args.algorithms:
        data["cases"].append(run(shape, draft, algorithm, case, rounds, not args.without_drafts))
        data["gates"] = gates(data["cases"])
        if args.json:
            write(args.json, data)
    show(data)
    return 0 if all(gate["met"] for gate in data["gates"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
