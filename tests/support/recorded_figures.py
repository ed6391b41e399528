"""Figures of the documentation, from the files of recorded kernels and servers.

`python tests/support/recorded_figures.py` writes it between its markers; with `--check` it only
compares. A test and `make docs` do that. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from kernel.gates import (  # noqa: E402
    as_json,
    geomean,
    is_peer,
    over_floor,
    versus_best,
    versus_by_name,
)
from kernel.gates import gates as kernel_rules  # noqa: E402

RESULTS = ROOT / "benchmarks/results/h100"
OTHER_GPU = ROOT / "benchmarks/results/h200"
ON_CPU = ROOT / "benchmarks/results/cpu"
COMMAND = "python tests/support/recorded_figures.py"
PAGES = (
    "docs/bench.md",
    "kernels/README.md",
    "docs/numerics.md",
    "docs/recipes/agents.md",
    "docs/recipes/fp8.md",
    "docs/recipes/multi-gpu.md",
    "docs/recipes/rollouts.md",
    "docs/recipes/router.md",
    "docs/related-work.md",
    "benchmarks/results/TABLES.md",
    "docs/when-it-does-not-pay.md",
)
WIDTH = 120
PEERS = {"flashinfer": "FlashInfer", "fa3": "FA3", "cascade": "cascade", "xqa": "XQA"}
# Runs of kernel attention; each suite is taken from the first that has it.
KERNELS = ("kernels.json", "kernels-pages.json", "kernels-long.json", "kernels-ranks.json")
# suite of the kernel benchmark, whether something is shared -> what it is called
SUITES = {
    ("pat-20", True): "PAT's trees, shared",
    ("pat-20", False): "PAT's trees, nothing shared",
    ("unshared", False): "further batches, nothing shared",
    ("long-prefix", True): "long prefixes",
    ("rank", True): "few KV heads, as on a tensor-parallel rank",
    ("random", True): "random forests",
    ("page-64", True): "pages of 64 tokens, shared",
    ("page-64", False): "pages of 64 tokens, nothing shared",
    ("hybrid", True): "layers of gpt-oss, Gemma 3 and Qwen3-Next",
    ("hybrid", False): "these layers, nothing shared",
    ("fp8", True): "fp8 KV, shared",
    ("fp8", False): "fp8 KV, nothing shared",
    ("page-64-fp8", True): "fp8 KV in pages of 64 tokens, shared",
    ("page-64-fp8", False): "fp8 KV in pages of 64 tokens, nothing shared",
}
KINDS = {
    "uniform": "equal lengths",
    "ragged": "lengths that vary (lognormal)",
    "long": "long contexts, few requests",
}
SHARED_BY = ((1, 1), (3, 3), (5, 5), (7, 9), (12, 14), (36, 36), (61, 61))
MODEL = "llama-3-8b"
NOISE = 0.005  # of a ratio of two times: below, neither is called faster
WHOLE = {MODEL: 32}  # layers of a model that is served whole
LONG_PREFIX = "128 x (8,192 shared) + 256"  # of the server's questions: the headline
NOTHING_SHARED = "128 x 1,024"
ROLLOUT = "256 x (32 x 1,024 shared) + 0"
SHORT_PREFIX = "64 x (2,048 shared) + 128"

Case = dict[str, Any]


def read(name: str, folder: Path | None = None) -> dict[str, Any]:
    """folder: RESULTS."""
    result: dict[str, Any] = json.loads(((folder or RESULTS) / name).read_text())
    return result


def servers() -> dict[str, dict[str, Any]]:
    """The runs of benchmarks/server gates by name, that of a whole model first if there is one."""
    names = ("serving-gates-whole.json", "serving-gates.json")
    return {name: read(name) for name in names if (RESULTS / name).exists()}


def first_server() -> dict[str, Any]:
    return next(iter(servers().values()))


# --- kernels ---


def kernel_runs(folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """The runs of benchmarks/kernel attention by name, over KV of 16 bits."""
    place = folder or RESULTS
    return {name: read(name, place) for name in KERNELS if (place / name).exists()}


def kernel_cases(
    suite: str | None = None, folder: Path | None = None, name: str | None = None
) -> list[Case]:
    """name: the run, if not all of `kernel_runs`."""
    runs = kernel_runs(folder).values() if name is None else [read(name, folder)]
    cases: list[Case] = []
    for run in runs:
        known = {case["suite"] for case in cases}
        cases += [case for case in run["cases"] if case["suite"] not in known]
    return [case for case in cases if suite in (None, case["suite"])]


def beside(cases: Iterable[Case]) -> str:
    """Names of the other kernels that were timed in any of the cases."""
    timed = {name for case in cases for name in case["us"] if is_peer(name)}
    titles = [title for name, title in PEERS.items() if name in timed]
    return " and ".join([", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles)


def gain(case: Case) -> float:
    """Time of the fastest other kernel over pat's."""
    found = versus_best(case)
    assert found is not None, case["name"]
    return found


def kernel_suites(folder: Path | None = None, name: str | None = None) -> str:
    """In parentheses: in how many cases another kernel was timed, where not in all."""
    timed = kernel_cases(folder=folder, name=name)
    peers = {key: title for key, title in PEERS.items() if any(key in each["us"] for each in timed)}
    columns = ["geometric mean of time / floor", "cases", "pat", *peers.values()]
    columns += ["best other / pat: mean", "least", "most"]
    rows = []
    for (suite, shared), title in SUITES.items():
        cases = [c for c in timed if c["suite"] == suite and c["shared"] is shared]
        if not cases:
            continue
        gains = [gain(case) for case in cases]
        cells = [_mean_over_floor(cases, peer) for peer in peers]
        pat = f"{geomean(over_floor(case) for case in cases):.3f}"
        spread = (geomean(gains), min(gains), max(gains))
        rows.append([title, str(len(cases)), pat, *cells, *map(three, spread)])
    return table(columns, rows)


def _mean_over_floor(cases: Sequence[Case], name: str) -> str:
    ratios = [*_over_floor(cases, name)]
    if not ratios:
        return ""
    partly = "" if len(ratios) == len(cases) else f" ({len(ratios)})"
    return three(geomean(ratios)) + partly


def kernel_gates(folder: Path | None = None) -> str:
    return (
        f"{_gates(as_json(kernel_rules(kernel_cases(folder=folder))))}\n\n{kernel_losses(folder)}"
    )


def _gates(found: list[dict[str, Any]]) -> str:
    judged = [gate for gate in found if gate["passed"] is not None]
    missed = [gate for gate in judged if not gate["passed"]]
    held = (
        f"{len(judged) - len(missed)} of {len(judged)} rules held (`benchmarks/kernel/gates.py`)."
    )
    if not missed:
        return held
    lines = (f"- {gate['suite']}: {gate['rule']} ({gate['found']})" for gate in missed)
    return "\n".join([f"{held} **Missed:**", "", *lines])


def kernel_losses(folder: Path | None = None, name: str | None = None) -> str:
    cases = kernel_cases(folder=folder, name=name)
    lost = sorted((case for case in cases if gain(case) < 1 - NOISE), key=gain)
    others = beside(cases)
    if not lost:
        return wrapped(
            f"`pat` is never more than {NOISE:.1%} slower than {others} ({len(cases)} cases)."
        )
    names = ", ".join(f"`{case['name']}` ({gain(case):.3f}, {_best(case)})" for case in lost)
    shared = sum(case["shared"] for case in lost)
    where = "with something shared" if shared == len(lost) else f"{shared} with something shared"
    where = "nothing is shared there" if not shared else where
    return wrapped(
        f"`pat` is slower than the best of {others} by over {NOISE:.1%} in {len(lost)} of the "
        f"{len(cases)} cases ({where}): {names}."
    )


def _best(case: Case) -> str:
    times = {name: us for name, us in case["us"].items() if is_peer(name)}
    return PEERS[min(times, key=lambda name: times[name])]


def kernel_extremes() -> str:
    """Extreme cases of PAT's trees with something shared."""
    cases = [case for case in kernel_cases("pat-20") if case["shared"]]
    by_heads = ", ".join(
        f"{each} {geomean(over_floor(case) for case in cases if heads(case) == each):.2f}"
        for each in dict.fromkeys(map(heads, cases))
    )
    closest = min(cases, key=gain)
    farthest = sorted(cases, key=over_floor, reverse=True)[:3]
    names = ", ".join(
        f"`{case['tree']}` {heads(case)} ({over_floor(case):.2f})" for case in farthest
    )
    return wrapped(
        f"PAT's trees with something shared, time over floor by heads: {by_heads}. The closest "
        f"case: `{closest['tree']}` {heads(closest)}, where the best other kernel takes "
        f"{gain(closest):.2f} times as long as `pat`. The farthest from the floor: {names}."
    )


def kernel_source(folder: Path | None = None) -> str:
    runs = kernel_runs(folder)
    place = "h200" if folder == OTHER_GPU else "h100"
    files = ", ".join(f"`{place}/{name}`" for name in runs)
    commits = ", ".join(dict.fromkeys(run["meta"]["commit"] for run in runs.values()))
    return wrapped(
        f"Source: {files} (`benchmarks/kernel attention`, commit {commits}). "
        "What has changed since that commit is not in it."
    )


def other_gpu_kernels() -> str:
    parts = (kernel_source(OTHER_GPU), kernel_suites(OTHER_GPU), kernel_gates(OTHER_GPU))
    return "\n\n".join(parts)


def one_byte_kernels() -> str:
    return _kernels("fp8.json", RESULTS)


def other_gpu_one_byte_kernels() -> str:
    return _kernels("fp8.json", OTHER_GPU)


def _kernels(name: str, folder: Path) -> str:
    result = read(name, folder)
    source = wrapped(
        f"Source: `{folder.name}/{name}` (`benchmarks/kernel attention`, commit "
        f"{result['meta']['commit']})."
    )
    return "\n\n".join((source, kernel_suites(folder, name), _gates(result["gates"])))


def other_gpu_servers() -> str:
    result = read("serving-gates.json", OTHER_GPU)
    return server_table(f"{OTHER_GPU.name}/serving-gates.json", result["meta"], result["cases"])


def latent_kernels() -> str:
    return _latent_kernels("mla.json", RESULTS)


def latent_one_byte_kernels() -> str:
    return _latent_kernels("mla-fp8.json", RESULTS)


def _latent_kernels(name: str, folder: Path) -> str:
    result = read(name, folder)
    cases = result["cases"]
    peers = {**PEERS, "flashmla": "FlashMLA", "triton": "Triton"}
    timed = {name for case in cases for name in case["us"]}
    peers = {name: title for name, title in peers.items() if name in timed}
    rows = []
    for alone, count in sorted({(not case["shared"], case["heads_q"]) for case in cases}):
        found = [case for case in cases if (not case["shared"], case["heads_q"]) == (alone, count)]
        ratios = (
            geomean(case["us"][peer] / case["us"]["pat"] for case in found if peer in case["us"])
            for peer in peers
        )
        gains = [gain(case) for case in found]
        title = f"{'nothing shared' if alone else 'shared'}, {count} heads"
        cells = [*ratios, min(gains), max(gains)]
        rows.append([title, str(len(found)), *(f"{value:.2f}" for value in cells)])
    source = wrapped(
        f"Time of another kernel over pat's, geometric means. Source: `{folder.name}/{name}` "
        f"(`benchmarks/kernel mla`, {len(cases)} cases, commit {result['meta']['commit']})."
    )
    columns = ["cases", "number", *peers.values(), "best other / pat: least", "most"]
    told = wrapped(f"{_beside_flashmla(cases)} {_errors_beside_flashmla(cases)}")
    return f"{source}\n\n{table(columns, rows)}\n\n{told}\n\n{_gates(result['gates'])}"


def _beside_flashmla(cases: Sequence[Case]) -> str:
    told = []
    for title, shared in (("with shared prefixes", True), ("with nothing shared", False)):
        ratios = [c["us"]["flashmla"] / c["us"]["pat"] for c in cases if c["shared"] is shared]
        told.append(f"in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} cases {title}")
    return f"FlashMLA is faster than `pat` {' and '.join(told)}."


def _errors_beside_flashmla(cases: Iterable[Case]) -> str:
    ratio = _error_over_pat(cases, "flashmla")
    return f"Its mean error is {ratio:.2g} times that of `pat`, geometric mean."


def latent_losses() -> str:
    """Where FlashMLA is faster, by the type of the KV cache and by heads."""
    told = []
    for name, title in (("mla.json", "a 16-bit cache"), ("mla-fp8.json", "an fp8 cache")):
        cases = read(name)["cases"]
        heads_lost = [
            f"{heads} heads {min(found):.2f} to {max(found):.2f}"
            for heads in sorted({case["heads_q"] for case in cases})
            if min(
                found := [
                    case["us"]["flashmla"] / case["us"]["pat"]
                    for case in cases
                    if case["heads_q"] == heads
                ]
            )
            < 1 - NOISE
        ]
        told.append(
            f"Over {title} {_beside_flashmla(cases)} Its time over that of `pat`, where "
            f"it is faster in some case: {', '.join(heads_lost)} (`h100/{name}`)."
        )
    errors = _errors_beside_flashmla(read("mla-fp8.json")["cases"])
    told.append(f"FlashMLA rounds queries to fp8 too over an fp8 cache. {errors}")
    return wrapped(" ".join(told))


def trained_model() -> str:
    """Distances of decode from a prefill, and accepted drafts, of the model that was trained."""
    result, answers = read("trained-model.json", OTHER_GPU), read("trained-answers.json", OTHER_GPU)
    names = {"pat": "pat", "fa3": "FA3", "flashinfer": "FlashInfer"}
    caches = {"bfloat16": "bfloat16 KV", "fp8": "fp8 KV"}
    rows = [
        [
            f"{title}, {names[name]}",
            *(f"{1000 * each[key]:.2f}" for key in ("mean", "p99", "worst")),
            f"{1e5 * each['kl']:.1f}",
        ]
        for cache, title in caches.items()
        for name, each in result["distances"][cache]["backends"].items()
    ]
    columns = ["", "mean", "99th percentile", "largest", "mean KL, 10^-5"]
    tokens = result["distances"]["bfloat16"]["backends"]["pat"]["tokens"]
    meta, drafts = result["meta"], answers["speculation"]
    source = wrapped(
        f"Distance of a token's log-probability in decode from the one in a prefill by Triton, in "
        f"thousandths, {tokens:,} tokens each. Sources: `{OTHER_GPU.name}/trained-model.json` and "
        f"`trained-answers.json` (`benchmarks/experiments trained`, commit {meta['commit']})."
    )
    rates = " and ".join(
        f"{found['accepted_per_step']['pat']:.3f} ({title}; FA3 "
        f"{found['accepted_per_step']['fa3']:.3f})"
        for title, found in (("chains", drafts["small"]), ("trees", drafts["trees"]))
    )
    accepted = wrapped(f"Tokens per verify step with a trained draft model: {rates}.")
    gates = {**result["gates"], **answers["gates"]}
    held = sum(gate["met"] for gate in gates.values())
    verdict = f"{held} of {len(gates)} rules held (`gates` in the files)."
    return "\n\n".join((source, table(columns, rows), accepted, verdict))


def deterministic_servers() -> str:
    """Times and bits of servers with SGLang's deterministic inference."""
    found = _of_either_gpu("deterministic.json")
    if found is None:
        return "Not yet run."
    where, result = found
    times = [
        [
            case,
            *(f"{each['tpot_ms'][name]:.2f}" for name in ("pat", "fa3")),
            f"{each['fa3_over_pat']:.3f}",
        ]
        for case, each in result["times"].items()
    ]
    bits = [
        [
            case,
            *(
                f"{mine} ({theirs})"
                for mine, theirs in zip(
                    *(each[name]["different"].values() for name in ("pat", "fa3")), strict=True
                )
            ),
            f"{each['pat']['prompts']}",
        ]
        for case, each in result["answers"].items()
    ]
    odd = sum(
        each[name]["not_finite"] for each in result["answers"].values() for name in ("pat", "fa3")
    )
    source = wrapped(
        f"ms per token. Source: `{where}` (`benchmarks/check deterministic`, SGLang "
        f"{result['meta']['versions']['sglang']}, commit {result['meta']['commit']})."
    )
    explained = wrapped(
        "Requests with other bits in a batch than alone with an empty cache, in the server of pat "
        f"(and of FA3), of those asked. {odd} log-probabilities were no finite number."
    )
    columns = ["case", "alone, cached", "some together", "all together", "all, cached", "asked"]
    met = sum(gate["met"] for gate in result["gates"].values())
    verdict = f"{met} of {len(result['gates'])} rules held (`gates` in the file)."
    parts = (
        source,
        table(["case", "pat", "FA3", "FA3 / pat"], times),
        explained,
        table(columns, bits),
        verdict,
    )
    return "\n\n".join(parts)


def roll_outs_and_trainer() -> str:
    """Mismatch of the log-probabilities of servers and trainer in a loop."""
    found = _of_either_gpu("rl.json")
    if found is None:
        return "Not yet run."
    where, result = found
    names = {"pat": "pat", "fa3": "FA3"}
    iterations = min(each["iterations"] for each in result["servers_found"].values())
    rows = []
    for server, each in result["servers_found"].items():
        backend, _, cache = server.partition(" ")
        numbers = [f"{1000 * each[key]:.2f}" for key in ("mean", "p99", "worst")]
        numbers.append(f"{max(each['old_share_by_iteration']):.2f}")
        rewards = [f"{each['reward_by_iteration'][i]:.2f}" for i in (0, -1)]
        title = f"{cache} KV{' with scales' if cache == 'fp8' else ''}, {names[backend]}"
        rows.append([title, *numbers, " -> ".join(rewards)])
    source = wrapped(
        f"Distance of a token's log-probability in the server from the trainer's, in thousandths, "
        f"{iterations} iterations. Old weights: the largest share, in any iteration, of the last "
        f"step's change that the server lacks: 0 with the new weights, 1 with the old. Source: "
        f"`{where}` (`benchmarks/experiments rl`, commit {result['meta']['commit']})."
    )
    columns = ["", "mean", "99th percentile", "largest", "old weights", "reward"]
    gates = result["gates"]
    missed = [
        f"- {name}: {gate['value']:.3g}, limit {gate['limit']:.3g}"
        for name, gate in gates.items()
        if not gate["met"]
    ]
    held = f"{len(gates) - len(missed)} of {len(gates)} rules held (`gates` in the file)."
    verdict = "\n".join([f"{held} **Missed:**", "", *missed]) if missed else held
    return f"{source}\n\n{table(columns, rows)}\n\n{verdict}"


def planted_errors() -> str:
    """Kinds of planted errors that were found on a GPU, and false alarms."""
    found = _of_either_gpu("planted-errors.json")
    if found is None:
        return "Not yet run on a GPU; [on the CPU](check.md#without-a-gpu)."
    where, result = found
    gates = result["gates"]
    kinds, runs, alarms = (
        next(gate for name, gate in gates.items() if name.startswith(begin))
        for begin in ("kinds", "runs", "alarms")
    )
    missed = f" Not found: {', '.join(result['missed'])}." if result["missed"] else ""
    return wrapped(
        f"{kinds['value']} of {kinds['limit']} kinds of errors planted in pat were found, and "
        f"{runs['value']} runs without one raised {alarms['value']} alarms ({result['dtype']}; "
        f"`{where}`, `benchmarks/experiments planted`, commit {result['meta']['commit']}).{missed}"
    )


def _of_either_gpu(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return a run of either GPU, with its place; None if there is none."""
    for folder in (RESULTS, OTHER_GPU):
        if (folder / name).is_file():
            return f"{folder.name}/{name}", read(name, folder)
    return None


def _over_floor(cases: Iterable[Case], name: str) -> Iterable[float]:
    return (over_floor(case, name) for case in cases if name in case["us"])


def kernel_errors() -> str:
    peers = ("flashinfer", "fa3")
    cases = [case for case in kernel_cases() if {"pat", *peers} <= case["error"].keys()]
    largest = {name: max(case["error"][name] for case in cases) for name in ("pat", *peers)}
    ratios = [case["error"]["pat"] / min(case["error"][name] for name in peers) for case in cases]
    return wrapped(
        f"Recorded largest errors over {len(cases)} kernel cases (bfloat16, H100): "
        f"{largest['pat']:.1e}, where FA3 has {largest['fa3']:.1e} and FlashInfer "
        f"{largest['flashinfer']:.1e}. A case's largest error is {geomean(ratios):.2f} times that "
        f"of the better of these two in the geometric mean, and {max(ratios):.1f} times at most."
    )


def shared_by(case: Case) -> int:
    """Number of requests that share a KV token, on average."""
    return round(case["tokens"] / case["unique_tokens"])


def gains_by_sharing() -> str:
    columns = ["KV tokens read one by one / distinct", "cases", "geometric mean", "worst", "best"]
    rows = []
    for low, high in SHARED_BY:
        gains = _gains(low, high)
        name = f"{low}x" if low == high else f"{low} to {high}x"
        name += ": nothing shared" if high == 1 else ""
        spread = (geomean(gains), min(gains), max(gains))
        rows.append([name, str(len(gains)), *(f"{value:.2f}" for value in spread)])
    return table(columns, rows)


def _gains(low: int, high: int) -> list[float]:
    return [gain(case) for case in kernel_cases("pat-20") if low <= shared_by(case) <= high]


def gains_without_sharing() -> str:
    cases = [case for case in kernel_cases() if not case["shared"]]
    rows = []
    for kind, title in KINDS.items():
        found = [case for case in cases if case["kind"] == kind]
        worst = min(found, key=gain)
        value = f"{gain(worst):.3f} (`{worst['name']}`)"
        rows.append([title, str(len(found)), f"{geomean(map(gain, found)):.2f}", value])
    rows.append(["all", str(len(cases)), f"{geomean(map(gain, cases)):.2f}", ""])
    return table(["nothing shared", "batches", "geometric mean", "worst"], rows)


def losses_on_other_gpu() -> str:
    return wrapped(f"On an [H200](results.md#on-an-h200), {kernel_losses(OTHER_GPU)}")


def losses_behind_writes() -> str:
    """Cases that are slower once what fills the L2 was written, not read."""
    lost, fa3 = [], []
    for folder in (RESULTS, OTHER_GPU):
        cases = kernel_cases(folder=folder)
        gains = versus_by_name(cases, "us_dirty_l2")
        slower = sorted((each, name) for name, each in gains.items() if each < 1 - NOISE)
        names = ", ".join(f"`{name}` ({each:.3f})" for each, name in slower)
        lost.append(f"on an {folder.name.upper()}, of {beside(cases)}, {names or 'in none'}")
        times = (case["us_dirty_l2"] for case in cases)
        fa3.append(f"{min(each['fa3'] / each['pat'] for each in times):.3f}")
    return wrapped(
        "Behind an L2 full of data that was written, the best other kernel over `pat` is below "
        f"{1 - NOISE} in these cases: {'; '.join(lost)}. FA3 alone over `pat` is at least "
        f"{' and '.join(fa3)}."
    )


def one_byte_gains() -> str:
    cases = read("fp8.json")["cases"]
    found = {wanted: [gain(c) for c in cases if c["shared"] is wanted] for wanted in (True, False)}
    shared, alone = (
        f"{geomean(gains):.2f} times as long ({min(gains):.2f} to {max(gains):.2f})"
        for gains in found.values()
    )
    served = read("serving-gates-fp8.json")
    short, long = (
        question(served, name)["over_pat"]["pat fp8"] for name in (NOTHING_SHARED, LONG_PREFIX)
    )
    return wrapped(
        f"Attention alone on an H100, over an fp8 pool: the best of {beside(cases)} takes {shared} "
        f"as the kernels with shared prefixes, and {alone} with nothing shared. Some "
        "cases [lose](../when-it-does-not-pay.md#where-another-kernel-is-faster). In the server, "
        f"TPOT over an fp8 pool is {short:.2f} of that over a 16-bit pool with 128 requests of "
        f"1,024 tokens. It is {long:.2f} of it with 8,192 shared and 256 private tokens, because "
        "the prefix is read once anyway: here fp8 buys capacity, not speed "
        "([results](../results.md#an-fp8-kv-cache))."
    )


def one_byte_losses() -> str:
    cases = read("fp8.json")["cases"]
    errors = " and ".join(f"{_error_over_pat(cases, name):.2g}" for name in ("xqa", "fa3"))
    told = f"XQA and FA3 round queries to fp8: their mean errors are {errors} times that of `pat`."
    return f"{kernel_losses(RESULTS, 'fp8.json')}\n\n{wrapped(told)}"


def _error_over_pat(cases: Iterable[Case], name: str) -> float:
    """The geometric mean of the ratios of mean errors."""
    errors = [case["mean_error"] for case in cases]
    return geomean(each[name] / each["pat"] for each in errors if name in each)


def batch_invariance() -> str:
    cases = read("batch-invariance.json")["cases"]
    timed = [case for case in cases if "price" in case]
    by_heads = [
        geomean(case["price"] for case in timed if case["heads"] == each)
        for each in {case["heads"] for case in timed}
    ]
    return wrapped(
        "Time with the mode over time without, on PAT's trees: "
        f"{geomean(case['price'] for case in timed):.3f} in the geometric mean on an H100, "
        f"{min(by_heads):.2f} to {max(by_heads):.2f} by number of heads. Of "
        f"{sum(case.get('requests', 0) for case in cases):,} requests in "
        f"{sum(case.get('batches', 0) for case in cases):,} random batches, "
        f"{sum(case.get('differing', 0) for case in cases)} had other bits "
        "(`benchmarks/kernel batch-invariance`, `h100/batch-invariance.json`)."
    )


# --- cascade attention ---


def cascade() -> str:
    """By levels of PAT's trees."""
    cases = [case for case in kernel_cases("pat-20") if case["shared"] and "cascade" in case["us"]]
    best = sum(_best(case) == PEERS["cascade"] for case in cases)
    ratio = geomean(case["us"]["cascade"] / case["us"]["pat"] for case in cases)
    on_fa3 = [case for case in read("kernels-cascade.json")["cases"] if case["shared"]]
    means = [geomean(_over_floor(each, "cascade")) for each in (on_fa3, cases)]
    told = wrapped(
        f"Over PAT's trees it is the fastest other kernel in {best} of {len(cases)} cases that "
        f"share something, and takes {ratio:.2f} times the time of `pat` in the geometric mean "
        f"(H100, `h100/kernels.json`). On FA3 it took {means[0]:.2f} times the floor in an earlier "
        f"run (`h100/kernels-cascade.json`), on `fa2` {means[1]:.2f}. By levels, geometric means "
        "of time over floor:"
    )
    rows = []
    for levels in sorted({_levels(case) for case in cases}):
        found = [case for case in cases if _levels(case) == levels]
        means = (_mean_over_floor(found, name) for name in ("flashinfer", "cascade", "pat"))
        least = min(case["us"]["cascade"] / case["us"]["pat"] for case in found)
        rows.append([str(levels), str(len(found)), *means, f"{least:.2f}"])
    columns = ["levels", "cases", "FlashInfer's decode", "cascade", "pat", "cascade / pat: least"]
    return f"{told}\n\n{table(columns, rows)}"


def _levels(case: Case) -> int:
    return case["tree"].partition("_")[0].count(",") + 1


def heads(case: Case) -> str:
    return f"{case['heads_q']}/{case['heads_kv']}"


# --- servers ---


def bench_run() -> str:
    """Answer of `sglang-pat bench` with the 8B shape."""
    result = read("bench.json")
    meta, (pat, default) = result["meta"], ("pat", "default")
    rows = []
    for case in result["cases"]:
        times = (case["tpot_ms"][pat], case["tpot_ms"][default], case["gain"])
        cells = (f"{t['median']:.3f} ({t['low']:.3f} to {t['high']:.3f})" for t in times)
        count = f"{case['requests']} request{'s' * (case['requests'] > 1)}"
        rows.append([f"{count}, {case['prefix']:,} shared + {case['private']:,} private", *cells])
    source = wrapped(
        f"Llama-3-8B's shape on an H100 with SGLang {meta['versions']['sglang']} "
        f"(`h100/bench.json`, commit {meta['commit']}), ms per output token with quartiles:"
    )
    return f"{source}\n\n{table(['batch', 'pat', 'FA3', 'gain'], rows)}"


def rollout() -> str:
    result = first_server()
    case = question(result, ROLLOUT)
    return wrapped(
        "A token of 8 samples of each of 32 prompts of 1,024 tokens takes "
        f"{case['tpot_ms']['pat']:.1f} ms instead of {case['tpot_ms']['fa3']:.1f} with FA3 "
        f"({model(result, case)}, one H100; [results](../results.md#in-sglangs-server))."
    )


def agents() -> str:
    (pat,), (fa3,) = (
        [
            run["median_tpot_ms"]
            for run in read("serving.json")["serving"]
            if (run["backend"], run["request_rate"]) == (name, 16.0)
        ]
        for name in ("pat", "fa3")
    )
    return wrapped(
        "Recorded on an H100 with 8 system prompts of 4,096 tokens and 16 requests a second: "
        f"{pat:.1f} ms per token instead of {fa3:.1f} with FA3, in the median, with earlier "
        "kernels ([results](../results.md#earlier-kernels))."
    )


def drafts() -> str:
    same, small, ngram = (
        1 / read(f"speculation-{name}.json")["cases"][0]["pat_over_default"]
        for name in ("same", "small", "ngram")
    )
    return wrapped(
        f"FA3 takes {same:.2f} times the time of `pat` per accepted token with a draft model as "
        f"large as the model, {small:.2f} with one of one layer, {ngram:.2f} with NGRAM "
        "([results](results.md#speculative-decoding), `h100/speculation-same.json`, "
        "`h100/speculation-small.json`, `h100/speculation-ngram.json`)."
    )


DRAFTS = {
    "trees": "STANDALONE, trees 3,4,8",
    "deep-trees": "EAGLE, trees 5,4,8",
    "dflash": "DFLASH, blocks of 8, acceptance simulated",
    "eagle": "EAGLE, chains 3,1,4",
    "ngram": "NGRAM, 4 to verify",
    "small": "STANDALONE, chains 3,1,4: the first layer",
    "same": "STANDALONE, chains 3,1,4: the model itself",
}


def speculation() -> str:
    """Drafts in the order above, once per GPU and number of layers; then what shares nothing.

    Of several runs, one that compares acceptance in the same answers is shown.
    """
    runs = [
        (f"{folder.name}/{path.name}", json.loads(path.read_text()))
        for folder in (RESULTS, OTHER_GPU)
        for path in sorted(folder.glob("speculation*.json"))
    ]
    found = [(name, run, case) for name, run in runs for case in run["cases"]]
    found.sort(
        key=lambda each: (
            [*DRAFTS].index(each[2]["drafts"]),
            "accepted_in_same_answers" not in each[2],
        )
    )
    rows, alone = [], []
    shown = set[tuple[str, str]]()
    for name, run, case in found:
        drafts, times = case["drafts"], case["ms_per_accepted_token"]
        title = f"{DRAFTS[drafts]}, {run['layers'][drafts]} layers"
        if (key := (name.partition("/")[0], title)) in shown:
            continue
        shown.add(key)
        goal = run["gates"][f"{drafts}: time per accepted token over FA3's"]
        missed = "" if goal["met"] else ", **missed**"
        accepted = ", ".join(f"{case['accepted_per_step'][who]:.2f}" for who in ("pat", "default"))
        rows.append(
            [
                title,
                *(
                    f"{times[who]:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"
                    for who, rounds in case["rounds_ms"].items()
                ),
                f"{case['pat_over_default']:.3f}{missed}",
                accepted,
                f"{case['same_answers']:.0%}",
                f"`{name}`",
            ]
        )
        alone += [
            [
                title,
                each["case"],
                *(f"{each['step_ms'][who]:.2f}" for who in ("pat", "default")),
                f"{each['pat_over_default']:.3f}",
            ]
            for each in case.get("alone", ())
        ]
    columns = ["drafts", "pat", "FA3", "pat / FA3", "accepted per step: pat, FA3"]
    parts = [table([*columns, "same answers", "source"], rows)]
    if alone:
        parts.append("Milliseconds of a step where requests share nothing:")
        parts.append(table(["drafts", "", "pat", "FA3", "pat / FA3"], alone))
    for folder in (RESULTS, OTHER_GPU):
        if (folder / "draft-trees.json").exists():
            parts.append(_merged_drafts(folder))
    return "\n\n".join(parts)


def _merged_drafts(folder: Path) -> str:
    result = read("draft-trees.json", folder)
    times = ", ".join(
        f"{case['shape']} {case['added_us'][case['chosen']]:.1f}" for case in result["cases"]
    )
    held = sum(gate["met"] for gate in result["gates"].values())
    return wrapped(
        f"Microseconds that merging drafts adds to a layer: {times}. {held} of "
        f"{len(result['gates'])} rules held (`{folder.name}/draft-trees.json`, `benchmarks/kernel "
        f"draft-trees`, commit {result['meta']['commit']})."
    )


def routing() -> str:
    rows = []
    for name, found in read("routing.json", ON_CPU)["routing"].items():
        times = (f"{found['step_ms'][server]:.1f} ms" for server in ("default", "pat"))
        shares = (f"{found[share]:.1%}" for share in ("prefix_hit_rate", "kv_saved"))
        title = name.replace("_", " ") if name != "cache_aware" else f"`{name}`"
        rows.append([title, *shares, *times, f"{found['ttft_s_mean']:.1f} s"])
    columns = ["routing", "prefix hits", "KV reads saved by pat", "decode step, default"]
    return table([*columns, "decode step, pat", "mean time to first token, pat"], rows)


def server_tables() -> str:
    """A model is shown with all its layers if it was served so."""
    tables, shown = [], set[str]()
    for name, result in servers().items():
        cases = [case for case in result["cases"] if case["model"] not in shown]
        shown |= {case["model"] for case in cases}
        tables.append(server_table(f"{RESULTS.name}/{name}", result["meta"], cases))
    return "\n\n".join(tables)


def server_table(name: str, meta: dict[str, Any], cases: list[Case]) -> str:
    rows = []
    for case in cases:
        times, stats = case["tpot_ms"], case.get("pat_stats", {})
        if not {"pat", "fa3"} <= times.keys():
            continue
        shape = "8B" if case["model"] == MODEL else "rank"
        ratio = f"{stats['kv_read_ratio']:.2f}" if "kv_read_ratio" in stats else ""
        goal = case.get("whole_ms_limit") if case["layers"] == WHOLE.get(case["model"]) else None
        missed = ", **missed**" if goal is not None and times["pat"] > goal else ""
        cells = [f"{times['pat']:.2f}", "" if goal is None else f"{goal:.1f}{missed}"]
        cells += [f"{times['fa3']:.2f}", f"{over_pat(case):.3f}", ratio]
        rows.append([f"{shape}: {case['question']}", *cells])
    columns = ["requests x tokens", "pat", "goal", "FA3", "FA3 / pat", "KV read, over one by one"]
    if not any(goal for _, _, goal, *_ in rows):
        for row in (columns, *rows):
            del row[2]
    layers = {case["model"]: case["layers"] for case in cases}
    shapes = [f"{count} layers of {shape}" for shape, count in layers.items()]
    source = wrapped(
        f"Milliseconds per output token, {' and '.join(shapes)}, SGLang "
        f"{meta['versions']['sglang']}. Source: `{name}` (`benchmarks/server gates`, commit "
        f"{meta['commit']})."
    )
    return f"{source}\n\n{table(columns, rows)}"


COMPARED_MODELS = {
    "llama-3-8b": "8B",
    "llama-3-8b-whole": "8B",
    "llama-3-70b": "70B",
    "llama-3-70b-rank": "70B, a rank of 8",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-next": "Qwen3-Next",
    "qwen3.6": "Qwen3.6's attention",
    "glm-4.6": "GLM-4.6",
    "k2-rank": "K2, a rank of 8",
    "v3-rank": "V3, a rank of 8",
    "k2": "K2",
    "v3": "V3",
    "deepseek-v2-lite": "V2-Lite",
}


def compared_servers() -> str:
    """Times and ratios of benchmarks/server compare, with the answers that part without a tie."""
    rows, sources = [], []
    for path in sorted(RESULTS.glob("compare-*.json")):
        result = read(path.name)
        sources.append(f"`{path.parent.name}/{path.name}` (commit {result['meta']['commit']})")
        for case in result["cases"]:
            scenario = result["scenarios"][case["scenario"]]
            ranks = scenario["arguments"].get("tp_size", 1)
            layers = scenario["config"]["num_hidden_layers"]
            name = f"{COMPARED_MODELS[case['model']]}, {layers} layers"
            name += f", TP {ranks}" if ranks > 1 else ""
            name += ", fp8 KV" if "kv_cache_dtype" in scenario["arguments"] else ""
            times = case["tpot_ms"]
            others = [each for each in times if each != case["pat"]]
            own = case.get("own_answers", {})
            partings = {
                other: f"{len(found['errors'])} of {found['requests']}"
                + (f", from itself {len(own[other]['errors'])}" if other in own else "")
                for other, found in case["answers"].items()
            }
            rows += [
                [
                    f"{name}: {case['case']}",
                    f"{times[case['pat']]:.2f}",
                    f"{other} {times[other]:.2f}",
                    f"{case['over_pat'][other]['median']:.3f}" if case["over_pat"] else "",
                    partings.get(other, ""),
                ]
                for other in others
            ]
    columns = ("model: requests x tokens", "pat", "other", "other / pat", "answers apart, no tie")
    told = wrapped(f"Milliseconds per output token. Sources: {', '.join(sources)}.")
    return f"{told}\n\n{table(columns, rows)}"


SERVED_MODELS = {
    "deepseek-v2-lite": "DeepSeek-V2-Lite, {} of 27 layers",
    "glm-4.7-flash": "GLM-4.7-Flash, {} of 47 layers",
    "v3-rank": "DeepSeek-V3, a rank of 8: 16 heads, {} of 61 layers",
    "k2-rank": "Kimi K2, a rank of 8: 8 heads, {} of 61 layers",
    "llama-3-8b": "Llama-3-8B, {} of 32 layers",
    "llama-3-70b": "Llama-3-70B, {} layers",
}


def latent_servers() -> str:
    return _servers_of_models(OTHER_GPU / "mla-serving.json")


def latent_one_byte_servers() -> str:
    """Times over an fp8 cache, and what its conversion takes."""
    path = RESULTS / "mla-fp8-serving.json"
    if not path.exists():
        return "No server of such a model was timed."
    found = []
    for model, each in read(path.name)["conversion"].items():
        name = SERVED_MODELS[model].format(each["layers"])
        pools = [
            f"{times['step_ms']:.1f} ms with a pool of {int(tokens):,} tokens"
            for tokens, times in each["by_tokens_of_the_pool"].items()
        ]
        found.append(f"{name}: {', '.join(pools)}")
    told = wrapped(f"The conversion alone takes in each step: {'; '.join(found)}.")
    return f"{_servers_of_models(path)}\n\n{told}"


def _servers_of_models(path: Path) -> str:
    result = read(path.name, path.parent)
    rows = []
    for case in result["cases"]:
        layers = result["models"][case["model"]]["full_attention_layers"]
        times, ratio = case["tpot_ms"], case["default_over_pat"]
        rows.append(
            [
                SERVED_MODELS[case["model"]].format(layers),
                case["case"],
                f"{times['pat']:.2f}",
                f"{times['default']:.2f}",
                f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            ]
        )
    meta = result["meta"]
    source = wrapped(
        f"Milliseconds per output token, SGLang {meta['versions']['sglang']}. Source: "
        f"`{path.parent.name}/{path.name}` (`benchmarks/server hybrids`, commit {meta['commit']})."
    )
    columns = ["model", "", "pat", "FA3", "FA3 / pat (quartiles)"]
    return f"{source}\n\n{table(columns, rows)}"


LAYOUTS = {
    "tp": "`--tp-size {}`",
    "pp": "`--pp-size {}`",
    "dp": "`--dp-size {} --enable-dp-attention`",
    "mla": "MLA, `--tp-size {}`",
    "mla-dp": "MLA, `--dp-size {} --enable-dp-attention`",
    "chains": "chains of drafts, `--tp-size {}`",
}


def several_ranks() -> str:
    """Ranks against one rank, each layout from the first file that has it, and servers' times."""
    rows: dict[str, list[str]] = {}
    sources = []
    for folder in (RESULTS, OTHER_GPU):
        if not (folder / "ranks.json").exists():
            continue
        result = read("ranks.json", folder)
        ranks, gpu = result.get("ranks", 2), result["meta"]["gpu"].split()[1]
        for name, title in LAYOUTS.items():
            if "plans" in (found := result.get(name, {})):
                gates = result.get("gates", {}).items()
                missed = any(not gate["met"] for rule, gate in gates if rule.startswith(f"{name}:"))
                numbers = _numbers_of_ranks(found, missed=missed)
                rows.setdefault(name, [title.format(ranks), f"{ranks} x {gpu}", *numbers])
        commit = result["meta"]["commit"]
        sources.append(f"`{folder.name}/ranks.json` (`benchmarks/check ranks`, commit {commit})")
    source = wrapped(
        "Columns pat and FA3: the most that a logit moves from its value on one GPU; with drafts, "
        "the most that a token is less probable than the best one. Each row has a small random "
        "model of its own, so compare within a row. Then: steps with equal plans on all ranks, and "
        "how much longer the slowest rank planned than the fastest (goal for p90: 50 us). "
        f"Source: {', '.join(sources)}."
    )
    columns = ["layout", "GPUs", "pat", "FA3", "steps alike", "planning apart, us: p50 / p90"]
    text = f"{source}\n\n{table(columns, [*rows.values()])}"
    if not (RESULTS / "ranks-serving.json").exists():
        return text
    return f"{text}\n\n{_servers_of_models(RESULTS / 'ranks-serving.json')}"


def _numbers_of_ranks(layout: Case, *, missed: bool) -> list[str]:
    plans = layout["plans"]
    key, number = ("drafted", "off") if "drafted" in layout else ("moved", "max")
    off = [f"{layout[key][name][number]:.3f}" for name in ("pat", "fa3")]
    apart = plans.get("apart_us") or {}
    times = f"{apart['p50']:.0f} / {apart['p90']:.0f}" if apart else ""
    times += ", **missed**" if missed else ""
    return [*off, str(plans["steps_alike"] or ""), times]


def servers_without_sharing() -> str:
    rows = []
    for name, result in reversed(servers().items()):
        for case in result["cases"]:
            prompt_shared = "shared" in case["question"]
            if "fa3" in case["tpot_ms"] and not prompt_shared:
                rows.append((case["model"], case["question"], over_pat(case), name))
    gains = {(shape, asked): (value, name) for shape, asked, value, name in rows}
    ordered = sorted(gains, key=lambda key: (key[0] != MODEL, gains[key][0]))
    return table(
        ["nothing shared", "FA3 / pat", "source"],
        [
            [
                f"{'Llama-3-8B shape' if shape == MODEL else 'rank of a 70B shape'}: {asked}",
                f"{gains[shape, asked][0]:.3f}",
                f"`h100/{gains[shape, asked][1]}`",
            ]
            for shape, asked in ordered
        ],
    )


def question(result: dict[str, Any], name: str) -> Case:
    (found,) = (
        case for case in result["cases"] if case["question"] == name and case["model"] == MODEL
    )
    return dict(found)


def over_pat(case: Case) -> float:
    return float(case["over_pat"]["fa3"])


def model(result: dict[str, Any], case: Case) -> str:
    cut = f", {case['layers']} of its {WHOLE[MODEL]} layers"
    cut = "" if case["layers"] == WHOLE[MODEL] else cut
    return f"Llama-3-8B shape{cut}, SGLang {result['meta']['versions']['sglang']}"


# --- when it pays ---


def sharing_curve() -> str:
    result = read("sharing.json")
    shares = sorted({cell["share"] for cell in result["cells"]})
    rows = []
    for batch in dict.fromkeys(cell["batch"] for cell in result["cells"]):
        found = {cell["share"]: cell["gain"] for cell in result["cells"] if cell["batch"] == batch}
        rows.append([str(batch), *(f"{found[s]:.2f}" if s in found else "" for s in shares)])
    return table(["requests", *(f"{share:.0%} shared" for share in shares)], rows)


# --- text ---


def at_least(values: Iterable[float], digits: int = 1) -> str:
    """The least value, rounded down."""
    scale: int = 10**digits
    return f"{math.floor(min(values) * scale) / scale:.{digits}f}"


def three(value: float) -> str:
    """At least three digits."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in columns[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))


BLOCKS: dict[str, Callable[[], str]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        bench_run,
        rollout,
        agents,
        drafts,
        speculation,
        routing,
        server_tables,
        servers_without_sharing,
        compared_servers,
        kernel_suites,
        kernel_gates,
        kernel_losses,
        kernel_extremes,
        kernel_source,
        kernel_errors,
        batch_invariance,
        one_byte_gains,
        one_byte_losses,
        cascade,
        losses_on_other_gpu,
        losses_behind_writes,
        other_gpu_kernels,
        one_byte_kernels,
        other_gpu_one_byte_kernels,
        other_gpu_servers,
        latent_kernels,
        latent_one_byte_kernels,
        latent_losses,
        trained_model,
        deterministic_servers,
        roll_outs_and_trainer,
        planted_errors,
        latent_servers,
        latent_one_byte_servers,
        several_ranks,
        gains_by_sharing,
        gains_without_sharing,
        sharing_curve,
    )
}
_BLOCK = re.compile(
    r"(?P<begin><!-- recorded: (?P<name>[a-z-]+) -->\n).*?(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)


def filled(text: str) -> str:
    """The page with the contents of its markers replaced."""
    return _BLOCK.sub(
        lambda found: f"{found['begin']}\n{BLOCKS[found['name']]()}\n\n{found['end']}", text
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if a page is not current"
    )
    check = parser.parse_args().check
    outdated = []
    for name in PAGES:
        page = ROOT / name
        before = page.read_text()
        after = filled(before)
        if after != before:
            outdated.append(name)
            if not check:
                page.write_text(after)
    if check and outdated:
        print(f"not current: {', '.join(outdated)}; run: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
