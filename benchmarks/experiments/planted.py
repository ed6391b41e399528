"""Plants errors in pat, which `sglang-pat check` must find without false alarms.

    python benchmarks/experiments planted [--kinds NAME ...] [--runs N] [--json FILE]

The kinds of errors are those of tests/support/fakes/planted_errors.py. They are planted in a pat
server without CUDA graphs. Another pat server, with graphs and without errors, answers other
requests in each run. FA3 answers the same requests, and Triton scores all answers, as in the
command. The model is the tiny trained one in float16, whose rounding is an eighth of bfloat16's, so
that errors of 1% show. On a CPU, torch_native in float32 is the other backend and scores the
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from fakes.planted_errors import FILE, KINDS
from fakes.plugins import install_plugin

from common.fleet import SHARED_GPU, Member, fleet, report_starts, wait, watched
from common.metadata import metadata
from common.results import at_least, at_most, write
from common.suites import SUPPORT, add_option
from common.terminal import console
from sglang_pat.bench.check_requests import Asked, generate, pool_tokens
from sglang_pat.bench.closeness import LogprobVerdict, judge
from sglang_pat.bench.prefill_scores import Reply, distances, over_http, score, serve
from sglang_pat.bench.server import Server, Start, contender
from sglang_pat.cli.arguments import whole_number
from sglang_pat.cli.check import ENVIRONMENT
from sglang_pat.cli.tiny_model import TRAINED
from sglang_pat.sglang.cpu import cuda_driver_is_present

ON_GPU = cuda_driver_is_present()
DTYPE = "float16" if ON_GPU else "float32"
OTHER, REFERENCE = ("fa3", "triton") if ON_GPU else ("torch_native", "torch_native")
REQUESTS, PREFIX, TOKENS = (48, 512, 64) if ON_GPU else (16, 128, 24)
CHUNK, RUNNING, SAMPLES = 128, 16, 2
PLANTED, CLEAN = "pat with errors", "pat"


def requests(seed: int) -> list[Asked]:
    vocab_size = json.loads((TRAINED / "config.json").read_text())["vocab_size"]
    return generate(
        REQUESTS,
        prefix=PREFIX,
        tokens=TOKENS,
        samples=SAMPLES,
        chunk=CHUNK,
        vocab_size=vocab_size,
        seed=seed,
    )


def starts(folder: Path) -> dict[str, Start]:
    """Return the servers. folder: for the plug-in that plants errors, and the error's name."""
    install_plugin(folder, "fakes.planted_errors")
    (folder / "error").write_text("")
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(folder), str(SUPPORT), *filter(None, inherited)])
    common: dict[str, Any] = {
        "dtype": DTYPE,
        "skip_tokenizer_init": True,
        "sleep_on_idle": True,
        "mem_fraction_static": 0.95,
        "chunked_prefill_size": CHUNK,
        "max_running_requests": RUNNING,
        "schedule_conservativeness": 0.1,  # forces retractions, as in the command
        "max_total_tokens": pool_tokens(requests(1), RUNNING),
    }
    if ON_GPU:
        common = SHARED_GPU | common | {"load_format": "auto", "cuda_graph_max_bs_decode": RUNNING}
    else:
        common |= {"device": "cpu", "disable_cuda_graph": True}
    strict = ENVIRONMENT | {"SGLANG_PAT_STRICT": "1"}
    error = {"PYTHONPATH": path, FILE: str(folder / "error")}
    eager = common | {"disable_cuda_graph": True}
    others = {OTHER: common, REFERENCE: common | {"max_total_tokens": 1 << 15}}
    return {
        PLANTED: Start(contender("pat"), TRAINED, eager, strict | error),
        CLEAN: Start(contender("pat"), TRAINED, common, strict),
        **{n: Start(contender(n), TRAINED, more, ENVIRONMENT) for n, more in others.items()},
    }


class Check:
    """Compares answers of servers as `sglang-pat check` does."""

    def __init__(self, members: Mapping[str, Member], error: Path) -> None:
        self.members = members
        self._error = error
        self._first: list[Reply] | None = None

    def kind(self, name: str) -> LogprobVerdict:
        """Compare while this error is planted. "" stands for no error."""
        asked = requests(1)
        if self._first is None:
            self._first = self._replies(OTHER, asked)
        self._error.write_text(name)
        try:
            replies = self._replies(PLANTED, asked)
        finally:
            self._error.write_text("")
        return self._verdict(asked, replies, self._first)

    def clean(self, seed: int) -> LogprobVerdict:
        asked = requests(seed)
        return self._verdict(asked, *(self._replies(name, asked) for name in (CLEAN, OTHER)))

    def _replies(self, name: str, asked: Sequence[Asked]) -> list[Reply]:
        server = self._server(name)
        server.flush()
        return serve(over_http(server), asked)[0]

    def _verdict(
        self, asked: Sequence[Asked], pat: Sequence[Reply], other: Sequence[Reply]
    ) -> LogprobVerdict:
        scores = score(over_http(self._server(REFERENCE)), asked, [*pat, *other])
        found = distances(asked, pat, scores), distances(asked, other, scores)
        return judge(asked, (pat, other), found, DTYPE, own_prefill=OTHER == REFERENCE)

    def _server(self, name: str) -> Server:
        member = self.members[name]
        if member.failure is not None:
            raise RuntimeError(f"{name} has failed")
        return member.server


def runs(check: Check, kinds: Sequence[str], number: int) -> Iterator[tuple[str, str, Any]]:
    """Yield the finding of each run: list of the result, name, and verdict or error."""
    begun = time.monotonic()

    def verdict(of: Any, what: Any) -> Any:
        with watched([*check.members.values()], str(what)) as failures:
            return of(what).as_dict() | {"after_seconds": time.monotonic() - begun}
        return {"failure": "; ".join(failures)}

    # The first run also uses FA3, whose cache is emptied before each further run.
    yield "without an error", "planted server", verdict(check.kind, "")
    with ThreadPoolExecutor(2) as pool:
        # One thread for each pat server, because two threads would empty each other's cache.
        found: Queue[tuple[str, str, Any]] = Queue()

        def work(where: str, of: Any, whats: Mapping[str, Any]) -> None:
            for name, what in whats.items():
                found.put((where, name, verdict(of, what)))

        seeds = {f"seed {seed}": seed for seed in range(2, 2 + number)}
        pool.submit(work, "with an error", check.kind, {kind: kind for kind in kinds})
        pool.submit(work, "without an error", check.clean, seeds)
        for _ in range(len(kinds) + number):
            yield found.get()


def fill(data: dict[str, Any], kinds: Sequence[str], number: int) -> None:
    """Add the counts of findings to the result."""
    found = [kind for kind in kinds if data["with an error"].get(kind, {}).get("is_close") is False]
    clean = data["without an error"].values()
    data["gates"] = {
        "kinds of planted errors that are found": at_least(len(found), len(kinds)),
        "runs without an error": at_least(sum("is_close" in each for each in clean), number + 1),
        "alarms without an error": at_most(sum(each.get("is_close") is False for each in clean), 0),
    }
    data["missed"] = [kind for kind in kinds if kind not in found]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, metavar="NAME")
    parser.add_argument("--runs", type=whole_number(0, 1000), default=20, metavar="N")
    add_option(parser, "--start-seconds", default=150)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    data: dict[str, Any] = {
        "meta": metadata(),
        "dtype": DTYPE,
        "requests": len(requests(1)),
        "with an error": {},
        "without an error": {},
    }
    with tempfile.TemporaryDirectory(prefix="bench-planted-") as name:
        folder = Path(name)
        with fleet(starts(folder), folder) as members:
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            for where, what, found in runs(Check(members, folder / "error"), args.kinds, args.runs):
                data[where][what] = found
                fill(data, args.kinds, args.runs)
                write(args.json, data)
                told = found.get("failure") or "; ".join(found["excesses"]) or "as close"
                console.print(f"{what}: {told}", markup=False)
    for name, gate in data["gates"].items():
        console.print(f"{name}: {gate['value']} ({'met' if gate['met'] else 'MISSED'})")
    return 0 if all(gate["met"] for gate in data["gates"].values()) else 1
