"""Host time of pat's decode steps in SGLang's server, by what has changed since the last step.

    python benchmarks/server planning [--json FILE]

One server, and three batches of 256 requests, 16 for each of 16 prompts. "same" are steps with the
requests of the step before; "leave" are steps that one has left, because each answer is a token
longer than the one before; "join" are steps that one has joined, because a quarter of the requests
come one by one, and the steps after, when its prompt has entered the tree. The times are those that
pat counts anyway (`sglang:pat_plan_seconds`): from SGLang's call to its return, with the plan on
its way to the GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from common.counters import difference
from common.metadata import gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import write
from common.suites import add_option
from common.terminal import console, table_of
from sglang_pat.bench.cases import Case
from sglang_pat.bench.server import Server, contender, running_server, sampling_of
from sglang_pat.stats import PlanningTimes, StepKind

CASE = Case(256, 1536, 64, 128, groups=16)
TINY_CASE = Case(8, 60, 5, 16, groups=2)
PERCENTS = (50, 90, 99)
# The counters lag behind by less than this.
_LAG_SECONDS = 0.3


def measure(server: Server, model: ModelShape, case: Case) -> dict[str, dict[str, Any]]:
    """By batch: steps, percentiles in microseconds, and the histogram that they are read from."""
    prompts = case.prompts(model.vocab_size)
    server.generate(prompts, sampling_of(4))  # into the tree
    found: dict[str, dict[str, Any]] = {}

    before = server.stats()
    server.generate(prompts, sampling_of(case.generated))
    found["same"] = _times(server.stats(), before, "unchanged")

    before = server.stats()
    first = case.generated // 4
    answers = range(first, first + case.batch)
    server.generate(prompts, [sampling_of(num_tokens) for num_tokens in answers])
    found["leave"] = _times(server.stats(), before, "changed")

    # Streams that are left open, and closed when all is counted: nobody leaves before.
    num_joining = case.batch // 4
    present, joining = prompts[:-num_joining], prompts[-num_joining:]
    endless = sampling_of(8 * case.generated, stream_interval=8 * case.generated)
    with ExitStack() as streams:

        def start(batch: list[list[int]]) -> None:
            stream = server.stream(batch, endless)
            streams.enter_context(closing(stream))
            for _ in batch:
                next(stream)  # the first token

        start(present)
        before = _now(server)
        for prompt in joining:
            start([prompt])
        after = _now(server)
    changes = difference(after, before)["batch_changes"]
    if (changes["join"], changes["leave"]) != (num_joining, 0):
        raise RuntimeError(f"{num_joining} requests were to join and none to leave: {changes}")
    found["join"] = _times(after, before, "changed")
    server.flush()
    return found


def _now(server: Server) -> dict[str, Any]:
    """The counters while requests are being answered."""
    assert server.stats_file is not None
    time.sleep(_LAG_SECONDS)
    counters: dict[str, Any] = json.loads(server.stats_file.read_text())
    return counters


def _times(after: Mapping[str, Any], before: Mapping[str, Any], kind: StepKind) -> dict[str, Any]:
    counts = difference(after, before)["planning_ns"][kind]
    histogram = Counter({int(bound): count for bound, count in counts.items() if count})
    times = PlanningTimes({kind: histogram})
    percentiles = {f"p{percent}_us": times.percentile_us(kind, percent) for percent in PERCENTS}
    return {"steps": histogram.total(), **percentiles, "histogram_ns": dict(histogram)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="llama-3-8b", choices=MODELS)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    model, pat = MODELS[args.model], contender("pat")
    case = TINY_CASE if model.name == TINY else CASE
    before = gpu_state()
    with tempfile.TemporaryDirectory(prefix="bench-planning-") as name:
        path = model.write(Path(name))
        with running_server(pat, path, path, **model.arguments) as server:
            found = measure(server, model, case)
    title = f"host time of a decode step of {case.batch} requests (us)"
    table = table_of(title, ("", "steps", *(f"p{percent}" for percent in PERCENTS)))
    for kind, times in found.items():
        percentiles = (f"{times[f'p{percent}_us']:.1f}" for percent in PERCENTS)
        table.add_row(kind, str(times["steps"]), *percentiles)
    console.print(table)
    meta = metadata() | {"gpu_before": before, "gpu_after": gpu_state()}
    write(args.json, {"meta": meta, "requests": case.batch, "steps": found})
    return 0
