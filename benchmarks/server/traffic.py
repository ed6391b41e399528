"""Compares pat with SGLang's backends in SGLang's server, at rising request rates.

    python benchmarks/server traffic [--backends pat fa3 flashinfer triton] [--long] [--json FILE]

The models have 8B shapes and random weights, and servers run one after another. The requests come
from SGLang's own client, `python -m sglang.bench_serving`, with its generated-shared-prefix
dataset: groups of requests that share a system prompt, which with --long has 60,000 tokens. The
client gets its own home folder, because it stores prompts there under a name that does not depend
on the vocabulary.

With --json, each rate is written when it is done, and an existing file is continued, so that
backends and models can be measured by separate commands. For batches that start together, use
`sglang-pat bench` or `server compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.metadata import gpu_id, gpu_state, metadata
from common.models import MODELS, TINY, ModelShape
from common.results import earlier, write
from common.suites import add_option
from common.terminal import console, show_failure, table_of
from sglang_pat.bench.http_server import as_flags
from sglang_pat.bench.server import REPLAN, Server, contender, running_server
from sglang_pat.cli.arguments import real_number
from sglang_pat.sglang.cpu import STUB_DIR, cuda_driver_is_present

CLIENT_SECONDS = 300
LONG_CONTEXT = 131_072
METRICS = (
    "duration",
    "completed",
    "concurrency",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    *(
        f"{of}_{what}_ms"
        for what in ("ttft", "tpot", "itl", "e2e_latency")
        for of in ("mean", "median", "p99")
    ),
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of SGLang's client.

    There are `groups` system prompts. Each request has one question. Requests arrive at random for
    `seconds` at each of the `rates`, in requests per second.
    """

    groups: int
    system_prompt: int
    question: int
    answer: int
    seconds: float
    rates: tuple[float, ...]

    def per_group(self, rate: float) -> int:
        """Return the requests of each group at `rate`, at least one."""
        return max(1, round(rate * self.seconds / self.groups))


def traffic_of(model: ModelShape, *, long: bool = False) -> Traffic:
    if model.name == TINY:
        return Traffic(2, 640 if long else 64, 8, 8, seconds=3, rates=(1.0, 2.0))
    if long:
        return Traffic(2, 60_000, 1024, 256, seconds=20, rates=(2.0,))
    return Traffic(8, 4096, 128, 256, seconds=20, rates=(4.0, 8.0, 16.0, 32.0))


def with_context(model: ModelShape, tokens: int) -> ModelShape:
    """Return the model with a context for prompts of `tokens` tokens."""
    return replace(
        model,
        config=model.config | {"max_position_embeddings": tokens},
        arguments=model.arguments | {"context_length": tokens},
    )


def measure(server: Server, traffic: Traffic, rate: float, model: Path) -> dict[str, Any]:
    """Run the client on `traffic` at `rate`. model: folder with the tokenizer.

    RuntimeError, with the client's output, if it fails or if a request was not answered.
    """
    per_group = traffic.per_group(rate)
    # The client's own warm-up and flush do not wait for the server to become idle.
    warm_up = {"temperature": 0, "max_new_tokens": 4}
    server.generate([[token] * traffic.question for token in range(1, 33)], warm_up)
    server.flush()
    output = model / "client.jsonl"
    output.unlink(missing_ok=True)
    arguments = {
        "backend": "sglang",
        "base_url": server.url,
        "model": model,
        "tokenizer": model,
        "dataset_name": "generated-shared-prefix",
        "gsp_num_groups": traffic.groups,
        "gsp_prompts_per_group": per_group,
        "gsp_system_prompt_len": traffic.system_prompt,
        "gsp_question_len": traffic.question,
        "gsp_output_len": traffic.answer,
        "request_rate": rate,
        "seed": 1,
        "warmup_requests": 0,
        "disable_tqdm": True,
        "output_file": output,
    }
    # Packages that are installed in the old home must stay visible.
    environment = {
        **os.environ,
        "HOME": str(model),
        "PYTHONUSERBASE": site.getuserbase(),
        "HF_HUB_OFFLINE": "1",
    }
    if not cuda_driver_is_present():
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(STUB_DIR), os.environ.get("PYTHONPATH")))
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sglang.bench_serving", *as_flags(arguments)],
            env=environment,
            timeout=CLIENT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"sglang.bench_serving at {rate:g} req/s: {error}") from error
    if done.returncode or not output.exists():
        raise RuntimeError(
            f"sglang.bench_serving failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    reported = json.loads(output.read_text().splitlines()[-1])
    requests = traffic.groups * per_group
    if reported["completed"] != requests:
        raise RuntimeError(
            f"{reported['completed']} of {requests} requests answered:\n{done.stdout}"
        )
    return {"requests": requests, **{name: reported[name] for name in METRICS}}


def added(entries: Sequence[dict[str, Any]], entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a backend's entry for a rate, which replaces an earlier one."""
    names = ("model", "backend", "request_rate")
    return [each for each in entries if any(each[n] != entry[n] for n in names)] + [entry]


def show(entries: Sequence[dict[str, Any]]) -> None:
    """Print a table for each model."""
    for model in dict.fromkeys(each["model"] for each in entries):
        times = [f"{what} {of}" for what in ("TTFT", "TPOT", "ITL") for of in ("p50", "p99")]
        table = table_of(
            f"{model}: sglang.bench_serving, shared system prompts, ms",
            ("req/s", "backend", "output tokens/s", "concurrency", *times),
        )
        of_model = [each for each in entries if each["model"] == model]
        for entry in sorted(of_model, key=lambda each: each["request_rate"]):
            metrics = [f"{o}_{w}_ms" for w in ("ttft", "tpot", "itl") for o in ("median", "p99")]
            table.add_row(
                f"{entry['request_rate']:g}",
                entry["backend"],
                f"{entry['output_throughput']:,.0f}",
                f"{entry['concurrency']:.1f}",
                *(f"{entry[name]:.2f}" for name in metrics),
            )
        console.print(table)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--backends",
        default=["pat", "fa3", "flashinfer", "triton"],
        help=f"SGLang's attention backends, or {REPLAN.name}: pat with new plans all the time "
        "(default: %(default)s)",
    )
    parser.add_argument("--models", nargs="+", default=["llama-3-8b"], choices=MODELS)
    parser.add_argument("--long", action="store_true", help="system prompts of 60,000 tokens")
    parser.add_argument(
        "--rates", nargs="+", type=real_number(1e-3, 1e6), metavar="N", help="requests per second"
    )
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    data: dict[str, Any] = {"meta": metadata(), "serving": []}
    if args.json and args.json.exists():
        data = earlier(args.json, data["meta"])
    failures = []
    for model in map(MODELS.__getitem__, args.models):
        traffic = traffic_of(model, long=args.long)
        if args.long and model.name != TINY:
            model = with_context(model, LONG_CONTEXT)
        for backend in args.backends:
            console.print(f"{model.name}: starting the server with {backend}")
            try:
                with (
                    tempfile.TemporaryDirectory(prefix="bench-traffic-") as folder,
                    running_server(
                        contender(backend),
                        path := model.write(Path(folder)),
                        path,
                        **model.arguments,
                    ) as server,
                ):
                    for rate in args.rates or traffic.rates:
                        entry = {"model": model.name, "backend": backend, "request_rate": rate}
                        gpu = {"id": gpu_id(), "before": gpu_state()}
                        entry |= measure(server, traffic, rate, path)
                        entry["gpu"] = gpu | {"after": gpu_state()}
                        data["serving"] = added(data["serving"], entry)
                        write(args.json, data)
                        ms = entry["median_tpot_ms"]
                        console.print(f"  {rate:g} req/s: {ms:.2f} ms per token")
            except (RuntimeError, TimeoutError) as error:
                failures.append(f"{backend}, {model.name}: {error}")
    show(data["serving"])
    for failure in failures:
        show_failure(failure)
    return 1 if failures else 0
