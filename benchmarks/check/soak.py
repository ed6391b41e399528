"""Soak test of pat under churn: answers, uptime and memory.

    python benchmarks/check soak [--minutes 10] [--unchecked] [--window N] [--backend default]
        [--json FILE]

The server has SGLANG_PAT_DEBUG=1, by which it plans every step and checks it with the radix tree
(not with --unchecked, as in production), and a KV pool that is too small. Waves of requests with
prefixes on three levels arrive at random. Some end at stop tokens, some are aborted, and some are
retracted when the pool is full. Between waves the cache is flushed. With --window, every other
layer has a sliding window, and on a GPU its own pool, which frees slots in each step. Some of the
requests are samples, which were first answered alone: their tokens must be the same, up to a tie.

The exit status is 1 if the server dies (a stale plan, a wrong slot), if a sample gets another
answer, if the schedulers' resident memory or the GPU memory grows by more than GROWTH after the
first minute, or if an event that must happen did not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.table import Table

from check.tiny_models import write_windows
from common.metadata import metadata
from common.results import write
from common.suites import add_option
from common.terminal import console, show_failure
from common.tiny_model import NUM_SPECIAL_TOKENS, TinyModel
from sglang_pat.bench.answers import Answer, Parting, agreement, with_candidates
from sglang_pat.bench.http_server import HttpServer
from sglang_pat.bench.server import Server, contender, running_server
from sglang_pat.cli.arguments import real_number, whole_number
from sglang_pat.sglang.cpu import cuda_driver_is_present

WAVE_SECONDS = 20
MAX_WAITING = 96  # requests at once, including SGLang's queue
MIB = 1 << 20
GROWTH_MIB = 64
GROWTH_SHARE = 0.05
SAMPLES = 12
CANDIDATES = 8  # top tokens at each position of a sample
NUM_SYSTEM_PROMPTS = 2
SYSTEM_TOKENS = 200  # at least, or a window
DOCUMENTS = 3  # documents per system prompt
# Fractions of the requests that are samples, that end at a stop token, and that are aborted.
SHARE_OF_SAMPLES, SHARE_STOPPED, SHARE_ABORTED = 0.25, 0.25, 0.15
# Makes SGLang expect that requests need little KV, so that it admits too many.
_ADMIT_TOO_MANY = {"schedule_conservativeness": 0.1}
MODEL = TinyModel()


class Memory(NamedTuple):
    """Memory in MiB. host: by process title. device: used on all GPUs, or None without a GPU."""

    host: dict[str, float]
    device: float | None

    @property
    def schedulers(self) -> float:
        """Memory of the scheduler processes, which plan and decode, one per rank."""
        return sum(size for title, size in self.host.items() if "scheduler" in title)


def memory_of(server: HttpServer) -> Memory:
    host: dict[str, float] = {}
    for pid in server.processes():
        try:
            process = psutil.Process(pid)
            words = process.cmdline()
            title = words[0] if words and words[0].startswith("sglang::") else "server"
            host[title] = host.get(title, 0) + process.memory_info().rss / MIB
        except psutil.NoSuchProcess:  # the process has just ended
            continue
    return Memory(host, _device_memory())


def _device_memory() -> float | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    sizes = done.stdout.split()
    return sum(map(float, sizes)) if done.returncode == 0 and sizes else None


class Setup(NamedTuple):
    """Settings of a soak.

    rate: requests per second. tie: largest difference of log-probabilities in a tie, about ten
    times the rounding in this model.
    """

    arguments: dict[str, Any]
    rate: float
    tie: float


ON_GPU = Setup(
    {
        "dtype": "float16",
        "max_total_tokens": 1600,
        "max_running_requests": 64,
        "cuda_graph_backend_prefill": "disabled",
    },
    rate=60.0,
    tie=0.02,
)
ON_CPU = Setup(
    {
        "dtype": "float32",
        "device": "cpu",
        "disable_cuda_graph": True,
        "max_total_tokens": 1400,
        "max_running_requests": 16,
    },
    rate=8.0,
    tie=1e-4,
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request. abort_after: seconds, or None. sample: index of the sample, or None."""

    prompt: list[int]
    sampling: dict[str, Any]
    abort_after: float | None = None
    sample: int | None = None


class Workload:
    """Generates an endless sequence of requests from a seed."""

    def __init__(self, seed: int, system_tokens: int = SYSTEM_TOKENS) -> None:
        self._random = random.Random(seed)
        self._system_tokens = system_tokens
        systems = [self._tokens(system_tokens) for _ in range(NUM_SYSTEM_PROMPTS)]
        self._contexts = [s + self._tokens(80) for s in systems for _ in range(DOCUMENTS)]
        self.samples = [
            Request(self._prompt(), _sampling(self._random.randint(24, 64)), sample=index)
            for index in range(SAMPLES)
        ]

    def requests(self) -> Iterator[Request]:
        while True:
            kind = self._random.random()
            if kind < SHARE_OF_SAMPLES:
                yield self._random.choice(self.samples)
                continue
            sampling = _sampling(self._random.randint(8, 120))
            abort_after = None
            if kind < SHARE_OF_SAMPLES + SHARE_STOPPED:
                sampling["stop_token_ids"] = self._tokens(40)
            elif kind < SHARE_OF_SAMPLES + SHARE_STOPPED + SHARE_ABORTED:
                abort_after = self._random.uniform(0.02, 1.0)
            yield Request(self._prompt(), sampling, abort_after)

    def gap(self, rate: float) -> float:
        """Return the seconds until the next arrival."""
        return self._random.expovariate(rate)

    def _prompt(self) -> list[int]:
        # Some requests are only a system prompt, so that they end within others' prefix.
        context = self._random.choice(self._contexts)
        if self._random.random() < 0.1:
            context = context[: self._system_tokens]
        return context + self._tokens(self._random.randint(1, 60))

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(NUM_SPECIAL_TOKENS, MODEL.vocab_size), k=count)


class Soak:
    """The soak of a server."""

    def __init__(self, server: Server, setup: Setup, workload: Workload) -> None:
        self._server = server
        self._setup = setup
        self._workload = workload
        self._expected: list[Answer] = []
        self.ended: Counter[str] = Counter()  # number of requests by end and by event
        self.errors: list[Parting] = []
        self.ties = 0

    def answer_samples(self) -> None:
        """Answer each sample alone, from an empty cache, for later comparisons."""
        for request in self._workload.samples:
            self._server.flush()
            answer = self._server.answer(
                request.prompt, request.sampling, **with_candidates(CANDIDATES)
            )
            self._expected.append(Answer.parse(answer))

    def wave(self, seconds: float) -> None:
        """Send requests for `seconds`. Return when all have ended and the cache is empty.

        RuntimeError if the server does not answer a request.
        """
        begin = time.monotonic()
        waiting: set[Future[None]] = set()
        with ThreadPoolExecutor(max_workers=2 * MAX_WAITING) as clients:
            for request in self._workload.requests():
                if time.monotonic() - begin > seconds:
                    break
                rid = f"soak-{sum(self.ended.values())}-{len(waiting)}-{time.monotonic_ns()}"
                waiting.add(clients.submit(self._ask, request, rid))
                if request.abort_after is not None:
                    clients.submit(self._abort, rid, request.abort_after)
                time.sleep(self._workload.gap(self._setup.rate))
                while len(waiting) >= MAX_WAITING:
                    time.sleep(0.01)
                    waiting = _still_waiting(waiting)
                waiting = _still_waiting(waiting)
        for each in waiting:
            each.result()
        self._server.flush()

    def _ask(self, request: Request, rid: str) -> None:
        more = with_candidates(CANDIDATES) if request.sample is not None else {}
        answer = self._server.answer(request.prompt, request.sampling, rid=rid, **more)
        reason = answer["meta_info"]["finish_reason"]
        stopped = reason["type"] == "stop"
        self.ended["stop token" if stopped else reason["type"]] += 1
        self.ended["retractions"] += answer["meta_info"].get("num_retractions", 0)
        if request.sample is not None:
            self.ended["samples compared"] += 1
            found = agreement(
                [Answer.parse(answer)], [self._expected[request.sample]], self._setup.tie
            )
            self.errors += [each._replace(request=request.sample) for each in found.errors]
            self.ties += len(found.partings) - len(found.errors)

    def _abort(self, rid: str, seconds: float) -> None:
        time.sleep(seconds)
        self._server.abort(rid)


def _still_waiting(waiting: set[Future[None]]) -> set[Future[None]]:
    """Return the futures that are not done. Raise the exception of one that failed."""
    for each in waiting:
        if each.done():
            each.result()
    return {each for each in waiting if not each.done()}


def _sampling(num_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": num_tokens}


def grown(before: Memory, after: Memory) -> list[str]:
    """Return descriptions of memory that has grown too much."""
    pairs = [("schedulers", before.schedulers, after.schedulers)]
    if before.device is not None and after.device is not None:
        pairs.append(("GPU", before.device, after.device))
    return [
        f"memory of {name} grew from {old:,.0f} to {new:,.0f} MiB"
        for name, old, new in pairs
        if new - old > GROWTH_MIB + GROWTH_SHARE * old
    ]


def missing(ended: Counter[str]) -> list[str]:
    """Return the events that should have happened and did not."""
    expected = ("length", "stop token", "abort", "retractions", "samples compared")
    return [f"no {name}" for name in expected if not ended[name]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=real_number(0.01, 1e5), default=10, metavar="N")
    parser.add_argument("--unchecked", action="store_true", help="without SGLANG_PAT_DEBUG")
    parser.add_argument(
        "--window", type=whole_number(1, 4096), metavar="N", help="tokens of a window"
    )
    parser.add_argument("--backend", choices=("pat", "default"), default="pat")
    add_option(parser, "--seed", default=1)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    setup = ON_GPU if cuda_driver_is_present() else ON_CPU
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        debug = {} if args.unchecked else {"SGLANG_PAT_DEBUG": "1"}
        if args.window is not None:
            debug["SGLANG_SWA_EVICTION_INTERVAL"] = "1"
            # On a CPU, SGLang's attention would read the window pool with slots of the other pool.
            setup.arguments["disable_hybrid_swa_memory"] = setup is ON_CPU
            # SGLang 0.5.17 loses the end of a prompt if it cuts two at once (docs/support.md), so
            # prompts are not cut. Without chunks, it reserves memory for max_prefill_tokens.
            setup.arguments.update(chunked_prefill_size=-1, max_prefill_tokens=4096)
        result = soak(
            Path(folder),
            setup,
            60 * args.minutes,
            args.seed,
            debug,
            backend=args.backend,
            window=args.window,
        )
    console.print(json.dumps({name: result[name] for name in ("ended", "ties")}))
    for failure in result["failures"]:
        show_failure(failure)
    write(args.json, {"meta": metadata(), **result})
    return 1 if result["failures"] else 0


def soak(
    folder: Path,
    setup: Setup,
    seconds: float,
    seed: int,
    environment: dict[str, str],
    *,
    backend: str = "pat",
    window: int | None = None,
) -> dict[str, Any]:
    """Run waves until `seconds` are over.

    Returns the events, ready for JSON; `failures` is empty if all is well.
    """
    model = folder / "model"
    if window is None:
        MODEL.write(model)
    else:
        write_windows(MODEL, model, window)
    arguments = {"skip_tokenizer_init": True, **_ADMIT_TOO_MANY, **setup.arguments}
    system_tokens = max(SYSTEM_TOKENS, window or 0)
    arguments["max_total_tokens"] += NUM_SYSTEM_PROMPTS * (system_tokens - SYSTEM_TOKENS)
    console.print("starting the server")
    with running_server(
        contender(backend), model, folder, environment=environment, **arguments
    ) as server:
        run = Soak(server, setup, Workload(seed, system_tokens))
        samples: list[tuple[float, Memory]] = []
        failures: list[str] = []
        begin = time.monotonic()

        def take_sample() -> None:
            samples.append((time.monotonic() - begin, memory_of(server.process)))
            _show(*samples[-1], run.ended)

        try:
            run.answer_samples()
            take_sample()
            while time.monotonic() - begin < seconds:
                run.wave(min(WAVE_SECONDS, seconds / 3))
                take_sample()
        except RuntimeError as error:
            failures.append(str(error))
        stats = server.stats()
    warm = next((each for at, each in samples[1:] if at > min(60, seconds / 3)), None)
    if warm is not None:
        failures += grown(warm, samples[-1][1])
    failures += [f"sample answered differently: {error}" for error in run.errors]
    failures += missing(run.ended)
    return {
        "seconds": time.monotonic() - begin,
        "ended": dict(run.ended),
        "ties": run.ties,
        "memory_mib": [
            {"seconds": at, "host": memory.host, "device": memory.device} for at, memory in samples
        ],
        "stats": stats,
        "failures": failures,
    }


def _show(at: float, memory: Memory, ended: Counter[str]) -> None:
    table = Table.grid(padding=(0, 2))
    device = "" if memory.device is None else f"GPU {memory.device:,.0f} MiB"
    table.add_row(
        f"{at:5.0f} s",
        f"schedulers {memory.schedulers:,.0f} MiB",
        device,
        ", ".join(f"{name}: {count}" for name, count in sorted(ended.items())),
    )
    console.print(table)
