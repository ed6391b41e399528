"""Write the tables of benchmarks/results/TABLES.md from the recorded runs.

`python .ci/pages/recorded_tables.py` replaces what stands between the page's markers; `--check`
only compares. A test and `make docs` do that. Needs the standard library alone. Prose on other
pages has rounded numbers that `recorded_numbers.py` traces.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from kernel.gates import geomean, is_peer, over_floor, versus_best  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
PAGE = RESULTS / "TABLES.md"
COMMAND = "python .ci/pages/recorded_tables.py"
NOISE = 0.005  # of a ratio of two times: below, neither is called faster
PEERS = {
    "flashinfer": "FlashInfer",
    "fa3": "FA3",
    "cascade": "cascade",
    "xqa": "XQA",
    "flashmla": "FlashMLA",
    "triton": "Triton",
}
# Runs of kernel attention; each case is taken from the first that has it.
FP8 = ["h100/fp8.json", "h100/fp8-pages.json"]
KERNELS = ("kernels.json", "kernels-page-64.json", "kernels-long.json")
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
MODELS = {
    "llama-3-8b": "8B",
    "llama-3-8b-whole": "8B",
    "llama-3-70b": "70B",
    "llama-3-70b-rank": "70B, a rank of 8",
    "gemma-3-12b": "Gemma 3 12B",
    "gemma-4-26b": "Gemma 4 26B-A4B",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-next": "Qwen3-Next",
    "qwen3.6": "Qwen3.6's attention",
    "glm-4.6": "GLM-4.6",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "kimi-linear": "Kimi-Linear",
    "olmo-3-32b": "Olmo 3 32B",
    "k2-rank": "K2, a rank of 8",
    "v3-rank": "V3, a rank of 8",
    "k2": "K2",
    "v3": "V3",
    "deepseek-v2-lite": "V2-Lite",
}
DRAFTS = {
    "trees": "STANDALONE, trees 3,4,8",
    "deep-trees": "EAGLE, trees 5,4,8",
    "dflash": "DFLASH, 8 to verify, acceptance simulated",
    "dspark": "DSPARK, 8 to verify, acceptance simulated",
    "eagle": "EAGLE, chains 3,1,4",
    "eagle3": "EAGLE3, chains 3,1,4",
    "ngram": "NGRAM, 4 to verify",
    "small": "STANDALONE, chains 3,1,4: the first layer",
    "same": "STANDALONE, chains 3,1,4: the model itself",
}
LAYOUTS = {
    "tp": "`--tp-size {}`",
    "pp": "`--pp-size {}`",
    "dp": "`--dp-size {} --enable-dp-attention`",
    "mla": "MLA, `--tp-size {}`",
    "mla-dp": "MLA, `--dp-size {} --enable-dp-attention`",
    "chains": "chains of drafts, `--tp-size {}`",
}

Case = dict[str, Any]
Rows = list[list[str]]


def read(name: str) -> dict[str, Any]:
    """name: below RESULTS."""
    result: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return result


def sourced(names: Iterable[str], columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table below the names of its files, with their versions of SGLang and commits."""
    files = []
    for name in names:
        meta = read(name)["meta"]
        sglang = meta.get("versions", {}).get("sglang")
        version = f"SGLang {sglang}, " if sglang else ""
        files.append(f"`{name}` ({version}commit {meta['commit']})")
    return f"Source: {', '.join(files)}\n\n{table(columns, rows)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in columns[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, rule, *rows))


def three(value: float) -> str:
    """At least three digits."""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- kernels ---


def kernel_cases(names: Iterable[str]) -> dict[str, list[Case]]:
    """Return the cases of runs by file; each is taken from the first run that has it."""
    known: set[tuple[str, str]] = set()
    cases = {}
    for name in names:
        run = {(case["suite"], case["name"]): case for case in read(name)["cases"]}
        cases[name] = [case for key, case in run.items() if key not in known]
        known.update(run)
    return cases


def kernel_files(gpu: str) -> list[str]:
    """The recorded runs over KV of 16 bits."""
    return [f"{gpu}/{name}" for name in KERNELS if (RESULTS / gpu / name).exists()]


def gqa_runs() -> tuple[list[str], list[str]]:
    """The recorded runs of an H100 and of an H200, without those of latent attention."""
    return [*kernel_files("h100"), *FP8], [*kernel_files("h200"), "h200/fp8.json"]


def gain(case: Case) -> float:
    """Time of the fastest other kernel over pat's."""
    found = versus_best(case)
    assert found is not None, case["name"]
    return found


def lost(case: Case) -> bool:
    """Return whether another kernel is faster by more than noise."""
    return gain(case) < 1 - NOISE


def kernels(names: Sequence[str]) -> str:
    """Times over the floor by suite, and the gain over the best other kernel."""
    timed = list(chain.from_iterable(kernel_cases(names).values()))
    peers = [key for key in PEERS if any(key in case["us"] for case in timed)]
    columns = ["geometric mean of time / floor", "cases", "pat", *(PEERS[key] for key in peers)]
    columns += ["best other / pat: mean", "least", "most"]
    rows = []
    for (suite, shared), title in SUITES.items():
        cases = [c for c in timed if c["suite"] == suite and c["shared"] is shared]
        if not cases:
            continue
        gains = [gain(case) for case in cases]
        pat = f"{geomean(over_floor(case) for case in cases):.3f}"
        spread = (geomean(gains), min(gains), max(gains))
        others = [_mean_over_floor(cases, peer) for peer in peers]
        rows.append([title, str(len(cases)), pat, *others, *map(three, spread)])
    return sourced(names, columns, rows)


def _mean_over_floor(cases: Sequence[Case], name: str) -> str:
    """In parentheses: in how many cases it was timed, where not in all."""
    ratios = [over_floor(case, name) for case in cases if name in case["us"]]
    if not ratios:
        return ""
    partly = "" if len(ratios) == len(cases) else f" ({len(ratios)})"
    return three(geomean(ratios)) + partly


def kernel_losses() -> str:
    """Return all cases of an H100 and an H200 in which another kernel is faster."""
    rows = []
    h100, h200 = gqa_runs()
    h100 += ["h100/mla.json", "h100/mla-fp8.json"]
    for name, cases in (kernel_cases(h100) | kernel_cases(h200)).items():
        for case in sorted(filter(lost, cases), key=gain):
            times = {peer: us for peer, us in case["us"].items() if is_peer(peer)}
            best = PEERS[min(times, key=lambda peer: times[peer])]
            rows.append([f"`{case['name']}`", f"{gain(case):.3f}", best, f"`{name}`"])
    return table(["case", "best other / pat", "best other", "source"], rows)


def cascade() -> str:
    """Times over the floor by levels of PAT's trees."""
    (name, *_) = kernel_files("h100")
    cases = [c for c in read(name)["cases"] if c["suite"] == "pat-20" and c["shared"]]
    rows = []
    for levels in sorted(set(map(_levels, cases))):
        found = [case for case in cases if _levels(case) == levels and "cascade" in case["us"]]
        means = [_mean_over_floor(found, peer) for peer in ("flashinfer", "cascade", "pat")]
        least = min(case["us"]["cascade"] / case["us"]["pat"] for case in found)
        rows.append([str(levels), str(len(found)), *means, f"{least:.2f}"])
    columns = ["levels", "cases", "FlashInfer's decode", "cascade", "pat", "cascade / pat: least"]
    return sourced([name], columns, rows)


def _levels(case: Case) -> int:
    return int(case["tree"].partition("_")[0].count(",")) + 1


def latent_kernels(name: str) -> str:
    """Times of other kernels over pat's, by query heads of a rank."""
    cases = read(name)["cases"]
    peers = [key for key in PEERS if any(key in case["us"] for case in cases)]
    rows = []
    for alone, heads in sorted({(not case["shared"], case["heads_q"]) for case in cases}):
        found = [case for case in cases if (not case["shared"], case["heads_q"]) == (alone, heads)]
        numbers = [
            geomean(case["us"][peer] / case["us"]["pat"] for case in found if peer in case["us"])
            for peer in peers
        ]
        gains = [gain(case) for case in found]
        title = f"{'nothing shared' if alone else 'shared'}, {heads} heads"
        cells = [f"{value:.2f}" for value in (*numbers, min(gains), max(gains))]
        rows.append([title, str(len(found)), *cells])
    columns = ["other kernel / pat", "cases", *(PEERS[key] for key in peers)]
    return sourced([name], [*columns, "best other / pat: least", "most"], rows)


def draft_trees() -> str:
    """Microseconds that merging drafts adds to a layer."""
    name = "h100/draft-trees.json"
    found = read(name)["cases"]
    rows = [[case["shape"], f"{case['added_us'][case['chosen']]:.1f}"] for case in found]
    return sourced([name], ["drafts", "us per layer"], rows)


# --- servers ---


def servers(name: str) -> str:
    """Milliseconds per output token beside FA3."""
    rows = []
    for case in read(name)["cases"]:
        times, stats = case["tpot_ms"], case.get("pat_stats", {})
        if not {"pat", "fa3"} <= times.keys():
            continue
        rows.append(
            [
                f"{MODELS[case['model']]}, {case['layers']} layers: {case['question']}",
                f"{times['pat']:.2f}",
                f"{times['fa3']:.2f}",
                f"{case['over_pat']['fa3']:.3f}",
                f"{stats['kv_read_ratio']:.2f}" if "kv_read_ratio" in stats else "",
            ]
        )
    columns = ["model: requests x tokens", "pat", "FA3", "FA3 / pat", "KV read, over one by one"]
    return sourced([name], columns, rows)


def compared_servers() -> str:
    """Times and ratios of benchmarks/server compare, with the answers that part without a tie."""
    paths = sorted(RESULTS.rglob("compare-*.json"))
    names = [path.relative_to(RESULTS).as_posix() for path in paths]
    rows = [row for name in names for row in _compared(read(name))]
    columns = ["model: requests x tokens", "GPU, SGLang", "pat", "other", "other / pat"]
    columns.append("answers apart, no tie")
    return sourced(names, columns, rows)


def _compared(result: dict[str, Any]) -> Iterator[list[str]]:
    for case in result["cases"]:
        if case["pat"] not in case["tpot_ms"]:  # its server did not start
            continue
        scenario = result["scenarios"][case["scenario"]]
        ranks = scenario["arguments"].get("tp_size", 1)
        config = scenario["config"].get("text_config", scenario["config"])
        model = f"{MODELS[case['model']]}, {config['num_hidden_layers']} layers"
        model += f", TP {ranks}" if ranks > 1 else ""
        if "speculative_algorithm" in scenario["arguments"]:
            drafted = scenario["arguments"]["speculative_num_draft_tokens"]
            model += f", MTP with {drafted} draft tokens"
        model += ", fp8 KV" if "kv_cache_dtype" in scenario["arguments"] else ""
        page_size = scenario["servers"][case["pat"]]["page_size"]
        model += f", pages of {page_size}" if page_size > 1 else ""
        if "disable_custom_all_reduce" in scenario["arguments"]:
            model += ", NCCL's all-reduce"
        meta = result["meta"]
        where = f"{meta['gpu'].split()[1]}, {meta['versions']['sglang']}"
        times, own = case["tpot_ms"], case.get("own_answers", {})
        for other in (each for each in times if each != case["pat"]):
            apart = ""
            if other in case["answers"]:
                found = case["answers"][other]
                apart = f"{len(found['errors'])} of {found['requests']}"
                apart += f", from itself {len(own[other]['errors'])}" if other in own else ""
            yield [
                f"{model}: {case['case']}",
                where,
                f"{times[case['pat']]:.2f}",
                f"{other} {times[other]:.2f}",
                f"{case['over_pat'][other]['median']:.3f}" if case["over_pat"] else "",
                apart,
            ]


def model_servers(name: str) -> str:
    """Milliseconds per output token of models that are served with some of their layers."""
    result = read(name)
    rows = []
    for case in result["cases"]:
        layers = result["models"][case["model"]]["full_attention_layers"]
        times, ratio = case["tpot_ms"], case["default_over_pat"]
        spread = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        title = f"{MODELS[case['model']]}, {layers} layers: {case['case']}"
        rows.append([title, f"{times['pat']:.2f}", f"{times['default']:.2f}", spread])
    return sourced([name], ["model", "pat", "FA3", "FA3 / pat (quartiles)"], rows)


def conversions() -> str:
    """Milliseconds that converting a whole fp8 pool takes in each step."""
    name = "h100/mla-fp8-serving.json"
    rows = [
        [f"{MODELS[model]}, {each['layers']} layers", f"{int(tokens):,}", f"{times['step_ms']:.1f}"]
        for model, each in read(name)["conversion"].items()
        for tokens, times in each["by_tokens_of_the_pool"].items()
    ]
    return sourced([name], ["model", "tokens of the pool", "ms per step"], rows)


def ranks() -> str:
    """Ranks against one rank; each layout is taken from the first file that has it."""
    rows: dict[str, list[str]] = {}
    names = ["h100/ranks.json", "h200/ranks.json"]
    for result in map(read, names):
        count, gpu = result.get("ranks", 2), result["meta"]["gpu"].split()[1]
        for layout, title in LAYOUTS.items():
            if "plans" in (found := result.get(layout, {})):
                numbers = _numbers_of_ranks(found)
                rows.setdefault(layout, [title.format(count), f"{count} x {gpu}", *numbers])
    columns = ["layout", "GPUs", "pat", "FA3", "steps alike", "planning apart, us: p50 / p90"]
    return sourced(names, columns, rows.values())


def _numbers_of_ranks(layout: Case) -> list[str]:
    plans = layout["plans"]
    key, number = ("drafted", "off") if "drafted" in layout else ("moved", "max")
    off = [f"{layout[key][name][number]:.3f}" for name in ("pat", "fa3")]
    apart = plans.get("apart_us") or {}
    times = f"{apart['p50']:.0f} / {apart['p90']:.0f}" if apart else ""
    return [*off, str(plans["steps_alike"] or ""), times]


def _drafted() -> list[tuple[str, str, Case]]:
    """Return file, title and case of each kind of drafts, once per GPU and number of layers.

    Of several runs, one that compares acceptance in the same answers is taken.
    """
    runs = [
        (path.relative_to(RESULTS).as_posix(), json.loads(path.read_text()))
        for path in sorted(RESULTS.glob("h?00/speculation*.json"))
    ]
    cases = [(name, run, case) for name, run in runs for case in run["cases"]]
    order = [*DRAFTS]
    cases.sort(key=lambda c: (order.index(c[2]["drafts"]), "accepted_in_same_answers" not in c[2]))
    found: dict[tuple[str, str], tuple[str, str, Case]] = {}
    for name, run, case in cases:
        title = f"{DRAFTS[case['drafts']]}, {run['layers'][case['drafts']]} layers"
        found.setdefault((name.partition("/")[0], title), (name, title, case))
    return list(found.values())


def speculation() -> str:
    """Milliseconds per accepted token."""
    rows = [
        [
            title,
            *(
                f"{case['ms_per_accepted_token'][who]:.2f} ({min(times):.2f} to {max(times):.2f})"
                for who, times in case["rounds_ms"].items()
            ),
            f"{case['pat_over_default']:.3f}",
            ", ".join(f"{case['accepted_per_step'][who]:.2f}" for who in ("pat", "default")),
            f"{case['same_answers']:.0%}",
            f"`{name}`",
        ]
        for name, title, case in _drafted()
    ]
    columns = ["drafts", "pat", "FA3", "pat / FA3", "accepted per step: pat, FA3"]
    return table([*columns, "same answers", "source"], rows)


def speculation_alone() -> str:
    """Milliseconds of a step with drafts where requests share nothing."""
    rows = [
        [
            f"{title}: {each['case']}",
            *(f"{each['step_ms'][who]:.2f}" for who in ("pat", "default")),
            f"{each['pat_over_default']:.3f}",
            f"`{name}`",
        ]
        for name, title, case in _drafted()
        for each in case.get("alone", ())
    ]
    return table(["drafts", "pat", "FA3", "pat / FA3", "source"], rows)


# --- answers ---


def trained_model() -> str:
    """Distances of decode from a prefill of the model that was trained, in thousandths."""
    name = "h200/trained-model.json"
    caches = {"bfloat16": "bfloat16 KV", "fp8": "fp8 KV"}
    rows = [
        [
            f"{title}, {PEERS.get(backend, backend)}",
            *(f"{1000 * each[key]:.2f}" for key in ("mean", "p99", "worst")),
            f"{1e5 * each['kl']:.1f}",
        ]
        for cache, title in caches.items()
        for backend, each in read(name)["distances"][cache]["backends"].items()
    ]
    return sourced([name], ["", "mean", "99th percentile", "largest", "mean KL, 10^-5"], rows)


def deterministic_times() -> str:
    """Milliseconds per token of servers with SGLang's deterministic inference."""
    name = "h100/deterministic.json"
    rows = [
        [case, *(f"{each['tpot_ms'][who]:.2f}" for who in ("pat", "fa3")), f"{ratio:.3f}"]
        for case, each in read(name)["times"].items()
        for ratio in (each["fa3_over_pat"],)
    ]
    return sourced([name], ["case", "pat", "FA3", "FA3 / pat"], rows)


def deterministic_bits() -> str:
    """Requests with other bits in a batch than alone, in the server of pat (and of FA3)."""
    rows: Rows = []
    for case, each in read("h100/deterministic.json")["answers"].items():
        different = (each[name]["different"].values() for name in ("pat", "fa3"))
        pairs = (f"{mine} ({theirs})" for mine, theirs in zip(*different, strict=True))
        rows.append([case, *pairs, f"{each['pat']['prompts']}"])
    columns = ["case", "alone, cached", "some together", "all together", "all, cached", "asked"]
    return table(columns, rows)


def rollouts_and_trainer() -> str:
    """Mismatch of the log-probabilities of servers and trainer, in thousandths."""
    name = "h100/rl.json"
    rows = []
    for server, each in read(name)["servers_found"].items():
        backend, _, cache = server.partition(" ")
        title = f"{cache} KV{' with scales' if cache == 'fp8' else ''}"
        rewards = each["reward_by_iteration"]
        rows.append(
            [
                f"{title}, {PEERS.get(backend, backend)}",
                *(f"{1000 * each[key]:.2f}" for key in ("mean", "p99", "worst")),
                f"{max(each['old_share_by_iteration']):.2f}",
                f"{rewards[0]:.2f} -> {rewards[-1]:.2f}",
            ]
        )
    columns = ["", "mean", "99th percentile", "largest", "old weights", "reward"]
    return sourced([name], columns, rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "servers-rank": partial(servers, "h100/serving-gates.json"),
    "servers-h200": partial(servers, "h200/serving-gates.json"),
    "compared-servers": compared_servers,
    "speculation": speculation,
    "speculation-alone": speculation_alone,
    "draft-trees": draft_trees,
    "latent-servers": partial(model_servers, "h200/mla-serving.json"),
    "latent-fp8-servers": partial(model_servers, "h100/mla-fp8-serving.json"),
    "conversions": conversions,
    "ranks": ranks,
    "rank-servers": partial(model_servers, "h100/ranks-serving.json"),
    "kernels": lambda: kernels(kernel_files("h100")),
    "kernels-h200": lambda: kernels(kernel_files("h200")),
    "kernels-fp8": partial(kernels, FP8),
    "kernels-fp8-h200": partial(kernels, ["h200/fp8.json"]),
    "kernel-losses": kernel_losses,
    "cascade": cascade,
    "latent-kernels": partial(latent_kernels, "h100/mla.json"),
    "latent-fp8-kernels": partial(latent_kernels, "h100/mla-fp8.json"),
    "trained-model": trained_model,
    "deterministic-times": deterministic_times,
    "deterministic-bits": deterministic_bits,
    "rollouts-and-trainer": rollouts_and_trainer,
}
_BLOCK = re.compile(
    r"(?P<begin><!-- recorded: (?P<name>[a-z0-9-]+) -->\n).*?(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)


def filled(text: str) -> str:
    """Return the page with the contents of its markers replaced."""
    return _BLOCK.sub(
        lambda found: f"{found['begin']}\n{BLOCKS[found['name']]()}\n\n{found['end']}", text
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 if the page is not current"
    )
    check = parser.parse_args().check
    before = PAGE.read_text()
    after = filled(before)
    if not check:
        PAGE.write_text(after)
    elif after != before:
        print(f"{PAGE.relative_to(ROOT)} is not current; run: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
