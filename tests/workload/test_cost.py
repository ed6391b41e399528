"""The time model is compared with recorded servers: steps, traffic and whole jobs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published_shapes import read_shapes

from sglang_pat import support
from sglang_pat.batch import PrefixPaths
from sglang_pat.model_config import decoder_config
from sglang_pat.model_layers import WINDOW
from sglang_pat.workload import cost
from sglang_pat.workload.cost import Reads, StepTime
from sglang_pat.workload.models import GPUS, read_config
from sglang_pat.workload.reads import Planner
from sglang_pat.workload.run import DEFAULT, PAT, Setup, serve
from sglang_pat.workload.server import Batch
from sglang_pat.workload.trace import Segment, TraceRequest
from sglang_pat.workload.verdict import ERRORS, RATE, TPOT

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
# `requests x (shared tokens) + private tokens`; shared tokens may be in groups.
QUESTION = re.compile(r"(\d+) x (?:\((?:(\d+) x )?([\d,]+) shared\) \+ )?([\d,]+)")
KINDS = ((PAT, "pat"), (DEFAULT, "fa3"))


def recorded(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def batch_of(case: dict[str, Any]) -> list[TraceRequest]:
    """Return the requests of a recorded batch, which arrive at once, group by group."""
    requests = []
    for index in range(case["batch"]):
        group = index * case["groups"] // case["batch"]
        segments = (Segment(-1 - group, case["prefix"]), Segment(index, case["private"]))
        prompt = tuple(segment for segment in segments if segment.length)
        requests.append(TraceRequest(0.0, prompt, case["generated"]))
    return requests


def steps() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any], dict[str, float]]]:
    """Yield (GPU, file, model, batch, ms) of all recorded batches of servers."""
    for name in ("h100/serving.json", "h100/sglang-0.5.23/serving.json"):
        data = recorded(name)
        for case in data["cases"]:
            yield "H100", name, data["models"][case["model"]], case, case["tpot_ms"]
    whole = recorded("h100/serving.json")["models"]["llama-3-8b"]
    for case in recorded("h100/bench.json")["cases"]:
        batch = dict(case, batch=case["requests"], groups=1, generated=case["tokens"])
        times = {key: case["tpot_ms"][backend]["median"] for backend, key in KINDS}
        yield "H100", "h100/bench.json", whole, batch, times
    for name in ("h100/serving-gates.json", "h200/serving-gates.json"):
        data = recorded(name)
        for case in data["cases"]:
            asked = QUESTION.fullmatch(case["question"])
            if asked is None:  # a batch of many lengths
                continue
            count, groups, prefix, private = (
                int((text or "0").replace(",", "")) for text in asked.groups()
            )
            batch = {"batch": count, "groups": max(groups, 1), "prefix": prefix}
            batch |= {"private": private, "generated": case["tokens"]}
            gpu = name.partition("/")[0].upper()
            yield gpu, name, data["models"][case["model"]], batch, case["tpot_ms"]


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_recorded_steps_are_predicted(gpu: str) -> None:
    """The cases are the 8B shape, and a 70B model's part on one of eight GPUs."""
    found = [case for case in steps() if case[0] == gpu]
    assert len(found) == {"H100": 29, "H200": 15}[gpu]
    for _, name, model, batch, times in found:
        time = StepTime.of_model(model, GPUS[gpu])
        for backend, key in KINDS:
            stats = serve(batch_of(batch), Setup(time, 4_000_000), backend)
            expected = pytest.approx(times[key], rel=ERRORS[gpu][TPOT])
            assert stats.step_ms == expected, (name, model["hidden_size"], batch["batch"], key)


def is_modelled(scenario: dict[str, Any]) -> bool:
    """Return False for drafts, and where FA3 converts the whole pool: latent attention over fp8."""
    given = scenario["arguments"]
    return "speculative_algorithm" not in given and (
        "kv_cache_dtype" not in given or "kv_lora_rank" not in scenario["config"]
    )


def modelled_cases(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the cases of a comparison that the time model covers, each with its scenario."""
    data = json.loads(path.read_text())
    cases = [(case, data["scenarios"][case["scenario"]]) for case in data["cases"]]
    return [each for each in cases if is_modelled(each[1]) and "ragged" not in each[0]["case"]]


COMPARED = list(filter(modelled_cases, sorted(RESULTS.glob("*/compare-*.json"))))
# Allowed errors. The time model was not fitted to windows; the second is for one request.
WITH_WINDOWS = 0.22, 0.42


def is_triton(scenario: dict[str, Any], server: str) -> bool:
    about = scenario["servers"].get(server, {})
    return "pat" not in about and about.get("attention_backend") == "triton"


@pytest.mark.parametrize("path", COMPARED, ids=lambda path: path.stem)
def test_compared_servers_are_predicted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases have long prefixes, hybrid models, experts, latent attention or several GPUs.

    Weights have unit scale, so that experts are used as evenly as in a trained model.
    """
    asked = 0
    for case, scenario in modelled_cases(path):
        gpu = GPUS[path.parent.name.upper()]
        given = scenario["arguments"]
        kv = given.get("kv_cache_dtype", "auto")
        if "disable_custom_all_reduce" in given:
            monkeypatch.setattr(cost, "_ALL_REDUCE", cost._NCCL)
        config, dp = decoder_config(scenario["config"]), given.get("dp_size", 1)
        time = StepTime.of_model(config, gpu, given.get("tp_size", 1), kv_cache_dtype=kv, dp=dp)
        predicted: dict[str, float] = {}
        for backend, names in ((PAT, ("pat", "pat-64")), (DEFAULT, ("fa3", "default"))):
            for name in case["tpot_ms"].keys() & {*names}:
                asked += 1
                stats = serve(batch_of(case)[::dp], Setup(time, 8_000_000), backend)
                has_windows = any(layer.kind == WINDOW for layer in time.layers)
                error = WITH_WINDOWS[case["batch"] == 1] if has_windows else 0.15
                predicted[backend] = stats.step_ms
                if is_triton(scenario, name):  # slower than what the time model knows
                    assert 0.7 < stats.step_ms / case["tpot_ms"][name] < 1, case["case"]
                    continue
                expected = pytest.approx(case["tpot_ms"][name], rel=error)
                assert stats.step_ms == expected, (case["scenario"], case["case"], name)
        if "default" in case["over_pat"] and not is_triton(scenario, "default"):
            gain = predicted[DEFAULT] / predicted[PAT]
            assert gain == pytest.approx(case["over_pat"]["default"]["median"], rel=0.13), case
    assert asked


def test_data_parallel_attention_keeps_more_weights_and_heads_on_a_gpu() -> None:
    _, config = read_config("llama-3.1-8b")
    one, two = (StepTime.of_model(config, GPUS["H100"], 4, dp=dp) for dp in (1, 2))
    assert (one.kv_heads(one.layers[0]), two.kv_heads(two.layers[0])) == (2, 4)
    more = two.held_weight_bytes - one.held_weight_bytes
    assert more == pytest.approx(2 * one.weights.attention / 4)


def alone_on(gpu: str, heads_kv: int, head_dim: int, kv_bytes: float) -> dict[str, float]:
    """Return the ms of a step without sharing, by backend."""
    _, config = read_config("llama-3.1-8b")
    config = {**config, "num_key_value_heads": heads_kv, "head_dim": head_dim}
    time = replace(StepTime.of_model(config, GPUS[gpu]), kv_bytes=kv_bytes)
    case = {"batch": 32, "groups": 1, "prefix": 0, "private": 4096, "generated": 64}
    setup = Setup(time, 8_000_000)
    return {each: serve(batch_of(case), setup, each).step_ms for each in (PAT, DEFAULT)}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kv_bytes", [1.0, 2.0])
@pytest.mark.parametrize(("heads_kv", "head_dim"), [(8, 64), (8, 128), (32, 128), (4, 256)])
def test_pat_takes_as_long_where_nothing_is_shared(
    gpu: str, kv_bytes: float, heads_kv: int, head_dim: int
) -> None:
    """Recorded kernels without sharing are equally fast, or pat is faster (cases of `h200/`)."""
    found = alone_on(gpu, heads_kv, head_dim, kv_bytes)
    if kv_bytes == 1 and gpu in ("H100", "H200"):  # FA3 gains nothing from fp8 KV
        assert found[PAT] < 0.9 * found[DEFAULT]
    else:
        assert found[PAT] == pytest.approx(found[DEFAULT], rel=0.01)


@pytest.mark.parametrize("groups", [1, 8, 16])
def test_pat_gains_on_an_h20_whose_products_take_longer_than_its_reads(groups: int) -> None:
    time = StepTime.of_model(read_config("llama-3.1-8b")[1], GPUS["H20"])
    case = {"batch": 32, "groups": groups, "prefix": 8192, "private": 64, "generated": 64}
    setup = Setup(time, 8_000_000)
    ours, default = (serve(batch_of(case), setup, each).step_ms for each in (PAT, DEFAULT))
    assert default / ours > 1.1


TRAFFIC = [run for run in recorded("h100/serving.json")["serving"]
           if run["backend"] in ("pat", "fa3")]  # fmt: skip


@pytest.mark.parametrize("run", TRAFFIC, ids=lambda run: f"{run['backend']}-{run['request_rate']}")
def test_recorded_traffic_is_predicted(run: dict[str, Any]) -> None:
    """The traffic comes from SGLang's client: eight system prompts, a varying load."""
    time = StepTime.of_model(recorded("h100/serving.json")["models"][run["model"]], GPUS["H100"])
    backend = PAT if run["backend"] == "pat" else DEFAULT
    found = []
    for seed in range(3):
        draws = np.random.default_rng(seed)
        arrivals = np.cumsum(draws.exponential(1, run["requests"]))
        arrivals *= run["requests"] / run["request_rate"] / arrivals[-1]
        groups = draws.permutation(np.arange(run["requests"]) % 8)
        requests = [
            TraceRequest(float(at), (Segment(-1 - int(group), 4096), Segment(i, 128)), 256)
            for i, (at, group) in enumerate(zip(arrivals, groups, strict=True))
        ]
        found.append(serve(requests, Setup(time, 400_000), backend).tpot_ms)
    assert np.mean(found) == pytest.approx(run["mean_tpot_ms"], rel=ERRORS["H100"][TPOT])


# Jobs on an H200 with the 8B shape and a pool of 260,000 tokens, all requests at once in random
# order: (group size, shared, private, answer tokens), and seconds with pat and FA3.
JOBS: dict[str, tuple[list[tuple[int, int, int, int]], float, float]] = {
    "rollouts": ([(group, 1500, 0, 300) for group in range(48) for _ in range(16)], 15.1, 23.4),
    "agents": ([(group, 4000, 200, 150) for group in range(32) for _ in range(20)], 13.6, 22.2),
    "evaluation": ([(0, 3000, 300, 16) for _ in range(768)], 7.7, 7.9),
    "chat": ([(0, 0, 800, 200) for _ in range(384)], 12.0, 12.35),
}


@pytest.mark.parametrize("name", JOBS)
def test_whole_jobs_are_predicted(name: str) -> None:
    kinds, *seconds = JOBS[name]
    requests = []
    for number, (group, shared, private, answer) in enumerate(kinds):
        segments = (Segment(-1 - group, shared), Segment(number, private))
        prompt = tuple(segment for segment in segments if segment.length)
        requests.append(TraceRequest(0.0, prompt, answer))
    random.Random(0).shuffle(requests)
    time = StepTime.of_model(read_config("llama-3-8b")[1], GPUS["H200"])
    # The prediction is 14 and 17% too fast, for an unknown reason.
    error = 0.20 if name == "rollouts" else ERRORS["H200"][RATE]
    for backend, measured in zip((PAT, DEFAULT), seconds, strict=True):
        stats = serve(requests, Setup(time, 260_000), backend)
        assert stats.seconds == pytest.approx(measured, rel=error), backend


# --- what a batch reads ---


def shares(order: list[int], shared: int) -> float:
    """Return the part of repeated reads that FA3 makes from memory. order: groups of requests."""
    paths = [[(group, 0, shared), (1000 + i, shared, shared + 10)] for i, group in enumerate(order)]

    class Tree:
        def paths(self, requests: object) -> PrefixPaths:
            return PrefixPaths.from_lists(paths)

    planner = Planner(StepTime.of_model(read_config("llama-3.1-8b")[1], GPUS["H100"]))
    lengths = np.full(len(order), shared + 12, dtype=np.int32)
    planner.begin(Batch([], lengths), Tree())  # type: ignore[arg-type]
    return planner.ratios.from_memory


def test_the_cache_holds_what_is_read_by_neighbours_or_is_small() -> None:
    groups, scattered = [i // 8 for i in range(64)], [i % 8 for i in range(64)]
    assert shares(groups, 20_000) == 0
    # 8 x 2,000 tokens of 512 bytes fit into half of 50 MB, 8 x 20,000 do not.
    assert shares(scattered, 2_000) == 0
    assert shares(scattered, 20_000) == pytest.approx(1 - 25e6 / 512 / 160_000)


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16}


def latent(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> StepTime:
    monkeypatch.setattr(support, "LATENT_CAPABILITIES", ((9, 0),))
    _, config = read_config("llama-3.1-8b")
    return StepTime.of_model({**config, **MLA, **changes}, GPUS["H200"])


@pytest.mark.parametrize(
    ("heads", "requests", "shared", "own", "us"),
    [
        (16, 128, 8192, 256, 238),
        (8, 128, 8192, 256, 238),
        (16, 32, 16384, 512, 128),
        (16, 64, 2048, 128, 47),
        (16, 256, 1024, 64, 84),
        (16, 16, 4096, 1024, 36),
        (16, 128, 64, 1024, 63),
        (128, 128, 8192, 256, 455),
        (128, 256, 1024, 64, 157),
    ],
)
def test_latent_attention_takes_tiles_of_64_rows(
    heads: int, requests: int, shared: int, own: int, us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA3 on an H200 takes as long for 8 heads as for 16."""
    time = latent(monkeypatch, num_attention_heads=heads)
    reads = Reads(shared + requests * own, cached=(requests - 1) * shared)
    assert time.attention(time.layers[0], reads) * 1e6 == pytest.approx(us, rel=0.28)


def test_gpus_without_a_body_for_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    time = latent(monkeypatch)
    assert all(layer.is_accelerated for layer in time.layers)
    _, config = read_config("llama-3.1-8b")
    refused = StepTime.of_model({**config, **MLA}, GPUS["B200"]).layers[0].refusal
    assert refused is not None
    assert str(refused) == "latent attention on a B200"


def test_a_cache_of_another_16_bit_type() -> None:
    config = {**read_config("llama-3.1-8b")[1], "torch_dtype": "float32"}
    time = StepTime.of_model(config, GPUS["H100"], kv_cache_dtype="bf16")
    refused = "dtype of queries and KV cache float16 and bfloat16"
    assert {str(layer.refusal) for layer in time.layers} == {refused}


@pytest.mark.parametrize(
    ("gpu", "quantisation", "refusal"),
    [
        ("H100", {}, None),
        ("A100", {}, "head_dim 512 on a A100"),
        ("H100", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "over an fp8 KV cache on"),
    ],
)
def test_gpus_without_a_body_for_head_dim_512(
    gpu: str, quantisation: dict[str, object], refusal: str | None
) -> None:
    config = read_shapes()["google/gemma-4-26B-A4B"].config["text_config"]
    time = StepTime.of_model({**config, "quantization_config": quantisation}, GPUS[gpu])
    assert {layer.refusal for layer in time.layers if layer.window} == {None}
    (found,) = {layer.refusal for layer in time.layers if not layer.window}
    assert found is None if refusal is None else refusal in str(found)


def test_windows_of_a_recorded_server_are_predicted() -> None:
    """FA3 reads the shared part of a window from the L2 cache."""
    data = recorded("h100/hybrid-models.json")
    (case,) = (c for c in data["cases"] if (c["model"], c["case"]) == ("gemma-3-12b", "shared"))
    time = StepTime.of_model(data["models"]["gemma-3-12b"]["config"], GPUS["H100"])
    layer, *_ = (each for each in time.layers if each.kind == WINDOW)
    requests, own = case["batch"], case["private"] + case["tokens"] / 2
    once, kv_tokens = case["prefix"] + requests * own, requests * (case["prefix"] + own)
    reads = Reads(once, cached=kv_tokens - once).in_windows(requests, kv_tokens, layer.window or 0)
    assert reads.tokens == pytest.approx(requests * 1024)
    kernels = case["step_us"]["pat"]["kernels"]  # pat left these layers to FA3 then
    us = [total / count for name, (total, count) in kernels.items() if "FlashAttnFwd" in name]
    assert 1e6 * time.attention(layer, reads) == pytest.approx(sum(us), rel=0.15)


@pytest.mark.parametrize("private", [0, 100, 1500])
def test_reads_within_windows(private: int) -> None:
    """Only the part of the prefix within the windows is shared; private tokens fill the rest."""
    requests, window = 16, 1024
    kv_tokens, once = requests * (8192 + private), 8192 + requests * private
    alone = Reads(once, 10.0, kv_tokens - once - 10).in_windows(requests, kv_tokens, window)
    shared = Reads(once).in_windows(requests, kv_tokens, window)
    left = max(0, window - private)
    assert alone.tokens == pytest.approx(requests * window)
    assert alone.once == shared.once == pytest.approx(left + requests * min(private, window))
    assert shared.cached == requests * min(64, left)
    within = Reads(300.0, cached=20.0)
    assert within.in_windows(requests, 500, window) == within
