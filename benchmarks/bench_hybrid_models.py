"""Models of which pat decodes some layers: time per output token, pat against SGLang's default.

    python benchmarks/bench_hybrid_models.py [--models gpt-oss-20b ...] [--cases shared unshared]
        [--profile] [--seconds N] [--json FILE]

Two servers of each model, one with pat and one with the backend that SGLang chooses. All start at
the same moment and share the GPU; then one at a time is asked while the others sleep. What is timed
are the steps in which all requests decode (sglang_pat/bench/decoding.py); neither prefill nor
admission is in it. The time of one server over that of the other is a median over slices of all
rounds; its quartiles say how noisy the run was.

A server that fails takes its model out, and the others go on: the end of its log is printed, and
the exit status is 1. With --seconds nothing more is begun after so many seconds. With --profile the
kernels of a decode step are timed after each case. With --json a file that exists is continued, so
that models can be measured one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from metadata import gpu_state, metadata
from rich.table import Table
from serving.hybrids import HYBRIDS, HybridModel
from serving.kernel_times import kernel_times, trace
from serving.latency import difference, read_ratio
from serving.models import TINY
from serving.results import earlier, write
from serving.tables import console, show_failure

from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, decode_run, ratio, tpot
from sglang_pat.bench.server import (
    START_SECONDS,
    Server,
    contender,
    running_server,
    sampling_of,
)

BACKENDS = ("pat", "default")
TOKENS = 104  # of an answer
# Of the prompts, answered anew each time. A cache of recurrent states begins at a state that it
# has kept, which is at a multiple of its chunks: prefix and private tokens are such multiples.
TAIL = 2
# Where nothing is shared: pat's time over the default's.
UNSHARED_LIMIT = 1.02
# A ratio is judged by its median and two standard errors, if its quartiles are no further apart.
MOST_NOISE = 0.10

PROFILED_STEPS = 12
TRACE_SECONDS = 20
LONGEST_KERNELS = 8  # that are shown
TAIL_LINES = 30  # of the log of a server that failed
_POLL_SECONDS = 0.3

_CASES = {
    "shared": Case(128, 8192, 256, TOKENS),
    "unshared": Case(128, 0, 512, TOKENS),
}
_TINY_CASES = {
    "shared": Case(6, 256, 64, 48),
    "unshared": Case(6, 0, 64, 48),
}


class Model:
    """A model that is served: its two servers by backend, and why they cannot be asked any more."""

    def __init__(self, model: HybridModel, folder: Path, up: contextlib.ExitStack) -> None:
        self.model = model
        self.name = model.name
        self.folder = folder
        self.failure: str | None = None
        self.start_seconds: dict[str, float] = {}
        self.measured: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        path = model.shape.write(folder)
        self.servers = {
            backend: up.enter_context(
                running_server(
                    contender(backend), path, folder, wait=False, **model.shape.arguments
                )
            )
            for backend in BACKENDS
        }

    @property
    def is_ready(self) -> bool:
        return len(self.start_seconds) == len(self.servers)

    def look(self, begun: float) -> None:
        """Whether more servers are ready."""
        for backend, server in self.servers.items():
            if backend not in self.start_seconds and self.failure is None:
                with self.watched(backend):
                    if server.process.is_ready():
                        self.start_seconds[backend] = time.monotonic() - begun

    @contextlib.contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """An error in the block takes the model out, with the end of the logs."""
        try:
            yield
        except Exception as error:
            self.fail(f"{what}: {_first_line(error)}")

    def fail(self, why: str) -> None:
        self.failure = why
        show_failure(f"{self.name}, {why}")
        for backend, server in self.servers.items():
            if backend not in self.start_seconds or server.process.process.poll() is not None:
                lines = server.process.log.read_text(errors="replace").splitlines()
                text = "\n".join(line[:400] for line in lines[-TAIL_LINES:])
                print(f"--- the log of {backend}, {self.name}:\n{text}\n---", flush=True)

    def case(self, name: str) -> Case:
        return (_TINY_CASES if self.name == TINY else _CASES)[name]

    def prompts(self, name: str) -> list[list[int]]:
        """What is asked: all but the TAIL is in the cache."""
        cached = self.case(name).prompts(self.model.shape.vocab_size)
        return [prompt + prompt[:TAIL] for prompt in cached]

    def fill(self, name: str) -> None:
        """Fill the caches of both servers, and compile what is compiled at first use."""
        case, prompts = self.case(name), self.prompts(name)
        for server in self.servers.values():
            server.flush()
            if case.prefix:  # first alone, so that the prompts find it
                server.generate([prompts[0][: case.prefix]], sampling_of(1))
            server.generate([prompt[:-TAIL] for prompt in prompts], sampling_of(1))
            server.generate(prompts, sampling_of(4))

    def measure(self, name: str, rounds: int) -> dict[str, Any]:
        """One case on both servers, in turn. Their caches hold the prompts."""
        case, prompts = self.case(name), self.prompts(name)
        before, state = self.servers["pat"].stats(), gpu_state()
        runs: dict[str, list[DecodeRun]] = {backend: [] for backend in self.servers}
        for _ in range(rounds):
            for backend, server in self.servers.items():
                runs[backend].append(decode_run(server, prompts, case.generated))
        counted = difference(self.servers["pat"].stats(), before)
        found = summary(runs) | {
            "model": self.name,
            "case": name,
            "batch": case.batch,
            "prefix": case.prefix,
            "private": case.private,
            "tokens": case.generated,
            "pat_stats": counted | {"kv_read_ratio": read_ratio(counted)},
            "gpu": {"before": state, "after": gpu_state()},
        }
        self.measured.append(found)
        return found

    def profile(self, name: str) -> dict[str, Any]:
        """Of both servers, what the GPU does in a step of the case."""
        found = {}
        for backend, server in self.servers.items():
            folder = self.folder / f"trace-{backend}-{name}"
            folder.mkdir()
            events = trace(
                server,
                self.prompts(name),
                folder,
                steps=PROFILED_STEPS,
                seconds=TRACE_SECONDS,
            )
            found[backend] = kernel_times(events)
        return found

    def about(self) -> dict[str, Any]:
        """What is served, and what the servers say of themselves."""
        return {
            "config": self.model.shape.config,
            "arguments": self.model.shape.arguments,
            "full_attention_layers": self.model.full_layers,
            "cut_from": self.model.cut,
            "servers": {
                backend: _about(server) | {"start_seconds": self.start_seconds[backend]}
                for backend, server in self.servers.items()
            },
        }


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


def run(args: argparse.Namespace, save: Callable[[Sequence[Model]], None]) -> list[str]:
    """All cases of all models with one start of each server. Returns what went wrong.

    save: is given all models whenever a case is there, so that nothing is lost to a kill.
    """
    begun = time.monotonic()
    models: list[Model] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-hybrid-") as name,
        contextlib.ExitStack() as up,
    ):
        for chosen in args.models:
            folder = Path(name, chosen)
            folder.mkdir()
            models.append(Model(HYBRIDS[chosen], folder, up))
        up.callback(_end_all, models)  # before each ends its own
        left = _wait(models, begun, args.start_seconds)
        for model in left:
            with model.watched("server_info"):
                model.result = model.about()
        for case in args.cases:
            with ThreadPoolExecutor(len(models)) as pool:
                list(pool.map(_fill, left, [case] * len(left)))
            left = [model for model in left if model.failure is None]
            console.print(f"[{time.monotonic() - begun:.0f} s] {case}: caches are filled")
            for model in left:
                if time.monotonic() - begun > args.seconds:
                    show_failure(f"{model.name}, {case}: not begun after {args.seconds:.0f} s")
                    continue
                with model.watched(case):
                    found = model.measure(case, args.rounds)
                    console.print(f"  {model.name}, {case}: {_times(found)}")
                save(models)
            for model in left if args.profile else ():
                if model.failure is None and time.monotonic() - begun < args.seconds:
                    _profile(model, case)
                save(models)
            left = [model for model in left if model.failure is None]
    return [f"{model.name}: {model.failure}" for model in models if model.failure]


def _end_all(models: Sequence[Model]) -> None:
    """At once: each of them takes its time to give back the GPU's memory."""
    for model in models:
        for server in model.servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.process.pid, signal.SIGKILL)


def _wait(models: Sequence[Model], begun: float, seconds: float) -> list[Model]:
    """Until all servers are ready, or have failed, or take too long. Returns the ready models."""
    waiting = list(models)
    while waiting and time.monotonic() - begun < seconds:
        for model in waiting:
            model.look(begun)
        waiting = [model for model in waiting if not model.is_ready and model.failure is None]
        time.sleep(_POLL_SECONDS)
    for model in waiting:
        model.fail(f"not ready after {seconds:.0f} s")
    ready = [model for model in models if model.failure is None]
    for model in ready:
        seconds_of = ", ".join(f"{name} {took:.0f} s" for name, took in model.start_seconds.items())
        console.print(f"{model.name}: ready after {seconds_of}")
    return ready


def _fill(model: Model, case: str) -> None:
    with model.watched(f"{case}, filling the caches"):
        model.fill(case)


def _profile(model: Model, case: str) -> None:
    """Beside what was measured. Without a trace the model is measured all the same."""
    try:
        kernels = model.profile(case)
    except Exception as error:
        show_failure(f"{model.name}, {case}, profile: {_first_line(error)}")
        return
    model.measured[-1]["step_us"] = kernels
    for backend, found in kernels.items():
        console.print(
            f"  {model.name}, {case}, {backend}: a step of {found['span']:.0f} us, the GPU busy "
            f"for {found['busy']:.0f} us"
        )
        for name, (us, count) in list(found["kernels"].items())[:LONGEST_KERNELS]:
            print(f"    {us:8.1f} us in {count:5.1f} x {name}", flush=True)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


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
    parser.add_argument("--profile", action="store_true", help="time the kernels of a step")
    parser.add_argument(
        "--start-seconds",
        type=float,
        default=START_SECONDS,
        metavar="N",
        help="for servers to be ready (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, metavar="N", help="nothing is begun after"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more; got {args.rounds}")
    data: dict[str, Any] = {"meta": metadata(), "models": {}, "cases": [], "gates": {}}
    if args.json and args.json.exists():
        data = earlier(args.json, data["meta"])

    def save(models: Sequence[Model]) -> None:
        for model in models:
            if not model.measured:
                continue
            data["models"][model.name] = model.result
            done = [(case["model"], case["case"]) for case in model.measured]
            kept = [case for case in data["cases"] if (case["model"], case["case"]) not in done]
            data["cases"] = kept + model.measured
        data["gates"] = gates(data["cases"])
        if args.json:
            write(args.json, data)

    failures = run(args, save)
    show(data)
    for failure in failures:
        show_failure(failure)
    return 0 if not failures and all(gate["passed"] for gate in data["gates"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
