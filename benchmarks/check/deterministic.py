"""Checks that deterministic servers give a request the same bits in every batch.

    python benchmarks/check deterministic [--json FILE]

pat and FA3 run with `--enable-deterministic-inference`. On a CPU, where SGLang refuses it, pat runs
in its batch-invariant mode, beside torch_native, in float32.

The trained model of `sglang-pat demo`, with positions stretched by YaRN, continues docstrings. Some
requests are sent alone with an empty cache, alone with a full one, and in batches of 7 and 128 that
share nothing or nearly everything: once greedily, and once with all requests sampled by their own
seeds. (Batches with both kinds take another path in SGLang's sampler.) Tokens and log-probabilities
must be equal to the last bit. If a first token differs, prefill is the cause, so pat may change no
more requests than FA3. All log-probabilities must be finite, and those of the docstrings high: if
SGLang's products computed nothing, all answers would be equal and wrong.

`server compare --scenarios deterministic` times the mode.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.counters import difference, read_ratio
from common.fleet import ON_CPU, SHARED_GPU, Member, fleet, report_starts, wait, watched
from common.metadata import metadata
from common.results import at_least, at_most, write
from common.suites import add_option
from common.terminal import console, show_failure, table_of
from sglang_pat.bench.server import START_SECONDS, Server, Start, contender, sampling_of
from sglang_pat.cli.tiny_model import TRAINED
from sglang_pat.sglang.cpu import cuda_driver_is_present

STRICT = {"SGLANG_PAT_STRICT": "1"}  # a fallback would compare nothing
INVARIANT = {"SGLANG_PAT_BATCH_INVARIANT": "1"}  # if SGLang has no such mode
TRAINED_CONTEXT = 1024  # longest sequence of the model's training
CONTEXT = 24 * TRAINED_CONTEXT
OWN = 40  # private tokens of a prompt
STRIDE = 1009  # tokens of text between the beginnings of prompts
ANSWER = 32  # tokens
PACKAGES = ("numpy", "scipy", "torch", "pandas", "networkx", "matplotlib", "transformers")
LEAST_LOGPROB = -4.0  # mean over text; -7.6 for 2,048 equally probable tokens
LARGEST_RATIO = 0.5  # KV that pat reads / query-centric, longest case

Bits = tuple[tuple[int, ...], tuple[float | None, ...]]
Done = Callable[[str, str, Any, Mapping[str, Any]], None]  # arguments: part, name, findings, gates


class Scale(NamedTuple):
    """Requests for this machine. probes: how many are also sent alone. samples: also sampled."""

    backends: tuple[str, str]
    lengths: tuple[int, ...]
    batch: int
    probes: int
    samples: bool
    arguments: dict[str, Any]
    environment: dict[str, str]


ON_GPU = Scale(
    ("pat", "fa3"),
    (300, 9_000, 20_000),
    128,
    7,
    True,
    SHARED_GPU
    | {
        "load_format": "auto",
        "enable_deterministic_inference": True,
        "context_length": CONTEXT,
        "chunked_prefill_size": 8192,
        "max_running_requests": 128,
        "max_total_tokens": 128 * 20_100,
        "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64, 128],
    },
    {},
)
WITHOUT_GPU = Scale(
    ("pat", "torch_native"),
    (60, 500),
    12,
    3,
    False,  # SGLang has no seeds on a CPU
    ON_CPU | {"context_length": CONTEXT, "max_running_requests": 16, "max_total_tokens": 1 << 14},
    INVARIANT,
)


def _config() -> dict[str, Any]:
    """Return the trained model's configuration, with a longer context."""
    config: dict[str, Any] = json.loads((TRAINED / "config.json").read_text())
    stretched = {
        "rope_type": "yarn",
        "factor": float(CONTEXT // TRAINED_CONTEXT),
        "original_max_position_embeddings": TRAINED_CONTEXT,
    }
    return config | {"max_position_embeddings": CONTEXT, "rope_scaling": stretched}


def write_trained(folder: Path) -> Path:
    shutil.copytree(TRAINED, folder)
    (folder / "config.json").write_text(json.dumps(_config(), indent=2) + "\n")
    return folder


def docstrings(packages: Path) -> Iterator[str]:
    """Yield docstrings of `PACKAGES`, each once, without tests and those below 200 characters."""
    seen = set()
    for package in PACKAGES:
        for file in sorted((packages / package).rglob("*.py")):
            if "tests" in file.relative_to(packages).parts:
                continue
            with warnings.catch_warnings(action="ignore"):
                try:
                    tree = ast.parse(file.read_text(errors="replace"))
                except SyntaxError:  # templates, and files for another Python
                    continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= 200 and text not in seen:
                        seen.add(text)
                        yield text


def text(count: int) -> list[int]:
    """Return tokens of docstrings of installed packages."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    found: list[int] = []
    written = docstrings(Path(torch.__file__).parents[1])
    while len(found) < count:
        some = [*islice(written, 512)]
        if not some:
            raise RuntimeError(f"docstrings of installed packages have {len(found)} tokens")
        for each in tokenizer.encode_batch_fast(some):
            found += each.ids
    return found


def prompts(tokens: Sequence[int], length: int, batch: int, *, shared: bool) -> list[list[int]]:
    head = [*tokens[: length - OWN]] if shared else []
    own = length - len(head)
    return [
        [*head, *tokens[begin : begin + own]]
        for begin in range(STRIDE, STRIDE * (batch + 1), STRIDE)
    ]


def bits(answer: Mapping[str, Any]) -> Bits:
    logprobs = tuple(each[0] for each in answer["meta_info"]["output_token_logprobs"])
    return tuple(answer["output_ids"]), logprobs


def same(one: Bits, other: Bits, count: int | None = None) -> bool:
    """Return True if the first tokens are equal, and on a GPU their log-probabilities too.

    On a CPU, SGLang's matrix products depend on the batch.
    """
    parts = slice(None) if cuda_driver_is_present() else slice(1)
    return [each[:count] for each in one[parts]] == [each[:count] for each in other[parts]]


def not_finite(answers: Sequence[Bits]) -> int:
    """Return the number of log-probabilities that are not finite, which are null in JSON."""
    found = (value for _, logprobs in answers for value in logprobs)
    return sum(value is None or not math.isfinite(value) for value in found)


def of_answers(
    server: Server, asked: Sequence[Sequence[int]], probes: int, *, sampled: bool
) -> dict[str, Any]:
    """Send some requests alone and in batches, and compare their bits.

    sampled: at temperature 1, with their own seeds. In the result, `different` counts the requests
    with other bits than alone, by batch, and `different_first` those whose first token differs.
    """
    own = [{"temperature": 1.0, "sampling_seed": i} if sampled else {} for i in range(len(asked))]
    sampling = [sampling_of(ANSWER) | each for each in own]
    chosen = [i * (len(asked) - 1) // (probes - 1) for i in range(probes)]

    def batch(indices: Sequence[int]) -> dict[int, Bits]:
        each = [asked[i] for i in indices], [sampling[i] for i in indices]
        answers = server.generate(*each, return_logprob=True)
        return dict(zip(indices, map(bits, answers), strict=True))

    alone: dict[int, Bits] = {}
    found: dict[str, dict[int, Bits]] = {"1, cached": {}}
    for i in chosen:
        server.flush()
        alone |= batch([i])
        found["1, cached"] |= batch([i])
    server.flush()
    found[f"{probes}"] = batch(chosen)
    server.flush()
    found[f"{len(asked)}"] = batch(range(len(asked)))
    found[f"{len(asked)}, reversed, cached"] = batch([*reversed(range(len(asked)))])
    everything = [each for some in (alone, *found.values()) for each in some.values()]
    return {
        "prompts": probes,
        "different": {
            name: sum(not same(some[i], alone[i]) for i in chosen) for name, some in found.items()
        },
        "different_first": {
            name: sum(not same(some[i], alone[i], 1) for i in chosen)
            for name, some in found.items()
        },
        "different_answers": len({tokens for tokens, _ in everything}),
        "log_probabilities": sum(len(each) for _, each in everything),
        "not_finite": not_finite(everything),
        "alone": [each[0] for each in alone.values()],
    }


def mean_logprob(server: Server, tokens: Sequence[int]) -> float:
    """Return the mean log-probability of a text's tokens."""
    server.flush()
    answer = server.answer(tokens, sampling_of(1), return_logprob=True, logprob_start_len=0)
    values = [each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]]
    return statistics.fmean(math.nan if value is None else value for value in values)


def of_both(pair: Mapping[str, Member], work: Callable[[Server], Any]) -> dict[str, Any]:
    """Run `work` on both servers at the same time, and return the results."""
    with ThreadPoolExecutor(len(pair)) as pool:
        futures = {name: pool.submit(work, member.server) for name, member in pair.items()}
        return {name: future.result() for name, future in futures.items()}


def compare(
    pair: Mapping[str, Member],
    case: str,
    asked: Sequence[Sequence[int]],
    probes: int,
    done: Done,
    *,
    sampled: bool = False,
) -> float | None:
    """Send a case to both servers at once. Return pat's KV read ratio. done: gets the findings."""
    pat = pair["pat"]
    before = pat.server.stats()
    found = of_both(pair, partial(of_answers, asked=asked, probes=probes, sampled=sampled))
    ratio = read_ratio(difference(pat.server.stats(), before))
    alone = [found[name].pop("alone") for name in pair]
    found["same_tokens_alone"] = sum(one == two for one, two in zip(*alone, strict=True))
    found["kv_read_ratio"] = ratio
    done("answers", case, found, gates_of(case, found, *pair))
    return ratio


def gates_of(case: str, found: Mapping[str, Any], name: str, other: str) -> dict[str, Any]:
    """Return a case's gates: `name` may not change more requests than `other` in any batch."""
    mine, theirs = (found[each]["different"] for each in (name, other))
    more = max(mine[batch] - theirs[batch] for batch in mine)
    odd = sum(found[each]["not_finite"] for each in (name, other))
    return {
        f"{case}: requests with several answers, beyond those of {other}": at_most(more, 0),
        f"{case}: log-probabilities that are not finite": at_most(odd, 0),
    }


def answers(pair: Mapping[str, Member], scale: Scale, done: Done) -> None:
    tokens = text(STRIDE * (scale.batch + 1) + max(scale.lengths))
    known = of_both(pair, lambda server: mean_logprob(server, tokens[: scale.lengths[0]]))
    for name, logprob in known.items():
        gate = at_least(logprob, LEAST_LOGPROB)
        done("text", name, logprob, {f"{name}: log-probability of a token of the text": gate})
    for length in scale.lengths:
        for shared in (False, True):
            case = f"{length:,} tokens, {'shared' if shared else 'not shared'}"
            asked = prompts(tokens, length, scale.batch, shared=shared)
            ratio = compare(pair, case, asked, scale.probes, done)
            if shared and scale.samples:
                compare(pair, f"{case}, sampled", asked, scale.probes, done, sampled=True)
    gate = at_most(1.0 if ratio is None else ratio, LARGEST_RATIO)
    done("kv_read_ratio", case, ratio, {f"{case}: KV that pat read, over query by query": gate})


def starts(folder: Path) -> dict[str, Start]:
    """Return the arguments of both servers, by backend."""
    scale, model = this_scale(), write_trained(folder / "trained")
    return {
        name: Start(
            contender(name),
            model,
            scale.arguments,
            scale.environment | STRICT if name == "pat" else {},
        )
        for name in scale.backends
    }


def this_scale() -> Scale:
    return ON_GPU if cuda_driver_is_present() else WITHOUT_GPU


def add_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    data: dict[str, Any] = {"meta": metadata(), "failures": {}, "gates": {}}

    def done(part: str, name: str, found: Any, gates: Mapping[str, Any]) -> None:
        data.setdefault(part, {})[name] = found
        data["gates"].update(gates)
        write(args.json, data)
        console.print(f"{part}, {name}: after {time.monotonic() - begun:.0f} s")

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-deterministic-") as name:
        folder = Path(name)
        with fleet(starts(folder), folder) as members:
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            data["failures"] = {
                each.name: each.failure for each in members.values() if each.failure
            }
            if not data["failures"]:
                data["servers"] = {each.name: each.about() for each in members.values()}
                with watched([*members.values()], "answers") as failed:
                    answers(members, this_scale(), done)
                data["failures"] = {"answers": "; ".join(failed)} if failed else {}
    write(args.json, data)
    show(data)
    missed = [name for name, gate in data["gates"].items() if not gate["met"]]
    return 1 if missed or data["failures"] or not data["gates"] else 0


def show(data: Mapping[str, Any]) -> None:
    table = table_of("requests with several answers", ("case", *this_scale().backends, "batches"))
    for case, found in data.get("answers", {}).items():
        counts = [found[name]["different"] for name in this_scale().backends]
        cells = (" ".join(map(str, each.values())) for each in counts)
        table.add_row(case, *cells, "; ".join(counts[0]))
    console.print(table)
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.4g}, limit {gate['limit']:.4g}: {met}")
    for name, failure in data["failures"].items():
        show_failure(f"{name}: {failure}")
