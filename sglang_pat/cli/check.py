"""`sglang-pat check`: test whether pat is as exact as the current attention backend.

The command starts servers one after the other. The first runs pat and the second the current
backend, and both answer the same requests. A third server runs a reference backend and scores all
answers by prefills. If the default reference backend does not support the model, the scores of the
second server are used. `bench/closeness.py` describes the limits of the verdict.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_pat.bench import check_requests
from sglang_pat.cli.arguments import LARGEST_SEED, bounded, input_file, whole_number
from sglang_pat.cli.served_model import check_config
from sglang_pat.cli.server_options import (
    CPU_ARGUMENTS,
    DEFAULT,
    GPU_ARGUMENTS,
    add_server_options,
    backend_name,
    check_backend,
    check_server_options,
    new_console,
    run_metadata,
    server_flags,
    usable_gpus,
)
from sglang_pat.model_config import decoder_config
from sglang_pat.output_file import check_outputs, write_output
from sglang_pat.workload.models import config_file, naming, read_whole_config

if TYPE_CHECKING:
    from rich.table import Table

    from sglang_pat.bench.check_requests import Asked
    from sglang_pat.bench.closeness import LogprobVerdict
    from sglang_pat.bench.comparison import ComparedModel
    from sglang_pat.bench.prefill_scores import Distances, Reply
    from sglang_pat.bench.server import Server

DESCRIPTION = "check that pat is as close to a model as the present attention backend is"
MAX_RUNNING_REQUESTS = 24
# Tokens of a prefill chunk: so few that prompts are split, and a multiple of every page size.
CHUNK_TOKENS = 256
ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}  # lets SGLang admit more requests
LEAST_CONTEXT = 4 * CHUNK_TOKENS  # enough for the longest prompt: a prefix and two chunks
_CPU_BACKEND = "torch_native"  # SGLang's default needs a CPU with AMX
_GPU_REFERENCE = "triton"  # supports nearly every model
_SHARE_OF_CONTEXT = 4  # shared prefixes fill at most 1 / _SHARE_OF_CONTEXT of the context


class _Served(NamedTuple):
    """The answers of a server, its server info, and pat's counters."""

    replies: list[Reply]
    retractions: int
    info: dict[str, Any]
    stats: dict[str, Any]
    seconds: float


class _Scored(NamedTuple):
    """Distances of pat's and the other backend's answers from prefills by the backend `by`."""

    by: str
    distances: tuple[list[Distances], list[Distances]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and register `run` as the function to call."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="the folder of the model: config.json and weights",
    )
    parser.add_argument(
        "--prompts",
        type=input_file,
        metavar="FILE",
        help='JSON lines {"prompt": TEXT} or {"input_ids": [...]} (default: generated)',
    )
    for name, default, least, most, what in (
        ("--requests", 72, len(check_requests.KINDS), 2048, "prompts; of a file, the first ones"),
        ("--samples", 4, 0, 64, "sampled answers to every fourth prompt, beside its greedy one"),
        ("--tokens", 192, 8, 4096, "tokens of the longest answer"),
        ("--prefix", 1024, 64, 1 << 20, "tokens of the longest generated prefix, if they fit"),
        ("--seed", 1, 0, LARGEST_SEED, "of generated prompts and of sampling"),
    ):
        parser.add_argument(
            name,
            type=whole_number(least, most),
            default=default,
            metavar="N",
            help=f"{what} (default: {default})",
        )
    add_server_options(parser)
    parser.add_argument(
        "--reference",
        metavar="BACKEND",
        help="the backend whose prefills score all answers; the one of --against: no third server "
        f"is started (default: {_GPU_REFERENCE}; on a CPU {_CPU_BACKEND})",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and print.

    Returns
    -------
    int
        The exit status: 0 if pat is as close as the other backend, 1 if it is not, 2 if the input
        is wrong or nothing could be compared, 130 if interrupted.
    """
    try:
        model, dtype, asked = _prepare(arguments)
        gpus = usable_gpus(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        return _refuse(error)
    from sglang_pat.bench.closeness import judge
    from sglang_pat.bench.http_server import RefusedArguments

    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-pat-check-") as folder:
            pat, other, scored = _serve(arguments, model, asked, Path(folder))
        dtype = _resolved(dtype, other.info)
        own_prefill = scored.by == _chosen(other.info)
        replies = pat.replies, other.replies
        verdict = judge(asked, replies, scored.distances, dtype, own_prefill=own_prefill)
    except RefusedArguments as error:
        return _refuse(f"--server-args {arguments.server_args!r}: {error}")
    except (RuntimeError, TimeoutError, ValueError) as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("sglang-pat check: interrupted", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - begin
    name = backend_name(_backend(arguments, arguments.against), other.info)
    _show(verdict, name, scored.by, pat, seconds)
    if arguments.json is not None:
        result = {
            "meta": {
                **run_metadata(arguments, gpus),
                "dtype": dtype,
                "against": name,
                "reference": scored.by,
                "seconds": seconds,
            },
            "requests": {
                "asked": len(asked),
                "prompts": arguments.prompts and str(arguments.prompts),
                "longest": max(len(each.prompt) for each in asked),
            },
            "servers": {
                who: {"seconds": each.seconds, "retractions": each.retractions}
                for who, each in (("pat", pat), ("other", other))
            },
            "pat": pat.info.get("pat"),
            "stats": pat.stats,
            **verdict.as_dict(),
            "verdict": verdict.sentence(name),
        }
        write_output("--json", arguments.json, json.dumps(result, indent=1) + "\n")
    return 0 if verdict.is_close else 1


def _prepare(arguments: argparse.Namespace) -> tuple[ComparedModel, str, list[Asked]]:
    """Check the input and prepare the requests.

    Returns the model, the dtype that SGLang would choose, and the requests. Raises ValueError,
    RuntimeError or OSError, with a message that says what is wrong.
    """
    file = config_file(arguments.model)
    if not file.is_file():
        raise ValueError(
            f"--model {arguments.model!r}: no config.json there; allowed: the folder of a model"
        )
    label, config = read_whole_config(arguments.model)
    with naming(label):
        check_config(config, arguments)
    inputs = [file] if arguments.prompts is None else [file, arguments.prompts]
    check_outputs({"--json": arguments.json}, inputs)
    check_server_options(arguments)
    if arguments.reference is not None:
        check_backend("--reference", arguments.reference)
    from sglang_pat.bench.comparison import ComparedModel

    try:
        model = ComparedModel.of(config, file.parent)
        dtype = _chosen_dtype(decoder_config(config))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{file}: {error}") from None
    most = model.context_len - arguments.tokens - 1
    shared = {"tokens": arguments.tokens, "samples": arguments.samples, "seed": arguments.seed}
    if arguments.prompts is not None:
        prompts = check_requests.read_prompts(
            arguments.prompts, model.path, vocab_size=model.vocab_size, most=most
        )[: arguments.requests]
        different = len({*map(tuple, prompts)})
        if different < check_requests.LEAST_PROMPTS:
            raise ValueError(
                f"--prompts {arguments.prompts}: {different} different prompts; allowed: at least "
                f"{check_requests.LEAST_PROMPTS}"
            )
        return model, dtype, check_requests.ask(prompts, **shared)
    if most < LEAST_CONTEXT:
        raise ValueError(
            f"--tokens {arguments.tokens}: the context of {model.context_len} tokens leaves "
            f"{max(most, 0)} for prompts; allowed: what leaves {LEAST_CONTEXT}"
        )
    asked = check_requests.generate(
        arguments.requests,
        prefix=min(arguments.prefix, most // _SHARE_OF_CONTEXT),
        chunk=CHUNK_TOKENS,
        vocab_size=model.vocab_size,
        **shared,
    )
    return model, dtype, asked


def _chosen_dtype(config: Any) -> str:
    """Return the dtype that SGLang chooses for a config. For float32, that is float16."""
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return "float16" if dtype == "float32" else dtype


def _resolved(chosen: str, info: dict[str, Any]) -> str:
    """Return the dtype of a server: the one in its info, or `chosen` if its info says `auto`."""
    named = {"half": "float16", "float": "float32", "auto": chosen}
    dtype = str(info.get("dtype", "auto")).removeprefix("torch.")
    return named.get(dtype, dtype)


def _backend(arguments: argparse.Namespace, name: str) -> str:
    return _CPU_BACKEND if arguments.device == "cpu" and name == DEFAULT else name


def _chosen(info: dict[str, Any]) -> str:
    """Return the name of a server's prefill backend."""
    return str(info.get("prefill_attention_backend") or info.get("attention_backend"))


def _serve(
    arguments: argparse.Namespace, model: ComparedModel, asked: list[Asked], folder: Path
) -> tuple[_Served, _Served, _Scored]:
    """Start the servers one after the other, and get the answers and their distances.

    Returns the answers of pat, those of the other backend, and the distances of both. RuntimeError
    if pat has decoded nothing.
    """
    from sglang_pat.bench.prefill_scores import distances, over_http, score, serve
    from sglang_pat.bench.server import contender, running_server

    on_cpu = arguments.device == "cpu"
    given = {
        "skip_tokenizer_init": True,
        "max_running_requests": MAX_RUNNING_REQUESTS,
        "chunked_prefill_size": CHUNK_TOKENS,
        "schedule_conservativeness": 0.1,  # admits more requests than fit, to force retractions
        "random_seed": arguments.seed,
        **(CPU_ARGUMENTS if on_cpu else GPU_ARGUMENTS),
        "max_total_tokens": check_requests.pool_tokens(asked, MAX_RUNNING_REQUESTS),
        **({} if on_cpu else {"cuda_graph_max_bs_decode": MAX_RUNNING_REQUESTS}),
    }
    say = new_console().print

    @contextmanager
    def started(backend: str) -> Iterator[Server]:
        say(f"{backend}: SGLang's server starts")
        begin = time.perf_counter()
        how: dict[str, Any] = {"flags": server_flags(arguments), "environment": ENVIRONMENT}
        with running_server(contender(backend), model.path, folder, **how, **given) as server:
            say(f"{backend}: ready after {time.perf_counter() - begin:.0f} s")
            yield server

    def served(server: Server, backend: str) -> _Served:
        info, begin = server.info(), time.perf_counter()
        replies, retractions = serve(over_http(server), asked)
        seconds = time.perf_counter() - begin
        say(f"{backend}: {len(replies)} answers in {seconds:.0f} s")
        return _Served(replies, retractions, info, server.stats(), seconds)

    def scored(server: Server, info: dict[str, Any]) -> _Scored:
        server.flush()
        begin = time.perf_counter()
        scores = score(over_http(server), asked, [*pat.replies, *other.replies])
        by, seconds = _chosen(info), time.perf_counter() - begin
        say(f"{by}: {len(scores)} answers scored in {seconds:.0f} s")
        pats, others = (distances(asked, each.replies, scores) for each in (pat, other))
        return _Scored(by, (pats, others))

    with started("pat") as server:
        pat = served(server, "pat")
    if not pat.stats.get("plans_built"):
        raise RuntimeError(
            "pat has decoded no step of this model, which leaves nothing to compare: "
            f"{json.dumps(pat.info.get('pat'))}; `sglang-pat doctor --model PATH` says more"
        )
    against = _backend(arguments, arguments.against)
    asked_for = arguments.reference or (DEFAULT if on_cpu else _GPU_REFERENCE)
    reference = _backend(arguments, asked_for)
    with started(against) as server:
        other = served(server, against)
        if reference in (against, _chosen(other.info)):
            return pat, other, scored(server, other.info)
        own = None if arguments.reference else scored(server, other.info)
    try:
        with started(reference) as server:
            return pat, other, scored(server, server.info())
    except (RuntimeError, TimeoutError) as error:
        if own is None:
            raise
        say(f"{reference} does not serve this model; {own.by} scores its own answers: {error}")
        return pat, other, own


def _show(verdict: LogprobVerdict, other: str, by: str, pat: _Served, seconds: float) -> None:
    console = new_console()
    console.print(_table(verdict, other, by))
    steps = pat.stats["plans_built"] + pat.stats.get("plans_reused", 0)
    planned = pat.stats.get("kv_tokens_planned") or 1
    less = pat.stats.get("kv_tokens_query_centric", 0) / planned
    console.print(
        f"pat decoded {steps:,} steps and read {less:.2f} times fewer KV tokens than request by "
        f"request; requests retracted: {pat.retractions}; {seconds:.0f} s in all",
        soft_wrap=True,
    )
    parting = verdict.first_parting
    greedy = f"greedy answers: {verdict.greedy.positions:,} tokens equal"
    if parting is None:
        console.print(f"{greedy}, all {verdict.greedy.requests}", soft_wrap=True)
    else:
        gap = "unknown" if parting.gap is None else f"{parting.gap:.3g}"
        console.print(
            f"{greedy}, {len(verdict.greedy.partings)} of {verdict.greedy.requests} part; the "
            f"first at prompt {parting.request}, token {parting.position}: pat gave "
            f"{parting.tokens[0]}, {other} {parting.tokens[1]}, {gap} apart, "
            f"{'a near tie' if parting.is_tie else 'no near tie'} (limit {verdict.tie:.3g})",
            soft_wrap=True,
        )
    console.print(verdict.sentence(other), soft_wrap=True)  # else rich breaks the line in a pipe


def _table(verdict: LogprobVerdict, other: str, by: str) -> Table:
    from rich.table import Table

    table = Table(title=f"distance of decode from a prefill by {by}, in log-probability")
    for column in ("", "pat", other, "limit"):
        table.add_column(column, justify="right" if column else "left")
    table.add_column()
    for each in verdict.measures:
        numbers = (f"{value:.3g}" for value in (each.pat, each.other, each.limit))
        table.add_row(each.name, *numbers, "" if each.is_close else "beyond")
    return table


def _refuse(error: object) -> int:
    print(f"sglang-pat check: {bounded(error)}", file=sys.stderr)
    return 2
