"""Models of which pat decodes some layers: time per output token, pat against SGLang's default.

    python benchmarks/bench_hybrid_models.py --models gpt-oss-20b [--cases shared unshared]
        [--json FILE]

Two servers run at once, one with pat and one with the backend that SGLang chooses, and are asked in
turn. A round answers the same requests with two lengths, and the difference is decoding; what is
reported is the median of the rounds. All prompts but for their last tokens are in the prefix cache
before the clock starts.

A model is a minute or two of starting, and half a minute per case. With --json a file that exists
is continued, so that models can be measured one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metadata import gpu_state, metadata
from rich.table import Table
from serving.cases import Case
from serving.hybrids import HYBRIDS, HybridModel
from serving.latency import difference, read_ratio
from serving.models import TINY
from serving.results import earlier, write
from serving.server import Server, contender, running_server, sampling_of
from serving.tables import console

BACKENDS = ("pat", "default")
SHORT = 8  # tokens of the shorter answers
# Of the prompts, answered anew each time. A cache of recurrent states begins at a state that it
# has kept, which is at a multiple of its chunks: prefix and private tokens are such multiples.
TAIL = 2
# Where nothing is shared: pat's time over the default's, with what rounds differ by.
UNSHARED_LIMIT = 1.02

_CASES = {
    "shared": Case(128, 8192, 256, SHORT + 128),
    "unshared": Case(128, 0, 1024, SHORT + 128),
}
_TINY_CASES = {
    "shared": Case(6, 256, 64, SHORT + 16),
    "unshared": Case(6, 0, 64, SHORT + 16),
}


def measure(
    servers: Mapping[str, Server], model: HybridModel, name: str, rounds: int
) -> dict[str, Any]:
    """One case on all servers, in turn."""
    case = (_TINY_CASES if model.name == TINY else _CASES)[name]
    cached = case.prompts(model.shape.vocab_size)
    prompts = [prompt + prompt[:TAIL] for prompt in cached]
    for server in servers.values():
        _fill_cache(server, case, cached)
        _seconds(server, prompts, SHORT)  # compiles what is compiled at first use
    before, state = servers["pat"].stats(), gpu_state()
    seconds: dict[str, list[tuple[float, float]]] = {backend: [] for backend in servers}
    hits: dict[str, float] = {}
    for _ in range(rounds):
        for backend, server in servers.items():
            short, _ = _seconds(server, prompts, SHORT)
            long, answers = _seconds(server, prompts, case.generated)
            seconds[backend].append((short, long))
            hits[backend] = _share_cached(answers, prompts)
    counted = difference(servers["pat"].stats(), before)
    return summary(seconds, case.generated - SHORT) | {
        "model": model.name,
        "case": name,
        "batch": case.batch,
        "prefix": case.prefix,
        "private": case.private,
        "tokens": [SHORT, case.generated],
        "share_of_prompts_cached": hits,
        "pat_stats": counted | {"kv_read_ratio": read_ratio(counted)},
        "gpu": {"before": state, "after": gpu_state()},
    }


def _fill_cache(server: Server, case: Case, prompts: list[list[int]]) -> None:
    server.flush()
    if case.prefix:  # first alone, so that the prompts find it
        server.generate([prompts[0][: case.prefix]], sampling_of(1))
    server.generate(prompts, sampling_of(1))


def _seconds(
    server: Server, prompts: list[list[int]], tokens: int
) -> tuple[float, list[dict[str, Any]]]:
    begin = time.perf_counter()
    answers = server.generate(prompts, sampling_of(tokens))
    return time.perf_counter() - begin, answers


def _share_cached(answers: Sequence[dict[str, Any]], prompts: Sequence[Sequence[int]]) -> float:
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    return cached / sum(map(len, prompts))


def summary(seconds: Mapping[str, Sequence[tuple[float, float]]], tokens: int) -> dict[str, Any]:
    """seconds: by backend, of the shorter and the longer answers of each round. tokens: how many
    more the longer ones have."""
    rounds = {
        backend: [1000 * (long - short) / tokens for short, long in pairs]
        for backend, pairs in seconds.items()
    }
    medians = {backend: statistics.median(times) for backend, times in rounds.items()}
    return {
        "tpot_ms": medians,
        "rounds_ms": rounds,
        "default_over_pat": medians["default"] / medians["pat"],
    }


def gates(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What has to hold, by model and case: whether it does, and the number."""
    found: dict[str, Any] = {}
    for case in cases:
        ratio = case["default_over_pat"]
        limit = 1.0 if case["case"] == "shared" else 1 / UNSHARED_LIMIT
        found[f"{case['model']}, {case['case']}"] = {
            "passed": ratio > limit and min(case["share_of_prompts_cached"].values()) > 0.9,
            "default_over_pat": ratio,
            "above": limit,
            "share_of_prompts_cached_above": 0.9,
        }
    return found


def run(model: HybridModel, names: Sequence[str], rounds: int) -> tuple[list[Any], dict[str, Any]]:
    """All cases of a model with one start of each server, and what the servers are."""
    arguments = model.shape.arguments
    with (
        tempfile.TemporaryDirectory(prefix="bench-hybrid-") as folder,
        contextlib.ExitStack() as up,
    ):
        path = model.shape.write(Path(folder))
        servers, about = {}, {}
        for backend in BACKENDS:
            begin = time.perf_counter()
            servers[backend] = up.enter_context(
                running_server(contender(backend), path, path, **arguments)
            )
            seconds = time.perf_counter() - begin
            about[backend] = _about(servers[backend]) | {"start_seconds": seconds}
            console.print(f"{model.name} with {backend}: ready after {seconds:.0f} s")
        measured = []
        for name in names:
            measured.append(measure(servers, model, name, rounds))
            console.print(f"  {name}: {_times(measured[-1])}")
    return measured, about


def _about(server: Server) -> dict[str, Any]:
    """The backends that were chosen, and which layers pat decodes."""
    info = server.info()
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    chosen = {name: info.get(name) for name in (*names, "page_size", "max_total_num_tokens")}
    return chosen | {name: value for name, value in info.items() if name.startswith("pat")}


def _times(case: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in case["tpot_ms"].items())
    return f"{times} per token: {case['default_over_pat']:.2f}x"


def show(data: Mapping[str, Any]) -> None:
    table = Table(title="ms per output token")
    for column in ("model", "case", *BACKENDS, "default / pat", "KV read ratio", "gate"):
        table.add_column(column, justify="right")
    for case in data["cases"]:
        ratio = case["pat_stats"]["kv_read_ratio"]
        gate = data["gates"][f"{case['model']}, {case['case']}"]
        table.add_row(
            case["model"],
            case["case"],
            *(f"{case['tpot_ms'][backend]:.3f}" for backend in BACKENDS),
            f"{case['default_over_pat']:.2f}",
            "" if ratio is None else f"{ratio:.3f}",
            "passed" if gate["passed"] else "FAILED",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    models = [name for name in HYBRIDS if name != TINY]
    parser.add_argument("--models", nargs="+", default=models, choices=HYBRIDS)
    parser.add_argument("--cases", nargs="+", default=list(_CASES), choices=_CASES)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="three or more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error(f"--rounds must be 3 or more; got {args.rounds}")
    data: dict[str, Any] = {"meta": metadata(), "models": {}, "cases": [], "gates": {}}
    if args.json and args.json.exists():
        data = earlier(args.json, data["meta"])
    for name in args.models:
        model = HYBRIDS[name]
        measured, about = run(model, args.cases, args.rounds)
        data["models"][name] = {
            "config": model.shape.config,
            "arguments": model.shape.arguments,
            "full_attention_layers": model.full_layers,
            "cut_from": model.cut,
            "servers": about,
        }
        done = [(case["model"], case["case"]) for case in measured]
        kept = [case for case in data["cases"] if (case["model"], case["case"]) not in done]
        data["cases"] = kept + measured
        data["gates"] = gates(data["cases"])
        if args.json:
            write(args.json, data)
    show(data)
    return 0 if all(gate["passed"] for gate in data["gates"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
