"""Deterministic servers: a request's bits in every batch, and the time of pat beside FA3's.

    python benchmarks/check deterministic [--parts products answers times] [--json FILE]

All servers have `--enable-deterministic-inference`; on a CPU, where SGLang refuses it, pat's
batch-invariant mode alone, beside torch_native, in float32.

Products: SGLang's batch-invariant matrix product, on the shapes of both models, against float32, in
eager mode and from a CUDA graph. Where it computes nothing, all answers are equal and wrong.

Answers: the trained model of `sglang-pat demo`, its positions stretched by YaRN, continues
docstrings. Some requests are asked alone with an empty cache, alone with a full one, and in batches
of 7 and 128, with nothing in common or nearly all: greedily, and all sampled by seeds of their own.
(Batches of both kinds take another way through SGLang's sampler.) Tokens and log-probabilities must
be equal to the last bit. A first token that differs was computed by prefill alone; pat may change
no more requests than FA3 does. None may have a log-probability that is not a finite number, and the
model must know its text.

Times: the Llama-3-8B shape with half of its layers and random weights, in rounds in which both
servers are asked once. FA3 may not divide a request's KV in this mode.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.counters import difference, read_ratio
from common.docstrings import docstrings
from common.fleet import (
    ON_CPU,
    SHARED_GPU,
    Member,
    answers_equal,
    ask_in_turn,
    fill_all,
    fleet,
    heads_of,
    report_starts,
    times_of,
    wait,
    watched,
)
from common.metadata import gpu_state, metadata
from common.models import MODELS
from common.results import at_least, at_most, write
from common.suites import Refused, add_option
from common.terminal import console, show_failure, table_of
from sglang_pat.bench.cases import Case
from sglang_pat.bench.server import START_SECONDS, Server, Start, contender, sampling_of
from sglang_pat.cli.tiny_model import TRAINED
from sglang_pat.sglang.cpu import cuda_driver_is_present

PARTS = ("products", "answers", "times")
STRICT = {"SGLANG_PAT_STRICT": "1"}  # layers that the default backend decodes would compare nothing
INVARIANT = {"SGLANG_PAT_BATCH_INVARIANT": "1"}  # where SGLang has no mode
TRAINED_CONTEXT = 1024  # tokens of a sequence that the model was trained with
CONTEXT = 24 * TRAINED_CONTEXT
OWN = 40  # tokens of a prompt that shares the others
STRIDE = 1009  # tokens of the text between the beginnings of two prompts
ANSWER = 32  # tokens
PRODUCT_ERROR = 0.05  # the largest, over the mean of a product; a bfloat16 has 8 bits
LEAST_LOGPROB = -4.0  # mean of a token of text; of 2,048 equal ones: -7.6
LARGEST_RATIO = 0.5  # of KV that pat reads, to query by query, in the longest shared case
GENERATED = 56  # tokens of a timed answer
NOISE = 0.01  # of a ratio of two times
POOL = 140_000  # tokens, of a timed server
MODEL, LAYERS = "llama-3-8b", 16
TIMED_PROBES = 3

Bits = tuple[tuple[int, ...], tuple[float | None, ...]]
Done = Callable[[str, str, Any, Mapping[str, Any]], None]  # part, name, what was found, gates


class Scale(NamedTuple):
    """Requests of this machine. probes: how many are asked alone, too. samples: by seeds, too."""

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
    False,  # SGLang has no seeds there
    ON_CPU | {"context_length": CONTEXT, "max_running_requests": 16, "max_total_tokens": 1 << 14},
    INVARIANT,
)
# Batch, and the least time of FA3 over that of pat.
TIMED = (
    (Case(128, 8192, 256, GENERATED), 1.5),
    (Case(128, 0, 1024, GENERATED), 1.0),
    (Case(4, 0, 20_000, GENERATED), 1.3),
)


# --- products ---


def weights() -> Iterator[tuple[int, int]]:
    """Rows and columns of the weights of both models, each once."""
    shapes = set()
    for config in (MODELS[MODEL].config, _config()):
        hidden, inner, dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        shapes |= {
            ((heads + 2 * kv_heads) * dim, hidden),
            (hidden, heads * dim),
            (2 * inner, hidden),
            (hidden, inner),
            (config["vocab_size"], hidden),
        }
    yield from sorted(shapes)


def products() -> list[dict[str, Any]]:
    """The largest error of each product over its mean, eager and from a graph."""
    import torch
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import (  # noqa: TID251 (it is checked)
        matmul_persistent,
    )

    def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
        want = x.float() @ weight.float().T
        return ((got.float() - want).abs().max() / want.abs().mean()).item()

    found: list[dict[str, Any]] = []
    for rows, columns in weights():
        weight = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
        for batch in (1, 7, 128):
            x = torch.randn(batch, columns, dtype=torch.bfloat16, device="cuda")
            eager = error(matmul_persistent(x, weight.t()), x, weight)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = matmul_persistent(x, weight.t())
            x.normal_()
            out.fill_(math.nan)
            graph.replay()
            found.append(
                {"weight": [rows, columns], "batch": batch}
                | {"error": eager, "error_of_graph": error(out, x, weight)}
            )
    torch.cuda.empty_cache()
    return found


# --- answers ---


def _config() -> dict[str, Any]:
    """The trained model's, with room for long prompts."""
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


def text(count: int) -> list[int]:
    """Tokens of docstrings of installed packages."""
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
    """Compare the first tokens, and on a GPU their log-probabilities.

    On a CPU, SGLang's products depend on the batch.
    """
    parts = slice(None) if cuda_driver_is_present() else slice(1)
    return [each[:count] for each in one[parts]] == [each[:count] for each in other[parts]]


def not_finite(answers: Sequence[Bits]) -> int:
    """Log-probabilities that are no finite number, which JSON has as null."""
    found = (value for _, logprobs in answers for value in logprobs)
    return sum(value is None or not math.isfinite(value) for value in found)


def of_answers(
    server: Server, asked: Sequence[Sequence[int]], probes: int, *, sampled: bool
) -> dict[str, Any]:
    """Ask some requests alone and in batches.

    sampled: at temperature 1, by seeds of their own. different: by batch, those with other bits
    than alone; different_first: whose first token has.
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
    """Mean log-probability of a token of the text after those before it."""
    server.flush()
    answer = server.answer(tokens, sampling_of(1), return_logprob=True, logprob_start_len=0)
    values = [each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]]
    return statistics.fmean(math.nan if value is None else value for value in values)


def of_both(pair: Mapping[str, Member], work: Callable[[Server], Any]) -> dict[str, Any]:
    """Let both servers work at once."""
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
    """Ask both servers at once. Returns pat's KV read ratio. done: is given what was found."""
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
    """Judge a case: `name` may change no more requests than `other`, in any of the batches."""
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


# --- times ---


def times(pair: Mapping[str, Member], rounds: int, done: Done) -> None:
    """Ask both servers in turn, one case after the other, and then for equal bits."""
    prompts = {case: case.prompts(MODELS[MODEL].vocab_size) for case, _ in TIMED}
    for case, least in TIMED:
        fill_all([*pair.values()], prompts[case], heads_of(case, prompts[case]))
        before = gpu_state()
        runs = ask_in_turn([*pair.values()], prompts[case], GENERATED, rounds)
        by_backend = dict(zip(pair, runs.values(), strict=True))
        pat, fa3 = by_backend.values()
        ratio = statistics.median(b.tpot_ms / a.tpot_ms for a, b in zip(pat, fa3, strict=True))
        found = times_of(by_backend) | {
            "fa3_over_pat": ratio,
            "share_of_answers_equal": answers_equal(pat, fa3),
            "gpu": {"before": before, "after": gpu_state()},
        }
        gate = at_least(ratio, least, noise=NOISE)
        done("times", case.title, found, {f"{case.title}: fa3 / pat": gate})
    for case, asked in prompts.items():
        compare(pair, f"{MODEL}, {case.title}", asked, TIMED_PROBES, done)


def starts(parts: Sequence[str], folder: Path) -> dict[str, Start]:
    """Servers of both parts, by part and backend."""
    scale = this_scale()
    found = {}
    if "answers" in parts:
        model = write_trained(folder / "trained")
        for name in scale.backends:
            environment = scale.environment | STRICT if name == "pat" else {}
            found[f"answers {name}"] = Start(contender(name), model, scale.arguments, environment)
    if "times" in parts:
        shape = MODELS[MODEL]
        changes = {"num_hidden_layers": LAYERS, "max_position_embeddings": 1 << 15}
        model = replace(shape, config=shape.config | changes, arguments=SHARED_GPU).write(
            folder / "llama"
        )
        arguments = SHARED_GPU | {
            "enable_deterministic_inference": True,
            "context_length": 1 << 15,
            "max_running_requests": 128,
            "max_total_tokens": POOL,
            "cuda_graph_bs_decode": [1, 4, 64, 128],
        }
        for name in scale.backends:
            found[f"times {name}"] = Start(
                contender(name), model, arguments, STRICT if name == "pat" else {}
            )
    return found


def this_scale() -> Scale:
    return ON_GPU if cuda_driver_is_present() else WITHOUT_GPU


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add_option(parser, "--rounds", default=3, help="of a timed batch (default: %(default)s)")
    add_option(parser, "--start-seconds", default=START_SECONDS)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if not cuda_driver_is_present():
        args.parts = [part for part in args.parts if part == "answers"]
    if not args.parts:
        raise Refused("without a GPU there is only --parts answers")
    data: dict[str, Any] = {"meta": metadata(), "failures": {}, "gates": {}}

    def done(part: str, name: str, found: Any, gates: Mapping[str, Any]) -> None:
        data.setdefault(part, {})[name] = found
        data["gates"].update(gates)
        write(args.json, data)
        console.print(f"{part}, {name}: after {time.monotonic() - begun:.0f} s")

    begun = time.monotonic()
    if "products" in args.parts:
        found = products()
        errors = [each[name] for each in found for name in ("error", "error_of_graph")]
        worst = max(errors) if all(map(math.isfinite, errors)) else math.inf
        gate = at_most(worst, PRODUCT_ERROR)
        done("products", "all", found, {"largest error of a product, over its mean": gate})
    with tempfile.TemporaryDirectory(prefix="check-deterministic-") as name:
        folder = Path(name)
        with fleet(starts(args.parts, folder), folder) as members:
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            for part, work in (
                ("answers", lambda pair: answers(pair, this_scale(), done)),
                ("times", lambda pair: times(pair, args.rounds, done)),
            ):
                pair = {
                    name.removeprefix(f"{part} "): member
                    for name, member in members.items()
                    if name.startswith(f"{part} ")
                }
                failed = [f"{each.name}: {each.failure}" for each in pair.values() if each.failure]
                if pair and not failed:
                    data["servers"] = {
                        **data.get("servers", {}),
                        **{each.name: each.about() for each in pair.values()},
                    }
                    with watched([*pair.values()], part) as failed:
                        work(pair)
                data["failures"] |= {part: "; ".join(failed)} if failed else {}
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
    for case, found in data.get("times", {}).items():
        ms = ", ".join(f"{name} {value:.3f} ms" for name, value in found["tpot_ms"].items())
        console.print(f"{case}: {ms}, {found['fa3_over_pat']:.3f}")
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        console.print(f"{name}: {gate['value']:.4g}, limit {gate['limit']:.4g}: {met}")
    for name, failure in data["failures"].items():
        show_failure(f"{name}: {failure}")
