"""Models of which pat decodes some layers: time per output token, pat against SGLang's default.

    python benchmarks/bench_hybrid_models.py --models gpt-oss-20b [--cases shared unshared]
        [--json FILE]

Two servers start and run at once, one with pat and one with the backend that SGLang chooses, and
are asked in turn. What is timed are the steps in which all requests decode
(sglang_pat/bench/decoding.py); neither prefill nor admission is in it. The time of one server over
that of the other is a median over slices of all rounds; its quartiles say how noisy the run was.

A model is a minute of starting and 20 seconds per case. With --json a file that exists is
continued, so that models can be measured one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metadata import gpu_state, metadata
from rich.table import Table
from serving.hybrids import HYBRIDS, HybridModel
from serving.latency import difference, read_ratio
from serving.models import TINY
from serving.results import earlier, write
from serving.tables import console

from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, decode_run, ratio, tpot
from sglang_pat.bench.http_server import wait_for_all
from sglang_pat.bench.server import (
    START_SECONDS,
    Server,
    contender,
    running_server,
    sampling_of,
)

BACKENDS = ("pat", "default")
TOKENS = 264  # of an answer
# Of the prompts, answered anew each time. A cache of recurrent states begins at a state that it
# has kept, which is at a multiple of its chunks: prefix and private tokens are such multiples.
TAIL = 2
# Where nothing is shared: pat's time over the default's.
UNSHARED_LIMIT = 1.02
# A ratio is judged by its median and two standard errors, if its quartiles are no further apart.
MOST_NOISE = 0.10

_CASES = {
    "shared": Case(128, 8192, 256, TOKENS),
    "unshared": Case(128, 0, 1024, TOKENS),
}
_TINY_CASES = {
    "shared": Case(6, 256, 64, 48),
    "unshared": Case(6, 0, 64, 48),
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
        server.generate(prompts, sampling_of(4))  # compiles what is compiled at first use
    before, state = servers["pat"].stats(), gpu_state()
    runs: dict[str, list[DecodeRun]] = {backend: [] for backend in servers}
    for _ in range(rounds):
        for backend, server in servers.items():
            runs[backend].append(decode_run(server, prompts, case.generated))
    counted = difference(servers["pat"].stats(), before)
    return summary(runs) | {
        "model": model.name,
        "case": name,
        "batch": case.batch,
        "prefix": case.prefix,
        "private": case.private,
        "tokens": case.generated,
        "pat_stats": counted | {"kv_read_ratio": read_ratio(counted)},
        "gpu": {"before": state, "after": gpu_state()},
    }


def _fill_cache(server: Server, case: Case, prompts: list[list[int]]) -> None:
    server.flush()
    if case.prefix:  # first alone, so that the prompts find it
        server.generate([prompts[0][: case.prefix]], sampling_of(1))
    server.generate(prompts, sampling_of(1))


def summary(runs: Mapping[str, Sequence[DecodeRun]]) -> dict[str, Any]:
    """Times per token and their ratio, with quartiles. runs: by backend, in the order of rounds."""
    times = {backend: tpot(passes) for backend, passes in runs.items()}
    return {
        "tpot_ms": {backend: spread.median for backend, spread in times.items()},
        "tpot_spread_ms": {backend: spread.as_dict() for backend, spread in times.items()},
        "rounds_ms": {backend: [run.tpot_ms for run in passes] for backend, passes in runs.items()},
        "default_over_pat": ratio(runs["default"], runs["pat"]).as_dict(),
        "first_ms": {backend: [run.first_ms for run in passes] for backend, passes in runs.items()},
        "share_of_prompts_cached": {
            backend: min(run.cached for run in passes) for backend, passes in runs.items()
        },
    }


def gates(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What has to hold, by model and case: whether it does, and by what numbers."""
    found: dict[str, Any] = {}
    for case in cases:
        spread = case["default_over_pat"]
        limit = 1.0 if case["case"] == "shared" else 1 / UNSHARED_LIMIT
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


def run(model: HybridModel, names: Sequence[str], rounds: int) -> tuple[list[Any], dict[str, Any]]:
    """All cases of a model with one start of each server, and what the servers are."""
    arguments = model.shape.arguments
    with (
        tempfile.TemporaryDirectory(prefix="bench-hybrid-") as folder,
        contextlib.ExitStack() as up,
    ):
        path = model.shape.write(Path(folder))
        servers = {
            backend: up.enter_context(
                running_server(contender(backend), path, path, wait=False, **arguments)
            )
            for backend in BACKENDS
        }
        seconds = wait_for_all(
            {backend: server.process for backend, server in servers.items()}, START_SECONDS
        )
        about = {
            backend: _about(server) | {"start_seconds": seconds[backend]}
            for backend, server in servers.items()
        }
        ready = ", ".join(f"{backend} {seconds[backend]:.0f} s" for backend in BACKENDS)
        console.print(f"{model.name}: ready after {ready}")
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
    return f"{times} per token: {_between(case['default_over_pat'], 'x')}"


def _between(spread: Mapping[str, float], unit: str = "") -> str:
    """The median, and the quartiles in brackets."""
    return f"{spread['median']:.3f}{unit} ({spread['low']:.3f} to {spread['high']:.3f})"


def show(data: Mapping[str, Any]) -> None:
    table = Table(title="ms per output token: median (quartiles)")
    for column in ("model", "case", *BACKENDS, "default / pat", "KV read ratio", "gate"):
        table.add_column(column, justify="right")
    for case in data["cases"]:
        read = case["pat_stats"]["kv_read_ratio"]
        gate = data["gates"][f"{case['model']}, {case['case']}"]
        too_noisy = "" if gate["noise"] <= MOST_NOISE else ": too noisy"
        table.add_row(
            case["model"],
            case["case"],
            *(_between(case["tpot_spread_ms"][backend]) for backend in BACKENDS),
            _between(case["default_over_pat"]),
            "" if read is None else f"{read:.3f}",
            "passed" if gate["passed"] else f"FAILED{too_noisy}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    models = [name for name in HYBRIDS if name != TINY]
    parser.add_argument("--models", nargs="+", default=models, choices=HYBRIDS)
    parser.add_argument("--cases", nargs="+", default=list(_CASES), choices=_CASES)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more; got {args.rounds}")
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
